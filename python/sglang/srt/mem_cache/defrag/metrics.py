# SPDX-License-Identifier: Apache-2.0
"""Counters and gauges of one rank; without --enable-metrics they only count here."""

from __future__ import annotations

from typing import Optional


class DefragMetrics:
    """``labels`` are those of the scheduler's collector, None to export nothing."""

    def __init__(self, labels: Optional[dict[str, str]]):
        self.runs_total = 0
        self.bytes_moved_total = 0
        self.exported = labels is not None
        if not self.exported:
            return
        # The server sets PROMETHEUS_MULTIPROC_DIR before this import may happen.
        from prometheus_client import Counter, Gauge

        def metric(kind, name: str, text: str, **options):
            metric = kind(name, text, labelnames=list(labels), **options)
            return metric.labels(**labels)  # From here on it is exported, as 0.

        self._runs = metric(
            Counter,
            "sglang:kv_defrag_runs_total",
            "Relocation steps that moved KV slots.",
        )
        self._bytes = metric(
            Counter,
            "sglang:kv_defrag_bytes_moved_total",
            "Bytes of KV moved by relocation, over all pools and layers.",
        )
        self._runs_per_request = metric(
            Gauge,
            "sglang:kv_runs_per_request",
            "Runs of consecutive KV slots per running request, mean.",
            multiprocess_mode="mostrecent",
        )
        self._longest_run = metric(
            Gauge,
            "sglang:kv_longest_run_tokens",
            "Longest run of consecutive KV slots of a running request.",
            multiprocess_mode="mostrecent",
        )

    def moved(self, num_bytes: int) -> None:
        self.runs_total += 1
        self.bytes_moved_total += num_bytes
        if self.exported:
            self._runs.inc(1)
            self._bytes.inc(num_bytes)

    def contiguity(self, *, runs_per_request: float, longest_run: int) -> None:
        if self.exported:
            self._runs_per_request.set(runs_per_request)
            self._longest_run.set(longest_run)
