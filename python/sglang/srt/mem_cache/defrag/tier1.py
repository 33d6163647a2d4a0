# SPDX-License-Identifier: Apache-2.0
"""Moving the KV slots of running requests together, a little at each step.

A step runs at the end of ``Scheduler.process_batch_result``, on the schedule
stream. What may be touched there:

- *Sources* are slots of committed tokens. ``Req.seqlen - 1`` tokens of a decoding
  request have their KV; the next one is being written by a batch that is prepared
  or on the device. (``kv_committed_len`` alone is not enough: without speculation
  it is advanced when the batch is prepared.)
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
from typing import Callable, Optional, Sequence

import torch

from sglang.srt.mem_cache.defrag.mover import SlotMover
from sglang.srt.mem_cache.defrag.planner import Move, make_plan
from sglang.srt.mem_cache.defrag.rewrite import Piece, SlotRewriter
from sglang.srt.mem_cache.defrag.snapshot import (
    MAX_SCAN_UNITS,
    Scan,
    Snapshot,
    read_snapshot,
    take_snapshot,
)
from sglang.srt.mem_cache.defrag.step_checks import ContentWatch
from sglang.srt.mem_cache.defrag.tier0 import Tier0Defragmenter
from sglang.srt.mem_cache.defrag.tree_values import path_values
from sglang.srt.utils import print_info_once

logger = logging.getLogger(__name__)

# Tokens that the verify kernel could fetch as one piece: a run of this length is
# long enough, shorter ones are moved together.
BLOCK_TOKENS = 64
# Steps between two looks at the free list, whose cost grows with its length.
PLAN_INTERVAL = 16


class Tier1Defragmenter(Tier0Defragmenter):
    """Tier 0, and moves slots of running requests under a budget of bytes per step."""

    def __init__(
        self,
        *,
        tree_cache,
        mover: SlotMover,
        budget_bytes: int,
        chunked_request: Callable[[], object],
        owners: Callable[[], Sequence],
        on_device: Callable[[], bool],
        overlap: bool,
        move_tree_slots: bool,
        watch: Optional[ContentWatch] = None,
        **tier0,
    ):
        super().__init__(**tier0)
        self.watch = watch
        self.tree_cache = tree_cache
        self.mover = mover
        self.chunked_request = chunked_request
        self.owners = owners
        self.on_device = on_device
        self.overlap = overlap
        self.move_tree_slots = move_tree_slots
        page = self.page_size
        self.block = max(1, BLOCK_TOKENS // page)
        self.bytes_per_unit = mover.bytes_per_slot * page
        self.budget_units = budget_bytes // self.bytes_per_unit
        if self.budget_units < 1:
            raise ValueError(
                f"--kv-defrag-copy-budget is {budget_bytes:,} bytes, and moving a "
                f"{'slot' if page == 1 else 'page'} takes {self.bytes_per_unit:,}. "
                "Give at least that, or use --kv-defrag tier0."
            )
        self.failed = False
        self._committing = False
        self._last_plan_step = -PLAN_INTERVAL
        self._settled: dict[tuple[int, int], int] = {}
        self._snapshot: Optional[Snapshot] = None
        self._moves: list[tuple[Move, Scan]] = []
        self._loan = -1
        self._rewriter = SlotRewriter(
            self.req_to_token_pool.req_to_token,
            num_slots=self.allocator.size + page,
            page_size=page,
        )

    # -- safe points --

    def on_idle(self) -> None:
        self._abandon()
        self._settled.clear()
        super().on_idle()

    def _relocate(self) -> None:
        if not self.failed:
            try:
                self._relocate_some()
            except Exception:
                if self._committing:
                    raise  # Rows and tree may disagree: nothing to go on with.
                # The pool is as it was. Allocation goes on as in tier 0.
                logger.exception("KV relocation failed and is off from here on.")
                self._abandon()
                self.failed = True
        if self.overlap:
            self.runs.age()
        if self.watch is not None:
            self.watch.after_step(self._written_rows())

    def _written_rows(self) -> list[tuple[tuple, torch.Tensor]]:
        """What ``ContentWatch.after_step`` takes."""
        table, rows = self.req_to_token_pool.req_to_token, []
        for req in self.running_requests():
            tokens = self._movable(req) * self.page_size
            if tokens:
                key = (req.kv.req_pool_idx, self._generation(req))
                rows.append((key, table[req.kv.req_pool_idx, :tokens].long()))
        return rows

    def _relocate_some(self) -> None:
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
        if self._moves and not self._waits_for_beams():
            self._move_some()

    def _abandon(self) -> None:
        self._snapshot = None
        self._moves = []
        if self.runs.loan == self._loan:
            self.runs.end_loan()
        self._loan = -1

    # -- what may be moved --

    def _waits_for_beams(self) -> bool:
        """Beam search copies rows on the device while the host is here, and not behind
        the event that a rewritten row waits for: one would undo the other."""
        waits = any(req.beam_group is not None for req in self.owners())
        if waits:
            print_info_once("KV relocation moves nothing while a beam search runs.")
        return waits

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

    def _scans(self) -> list[Scan]:
        """Unsettled parts of rows, at least a block each, in the order of the batch."""
        scans, left, alive = [], MAX_SCAN_UNITS, {}
        generations = self.req_to_token_pool.req_generation.tolist()
        for req in self.running_requests():
            hi = self._movable(req)
            if hi == 0:
                continue
            key = (req.kv.req_pool_idx, generations[req.kv.req_pool_idx])
            lo = self._settled.get(key, 0)
            if not self.move_tree_slots:
                lo = max(lo, req.kv.cache_protected_len // self.page_size)
            alive[key] = lo
            hi = min(hi, lo + left)
            if hi - lo >= self.block:
                scans.append(Scan(req, key[1], lo, hi))
                left -= hi - lo
        self._settled = alive
        return scans

    def _may_plan(self) -> bool:
        return self.step - self._last_plan_step >= PLAN_INTERVAL

    # -- plan --

    def _take_snapshot(self) -> Optional[Snapshot]:
        self._last_plan_step = self.step
        scans = self._scans()
        if not scans:
            return None
        self.runs.rearrange(aged_only=self.overlap)
        return take_snapshot(
            scans,
            runs=self.runs,
            table=self.req_to_token_pool.req_to_token,
            page=self.page_size,
        )

    def _plan(self, snapshot: Snapshot) -> None:
        rows, free = read_snapshot(snapshot)
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

    def _is_alive(self, scan: Scan, hi: int) -> bool:
        """Whether the row still belongs to the scanned request, up to unit ``hi``."""
        return (
            scan.req.kv.holds_kv
            and self._generation(scan.req) == scan.generation
            and self._movable(scan.req) >= hi
        )

    def _move_some(self) -> None:
        """Spend the budget of one step. Up to the commit nothing has changed."""
        pieces, rest, used = self._next_pieces()
        if pieces:
            src = torch.cat([self._rewriter.sources_of(piece) for piece in pieces])
            tgt = torch.cat([self._rewriter.targets_of(piece) for piece in pieces])
            self.mover(tgt, src)
            self._committing = True
            self._rewriter(pieces, src, tgt)
            if self.watch is not None:
                self.watch.follow(src, tgt)
        for taken, count in used:
            self.runs.take_lent(count) if taken else self.runs.skip_lent(count)
        if pieces:
            page = self.page_size
            self.runs.push(src if page == 1 else src[::page] // page)
            self._committing = False
            self.metrics.moved(self.bytes_per_unit * sum(p.hi - p.lo for p in pieces))
        self._moves = rest
        if not rest:
            self.runs.end_loan()

    def _next_pieces(
        self,
    ) -> tuple[list[Piece], list[tuple[Move, Scan]], list[tuple[bool, int]]]:
        """Pieces of this step, moves left, and (taken or skipped, units lent) in the
        order of the loan."""
        pieces, used, budget, at = [], [], self.budget_units, 0
        moves = list(self._moves)
        while moves and budget > 0:
            move, scan = moves[0]
            n = move.hi - move.lo
            if self._is_alive(scan, move.hi):
                protected = scan.req.kv.cache_protected_len // self.page_size
                n = min(n, budget)
                if move.lo < protected:
                    n = min(n, protected - move.lo)
                targets = self.runs.lent[at : at + n]
                pieces.append(self._piece(scan.req, move.lo, targets, protected))
                used.append((True, n))
                budget -= n
            else:
                # Another request may share the slots: look at every row again.
                self._settled.clear()
                used.append((False, n))
            at += n
            moves[0] = (move._replace(lo=move.lo + n), scan)
            if moves[0][0].lo == move.hi:
                moves.pop(0)
        return pieces, moves, used

    def _piece(self, req, lo: int, targets: torch.Tensor, protected: int) -> Piece:
        """Units from ``lo`` on, as many as there are targets."""
        hi, page, values = lo + len(targets), self.page_size, []
        if lo < protected:
            values = path_values(
                self.tree_cache, req.last_node, lo=lo * page, hi=hi * page
            )
        return Piece(req, lo, hi, targets, lo < protected, values)
