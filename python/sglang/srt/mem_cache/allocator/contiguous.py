# SPDX-License-Identifier: Apache-2.0
"""Allocators that hand out slots run by run.

The stock class appends freed slots to the free list, so that its order decays to the
order of the frees; ``need_sort`` restores ascending order when the list runs dry.
Here the list is kept by *runs* and is rearranged when a prefill is about to
allocate and when the server is idle:

- ``alloc`` of a decode step is a slice of the head, ``free`` is one copy of the
  freed indices and a list append; neither depends on the size of the free list.
- ``alloc`` of a prefill takes the shortest run that holds all of it, or else the
  fewest runs, ascending.

The host never learns a slot number. The list, its order and its runs are device
tensors of host-known length, so nothing waits for the device, and ranks that see
the same sequence of calls hand out the same slots.
"""

from __future__ import annotations

from typing import Optional, Sequence

import torch

from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.defrag import host_runs, slot_runs
from sglang.srt.utils import get_num_new_pages

# Share of the pool that a prefill leaves free, and at most half of the slots that no
# request holds. With a prefix cache the pool is full of evictable slots, and the free
# set is what was evicted a moment ago: without a reserve there is nothing to choose
# from, and crumbs are handed out before their neighbours come back.
FREE_RESERVE = 1 / 8
# Decode steps whose slots are laid out at once. Of 16, 32 and 64 the churn benchmark
# left the fewest runs at 32, and the most whole blocks.
STRIPE_STEPS = 32
# A prefill merges what was freed when that is this share of the list: then a sort
# pays. Less than that waits for the next prefill, plan or idle moment.
MERGE_SHARE = 1 / 8
# Freed pieces kept apart before they are joined. Arbitrary: it bounds the operands
# of one torch.cat, and joining costs one copy of the freed units.
_MAX_PIECES = 512


class FreeRuns:
    """The free units (slots, or pages) of one pool, each an int64 on ``device``.

    ``count``   how many there are, in all of the parts below.
    ``head``    [n] arranged by runs; handed out from the front.
    ``fresh``   freed since the last ``age()``; a finished request may still be a
                row of a batch on the device that writes them.
    ``aged``    freed before it; nothing on the device touches them any more.
    ``stripes`` [steps, n]: the slots of the next decode steps of a batch of n. A
                column belongs to one request and is a run where the list is one,
                so that requests which decode together do not interleave.
    ``lent``    set aside as targets of a relocation: free, and taken back when
                nothing else is left.
    """

    def __init__(self, *, device: str):
        self.device = device
        self._lists = host_runs if device == "cpu" else slot_runs
        self.loan = 0
        self.arrangement = 0
        self.reset(0)

    def reset(self, count: int) -> None:
        self.count = count
        # Unit 0 takes the writes of padded rows.
        self.head = torch.arange(1, count + 1, dtype=torch.int64, device=self.device)
        self.fresh: list[torch.Tensor] = []
        self.aged: list[torch.Tensor] = []
        self.num_released = 0  # Units in ``fresh`` and ``aged``.
        self._drop_stripes()
        self.lent: Optional[torch.Tensor] = None
        # Which loan ``lent`` belongs to; a loan that was called back is void.
        self.loan += 1
        self._new_arrangement()

    def _new_arrangement(self) -> None:
        # A position counts from the front of the list as last put in order.
        self.arrangement += 1
        self._arranged_len = self.head.numel()

    def all(self) -> torch.Tensor:
        apart = [] if self.lent is None else [self.lent]
        if self._steps:
            apart.append(self._stripes_left().reshape(-1))
        return torch.cat([self.head, *self.aged, *self.fresh, *apart])

    # -- taking and giving back --

    def pop(self, count: int) -> Optional[torch.Tensor]:
        """The first ``count`` units of the head; None if fewer are free."""
        if not self.ensure(count):
            return None
        units, self.head = self.head[:count], self.head[count:]
        self.count -= count
        return units

    def cut(self, head: torch.Tensor) -> None:
        """``head`` is a tail of the head: what is in front of it was handed out."""
        self.count -= self.head.numel() - head.numel()
        self.head = head

    def ensure(self, count: int) -> bool:
        """Whether the head holds ``count`` units. A head that is too short gets
        what was freed appended, in the order of the frees: no sort on this path.
        Units on loan go back last, and the loan is void."""
        if count <= self.head.numel():
            return True
        if count > self.count:
            return False
        self.end_stripes()
        if count > self.head.numel():
            self._append([*self.aged, *self.fresh])
            self.aged, self.fresh, self.num_released = [], [], 0
        if count > self.head.numel():
            self._append([self.lent])
            self.lent = None
            self.loan += 1
        return True

    def _append(self, pieces: list[torch.Tensor]) -> None:
        before = self.head.numel()
        self.head = torch.cat([self.head, *pieces])
        self._arranged_len += self.head.numel() - before

    def push(self, units: torch.Tensor) -> None:
        """Take back units that had an owner; the caller gives up the tensor."""
        self.count += units.numel()
        self._release(units)

    def _release(self, units: torch.Tensor) -> None:
        self.fresh.append(units)
        self.num_released += units.numel()
        if len(self.fresh) >= _MAX_PIECES:
            self.fresh = [torch.cat(self.fresh)]

    def age(self) -> None:
        """What has been freed so far is no longer written by any batch."""
        self.aged += self.fresh
        self.fresh = []
        if len(self.aged) >= _MAX_PIECES:
            self.aged = [torch.cat(self.aged)]

    # -- order --

    def rearrange(self, *, aged_only: bool = False) -> None:
        """Merge what was freed into the list and put the list in order."""
        merged = self.aged if aged_only else self.aged + self.fresh
        self.fresh = self.fresh if aged_only else []
        self.aged = []
        self.num_released = sum(piece.numel() for piece in self.fresh)
        units = torch.cat([self.head, *merged]) if merged else self.head
        self.head = self._lists.arrange(units)
        self._new_arrangement()

    def prepare(self, need: int) -> None:
        """The list for a prefill of ``need`` units, its own in front."""
        size = self.head.numel()
        if need > size or self.num_released > MERGE_SHARE * size:
            self.rearrange()
        if need <= self.head.numel():
            self.head = self._lists.bring_forward(self.head, need)
            self._new_arrangement()

    # -- columns for requests that decode together --

    def next_stripe(self, reqs: Sequence) -> Optional[torch.Tensor]:
        """One slot for each of ``reqs``, behind the slot it got the step before;
        None if there are too few slots to lay out two steps."""
        if reqs != self._columns or not self._steps:
            self._lay_out(list(reqs))
            if not self._steps:
                return None
        self.count -= len(reqs)
        self._steps -= 1
        return self.stripes[-1 - self._steps]

    def end_stripes(self) -> None:
        if self._steps:
            # Ascending again: columns are runs.
            self._release(self._stripes_left().t().reshape(-1))
        self._drop_stripes()

    def _drop_stripes(self) -> None:
        self.stripes: Optional[torch.Tensor] = None
        self._steps = 0  # Rows of it that are left, the last ones.
        self._columns: list = []

    def _set_stripes(self, stripes: torch.Tensor, reqs: list) -> None:
        self.stripes = stripes.contiguous()
        self._steps = stripes.shape[0]
        self._columns = reqs

    def _stripes_left(self) -> torch.Tensor:
        return self.stripes[self.stripes.shape[0] - self._steps :]

    def _lay_out(self, reqs: list) -> None:
        left, width, size = self._steps, len(reqs), self.head.numel()
        column_of = {req: column for column, req in enumerate(self._columns)}
        joined = [req for req in reqs if req not in column_of]
        if left < 2 or len(joined) == width or len(joined) * left > size:
            self.end_stripes()
            steps = min(STRIPE_STEPS, self.head.numel() // width)
            if steps > 1:
                self._set_stripes(self._columns_of(width, steps), reqs)
            return
        # Who joins goes on with the column of who left: a run that is not cut.
        left_behind = set(column_of).difference(reqs)
        for req in [req for req in self._columns if req in left_behind][: len(joined)]:
            column_of[joined.pop(0)] = column_of.pop(req)
        columns = self._stripes_left()
        if joined:
            columns = torch.cat([columns, self._columns_of(len(joined), left)], dim=1)
            first = len(self._columns)
            column_of.update((req, first + i) for i, req in enumerate(joined))
        order = [column_of.pop(req) for req in reqs]
        index = torch.tensor(order + list(column_of.values()), dtype=torch.int64)
        if columns.is_cuda:
            index = index.pin_memory().to(columns.device, non_blocking=True)
        columns = columns.index_select(1, index)
        if column_of:
            self._release(columns[:, width:].t().reshape(-1))
        self._set_stripes(columns[:, :width], reqs)

    def _columns_of(self, width: int, steps: int) -> torch.Tensor:
        """[steps, width] off the head, each column a piece of the list."""
        block = self.head[: width * steps]
        self.head = self.head[width * steps :]
        return block.view(width, steps).t()

    # -- loans --

    def longest(self, count: int) -> torch.Tensor:
        """``longest_runs`` of the head; positions are those of ``lend``."""
        table = self._lists.longest_runs(self.head, count)
        table[0] += self._arranged_len - self.head.numel()
        return table

    def lend(
        self, spans: list[tuple[int, int]], *, arrangement: int
    ) -> Optional[torch.Tensor]:
        """Set aside the (position, length) ``spans``, in that order.

        None, and nothing changes, when the list has been put in another order
        since, when a span has been handed out, or when units are lent already.
        """
        size = self.head.numel()
        popped = self._arranged_len - size
        if (
            arrangement != self.arrangement
            or self.lent is not None
            or any(position < popped for position, _ in spans)
        ):
            return None
        spans = [(position - popped, length) for position, length in spans]
        kept, at = [], 0
        for position, length in sorted(spans):
            assert at <= position and position + length <= size, spans
            kept.append(self.head[at:position])
            at = position + length
        self.lent = torch.cat([self.head[p : p + length] for p, length in spans])
        self.loan += 1
        self.head = torch.cat([*kept, self.head[at:]])
        self._new_arrangement()
        return self.lent

    def take_lent(self, count: int) -> None:
        """The next ``count`` lent units have an owner now."""
        self.lent = self.lent[count:]
        self.count -= count

    def skip_lent(self, count: int) -> None:
        """The next ``count`` lent units are not needed after all."""
        skipped, self.lent = self.lent[:count], self.lent[count:]
        if count:
            self._release(skipped)

    def end_loan(self) -> None:
        if self.lent is not None:
            self.skip_lent(self.lent.numel())
            self.lent = None
            self.loan += 1


class _OverFreeRuns:
    """What the allocators of slots and of pages share; comes before the stock class.

    The scheduler sizes a batch before it allocates it, which tells a prefill from a
    decode step: ``alloc`` has no such argument.
    """

    def __init__(self, *args, device: str, **kwargs):
        self.runs = FreeRuns(device=device)
        self._prefill_is_next = False
        self._decode_reqs: Optional[Sequence] = None
        super().__init__(*args, device=device, **kwargs)

    @property
    def free_pages(self) -> torch.Tensor:
        return self.runs.head

    @free_pages.setter
    def free_pages(self, units: Optional[torch.Tensor]) -> None:
        # The stock class starts with None, and hands out the front of the list.
        if units is not None:
            self.runs.cut(units)

    def available_size(self) -> int:
        return self.runs.count * self.page_size

    def get_all_free_pages(self) -> torch.Tensor:
        return self.runs.all()

    def create_prefill_budget(self, tree_cache, *, num_mixed_decode_tokens=0):
        self._prefill_is_next, self._decode_reqs = True, None
        return super().create_prefill_budget(
            tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens
        )

    def check_decode_capacity(
        self, *, num_tokens: int, tree_cache, requests=None, spec_algorithm=None
    ) -> bool:
        self._prefill_is_next = False
        if num_tokens > self.available_size():
            self.evict_to_free_tokens(tree_cache, num_tokens)
        return num_tokens <= self.available_size()

    def evict_to_free_tokens(self, tree_cache, num_tokens: int) -> Optional[bool]:
        # A decode step evicts what it needs and no more, as the stock one.
        if (
            self._prefill_is_next
            and tree_cache is not None
            and tree_cache.supports_prefix_sharing()
        ):
            unheld = self.available_size() + tree_cache.evictable_size()
            rest = max(0, unheld - num_tokens)
            num_tokens += min(int(self.size * FREE_RESERVE), rest // 2)
        return super().evict_to_free_tokens(tree_cache, num_tokens)

    def _prepare_prefill(self, num_units: int) -> None:
        if self._prefill_is_next:
            self._prefill_is_next = False
            self.runs.prepare(num_units)


class ContiguousTokenAllocator(_OverFreeRuns, TokenToKVPoolAllocator):
    """``TokenToKVPoolAllocator`` over ``FreeRuns``: page size 1."""

    def __init__(self, size: int, dtype: torch.dtype, device: str, kvcache):
        super().__init__(size, dtype, device=device, kvcache=kvcache, need_sort=False)

    def clear(self) -> None:
        self.runs.reset(self.size)
        self.free_group = None

    def merge_and_sort_free(self) -> None:
        self.runs.rearrange()

    def check_decode_capacity(
        self, *, num_tokens: int, tree_cache, requests=None, spec_algorithm=None
    ) -> bool:
        self._decode_reqs = None
        if requests and (spec_algorithm is None or spec_algorithm.is_none()):
            # The next alloc hands out one slot for each, in this order.
            self._decode_reqs = requests
        self._prefill_is_next = False
        # Of each decode step: as the parent's, without a call where slots are free.
        if num_tokens <= self.runs.count:
            return True
        return super().check_decode_capacity(
            num_tokens=num_tokens, tree_cache=tree_cache
        )

    def alloc(self, need_size: int) -> Optional[torch.Tensor]:
        reqs, self._decode_reqs = self._decode_reqs, None
        if reqs is not None and len(reqs) == need_size:
            slots = self.runs.next_stripe(reqs)
            if slots is not None:
                return slots
        self._prepare_prefill(need_size)
        return self.runs.pop(need_size)

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel() == 0:
            return
        if self.free_group is not None:
            self.free_group.append(self._copy_for_free_group(free_index))
            return
        # The caller's tensor may be a view of a row that is about to be rewritten.
        self.runs.push(free_index.to(torch.int64, copy=True))


class ContiguousPagedAllocator(_OverFreeRuns, PagedTokenToKVPoolAllocator):
    """``PagedTokenToKVPoolAllocator`` over ``FreeRuns``: the units are whole pages."""

    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, device: str, kvcache
    ):
        super().__init__(
            size, page_size, dtype, device=device, kvcache=kvcache, need_sort=True
        )

    def clear(self) -> None:
        self.runs.reset(self.num_pages)
        self.free_group = None
        self.free_page_ids_group = []

    def merge_and_sort_free(self) -> None:
        # Called where a request may not fit the head. Each caller
        # below has made sure of that already, without a sort.
        pass

    def alloc(self, need_size: int) -> Optional[torch.Tensor]:
        self._prepare_prefill(need_size // self.page_size)
        if not self.runs.ensure(need_size // self.page_size):
            return None
        return super().alloc(need_size)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: Optional[int] = None,
    ) -> Optional[torch.Tensor]:
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu,
                page_size=self.page_size,
                prefix_lens=prefix_lens_cpu,
            )
        self._prepare_prefill(num_new_pages)
        if not self.runs.ensure(num_new_pages):
            return None
        return super().alloc_extend(
            prefix_lens,
            prefix_lens_cpu,
            seq_lens,
            seq_lens_cpu,
            last_loc,
            extend_num_tokens,
            num_new_pages=num_new_pages,
        )

    def alloc_decode(
        self,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
    ) -> Optional[torch.Tensor]:
        num_new_pages = get_num_new_pages(
            seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True
        )
        if not self.runs.ensure(num_new_pages):
            return None
        return super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        for ids in page_ids:
            self.runs.push(ids.to(torch.int64))
