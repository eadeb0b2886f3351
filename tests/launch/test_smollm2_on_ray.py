"""A real pretrained model through the whole pipeline on Ray: two short steps of recipe `smollm2`."""

import json
import math
import os
import subprocess
import sys

import pytest


@pytest.mark.timeout(900)
def test_smollm2_distils_two_steps_of_four_prompts_of_thirty_two_tokens_through_ray_actors(tmp_path):
    command = [sys.executable, "-m", "launch.cli", "run", "smollm2", "--run.folder", str(tmp_path), "--runner", "ray"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=840, env=os.environ | {"RAY_AUTH_MODE": "disabled"}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    folder = tmp_path / "smollm2"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["rows_trained"], summary["refused"]) == (2, 8, {})
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    for step in steps:
        assert math.isfinite(step["loss"])
        assert step["grad_norm"] > 0
        assert step["distill/log_prob_gap"] < 1e-3
        assert step["lag"] == 0
    published = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    versions = [event["version"] for event in published if event["kind"] == "publish"]
    assert len(set(versions)) == 3
    assert versions[-1].endswith(summary["weights_fingerprint"])
