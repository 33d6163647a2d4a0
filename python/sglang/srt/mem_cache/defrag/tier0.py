# SPDX-License-Identifier: Apache-2.0
"""Tier 0: the free list in order at idle, and how contiguous the running rows are."""

from __future__ import annotations

from typing import Callable, Optional, Sequence

import torch

from sglang.srt.mem_cache.defrag.metrics import DefragMetrics
from sglang.srt.mem_cache.defrag.step_checks import StepChecks

# Steps between two measurements for the gauges, and the tokens measured.
SURVEY_INTERVAL = 64
MAX_SURVEY_TOKENS = 262144


class Tier0Defragmenter:
    """Puts the free list in order at idle, and measures for the gauges."""

    def __init__(
        self,
        *,
        allocator,
        req_to_token_pool,
        metrics: DefragMetrics,
        running_requests: Callable[[], Sequence],
        checks: Optional[StepChecks] = None,
    ):
        self.allocator = allocator
        self.runs = allocator.runs
        self.page_size = allocator.page_size
        self.req_to_token_pool = req_to_token_pool
        self.metrics = metrics
        self.running_requests = running_requests
        self.checks = checks
        self.step = 0
        self._survey: Optional[tuple[int, torch.Tensor]] = None
        self._idle_at_step = -1

    def after_batch(self) -> None:
        """The result of a batch has been processed."""
        self.step += 1
        if self.metrics.exported and self.step % SURVEY_INTERVAL == 0:
            self._publish_survey()
            self._start_survey()
        self._relocate()
        if self.checks is not None:
            self.checks.after_step(self.step)

    def on_idle(self) -> None:
        """There is no request left."""
        # The idle loop spins: once per stretch of idleness is enough.
        if self._idle_at_step == self.step:
            return
        self._idle_at_step = self.step
        self.runs.end_stripes()
        self.runs.rearrange()

    def _relocate(self) -> None:
        """Tier 0 leaves live slots where they are."""

    def _start_survey(self) -> None:
        pieces, count, total = [], 0, 0
        table = self.req_to_token_pool.req_to_token
        for req in self.running_requests():
            length = min(req.kv.kv_committed_len, MAX_SURVEY_TOKENS - total)
            if not req.kv.holds_kv or length <= 0:
                continue
            pieces.append(table[req.kv.req_pool_idx, :length])
            # A slot number that no run continues separates the rows.
            pieces.append(table.new_full((1,), -2 - count))
            count, total = count + 1, total + length
        if not count:
            self._survey = None
            return
        slots = torch.cat(pieces)
        first = torch.ones_like(slots, dtype=torch.bool)
        first[1:] = slots[1:] != slots[:-1] + 1
        run = torch.cumsum(first, 0) - 1
        lengths = torch.zeros_like(run).scatter_add_(0, run, (slots >= 0).to(run.dtype))
        numbers = torch.stack([first.sum() - count, lengths.max()])
        self._survey = count, numbers.to("cpu", non_blocking=True)

    def _publish_survey(self) -> None:
        # Copied SURVEY_INTERVAL steps ago; their batches have been waited for.
        if self._survey is not None:
            count, numbers = self._survey
            runs, longest = numbers.tolist()
            self.metrics.contiguity(runs_per_request=runs / count, longest_run=longest)
