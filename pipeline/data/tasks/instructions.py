"""Free instructions from a prompts file: nothing to check, the divergence from the teacher is the measure."""

from collections.abc import Mapping

from contracts.work import Prompt
from pipeline.data.tasks.task import Rows


class Instructions:
    """Prompts come from ``task.prompts``; no completion is right or wrong."""

    def prompts(self) -> Mapping[str, Rows]:
        return {}

    def correct(self, prompt: Prompt, completion: str) -> None:
        return None
