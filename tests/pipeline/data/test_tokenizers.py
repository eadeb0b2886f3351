import pickle

import pytest
import tokenizers

from contracts.errors import ConfigError, PromptError
from pipeline.data.tokenizers import CharacterTokenizer, HuggingFaceTokenizer, Tokenizer, import_extra


def byte_level_tokenizer(missing: str = "") -> tokenizers.Tokenizer:
    alphabet = sorted(set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) - set(missing))
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken("<|end|>", special=True, normalized=False)])
    return inner


def test_character_ids_are_dense_with_the_specials_after_the_alphabet():
    tokenizer = CharacterTokenizer("ab+", ["<end>", "<other>"])
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.encode("b+a") == [1, 2, 0]
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.special_id("<other>")) == (5, (3,), 4)
    assert tokenizer.decode([1, 2, 0, 3, 4]) == "b+a<end><other>"


def test_an_unknown_character_is_named_with_its_position():
    with pytest.raises(PromptError, match=r"character 'x' at position 2 of '1\+x='.*alphabet '1\+='"):
        CharacterTokenizer("1+=").encode("1+x=")


def test_no_text_encodes_to_a_special_token_of_a_character_tokenizer():
    tokenizer = CharacterTokenizer("<end>", ["<end>"])
    assert set(tokenizer.encode("<end>")).isdisjoint(tokenizer.eos_ids)


@pytest.mark.parametrize(("alphabet", "specials"), [("aa", ["<end>"]), ("ab", ["a"]), ("", ["<end>"]), ("ab", [""])])
def test_tokens_that_are_not_distinct_are_refused(alphabet, specials):
    with pytest.raises(ConfigError, match="distinct tokens"):
        CharacterTokenizer(alphabet, specials)


def test_an_end_token_that_is_no_special_is_refused():
    with pytest.raises(ConfigError, match=r"\['stop'\].*\['<end>'\]"):
        CharacterTokenizer("ab", eos=["stop"])
    with pytest.raises(ConfigError, match="no special token 'stop'"):
        CharacterTokenizer("ab").special_id("stop")


def test_the_digest_tells_tokenizers_apart_and_nothing_else():
    assert CharacterTokenizer("ab").digest == CharacterTokenizer("ab").digest
    others = [CharacterTokenizer("ba"), CharacterTokenizer("ab", ["<e>"])]
    assert len({tokenizer.digest for tokenizer in [CharacterTokenizer("ab"), *others]}) == 3
    assert CharacterTokenizer("ab", ["<end>"], eos=[]).digest == CharacterTokenizer("ab").digest
    inner = byte_level_tokenizer()
    wrapped = HuggingFaceTokenizer(inner, [256])
    assert HuggingFaceTokenizer(byte_level_tokenizer(), [256]).digest == wrapped.digest
    # A base model and its instruct model read ids alike, whatever ends their answers.
    assert HuggingFaceTokenizer(inner, [256, 0], "{{ messages }}", pad_id=0).digest == wrapped.digest
    assert HuggingFaceTokenizer(byte_level_tokenizer(missing="ø"), [255]).digest != wrapped.digest


@pytest.mark.parametrize("identifier", [-1, 13, 10**6])
def test_an_id_outside_the_vocabulary_is_not_decoded(identifier):
    with pytest.raises(PromptError, match=rf"id {identifier} at position 1 is outside the vocabulary of 13 ids"):
        CharacterTokenizer("0123456789+=").decode([0, identifier])


def test_a_hugging_face_tokenizer_writes_special_tokens_out_and_adds_none():
    tokenizer = HuggingFaceTokenizer(byte_level_tokenizer(), [256])
    assert isinstance(tokenizer, Tokenizer)
    ids = tokenizer.encode("é 1<|end|>")
    assert len(ids) == 5
    assert ids[-1] == 256
    assert tokenizer.decode(ids) == "é 1<|end|>"
    assert tokenizer.special_tokens == {256: "<|end|>"}
    with pytest.raises(PromptError, match="id 257"):
        tokenizer.decode([257])


def test_text_that_a_byte_level_vocabulary_would_drop_is_refused():
    complete, lacking = (HuggingFaceTokenizer(byte_level_tokenizer(missing), [1]) for missing in ("", "č"))
    assert complete.decode(complete.encode("ab\rc")) == "ab\rc"
    with pytest.raises(PromptError, match=r"cannot write '\\r' at 2 of"):
        lacking.encode("ab\rc")


@pytest.mark.parametrize("eos_ids", [[], [257], [-1]])
def test_end_tokens_outside_the_vocabulary_are_refused(eos_ids):
    with pytest.raises(ConfigError, match=r"at least one id in \[0, 257\)"):
        HuggingFaceTokenizer(byte_level_tokenizer(), eos_ids)


@pytest.mark.parametrize("tokenizer", [CharacterTokenizer("ab"), HuggingFaceTokenizer(byte_level_tokenizer(), [256])])
def test_a_tokenizer_survives_the_way_to_another_process(tokenizer):
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert (copy.encode("ab"), copy.digest, copy.eos_ids) == (
        tokenizer.encode("ab"),
        tokenizer.digest,
        tokenizer.eos_ids,
    )


def test_a_missing_package_names_the_extra_to_install():
    with pytest.raises(ConfigError, match=r"'not_there' is needed and not installed: pip install 'limbeck\[gguf\]'"):
        import_extra("not_there.inside", "gguf")
