# SPDX-License-Identifier: Apache-2.0
"""What a verify call must move and compute, counted once; every rate of the benchmark comes from here."""

from __future__ import annotations

from .shapes import Shape

D_QK = 576  # 512 latent + 64 rope
D_V = 512
KV_BYTES = {"bf16": 2, "fp8": 1}


def row_bytes(kv_dtype: str) -> int:
    """Bytes of one KV row: 1152 in bf16, 576 in fp8."""
    return D_QK * KV_BYTES[kv_dtype]


def kv_bytes(shape: Shape) -> int:
    """Unique KV bytes: each listed row once, however often the heads, row tiles or splits read it."""
    return shape.tokens * row_bytes(shape.kv_dtype)


def flops(shape: Shape) -> int:
    """2 x (576 + 512) for each pair of query row and listed KV row, masked draft pairs included."""
    return 2 * (D_QK + D_V) * shape.h_q * shape.s_q * shape.tokens


def gbps(shape: Shape, us: float) -> float:
    return kv_bytes(shape) / us * 1e-3


def tflops(shape: Shape, us: float) -> float:
    return flops(shape) / us * 1e-6


def floors_us(shape: Shape, copy_gbps: float, mma_tflops: float) -> tuple[float, float]:
    """(time to read the KV once at the copy rate, time of the MMAs at the MMA rate), in us."""
    return kv_bytes(shape) / copy_gbps * 1e-3, flops(shape) / mma_tflops * 1e-6
