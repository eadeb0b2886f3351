"""Where the teacher comes from: a model file, the cache, or training on the spot."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from contracts.errors import CheckpointError
from contracts.weights import fingerprint
from contracts.work import SamplerSettings
from pipeline.config import ModelSettings
from pipeline.data.prompts import PromptRow, pad_prompts
from pipeline.diffusion.decoding import decode
from pipeline.diffusion.keys import evaluation_keys
from pipeline.groundwork import TRAIN, Groundwork, model_file
from pipeline.measures import distinct_right_answers, evenly_spaced, right_answers
from pipeline.models.decoder import Decoder
from pipeline.models.gguf import load_gguf
from pipeline.models.tree import parameters, with_parameters
from pipeline.pretraining import causal_layout, train_on_corpus
from pipeline.workers.parts import abstract_decoder

TEACHER_SEED, STUDENT_SEED = 1, 2
"""Folded with the run's seed: the streams of initial weights and corpus draws."""

FEWEST_SAMPLES = 32
"""Per prompt: a share of fewer says little."""

ROWS_AT_ONCE = 256


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
        return pretrained_decoder(config.model), TeacherReport(None, None, cached=False)
    path = Path(config.run.cache).expanduser() / "teachers" / f"{cache_key(ground)}.safetensors"
    if cached := path.exists():
        model = _cached(path, ground)
    else:
        model = fresh_decoder(ground, TEACHER_SEED)
        layout = causal_layout(ground.layout)
        seed = stream_seed(config.run.seed, TEACHER_SEED)
        assert ground.corpus is not None
        train_on_corpus(model, ground.corpus, layout, config.teacher, seed=seed, min_noise=0.0, progress=progress)
        _keep(path, model)
    # Measured anew each time: the figures depend on prompts and samples, which the weights do not.
    return model, _measure(model, ground, cached)


def cache_key(ground: Groundwork) -> str:
    """Names a toy teacher by everything that its weights depend on, to the last bit."""
    assert ground.corpus is not None
    device = jax.devices()[0]
    where = [ground.corpus.digest, ground.tokenizer.digest, jax.__version__, device.platform, device.device_kind]
    learnt = hashlib.sha256("\n".join([*where, os.environ.get("XLA_FLAGS", "")]).encode()).hexdigest()
    return ground.config.teacher_digest(learnt)


def pretrained_decoder(settings: ModelSettings) -> Decoder:
    """The decoder in the file that the settings name."""
    shape, weights = load_gguf(model_file(settings), dtype=settings.dtype)
    # jnp.array copies: the arrays may be views of the file.
    arrays = {name: jnp.array(array, copy=True) for name, array in weights.items()}
    return with_parameters(abstract_decoder(shape), arrays)


def fresh_decoder(ground: Groundwork, stream: int) -> Decoder:
    """A decoder with initial weights drawn from the run's seed."""
    config = ground.teacher if stream == TEACHER_SEED else ground.student_base
    return Decoder(config, rngs=nnx.Rngs(stream_seed(ground.config.run.seed, stream)))


def stream_seed(seed: int, stream: int) -> int:
    """A 31-bit seed for one of the run's independent streams."""
    return int(np.random.SeedSequence([seed, stream]).generate_state(1)[0]) >> 1


def _measure(model: Decoder, ground: Groundwork, cached: bool) -> TeacherReport:
    settings = ground.config.evaluation
    rows = evenly_spaced(ground.splits[TRAIN], settings.diversity_prompts)
    samples = max(settings.diversity_samples, FEWEST_SAMPLES)
    texts = _completions(model, ground, [row for row in rows for _ in range(samples)])
    judged = [(row, texts[place * samples : (place + 1) * samples]) for place, row in enumerate(rows)]
    distinct = distinct_right_answers(ground.task, judged, settings.diversity_samples)
    return TeacherReport(right_answers(ground.task, judged), distinct, cached)


def _completions(model: Decoder, ground: Groundwork, rows: Sequence[PromptRow]) -> list[str]:
    """One sample at temperature 1 for each row, its text without the stop token."""
    layout = causal_layout(ground.layout)
    sampler = SamplerSettings("static", 1.0, temperature=1.0)
    size = min(len(rows), ROWS_AT_ONCE)
    texts: list[str] = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        # The last part is filled up to the one shape that is compiled.
        filled = [*part, *[part[0]] * (size - len(part))]
        prompt_ids_BP, lengths_B = pad_prompts(filled, layout.prompt_length)
        keys_B = evaluation_keys(ground.config.run.seed, np.arange(start, start + size))
        decoded = jax.device_get(decode(model, prompt_ids_BP, lengths_B, keys_B, layout, sampler, ground.stop_ids))
        for row, prompt in enumerate(part):
            length = int(decoded.length_B[row]) - (0 if decoded.truncated_B[row] else 1)
            begin = len(prompt.tokens)
            texts.append(ground.tokenizer.decode(decoded.tokens_BL[row, begin : begin + length].tolist()))
    return texts


def _keep(path: Path, model: Decoder) -> None:
    weights = {name: np.asarray(array) for name, array in parameters(model).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    save_file(weights, unfinished, metadata={"fingerprint": fingerprint(weights)})
    unfinished.replace(path)


def _cached(path: Path, ground: Groundwork) -> Decoder:
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
    return with_parameters(abstract_decoder(ground.teacher), arrays)
