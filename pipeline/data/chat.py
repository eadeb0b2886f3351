"""Prompts for an instruct model: the model's own chat template around the user's words.

The template is rendered by transformers (sandboxed jinja), exactly as the model's makers render it.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from contracts.errors import ConfigError, PromptError
from pipeline.data.tokenizers import HuggingFaceTokenizer, import_extra

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ChatPrompt:
    """Turns a user's message into the ids of a whole prompt, ending where the assistant's answer begins.

    Use it as the `encode` of a prompt source.

    Args:
        tokenizer: one with a chat template.
        system: the system message; None leaves it to the template (some put a default one).

    Raises:
        ConfigError: the tokenizer has no chat template, or the extra with transformers is not installed.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer, system: str | None = None) -> None:
        if tokenizer.chat_template is None:
            raise ConfigError(
                "the tokenizer has no chat template: it is a base model's, so encode prompts as plain text"
            )
        self.tokenizer = tokenizer
        self.system = system
        self._control_tokens = tuple(tokenizer.special_tokens.values())
        self._renderer = _renderer(tokenizer)

    def __call__(self, text: str) -> list[int]:
        """The prompt's ids; see `render`."""
        return self.tokenizer.encode(self.render(text))

    def render(self, text: str) -> str:
        """The rendered prompt for one user message.

        Raises:
            PromptError: the message contains a control token's text, which could close the user's turn.
        """
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self.render_messages([*system, {"role": "user", "content": text}])

    def render_messages(self, messages: Sequence[dict[str, str]]) -> str:
        """Render a conversation (`role` and `content` each) and open the assistant's next turn."""
        for message in messages:
            if found := [token for token in self._control_tokens if token in message["content"]]:
                raise PromptError(
                    f"the {message['role']}'s message contains {found}, control tokens of the chat template: "
                    "take them out, the template adds its own"
                )
        rendered = self._renderer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return str(rendered)


def _renderer(tokenizer: HuggingFaceTokenizer) -> "PreTrainedTokenizerFast":
    # transformers announces at import that PyTorch is missing; here it is missing on purpose.
    logging.getLogger("transformers").addFilter(_is_not_about_torch)
    import_extra("jinja2", "gguf")
    transformers = import_extra("transformers", "gguf")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.tokenizer, chat_template=tokenizer.chat_template
    )


def _is_not_about_torch(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()
