"""Two-digit addition: one right answer, the fast deterministic task for tests."""

from collections.abc import Mapping, Sequence

from contracts.work import Prompt
from pipeline.data.tasks.task import Example, Rows


class Addition:
    """Prompts ``aa+bb=``; the completion is the sum in three digits, for example ``17+25=`` → ``042``."""

    alphabet = "0123456789+="

    def prompts(self) -> Mapping[str, Rows]:
        """A tenth of the pairs is held out of the student's prompts, evenly over all digits in all places."""
        splits: dict[str, list[dict[str, str]]] = {"train": [], "held_out": []}
        for a in range(100):
            for b in range(100):
                check = (3 * (a // 10) + 7 * (a % 10) + 9 * (b // 10) + b % 10) % 10
                splits["held_out" if check == 7 else "train"].append({"prompt": f"{a:02d}+{b:02d}="})
        return splits

    def correct(self, prompt: Prompt, completion: str) -> bool:
        """Equal to the one right answer, zeros in front included."""
        return completion == f"{int(prompt.text[:2]) + int(prompt.text[3:5]):03d}"

    def examples(self) -> Sequence[Example]:
        return [Example(f"{a:02d}+{b:02d}=", f"{a + b:03d}") for a in range(100) for b in range(100)]
