"""The Ray that a run uses: one that it starts on this machine, a cluster it joins, or one found running."""

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import ray
from ray._private.grpc_utils import init_grpc_channel

from actors.remote import asked
from contracts.errors import ConfigError, DeadlineError
from pipeline.config import RoleSettings, RunnerSettings

ROLES = ("rollout", "teacher", "trainer")
ANSWER_SECONDS = 5.0


@dataclass
class RaySession:
    """This process's connection to Ray.

    Attributes:
      opened: whether it was opened here; only then is it closed here. Closing ends a Ray that was started for this run
        and leaves a cluster that was joined.
      fixed: whether the cluster is one machine that will not grow.
    """

    opened: bool
    fixed: bool

    def close(self) -> None:
        if self.opened:
            ray.shutdown()
            self.opened = False


def start_ray(runner: RunnerSettings) -> RaySession:
    """Start or join the Ray that ``runner`` describes.

    Call it before JAX's backend comes up where possible: Ray forks, and JAX warns of a fork after its threads exist.

    Raises:
      ConfigError: an address of another kind, or this process is connected elsewhere.
      DeadlineError: no Ray head answers at the address.
    """
    # A call's error is reported through its receipt, so nobody asks for the result that it did not have; Ray would print
    # every such error, with its traceback, as one that was forgotten.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if ray.is_initialized():
        return _joined_already(runner)
    # A stale address here would override what the config says.
    inherited = os.environ.pop("RAY_ADDRESS", None)
    if runner.address is None:
        # Logical CPUs: as many as the roles ask for, whatever the machine has. The object store keeps Ray's default of
        # 30 % of memory; pages are taken only as they are written.
        cpus = max(math.ceil(total_asked(runner).get("CPU", 0.0)), os.cpu_count() or 1)
        _init(address="local", num_cpus=cpus, include_dashboard=False)
        return RaySession(opened=True, fixed=True)
    if "://" in runner.address:
        raise ConfigError(
            f"runner.address {runner.address!r}: a run drives its workers from inside the cluster. Give host:port of the "
            "head, from one of the cluster's nodes, or submit the run as a Ray job with address auto."
        )
    address = inherited if runner.address == "auto" and inherited else runner.address
    if address != "auto":
        check_answers(address)
    _init(address=address)
    return RaySession(opened=True, fixed=False)


def _init(**arguments) -> None:
    ray.init(logging_level=logging.WARNING, log_to_driver=False, **arguments)


def _joined_already(runner: RunnerSettings) -> RaySession:
    here = ray.get_runtime_context().gcs_address
    if runner.address not in (None, "auto", here):
        raise ConfigError(f"runner.address is {runner.address}, but this process is already connected to Ray at {here}")
    return RaySession(opened=False, fixed=False)


def check_answers(address: str, seconds: float = ANSWER_SECONDS) -> None:
    """Refuse an address where nothing answers; Ray itself would retry for two minutes, then end this process.

    Raises:
      DeadlineError: naming the address.
    """
    channel: Any = init_grpc_channel(address)
    try:
        grpc.channel_ready_future(channel).result(timeout=seconds)
    except grpc.FutureTimeoutError:
        raise DeadlineError(
            f"no Ray head answered at runner.address {address} within {seconds:g} s. Check host and port (6379 unless "
            "told otherwise) and that the cluster runs; without an address, a Ray is started for the run."
        ) from None
    finally:
        channel.close()


def settings_of(runner: RunnerSettings, role: str) -> RoleSettings:
    """The settings of one role."""
    return {"rollout": runner.rollout, "teacher": runner.teacher, "trainer": runner.trainer}[role]


def total_asked(runner: RunnerSettings) -> dict[str, float]:
    """What all actors of the run reserve together."""
    total: dict[str, float] = {}
    for role in ROLES:
        settings = settings_of(runner, role)
        for name, amount in asked(settings).items():
            total[name] = total.get(name, 0.0) + settings.count * amount
    return total


def shortage(role: str, settings: RoleSettings) -> str:
    """What a worker of a role asks for and what there is, for the message of a worker that does not start."""
    return (
        f"each {role} worker asks for {_amounts(asked(settings))}; the cluster has {_amounts(ray.cluster_resources())}, "
        f"of which {_amounts(ray.available_resources())} are free. Ask for less in runner.{role}, or add nodes."
    )


def check_fits(runner: RunnerSettings) -> None:
    """Refuse a request that one machine, which will not grow, cannot meet.

    Raises:
      ConfigError: showing what is asked for and what there is.
    """
    total, there = total_asked(runner), ray.cluster_resources()
    short = {name: amount for name, amount in total.items() if amount > there.get(name, 0.0)}
    if short:
        raise ConfigError(
            f"the roles together ask for {_amounts(total)}; this machine has {_amounts(there)}, too little of "
            f"{', '.join(sorted(short))}. Ask for less under runner, or name a cluster in runner.address."
        )


def _amounts(resources: Mapping[str, float]) -> str:
    """Resources for people: no byte counts, no node names."""
    shown = {
        name: amount for name, amount in resources.items() if "memory" not in name and not name.startswith("node:")
    }
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(shown.items())) or "nothing"
