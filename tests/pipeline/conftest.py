"""An oracle for every test that runs a decoder: the same model in numpy float64, one row, one explicit mask."""

import numpy as np
import pytest


def _norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def _rotate(x, positions, theta):
    """Turns each pair (i, i + d/2) of `[L, d]` as a complex number."""
    half = x.shape[-1] // 2
    pairs = x[:, :half] + 1j * x[:, half:]
    turn = np.exp(1j * positions[:, None] * theta ** (-np.arange(half) / half)[None])
    return np.concatenate([(pairs * turn).real, (pairs * turn).imag], axis=-1)


def _forward(config, weights, tokens, positions, mask):
    w = {name: np.asarray(array).astype(np.float64) for name, array in weights.items()}
    x = w["embedding.table"][tokens]
    for layer in range(config.layers):
        p = f"layers.{layer}."

        def project(x, name, p=p):
            return x @ w[f"{p}attention.{name}.kernel"] + w.get(f"{p}attention.{name}.bias", 0.0)

        h = _norm(x, w[p + "attention_norm.scale"], config.norm_eps)
        queries, keys, values = (
            project(h, name).reshape(len(tokens), -1, config.head_dim) for name in ("query", "key", "value")
        )
        mixed = []
        for head in range(config.heads):
            group = head // (config.heads // config.kv_heads)
            q, k, v = queries[:, head], keys[:, group], values[:, group]
            if config.qk_norm:
                q = _norm(q, w[p + "attention.query_norm.scale"], config.norm_eps)
                k = _norm(k, w[p + "attention.key_norm.scale"], config.norm_eps)
            q, k = (_rotate(a, positions, config.rope_theta) for a in (q, k))
            odds = np.where(mask, np.exp(q @ k.T / np.sqrt(config.head_dim)), 0.0)
            mixed.append(odds @ v / np.maximum(odds.sum(-1, keepdims=True), 1e-300))
        x = x + np.concatenate(mixed, -1) @ w[p + "attention.output.kernel"]
        h = _norm(x, w[p + "mlp_norm.scale"], config.norm_eps)
        gate = h @ w[p + "mlp.gate.kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[p + "mlp.up.kernel"])) @ w[p + "mlp.down.kernel"]
    x = _norm(x, w["norm.scale"], config.norm_eps)
    return x @ (w["embedding.table"].T if config.tied_head else w["lm_head.kernel"])


@pytest.fixture(scope="session")
def numpy_decoder():
    """`(config, weights, tokens [L], positions [L], mask [L, L]) -> logits [L, V]`, all float64."""
    return _forward
