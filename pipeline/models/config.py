"""The shape of a decoder: every number that decides which weights it has and how they are used."""

from dataclasses import dataclass

from contracts.errors import ConfigError

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of one decoder of the Qwen3 / Llama family.

    Args:
        vocab_size: Rows of the embedding and columns of the head; the *head's* size, which may exceed the tokenizer's.
        width: D, of the residual stream.
        layers: Number of attention + MLP layers.
        heads: Query heads.
        kv_heads: Key and value heads; divides `heads`.
        head_dim: Even; `heads * head_dim` may differ from `width`.
        mlp_width: Inner width of the SwiGLU.
        rope_theta: Base of the rotary frequencies, > 0.
        norm_eps: Added inside the root of every RMSNorm, > 0.
        qk_norm: Normalise queries and keys per head (Qwen3: yes, Llama: no).
        qkv_bias: Bias on the query, key and value projections (Qwen2: yes).
        tied_head: The head is the transposed embedding.
        context_length: Tokens of the longest sequence that the weights were trained for, > 0; None if nobody said.
        dtype: Of activations: `float32` or `bfloat16`. Norms, rotary angles, softmax and logits stay float32.
        param_dtype: Of stored weights: `float32` or `bfloat16`.

    Raises:
        ConfigError: A size is not positive, heads do not group, `head_dim` is odd, or a dtype is unknown.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float = 1e4
    norm_eps: float = 1e-6
    qk_norm: bool = True
    qkv_bias: bool = False
    tied_head: bool = True
    context_length: int | None = None
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "width",
            "layers",
            "heads",
            "kv_heads",
            "head_dim",
            "mlp_width",
            "rope_theta",
            "norm_eps",
        )
        for name in sizes:
            if not getattr(self, name) > 0:
                raise ConfigError(f"decoder {name} must be positive, got {getattr(self, name)}")
        if self.context_length is not None and self.context_length < 1:
            raise ConfigError(f"decoder context_length must be positive, got {self.context_length}")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"decoder heads={self.heads} cannot be grouped over kv_heads={self.kv_heads}: use a divisor of heads"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"decoder head_dim={self.head_dim} is odd: rotary embedding turns pairs, use an even number"
            )
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ConfigError(f"decoder {name}={getattr(self, name)!r} is unknown: use one of {', '.join(DTYPES)}")
