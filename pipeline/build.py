"""From a config to everything a run starts from: the one builder, whatever will run it.

config ──▶ groundwork ──▶ teacher ──▶ conversion ──▶ warm start ──▶ Parts, weights, worker specs, requests
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from contracts.roles import Tree
from contracts.weights import WeightVersion, fingerprint
from contracts.wire import encode_tree
from contracts.work import Prompt, RolloutRequest
from pipeline.data.prompts import pad_prompts
from pipeline.groundwork import Groundwork
from pipeline.models.config import DecoderConfig
from pipeline.models.conversion import convert_to_block_diffusion
from pipeline.models.decoder import Decoder
from pipeline.models.tree import parameters, with_parameters
from pipeline.pretraining import train_on_corpus
from pipeline.teacher import (
    STUDENT_SEED,
    TeacherReport,
    fresh_decoder,
    obtain_teacher,
    pretrained_decoder,
    stream_seed,
)
from pipeline.workers.parts import Parts, abstract_decoder
from pipeline.workers.rollout import RolloutWorker
from pipeline.workers.spec import WorkerSpec, WorkerSpecs
from pipeline.workers.teacher import TeacherWorker
from pipeline.workers.trainer import TrainerWorker

Progress = Callable[..., None]
"""Called as ``progress(stage, done, total, **numbers)``; stages are ``teacher`` and ``warm_start``."""


@dataclass(frozen=True)
class StartingWeights:
    """What training starts from.

    Attributes:
      teacher_config, student_config: the decoders' shapes.
      teacher, converted, student: weights in wire form: the teacher's, the student's right after the conversion, and the
        student's at step 0; of a resumed run, which takes the student's from its checkpoint, ``student`` is ``converted``.
      teacher_fingerprint: of the teacher's.
      teacher_report: how good the teacher is.
      seconds: by stage.
    """

    teacher_config: DecoderConfig
    student_config: DecoderConfig
    teacher: Tree
    converted: Tree
    student: Tree
    teacher_fingerprint: str
    teacher_report: TeacherReport
    seconds: dict[str, float]


@dataclass(frozen=True)
class Preparation:
    """What a run starts from: everything that needed no weights, the weights, and how workers are made."""

    ground: Groundwork
    weights: StartingWeights
    parts: Parts
    specs: WorkerSpecs

    def request(self, step: int, item: int, version: WeightVersion) -> RolloutRequest:
        """The request for one micro-batch: a pure function of the run, the step and the item."""
        training = self.ground.config.training
        first = (step * training.micro_batches + item) * training.rows
        indices = range(first, first + training.rows)
        rows = [self.ground.source[index] for index in indices]
        prompt_ids_BP, prompt_lengths_B = pad_prompts(rows, self.ground.layout.prompt_length)
        return RolloutRequest(
            run_id=self.parts.run_id,
            step=step,
            item=item,
            version=version,
            seed=self.ground.config.run.seed,
            stream_indices_B=np.array(indices, np.int64),
            prompt_ids_BP=prompt_ids_BP,
            prompt_lengths_B=prompt_lengths_B,
            prompts=tuple(Prompt(row.text, row.fields) for row in rows),
        ).validate()


def prepare(ground: Groundwork, folder: Path, progress: Progress, *, resume: bool = False) -> Preparation:
    """Train or load, convert, warm up.

    Args:
      ground: settled and checked.
      folder: the run's folder, for prompts and checkpoints.
      progress: told of training steps.
      resume: the student's weights will come from a checkpoint in the folder; it isn't warmed up.

    Raises:
      LimbeckError: whatever `check_same_prompts` and `obtain_teacher` refuse.
    """
    if resume:
        ground.check_same_prompts(folder)
    ground.write_prompts(folder)
    return assemble(ground, starting_weights(ground, progress, resume=resume), folder)


def starting_weights(ground: Groundwork, progress: Progress, *, resume: bool = False) -> StartingWeights:
    """The teacher, its conversion, and the student after its warm start, which a resumed run skips."""
    seconds: dict[str, float] = {}
    started = time.perf_counter()
    teacher, report = obtain_teacher(ground, lambda done, total, **numbers: progress("teacher", done, total, **numbers))
    seconds["teacher"] = time.perf_counter() - started

    started = time.perf_counter()
    student = _convert(ground, teacher)
    converted = _wire(student)
    if not resume:
        _warm_up(ground, student, lambda done, total, **numbers: progress("warm_start", done, total, **numbers))
    seconds["warm_start"] = time.perf_counter() - started
    return StartingWeights(
        teacher_config=teacher.config,
        student_config=student.config,
        teacher=_wire(teacher),
        converted=converted,
        student=_wire(student),
        teacher_fingerprint=fingerprint(parameters(teacher)),
        teacher_report=report,
        seconds=seconds,
    )


def assemble(ground: Groundwork, weights: StartingWeights, folder: Path) -> Preparation:
    """Workers' specs around given weights; runs that differ only in training settings may share the weights."""
    config = ground.config
    parts = Parts(
        config=config,
        run_id=f"{config.run.name}-{config.digest(ground.source.digest)[:8]}",
        teacher=weights.teacher_config,
        student=weights.student_config,
        layout=ground.layout,
        stop_ids=ground.stop_ids,
        tokenizer=ground.tokenizer,
        task=ground.task,
        prompts_digest=ground.source.digest,
        teacher_fingerprint=weights.teacher_fingerprint,
    )
    specs = WorkerSpecs(
        rollout=WorkerSpec(RolloutWorker, (parts,)),
        teacher=WorkerSpec(TeacherWorker, (parts,)),
        trainer=WorkerSpec(TrainerWorker, (parts, str((folder / "checkpoints").absolute()))),
    )
    return Preparation(ground, weights, parts, specs)


def _convert(ground: Groundwork, teacher: Decoder) -> Decoder:
    settings = ground.config.student
    base = teacher
    if settings is not None and settings.source == "gguf":
        base = pretrained_decoder(settings)
    elif settings is not None:
        base = fresh_decoder(ground, STUDENT_SEED)
    if ground.mask is None:
        copies = {name: jnp.array(array, copy=True) for name, array in parameters(base).items()}
        return with_parameters(abstract_decoder(base.config), copies)
    return convert_to_block_diffusion(base, ground.mask)[0]


def _warm_up(ground: Groundwork, student: Decoder, progress: Callable[..., None]) -> None:
    settings = ground.config.warm_start
    if ground.warm_corpus is None:
        return
    train_on_corpus(
        student,
        ground.warm_corpus,
        ground.layout,
        settings,
        seed=stream_seed(ground.config.run.seed, STUDENT_SEED),
        min_noise=ground.config.states.min_noise,
        progress=progress,
    )


def _wire(model: Decoder) -> Tree:
    # Copies: training donates the model's buffers.
    return encode_tree({name: np.array(array) for name, array in parameters(model).items()})
