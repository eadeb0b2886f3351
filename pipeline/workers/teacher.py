"""The frozen teacher, scoring exactly what the student wrote."""

import jax
import jax.numpy as jnp

from contracts.errors import WeightsError
from contracts.roles import Tree
from contracts.weights import fingerprint
from contracts.wire import decode_tree, encode
from contracts.work import Rollout, TeacherTargets
from pipeline.diffusion.alignment import causal_teacher_logits
from pipeline.models.tree import with_parameters
from pipeline.workers.parts import Parts, abstract_decoder


class TeacherWorker:
    """Scores rollouts with a causal teacher: one forward pass on the clean sequence, dense logits at the target slots."""

    def __init__(self, parts: Parts, *, name: str):
        self.name = name
        self._parts = parts
        self._weights: dict[str, jax.Array] = {}
        self._fingerprint = ""
        template, layout = abstract_decoder(parts.teacher), parts.layout

        @jax.jit
        def score(weights, tokens_BL, valid_BL, prompt_lengths_B):
            model = with_parameters(template, weights)
            return causal_teacher_logits(model, tokens_BL, valid_BL, prompt_lengths_B, layout)

        self._score = score

    def load(self, tree: Tree) -> str:
        """Hold the teacher's weights; returns their fingerprint as held.

        Raises:
          WeightsError: these are not the weights of this run's teacher.
        """
        # A copy: device arrays would alias, and pin, the object store's memory.
        weights = {name: jnp.array(array, copy=True) for name, array in decode_tree(tree).items()}
        held = fingerprint(weights)
        if held != self._parts.teacher_fingerprint:
            raise WeightsError(
                f"{self.name} was given weights with fingerprint {held}; this run's teacher is "
                f"{self._parts.teacher_fingerprint}"
            )
        self._weights, self._fingerprint = weights, held
        return held

    def score(self, rollout: Rollout) -> TeacherTargets:
        """Teacher logits for every target slot of a rollout.

        Returns:
          Dense targets ``[B, W, V]`` float32, W the slots of the rollout's batch and V the loss vocabulary.
        """
        if not self._weights:
            raise WeightsError(f"{self.name} has no weights yet; load them first")
        clean = rollout.clean
        logits_BWV = self._score(self._weights, clean.tokens_BL, clean.valid_BL, clean.prompt_lengths_B)
        return TeacherTargets(
            rollout_digest=rollout.digest,
            teacher_fingerprint=self._fingerprint,
            kind="dense",
            temperature=self._parts.config.objective.temperature,
            arrays={"logits": encode(jax.device_get(logits_BWV))},
        )
