# SPDX-License-Identifier: Apache-2.0
"""The sources of the helper kernels, run on the CPU thread by thread, against the CPU ops. No GPU, no CUDA compiler.

on_host/cuda_on_host.h runs every CUDA thread as a fiber. This finds wrong results, wrong indices and barriers that not
all threads reach; it cannot find races.
"""

import ctypes
from pathlib import Path

import pytest
import torch
from kernels.host_build import load_host_build
from kernels.sheets import KINDS, score_sheet

from sgl_kernel_sm120 import ddtree_build, kv_move_all_layers, pack_tree_mask, tree_accept, tree_count

ON_HOST = Path(__file__).parent / "on_host"


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    return load_host_build(ON_HOST / "kernels.cpp", tmp_path_factory.mktemp("on_host") / "kernels.so")


def pointer(tensor):
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def poisoned_like(tensor):
    """Every element that the kernel leaves out differs from the right one."""
    return tensor.logical_not() if tensor.dtype == torch.bool else torch.full_like(tensor, -77)


SHEETS = [
    (2, 7, 8, 16),
    (1, 1, 1, 2),
    (3, 4, 3, 33),
    (1, 31, 64, 128),
    (2, 2, 2, 128),
    (1, 11, 5, 64),
    (2, 7, 8, 1),
    (2, 0, 4, 6),
]


def run_ddtree_build(kernels, root, ids, scores, want, min_log_prob=-torch.inf):
    """want: a tree of the shapes that are asked for."""
    got = [poisoned_like(t) for t in want]
    sizes = [*scores.shape, want.tokens.shape[1], want.path_log_probs.shape[1]]
    kernels.host_ddtree_build(*map(pointer, [root, ids, scores, *got]), ctypes.c_float(min_log_prob), *sizes)
    return got


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("b, depths, k, n", SHEETS)
def test_ddtree_build(kernels, b, depths, k, n, kind):
    generator = torch.Generator().manual_seed(n)
    scores = score_sheet(generator, b, depths, k, kind)
    ids = torch.randint(0, 1000, (b, depths, k), generator=generator)
    root = torch.randint(0, 1000, (b,), generator=generator)
    for limit, more in [(-torch.inf, 0), (-2.0, 0), (-torch.inf, 128 - n), (-1.5, (128 - n) // 2)]:
        want = ddtree_build(root, ids, scores, n, min_log_prob=limit, num_paths=n + more)
        got = run_ddtree_build(kernels, root, ids, scores, want, limit)
        for name, g, w in zip(want._fields, got, want, strict=True):
            assert torch.equal(g, w), (name, limit, more)


def test_ddtree_build_where_sums_collapse(kernels):
    """The pairs of rank and parent that the kernel looks at hold the best weights, not always the best paths."""
    generator = torch.Generator().manual_seed(0)
    for case in range(150):
        depths, k = (int(x) for x in torch.randint(3, 7, (2,), generator=generator))
        n = int(torch.randint(8, 61, (), generator=generator))
        scores = score_sheet(generator, 1, depths, 3 * k - 6, "collapse")
        root, ids = torch.tensor([9]), torch.arange(scores.numel()).view_as(scores)
        want = ddtree_build(root, ids, scores, n)
        got = run_ddtree_build(kernels, root, ids, scores, want)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True)), case


def test_ddtree_build_of_a_child_beyond_the_bound(kernels):
    """The last of 14 paths is (0, 1, 3), whose parent is third best; (1, 0, 0) weighs the same in fp32."""
    far = [-100.0, -100.0]
    scores = torch.tensor([[[0.0, -1.0, *far], [0.0, -1.0000001, *far], [-16.0] * 4]])
    root, ids = torch.tensor([9]), torch.arange(12).view(1, 3, 4)
    want = ddtree_build(root, ids, scores, 15)
    got = run_ddtree_build(kernels, root, ids, scores, want)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    # Below the root: 2 paths of depth 1, 4 of depth 2, of depth 3 four of (0, 0) and four of (0, 1), none of (1, 0).
    assert want.parents[0].tolist() == [-1, 0, 0, 1, 1, 2, 2, *[3] * 4, *[4] * 4]


def test_ddtree_build_leaves_out_nan(kernels):
    scores = torch.tensor([[[-0.5, torch.nan, -1.0], [torch.nan, -0.1, -torch.inf]]])
    root, ids = torch.tensor([9]), torch.arange(6).view(1, 2, 3)
    want = ddtree_build(root, ids, scores, 8)
    got = run_ddtree_build(kernels, root, ids, scores, want)
    assert int(want.used) == 5 and all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def random_parents(n, generator):
    parents = [-1] + [int(torch.randint(0, i, (), generator=generator)) for i in range(1, n)]
    unused = n // 5
    return torch.tensor(parents[: n - unused] + [-2] * unused, dtype=torch.int32)


@pytest.mark.parametrize("n, max_len", [(1, 1), (1, 4), (5, 3), (33, 8), (64, 64), (128, 20)])
def test_tree_accept(kernels, n, max_len):
    generator = torch.Generator().manual_seed(n)
    b = 8
    tokens, targets = (torch.randint(0, 3, (b, n), generator=generator) for _ in range(2))
    parents = torch.tensor(
        [[-1] + [int(torch.randint(0, i, (), generator=generator)) for i in range(1, n)] for _ in range(b)]
    )
    parents[:, n - n // 5 :] = -2 if n > 1 else -1
    parents = parents.int()
    want = tree_accept(tokens, parents, targets, max_len)
    got = [poisoned_like(t) for t in want]
    kernels.host_tree_accept(*map(pointer, [tokens, parents, targets, *got]), b, n, max_len)
    for name, g, w in zip(want._fields, got, want, strict=True):
        assert torch.equal(g, w), name
    if n >= 33:
        assert int(want.accept_len.max()) > 2, "the case accepts nothing"


@pytest.mark.parametrize("depths, k, n, paths", [(7, 8, 16, 32), (1, 1, 2, 2), (31, 64, 128, 128), (3, 40, 5, 33)])
def test_tree_count(kernels, depths, k, n, paths):
    generator = torch.Generator().manual_seed(n)
    b, options = 8, torch.tensor([-2, -n, 2, n, paths, 1, -depths - 1], dtype=torch.int32)
    scores = score_sheet(generator, b, depths, k, "ties")
    ids = torch.rand(b, depths, 3 * k, generator=generator).argsort(-1)[..., :k].contiguous()
    tree = ddtree_build(torch.zeros(b, dtype=torch.int64), ids, scores, n, num_paths=paths)
    child = tree.tokens.gather(1, tree.first_child.clamp(min=0).long())
    wanted = torch.where(torch.rand(child.shape, generator=generator) < 0.8, child, ids[0, 0, -1])
    accepted = tree_accept(tree.tokens, tree.parents, wanted, min(n, depths + 1))
    for some in (options, options[:0]):
        want = tree_count(tree, ids, scores, accepted, n, some)
        got = poisoned_like(want)
        inputs = [ids, scores, tree.path_log_probs, tree.used, accepted.accept_len, accepted.out_tokens, some, got]
        sizes = [b, depths, k, paths, accepted.out_tokens.shape[1], len(some)]
        kernels.host_tree_count(*map(pointer, inputs), n, *sizes)
        assert torch.equal(got[:, :6], want[:, :6])
        torch.testing.assert_close(got[:, 6:].view(torch.float32), want[:, 6:].view(torch.float32))


def test_pack_every_width(kernels):
    generator = torch.Generator().manual_seed(0)
    for n in range(1, 129):
        visible = torch.rand(1, n, n, generator=generator) < 0.5
        words = torch.full((1, n, (n + 63) // 64), -77)
        kernels.host_pack_tree_mask(pointer(visible), pointer(words), ctypes.c_int64(n), n)
        assert torch.equal(words, pack_tree_mask(visible)), f"width {n}"


def check_move(kernels, granule, row_bytes, tgt, src, *, slots, num_buffers=3):
    """The kernel against the CPU op, which gets the pairs that are in range."""
    generator = torch.Generator().manual_seed(len(tgt))
    wide = (slots, row_bytes + 16)
    buffers = [torch.randint(0, 256, wide, dtype=torch.uint8, generator=generator) for _ in range(num_buffers)]
    real = (tgt >= 0) & (src >= 0) & (tgt < slots) & (src < slots)
    want = [b.clone() for b in buffers]
    kv_move_all_layers([w[:, :row_bytes] for w in want], tgt[real], src[real])
    kernels.host_kv_move(
        granule,
        num_buffers,
        (ctypes.c_void_p * num_buffers)(*[b.data_ptr() for b in buffers]),
        (ctypes.c_int64 * num_buffers)(*[row_bytes + 16] * num_buffers),
        (ctypes.c_int32 * num_buffers)(*[row_bytes] * num_buffers),
        (ctypes.c_int32 * num_buffers)(*[slots] * num_buffers),
        pointer(tgt),
        pointer(src),
        len(tgt),
    )
    for i, (b, w) in enumerate(zip(buffers, want, strict=True)):
        assert torch.equal(b, w), f"buffer {i}"


@pytest.mark.parametrize("granule, row_bytes", [(16, 1152), (16, 576), (4, 12), (4, 1156), (1, 5), (1, 33)])
@pytest.mark.parametrize("n", [1, 9, 40, 193])
def test_move(kernels, granule, row_bytes, n):
    """Chains and cycles at every width; padding and indices beyond the buffer move nothing."""
    generator = torch.Generator().manual_seed(n)
    slots = n + 7
    tgt, src = (torch.randperm(slots, generator=generator)[:n] for _ in range(2))
    if n > 4:
        tgt[1], src[2], tgt[3], src[4] = -1, -1, slots, 2**40
    check_move(kernels, granule, row_bytes, tgt, src, slots=slots)


@pytest.mark.parametrize("moving", [0, 2, 40, 190, 700])
def test_move_of_some_pairs(kernels, moving):
    """Of 2,000 pairs those that move are listed, in the room that the others do not take."""
    generator = torch.Generator().manual_seed(moving)
    slots = 2100
    tgt = torch.randperm(slots, generator=generator)[:2000]
    src = tgt.clone()
    at = torch.randperm(2000, generator=generator)[: moving + 30]
    src[at[:moving]] = tgt[at[:moving]].roll(1)
    src[at[moving:]] = -1
    check_move(kernels, 16, 1152 if moving < 100 else 80, tgt, src, slots=slots)


# At 16, 4 and 1 bytes 4096, 8192 and 10922 pairs can be listed; above that all n take room, in words as wide as fit.
@pytest.mark.parametrize(
    "granule, n, moving",
    [(16, n, n) for n in (4096, 4097, 6144, 6145, 24577)]
    + [(16, 9000, 4096), (4, 8192, 8192), (4, 8193, 8193), (4, 24577, 24577), (1, 10922, 10922), (1, 10923, 10923)],
)
def test_move_of_more_pairs_than_can_be_listed(kernels, granule, n, moving):
    generator = torch.Generator().manual_seed(n)
    tgt = torch.randperm(n + 3, generator=generator)[:n]
    src = tgt.clone()
    src[:moving] = tgt[:moving].roll(1)
    check_move(kernels, granule, 2 * granule, tgt, src, slots=n + 3, num_buffers=1)
