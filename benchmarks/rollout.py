"""Cached against uncached block decoding: tokens per second of both, their ratio, and how the cost grows.

    python benchmarks/rollout.py --output benchmarks/results/rollout.txt

One model, one process, one run: cached and uncached are timed in turn, so that their ratio is of the same minutes. Every
row commits one token per denoising step (`static(block size)`, greedy, no stops), which is the slowest schedule; the model
has random weights, since neither path looks at what the tokens are.
"""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# As in a run: XLA splits its work by the visible cores, so they are fixed before the first import of jax.
os.environ.setdefault("NPROC", "2")

import jax
import numpy as np
from flax import nnx

from contracts.work import SamplerSettings
from pipeline.diffusion.blocks import BlockLayout
from pipeline.diffusion.decoded import Decoded
from pipeline.diffusion.decoding import cache_lengths, decode
from pipeline.diffusion.keys import row_keys
from pipeline.diffusion.measures import decoding_statistics
from pipeline.diffusion.uncached import decode_uncached
from pipeline.models.config import DecoderConfig
from pipeline.models.decoder import Decoder

ROWS, PROMPT = 32, 16
MODEL = DecoderConfig(vocab_size=256, width=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_width=384)


@dataclass(frozen=True)
class Cost:
    """Of one call: seconds by the clock, and of processor time over all threads, which waiting for a core does not raise."""

    clock: float
    processor: float

    def times(self, factor: float) -> "Cost":
        return Cost(self.clock * factor, self.processor * factor)


@dataclass(frozen=True)
class Reading:
    """Cost of a whole batch, cached and uncached, at one completion length."""

    length: int
    cached: Cost
    uncached: Cost
    decoded: Decoded


def cost(run: Callable[[], object]) -> Cost:
    clock, processor = time.perf_counter(), time.process_time()
    jax.block_until_ready(run())
    return Cost(time.perf_counter() - clock, time.process_time() - processor)


def least(costs: list[Cost]) -> Cost:
    """The smallest of each; what a busy machine adds is never negative."""
    return Cost(min(each.clock for each in costs), min(each.processor for each in costs))


def layout(block_size: int, length: int) -> BlockLayout:
    return BlockLayout(block_size, "response", "causal", "same_position", "clean", PROMPT, length, mask_id=255)


def batch(model: Decoder, block_size: int, length: int) -> tuple:
    """What both paths decode."""
    prompts_BP = np.random.default_rng(0).integers(0, 255, (ROWS, PROMPT)).astype(np.int32)
    lengths_B, keys_B = np.full(ROWS, PROMPT, np.int32), row_keys(0, 0, np.arange(ROWS))
    one_per_step = SamplerSettings("static", float(block_size))
    return model, prompts_BP, lengths_B, keys_B, layout(block_size, length), one_per_step, ()


def read(model: Decoder, block_size: int, length: int, timed_blocks: int, repeats: int) -> Reading:
    """Time one completion length; the uncached path for a few blocks only, scaled up to all of them."""
    arguments = batch(model, block_size, length)
    decoded = jax.device_get(decode(*arguments))
    decode_uncached(*arguments, block_limit=1)
    blocks = layout(block_size, length).max_blocks
    timed = min(timed_blocks, blocks)
    cached, part = [], []
    for _ in range(repeats):
        cached.append(cost(lambda: decode(*arguments)))
        part.append(cost(lambda: decode_uncached(*arguments, block_limit=timed)))
        cached.append(cost(lambda: decode(*arguments)))
    return Reading(length, least(cached), least(part).times(blocks / timed), decoded)


def check_scaling(model: Decoder, block_size: int, length: int) -> str:
    """The scaled-up uncached time against that of all blocks, and the tokens of both paths, at one length."""
    reading = read(model, block_size, length, 2, 1)
    arguments = batch(model, block_size, length)
    whole = cost(lambda: decode_uncached(*arguments))
    differing = int((decode_uncached(*arguments).tokens_BL != reading.decoded.tokens_BL).sum())
    return (
        f"check at length {length}, block {block_size}: uncached in full takes {whole.processor:.2f} s of processor time, "
        f"scaled up from 2 of {layout(block_size, length).max_blocks} blocks {reading.uncached.processor:.2f} s; "
        f"{differing} of {ROWS * length} tokens differ between cached and uncached"
    )


def exponent(lengths: list[int], seconds: list[float]) -> float:
    """Slope of log seconds over log length, least squares: 1 is linear, 2 quadratic."""
    return float(np.polyfit(np.log(lengths), np.log(seconds), 1)[0])


def report(model: Decoder, options: argparse.Namespace) -> list[str]:
    """The whole table, as lines."""
    lines = [
        f"$ python {shlex.join(sys.argv)}",
        "",
        f"jax {jax.__version__}, {jax.devices()[0].device_kind} x {jax.device_count()}, NPROC={os.environ['NPROC']}, "
        f"load average at the start {os.getloadavg()[0]:.1f}",
        f"model: width {MODEL.width}, {MODEL.layers} layers, vocabulary {MODEL.vocab_size}, float32; {ROWS} rows, prompt "
        f"{PROMPT}; one token per denoising step",
        f"uncached: {options.timed_blocks} blocks are timed and scaled up to all of them: each of its steps runs the "
        "same program over the whole canvas, wherever the block stands",
        check_scaling(model, options.blocks[0], options.lengths[0]),
    ]
    for block_size in options.blocks:
        lines += ["", f"block {block_size}"]
        lines.append("length  cached tok/s  uncached tok/s   ratio  ratio of processor time   TPF  with commit passes")
        readings = []
        for length in options.lengths:
            reading = read(model, block_size, length, options.timed_blocks, options.repeats)
            readings.append(reading)
            tokens = ROWS * length
            (written, forwards), (_, passes) = (
                decoding_statistics(reading.decoded)[name]
                for name in ("tokens_per_forward", "tokens_per_forward_with_commit_passes")
            )
            lines.append(
                f"{length:6d}  {tokens / reading.cached.clock:12.0f}  {tokens / reading.uncached.clock:14.1f}  "
                f"{reading.uncached.clock / reading.cached.clock:5.1f}x  "
                f"{reading.uncached.processor / reading.cached.processor:22.1f}x  {written / forwards:.2f}  "
                f"{written / passes:18.2f}"
            )
            print(lines[-1], flush=True)
        for name in ("cached", "uncached"):
            costs = [getattr(reading, name) for reading in readings]
            clock = exponent(options.lengths, [each.clock for each in costs])
            processor = exponent(options.lengths, [each.processor for each in costs])
            lines.append(f"{name}: seconds grow as length^{clock:.2f}, processor time as length^{processor:.2f}")
        columns = cache_lengths(layout(block_size, options.lengths[-1]))
        lines.append(f"columns of the cache at length {options.lengths[-1]}, stage by stage: {columns}")
    return [*lines, "", f"load average at the end {os.getloadavg()[0]:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Cached against uncached block decoding.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--timed-blocks", type=int, default=2, help="uncached blocks that are timed")
    parser.add_argument(
        "--repeats", type=int, default=2, help="uncached runs, and half the cached ones; the fastest counts"
    )
    parser.add_argument("--output", type=Path, help="file for the table")
    options = parser.parse_args()
    text = "\n".join(report(Decoder(MODEL, nnx.Rngs(0)), options)) + "\n"
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)


if __name__ == "__main__":
    main()
