# SPDX-License-Identifier: Apache-2.0
"""Which limit a GPU runs into, named from counters, and the KV bandwidth that a step time stands for."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sglang.kdtree.probe.nvml import Sample

# Chosen on an RTX PRO 6000 whose decode at 64k read SM 99.8 %, memory controller 1.2 %, 133 W, where
# the stock tree verify used 8 of 188 SMs and waited for memory; "SM %" only says that some kernel runs.
BUSY_PCT = 80.0
IDLE_PCT = 50.0
BANDWIDTH_PCT = 50.0
LATENCY_MEMORY_PCT = 20.0
LATENCY_POWER_SHARE = 0.6
COMPUTE_POWER_SHARE = 0.75
NAMES = ("host-bound", "bandwidth-bound", "compute-bound", "latency-bound", "mixed")


class Means(msgspec.Struct, frozen=True, kw_only=True):
    samples: int
    sm_pct: float
    memory_pct: float
    power_w: float
    power_limit_w: float
    sm_clock_mhz: float
    memory_clock_mhz: float
    pcie_rx_mb_s: float | None
    pcie_tx_mb_s: float | None
    nvlink_rx_mb_s: float | None
    nvlink_tx_mb_s: float | None
    used_gb: float


class Regime(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # of NAMES
    reasoning: str
    remedy: str


def means(samples: Sequence[Sample]) -> Means:
    def mean(key: str) -> float | None:
        values = [
            getattr(sample, key)
            for sample in samples
            if getattr(sample, key) is not None
        ]
        return sum(values) / len(values) if values else None

    figures = {name: mean(name) for name in Means.__struct_fields__[1:]}
    return Means(samples=len(samples), **figures)


def classify(m: Means) -> Regime:
    share = m.power_w / m.power_limit_w
    seen = f"SM {m.sm_pct:.1f} %, memory controller {m.memory_pct:.1f} %, {m.power_w:.0f} of {m.power_limit_w:.0f} W"
    if m.sm_pct < IDLE_PCT:
        return Regime(
            name="host-bound",
            reasoning=f"{seen}: no kernel runs for much of the time.",
            remedy="Look at the CPU side: CUDA graphs off, overlap scheduling off, a slow tokenizer, or too little load.",
        )
    if m.memory_pct >= BANDWIDTH_PCT:
        return Regime(
            name="bandwidth-bound",
            reasoning=f"{seen}: memory is busy most of the time.",
            remedy="Fewer bytes help: fp8 KV, quantised weights, more requests a step to share the weights.",
        )
    if share >= COMPUTE_POWER_SHARE:
        return Regime(
            name="compute-bound",
            reasoning=f"{seen}: near the power limit while memory rests.",
            remedy="Fewer operations help: a smaller tree, a smaller prefill chunk beside decode, lower precision.",
        )
    if (
        m.sm_pct >= BUSY_PCT
        and m.memory_pct < LATENCY_MEMORY_PCT
        and share < LATENCY_POWER_SHARE
    ):
        return Regime(
            name="latency-bound",
            reasoning=f"{seen}: kernels run all the time but neither memory nor the power budget is used: "
            "too few thread blocks, each waiting for its own loads.",
            remedy="With triton's tree verify: --attention-backend kdtree_sm120, which splits the KV over all SMs. "
            "With kdtree_sm120: more requests at a time or a larger tree; a short context leaves the GPU idle.",
        )
    return Regime(
        name="mixed",
        reasoning=f"{seen}: no single limit stands out.",
        remedy="Profile a step with nsys.",
    )


def kv_bytes_per_step(*, context: int, cell_bytes: int) -> int:
    """Unique KV bytes that one decode step of one request has to read on one rank."""
    return context * cell_bytes


def effective_bandwidth_gb_s(*, context: int, cell_bytes: int, step_s: float) -> float:
    return kv_bytes_per_step(context=context, cell_bytes=cell_bytes) / step_s / 1e9
