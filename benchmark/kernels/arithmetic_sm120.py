# SPDX-License-Identifier: Apache-2.0
"""What the kernel would take on sm_120, by arithmetic: a model of tile clocks, DRAM and L2, checked on a measured card.

    python benchmark/kernels/arithmetic_sm120.py benchmark/results/h200/mla_tree_verify.json

One call, with every term but two counted from the kernel's work distribution (csrc/mla_tree_verify/schedule.h, mirrored
here and compared by a test) and from the card's rates:

    tile = max(MMA clocks, shared-memory clocks) + stall clocks           16 tokens x one row tile, on one SM
    call = fixed us + max(tiles of the busiest column x tile, DRAM us, L2 us) + merge us

Fitted on the measured rows, all of them at once: `fixed us` (launches, prologue, the plan) and `stall clocks` (what
the two kinds of warps wait for each other and for memory, a tile). The table prints the model beside every measured
row with its error. A card that nobody has measured takes the same two numbers and its own rates, and is headed
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

# schedule.h
TILE_TOKENS = 16
MIN_TILES_PER_COLUMN = 3
MAX_ROW_BLOCKS = {"bf16": 5, "fp8": 4}
VALUE_WARPS = 4

MMA_FLOP = 2 * 16 * 8 * 16
# 16 x 8 x 16 MMAs of 16 KV rows and 8 query rows: 576 / 16 for the scores and 512 / 16 for the values.
MMA_PER_BLOCK = counters.D_QK // 16 + counters.D_V // 16
SMEM_BYTES_PER_CLOCK = 128
SCORE_BYTES = TILE_TOKENS * 8 * 4  # of a row block, fp32


@dataclasses.dataclass(frozen=True)
class Gpu:
    name: str
    sms: int
    clock_ghz: float
    mma_flop_per_clock: float  # an SM, bf16 with fp32 accumulation, by mma.sync
    dram_gbps: float  # what a kernel reaches, not the data sheet's
    l2_gbps: float
    measured: bool = False

    @property
    def mma_tflops(self) -> float:
        return self.sms * self.mma_flop_per_clock * self.clock_ghz * 1e-3


# Of the data sheet's 4.8 TB/s an H200 copies 4.26: the same share is assumed elsewhere.
DRAM_SHARE = 0.89
# Data sheet: 188 and 170 SMs, 1,792 GB/s (512 bits of GDDR7 at 28 Gb/s). 1024 FLOP a clock and SM is fp32
# accumulation at full rate (504 TFLOP/s at boost, from memory of a white paper); GeForce has half of it (209.5
# TFLOP/s published). Assumed, nobody has measured them here: 2.4 GHz held, and 64 B a clock and SM out of L2.
ARITHMETIC_GPUS = (
    Gpu("RTX PRO 6000", 188, 2.4, 1024, 1792 * DRAM_SHARE, 188 * 64 * 2.4),
    Gpu("RTX 5090", 170, 2.4, 512, 1792 * DRAM_SHARE, 170 * 64 * 2.4),
)


@dataclasses.dataclass(frozen=True)
class Fit:
    fixed_us: float
    stall_clocks: float


@dataclasses.dataclass(frozen=True)
class Estimate:
    tile_us: float  # the tiles of the busiest column
    dram_us: float
    l2_us: float
    merge_us: float
    fixed_us: float

    @property
    def total_us(self) -> float:
        return self.fixed_us + max(self.tile_us, self.dram_us, self.l2_us) + self.merge_us

    @property
    def bound(self) -> str:
        parts = {"tiles": self.tile_us, "DRAM": self.dram_us, "L2": self.l2_us, "fixed": self.fixed_us + self.merge_us}
        return max(parts, key=parts.__getitem__)


def row_blocks_per_tile(rows: int, kv_dtype: str) -> int:
    """Row tile in blocks of 8 rows: the n that makes tiles x (n + 3) least, the larger n of two equals."""
    blocks = -(-rows // 8)
    return min(range(MAX_ROW_BLOCKS[kv_dtype], 0, -1), key=lambda n: -(-blocks // n) * (n + 3))


def num_row_tiles(rows: int, kv_dtype: str) -> int:
    return -(-rows // (8 * row_blocks_per_tile(rows, kv_dtype)))


def num_columns(num_tiles: int, row_tiles: int, sms: int) -> int:
    """Columns of blocks that share the line of tiles; each has one block a row tile."""
    return min(max(1, num_tiles // MIN_TILES_PER_COLUMN), max(1, sms // row_tiles))


def mma_clocks(row_blocks: int, gpu: Gpu) -> float:
    return row_blocks * MMA_PER_BLOCK * MMA_FLOP / gpu.mma_flop_per_clock


def smem_clocks(row_blocks: int, kv_dtype: str) -> float:
    """KV: written, read for the scores, read for the values. Two partial scores and P: written and read."""
    kv = TILE_TOKENS * counters.KV_BYTES[kv_dtype] * (counters.D_QK + counters.D_QK + counters.D_V)
    exchange = row_blocks * SCORE_BYTES * 2 * 2
    p = row_blocks * 8 * TILE_TOKENS * 2 * (1 + VALUE_WARPS)
    return (kv + exchange + p) / SMEM_BYTES_PER_CLOCK


def estimate(shape: Shape, gpu: Gpu, fit: Fit) -> Estimate:
    rows = shape.s_q * shape.h_q
    row_blocks, row_tiles = row_blocks_per_tile(rows, shape.kv_dtype), num_row_tiles(rows, shape.kv_dtype)
    num_tiles = sum(-(-(p + shape.s_q) // TILE_TOKENS) for p in shape.prefixes)
    columns = num_columns(num_tiles, row_tiles, gpu.sms)
    waves = -(-columns * row_tiles // gpu.sms)  # more row tiles than SMs
    clocks = max(mma_clocks(row_blocks, gpu), smem_clocks(row_blocks, shape.kv_dtype)) + fit.stall_clocks
    partials = (columns + shape.bs - 1) * row_tiles * row_blocks * 8 * counters.D_V * 2  # fp16
    return Estimate(
        tile_us=waves * -(-num_tiles // columns) * clocks / gpu.clock_ghz * 1e-3,
        dram_us=counters.kv_bytes(shape) / gpu.dram_gbps * 1e-3,
        l2_us=row_tiles * counters.kv_bytes(shape) / gpu.l2_gbps * 1e-3,
        merge_us=2 * partials / gpu.l2_gbps * 1e-3,
        fixed_us=fit.fixed_us,
    )


def measured_gpu(data: dict) -> Gpu:
    """The card of a result file, by the rates that were measured on it."""
    gpu, rates = data["header"]["gpu"], data["header"]["ceilings"]
    if not gpu or "clocks_sm" not in gpu or any(not rates.get(k) for k in ("copy_gbps", "mma_tflops", "l2_read_gbps")):
        raise ValueError("the result file has no measured rates of a GPU (copy, mma.sync, L2, SM clock)")
    clock = float(gpu["clocks_sm"].split()[0]) * 1e-3
    flop = rates["mma_tflops"] * 1e3 / gpu["sms"] / clock
    dram = rates.get("read_gbps") or rates["copy_gbps"]
    return Gpu(gpu["name"], gpu["sms"], clock, flop, dram, rates["l2_read_gbps"], measured=True)


def our_rows(data: dict) -> list[dict]:
    """Ours at page size 1: the model knows nothing of pages."""
    rows = [r for r in data["rows"] if r["arm"] == "ours" and r["page_size"] == 1]
    if not rows:
        raise ValueError("the result file has no row of ours")
    return rows


def fit(rows: list[dict], gpu: Gpu) -> Fit:
    """The two free numbers, by least squares of the logarithms: a coarse grid, then finer ones around its best."""
    targets = [(results.shape_of(r), math.log(r["us_p50"])) for r in rows]

    def loss(candidate: Fit) -> float:
        return sum((math.log(estimate(shape, gpu, candidate).total_us) - t) ** 2 for shape, t in targets)

    best, span = Fit(5.0, 300.0), Fit(5.0, 300.0)
    for _ in range(12):
        grid = [
            Fit(
                max(0.0, best.fixed_us + span.fixed_us * i / 4), max(0.0, best.stall_clocks + span.stall_clocks * j / 4)
            )
            for i in range(-4, 5)
            for j in range(-4, 5)
        ]
        best = min([best, *grid], key=loss)
        span = Fit(span.fixed_us * 0.6, span.stall_clocks * 0.6)
    return best


def report_table(data: dict) -> tuple[list[str], list[list[str]]]:
    gpu, rows = measured_gpu(data), our_rows(data)
    fitted = fit(rows, gpu)
    columns = ["bs, q, h", "prefix", "KV", f"{gpu.name}: measured us", "model us", "error", "bound by"]
    for g in ARITHMETIC_GPUS:
        columns += [f"{g.name}: arithmetic us", "bound by"]
    out = []
    for r in rows:
        shape = results.shape_of(r)
        here = estimate(shape, gpu, fitted)
        cells = [f"{shape.bs}, {shape.s_q}, {shape.h_q}", "+".join(f"{p:,}" for p in dict.fromkeys(shape.prefixes))]
        cells += [shape.kv_dtype, f"{r['us_p50']:.1f}", f"{here.total_us:.1f}"]
        cells += [f"{100 * (here.total_us / r['us_p50'] - 1):+.0f} %", here.bound]
        for g in ARITHMETIC_GPUS:
            there = estimate(shape, g, fitted)
            cells += [f"{there.total_us:.0f}", there.bound]
        out.append(cells)
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
        print("  ".join(cell.rjust(w) for cell, w in zip(r, widths, strict=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
