# SPDX-License-Identifier: Apache-2.0
"""Counters and gauges of one rank; without --enable-metrics they only count here."""

from __future__ import annotations

from typing import Optional


class DefragMetrics:
    """``labels`` are those of the scheduler's collector, None to export nothing."""

    def __init__(self, labels: Optional[dict[str, str]]):
        self.runs_total = 0
        self.bytes_moved_total = 0
        self._labels = labels
        if labels is None:
            return
        # Upstream sets PROMETHEUS_MULTIPROC_DIR before this import may happen.
        from prometheus_client import Counter, Gauge

        names = list(labels)
        self._runs = Counter(
            name="sglang:kv_defrag_runs_total",
            documentation="Relocation steps that moved KV slots.",
            labelnames=names,
        )
        self._bytes = Counter(
            name="sglang:kv_defrag_bytes_moved_total",
            documentation="Bytes of KV moved by relocation, over all pools and layers.",
            labelnames=names,
        )
        self._runs_per_request = Gauge(
            name="sglang:kv_runs_per_request",
            documentation="Runs of consecutive KV slots per running request, mean.",
            labelnames=names,
            multiprocess_mode="mostrecent",
        )
        self._longest_run = Gauge(
            name="sglang:kv_longest_run_tokens",
            documentation="Longest run of consecutive KV slots of a running request.",
            labelnames=names,
            multiprocess_mode="mostrecent",
        )
        for counter in (self._runs, self._bytes):  # there before the first move
            counter.labels(**labels).inc(0)

    @property
    def exported(self) -> bool:
        return self._labels is not None

    def moved(self, num_bytes: int) -> None:
        self.runs_total += 1
        self.bytes_moved_total += num_bytes
        if self.exported:
            self._runs.labels(**self._labels).inc(1)
            self._bytes.labels(**self._labels).inc(num_bytes)

    def contiguity(self, *, runs_per_request: float, longest_run: int) -> None:
        if self.exported:
            self._runs_per_request.labels(**self._labels).set(runs_per_request)
            self._longest_run.labels(**self._labels).set(longest_run)
