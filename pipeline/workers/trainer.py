"""The student, learning: refuses what is not admissible, at the moment of use, before anything touches a sum."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from contracts.errors import ConfigError, OutOfOrderBatchError, WeightsError
from contracts.freshness import check_targets
from contracts.roles import Tree
from contracts.teacher_targets import check_teacher_logits
from contracts.weights import WeightVersion, fingerprint
from contracts.wire import decode, decode_tree, encode_tree
from contracts.work import ItemReport, PreparedBatch, Rollout, StepReport, TeacherTargets
from pipeline.config import TrainingSettings
from pipeline.models.decoder import Decoder
from pipeline.models.tree import parameters, with_parameters
from pipeline.objectives.on_policy import configure_student_distillation
from pipeline.training.checkpoint import CheckpointStore
from pipeline.training.config import TrainingConfig
from pipeline.training.sharding import training_mesh
from pipeline.training.state import Progress, TrainerState
from pipeline.training.trainer import PeftTrainer
from pipeline.workers.parts import Parts, abstract_decoder


class TrainerWorker:
    """Holds the student being trained, the published versions, and the rule of what may be trained on.

    It trains on every device of its process, the rows of a micro-batch split over them.

    Raises:
      ConfigError: the rows do not divide over the devices.
    """

    def __init__(self, parts: Parts, checkpoints: str, *, name: str):
        self.name = name
        self._parts = parts
        self._mesh = devices_mesh(parts.config.training.rows)
        self._store = CheckpointStore(checkpoints)
        self._peft: PeftTrainer | None = None
        self._model: Decoder | None = None
        self._step = 0
        self._next_item = 0
        self._published: dict[int, WeightVersion] = {}
        self._trees: dict[int, Tree] = {}

    def load(self, tree: Tree) -> WeightVersion:
        """Start from these weights, as version 0; returns it with the fingerprint computed over the arrays held."""
        # A copy: device arrays would alias the object store's memory, and the trainer donates its buffers.
        weights = {name: jnp.array(array, copy=True) for name, array in decode_tree(tree).items()}
        self._model = with_parameters(abstract_decoder(self._parts.student), weights)
        training = self._parts.config.training
        self._peft = PeftTrainer(
            self._model,
            make_optimizer(training),
            TrainingConfig(
                gradient_accumulation_steps=training.micro_batches,
                max_steps=training.steps,
                non_finite=training.non_finite,
                mesh=self._mesh,
            ),
        )
        config = self._parts.config
        visited = config.states.kind == "trajectory"
        configure_student_distillation(
            self._peft, self._parts.layout, config.objective, config.rollout.temperature if visited else None
        )
        self._step = self._next_item = 0
        self._published, self._trees = {}, {}
        return self._publish_version()

    def accumulate(self, rollout: Rollout, targets: TeacherTargets) -> ItemReport:
        """Add one micro-batch to the open window.

        Raises:
          FreshnessError: one of its kinds; the accumulator is bit for bit what it was.
          BatchTypeError, BatchValueError: the joined batch breaks its contract, or the teacher's logits are not finite.
        """
        provenance = rollout.provenance
        self._parts.policy.check_rollout(
            provenance, step=self._step, next_item=self._next_item, published=self._published
        )
        check_targets(rollout, targets, self._parts.teacher_identity)
        batch = PreparedBatch(rollout, targets).distillation_batch()
        if self._parts.config.objective.soft:
            check_teacher_logits(batch.student_batch, batch.teacher_logits)
        self._trainer().accumulate(batch)
        self._next_item += 1
        weights_BW = rollout.student_batch.loss_weights
        return ItemReport(
            step=provenance.step,
            item=provenance.item,
            rows=weights_BW.shape[0],
            rows_weighted=int(np.any(weights_BW != 0, axis=1).sum()),
            version=provenance.version,
            worker=provenance.worker,
            statistics=rollout.statistics,
            samples=rollout.samples,
            stream_indices=provenance.stream_indices,
        )

    def update(self) -> StepReport:
        """Close the window: one division, one optimiser step, one more version.

        Raises:
          OutOfOrderBatchError: the window has fewer items than the run's micro-batches.
          NonFiniteError: the loss or a gradient is not finite, and the run says `raise`.
        """
        wanted = self._parts.config.training.micro_batches
        if self._next_item != wanted:
            raise OutOfOrderBatchError(
                f"step {self._step} cannot be closed: {self._next_item} of its {wanted} items were accumulated"
            )
        report = self._trainer().update()
        closed, self._step, self._next_item = self._step, self._step + 1, 0
        version = self._publish_version()
        return StepReport(
            step=closed, version=version, metrics=report.metrics, skipped=report.skipped, updates=report.train_steps
        )

    def publish(self) -> Tree:
        """The weights of the latest version, in wire form."""
        return self._trees[self._step]

    def published(self, step: int) -> Tree:
        """The weights of a version that is still kept, in wire form."""
        return self._trees[step]

    def save(self) -> int:
        """Write a checkpoint of the closed windows; returns their number.

        It holds the trainer's state and every published tree that a later step may still be written by.
        """
        if self._next_item:
            raise OutOfOrderBatchError(f"step {self._step} is open: save between windows")
        # Written before this returns, so before the next update consumes its buffers: no copy is needed.
        state = self._trainer().live_state()
        trees = {f"published_{step}": decode_tree(tree) for step, tree in self._trees.items()}
        self._store.save(
            self._step,
            {**state.trees, **trees},
            {
                "contract": self._contract(),
                "progress": state.progress.as_json(),
                "published": {str(step): vars(version) for step, version in self._published.items()},
            },
        )
        return self._step

    def restore(self) -> list[WeightVersion]:
        """Go to the newest checkpoint; returns the versions that later steps may be written by, in order.

        Raises:
          CheckpointError: there is none, it is damaged, or another run made it; each differing field is shown.
        """
        metadata = self._store.metadata()
        state = self._trainer().live_state()
        shapes = {name: np.zeros(wire.shape, decode(wire).dtype) for name, wire in self.publish().items()}
        published = {int(step): WeightVersion(**fields) for step, fields in metadata["published"].items()}
        abstract = {**state.trees, **{f"published_{step}": shapes for step in published}}
        checkpoint = self._store.restore(abstract, expected_metadata={"contract": self._contract()})
        trees = {name: checkpoint.trees[name] for name in state.trees}
        self._trainer().restore(TrainerState(trees, Progress.from_json(metadata["progress"])))
        self._step, self._next_item = checkpoint.step, 0
        self._published = published
        self._trees = {step: encode_tree(checkpoint.trees[f"published_{step}"]) for step in published}
        return [published[step] for step in sorted(published)]

    def accumulator_digest(self) -> str:
        """Digest of the open window's sums: equal before and after a refusal."""
        return self._trainer().accumulator_digest()

    def _trainer(self) -> PeftTrainer:
        if self._peft is None:
            raise WeightsError(f"{self.name} has no weights yet; load them first")
        return self._peft

    def _contract(self) -> dict[str, str]:
        """What must agree when a checkpoint is restored."""
        return {
            "run_id": self._parts.run_id,
            "config": self._parts.config.digest(),
            "teacher": self._parts.teacher_fingerprint,
            "tokenizer": self._parts.tokenizer.digest,
            "prompts": self._parts.prompts_digest,
            "stop_ids": ",".join(map(str, self._parts.stop_ids)),
        }

    def _publish_version(self) -> WeightVersion:
        assert self._model is not None
        weights = parameters(self._model)
        version = WeightVersion(self._parts.run_id, self._step, "", fingerprint(weights))
        kept = self._parts.policy.steps_kept(self._step) | {self._step}
        self._published = {step: old for step, old in self._published.items() if step in kept} | {self._step: version}
        # Copies: the next update donates these buffers.
        tree = encode_tree({name: np.array(jax.device_get(array)) for name, array in weights.items()})
        self._trees = {step: old for step, old in self._trees.items() if step in kept} | {self._step: tree}
        return version


def devices_mesh(rows: int) -> Mesh | None:
    """Every device of this process on the data axis; None where there is one.

    Raises:
      ConfigError: ``rows`` do not divide over them.
    """
    devices = jax.local_devices()
    if len(devices) == 1:
        return None
    if rows % len(devices):
        raise ConfigError(
            f"training.rows is {rows} and the trainer has {len(devices)} devices, over which the rows of a micro-batch "
            "are split: make it a multiple, or give the trainer fewer devices"
        )
    return training_mesh(devices)


def make_optimizer(training: TrainingSettings) -> optax.GradientTransformation:
    """Adam at the configured rate, after clipping by global norm if asked."""
    rate: float | optax.Schedule = training.learning_rate
    if training.schedule == "cosine":
        rate = optax.cosine_decay_schedule(training.learning_rate, training.steps, alpha=0.1)
    adam = optax.adam(rate)
    if training.max_grad_norm is None:
        return adam
    return optax.chain(optax.clip_by_global_norm(training.max_grad_norm), adam)
