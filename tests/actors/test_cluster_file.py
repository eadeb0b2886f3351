"""The cluster file at the root, checked offline: `ray up` has no dry run, and accepts more than it should."""

import copy
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from pipeline.config import RunnerSettings

ROOT = Path(__file__).parents[2]
CLUSTER = yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())


def test_ray_accepts_the_cluster_file():
    prepared = prepare_config(copy.deepcopy(CLUSTER))
    validate_config(prepared)
    assert set(prepared["available_node_types"]) == {"head", "worker"}, "nothing of Ray's defaults remains"


def test_ray_refuses_a_cluster_file_with_an_unknown_key():
    with pytest.raises(Exception, match="min_worker"):
        validate_config(prepare_config({**copy.deepcopy(CLUSTER), "min_worker": 1}))


def test_bounds_that_ray_does_not_check_are_in_order():
    assert CLUSTER["head_node_type"] in CLUSTER["available_node_types"]
    for name, kind in CLUSTER["available_node_types"].items():
        assert 0 <= kind["min_workers"] <= kind["max_workers"] <= CLUSTER["max_workers"], name
    assert CLUSTER["available_node_types"][CLUSTER["head_node_type"]]["max_workers"] == 0, "one head"


def test_some_node_type_has_what_every_role_asks_for_by_default():
    runner = RunnerSettings()
    kinds = [kind["resources"] for kind in CLUSTER["available_node_types"].values()]
    for role in (runner.rollout, runner.teacher, runner.trainer):
        wanted = {"CPU": role.num_cpus, **role.resources}
        assert any(all(kind.get(name, 0) >= amount for name, amount in wanted.items()) for kind in kinds)


def test_one_ray_version_is_pinned_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pinned,) = [line for line in project["dependencies"] if line.startswith("ray")]
    locked = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line.startswith("ray==")]
    assert pinned == "ray[default]==2.60.0" and locked == ["ray==2.60.0"]
    assert set(re.findall(r"ray:(\d+\.\d+\.\d+)", yaml.safe_dump(CLUSTER))) == {"2.60.0"}


@pytest.mark.parametrize("commands", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_every_node_starts_with_the_token(commands):
    (start,) = [command for command in CLUSTER[commands] if "ray start" in command]
    assert "RAY_AUTH_MODE=token" in start
    assert CLUSTER["file_mounts"]["/home/ray/.ray/auth_token"] == "~/.ray/auth_token"


def test_the_dashboard_listens_on_loopback_only():
    (start,) = [command for command in CLUSTER["head_start_ray_commands"] if "ray start" in command]
    assert "--dashboard-host=127.0.0.1" in start
