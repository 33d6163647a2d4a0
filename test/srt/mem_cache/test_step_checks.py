# SPDX-License-Identifier: Apache-2.0
"""The checks of debug mode find what they are there for."""

import multiprocessing

import pytest
import torch
from srt.mem_cache.slot_model import SlotModel

from sglang.srt.mem_cache.defrag.step_checks import StepChecks, checksum


def checked(model, group=None):
    return StepChecks(
        allocator=model.allocator,
        req_to_token_pool=model.rows,
        tree_cache=model.tree,
        owners=lambda: model.running,
        group=group,
    )


@pytest.fixture(params=[1, 4], ids=["slots", "pages"])
def model(request):
    """Two requests that share a cached prefix and have slots of their own."""
    model = SlotModel(page_size=request.param, block=2 * request.param)
    for own in (1, 2):
        model.start([9] * 8 + [own] * 6)
    for _ in range(9):
        assert model.decode()
    checked(model).after_step(1)
    return model


def test_two_owners_of_a_slot_are_found(model):
    first, second = model.running
    at = first.kv.kv_allocated_len - 1
    model._row(second)[at] = model._row(first)[at]
    with pytest.raises(RuntimeError, match="census: .* do not have exactly one owner; .*: 2"):
        checked(model).after_step(2)


def test_a_slot_that_is_owned_and_free_is_found(model):
    row = model._row(model.running[0])
    page = model.page_size
    model.allocator.free_page_ids(row[-page + model.running[0].kv.kv_allocated_len :][:1].long() // page)
    with pytest.raises(RuntimeError, match="census: 1 of"):
        checked(model).after_step(2)


def test_a_lost_slot_is_found(model):
    assert model.allocator.alloc(model.page_size) is not None
    with pytest.raises(RuntimeError, match="census: 1 of .*: 0"):
        checked(model).after_step(2)


def test_rows_that_share_slots_on_purpose_are_not_counted(model):
    model.running[0].beam_group = object()
    model.allocator.alloc(model.page_size)
    checked(model).after_step(2)


@pytest.fixture
def watched(model):
    """A model whose rows have moved under the eyes of the watch."""
    for step in range(8):
        model.scatter(step)
        assert model.decode()
        model.relocate()
    return model


@pytest.mark.parametrize("pool", ["pool", "draft"])
def test_kv_that_was_overwritten_is_found(watched, pool):
    slot = watched._row(watched.running[1])[9]
    getattr(watched, pool).marks[slot] += 1
    with pytest.raises(RuntimeError, match=f"KV content: 1 of .* the first is 9, then in slot {slot}, now in {slot}"):
        watched.relocate()


def test_kv_that_was_moved_to_a_wrong_place_is_found(model, monkeypatch):
    def reversed_move(tgt, src):
        for pool in (model.pool, model.draft):
            pool.move_kv_cache(tgt.flip(0), src)

    monkeypatch.setattr(model.defrag, "mover", reversed_move)
    with pytest.raises(RuntimeError, match="KV content"):
        for step in range(9):
            model.scatter(step)
            assert model.decode()
            model.relocate()


def test_slots_that_the_cache_replaced_are_another_matter(watched):
    req = watched.running[0]
    (slot,) = watched.allocator.alloc(watched.page_size)[:1].tolist()
    watched._row(req)[0] = slot  # Its KV is computed anew, and may be rounded otherwise.
    watched.defrag._relocate()


@pytest.fixture
def other_rank(monkeypatch):
    """What the second of two ranks sends: [0] changes a copy of the first one's numbers."""
    change = [lambda numbers: None]

    def all_gather(tensors, mine, group):
        for tensor in tensors:
            tensor.copy_(mine)
        change[0](tensors[1])

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    return change


@pytest.mark.parametrize("field", ["step", "req_to_token", "free_list"])
def test_ranks_that_differ_are_found(model, other_rank, field):
    checks = checked(model, group=object())
    checks.after_step(7)

    def differ(numbers):
        numbers[["step", "req_to_token", "free_list"].index(field)] += 1

    other_rank[0] = differ
    with pytest.raises(RuntimeError, match=f"After step 7 .*rank 0 .*rank 1 .*{field}="):
        checks.after_step(7)


def test_each_row_and_the_order_of_the_free_list_are_in_the_sums(model, other_rank):
    sent = []
    other_rank[0] = lambda numbers: sent.append(numbers.tolist())
    checks = checked(model, group=object())
    checks.after_step(1)
    head = model.allocator.runs.head
    model.allocator.runs.head = head.flip(0)
    checks.after_step(1)
    assert sent[0][:2] == sent[1][:2] and sent[0][2] != sent[1][2]
    model.decode()
    checks.after_step(1)
    assert sent[2][1] != sent[1][1]


def test_a_checksum_is_of_values_and_order():
    numbers = torch.arange(1, 2000)
    swapped = numbers.clone()
    swapped[[3, 4]] = numbers[[4, 3]]
    other = numbers.clone()
    other[7] += 1
    sums = {checksum(n) for n in (numbers, swapped, other, numbers[1:], numbers.flip(0))}
    assert len(sums) == 5
    assert checksum(numbers.int()) == checksum(numbers) == checksum(torch.arange(1, 2000))


def gloo_rank(rank, store, answers):
    """Both ranks make the same calls; then the second one alone changes its free list."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = SlotModel(rows=8)
    checks = checked(model, group=torch.distributed.group.WORLD)
    for step in range(20):
        if step % 5 == 0:
            model.scatter(step)
            model.start([9] * 8 + [step] * 20, armed=False)
        model.decode()
        model.relocate()
        checks.after_step(step)
    if rank == 1:
        model.scatter(3)
    try:
        checks.after_step(20)
    except RuntimeError as error:
        answers.put((rank, model.pool.moves, str(error)))
    torch.distributed.destroy_process_group()


def test_two_ranks_over_gloo(tmp_path):
    """The real collective, in two processes."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=gloo_rank, args=(rank, tmp_path / "store", answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = sorted(answers.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(timeout=60)
    assert [rank for rank, _, _ in found] == [0, 1]
    assert found[0][1] == found[1][1] > 0, "the plans moved something"
    assert all(text.startswith("After step 20 the ranks hold different KV slots: rank 0") for _, _, text in found)
