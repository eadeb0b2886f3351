"""Split a number into two: many right answers, so that tokens committed in parallel must agree.

The prompt ``42=`` has 43 right completions, ``00+42`` to ``42+00``: any a + b = 42. Each digit alone is nearly free, all
of them together satisfy one equation; a model that picks them independently is wrong almost always.
"""

from collections.abc import Mapping, Sequence

from contracts.work import Prompt
from pipeline.data.tasks.task import Example, Rows


class Split:
    """Prompts ``NN=`` for NN from 00 to 99; completions ``aa+bb`` with a + b = NN."""

    alphabet = "0123456789+="

    def prompts(self) -> Mapping[str, Rows]:
        """Ten numbers are held out of the student's prompts, every digit once in each place; the teacher has seen them."""
        held_out = {10 * tens + (3 * tens + 1) % 10 for tens in range(10)}
        rows = [{"prompt": f"{number:02d}=", "sum": number} for number in range(100)]
        return {
            "train": [row for row in rows if row["sum"] not in held_out],
            "held_out": [row for row in rows if row["sum"] in held_out],
        }

    def correct(self, prompt: Prompt, completion: str) -> bool:
        """One integer check."""
        left, plus, right = completion[:2], completion[2:3], completion[3:]
        digits = len(right) == 2 and (left + right).isascii() and (left + right).isdigit()
        return digits and plus == "+" and int(left) + int(right) == int(prompt.text[:2])

    def examples(self) -> Sequence[Example]:
        """Uniform over numbers, then over the right answers of each."""
        return [
            Example(f"{number:02d}=", f"{first:02d}+{number - first:02d}", 1.0 / (number + 1))
            for number in range(100)
            for first in range(number + 1)
        ]
