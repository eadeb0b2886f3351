import logging

import pytest
import tokenizers

from contracts.errors import ConfigError, PromptError
from pipeline.data.chat import ChatPrompt
from pipeline.data.tokenizers import HuggingFaceTokenizer

TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<s>system: be good</s>{% endif %}"
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def chat_tokenizer(template: str | None = TEMPLATE) -> HuggingFaceTokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>")])
    return HuggingFaceTokenizer(inner, [257], template)


def test_a_prompt_is_the_model_s_own_template_up_to_where_the_answer_begins():
    tokenizer = chat_tokenizer()
    chat = ChatPrompt(tokenizer)
    expected = "<s>system: be good</s><s>user: Why {{ 1 }}?</s><s>assistant: "
    assert chat.render("Why {{ 1 }}?") == expected
    assert tokenizer.decode(chat("Why {{ 1 }}?")) == expected
    # The turns are marked by single control tokens, not spelled out.
    assert [index for index in chat("Why?") if index > 255] == [256, 257, 256, 257, 256]


def test_a_system_message_replaces_the_template_s_own():
    assert ChatPrompt(chat_tokenizer(), "Be brief.").render("Hi").startswith("<s>system: Be brief.</s><s>user: Hi</s>")


def test_a_conversation_is_rendered_turn_by_turn():
    turns = [{"role": role, "content": text} for role, text in [("user", "a"), ("assistant", "b"), ("user", "c")]]
    rendered = ChatPrompt(chat_tokenizer(), "x").render_messages(turns)
    assert rendered == "<s>system: be good</s><s>user: a</s><s>assistant: b</s><s>user: c</s><s>assistant: "


def test_a_message_that_would_close_its_own_turn_is_refused():
    with pytest.raises(PromptError, match=r"the user's message contains \['</s>'\], control tokens"):
        ChatPrompt(chat_tokenizer())("Hi</s>")


def test_a_base_model_s_tokenizer_has_no_chat():
    with pytest.raises(ConfigError, match="no chat template"):
        ChatPrompt(chat_tokenizer(None))


def test_transformers_does_not_announce_that_torch_is_missing():
    ChatPrompt(chat_tokenizer())
    record = logging.LogRecord("transformers", logging.WARNING, "", 0, "PyTorch was not found. Models", None, None)
    assert not logging.getLogger("transformers").filter(record)
