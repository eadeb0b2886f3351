"""Every batch that a trainer must refuse, written, scored and sent by real actors, and caught in this process.

The window under test is step 1, after item 0: written by version 1, with items 1 to 3 still to come.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from ray_fakes import tiny_config

from actors.runner import RayRuntime
from contracts.errors import (
    CorruptBatchError,
    DuplicateBatchError,
    FingerprintMismatchError,
    ForeignBatchError,
    FreshnessError,
    FutureBatchError,
    OutOfOrderBatchError,
    StaleBatchError,
    TargetsMismatchError,
)
from contracts.work import RolloutRequest
from pipeline.build import Preparation, prepare
from pipeline.groundwork import lay_groundwork
from pipeline.inline import InlineRuntime
from pipeline.loop import Loop
from pipeline.testing import ListRecorder

ITEMS = 4
Pair = tuple[Any, Any]


@dataclass
class Stage:
    """Real actors, the versions that they were given, and the batches that they made, by what is wrong with them."""

    runtime: RayRuntime
    preparation: Preparation
    student: Any
    batches: dict[str, Pair]

    def wait(self, handle: Any) -> Any:
        self.runtime.waiter.wait([handle], 120.0)
        return handle

    def make(self, request: RolloutRequest) -> Pair:
        rollout = self.wait(self.runtime.rollout.submit("generate", request))
        return rollout, self.wait(self.runtime.teacher.submit("score", rollout))

    def ask_trainer(self, method: str, *arguments: Any) -> Any:
        return self.wait(self.runtime.trainer.submit(method, *arguments)).result()


@pytest.fixture(scope="module")
def stage(ray_session, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("refusals")
    config = tiny_config(folder, training={"steps": 2, "rows": 2, "micro_batches": ITEMS})
    preparation = prepare(lay_groundwork(config), folder, lambda *done, **numbers: None)
    runtime = RayRuntime(preparation.specs, config, ListRecorder())
    student = runtime.put("student weights", preparation.weights.student)
    stage = Stage(runtime, preparation, student, {})
    stage.wait(runtime.teacher.prepare("load", runtime.put("teacher weights", preparation.weights.teacher))[0])
    yield stage
    runtime.close()


@pytest.fixture(scope="module")
def window(stage):
    """Opens step 1, makes every batch, good and bad, and accumulates item 0."""
    request, rollout_pool = stage.preparation.request, stage.runtime.rollout
    v0 = stage.wait(stage.runtime.trainer.prepare("load", stage.student)[0]).result()
    rollout_pool.publish(v0, stage.student)
    for item in range(ITEMS):
        stage.ask_trainer("accumulate", *stage.make(request(0, item, v0)))
    v1 = stage.ask_trainer("update").version
    updated = stage.wait(stage.runtime.trainer.submit("publish"))
    rollout_pool.publish(v1, updated)
    good = [stage.make(request(1, item, v1)) for item in range(ITEMS)]

    def written_by(version, tree, wanted: RolloutRequest) -> Pair:
        """A batch whose writer was given ``tree`` under the name ``version``."""
        rollout_pool.publish(version, tree)
        pair = stage.make(replace(wanted, version=version, run_id=version.run_id))
        rollout_pool.publish(v1, updated)
        return pair

    wanted = request(1, 1, v1)
    (rollout, targets), (_, of_another) = good[1], good[3]
    held, scored = rollout.result(), targets.result()
    shifted = replace(held, clean=replace(held.clean, tokens_BL=held.clean.tokens_BL + 1))
    put = stage.runtime.put
    stage.batches |= {f"item {item}": pair for item, pair in enumerate(good)} | {
        "by the previous version": written_by(v0, stage.student, wanted),
        "by a future version": written_by(replace(v1, step=2), updated, wanted),
        "for a future step": stage.make(request(2, 0, v1)),
        "by another run": written_by(replace(v1, run_id="another-run"), updated, wanted),
        "by other weights of the right step": written_by(replace(v0, step=1), stage.student, wanted),
        "with another rollout's targets": (rollout, of_another),
        "with targets at another temperature": (rollout, put("targets", replace(scored, temperature=2.0))),
        "with another teacher's targets": (rollout, put("targets", replace(scored, teacher_fingerprint="0" * 16))),
        "changed on the way": (put("rollout", shifted), targets),
    }
    stage.ask_trainer("accumulate", *good[0])
    return stage


REFUSALS = [
    (
        "by the previous version",
        StaleBatchError,
        r"written by weights of step 0 \(lag 1\); step 1 must be written by step 1",
    ),
    ("by a future version", FutureBatchError, "written by weights of step 2; step 1 must be written by step 1"),
    ("for a future step", FutureBatchError, "is for step 2; the open step is 1"),
    ("by another run", ForeignBatchError, "written by run 'another-run' .* belongs to run 'tiny-"),
    ("by other weights of the right step", FingerprintMismatchError, r"its weights were tiny-.*; published were tiny-"),
    ("item 0", DuplicateBatchError, "is for step 1, item 0; .* everything before step 1, item 1"),
    ("item 2", OutOfOrderBatchError, "is item 2 of step 1; item 1 is next"),
    ("with another rollout's targets", TargetsMismatchError, r"has digest \w+; the targets were made for \w+"),
    ("with targets at another temperature", TargetsMismatchError, "temperature=2.0.* this run's teacher is .*1.0"),
    ("with another teacher's targets", TargetsMismatchError, "fingerprint='0{16}'.* this run's teacher is"),
    ("changed on the way", CorruptBatchError, r"sealed with digest \w+, its content now has \w+"),
]


@pytest.mark.parametrize(("batch", "error", "both_sides"), REFUSALS, ids=[name for name, *_ in REFUSALS])
def test_a_refused_batch_is_a_typed_error_here_and_leaves_the_sum_bit_for_bit(window, batch, error, both_sides):
    before = window.ask_trainer("accumulator_digest")
    with pytest.raises(error, match=both_sides) as caught:
        window.ask_trainer("accumulate", *window.batches[batch])
    assert type(caught.value) is error and isinstance(caught.value, FreshnessError)
    assert window.ask_trainer("accumulator_digest") == before


def test_after_every_refusal_the_next_item_is_taken(window):
    before = window.ask_trainer("accumulator_digest")
    report = window.ask_trainer("accumulate", *window.batches["item 1"])
    assert (report.step, report.item) == (1, 1)
    assert window.ask_trainer("accumulator_digest") != before, "the digest tells sums apart"


class Intercepted:
    """A trainer's pool to which somebody else sends batches first, in the place of those that the loop sends."""

    def __init__(self, pool: Any, instead: dict[int, list[Pair]]):
        self._pool = pool
        self._instead = instead
        self._taken = 0

    def submit(self, method: str, *arguments: Any) -> Any:
        if method == "accumulate" and self._instead.get(self._taken):
            return self._pool.submit(method, *self._instead[self._taken].pop(0))
        self._taken += method == "accumulate"
        return self._pool.submit(method, *arguments)


@dataclass
class Tampered:
    runtime: RayRuntime
    trainer: Intercepted

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)


def run_loop(preparation: Preparation, runtime: Any, student: Any, version: Any) -> tuple[Any, ListRecorder]:
    recorder = ListRecorder()
    runtime.rollout.publish(version, student)
    loop = Loop(preparation.request, preparation.parts.policy, runtime, recorder, version, 2, ITEMS, 120.0)
    return loop.run(), recorder


def test_the_loop_counts_refusals_asks_again_and_ends_with_the_weights_of_an_undisturbed_run(window):
    plan = {
        4: ["by the previous version", "item 2"],
        5: ["by a future version", "item 0"],
        6: ["by another run", "by other weights of the right step"],
        7: ["with another rollout's targets"],
    }
    window.batches["with another rollout's targets"] = (window.batches["item 3"][0], window.batches["item 2"][1])
    instead = {taken: [window.batches[name] for name in names] for taken, names in plan.items()}
    tampered = Tampered(window.runtime, Intercepted(window.runtime.trainer, instead))
    version = window.wait(window.runtime.trainer.prepare("load", window.student)[0]).result()
    final, recorder = run_loop(window.preparation, tampered, window.student, version)

    inline = InlineRuntime(window.preparation.specs, window.preparation.ground.config)
    teacher = inline.put("teacher weights", window.preparation.weights.teacher)
    student = inline.put("student weights", window.preparation.weights.student)
    inline.waiter.wait(inline.teacher.prepare("load", teacher), 60.0)
    start = inline.trainer.prepare("load", student)
    inline.waiter.wait(start, 60.0)
    undisturbed, _ = run_loop(window.preparation, inline, student, start[0].result())

    refused = [(event["step"], event["item"], event["reason"]) for event in recorder.of_kind("refuse")]
    assert refused == [
        (1, 0, "stale"),
        (1, 0, "out_of_order"),
        (1, 1, "future"),
        (1, 1, "duplicate"),
        (1, 2, "foreign"),
        (1, 2, "fingerprint"),
        (1, 3, "targets"),
    ]
    assert all("Traceback" not in event["detail"] for event in recorder.of_kind("refuse"))
    assert final == undisturbed
