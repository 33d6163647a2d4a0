# SPDX-License-Identifier: Apache-2.0
"""What --kdtree-verify validate finds: counters on the device, a log line every so many
steps, when idle and at exit, Prometheus metrics, and one reproducer file.

``Validation.compare`` is called by every layer, also inside a captured step: it is
tensor arithmetic of fixed shapes into static buffers. ``Validation.tick`` is called by
the host before each step: it starts a copy to the host, and reads one that has arrived.
"""

from __future__ import annotations

import atexit
import functools
import logging
import pathlib
from typing import TYPE_CHECKING, List, Optional

import msgspec
import torch
from sgl_kernel_sm120 import __version__ as kernel_version

from sglang.srt.layers.attention.kdtree_verify import (
    QK_HEAD_DIM,
    V_HEAD_DIM,
    LayerErrors,
    VerifyErrors,
    VerifyStep,
)
from sglang.srt.managers.idle_calls import call_when_idle
from sglang.srt.runtime_context import get_observability, get_parallel, get_serving

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

logger = logging.getLogger(__name__)

# Steps between two reports. Before that, reports come at 2, 4, 8 ... steps: a scheduler
# process ends by a kill, so what exit handlers say is often lost.
REPORT_INTERVAL = 256
# A request of 185k tokens in bf16 is 213 MB.
DUMP_LIMIT_BYTES = 256 << 20


class Collectors:
    """The process's Prometheus collectors. Several backends can share a process: a
    drafter's, those of adaptive speculation, those of PD multiplexing."""

    def __init__(self, names: tuple[str, ...]):
        # The server sets PROMETHEUS_MULTIPROC_DIR before this import may happen.
        from prometheus_client import Counter, Gauge

        self.counters = {
            "rows": Counter(
                name="sglang:kdtree_validate_rows_total",
                documentation="Rows (tokens of a layer) that validate mode compared.",
                labelnames=names,
            ),
            "rows_over_ulp": Counter(
                name="sglang:kdtree_validate_rows_over_ulp_total",
                documentation="Rows further apart than one bf16 rounding step.",
                labelnames=names,
            ),
            "mismatches": Counter(
                name="sglang:kdtree_validate_mismatches_total",
                documentation="Rows further apart than rounding explains.",
                labelnames=names,
            ),
        }
        self.fallbacks = Counter(
            name="sglang:kdtree_fallback_calls_total",
            documentation="Attention calls that went to the stock backend. A call of a "
            "captured step counts once, at its capture.",
            labelnames=[*names, "reason"],
        )
        self.gauges = {
            "max_abs": Gauge(
                name="sglang:kdtree_validate_max_abs_error",
                documentation="Largest difference of an element since the start.",
                labelnames=[*names, "layer"],
                multiprocess_mode="mostrecent",
            ),
            "max_rel": Gauge(
                name="sglang:kdtree_validate_max_rel_error",
                documentation="Largest of a row's difference over its largest element.",
                labelnames=[*names, "layer"],
                multiprocess_mode="mostrecent",
            ),
            "mean_rel": Gauge(
                name="sglang:kdtree_validate_mean_rel_error",
                documentation="Sum of differences over sum of elements.",
                labelnames=[*names, "layer"],
                multiprocess_mode="mostrecent",
            ),
        }


collectors_of = functools.cache(Collectors)


class KDTreeMetrics:
    """One backend's share of the counters and gauges of a rank. ``labels`` None exports
    nothing; ``part`` stands before the layer's number."""

    def __init__(self, labels: Optional[dict[str, str]], part: str = ""):
        self._labels = labels
        self._part = part
        self._exported = dict.fromkeys(("rows", "rows_over_ulp", "mismatches"), 0)
        if labels is not None:
            self._collectors = collectors_of(tuple(labels))

    def fell_back(self, reason: str) -> None:
        if self._labels is not None:
            self._collectors.fallbacks.labels(**self._labels, reason=reason).inc()

    def validated(self, layers: List[LayerErrors], first_layer: int) -> None:
        """``layers`` are totals since the start."""
        if self._labels is None:
            return
        for name, counter in self._collectors.counters.items():
            total = sum(getattr(errors, name) for errors in layers)
            counter.labels(**self._labels).inc(total - self._exported[name])
            self._exported[name] = total
        for errors in layers:
            layer = f"{self._part} {first_layer + errors.layer_index}".strip()
            labels = self._labels | {"layer": layer}
            for name, gauge in self._collectors.gauges.items():
                gauge.labels(**labels).set(getattr(errors, name))


def metric_labels() -> Optional[dict[str, str]]:
    """The labels of the scheduler's collector that an attention backend can know."""
    if not get_observability().enable_metrics:
        return None
    parallel = get_parallel()
    return {
        "model_name": get_serving().served_model_name,
        "engine_type": "unified",
        "tp_rank": str(parallel.tp_rank),
        "pp_rank": str(parallel.pp_rank),
    }


class MismatchLatch:
    """The first request that is a mismatch, kept on the device until the host looks.

    Prefix KV is not kept: it stays in the pool while the request lives. Its slots are,
    since a row of req_to_token is another request's as soon as this one ends.
    """

    def __init__(
        self,
        *,
        req_to_token: torch.Tensor,
        num_tokens: int,
        num_heads: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
    ):
        def zeros(*shape, dtype=dtype):
            return torch.zeros(shape, dtype=dtype, device=device)

        self.q = zeros(num_tokens, num_heads, QK_HEAD_DIM)
        self.ours = zeros(num_tokens, num_heads, V_HEAD_DIM)
        self.reference = zeros(num_tokens, num_heads, V_HEAD_DIM)
        self.draft_kv = zeros(num_tokens, QK_HEAD_DIM, dtype=kv_dtype)
        self.draft_slots = zeros(num_tokens, dtype=torch.int64)
        self.tree_mask = zeros(num_tokens, num_tokens, dtype=torch.uint8)
        self.req_to_token = req_to_token
        self.slots = zeros(req_to_token.shape[1], dtype=req_to_token.dtype)
        # taken, layer, row of req_to_token, prefix length, tokens
        self.facts = zeros(5, dtype=torch.int64)

    def take(
        self,
        layer_id: int,
        step: VerifyStep,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        ours: torch.Tensor,
        reference: torch.Tensor,
        mismatch: torch.Tensor,
    ) -> None:
        """mismatch is bool [b * N]. Fixed shapes, no host sync."""
        n = step.num_tokens
        wrong = mismatch.view(step.batch_size, n).any(dim=-1)
        request = wrong.int().argmax()[None]
        new = wrong.any() & (self.facts[0] == 0)
        end = step.indptr.long().index_select(0, request + 1)
        prefix_len = end - step.indptr.long().index_select(0, request) - n
        place = (end - n + torch.arange(n, device=q.device)).clamp_(min=0)
        slots = step.indices.index_select(0, place).long()
        # fp8 has no index_select; bytes do.
        kv = kv_cache.view(kv_cache.shape[0], QK_HEAD_DIM)
        kv = kv.view(torch.uint8).index_select(0, slots)

        def of_request(rows: torch.Tensor) -> torch.Tensor:
            rows = rows[: mismatch.shape[0]].view(step.batch_size, n, -1)
            return rows.index_select(0, request)

        def latch(buffer: torch.Tensor, value: torch.Tensor) -> None:
            buffer.copy_(torch.where(new, value.reshape(buffer.shape), buffer))

        latch(self.q[:n], of_request(q))
        latch(self.ours[:n], of_request(ours))
        latch(self.reference[:n], of_request(reference))
        latch(self.draft_kv[:n].view(torch.uint8), kv)
        latch(self.draft_slots[:n], slots)
        if step.tree_mask is not None:
            mask = step.tree_mask.index_select(0, request).to(torch.uint8)
        else:
            mask = torch.ones_like(self.tree_mask[:n, :n]).tril()
        latch(self.tree_mask[:n, :n], mask)
        row = step.rows.long().index_select(0, request)
        latch(self.slots, self.req_to_token.index_select(0, row))

        def number(value: int) -> torch.Tensor:
            return torch.full((1,), value, dtype=torch.int64, device=q.device)

        facts = [number(1), number(layer_id), row, prefix_len, number(n)]
        latch(self.facts, torch.cat(facts))


class Reproducer(msgspec.Struct, frozen=True):
    """A latched mismatch on the host; the format is probe/reproducer.py's."""

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def describe(self) -> str:
        m = self.metadata
        return (
            f"layer {m['layer']}, s_q {m['s_q']}, h_q {m['h_q']}, context "
            f"{m['context']}, max abs error {m['max_abs']}{m['doubt']}"
        )

    def save(self, folder: pathlib.Path, limit_bytes: int = DUMP_LIMIT_BYTES) -> str:
        """-> what was done, for the log"""
        if self.num_bytes > limit_bytes:
            return f"no reproducer: {self.num_bytes} bytes, at most {limit_bytes} are written"
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        name = "{part}rank{tp_rank}-layer{layer}-context{context}.safetensors"
        path = folder / f"kdtree-mismatch-{name.format(**self.metadata)}"
        try:  # a full disk must not end a server
            folder.mkdir(parents=True, exist_ok=True)
            save_file(self.tensors, path, metadata=self.metadata)
        except (OSError, SafetensorError) as error:
            return f"no reproducer: {path} cannot be written: {error}"
        return f"reproducer {path}"


def build_reproducer(
    latch: MismatchLatch,
    *,
    kv_cache: torch.Tensor,
    layer: RadixAttention,
    page_size: int,
    tp_rank: int,
    part: str = "",
) -> Reproducer:
    """Reads the latch: a host sync, once in a server's life."""
    _, layer_id, row, prefix_len, n = latch.facts.tolist()
    prefix = latch.slots[:prefix_len].long()
    moved_on = not torch.equal(latch.req_to_token[row, :prefix_len].long(), prefix)
    kv = kv_cache.view(kv_cache.shape[0], QK_HEAD_DIM)[prefix]
    ours, reference = latch.ours[:n], latch.reference[:n]
    error = (ours.float() - reference.float()).abs()
    scaled = layer.k_scale is not None and layer.v_scale is not None
    num_entries = prefix_len + n
    tensors = {
        "q": latch.q[:n],
        "kv_rows": torch.cat([kv, latch.draft_kv[:n]]),
        "kv_indptr": torch.tensor([0, num_entries]),
        "kv_indices": torch.cat([prefix, latch.draft_slots[:n]]),
        "tree_mask": latch.tree_mask[:n, :n],
        "out_reference": reference,
        "out_kdtree": ours,
    }
    metadata = {
        "format": "kdtree-reproducer-1",
        "layer": layer_id,
        "context": prefix_len,
        "s_q": n,
        "h_q": ours.shape[1],
        "page_size": page_size,
        "mask_layout": "QLEN",
        "sm_scale": layer.scaling,
        "logit_cap": layer.logit_cap,
        "k_scale": layer.k_scale_float if scaled else 1.0,
        "v_scale": layer.v_scale_float if scaled else 1.0,
        "request_id": "",
        "part": f"{part.replace(' ', '-')}-" if part else "",
        # Its KV may have been written over between the step and now.
        "doubt": ", of a request that has ended since" if moved_on else "",
        "tp_rank": tp_rank,
        "max_abs": float(error.max()),
        "mean_rel": float(error.sum() / reference.float().abs().sum()),
        "versions": f"torch {torch.__version__}, sgl_kernel_sm120 {kernel_version}",
    }
    return Reproducer(
        tensors={k: v.contiguous().cpu() for k, v in tensors.items()},
        metadata={k: str(v) for k, v in metadata.items()},
    )


def is_report_step(steps: int) -> bool:
    early = 2 <= steps < REPORT_INTERVAL and steps & (steps - 1) == 0
    return early or steps % REPORT_INTERVAL == 0


class Validation:
    """Validate mode of one rank."""

    def __init__(
        self,
        *,
        first_layer: int,
        num_layers: int,
        num_tokens: int,
        num_heads: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        page_size: int,
        req_to_token: torch.Tensor,
        tp_rank: int,
        metrics: KDTreeMetrics,
        dump_dir: Optional[str],
        part: str = "",
    ):
        fp8 = kv_dtype.itemsize == 1
        self.first_layer = first_layer
        self.page_size = page_size
        self.part = part
        self.tp_rank = tp_rank
        self.metrics = metrics
        self.dump_dir = dump_dir
        self.title = f"kdtree_sm120 validate{f', {part}' if part else ''}"
        self.errors = VerifyErrors(
            num_layers,
            device,
            VerifyErrors.MISMATCH_LIMIT_FP8 if fp8 else VerifyErrors.MISMATCH_LIMIT,
        )
        self.latch = MismatchLatch(
            req_to_token=req_to_token,
            num_tokens=num_tokens,
            num_heads=num_heads,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
        )
        self.layers: dict[int, tuple[RadixAttention, torch.Tensor]] = {}
        self.steps = self.caught_up = 0
        self.dumped = False
        pinned = device.type == "cuda"
        self._taken = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        self._snapshot = torch.zeros(
            self.errors.counters.shape, dtype=torch.float64, pin_memory=pinned
        )
        self._arrived: Optional[torch.cuda.Event] = None
        atexit.register(self.catch_up)
        call_when_idle(self.catch_up)

    def compare(
        self,
        layer: RadixAttention,
        step: VerifyStep,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        ours: torch.Tensor,
        reference: torch.Tensor,
    ) -> None:
        """Rows of padding (row 0 of req_to_token, or past b * N) are left out."""
        self.layers[layer.layer_id] = (layer, kv_cache)
        n, num_rows = step.num_tokens, step.batch_size * step.num_tokens
        counted = (step.rows != 0)[:, None].expand(-1, n).reshape(-1)
        ours, reference = ours[:num_rows], reference[:num_rows]
        mismatch = self.errors.update(
            layer.layer_id - self.first_layer, ours, reference, counted
        )
        self.latch.take(layer.layer_id, step, q, kv_cache, ours, reference, mismatch)

    def tick(self) -> None:
        """Before a step, outside any capture. Never waits for the device."""
        self.steps += 1
        if self._taken.item() and not self.dumped:
            self.dump()
        self._taken.copy_(self.latch.facts[:1], non_blocking=True)
        if self._arrived is not None and self._arrived.query():
            self._arrived = None
            self.report(self._snapshot)
        if is_report_step(self.steps):
            self._snapshot.copy_(self.errors.counters, non_blocking=True)
            if self._snapshot.is_pinned():
                self._arrived = torch.cuda.Event()
                self._arrived.record()
            else:
                self.report(self._snapshot)

    def dump(self) -> None:
        self.dumped = True
        layer, kv_cache = self.layers[int(self.latch.facts[1])]
        reproducer = build_reproducer(
            self.latch,
            kv_cache=kv_cache,
            layer=layer,
            page_size=self.page_size,
            tp_rank=self.tp_rank,
            part=self.part,
        )
        done = "no reproducer: set --kdtree-dump-dir to get one"
        if self.dump_dir is not None:
            done = reproducer.save(pathlib.Path(self.dump_dir))
        logger.error("%s: mismatch, %s; %s", self.title, reproducer.describe(), done)

    def report(self, counters: torch.Tensor) -> None:
        described = VerifyErrors.describe(counters, self.first_layer)
        logger.info("%s: %s, %d steps", self.title, described, self.steps)
        self.metrics.validated(VerifyErrors.summary(counters), self.first_layer)

    def catch_up(self) -> None:
        """With the last step, which ``tick`` precedes. Waits for the device."""
        if self.steps > self.caught_up:
            self.caught_up = self.steps
            if self.latch.facts[0].item() and not self.dumped:
                self.dump()
            self.report(self.errors.counters.cpu())
