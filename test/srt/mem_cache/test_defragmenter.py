# SPDX-License-Identifier: Apache-2.0
"""Tier 1, one property at a time; test_defragmenter_states.py puts them in any order."""

import logging
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from srt.mem_cache.slot_model import BYTES, SlotModel

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.defrag import defragmenter as module
from sglang.srt.mem_cache.defrag import tier1
from sglang.srt.mem_cache.defrag.tree_values import path_values, values_alias_the_tree
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

CORES = ["rust", "python"]


def fragmented(model: SlotModel, *, requests: int = 2, length: int = 16, prefix=()):
    """Requests whose slots interleave in steps of one unit, and free room."""
    model.allocator.runs.end_stripes()
    page = model.page_size
    count = model.pool.size // page
    # Even units first: no two units that are handed out are neighbours.
    order = torch.cat([torch.arange(2, count + 1, 2), torch.arange(1, count + 1, 2)])
    model.allocator.runs.head = order
    reqs = [model.start([*prefix, *[50 + i] * length], armed=False) for i in range(requests)]
    model.check_all()
    return reqs


def steps_until_settled(model: SlotModel, limit: int = 200) -> int:
    for step in range(limit):
        before = model.pool.moves
        model.relocate()
        model.check_all()
        if model.pool.moves == before and not model.defrag._moves:
            return step
    raise AssertionError("relocation does not come to an end")


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_rows_become_contiguous(core, page_size):
    model = SlotModel(core=core, page_size=page_size, block=2 * page_size)
    reqs = fragmented(model, length=24)
    assert all(model.runs_of(req) == 24 // page_size for req in reqs)
    steps_until_settled(model)
    # The last token of a page that is not full is not moved.
    assert all(model.runs_of(req) <= 1 + (24 % page_size > 0) for req in reqs)
    assert model.pool.moves == model.draft.moves > 0


@pytest.mark.parametrize("core", CORES)
def test_the_tree_and_all_sharers_see_a_moved_prefix(core):
    model = SlotModel(core=core, rows=8)
    prefix = [9] * 20
    reqs = fragmented(model, requests=3, length=3, prefix=prefix)
    before = [model._row(req)[:20].tolist() for req in reqs]
    assert before[0] == before[1] == before[2]
    steps_until_settled(model)
    after = [model._row(req)[:20].tolist() for req in reqs]
    assert after[0] == after[1] == after[2] != before[0]
    # Moved once, not once for each sharer, together with what follows in one row;
    # the three own tokens of the others are no block.
    assert model.pool.moves == 20 + 3
    later = model.start([*prefix, 77])
    assert model._row(later)[:20].tolist() == after[0]
    for req in list(model.running):
        model.stop(req)
    model.tree.evict(EvictParams(num_tokens=model.pool.size))
    assert model.allocator.available_size() == model.pool.size
    model.check_all()


def test_a_step_stays_within_its_budget():
    model = SlotModel(budget_slots=5)
    reqs = fragmented(model, length=24)
    largest = 0
    for _ in range(60):
        before = model.metrics.bytes_moved_total
        model.relocate()
        model.check_all()
        largest = max(largest, model.metrics.bytes_moved_total - before)
    assert largest == 5 * 2 * BYTES, "two pools, five slots"
    assert all(model.runs_of(req) == 1 for req in reqs)
    assert model.metrics.runs_total >= 48 // 5


@pytest.mark.parametrize("page_size, unit", [(1, "slot"), (4, "page")])
def test_a_budget_below_one_unit_is_refused(page_size, unit):
    """Rather than rounded up to one: a step moves no more than it was given."""
    one = 2 * page_size * BYTES  # In both pools.
    model = SlotModel(page_size=page_size, block=2 * page_size, budget_slots=page_size)
    fragmented(model, length=24)
    model.relocate()
    assert model.metrics.bytes_moved_total == one
    with pytest.raises(ValueError, match=f"copy-budget is {one // 2} bytes, .* a {unit} takes {one}.*tier0"):
        SlotModel(page_size=page_size, budget_slots=page_size / 2)


def test_a_pool_without_a_free_block_is_put_together_by_halves():
    """Running requests and cached prefixes have all of it, but for a run of two here and there."""
    model = SlotModel(size=96, block=8)
    allocator = model.allocator
    (req,) = fragmented(model, requests=1, length=32)
    held = allocator.alloc(allocator.available_size())
    gaps = [int(slot) for slot in held if slot % 8 in (1, 2) and slot > 64]
    allocator.free(torch.tensor(gaps))
    before = model.runs_of(req)
    for _ in range(40):
        model.relocate()
        model.check_content(req)
    moved = model.pool.moves
    assert model.runs_of(req) < before and moved <= 3 * 32
    model.relocate()
    assert model.pool.moves == moved, "comes to an end"


def test_nothing_fragmented_nothing_moved():
    model = SlotModel()
    for i in range(3):
        model.start([30 + i] * 20)
    for _ in range(40):
        model.decode()
        model.relocate()
    assert model.pool.moves == 0 and model.metrics.runs_total == 0


def test_a_growing_request_is_moved_block_by_block():
    """Relocation goes on for as long as a request runs, and moves a slot once."""
    model = SlotModel(block=8)
    req = model.start([1] * 8)
    with mock.patch.object(model.allocator.runs, "next_stripe", return_value=None):
        for _ in range(64):
            # Someone else takes every second slot.
            hole = model.allocator.alloc(1)
            model.decode()
            model.allocator.free(hole)
            hold = model.allocator.runs
            hold.head = torch.cat([hold.head[1:], hold.head[:1]])
            model.relocate()
    model.check_all()
    assert 0 < model.pool.moves <= 64
    assert model.runs_of(req) <= 64 / 8 + 8


def test_a_crash_of_the_planner_leaves_everything_as_it_was(caplog):
    model = SlotModel()
    reqs = fragmented(model)
    rows = [model._row(req).clone() for req in reqs]
    free = torch.sort(model.allocator.get_all_free_pages()).values
    with mock.patch.object(tier1, "make_plan", side_effect=RuntimeError("planner")):
        model.defrag.after_batch()
    assert model.defrag.failed and "planner" in caplog.text
    assert all(torch.equal(model._row(r), row) for r, row in zip(reqs, rows))
    now = torch.sort(model.allocator.get_all_free_pages()).values
    assert torch.equal(free, now) and model.allocator.runs.lent is None
    for _ in range(20):
        assert model.decode()
        model.defrag.after_batch()
        model.check_all()
    assert model.pool.moves == 0


def test_a_crash_of_the_copy_leaves_everything_as_it_was():
    model = SlotModel()
    reqs = fragmented(model)
    rows = [model._row(req).clone() for req in reqs]
    model.defrag.mover = mock.Mock(side_effect=RuntimeError("copy"))
    model.defrag.after_batch()
    model.defrag.mover = mock.Mock(pools=[model.pool, model.draft])
    assert model.defrag.failed
    assert model.allocator.runs.lent is None, "the targets are ordinary free slots again"
    assert all(torch.equal(model._row(r), row) for r, row in zip(reqs, rows))
    model.check_all()


def test_a_crash_of_the_commit_is_not_swallowed():
    """Rows and tree may disagree then: the scheduler must not go on."""
    model = SlotModel()
    fragmented(model)
    model.defrag._rewriter.remap = mock.MagicMock()
    model.defrag._rewriter.remap.__setitem__.side_effect = RuntimeError("commit")
    with pytest.raises(RuntimeError, match="commit"):
        model.defrag.after_batch()


def test_a_request_that_ends_in_the_middle_of_its_move():
    model = SlotModel(budget_slots=4)
    first, second = fragmented(model, length=24)
    model.relocate()
    assert 0 < model.pool.moves < 24 and model.defrag._moves
    model.stop(first)
    model.check_all()
    steps_until_settled(model)
    assert model.runs_of(second) == 1
    assert model.allocator.runs.lent is None


def test_the_allocator_takes_the_targets_back_when_it_is_short():
    model = SlotModel(size=128, budget_slots=4, rows=8)
    fragmented(model, length=24)
    model.relocate()
    assert model.allocator.runs.lent is not None
    free = model.allocator.available_size()
    assert model.start([3] * (free - 4)) is not None
    assert model.allocator.runs.lent is None
    model.check_all()
    steps_until_settled(model)


def test_what_a_batch_on_the_device_writes_is_not_a_target():
    """Also not the slots of its rows that have stopped, which are free already."""
    model = SlotModel(size=320, overlap=True, block=4)
    loans = zombies = 0
    lend = model.allocator.runs.lend

    def checked_lend(*args, **kwargs):
        nonlocal loans
        lent = lend(*args, **kwargs)
        if lent is not None:
            loans += 1
            assert not {slot for _, _, slot in model.on_device} & set(lent.tolist())
        return lent

    model.allocator.runs.lend = checked_lend
    fragmented(model, length=10)
    for step in range(60):
        if step % 3 == 0:
            model.start([60 + step] * 4, armed=False)
        stop = model.running[step % len(model.running)] if step % 3 == 1 else None
        assert model.overlap_step(stop, keep=False)
        free = set(model.allocator.get_all_free_pages().tolist())
        zombies += len({slot for _, _, slot in model.on_device} & free)
        model.check_all()
    assert loans > 3 and zombies > 10, (loans, zombies)


def test_what_a_prepared_batch_will_write_is_not_a_target():
    """The only long free run is that of a request which stops at the drained boundary
    and is a row of the batch prepared before: it waits for the next step."""
    model = SlotModel(size=64, overlap=True, block=4)
    victim = model.start([8])
    for _ in range(12):
        model.overlap_step()
    model.allocator.runs.end_stripes()
    model.allocator.runs.rearrange()
    head = model.allocator.runs.head
    model.allocator.runs.head = torch.cat([head[::2], head[1::2]])
    others = [model.start([60 + i] * 9, armed=False) for i in range(2)]
    spare = model.allocator.alloc(model.allocator.available_size() - 6)[6:]
    model.allocator.free(spare[::2])
    model.defrag.runs.age()
    lent = []
    lend = model.allocator.runs.lend
    model.allocator.runs.lend = lambda *a, **k: lent.append(lend(*a, **k)) or lent[-1]
    model.allocator.runs.next_stripe = lambda rows: None
    model.defrag._snapshot = None  # Of the steps before; this step takes its own.
    zombie = set(model._row(victim)[: victim.kv.kv_allocated_len].tolist())

    def lent_of_it():
        return [slots for slots in lent if slots is not None and zombie & set(slots.tolist())]

    assert model.drained_step(victim, keep=False)
    assert not lent_of_it()
    assert model.overlap_step() and model.overlap_step()
    assert lent_of_it(), "one step later it is a target"
    for req in others:
        model.check_content(req)


@pytest.mark.parametrize("core", CORES)
def test_retraction_under_overlap_in_a_pool_that_is_nearly_full(core):
    """The batch on the device still writes for the request that starts over."""
    model = SlotModel(size=160, rows=8, core=core, overlap=True, block=2)
    waiting = [[10 + i] * 16 for i in range(24)]
    peak = retractions = ended = 0
    while waiting or model.running:
        while waiting and model.start(waiting[0]) is not None:
            waiting.pop(0)
        while not model.overlap_step():
            waiting.insert(0, model.retract(model.running[-1]))
            retractions += 1
            model.check_all()
        held = model.pool.size - model.allocator.available_size() - model.tree.evictable_size()
        peak = max(peak, held / model.pool.size)
        for req in [req for req in model.running if req.seqlen > 44]:
            model.stop(req)
            ended += 1
        model.check_all()
    assert ended == 24 and peak > 0.94 and retractions > 3
    assert model.pool.moves > 0
    assert model.allocator.available_size() + model.tree.evictable_size() == model.pool.size


def test_ranks_that_see_the_same_calls_have_the_same_slots():
    def rank():
        model = SlotModel(size=512, rows=8, budget_slots=7, overlap=True, block=4)
        sums = []
        fragmented(model, requests=3, prefix=[4] * 9)
        for step in range(30):
            if step % 7 == 3 and model.running:
                model.overlap_step(model.running[step % len(model.running)])
            else:
                model.overlap_step()
            if step % 5 == 0:
                model.start([60 + step] * 6)
            sums.append(int(model.rows.req_to_token.long().sum()))
            sums.append(model.allocator.runs.head.tolist())
        assert model.pool.moves > 0
        return sums

    assert rank() == rank()


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_self_test_accepts_the_real_trees(core, page_size):
    assert values_alias_the_tree(SlotModel(core=core, page_size=page_size).tree)


def test_the_self_test_rejects_a_tree_that_returns_copies(monkeypatch):
    tree = SlotModel(core="python").tree
    core = type(tree.tree_core)
    real = core.get_component_device_value
    monkeypatch.setattr(core, "get_component_device_value", lambda *args: real(*args).clone())
    assert not values_alias_the_tree(tree)


def test_without_tree_slots_only_private_ones_move():
    model = SlotModel()
    model.defrag.move_tree_slots = False
    (req,) = fragmented(model, requests=1, length=20)
    protected = req.kv.cache_protected_len
    before = model._row(req)[:protected].clone()
    for _ in range(12):
        model.decode()
        model.relocate()
    assert torch.equal(model._row(req)[:protected], before)
    model.check_all()


@pytest.mark.parametrize(
    "reason",
    [
        dict(beam_group=object()),
        dict(session=object()),
        dict(is_retracted=True),
        dict(finished_reason=object()),
        "chunked",
    ],
    ids=["beam", "session", "retracted", "finished", "chunked prefill"],
)
def test_requests_whose_slots_others_hold_are_left_alone(reason):
    model = SlotModel()
    left_alone, other = fragmented(model, length=24)
    model.defrag.owners = list
    if reason == "chunked":
        model.defrag.chunked_request = lambda: left_alone
    else:
        vars(left_alone).update(reason)
    before = model._row(left_alone).clone()
    for _ in range(20):
        model.relocate()
    assert torch.equal(model._row(left_alone), before)
    assert model.runs_of(other) == 1, "the other one is moved"


def test_nothing_moves_while_a_beam_search_holds_rows(caplog):
    """It copies rows, and changes places in them, on the device: behind no event that a step here waits for. Its rows
    have no request, so a shared prefix cannot be moved around them either."""
    caplog.set_level(logging.INFO)
    model = SlotModel(rows=8)
    reqs = fragmented(model, requests=3, length=12, prefix=[9] * 12)
    beams = SimpleNamespace(beam_group=object())  # Prefilled on the device: of no running batch yet.
    model.defrag.owners = lambda: [*model.running, beams]
    before = model.rows.req_to_token.clone()
    for _ in range(8):
        model.relocate()
        model.check_all()
    assert model.defrag._moves, "there is a plan that waits"
    assert model.pool.moves == 0 and torch.equal(model.rows.req_to_token, before)
    assert "moves nothing while a beam search runs" in caplog.text
    model.defrag.owners = lambda: model.running
    steps_until_settled(model)
    assert all(model.runs_of(req) <= 2 for req in reqs)


def test_a_scheduler_sees_the_requests_of_every_batch():
    """Also of the one that is prepared or on the device, and a prefill in pieces."""
    reqs = [SimpleNamespace(name=name) for name in "abcd"]
    batches = [SimpleNamespace(reqs=reqs[at : at + 2]) for at in range(3)]
    scheduler = SimpleNamespace(
        running_batch=batches[0], last_batch=batches[1], cur_batch_for_debug=batches[2], chunked_req=reqs[0]
    )
    assert module._requests_with_rows(scheduler) == reqs
    empty = SimpleNamespace(
        running_batch=SimpleNamespace(reqs=[]), last_batch=None, cur_batch_for_debug=None, chunked_req=reqs[3]
    )
    assert module._requests_with_rows(empty) == reqs[3:]


def test_path_values_cover_exactly_the_asked_positions():
    model = SlotModel()
    req = model.start([1] * 10)
    model.start([1] * 4 + [2] * 6)  # Splits the node of the first.
    sizes = lambda lo, hi: [  # noqa: E731
        len(v) for v in path_values(model.tree, req.last_node, lo=lo, hi=hi)
    ]
    assert sizes(0, 10) == [4, 6] and sizes(0, 4) == [4] and sizes(3, 5) == [4, 6]


def fake_scheduler(model, **kwargs):
    return SimpleNamespace(
        **{
            "metrics_collector": None,
            "token_to_kv_pool_allocator": model.allocator,
            "req_to_token_pool": model.rows,
            "running_batch": SimpleNamespace(reqs=[]),
            "model_config": SimpleNamespace(is_encoder_decoder=False),
            "tree_cache": model.tree,
            "draft_worker": None,
            "chunked_req": None,
            "result_queue": [],
            "enable_overlap": True,
            **kwargs,
        }
    )


def draft_worker(pool):
    runner = SimpleNamespace(token_to_kv_pool=pool)
    return SimpleNamespace(_draft_model_runners=lambda: (runner,))


def flags(**values):
    from sglang.srt.runtime_context import get_memory

    return get_memory().override(**values)


def test_a_scheduler_gets_the_tier_it_asked_for(caplog):
    caplog.set_level(logging.INFO)
    model = SlotModel()
    kinds = {}
    for tier in ("off", "tier0", "tier1"):
        with flags(kv_defrag=tier, kv_defrag_copy_budget="1K"):
            kinds[tier] = module.build_defragmenter(fake_scheduler(model))
    assert type(kinds["off"]) is module.NoDefragmenter
    assert type(kinds["tier0"]) is module.Tier0Defragmenter
    assert type(kinds["tier1"]) is module.Tier1Defragmenter
    assert kinds["tier1"].budget_units == 1024 // BYTES
    assert "tier1 moves up to 128 slots a step" in caplog.text
    kinds["off"].after_batch()
    kinds["off"].on_idle()


def test_draft_pools_move_with_the_target_or_are_refused():
    model = SlotModel()
    with flags(kv_defrag="tier1"):
        built = module.build_defragmenter(fake_scheduler(model, draft_worker=draft_worker(model.draft)))
        assert built.mover.pools == [model.pool, model.draft]
        small = SlotModel(size=8).pool
        with pytest.raises(ValueError, match="has 8 of 256.*tier0"):
            module.build_defragmenter(fake_scheduler(model, draft_worker=draft_worker(small)))


def test_a_pool_that_cannot_move_is_refused_at_start():
    model = SlotModel()
    model.pool.move_kv_cache = mock.Mock(side_effect=NotImplementedError("no mover"))
    with flags(kv_defrag="tier1"), pytest.raises(ValueError, match="MarkPool.*no mover"):
        module.build_defragmenter(fake_scheduler(model))


def test_encoder_decoder_models_are_refused():
    config = SimpleNamespace(is_encoder_decoder=True)
    with flags(kv_defrag="tier1"), pytest.raises(ValueError, match="encoder"):
        module.build_defragmenter(fake_scheduler(SlotModel(), model_config=config))


def mla_pool():
    pool = MLATokenToKVPool(
        size=32,
        page_size=1,
        dtype=torch.float32,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    for layer in pool.kv_buffer:
        layer.copy_(torch.randn_like(layer))
    return pool


def test_the_real_mla_pool_is_moved_in_all_layers():
    pool = mla_pool()
    before = [layer.clone() for layer in pool.kv_buffer]
    mover = module.SlotMover([pool])
    assert mover.bytes_per_slot == 3 * 12 * 4
    mover.check()
    src, tgt = torch.tensor([3, 9, 30]), torch.tensor([20, 21, 22])
    mover(tgt, src)
    for layer, old in zip(pool.kv_buffer, before):
        assert torch.equal(layer[tgt], old[src])
        rest = torch.ones(33, dtype=torch.bool)
        rest[tgt] = False
        assert torch.equal(layer[rest], old[rest])


def test_one_launch_moves_all_layers_of_a_pool(monkeypatch):
    kernels = pytest.importorskip("sgl_kernel_sm120")
    launches, launch = [], kernels.kv_move_all_layers
    monkeypatch.setattr(
        kernels, "kv_move_all_layers", lambda layers, *slots: launches.append(len(layers)) or launch(layers, *slots)
    )
    target, draft = mla_pool(), mla_pool()
    mover = module.SlotMover([target, draft])
    with mock.patch.object(MLATokenToKVPool, "move_kv_cache", side_effect=AssertionError("a launch for each layer")):
        mover(torch.tensor([20, 21]), torch.tensor([3, 9]))
    assert launches == [3, 3]
