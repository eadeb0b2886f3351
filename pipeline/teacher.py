"""Where the teacher comes from: a model file, the cache, or training on the spot."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from contracts.errors import CheckpointError
from contracts.weights import fingerprint
from contracts.work import SamplerSettings
from pipeline.data.prompts import PromptRow
from pipeline.data.tasks import CorpusTask
from pipeline.diffusion.decoding import decode
from pipeline.diffusion.keys import evaluation_keys
from pipeline.groundwork import TRAIN, Groundwork, model_file
from pipeline.measures import distinct_right_answers, evenly_spaced, right_answers
from pipeline.models.decoder import Decoder
from pipeline.models.gguf import load_gguf
from pipeline.models.tree import parameters, with_parameters
from pipeline.pretraining import Corpus, causal_layout, train_on_corpus
from pipeline.workers.parts import abstract_decoder

TEACHER_SEED, STUDENT_SEED = 1, 2
"""Folded with the run's seed: the streams of initial weights and corpus draws."""


@dataclass(frozen=True)
class TeacherReport:
    """How good the teacher is, sampled at temperature 1.

    Attributes:
      accuracy: share of right completions, None for a task without right answers.
      distinct_right_answers: mean number among the configured samples of one prompt; None likewise.
      cached: whether the weights came from an earlier run.
    """

    accuracy: float | None
    distinct_right_answers: float | None
    cached: bool


def obtain_teacher(ground: Groundwork, progress: Callable[..., None]) -> tuple[Decoder, TeacherReport]:
    """The run's teacher: loaded from its file, from the cache of trained toy teachers, or trained now.

    Args:
      ground: the run's groundwork.
      progress: ``(done, total, **numbers)`` while training.

    Raises:
      CheckpointError: a model file, or a cached teacher, that is damaged.
    """
    config = ground.config
    if config.model.source == "gguf":
        shape, weights = load_gguf(model_file(config.model), dtype=config.model.dtype)
        # jnp.array copies: the arrays may be views of the file.
        arrays = {name: jnp.array(array, copy=True) for name, array in weights.items()}
        return with_parameters(abstract_decoder(shape), arrays), TeacherReport(None, None, cached=False)
    path = Path(config.run.cache).expanduser() / "teachers" / f"{config.teacher_digest()}.safetensors"
    if path.exists():
        return _cached(path, ground)
    model = fresh_decoder(ground, TEACHER_SEED)
    assert isinstance(ground.task, CorpusTask)
    layout = causal_layout(ground.layout)
    corpus = Corpus(ground.task.examples(), ground.tokenizer, layout)
    seed = stream_seed(config.run.seed, TEACHER_SEED)
    train_on_corpus(model, corpus, layout, config.teacher, seed=seed, min_noise=0.0, progress=progress)
    report = _measure(model, ground)
    _keep(path, model, report)
    return model, report


def fresh_decoder(ground: Groundwork, stream: int) -> Decoder:
    """A decoder with initial weights drawn from the run's seed."""
    config = ground.teacher if stream == TEACHER_SEED else ground.student_base
    return Decoder(config, rngs=nnx.Rngs(stream_seed(ground.config.run.seed, stream)))


def stream_seed(seed: int, stream: int) -> int:
    """A 31-bit seed for one of the run's independent streams."""
    return int(np.random.SeedSequence([seed, stream]).generate_state(1)[0]) >> 1


def _measure(model: Decoder, ground: Groundwork) -> TeacherReport:
    settings = ground.config.evaluation
    rows = evenly_spaced(ground.splits[TRAIN], settings.diversity_prompts)
    judged: list[tuple[PromptRow, list[str]]] = []
    for row in rows:
        judged.append((row, _sample(model, ground, row, max(settings.diversity_samples, 32))))
    accuracy = right_answers(ground.task, judged)
    return TeacherReport(
        accuracy, distinct_right_answers(ground.task, judged, settings.diversity_samples), cached=False
    )


def _sample(model: Decoder, ground: Groundwork, row: PromptRow, samples: int) -> list[str]:
    layout = causal_layout(ground.layout)
    prompt_ids_BP = np.zeros((samples, layout.prompt_length), np.int32)
    prompt_ids_BP[:, : len(row.tokens)] = row.tokens
    lengths_B = np.full((samples,), len(row.tokens), np.int32)
    keys_B = evaluation_keys(ground.config.run.seed, row.row_number * samples + np.arange(samples))
    sampler = SamplerSettings("static", 1.0, temperature=1.0)
    decoded = jax.device_get(decode(model, prompt_ids_BP, lengths_B, keys_B, layout, sampler, ground.stop_ids))
    texts = []
    for sample in range(samples):
        end = int(decoded.length_B[sample]) - (0 if decoded.truncated_B[sample] else 1)
        start = len(row.tokens)
        texts.append(ground.tokenizer.decode(decoded.tokens_BL[sample, start : start + end].tolist()))
    return texts


def _keep(path: Path, model: Decoder, report: TeacherReport) -> None:
    weights = {name: np.asarray(array) for name, array in parameters(model).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    facts = {"report": json.dumps(asdict(report)), "fingerprint": fingerprint(weights)}
    save_file(weights, unfinished, metadata=facts)
    unfinished.replace(path)


def _cached(path: Path, ground: Groundwork) -> tuple[Decoder, TeacherReport]:
    from safetensors import SafetensorError, safe_open

    try:
        weights = load_file(path)
        with safe_open(path, framework="numpy") as file:
            facts = file.metadata()
    except SafetensorError as problem:
        raise CheckpointError(
            f"the cached teacher {path} is damaged ({problem}); delete it to train it again"
        ) from problem
    if (found := fingerprint(weights)) != facts["fingerprint"]:
        raise CheckpointError(
            f"the cached teacher {path} was saved with fingerprint {facts['fingerprint']} and now has {found}; delete "
            "it to train it again"
        )
    arrays = {name: jnp.array(array, copy=True) for name, array in weights.items()}
    report = TeacherReport(**{**json.loads(facts["report"]), "cached": True})
    return with_parameters(abstract_decoder(ground.teacher), arrays), report
