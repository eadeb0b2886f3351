"""Strict mode for every test: the environment is fixed before the first `import jax`."""

import os

# One fixed number of visible cores and flags per process: XLA splits reductions by it, so it decides the last bits.
os.environ.setdefault("NPROC", "2")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
os.environ.pop("RAY_ADDRESS", None)

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
