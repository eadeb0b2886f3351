"""Strict mode for every test: the environment is fixed before the first `import jax`."""

import os

# One fixed number of visible cores and flags per process: XLA splits reductions by it, so it decides the last bits.
os.environ.setdefault("NPROC", "2")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
os.environ.pop("RAY_ADDRESS", None)
# Programs compiled by one test process are read by the next: subprocesses and actors compile the same ones.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(os.path.dirname(__file__), "..", ".cache", "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
