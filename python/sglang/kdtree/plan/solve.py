# SPDX-License-Identifier: Apache-2.0
"""Evaluate a wish at a memory fraction, choose the fraction, and look for the nearest wish that fits."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from sglang.kdtree.errors import KitError
from sglang.kdtree.model_shape import DrafterShape, TargetShape
from sglang.kdtree.plan import buffers, kv_pool, machine, weights
from sglang.kdtree.plan.calibrate import Calibration

# On 8 x RTX PRO 6000 with Kimi K2.6, TP 8, and its drafter. No higher one is chosen unless it is asked for.
PROVEN_FRACTION = 0.93
OUT_OF_MEMORY_FRACTION = 0.94  # at a 32k prefill
# How far the plan was from the two pools that it could be compared with.
POOL_ERROR = 0.03


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    target: TargetShape
    drafter: DrafterShape | None
    gpu: machine.Gpu
    gpus: int  # tensor-parallel size
    attention_dp: int
    expert_parallel: int
    redundant_experts: int
    context: int
    concurrency: int
    max_requests: int
    chunk: int
    tree_size: int
    page_size: int
    kv_dtype: str
    backend: str
    accounting: str  # of kv_pool.ACCOUNTING
    reserved_bytes: int
    calibration: Calibration | None = None

    @property
    def attention_tp(self) -> int:
        return self.gpus // self.attention_dp

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.target.heads // self.attention_tp)

    @property
    def requests_per_rank(self) -> int:
        return math.ceil(self.concurrency / self.attention_dp)

    @property
    def row_tokens(self) -> int:
        """Slots that one request may hold: its context and the reserve of two trees, in whole pages."""
        reserve = 2 * self.tree_size if self.tree_size > 1 else 1
        return math.ceil((self.context + reserve) / self.page_size) * self.page_size

    @property
    def embedding_cache_bytes(self) -> int:
        """Kept out of the KV budget of a multimodal model, which older releases did not."""
        kept = self.accounting == "own-geometry" and self.target.vision_params > 0
        return kv_pool.EMBEDDING_CACHE_BYTES if kept else 0

    @property
    def wanted_tokens(self) -> int:
        return self.requests_per_rank * self.row_tokens

    @property
    def sure_tokens(self) -> int:
        """The pool that holds the wish also if the plan is wrong by as much as it ever was."""
        return math.ceil(
            self.wanted_tokens * (1 if self.calibration else 1 + POOL_ERROR)
        )


class Static(msgspec.Struct, frozen=True, kw_only=True):
    """What does not depend on the fraction."""

    free_bytes: int
    resident_bytes: int
    target_cell_bytes: int
    drafter_cell_bytes: int
    cell_bytes: float
    target_parts: list[weights.WeightPart]
    drafter_parts: list[weights.WeightPart]
    resident_parts: list[weights.WeightPart]  # loaded before the pool is sized
    late: dict[str, int]  # allocated after the pool was sized

    @property
    def late_bytes(self) -> int:
        return sum(self.late.values())


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    fraction: float
    pool_tokens: int
    slack_bytes: int
    margin_bytes: int  # slack that nothing has claimed
    fits: bool
    reason: str


def check_wish(wish: Wish) -> None:
    limit = wish.target.max_positions
    if wish.context > limit:
        raise KitError(
            what="--context",
            expected=f"at most {limit}, the model's max_position_embeddings",
            got=str(wish.context),
            remedy="Ask for a shorter context.",
        )
    if wish.max_requests < wish.concurrency:
        raise KitError(
            what="--max-running-requests",
            expected=f"at least the {wish.concurrency} of --concurrency",
            got=str(wish.max_requests),
            remedy="Leave it out, or ask for fewer requests at the same time.",
        )
    if wish.tree_size > 1 and not wish.drafter:
        raise KitError(
            what="--tree-size",
            expected="1 without a drafter",
            got=str(wish.tree_size),
            remedy="Give the drafter with --draft.",
        )
    if wish.backend == "kdtree_sm120":
        _check_kernel_limits(wish)
    if wish.gpu.total_bytes <= wish.reserved_bytes:
        raise KitError(
            what="--gpu",
            expected=f"more than the {wish.reserved_bytes / 2**20:,.0f} MiB gone before the weights are loaded",
            got=f"{wish.gpu.total_bytes:,} B",
            remedy="Give the memory of one GPU with its unit, or correct --reserved.",
        )
    if wish.gpus % wish.attention_dp:
        raise KitError(
            what="--dp",
            expected=f"a divisor of --gpus {wish.gpus}",
            got=str(wish.attention_dp),
            remedy="Attention data parallelism splits the tensor-parallel group evenly.",
        )
    slots = wish.target.routed_experts + wish.redundant_experts
    if wish.gpus % wish.expert_parallel or slots % wish.expert_parallel:
        raise KitError(
            what="--ep",
            expected=f"a divisor of --gpus {wish.gpus} and of the {slots} experts",
            got=str(wish.expert_parallel),
            remedy="Choose --ep and --redundant-experts so that the experts divide evenly.",
        )
    if wish.redundant_experts and wish.expert_parallel == 1:
        raise KitError(
            what="--redundant-experts",
            expected="none without expert parallelism",
            got=str(wish.redundant_experts),
            remedy="Add --ep.",
        )
    if wish.target.heads % wish.attention_tp:
        raise KitError(
            what="--gpus",
            expected=f"a number of ranks that divides the {wish.target.heads} heads",
            got=f"{wish.attention_tp} ranks per attention group",
            remedy="Choose --gpus and --dp accordingly.",
        )


def _check_kernel_limits(wish: Wish) -> None:
    """What kdtree_sm120 refuses at its start."""
    batch = math.ceil(wish.max_requests / wish.attention_dp)
    limits = [
        ("--tree-size", wish.tree_size, buffers.MAX_TREE, "nodes a request"),
        ("--max-running-requests", batch, buffers.MAX_BATCH, "requests a rank"),
    ]
    for argument, value, most, unit in limits:
        if value > most:
            raise KitError(
                what=argument,
                expected=f"at most {most} {unit} with kdtree_sm120",
                got=str(value),
                remedy="Ask for less, or plan for --attention-backend triton.",
            )
    if wish.page_size & (wish.page_size - 1):
        raise KitError(
            what="--page-size",
            expected="a power of two with kdtree_sm120",
            got=str(wish.page_size),
            remedy="1 is usual.",
        )


def static_memory(wish: Wish) -> Static:
    target_parts = weights.target_parts(
        wish.target,
        tp=wish.gpus,
        attention_tp=wish.attention_tp,
        redundant_experts=wish.redundant_experts,
    )
    drafter_parts = (
        weights.drafter_parts(wish.drafter, tp=wish.gpus) if wish.drafter else []
    )
    target_cell = kv_pool.target_cell_bytes(wish.target, kv_dtype=wish.kv_dtype)
    drafter_cell = kv_pool.drafter_cell_bytes(
        wish.drafter,
        target=wish.target,
        target_cell=target_cell,
        attention_tp=wish.attention_tp,
        kv_dtype=wish.kv_dtype,
        accounting=wish.accounting,
    )
    late, resident_parts = late_allocations(wish), target_parts
    if wish.accounting == "layer-scaled":
        late["drafter weights"] = weights.rank_bytes(drafter_parts)
    else:
        resident_parts = target_parts + drafter_parts
    resident = weights.rank_bytes(resident_parts) + wish.embedding_cache_bytes
    free, cell = (
        wish.gpu.total_bytes - wish.reserved_bytes,
        float(target_cell + drafter_cell),
    )
    if wish.calibration:
        free = wish.calibration.free_bytes
        resident = wish.calibration.resident_bytes
        cell = wish.calibration.cell_bytes
    return Static(
        free_bytes=free,
        resident_bytes=resident,
        target_cell_bytes=target_cell,
        drafter_cell_bytes=drafter_cell,
        cell_bytes=cell,
        target_parts=target_parts,
        drafter_parts=drafter_parts,
        resident_parts=resident_parts,
        late=late,
    )


def late_allocations(wish: Wish) -> dict[str, int]:
    batch = math.ceil(wish.max_requests / wish.attention_dp)
    shape = {
        "batch": batch,
        "context": wish.context,
        "tree_size": wish.tree_size,
        "heads": wish.heads_per_rank,
    }
    if wish.backend == "triton":
        backend = buffers.triton_buffer_bytes(**shape)
    else:
        backend = buffers.kdtree_buffer_bytes(**shape, page_size=wish.page_size)
    return {
        "prefill activations": buffers.activation_bytes(
            chunk=wish.chunk, hidden=wish.target.hidden
        ),
        f"{wish.backend} graph and mask buffers": backend,
        "CUDA graphs": buffers.graph_bytes(batch=batch),
        "req_to_token": buffers.row_table_bytes(
            max_requests=batch,
            context=wish.context,
            tree_size=wish.tree_size,
            page_size=wish.page_size,
        ),
    }


def evaluate(wish: Wish, static: Static, *, fraction: float) -> Outcome:
    tokens = kv_pool.pool_tokens(
        free_bytes=static.free_bytes,
        fraction=fraction,
        resident_bytes=static.resident_bytes,
        cell_bytes=static.cell_bytes,
        page_size=wish.page_size,
    )
    slack = kv_pool.slack_bytes(free_bytes=static.free_bytes, fraction=fraction)
    margin = slack - static.late_bytes
    reasons = []
    if static.resident_bytes >= static.free_bytes:
        reasons.append(
            f"the weights take {static.resident_bytes / 1e9:.1f} GB a rank, "
            f"{static.free_bytes / 1e9:.1f} GB are free"
        )
    elif tokens == 0:
        reasons.append(
            f"the weights alone need --mem-fraction-static above {static.resident_bytes / static.free_bytes:.3f}"
        )
    elif tokens < wish.sure_tokens:
        unsure = f" and {POOL_ERROR:.0%} more, by which a plan without --observed may be wrong"
        reasons.append(
            f"the pool holds {tokens:,} tokens, the wish needs {wish.wanted_tokens:,}"
            + unsure * (tokens >= wish.wanted_tokens)
        )
    if margin < 0:
        reasons.append(
            f"{slack / 1e9:.2f} GB are left for what is allocated after the pool, "
            f"which needs {static.late_bytes / 1e9:.2f} GB"
        )
    return Outcome(
        fraction=fraction,
        pool_tokens=tokens,
        slack_bytes=slack,
        margin_bytes=margin,
        fits=not reasons,
        reason="; ".join(reasons),
    )


def largest_fraction(static: Static) -> float:
    """The largest fraction, in steps of 0.01, whose slack covers the late allocations."""
    return max(0.0, math.floor((1 - static.late_bytes / static.free_bytes) * 100) / 100)


def smallest_fraction(wish: Wish, static: Static) -> float:
    """The smallest fraction, in steps of 0.01, whose pool holds the wish."""
    needed = kv_pool.fraction_for_tokens(
        tokens=wish.sure_tokens,
        free_bytes=static.free_bytes,
        resident_bytes=static.resident_bytes,
        cell_bytes=static.cell_bytes,
    )
    return math.ceil(needed * 100) / 100


def choose_fraction(
    wish: Wish, static: Static, *, near: float = PROVEN_FRACTION
) -> float:
    """From near upwards, as far as a start is known to have run; lower where the slack asks for it."""
    wanted = max(near, smallest_fraction(wish, static))
    return min(largest_fraction(static), PROVEN_FRACTION, wanted)


def solve(wish: Wish, *, fraction: float | None = None) -> tuple[Static, Outcome]:
    check_wish(wish)
    static = static_memory(wish)
    return static, evaluate(
        wish,
        static,
        fraction=choose_fraction(wish, static) if fraction is None else fraction,
    )


def nearest_wishes(
    wish: Wish, *, fraction: float | None = None
) -> list[tuple[str, Wish, Outcome]]:
    """Single changes to the wish that make it fit, the smallest sacrifice first."""
    found = []
    if fraction is not None:
        other = choose_fraction(wish, static_memory(wish), near=fraction)
        outcome = solve(wish, fraction=other)[1]
        if outcome.fits:
            found.append((f"--mem-fraction-static {other:g}", wish, outcome))
    for label, changed in _single_changes(wish, fraction=fraction):
        try:
            outcome = solve(changed, fraction=fraction)[1]
        except KitError:  # the change is not allowed with the rest of the wish
            continue
        if outcome.fits:
            found.append((label, changed, outcome))
    context = _longest_context(wish, fraction=fraction)
    if context:
        changed = msgspec.structs.replace(wish, context=context)
        found.append(
            (f"--context {context}", changed, solve(changed, fraction=fraction)[1])
        )
    return found


def _single_changes(wish: Wish, *, fraction: float | None):
    replace = msgspec.structs.replace
    if wish.calibration is None and wish.kv_dtype == "bf16":
        yield "--kv-dtype fp8", replace(wish, kv_dtype="fp8")
    if wish.max_requests > wish.concurrency:
        yield (
            f"--max-running-requests {wish.concurrency}",
            replace(wish, max_requests=wish.concurrency),
        )
    if wish.backend == "triton":
        yield "--attention-backend kdtree_sm120", replace(wish, backend="kdtree_sm120")
    for chunk in (4096, 2048):
        if wish.chunk > chunk:
            yield f"--chunked-prefill-size {chunk}", replace(wish, chunk=chunk)
    for gpus in (2, 4, 8, 16):
        if (
            wish.calibration is None
            and gpus > wish.gpus
            and wish.target.heads % (gpus // wish.attention_dp) == 0
        ):
            yield f"--gpus {gpus}", replace(wish, gpus=gpus)
    concurrency = _largest(
        lambda n: solve(replace(wish, concurrency=n), fraction=fraction)[1].fits,
        wish.concurrency - 1,
    )
    if concurrency:
        yield (f"--concurrency {concurrency}", replace(wish, concurrency=concurrency))


def _longest_context(wish: Wish, *, fraction: float | None) -> int:
    """Longest context, in steps of 1024, that fits with all else unchanged; 0 if none does."""

    def fits(blocks: int) -> bool:
        changed = msgspec.structs.replace(wish, context=blocks * 1024)
        return solve(changed, fraction=fraction)[1].fits

    return 1024 * _largest(fits, wish.context // 1024)


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to limit that fits, where each one below fits too; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
