# SPDX-License-Identifier: Apache-2.0
"""What the kernel would take on sm_120, by arithmetic: a model of tile clocks, DRAM and L2, checked on a measured card.

    python benchmark/kernels/arithmetic_sm120.py benchmark/results/h200/mla_tree_verify.json

The model of one call, all terms counted from the tile's shape (see `Tile` and `tile_for`) and from the card's rates:

    tile   = max(MMA clocks, shared-memory clocks) + softmax clocks + stall clocks       one row tile x one KV tile
    call   = fixed us + max(tiles of the busiest SM x tile, DRAM us, L2 us) + merge us

Two numbers are not counted but fitted on the measured rows, over all of them at once: `fixed us` (launches, prologue,
plan) and `stall clocks` a tile (barriers and latency that nothing hides). The table prints the model beside every
measured row with its error. A card that was not measured takes the same two numbers, its own rates, and the heading
'arithmetic'.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path

from verify_bench import counters, results
from verify_bench.shapes import Shape

MMA_FLOP = 2 * 16 * 8 * 16
# 16 x 8 x 16 MMAs for 16 KV rows x 8 query rows: 576 / 16 for the scores and 512 / 16 for the values.
MMA_PER_BLOCK = counters.D_QK // 16 + counters.D_V // 16
SMEM_BYTES_PER_CLOCK = 128
# Instructions per score in the softmax step (scale, compare, exp2, sum, convert, mask test), at 128 lanes a clock and
# SM.
SOFTMAX_OPS_PER_SCORE = 8
LANES = 128


@dataclasses.dataclass(frozen=True)
class Gpu:
    name: str
    sms: int
    clock_ghz: float
    mma_flop_per_clock: float  # an SM, bf16 with fp32 accumulation, by mma.sync
    dram_gbps: float  # reachable, not the data sheet's
    l2_gbps: float
    measured: bool = False

    @property
    def mma_tflops(self) -> float:
        return self.sms * self.mma_flop_per_clock * self.clock_ghz * 1e-3


# Share of the data sheet's DRAM rate that a copy reaches: 4.26 of 4.8 TB/s on the H200.
DRAM_SHARE = 0.89
# 1,792 GB/s is the data sheet's (512-bit GDDR7 at 28 Gb/s). 1024 FLOP a clock and SM is full-rate fp32 accumulation
# (504 TFLOP/s at boost); the GeForce card has half of it (209.5 TFLOP/s). L2: 64 B a clock and SM, an assumption:
# nobody has measured it here.
ARITHMETIC_GPUS = (
    Gpu("RTX PRO 6000", 188, 2.4, 1024, 1792 * DRAM_SHARE, 188 * 64 * 2.4),
    Gpu("RTX 5090", 170, 2.4, 512, 1792 * DRAM_SHARE, 170 * 64 * 2.4),
)


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one block works on at a time: `rows` query rows against `tokens` KV rows."""

    rows: int
    tokens: int
    warps: int = 8

    def mma_clocks(self, gpu: Gpu) -> float:
        return self.tokens / 16 * math.ceil(self.rows / 8) * MMA_PER_BLOCK * MMA_FLOP / gpu.mma_flop_per_clock

    def smem_bytes(self, kv_bytes_per_element: int) -> int:
        """KV: written once, read for the scores and for the values. Scores: partial sums of 4 warps, written and read.
        P: written once, read by every warp."""
        kv = self.tokens * kv_bytes_per_element * (counters.D_QK + counters.D_QK + counters.D_V)
        scores = self.rows * self.tokens * 4 * 4 * 2
        p = self.rows * self.tokens * 2 * (1 + self.warps)
        return kv + scores + p

    def smem_clocks(self, kv_bytes_per_element: int) -> float:
        return self.smem_bytes(kv_bytes_per_element) / SMEM_BYTES_PER_CLOCK

    def softmax_clocks(self) -> float:
        return self.rows * self.tokens * SOFTMAX_OPS_PER_SCORE / LANES


@dataclasses.dataclass(frozen=True)
class Fit:
    fixed_us: float
    stall_clocks: float


@dataclasses.dataclass(frozen=True)
class Estimate:
    tile_us: float  # the busiest SM's tiles
    dram_us: float
    l2_us: float
    merge_us: float
    fixed_us: float

    @property
    def total_us(self) -> float:
        return self.fixed_us + max(self.tile_us, self.dram_us, self.l2_us) + self.merge_us

    @property
    def bound(self) -> str:
        parts = {"tile": self.tile_us, "DRAM": self.dram_us, "L2": self.l2_us, "fixed": self.fixed_us + self.merge_us}
        return max(parts, key=parts.get)


def tile_for(shape: Shape) -> Tile:
    """The kernel's tile at this shape."""
    return Tile(rows=40, tokens=32)


def estimate(shape: Shape, gpu: Gpu, fit: Fit, tile: Tile | None = None) -> Estimate:
    tile = tile or tile_for(shape)
    element = counters.KV_BYTES[shape.kv_dtype]
    rows = shape.s_q * shape.h_q
    row_tiles = math.ceil(rows / tile.rows)
    kv_tiles = sum(math.ceil((p + shape.s_q) / tile.tokens) for p in shape.prefixes)
    busiest = math.ceil(row_tiles * kv_tiles / gpu.sms)
    clocks = max(tile.mma_clocks(gpu), tile.smem_clocks(element)) + tile.softmax_clocks() + fit.stall_clocks
    # Partials: fp32, written by each block and read by the merge, through L2.
    blocks = min(gpu.sms, row_tiles * kv_tiles)
    partial_bytes = 2 * blocks * tile.rows * counters.D_V * 4
    return Estimate(
        tile_us=busiest * clocks / gpu.clock_ghz * 1e-3,
        dram_us=counters.kv_bytes(shape) / gpu.dram_gbps * 1e-3,
        l2_us=row_tiles * counters.kv_bytes(shape) / gpu.l2_gbps * 1e-3,
        merge_us=partial_bytes / gpu.l2_gbps * 1e-3,
        fixed_us=fit.fixed_us,
    )


def measured_gpu(data: dict) -> Gpu:
    """The card of a result file, by the rates that were measured on it."""
    gpu, c = data["header"]["gpu"], data["header"]["ceilings"]
    needed = ("copy_gbps", "mma_tflops", "l2_read_gbps")
    if not gpu or any(not c.get(k) for k in needed) or "clocks_sm" not in gpu:
        raise ValueError("the result file has no measured rates of a GPU (copy, mma.sync, L2, SM clock)")
    clock = float(gpu["clocks_sm"].split()[0]) * 1e-3
    flop = c["mma_tflops"] * 1e3 / gpu["sms"] / clock
    return Gpu(
        gpu["name"], gpu["sms"], clock, flop, c.get("read_gbps") or c["copy_gbps"], c["l2_read_gbps"], measured=True
    )


def our_rows(data: dict) -> list[dict]:
    rows = [r for r in data["rows"] if r["arm"] == "ours"]
    if not rows:
        raise ValueError("the result file has no row of ours")
    return rows


def fit(rows: list[dict], gpu: Gpu) -> Fit:
    """The two free numbers, by least squares of the logarithms: a coarse grid, then finer ones around its best."""
    shapes = [(results.shape_of(r), math.log(r["us_p50"])) for r in rows]

    def loss(candidate: Fit) -> float:
        return sum((math.log(estimate(s, gpu, candidate).total_us) - t) ** 2 for s, t in shapes)

    best, span = Fit(6.0, 1500.0), (6.0, 1500.0)
    for _ in range(12):
        grid = [
            Fit(max(0.0, best.fixed_us + span[0] * i / 4), max(0.0, best.stall_clocks + span[1] * j / 4))
            for i in range(-4, 5)
            for j in range(-4, 5)
        ]
        best = min([best, *grid], key=loss)
        span = (span[0] / 2, span[1] / 2)
    return best


def report_table(data: dict) -> tuple[list[str], list[list[str]]]:
    gpu, rows = measured_gpu(data), our_rows(data)
    fitted = fit(rows, gpu)
    columns = ["bs, q, h", "prefix", "KV", f"{gpu.name}: measured us", "model us", "error", "bound by"]
    columns += [f"{g.name}: arithmetic us" for g in ARITHMETIC_GPUS] + ["bound by"]
    out = []
    for r in rows:
        shape = results.shape_of(r)
        if shape.page_size > 1:
            continue
        here = estimate(shape, gpu, fitted)
        there = [estimate(shape, g, fitted) for g in ARITHMETIC_GPUS]
        prefix = "+".join(f"{p:,}" for p in dict.fromkeys(shape.prefixes))
        out.append(
            [
                f"{shape.bs}, {shape.s_q}, {shape.h_q}",
                prefix,
                shape.kv_dtype,
                f"{r['us_p50']:.1f}",
                f"{here.total_us:.1f}",
            ]
            + [f"{100 * (here.total_us / r['us_p50'] - 1):+.0f} %", here.bound]
            + [f"{t.total_us:.0f}" for t in there]
            + [there[0].bound]
        )
    return columns, out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    args = parser.parse_args(argv)
    try:
        data = results.load(args.result)
        gpu = measured_gpu(data)
        fitted = fit(our_rows(data), gpu)
        columns, rows = report_table(data)
    except (OSError, ValueError) as e:
        parser.error(str(e))
    for g in (gpu, *ARITHMETIC_GPUS):
        rates = f"{g.mma_tflops:.0f} TFLOP/s by mma.sync, DRAM {g.dram_gbps:,.0f} GB/s, L2 {g.l2_gbps:,.0f} GB/s"
        print(f"{g.name}, {'measured' if g.measured else 'arithmetic'}: {g.sms} SMs at {g.clock_ghz:.2f} GHz, {rates}")
    print(f"fitted: {fitted.fixed_us:.1f} us fixed, {fitted.stall_clocks:.0f} stall clocks a tile")
    widths = [max(len(r[i]) for r in [columns, *rows]) for i in range(len(columns))]
    for r in [columns, *rows]:
        print("  ".join(cell.rjust(w) for cell, w in zip(r, widths, strict=False)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
