"""Fakes, shipped so that anyone can test against the roles: workers without a model, a recorder that is a list.

The fake student is four numbers. What it writes depends on its weights, the seed and the prompts' stream indices; what
it learns depends on what it wrote, on the teacher, and on the order of addition. So its final weights betray any item
that was lost, doubled, swapped, or written by other weights than the schedule's, as a model's would, at no cost.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from contracts.errors import CheckpointError, VersionNotHeldError
from contracts.freshness import FreshnessPolicy, TeacherIdentity, check_targets
from contracts.roles import Tree
from contracts.tokens import DiffusionTokenBatch
from contracts.weights import WeightVersion, fingerprint
from contracts.wire import decode, decode_tree, encode, encode_tree
from contracts.work import (
    CleanSequence,
    Evaluation,
    EvaluationRequest,
    ItemReport,
    Provenance,
    Rollout,
    RolloutRequest,
    SamplerSettings,
    StepReport,
    TeacherTargets,
)

RUN_ID = "fake"
SAMPLER = SamplerSettings("threshold", 0.9)
TEACHER = TeacherIdentity("0123456789abcdef", "dense", 1.0)
SLOTS, VOCABULARY = 3, 5


@dataclass
class ListRecorder:
    """A `Recorder` that keeps everything.

    Attributes:
      events: each event's fields, with its ``kind``.
      values: (step, metrics) pairs.
      written: (step, samples) pairs.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    values: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    written: list[tuple[int, list[Any]]] = field(default_factory=list)

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.values.append((step, dict(values)))

    def samples(self, step: int, samples: Sequence[Any]) -> None:
        self.written.append((step, list(samples)))

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


def fake_weights() -> dict[str, np.ndarray]:
    """The fake student before its first update."""
    return {"weights": np.array([0.5, -1.25, 3.0, 1e-3], np.float32)}


def fake_version(step: int, weights: Mapping[str, np.ndarray], run_id: str = RUN_ID) -> WeightVersion:
    return WeightVersion(run_id, step, "", fingerprint(weights))


def fake_request(step: int, item: int, version: WeightVersion, *, rows: int = 2, items: int = 8) -> RolloutRequest:
    """The request for micro-batch ``item`` of ``step``, of prompts at the stream's next ``rows`` places."""
    first = (step * items + item) * rows
    return RolloutRequest(
        run_id=version.run_id,
        step=step,
        item=item,
        version=version,
        seed=7,
        stream_indices_B=np.arange(first, first + rows),
        prompt_ids_BP=np.ones((rows, 1), np.int32),
        prompt_lengths_B=np.ones((rows,), np.int32),
    )


class FakeRolloutWorker:
    """Writes tokens that are a hash of its weights, the seed, the step and each row's stream index."""

    def __init__(self, *, name: str = "rollout-0"):
        self.name = name
        self.loads: list[tuple[int, int]] = []
        self._intent = -1
        self._version: WeightVersion | None = None
        self._weights: dict[str, np.ndarray] = {}

    def load(self, version: WeightVersion, tree: Tree, intent: int) -> WeightVersion:
        if self._version is None or intent >= self._intent:
            self.loads.append((intent, version.step))
            self._intent, self._weights = intent, decode_tree(tree)
            self._version = replace(version, fingerprint=fingerprint(self._weights))
        return self._version

    def generate(self, request: RolloutRequest) -> Rollout:
        held = self._holding(request.version)
        heard = b"".join(self._weights[name].tobytes() for name in sorted(self._weights))
        tokens_BL = np.stack([_hashed(heard, request.seed, request.step, row) for row in request.stream_indices_B])
        return Rollout(
            student_batch=DiffusionTokenBatch(
                model_inputs={"clean_tokens": tokens_BL},
                target_ids=tokens_BL,
                loss_weights=np.ones(tokens_BL.shape, np.float32),
            ),
            clean=CleanSequence(tokens_BL, np.ones(tokens_BL.shape, bool), request.prompt_lengths_B),
            statistics={"completion_length": (float(tokens_BL.size), float(len(tokens_BL)))},
            provenance=Provenance(
                run_id=request.run_id,
                step=request.step,
                item=request.item,
                version=held,
                stream_indices=tuple(int(index) for index in request.stream_indices_B),
                sampler=SAMPLER,
                worker=self.name,
            ),
        ).seal()

    def evaluate(self, request: EvaluationRequest) -> Evaluation:
        held = self._holding(request.version)
        return Evaluation(request.name, held, {"accuracy": (0.0, float(len(request.prompts)))}, ())

    def _holding(self, version: WeightVersion) -> WeightVersion:
        if self._version != version:
            raise VersionNotHeldError(f"{self.name} was asked to write with {version}; it holds {self._version}")
        return version


class FakeTeacher:
    """Scores tokens with logits that are a function of them."""

    def __init__(self, *, name: str = "teacher-0"):
        self.name = name

    def load(self, tree: Tree) -> str:
        return TEACHER.fingerprint

    def score(self, rollout: Rollout) -> TeacherTargets:
        tokens_BL = rollout.student_batch.target_ids.astype(np.float32)
        scale_V = np.arange(1, VOCABULARY + 1, dtype=np.float32)
        logits_BLV = np.sin(tokens_BL[..., None] * scale_V[None, None])
        return TeacherTargets(
            rollout_digest=rollout.digest,
            teacher_fingerprint=TEACHER.fingerprint,
            kind="dense",
            temperature=TEACHER.temperature,
            arrays={"logits": encode(logits_BLV)},
        )


class FakeTrainer:
    """Checks freshness as the real one does, then moves its four numbers by what it was shown, in float32.

    Attributes:
      skips: steps whose window counts as one of zero weight: closed, without an update.
      versions: step → version that later steps may be written by.
    """

    def __init__(self, policy: FreshnessPolicy, skips: frozenset[int] = frozenset(), *, name: str = "trainer-0"):
        self.name = name
        self.policy = policy
        self.skips = skips
        self.step, self.next_item, self.updates = 0, 0, 0
        self.weights = fake_weights()
        self.versions = {0: fake_version(0, self.weights, policy.run_id)}
        self._trees = {0: encode_tree(self.weights)}
        self._saved: tuple[Any, ...] | None = None
        self._sum = np.zeros((4,), np.float32)

    def load(self, tree: Tree) -> WeightVersion:
        self.weights = {name: array.copy() for name, array in decode_tree(tree).items()}
        self.versions = {0: fake_version(0, self.weights, self.policy.run_id)}
        self._trees = {0: encode_tree(self.weights)}
        return self.versions[0]

    def accumulate(self, rollout: Rollout, targets: TeacherTargets) -> ItemReport:
        seen = rollout.provenance
        self.policy.check_rollout(seen, step=self.step, next_item=self.next_item, published=self.versions)
        check_targets(rollout, targets, TEACHER)
        tokens_BL = rollout.student_batch.target_ids
        moved = np.float32(np.sum(decode(targets.arrays["logits"]), dtype=np.float32))
        self._sum = np.sin(self._sum + np.resize(tokens_BL.astype(np.float32), (4,)) * moved)
        self.next_item += 1
        rows = len(tokens_BL)
        return ItemReport(
            seen.step, seen.item, rows, rows, seen.version, seen.worker, rollout.statistics, (), seen.stream_indices
        )

    def update(self) -> StepReport:
        closed, skipped = self.step, self.step in self.skips
        if not skipped:
            self.weights = {"weights": self.weights["weights"] + np.float32(0.1) * self._sum}
            self.updates += 1
        self._sum = np.zeros((4,), np.float32)
        self.step, self.next_item = closed + 1, 0
        version = fake_version(self.step, self.weights, self.policy.run_id)
        kept = self.policy.steps_kept(self.step)
        self.versions = {step: old for step, old in (self.versions | {self.step: version}).items() if step in kept}
        self._trees = {step: old for step, old in self._trees.items() if step in kept}
        self._trees[self.step] = encode_tree(self.weights)
        metrics = {"loss": float(self.weights["weights"][0])}
        return StepReport(closed, version, metrics, "zero weight" if skipped else "", self.updates)

    def publish(self) -> Tree:
        return self._trees[self.step]

    def published(self, step: int) -> Tree:
        return self._trees[step]

    def save(self) -> int:
        self._saved = (self.step, self.updates, self.weights, self.versions, self._trees)
        return self.step

    def restore(self) -> list[WeightVersion]:
        if self._saved is None:
            raise CheckpointError(f"{self.name} has saved nothing")
        self.step, self.updates, self.weights, self.versions, self._trees = self._saved
        self.next_item, self._sum = 0, np.zeros((4,), np.float32)
        return [self.versions[step] for step in sorted(self.versions)]


def _hashed(weights: bytes, seed: int, step: int, row: Any) -> np.ndarray:
    digest = hashlib.sha256(weights + f"|{seed}|{step}|{int(row)}".encode()).digest()
    return np.frombuffer(digest[:SLOTS], np.uint8).astype(np.int32) % VOCABULARY
