# SPDX-License-Identifier: Apache-2.0
"""Pools, requests and a prefix cache of a few slots, with KV that can be checked."""

from __future__ import annotations

from array import array

import torch

from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator.contiguous import (
    ContiguousPagedAllocator,
    ContiguousTokenAllocator,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import (
    checkpoint_kv_cache,
    evict_from_tree_cache,
    match_kv_cache,
    release_kv_cache,
)
from sglang.srt.mem_cache.defrag.metrics import DefragMetrics
from sglang.srt.mem_cache.defrag.mover import SlotMover
from sglang.srt.mem_cache.defrag.step_checks import ContentWatch
from sglang.srt.mem_cache.defrag.tier1 import Tier1Defragmenter
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

BYTES = 8


class MarkPool:
    """One number per slot in place of the KV: (sum of the tokens so far, position)."""

    def __init__(self, size: int, page_size: int):
        self.size, self.page_size, self.device = size, page_size, "cpu"
        self.marks = torch.full((size + page_size,), -1, dtype=torch.int64)
        self.kv_buffer = [self.marks[:, None]]  # As pools of MLA have it.
        self.moves = 0

    def get_kv_size_bytes(self) -> int:
        return (self.size + self.page_size) * BYTES

    def move_kv_cache(self, tgt: torch.Tensor, src: torch.Tensor) -> None:
        self.moves += tgt.numel()
        self.marks[tgt] = self.marks[src]


def marks(tokens) -> torch.Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64).cumsum(0) * 4096 + torch.arange(len(tokens))


def build_allocator(size: int, page_size: int, pool=None):
    common = dict(
        dtype=torch.int64,
        device="cpu",
        kvcache=pool,
    )
    if page_size == 1:
        return ContiguousTokenAllocator(size, **common)
    return ContiguousPagedAllocator(size, page_size=page_size, **common)


class SlotModel:
    """A server's memory with ``size`` slots, driven one call at a time."""

    def __init__(
        self,
        *,
        size: int = 256,
        page_size: int = 1,
        rows: int = 6,
        core: str = "rust",
        budget_slots: float = 1 << 20,
        overlap: bool = False,
        block: int = 4,
        context: int = 128,
        draft_pool: bool = True,
    ):
        self.page_size = page_size
        self.pool = MarkPool(size, page_size)
        self.draft = MarkPool(size, page_size)
        self.allocator = build_allocator(size, page_size, self.pool)
        self.rows = ReqToTokenPool(rows, context, "cpu", False)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=core,
            )
        )
        self.running: list[Req] = []
        self.on_device: list[tuple[Req, int, int]] = []
        self.unwritten: list[tuple[Req, int, int]] = []
        self.created = 0
        pools = [self.pool, self.draft] if draft_pool else [self.pool]
        self.metrics = DefragMetrics(None)
        self.defrag = Tier1Defragmenter(
            allocator=self.allocator,
            req_to_token_pool=self.rows,
            metrics=self.metrics,
            running_requests=lambda: self.running,
            tree_cache=self.tree,
            mover=SlotMover(pools),
            budget_bytes=int(budget_slots * BYTES * len(pools)),
            chunked_request=lambda: None,
            owners=lambda: self.running,
            on_device=lambda: bool(self.on_device),
            overlap=overlap,
            move_tree_slots=True,
            watch=ContentWatch(pools),
        )
        self.defrag.block = max(1, block // page_size)

    # -- what a server does --

    def start(self, tokens: list[int], *, armed: bool = True) -> Req | None:
        """Prefill; None where slots or rows are short."""
        req = Req(str(self.created), "", array("q", tokens), SamplingParams())
        self.created += 1
        req.refresh_fill_ids()
        ids = req.full_untruncated_fill_ids
        match_kv_cache(req, self.tree, ids, max_prefix_len=len(ids) - 1)
        req.kv.cache_protected_len = req.prefix_len
        req.lock = self.tree.lock(req.last_node)
        prefix, end = req.prefix_len, len(ids)
        room = self.allocator.available_size() + self.tree.evictable_size()
        if (
            end - prefix + self.page_size > room
            or not self.rows.available_size()
            or end + 8 > self.rows.max_context_len
        ):
            self.tree.unlock(req.lock)
            return None
        if armed:
            self.allocator.create_prefill_budget(self.tree)
        self._complete()  # A later forward writes what it allocates.
        path = self.tree.prefix_device_indices(req)
        slots = self._allocate(path[-1:], prefix, end)
        self.rows.alloc([req])
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        row[:prefix] = path
        row[prefix:end] = slots
        self._write(req, prefix, end)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end = end
        checkpoint_kv_cache(req, self.tree)
        req.output_ids.append(1 + self.created % 7)
        self.running.append(req)
        return req

    def decode(self) -> bool:
        """A step of the normal loop; False where slots are short."""
        launched = self._launch()
        if launched is None:
            return False
        self.unwritten = launched
        self._complete()
        for req, _, _ in launched:
            self._append_output(req)
        return True

    def overlap_step(self, stop: Req | None = None, *, keep: bool = True) -> bool:
        """A step of the overlap loop: the next batch is launched before the result of
        the last one is known, so a request that stops now is a row of it, too."""
        launched = self._launch()
        if launched is None:
            return False
        self._complete()
        self._append_results()
        self.on_device = self.unwritten = launched
        if stop is not None:
            self.stop(stop, keep=keep)
        self.relocate()
        return True

    def _launch(self) -> list | None:
        """Allocate the next slot of every running request."""
        need = len(self.running) * self.page_size
        if not self.allocator.check_decode_capacity(
            num_tokens=need,
            tree_cache=self.tree,
            requests=self.running if self.page_size == 1 else None,
        ) or any(r.kv.kv_committed_len + 8 > self.rows.max_context_len for r in self.running):
            return None
        if not self.running:
            return []
        at = [req.kv.kv_committed_len for req in self.running]
        if self.page_size == 1:
            slots = self.allocator.alloc(len(self.running))
        else:
            lens = torch.tensor(at)
            last = torch.stack([self._row(r)[n - 1] for r, n in zip(self.running, at)])
            slots = self.allocator.alloc_decode(lens + 1, lens + 1, last.long())
        for req, position, slot in zip(self.running, at, slots):
            self._row(req)[position] = slot
            req.kv.kv_allocated_len = req.kv.kv_committed_len = position + 1
        return list(zip(list(self.running), at, slots.tolist()))

    def drained_step(self, stop: Req | None = None, *, keep: bool = True) -> bool:
        """The drained boundary: the next batch is prepared, the last result is
        processed, and only then is the next batch launched."""
        prepared = self._launch()
        if prepared is None:
            return False
        self._complete()
        self._append_results()
        self.on_device = []
        if stop is not None:
            self.stop(stop, keep=keep)
        self.relocate()
        self.on_device = self.unwritten = prepared
        return True

    def _append_results(self) -> None:
        for req, _, _ in self.on_device:
            if not req.finished():
                self._append_output(req)

    def _complete(self) -> None:
        """The batch writes its KV where it was told to at its launch."""
        for req, position, slot in self.unwritten:
            # Of a row that stopped, whatever it computes.
            tokens = [*self._tokens(req), 1]
            mark = marks(tokens[: position + 1])[position]
            for pool in (self.pool, self.draft):
                pool.marks[slot] = mark
        self.unwritten = []

    def _append_output(self, req: Req) -> None:
        req.output_ids.append(1 + (req.seqlen * 31 + int(req.rid)) % 97)

    def stop(self, req: Req, *, keep: bool = True) -> None:
        """Finish (its KV stays in the cache), or abort."""
        self.check_content(req)
        self.running.remove(req)
        req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
        self.allocator.free_group_begin()
        release_kv_cache(req, self.tree, checkpoint=keep)
        self.allocator.free_group_end()

    def retract(self, req: Req) -> list[int]:
        """Its tokens, to start over with; its KV stays in the cache."""
        self.check_content(req)
        self.running.remove(req)
        tokens = self._tokens(req)
        release_kv_cache(req, self.tree, checkpoint=True)
        req.reset_for_retract()
        return tokens

    def scatter(self, seed: int) -> None:
        """The free list in an order that some other history would have left."""
        runs = self.allocator.runs
        runs.end_stripes()
        order = torch.randperm(len(runs.head), generator=torch.Generator().manual_seed(seed))
        runs.head = runs.head[order]
        runs.arrangement += 1

    def relocate(self) -> None:
        self.defrag._last_plan_step = -(10**9)
        self.defrag.after_batch()
        assert not self.defrag.failed

    def _allocate(self, last, prefix: int, end: int) -> torch.Tensor:
        evict_from_tree_cache(self.tree, end - prefix + self.page_size)
        if self.page_size == 1:
            return self.allocator.alloc(end - prefix)
        if not len(last):
            last = torch.tensor([-1])
        return self.allocator.alloc_extend(
            torch.tensor([prefix]),
            torch.tensor([prefix]),
            torch.tensor([end]),
            torch.tensor([end]),
            last,
            end - prefix,
        )

    def _row(self, req: Req) -> torch.Tensor:
        return self.rows.req_to_token[req.kv.req_pool_idx]

    def _tokens(self, req: Req) -> list[int]:
        return list(req.origin_input_ids) + list(req.output_ids)

    def _write(self, req: Req, lo: int, hi: int) -> None:
        slots = self._row(req)[lo:hi].long()
        assert (slots >= self.page_size).all(), "slot 0 is for padded rows"
        for pool in (self.pool, self.draft):
            pool.marks[slots] = marks(self._tokens(req)[:hi])[lo:hi]

    # -- what must hold --

    def check_content(self, req: Req) -> None:
        n = min(req.kv.kv_committed_len, req.seqlen - 1)
        slots = self._row(req)[:n].long()
        expected = marks(self._tokens(req)[:n])
        for pool in self.defrag.mover.pools:
            assert torch.equal(pool.marks[slots], expected), f"request {req.rid}"

    def check_all(self) -> None:
        """Every slot has exactly one owner: the free list, the tree, or one request."""
        for req in self.running:
            self.check_content(req)
        page = self.page_size
        free = self.allocator.get_all_free_pages()
        assert len(free) * page == self.allocator.available_size()
        cached = self.tree.all_values_flatten()
        private = [self._row(req)[req.kv.cache_protected_len : req.kv.kv_allocated_len].long() for req in self.running]
        owned = torch.cat([cached, *private]) // page
        owned = owned if page == 1 else torch.unique(owned)
        census = torch.sort(torch.cat([free, owned])).values
        expected = torch.arange(1, self.pool.size // page + 1)
        assert torch.equal(census, expected), (census, expected)

    def runs_of(self, req: Req) -> int:
        slots = self._row(req)[: req.kv.kv_committed_len].long()
        return 1 + int((slots[1:] != slots[:-1] + 1).sum())
