# SPDX-License-Identifier: Apache-2.0
"""Debug mode: after every step each slot has one owner, the ranks agree, and the KV of
the running requests is what it was.

All of it reads whole tensors, so it is on with ``SGLANG_CHECK_KV_PAGE_INVARIANTS``
only, the switch for a check of this cost. The pool check counts the owned slots, and
looks whether one of them is free; what is here also finds a slot with two owners,
ranks that have come apart, and KV that was overwritten or moved to a wrong place.
"""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional, Sequence

import torch


class Checksums(NamedTuple):
    """Of one rank after one step; equal on all ranks."""

    step: int
    req_to_token: int
    free_list: int


def checksum(numbers: torch.Tensor) -> int:
    """A number of the values of an integer tensor [n] and of their order."""
    # Products wrap at 2^64, in the same way everywhere.
    mixed = (numbers.long() << 32) + torch.arange(
        numbers.numel(), device=numbers.device
    )
    mixed = (mixed ^ (mixed >> 29)) * 0x1F35A7BD3C8B4E29
    return int((mixed ^ (mixed >> 32)).sum())


class Watched(NamedTuple):
    """Of a row after a step, int64 [n] each: its slots, and a sum of the KV in each."""

    slots: torch.Tensor
    sums: torch.Tensor


class ContentWatch:
    """The KV of written positions stays the same, bit for bit, wherever it lies.

    ``pools`` are those that move together: the target's and the draft's.
    """

    def __init__(self, pools: Sequence):
        self.buffers = [buffer for pool in pools for buffer in _buffers_of(pool)]
        first = self.buffers[0]
        self._moved_to = torch.arange(first.shape[0], device=first.device)
        self._rows: dict[tuple, Watched] = {}

    def follow(self, src: torch.Tensor, tgt: torch.Tensor) -> None:
        """The KV of ``src`` int64 [n] is in ``tgt`` [n] from here on."""
        self._moved_to[src] = tgt

    def after_step(self, rows: Sequence[tuple[tuple, torch.Tensor]]) -> None:
        """``rows``: (key, the slots whose KV nothing writes any more, int64 [n]), of the
        running requests. Raise RuntimeError where a position is still in the slot that
        it was in before, or in the one it was moved to, and holds something else."""
        before, self._rows = self._rows, {}
        for key, slots in rows:
            now = self._rows[key] = Watched(slots, self._sums_of(slots))
            old = before.get(key)
            if old is None:
                continue
            n = min(slots.numel(), old.slots.numel())
            # The prefix cache may have replaced a row's slots by those of its own copy.
            stayed = self._moved_to[old.slots[:n]] == slots[:n]
            wrong = torch.nonzero(stayed & (old.sums[:n] != now.sums[:n])).flatten()
            if wrong.numel():
                at = int(wrong[0])
                raise RuntimeError(
                    f"KV content: {wrong.numel()} of {n} positions of row {key} hold "
                    f"other KV than a step ago; the first is {at}, then in slot "
                    f"{int(old.slots[at])}, now in {int(slots[at])}."
                )
        torch.arange(self._moved_to.numel(), out=self._moved_to)

    def _sums_of(self, slots: torch.Tensor) -> torch.Tensor:
        """int64 [n]: of the values of a slot in all layers, and of their places."""
        return torch.cat([self._sums(part) for part in slots.split(8192)])

    def _sums(self, slots: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(slots)
        for number, buffer in enumerate(self.buffers):
            words = buffer[slots].flatten(1).view(torch.int64)
            places = 2 * torch.arange(words.shape[1], device=words.device) + 1
            # Odd factors, so that no bit of a word is lost in the product.
            words *= places * places + 978 * number
            total += words.sum(1)
        return total


def _buffers_of(pool) -> list[torch.Tensor]:
    """[slots, ...] of each layer: KV, or keys and values."""
    if hasattr(pool, "kv_buffer"):
        return list(pool.kv_buffer)
    return [*pool.k_buffer, *pool.v_buffer]


class StepChecks:
    """Checks of one scheduler.

    ``owners`` returns the requests that may hold rows, each once. ``group`` is the
    gloo group of the ranks that hold the same slots, None where there is one rank.
    """

    def __init__(
        self,
        *,
        allocator,
        req_to_token_pool,
        tree_cache,
        owners: Callable[[], Sequence],
        group: Optional[torch.distributed.ProcessGroup] = None,
    ):
        self.allocator = allocator
        self.req_to_token_pool = req_to_token_pool
        self.tree_cache = tree_cache
        self.owners = owners
        self.group = group

    def after_step(self, step: int) -> None:
        """Raise RuntimeError where a check fails: the scheduler must not go on."""
        rows = self._rows()
        self._check_owners(rows)
        if self.group is not None:
            self._compare_ranks(step, rows)

    def _rows(self) -> list[tuple[object, torch.Tensor]]:
        """(request, the slots of its row) of all requests that hold KV, in row order."""
        table = self.req_to_token_pool.req_to_token
        holders = [req for req in self.owners() if req.kv.holds_kv]
        holders.sort(key=lambda req: req.kv.req_pool_idx)
        return [
            (req, table[req.kv.req_pool_idx, : req.kv.kv_allocated_len].long())
            for req in holders
        ]

    def _check_owners(self, rows: Sequence[tuple[object, torch.Tensor]]) -> None:
        if self.tree_cache.session_records() or any(
            req.beam_group is not None for req, _ in rows
        ):
            return  # Their rows share slots on purpose.
        page = self.allocator.page_size
        free = self.allocator.get_all_free_pages()
        cached = self.tree_cache.all_values_flatten().to(free.device)
        # The front of a row belongs to the tree; it ends with a whole page.
        private = [slots[req.kv.cache_protected_len :] for req, slots in rows]
        owned = [cached[::page] // page]
        owned += [torch.unique(slots // page) for slots in private]
        owners = torch.bincount(
            torch.cat([free, *owned]), minlength=self.allocator.size // page + 1
        )
        wrong = torch.nonzero(owners[1:] != 1).flatten() + 1
        if wrong.numel():
            found = {unit: int(owners[unit]) for unit in wrong[:8].tolist()}
            raise RuntimeError(
                f"KV census: {wrong.numel()} of {owners.numel() - 1} "
                f"{'slots' if page == 1 else 'pages'} do not have exactly one owner; "
                f"owners of the first ones: {found}. {free.numel()} are free, "
                f"{owned[0].numel()} cached, {len(rows)} requests hold rows."
            )

    def _compare_ranks(
        self, step: int, rows: Sequence[tuple[object, torch.Tensor]]
    ) -> None:
        slots = [slots for _, slots in rows]
        mine = Checksums(
            step,
            checksum(torch.cat(slots)) if slots else 0,
            checksum(self.allocator.get_all_free_pages()),
        )
        theirs = [
            torch.zeros(len(mine), dtype=torch.int64)
            for _ in range(torch.distributed.get_world_size(self.group))
        ]
        torch.distributed.all_gather(
            theirs, torch.tensor(mine, dtype=torch.int64), group=self.group
        )
        sums = [Checksums(*numbers.tolist()) for numbers in theirs]
        if any(numbers != mine for numbers in sums):
            raise RuntimeError(
                f"After step {step} the ranks hold different KV slots: "
                + "; ".join(
                    f"rank {rank} {numbers}" for rank, numbers in enumerate(sums)
                )
            )
