"""Two-digit addition: one right answer, the fast deterministic task for tests."""

from collections.abc import Mapping, Sequence

from contracts.work import Prompt
from pipeline.data.tasks.task import Example, Rows


class Addition:
    """Prompts ``aa+bb=``; the completion is the sum in three digits, for example ``17+25=`` → ``042``."""

    alphabet = "0123456789+="

    def prompts(self) -> Mapping[str, Rows]:
        """A tenth of the pairs is held out of the student's prompts."""
        rows = [{"prompt": f"{a:02d}+{b:02d}="} for a in range(100) for b in range(100)]
        return {
            "train": [row for index, row in enumerate(rows) if index % 10 != 7],
            "held_out": [row for index, row in enumerate(rows) if index % 10 == 7],
        }

    def correct(self, prompt: Prompt, completion: str) -> bool:
        """Equal to the one right answer, zeros in front included."""
        return completion == f"{int(prompt.text[:2]) + int(prompt.text[3:5]):03d}"

    def examples(self) -> Sequence[Example]:
        return [Example(f"{a:02d}+{b:02d}=", f"{a + b:03d}") for a in range(100) for b in range(100)]
