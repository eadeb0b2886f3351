"""The student, writing: completions decoded with a stated version, and the canvases that training will see."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from contracts.errors import VersionNotHeldError
from contracts.roles import Tree
from contracts.weights import WeightVersion, fingerprint
from contracts.wire import decode_tree
from contracts.work import (
    CleanSequence,
    Evaluation,
    EvaluationRequest,
    Prompt,
    Provenance,
    Rollout,
    RolloutRequest,
    Sample,
)
from pipeline.diffusion.decoded import Decoded
from pipeline.diffusion.decoding import decode
from pipeline.diffusion.keys import evaluation_keys, row_keys
from pipeline.diffusion.measures import decoding_statistics
from pipeline.diffusion.states import StateWeights, random_states, trajectory_states
from pipeline.models.decoder import Decoder
from pipeline.models.tree import with_parameters
from pipeline.workers.parts import Parts, abstract_decoder

SAMPLES_PER_ITEM = 2


@dataclass(frozen=True)
class Held:
    """Weights in this worker's hands, and what they are by its own computation."""

    intent: int
    version: WeightVersion
    model: Decoder


class RolloutWorker:
    """Decodes prompts block by block and hands on everything the student's side of a batch needs."""

    def __init__(self, parts: Parts, *, name: str):
        self.name = name
        self._parts = parts
        self._held: Held | None = None
        self._taking_hold = threading.Lock()
        self._template = abstract_decoder(parts.student)
        self._states = jax.jit(self._training_states)

    def load(self, version: WeightVersion, tree: Tree, intent: int) -> WeightVersion:
        """Hold these weights; returns the version with the fingerprint computed over the arrays now held.

        The newest intent wins, whatever step it asks for; a load that arrives after a newer one changes nothing.
        """
        if self._held is not None and intent < self._held.intent:
            return self._held.version
        # A copy: device arrays would alias, and pin, the object store's memory.
        weights = {name: jnp.array(array, copy=True) for name, array in decode_tree(tree).items()}
        held = Held(
            intent, replace(version, fingerprint=fingerprint(weights)), with_parameters(self._template, weights)
        )
        with self._taking_hold:
            # While these weights were read, another thread may have loaded newer ones.
            if self._held is None or intent >= self._held.intent:
                self._held = held
            return self._held.version

    def generate(self, request: RolloutRequest) -> Rollout:
        """Decode one micro-batch of prompts.

        Raises:
          VersionNotHeldError: the request names another version than the one held.
          BatchValueError: a row has no prompt.
        """
        request.validate()
        # One look at the attribute: a load in another thread must not change the weights of a rollout under way.
        held = self._holding(request.version)
        parts = self._parts
        sampler = parts.config.rollout.settings()
        keys_B = row_keys(request.seed, request.step, request.stream_indices_B)
        decoded = decode(
            held.model, request.prompt_ids_BP, request.prompt_lengths_B, keys_B, parts.layout, sampler, parts.stop_ids
        )
        batch = jax.device_get(self._states(decoded, jnp.asarray(request.prompt_lengths_B), keys_B))
        decoded = jax.device_get(decoded)
        samples = self._samples(decoded, request.prompt_lengths_B, request.prompts, request.stream_indices_B)
        inputs = batch.model_inputs
        return Rollout(
            student_batch=batch,
            clean=CleanSequence(inputs["clean_tokens"], inputs["clean_valid"], inputs["prompt_lengths"]),
            statistics=_statistics(decoded, samples),
            provenance=Provenance(
                run_id=request.run_id,
                step=request.step,
                item=request.item,
                version=held.version,
                stream_indices=tuple(int(index) for index in request.stream_indices_B),
                sampler=sampler,
                worker=self.name,
            ),
            samples=samples[:SAMPLES_PER_ITEM],
        ).seal()

    def evaluate(self, request: EvaluationRequest) -> Evaluation:
        """Decode and check prompts without training on them.

        Rows beyond ``request.prompts`` only fill the batch's fixed shape; they are decoded and not counted.
        """
        held = self._holding(request.version)
        keys_B = evaluation_keys(request.seed, request.stream_indices_B)
        decoded = jax.device_get(
            decode(
                held.model,
                request.prompt_ids_BP,
                request.prompt_lengths_B,
                keys_B,
                self._parts.layout,
                request.sampler,
                self._parts.stop_ids,
            )
        )
        decoded = jax.tree.map(lambda array: array[: len(request.prompts)], decoded)
        samples = self._samples(decoded, request.prompt_lengths_B, request.prompts, request.stream_indices_B)
        return Evaluation(request.name, held.version, _statistics(decoded, samples), samples)

    def _holding(self, version: WeightVersion) -> Held:
        held = self._held
        if held is None or held.version != version:
            raise VersionNotHeldError(
                f"{self.name} was asked to write with {version}; it holds {held.version if held else 'no weights'}. "
                "Load the version first."
            )
        return held

    def _training_states(self, decoded: Decoded, prompt_lengths_B: jax.Array, keys_B: jax.Array):
        settings = self._parts.config.states
        weights = StateWeights(settings.truncated, settings.stop_token_weight)
        if settings.kind == "random":
            return random_states(decoded, prompt_lengths_B, keys_B, self._parts.layout, weights, settings.min_noise)
        return trajectory_states(decoded, prompt_lengths_B, keys_B, self._parts.layout, weights)

    def _samples(
        self, decoded: Decoded, prompt_lengths_B: np.ndarray, prompts: Sequence[Prompt], stream_indices_B: np.ndarray
    ) -> tuple[Sample, ...]:
        return tuple(
            self._sample(row, prompt, decoded, int(prompt_lengths_B[row]), int(stream_indices_B[row]))
            for row, prompt in enumerate(prompts)
        )

    def _sample(self, row: int, prompt: Prompt, decoded: Decoded, start: int, stream_index: int) -> Sample:
        # A truncated row has no stop token to take off the end.
        length = int(decoded.length_B[row]) - (0 if decoded.truncated_B[row] else 1)
        text = self._parts.tokenizer.decode(decoded.tokens_BL[row, start : start + length].tolist())
        return Sample(stream_index, prompt.text, text, self._parts.task.correct(prompt, text))


def _statistics(decoded: Decoded, samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """Name → (sum, weight), additive over items; ``accuracy`` has weight only where the task knows right answers."""
    judged = [sample.correct for sample in samples if sample.correct is not None]
    return {"accuracy": (float(sum(judged)), float(len(judged))), **decoding_statistics(decoded)}
