"""The whole run, in one process and on Ray with one and with three rollout actors: the same final weights, bit for bit.

At width 64 and batch 64 the sums come out alike under any split of the work over cores; here they would not.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
from ray_fakes import tiny_config

from actors.runner import RayRuntime
from pipeline.build import assemble, starting_weights
from pipeline.groundwork import lay_groundwork
from pipeline.inline import InlineRuntime
from pipeline.job import run_job, summarise
from pipeline.testing import ListRecorder

WIDE = {"width": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "mlp_width": 256}


@dataclass
class Finished:
    summary: dict
    writers: set[str]


@pytest.fixture(scope="module")
def run_on(ray_session, tmp_path_factory):
    """Runs the same config from the same starting weights on a given number of rollout actors; 0: in this process."""
    folder: Path = tmp_path_factory.mktemp("everywhere")

    def config(actors: int):
        training = {"steps": 2, "rows": 128, "micro_batches": 3, "max_lag": 1}
        rollout = {"rule": "static", "value": 2, "temperature": 1.0}
        return tiny_config(
            folder, model=WIDE, training=training, rollout=rollout, runner={"rollout": {"count": actors}}
        )

    ground = lay_groundwork(config(1))
    weights = starting_weights(ground, lambda *done, **numbers: None)

    def run(actors: int) -> Finished:
        own = folder / f"on-{actors}"
        own.mkdir()
        preparation, recorder = assemble(ground, weights, own), ListRecorder()
        if actors:
            runtime = RayRuntime(preparation.specs, config(actors), recorder)
        else:
            runtime = InlineRuntime(preparation.specs, config(1))
        try:
            outcome = run_job(preparation, runtime, recorder, own)
        finally:
            runtime.close()
        writers = {item["worker"] for event in recorder.of_kind("update") for item in event["items"]}
        return Finished(summarise(preparation, outcome), writers)

    return run


def test_the_final_weights_do_not_depend_on_where_and_on_how_many_workers_a_run_ran(run_on):
    inline, one, three = (run_on(actors) for actors in (0, 1, 3))
    assert three.writers == {"rollout-0", "rollout-1", "rollout-2"}, "the work was shared"
    fingerprints = {finished.summary["weights_fingerprint"] for finished in (inline, one, three)}
    assert len(fingerprints) == 1
    assert inline.summary["student_accuracy_after"] == three.summary["student_accuracy_after"]
    assert one.summary["rows_trained"] == 2 * 3 * 128
