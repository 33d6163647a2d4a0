# SPDX-License-Identifier: Apache-2.0
"""Moving the KV slots of running requests together, a little at each step.

A step runs at the end of ``Scheduler.process_batch_result``, on the schedule
stream. What may be touched there:

- *Sources* are slots of committed tokens. ``Req.seqlen - 1`` tokens of a decoding
  request have their KV; the next one is being written by a batch that is prepared
  or on the device. (``kv_committed_len`` alone is not enough: without speculation
  upstream advances it when it prepares the batch.)
- *Targets* are free slots that no batch can still write. A request that finished in
  the result being processed may be a row of the batch on the device and write its
  freed slots, so under overlap a target must have been free since the step before
  (``FreeRuns.age``). Stream order does the rest: the copy and the rewritten rows
  come before the next forward, which waits for the schedule stream.
- *Freed sources* may be read by the batch on the device. Handing them out by
  ``alloc`` is safe, their new owner writes them in a later forward; copying into
  them is not, and the same rule keeps them from being targets until the next step.

The safe points:

    normal loop        after every batch; nothing is prepared or on the device.
    drained boundary   the overlap loop processed its last result before the next
                       launch: the next batch is prepared, none is on the device.
    idle               the free list is put in order, loans end.
    overlap            the next batch is on the device. The snapshot is copied to
                       the host without waiting and planned with one step later,
                       when the batch that ran beside the copy has been waited for
                       anyway. Its positions in the free list are checked then.

Decisions use host lengths and values that are equal on all ranks, and no clock.
"""

from __future__ import annotations

import logging
from typing import Callable, NamedTuple, Optional, Protocol, Sequence

import torch

from sglang.srt.mem_cache.defrag.metrics import DefragMetrics
from sglang.srt.mem_cache.defrag.mover import SlotMover
from sglang.srt.mem_cache.defrag.planner import FreeRun, Move, Row, make_plan
from sglang.srt.mem_cache.defrag.settings import parse_size
from sglang.srt.mem_cache.defrag.tree_values import path_values, values_alias_the_tree
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_memory

logger = logging.getLogger(__name__)

# Tokens that the verify kernel could fetch as one piece: a run of this length is
# long enough, shorter ones are moved together.
BLOCK_TOKENS = 64
# Steps between two looks at the free list, whose cost grows with its length.
PLAN_INTERVAL = 16
# Row units looked at in one plan, and free runs offered to it. Arbitrary: they
# bound the copy to the host (0.5 MB) and the planner's time.
MAX_SCAN_UNITS = 65536
MAX_FREE_RUNS = 256
# Steps between two measurements for the gauges, and the tokens measured.
SURVEY_INTERVAL = 64
MAX_SURVEY_TOKENS = 262144


class Defragmenter(Protocol):
    def after_batch(self) -> None:
        """The result of a batch has been processed."""

    def on_idle(self) -> None:
        """There is no request left."""


class NoDefragmenter:
    """--kv-defrag off."""

    def after_batch(self) -> None:
        pass

    def on_idle(self) -> None:
        pass


class _Scan(NamedTuple):
    """Part of a row to look at: positions in units."""

    req: object
    generation: int
    lo: int
    hi: int


class _Snapshot(NamedTuple):
    arrangement: int
    scans: list[_Scan]
    host: torch.Tensor  # int64: 3 x MAX_FREE_RUNS, then per scan `before` and units.
    ready: Optional[object]  # Event; None when the copy has been waited for.


class _Piece(NamedTuple):
    req: object
    lo: int
    hi: int
    targets: torch.Tensor  # Units.
    values: list[torch.Tensor]  # Tree-owned: node values to rewrite.
    tree_owned: bool


class Tier0Defragmenter:
    """Puts the free list in order at idle, and measures for the gauges."""

    def __init__(
        self,
        *,
        allocator,
        req_to_token_pool,
        metrics: DefragMetrics,
        running_requests: Callable[[], Sequence],
    ):
        self.allocator = allocator
        self.runs = allocator.runs
        self.page_size = allocator.page_size
        self.req_to_token_pool = req_to_token_pool
        self.metrics = metrics
        self.running_requests = running_requests
        self.step = 0
        self._survey: Optional[tuple[int, torch.Tensor]] = None
        self._idle_at_step = -1

    def after_batch(self) -> None:
        self.step += 1
        if self.metrics.exported and self.step % SURVEY_INTERVAL == 0:
            self._publish_survey()
            self._start_survey()

    def on_idle(self) -> None:
        # The idle loop spins: once per stretch of idleness is enough.
        if self._idle_at_step == self.step:
            return
        self._idle_at_step = self.step
        self.runs.end_stripes()
        self.runs.rearrange()

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


class Tier1Defragmenter(Tier0Defragmenter):
    """Tier 0, and moves slots of running requests under a budget of bytes per step."""

    def __init__(
        self,
        *,
        tree_cache,
        mover: SlotMover,
        budget_bytes: int,
        chunked_request: Callable[[], object],
        on_device: Callable[[], bool],
        overlap: bool,
        move_tree_slots: bool,
        **tier0,
    ):
        super().__init__(**tier0)
        self.tree_cache = tree_cache
        self.mover = mover
        self.chunked_request = chunked_request
        self.on_device = on_device
        self.overlap = overlap
        self.move_tree_slots = move_tree_slots
        page = self.page_size
        self.block = max(1, BLOCK_TOKENS // page)
        self.bytes_per_unit = mover.bytes_per_slot * page
        self.budget_units = max(1, budget_bytes // self.bytes_per_unit)
        self.failed = False
        self._committing = False
        self._last_plan_step = -PLAN_INTERVAL
        self._settled: dict[tuple[int, int], int] = {}
        self._snapshot: Optional[_Snapshot] = None
        self._moves: list[tuple[Move, _Scan]] = []
        self._loan = -1
        device = self.req_to_token_pool.req_to_token.device
        # Slot -> where it is now; the identity except inside _commit.
        self._remap = torch.arange(
            self.allocator.size + page, dtype=torch.int64, device=device
        )
        self._page_offsets = torch.arange(page, dtype=torch.int64, device=device)

    # -- safe points --

    def after_batch(self) -> None:
        super().after_batch()
        if not self.failed:
            try:
                self._relocate()
            except Exception:
                if self._committing:
                    raise  # Rows and tree may disagree: nothing to go on with.
                # The pool is as it was. Allocation goes on as in tier 0.
                logger.exception("KV relocation failed and is off from here on.")
                self._abandon()
                self.failed = True
        if self.overlap:
            self.runs.age()

    def on_idle(self) -> None:
        self._abandon()
        self._settled.clear()
        super().on_idle()

    def _relocate(self) -> None:
        if self._moves and self.runs.loan != self._loan:
            # The allocator was short of slots and took the targets back.
            self._moves = []
            self._settled.clear()
        if not self._moves:
            if self._snapshot is None and self._may_plan():
                self._snapshot = self._take_snapshot()
                if self.on_device():
                    return
            if self._snapshot is not None:
                snapshot, self._snapshot = self._snapshot, None
                self._plan(snapshot)
        if self._moves:
            self._move_some()

    def _abandon(self) -> None:
        self._snapshot = None
        self._moves = []
        if self.runs.loan == self._loan:
            self.runs.end_loan()
        self._loan = -1

    # -- what may be moved --

    def _movable(self, req) -> int:
        """Units at the front of the row that nothing writes any more."""
        if (
            not req.kv.holds_kv
            or req.finished()
            or req.is_retracted
            or req.session is not None
            or req.beam_group is not None
            or req is self.chunked_request()
        ):
            return 0
        return min(req.kv.kv_committed_len, req.seqlen - 1) // self.page_size

    def _generation(self, req) -> int:
        return int(self.req_to_token_pool.req_generation[req.kv.req_pool_idx])

    def _scans(self) -> list[_Scan]:
        """Unsettled parts of rows, at least a block each, in the order of the batch."""
        scans, left, alive = [], MAX_SCAN_UNITS, {}
        for req in self.running_requests():
            hi = self._movable(req)
            if hi == 0:
                continue
            key = (req.kv.req_pool_idx, self._generation(req))
            lo = self._settled.get(key, 0)
            if not self.move_tree_slots:
                lo = max(lo, req.kv.cache_protected_len // self.page_size)
            alive[key] = lo
            hi = min(hi, lo + left)
            if hi - lo >= self.block:
                scans.append(_Scan(req, key[1], lo, hi))
                left -= hi - lo
        self._settled = alive
        return scans

    def _may_plan(self) -> bool:
        return self.step - self._last_plan_step >= PLAN_INTERVAL

    # -- plan --

    def _take_snapshot(self) -> Optional[_Snapshot]:
        self._last_plan_step = self.step
        scans = self._scans()
        if not scans:
            return None
        self.runs.rearrange(aged_only=self.overlap)
        page = self.page_size
        table = self.req_to_token_pool.req_to_token
        pieces = [self.runs.longest(MAX_FREE_RUNS).reshape(-1)]
        for scan in scans:
            row = table[scan.req.kv.req_pool_idx]
            # One unit in front of the scan; at the start of a row its own first.
            front = max(scan.lo - 1, 0)
            pieces.append(row[front * page : front * page + 1].to(torch.int64) // page)
            pieces.append(
                row[scan.lo * page : scan.hi * page : page].to(torch.int64) // page
            )
        flat = torch.cat(pieces)
        host = flat.to("cpu", non_blocking=True)
        ready = None
        if flat.device.type != "cpu":
            ready = torch.get_device_module(flat.device).Event()
            ready.record()
        return _Snapshot(self.runs.arrangement, scans, host, ready)

    def _plan(self, snapshot: _Snapshot) -> None:
        if snapshot.ready is not None:
            snapshot.ready.synchronize()
        flat = snapshot.host.numpy()
        free = [
            FreeRun(*map(int, run))
            for run in flat[: 3 * MAX_FREE_RUNS].reshape(3, -1).T
            if run[2] > 0
        ]
        rows, at = [], 3 * MAX_FREE_RUNS
        for key, scan in enumerate(snapshot.scans):
            n = scan.hi - scan.lo
            before = int(flat[at]) if scan.lo else -1
            rows.append(Row(key, scan.lo, flat[at + 1 : at + 1 + n], before))
            at += 1 + n
        plan = make_plan(rows, free, block=self.block, max_units=MAX_SCAN_UNITS)
        if plan.moves:
            lent = self.runs.lend(
                [(move.position, move.hi - move.lo) for move in plan.moves],
                arrangement=snapshot.arrangement,
            )
            if lent is None:
                return
            self._loan = self.runs.loan
            self._moves = [(move, snapshot.scans[move.key]) for move in plan.moves]
        for key, settled in plan.settled.items():
            scan = snapshot.scans[key]
            if self._is_alive(scan, settled):
                self._settled[scan.req.kv.req_pool_idx, scan.generation] = settled

    # -- move --

    def _is_alive(self, scan: _Scan, hi: int) -> bool:
        """Whether the row still belongs to the scanned request, up to unit ``hi``."""
        return (
            scan.req.kv.holds_kv
            and self._generation(scan.req) == scan.generation
            and self._movable(scan.req) >= hi
        )

    def _move_some(self) -> None:
        """Spend the budget of one step. Up to the commit nothing has changed, and
        the commit only writes to tensors that were looked up before it."""
        pieces, rest, used = self._next_pieces()
        if pieces:
            slots = self.req_to_token_pool.req_to_token
            page = self.page_size
            sources = [
                slots[p.req.kv.req_pool_idx, p.lo * page : p.hi * page].to(torch.int64)
                for p in pieces
            ]
            targets = [self._slots_of(p.targets) for p in pieces]
            src, tgt = torch.cat(sources), torch.cat(targets)
            self.mover(tgt, src)
            self._commit(pieces, sources, targets, src, tgt)
            self.metrics.moved(self.bytes_per_unit * sum(p.hi - p.lo for p in pieces))
        for taken, count in used:
            self.runs.take_lent(count) if taken else self.runs.skip_lent(count)
        if pieces:
            self.runs.push(src if page == 1 else src[::page] // page)
        self._moves = rest
        if not rest:
            self.runs.end_loan()

    def _next_pieces(self):
        """(pieces of this step, moves left, [(taken or skipped, units lent)])."""
        pieces, used, budget, at = [], [], self.budget_units, 0
        moves = list(self._moves)
        while moves and budget > 0:
            move, scan = moves[0]
            n = move.hi - move.lo
            if not self._is_alive(scan, move.hi):
                # Another request may share the slots: look at every row again.
                self._settled.clear()
                used.append((False, n))
                at += n
                moves.pop(0)
                continue
            n = min(n, budget)
            protected = scan.req.kv.cache_protected_len // self.page_size
            tree_owned = move.lo < protected
            if tree_owned:
                n = min(n, protected - move.lo)
            values = []
            if tree_owned:
                page = self.page_size
                values = path_values(
                    self.tree_cache,
                    scan.req.last_node,
                    lo=move.lo * page,
                    hi=(move.lo + n) * page,
                )
            targets = self.runs.lent[at : at + n]
            pieces.append(
                _Piece(scan.req, move.lo, move.lo + n, targets, values, tree_owned)
            )
            used.append((True, n))
            at += n
            budget -= n
            moves[0] = (move._replace(lo=move.lo + n), scan)
            if moves[0][0].lo == move.hi:
                moves.pop(0)
        return pieces, moves, used

    def _slots_of(self, units: torch.Tensor) -> torch.Tensor:
        if self.page_size == 1:
            return units
        return (units[:, None] * self.page_size + self._page_offsets).reshape(-1)

    def _commit(self, pieces, sources, targets, src, tgt) -> None:
        table, page = self.req_to_token_pool.req_to_token, self.page_size
        self._committing = True
        if any(piece.tree_owned for piece in pieces):
            self._remap[src] = tgt
        for piece, target in zip(pieces, targets):
            columns = slice(piece.lo * page, piece.hi * page)
            if not piece.tree_owned:
                table[piece.req.kv.req_pool_idx, columns] = target.to(table.dtype)
                continue
            for value in piece.values:
                value.copy_(self._remap[value])
            # Whoever shares the prefix has its slots at the same positions.
            shared = table[:, columns]
            shared.copy_(self._remap[shared.to(torch.int64)])
        if any(piece.tree_owned for piece in pieces):
            self._remap[src] = src
        self._committing = False


def _draft_pools(draft_worker, target_pool) -> list:
    """The draft pools that the target's slot numbers index."""
    if draft_worker is None:
        return []
    pools = [runner.token_to_kv_pool for runner in draft_worker._draft_model_runners()]
    return [pool for pool in pools if pool is not target_pool]


def defragmenter_of(scheduler) -> Defragmenter:
    """The scheduler's defragmenter, built when it first idles, which is before its first request."""
    attributes = vars(scheduler)
    if "kv_defragmenter" not in attributes:
        attributes["kv_defragmenter"] = build_defragmenter(scheduler)
    return attributes["kv_defragmenter"]


def build_defragmenter(scheduler) -> Defragmenter:
    """The defragmenter of a scheduler whose pools and caches exist."""
    tier = get_memory().kv_defrag
    if tier == "off":
        return NoDefragmenter()
    collector = scheduler.metrics_collector
    allocator = scheduler.token_to_kv_pool_allocator
    tier0 = dict(
        allocator=allocator,
        req_to_token_pool=scheduler.req_to_token_pool,
        metrics=DefragMetrics(None if collector is None else dict(collector.labels)),
        running_requests=lambda: scheduler.running_batch.reqs,
    )
    if tier == "tier0":
        return Tier0Defragmenter(**tier0)
    if scheduler.model_config.is_encoder_decoder:
        raise ValueError(
            "--kv-defrag tier1 does not work with encoder-decoder models, whose rows "
            "hold the encoder's slots first. Use --kv-defrag tier0."
        )
    tree_cache = scheduler.tree_cache
    target_pool = allocator.get_kvcache()
    mover = SlotMover([target_pool, *_draft_pools(scheduler.draft_worker, target_pool)])
    small = [pool for pool in mover.pools if pool.size < allocator.size]
    if small:
        raise ValueError(
            "--kv-defrag tier1 needs draft pools with the target's slots; "
            f"{type(small[0]).__name__} has {small[0].size} of {allocator.size}. "
            "Use --kv-defrag tier0."
        )
    mover.check()
    move_tree_slots = isinstance(tree_cache, UnifiedRadixCache) and (
        tree_cache.disable or values_alias_the_tree(tree_cache)
    )
    defragmenter = Tier1Defragmenter(
        tree_cache=tree_cache,
        mover=mover,
        budget_bytes=parse_size(get_memory().kv_defrag_copy_budget),
        chunked_request=lambda: scheduler.chunked_req,
        on_device=lambda: len(scheduler.result_queue) > 0,
        overlap=scheduler.enable_overlap,
        move_tree_slots=move_tree_slots,
        **tier0,
    )
    logger.info(
        "KV defragmentation: tier1 moves up to %d slots a step (%d bytes each, over "
        "%d pools); slots of the prefix cache are %s.",
        defragmenter.budget_units * allocator.page_size,
        mover.bytes_per_slot,
        len(mover.pools),
        "moved too" if move_tree_slots else "left where they are",
    )
    return defragmenter
