"""A task's examples as arrays, and the batches drawn from them.

examples ──draw by weight──▶ tokens [B, L] ──states──▶ DiffusionTokenBatch
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from contracts.errors import PromptError
from contracts.tokens import DiffusionTokenBatch
from pipeline.data.tasks import Example
from pipeline.diffusion.blocks import BlockLayout
from pipeline.diffusion.keys import row_keys
from pipeline.diffusion.states import as_decoded, random_states

Encode = Callable[[str], Sequence[int]]


class Corpus:
    """Right completions, each closed by a stop token.

    Args:
      examples: prompts and completions with their weights, at least one.
      encode_prompt, encode_completion: text to ids; a chat template belongs to the prompt only.
      stop: token that closes each completion.
      layout: prompt and completion lengths that every example must fit.

    Attributes:
      digest: hex sha256 over the ids, lengths and weights.

    Raises:
      PromptError: an example is too long or cannot be encoded, or none has weight.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        encode_prompt: Encode,
        encode_completion: Encode,
        stop: int,
        layout: BlockLayout,
    ):
        rows = len(examples)
        self.tokens_NL = np.zeros((rows, layout.length), np.int32)
        self.prompt_lengths_N = np.zeros((rows,), np.int32)
        self.lengths_N = np.zeros((rows,), np.int32)
        for row, example in enumerate(examples):
            prompt = [*encode_prompt(example.prompt)]
            completion = [*encode_completion(example.completion), stop]
            if not 1 <= len(prompt) <= layout.prompt_length or len(completion) > layout.completion_length:
                raise PromptError(
                    f"example {example.prompt!r} + {example.completion!r} has {len(prompt)} + {len(completion)} tokens, "
                    f"stop included; the task's lengths are {layout.prompt_length} + {layout.completion_length}"
                )
            self.tokens_NL[row, : len(prompt) + len(completion)] = prompt + completion
            self.prompt_lengths_N[row], self.lengths_N[row] = len(prompt), len(completion)
        weights_N = np.array([example.weight for example in examples], np.float64)
        if not (np.isfinite(weights_N).all() and (weights_N >= 0).all() and weights_N.sum() > 0):
            raise PromptError("the examples' weights must be finite and at least 0, and one of them above")
        self._weights_N = weights_N / weights_N.sum()
        content = (self.tokens_NL, self.prompt_lengths_N, self.lengths_N, self._weights_N)
        heard = b"".join(str(array.shape).encode() + array.tobytes() for array in content)
        self.digest = hashlib.sha256(heard).hexdigest()

    def batches(
        self, layout: BlockLayout, rows: int, steps: int, seed: int, min_noise: float
    ) -> Iterator[DiffusionTokenBatch]:
        """``steps`` batches of ``rows`` drawn examples, masked at random (seeds of a shifted layout stay clean)."""
        generator = np.random.default_rng(seed)

        @jax.jit
        def states(tokens_BL, prompt_lengths_B, lengths_B, keys_B):
            complete = as_decoded(layout, tokens_BL, prompt_lengths_B, lengths_B)
            return random_states(complete, prompt_lengths_B, keys_B, layout, min_noise=min_noise)

        for step in range(steps):
            chosen_B = generator.choice(len(self._weights_N), size=rows, p=self._weights_N)
            keys_B = row_keys(seed, step, np.arange(rows))
            yield states(self.tokens_NL[chosen_B], self.prompt_lengths_N[chosen_B], self.lengths_N[chosen_B], keys_B)
