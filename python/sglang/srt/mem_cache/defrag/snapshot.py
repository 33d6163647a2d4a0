# SPDX-License-Identifier: Apache-2.0
"""What the planner looks at: parts of rows and the longest free runs, on the host."""

from __future__ import annotations

from typing import NamedTuple, Optional

import numpy as np
import torch

from sglang.srt.mem_cache.allocator.contiguous import FreeRuns
from sglang.srt.mem_cache.defrag.planner import Row

# Row units looked at in one plan, and free runs offered to it. Arbitrary: they
# bound the copy to the host (0.5 MB) and the planner's time.
MAX_SCAN_UNITS = 65536
MAX_FREE_RUNS = 256


class Scan(NamedTuple):
    """Units [lo, hi) of the row that ``req`` held in ``generation``."""

    req: object
    generation: int
    lo: int
    hi: int


class Snapshot(NamedTuple):
    arrangement: int  # Of the free list; positions in it hold for this one only.
    scans: list[Scan]
    host: torch.Tensor  # int64: 3 x MAX_FREE_RUNS, then each scan's units.
    ready: Optional[object]  # Event of the copy to ``host``; None on a CPU.


def take_snapshot(
    scans: list[Scan], *, runs: FreeRuns, table: torch.Tensor, page: int
) -> Snapshot:
    """Start the copy to the host; nothing here waits for it."""
    # Each from one unit in front of the scan on; at the start of a row there is none.
    rows = [
        table[
            scan.req.kv.req_pool_idx,
            max(scan.lo - 1, 0) * page : scan.hi * page : page,
        ]
        for scan in scans
    ]
    units = torch.cat(rows).to(torch.int64)
    if page > 1:
        units //= page
    flat = torch.cat([runs.longest(MAX_FREE_RUNS).reshape(-1), units])
    host = flat.to("cpu", non_blocking=True)
    ready = None
    if flat.device.type != "cpu":
        ready = torch.get_device_module(flat.device).Event()
        ready.record()
    return Snapshot(runs.arrangement, scans, host, ready)


def read_snapshot(snapshot: Snapshot) -> tuple[list[Row], np.ndarray]:
    """Rows, keyed by the index of their scan, and free runs, the longest first: int64
    [n, 3], each a ``FreeRun``; length 0 pads."""
    if snapshot.ready is not None:
        snapshot.ready.synchronize()
    flat, at = snapshot.host.numpy(), 3 * MAX_FREE_RUNS
    free = flat[:at].reshape(3, -1).T
    rows = []
    for key, scan in enumerate(snapshot.scans):
        before, front = (int(flat[at]), 1) if scan.lo else (-1, 0)
        n = front + scan.hi - scan.lo
        rows.append(Row(key, scan.lo, flat[at + front : at + n], before))
        at += n
    return rows, free
