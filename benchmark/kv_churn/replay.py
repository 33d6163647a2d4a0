# SPDX-License-Identifier: Apache-2.0
"""A scheduler without a model: admission, prefill, decode steps, retraction.

The allocator, the row table, the prefix cache, the requests and the defragmenter
are the server's own. The KV pool keeps one number per slot, a fingerprint of the
tokens up to it, which stands for the KV and is checked when a request ends: a slot
that was handed out twice, or moved to the wrong place, is found.

What stands for the model and the batch writes through numpy views of the tensors: of
rows and slots this small, most of the time of a torch call is the call.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice

import numpy as np
import torch

from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ReqKvInfo
from sglang.srt.mem_cache.allocation import alloc_req_slots, alloc_token_slots
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.contiguous import ContiguousTokenAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import (
    checkpoint_kv_cache,
    match_kv_cache,
    release_kv_cache,
)
from sglang.srt.mem_cache.defrag.defragmenter import NoDefragmenter
from sglang.srt.mem_cache.defrag.metrics import DefragMetrics
from sglang.srt.mem_cache.defrag.mover import SlotMover
from sglang.srt.mem_cache.defrag.tier0 import Tier0Defragmenter
from sglang.srt.mem_cache.defrag.tier1 import Tier1Defragmenter
from sglang.srt.mem_cache.defrag.tree_values import values_alias_the_tree
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from .contiguity import measure
from .traces import MADE_AHEAD, TraceRequest

MODES = ("upstream", "need_sort", "tier0", "tier1")
# Kimi K2: 61 layers of 512 + 64 bf16 values.
BYTES_PER_SLOT = 61 * 576 * 2
# Share of the tokens still to be generated that admission keeps room for.
PROMISE = 0.7
PREFILL_TOKENS = 8192
_MIX, _ONE = np.uint64(0x9E3779B97F4A7C15), np.uint64(1)
# Of so many steps the defragmenter's time is taken in one, and looking at the clock is not half of it. Has no
# factor in common with the steps between two plans.
TIMED_EVERY = 7


class Stopwatch:
    """CPU time of this process, in seconds, of what runs inside ``with``."""

    def __init__(self):
        self.seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self.seconds -= time.process_time()
        return self

    def __exit__(self, *error) -> None:
        self.seconds += time.process_time()


class Requests:
    """Makes the server's requests, by copying one: the constructor sets over a hundred fields, of which a replay
    changes those below."""

    def __init__(self):
        self.plain = vars(Req("", "", array("q"), SamplingParams()))

    def make(self, rid: str, prompt: array) -> Req:
        req = Req.__new__(Req)
        vars(req).update(
            self.plain,
            rid=rid,
            origin_input_ids=prompt,
            origin_input_ids_unpadded=prompt,
            output_ids=array("q"),
            full_untruncated_fill_ids=array("q"),
            kv=ReqKvInfo(),
        )
        return req


def fingerprints(tokens: array) -> np.ndarray:
    """One number per position, of all tokens up to it."""
    values = np.frombuffer(tokens, dtype=np.uint64) * _MIX
    values += _ONE
    return values.cumsum().view(np.int64)


class FingerprintPool:
    """One int64 per slot in place of the KV; its size is that of the real model."""

    def __init__(self, size: int):
        self.size, self.page_size, self.device = size, 1, "cpu"
        self.slots = torch.zeros(size + 1, dtype=torch.int64)
        self.content = self.slots.numpy()

    def get_kv_size_bytes(self) -> int:
        return (self.size + 1) * BYTES_PER_SLOT

    def move_kv_cache(self, tgt: torch.Tensor, src: torch.Tensor) -> None:
        self.slots[tgt] = self.slots[src]


@dataclass
class Series:
    """Samples over the replay, one entry a sample."""

    step: list[int] = field(default_factory=list)
    runs_per_1k_tokens: list[float] = field(default_factory=list)
    runs_per_request: list[float] = field(default_factory=list)
    longest_run: list[int] = field(default_factory=list)
    block_share: list[float] = field(default_factory=list)
    moved_mib: list[float] = field(default_factory=list)
    free_slots: list[int] = field(default_factory=list)


@dataclass
class Totals:
    requests: int = 0
    retractions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    defrag_cpu_seconds: float = 0.0


@dataclass
class Outcome(Totals):
    steps: int = 0
    cpu_seconds: float = 0.0  # Of this process, without making the trace.
    trace_cpu_seconds: float = 0.0  # What making the trace took besides.
    bytes_moved: int = 0
    max_bytes_in_a_step: int = 0
    series: Series = field(default_factory=Series)


class _Work:
    """A request, what it will answer, and the fingerprints of all its tokens.

    A decode step changes nothing here: ``Replay`` counts the steps, and a request is
    brought up to date when somebody looks at it.
    """

    __slots__ = ("req", "answer", "prints", "seen", "ends", "place")

    def __init__(self, req: Req, trace: TraceRequest):
        self.req = req
        self.answer = trace.answer
        self.prints = fingerprints(trace.prompt + trace.answer)
        self.seen = 0  # Decode steps of the replay that ``req`` knows of.
        self.ends = 0  # The decode step that gives it its last token.
        self.place = 0  # In ``Replay.places``: where the first token goes that it decodes.

    def remaining(self) -> int:
        """Tokens to come, of a request that is up to date."""
        return len(self.answer) - len(self.req.output_ids)

    def answer_one(self) -> None:
        self.req.output_ids.append(self.answer[len(self.req.output_ids)])

    def catch_up(self, decoded: int) -> None:
        """Decode steps since ``seen``: a slot and a token each."""
        steps, self.seen = decoded - self.seen, decoded
        if steps:
            req, have = self.req, len(self.req.output_ids)
            req.kv.kv_allocated_len += steps
            req.kv.kv_committed_len += steps
            req.output_ids.extend(self.answer[have : have + steps])


class Replay:
    def __init__(
        self,
        mode: str,
        *,
        pool_tokens: int,
        max_running: int,
        context: int,
        budget_bytes: int,
        tree_core: str = "rust",
        sample_every: int = 256,
    ):
        self.pool = FingerprintPool(pool_tokens)
        common = (pool_tokens, torch.bfloat16, "cpu", self.pool)
        if mode in ("upstream", "need_sort"):
            self.allocator = TokenToKVPoolAllocator(*common, need_sort=mode == "need_sort")
        else:
            self.allocator = ContiguousTokenAllocator(*common)
        self.rows = ReqToTokenPool(max_running, context, "cpu", False)
        # Upstream adds to the one or two entries of a prefill: of numpy's that takes 1 us, of torch's 20.
        self.rows.req_generation = self.rows.req_generation.numpy()
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=tree_core,
            )
        )
        self.max_running = max_running
        self.sample_every = sample_every
        self.waiting: deque[_Work] = deque()
        self.running: list[_Work] = []
        self.running_reqs: list[Req] = []
        self.table = self.rows.req_to_token.numpy()  # Views: int32 [rows, context], and flat.
        self.places = self.table.reshape(-1)
        self.prints = np.zeros(self.table.shape, dtype=np.int64)  # Of all tokens of the requests in the rows.
        self.flat_prints = self.prints.reshape(-1)
        # Of each running request: where in ``places`` its next token goes, and the decode step that ends it.
        self.next_at = self.ends = np.empty(0, dtype=np.int64)
        self.decoded = 0  # Decode steps so far.
        self.next_end = 0  # The first of ``ends``.
        self.blocked = False  # The first one that waits does not fit, until a request ends.
        self.requests = Requests()
        self.metrics = DefragMetrics(None)
        self.defragmenter = self._build_defragmenter(mode, budget_bytes)
        self.defragments = not isinstance(self.defragmenter, NoDefragmenter)
        self.total = Totals()

    def _build_defragmenter(self, mode: str, budget_bytes: int):
        if mode in ("upstream", "need_sort"):
            return NoDefragmenter()
        tier0 = dict(
            allocator=self.allocator,
            req_to_token_pool=self.rows,
            metrics=self.metrics,
            running_requests=self._up_to_date,
        )
        if mode == "tier0":
            return Tier0Defragmenter(**tier0)
        return Tier1Defragmenter(
            tree_cache=self.tree,
            mover=SlotMover([self.pool]),
            budget_bytes=budget_bytes,
            chunked_request=lambda: None,
            owners=list,
            on_device=lambda: False,
            overlap=False,
            move_tree_slots=values_alias_the_tree(self.tree),
            **tier0,
        )

    @torch.inference_mode()  # As the scheduler's loops.
    def run(self, trace: Iterable[TraceRequest]) -> Outcome:
        series, total = Series(), self.total
        making, whole = Stopwatch(), Stopwatch()
        with whole:
            step, largest = self._run(self._timed(iter(trace), making), series)
        return Outcome(
            **asdict(total),
            steps=step,
            cpu_seconds=whole.seconds - making.seconds,
            trace_cpu_seconds=making.seconds,
            bytes_moved=self.metrics.bytes_moved_total,
            max_bytes_in_a_step=largest,
            series=series,
        )

    def _timed(self, trace: Iterator[TraceRequest], making: Stopwatch) -> Iterator[TraceRequest]:
        while True:
            with making:
                made = list(islice(trace, MADE_AHEAD))
            if not made:
                return
            yield from made

    def _run(self, trace: Iterator[TraceRequest], series: Series) -> tuple[int, int]:
        """Its steps, and the most bytes moved in one."""
        total = self.total
        coming = next(trace, None)
        step = largest = 0
        while coming or self.waiting or self.running:
            while coming and coming.arrival <= step:
                self.waiting.append(_Work(self.requests.make(str(total.requests), coming.prompt), coming))
                total.requests += 1
                coming = next(trace, None)
            admitted = self._prefill()
            if not admitted and self.running:
                self._decode()
            if self.defragments:
                moved = self.metrics.bytes_moved_total
                timed = step % TIMED_EVERY == 0
                began = timed and time.process_time()
                self.defragmenter.after_batch()
                if not self.running and not admitted and not self.waiting:
                    self.defragmenter.on_idle()
                if timed:
                    total.defrag_cpu_seconds += TIMED_EVERY * (time.process_time() - began)
                largest = max(largest, self.metrics.bytes_moved_total - moved)
            if admitted:
                self._join(admitted)
            if self.running and step % self.sample_every == 0:
                self._sample(series, step)
            step += 1
            if coming and not self.waiting and not self.running:
                self._check_idle()
                step = max(step, int(np.ceil(coming.arrival)))
        self._check_idle()
        return step, largest

    # -- the two kinds of batch --

    def _prefill(self) -> list[_Work]:
        """Admit what fits, allocate all of it at once as a server does."""
        if not self.waiting or self.blocked or len(self.running) >= self.max_running:
            return []
        self.allocator.create_prefill_budget(self.tree)
        promised = (int(self.ends.sum()) - self.decoded * len(self.running)) * PROMISE
        batch, need = [], 0
        while self.waiting and len(self.running) + len(batch) < self.max_running:
            work = self.waiting[0]
            req, promise = work.req, work.remaining() * PROMISE
            req.is_retracted = False
            req.refresh_fill_ids()
            tokens = req.full_untruncated_fill_ids
            match_kv_cache(req, self.tree, tokens, max_prefix_len=len(tokens) - 1)
            req.kv.cache_protected_len = req.prefix_len
            req.lock = self.tree.lock(req.last_node)
            own = len(tokens) - req.prefix_len
            room = self.allocator.available_size() + self.tree.evictable_size()
            too_long = need + own > PREFILL_TOKENS and batch
            if too_long or need + own + promise + promised > room:
                self.tree.unlock(req.lock)
                req.lock = None
                # A decode step takes more room than it keeps of its promises: asking again is of no use.
                self.blocked = not batch
                if not batch and not self.running:
                    raise self._too_long(work)
                break
            promised += promise
            need += own
            batch.append(self.waiting.popleft())
        if not batch:
            return []
        reqs = [work.req for work in batch]
        alloc_req_slots(self.rows, reqs, self.tree)
        slots = alloc_token_slots(self.tree, need).numpy()
        at = 0
        for work in batch:
            req, index = work.req, work.req.kv.req_pool_idx
            start, end = req.prefix_len, len(req.full_untruncated_fill_ids)
            own = slots[at : at + end - start]
            at += own.size
            row = self.table[index]
            row[:start] = self.tree.prefix_device_indices(req).numpy()
            row[start:end] = own
            self.pool.content[own] = work.prints[start:end]
            self.prints[index, : work.prints.size] = work.prints
            req.kv.kv_allocated_len = req.kv.kv_committed_len = end
            self.total.prompt_tokens += end
            self.total.cached_tokens += start
            req.extend_end = end
            checkpoint_kv_cache(req, self.tree)
            work.answer_one()
            work.seen = self.decoded
            work.ends = self.decoded + work.remaining()
            work.place = index * self.table.shape[1] + end
        self._finish([work for work in batch if work.ends <= self.decoded])
        return [work for work in batch if work.ends > self.decoded]

    def _decode(self) -> None:
        while not self.allocator.check_decode_capacity(
            num_tokens=len(self.running),
            tree_cache=self.tree,
            requests=self.running_reqs,
        ):
            self._retract()
        slots = alloc_token_slots(self.tree, len(self.running)).numpy()
        self.places[self.next_at] = slots
        self.pool.content[slots] = self.flat_prints[self.next_at]
        self.next_at += 1
        self.decoded += 1
        self.total.generated_tokens += len(self.running)
        if self.decoded >= self.next_end:
            stay = self.ends > self.decoded
            self._finish([self.running[index] for index in np.flatnonzero(~stay).tolist()])
            self._keep(stay)

    def _finish(self, done: list[_Work]) -> None:
        """Release requests that have their last token."""
        if not done:
            return
        self.blocked = False
        self.allocator.free_group_begin()
        for work in done:
            work.catch_up(self.decoded)
            self._check_content(work)
            work.req.finished_reason = FINISH_LENGTH(length=len(work.answer))
            release_kv_cache(work.req, self.tree, checkpoint=True)
        self.allocator.free_group_end()

    def _retract(self) -> None:
        """The youngest request starts over; its answer so far becomes prompt."""
        work = self.running[-1]
        if len(self.running) == 1:
            raise self._too_long(work)
        work.catch_up(self.decoded)
        release_kv_cache(work.req, self.tree, checkpoint=True)
        work.req.reset_for_retract()
        self.waiting.appendleft(work)
        self.blocked = False
        self.total.retractions += 1
        self._keep(np.arange(len(self.running)) < len(self.running) - 1)

    def _too_long(self, work: _Work) -> ValueError:
        return ValueError(
            f"--pool-tokens: expected enough for request {work.req.rid} of the trace, {work.prints.size} tokens; "
            f"got {self.pool.size}. Give more, or --shrink a trace file."
        )

    def _join(self, admitted: list[_Work]) -> None:
        self.running += admitted
        self.running_reqs += [work.req for work in admitted]
        self.next_at = np.concatenate((self.next_at, [work.place for work in admitted]))
        self.ends = np.concatenate((self.ends, [work.ends for work in admitted]))
        self.next_end = int(self.ends.min())

    def _keep(self, stay: np.ndarray) -> None:
        """Of the running requests those that ``stay``, bool [running]."""
        for index in np.flatnonzero(~stay)[::-1].tolist():
            del self.running[index], self.running_reqs[index]
        self.next_at, self.ends = self.next_at[stay], self.ends[stay]
        self.next_end = int(self.ends.min(initial=2**62))

    def _up_to_date(self) -> list[Req]:
        for work in self.running:
            work.catch_up(self.decoded)
        return self.running_reqs

    # -- looking at it --

    def _sample(self, series: Series, step: int) -> None:
        rows, lengths = np.divmod(self.next_at, self.table.shape[1])
        now = measure(self.table[rows, : lengths.max()], lengths)
        series.step.append(step)
        series.runs_per_request.append(round(now.runs_per_request, 2))
        series.runs_per_1k_tokens.append(round(now.runs_per_1k_tokens, 2))
        series.longest_run.append(now.longest_run)
        series.block_share.append(round(now.block_share, 4))
        series.moved_mib.append(round(self.metrics.bytes_moved_total / 2**20, 1))
        series.free_slots.append(self.allocator.available_size())

    def _check_content(self, work: _Work) -> None:
        length = work.req.kv.kv_committed_len
        slots = self.table[work.req.kv.req_pool_idx, :length]
        if self.pool.content.take(slots).tobytes() != work.prints[:length].tobytes():
            raise AssertionError(f"request {work.req.rid} lost some of its KV")

    def _check_idle(self) -> None:
        free, cached = self.allocator.available_size(), self.tree.evictable_size()
        if free + cached != self.pool.size or self.tree.protected_size():
            raise AssertionError(f"{free=} + {cached=} is not {self.pool.size}")
