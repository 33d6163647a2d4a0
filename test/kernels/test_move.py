# SPDX-License-Identifier: Apache-2.0
"""kv_move_all_layers: gather, then scatter, in all buffers, whatever the overlap."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernel_sm120 import kv_move_all_layers

SLOTS = 24
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS = {
    "bf16-576": ((576,), torch.bfloat16),
    "bf16-1x576": ((1, 576), torch.bfloat16),
    "fp8-576": ((576,), torch.float8_e4m3fn),
    "uint8-1x656": ((1, 656), torch.uint8),
    "bf16-heads": ((4, 32), torch.bfloat16),
    "fp32-3": ((3,), torch.float32),
    "uint8-5": ((5,), torch.uint8),  # no wider copy fits
}
MOVES = {
    "nothing": ([], []),
    "apart": ([1, 2], [10, 11]),
    "chain-up": ([1, 2, 3, 4], [0, 1, 2, 3]),
    "chain-down": ([0, 1, 2, 3], [1, 2, 3, 4]),
    "swap": ([3, 9], [9, 3]),
    "cycle": ([0, 1, 2, 3, 4], [4, 0, 1, 2, 3]),
    "itself": ([5, 6], [5, 6]),
    "one-source": ([1, 2, 3], [7, 7, 7]),
    "padding": ([1, -1, 2, -1], [7, 8, -1, -1]),
    "all": (list(range(SLOTS)), list(reversed(range(SLOTS)))),
}


def make_buffer(row, dtype, slots, seed, device="cpu"):
    """Random bytes, so that no dtype can hide a wrong copy behind rounding or NaN."""
    size = torch.empty((), dtype=dtype).element_size()
    data = torch.randint(0, 256, (slots, *row[:-1], row[-1] * size), generator=torch.Generator().manual_seed(seed))
    return data.to(torch.uint8).view(dtype).to(device)


def as_bytes(buffer):
    return buffer.contiguous().view(torch.uint8).cpu()


def moved(buffer, tgt, src):
    """The definition, pair by pair, on a copy."""
    old, new = as_bytes(buffer), as_bytes(buffer).clone()
    for t, s in zip(tgt, src, strict=True):
        if t >= 0 and s >= 0:
            new[t] = old[s]
    return new


def check(buffers, tgt, src, device="cpu"):
    want = [moved(b, tgt, src) for b in buffers]
    as_index = dict(dtype=torch.int64, device=device)
    kv_move_all_layers(buffers, torch.tensor(tgt, **as_index), torch.tensor(src, **as_index))
    for i, (buffer, expected) in enumerate(zip(buffers, want, strict=True)):
        assert torch.equal(as_bytes(buffer), expected), f"buffer {i}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("move", MOVES)
def test_moves(device, row, move):
    check([make_buffer(*ROWS[row], SLOTS, seed, device) for seed in range(3)], *MOVES[move], device)


@pytest.mark.parametrize("device", DEVICES)
def test_buffers_of_every_kind_in_one_call(device):
    check([make_buffer(*kind, SLOTS, i, device) for i, kind in enumerate(ROWS.values())], *MOVES["cycle"], device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [0, 1, 61, 128, 129, 300])
def test_number_of_buffers(device, count):
    check([make_buffer((16,), torch.bfloat16, SLOTS, i, device) for i in range(count)], *MOVES["chain-up"], device)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_with_a_stride_and_an_offset(device):
    """Rows of a wider buffer: the bytes between the rows stay, a start that is no multiple of 16 bytes works."""
    for start in (0, 8, 1):
        wide = make_buffer((40,), torch.float32, SLOTS, 5, device)
        before = as_bytes(wide)
        view = wide[:, start : start + 12]
        want = moved(view, *MOVES["cycle"])
        kv_move_all_layers([view], *(torch.tensor(x, device=device) for x in MOVES["cycle"]))
        assert torch.equal(as_bytes(view), want)
        after = as_bytes(wide)
        assert torch.equal(after[:, : start * 4], before[:, : start * 4])
        assert torch.equal(after[:, (start + 12) * 4 :], before[:, (start + 12) * 4 :])


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_overlap(data):
    n = data.draw(st.integers(0, SLOTS))
    tgt = data.draw(st.permutations(range(SLOTS)))[:n]
    src = data.draw(st.lists(st.integers(-1, SLOTS - 1), min_size=n, max_size=n))
    check([make_buffer((8,), torch.bfloat16, SLOTS, s) for s in range(2)], tgt, src)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 9, 189, 190, 1000, 4096, 4097, 6144, 6145, 24576, 24577])
def test_move_widths_on_gpu(n):
    """Every width of the kernel: n rows, listed or not, share 96 KiB of shared memory."""
    slots = n + 5
    generator = torch.Generator().manual_seed(n)
    tgt = torch.randperm(slots, generator=generator)[:n].tolist()
    src = torch.randperm(slots, generator=generator)[:n].tolist()
    check(
        [make_buffer((576,), torch.bfloat16, slots, 0, "cuda"), make_buffer((33,), torch.uint8, slots, 1, "cuda")],
        tgt,
        src,
        "cuda",
    )


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0, 0.15, 0.6])
@pytest.mark.parametrize("b, columns", [(1, 8), (64, 8), (256, 8), (256, 32)])
def test_move_of_accepted_paths_on_gpu(b, columns, share):
    """Paths to the front of their windows; a pair past the end of a path moves nothing."""
    nodes, slots = 4 * columns, 33000
    generator = torch.Generator().manual_seed(b)
    windows = torch.randperm(slots, generator=generator)[: b * nodes].view(b, nodes)
    path = torch.rand(b, nodes, generator=generator).argsort(-1)[:, :columns].sort(-1).values
    accepted = torch.rand(b, columns, generator=generator).cumsum(-1) < 2 * share * columns * torch.rand(
        b, 1, generator=generator
    )
    path = torch.where(accepted, path, torch.arange(columns)) if share else torch.arange(columns).expand(b, columns)
    tgt, src = windows[:, :columns].flatten(), windows.gather(1, path).flatten()
    check([make_buffer((576,), torch.bfloat16, slots, i, "cuda") for i in range(2)], tgt.tolist(), src.tolist(), "cuda")


@pytest.mark.gpu
def test_move_out_of_range_pairs_touch_nothing_on_gpu():
    buffer = make_buffer((576,), torch.bfloat16, SLOTS, 0, "cuda")
    before = as_bytes(buffer)
    bad = torch.tensor([SLOTS, 0, -1, 2**62, 1], device="cuda")
    good = torch.tensor([0, SLOTS, 2, 1, 2**62], device="cuda")
    kv_move_all_layers([buffer], bad, good)
    assert torch.equal(as_bytes(buffer), before)


@pytest.mark.gpu
def test_move_replays_in_a_graph():
    buffers = [make_buffer((576,), torch.bfloat16, SLOTS, i, "cuda") for i in range(61)]
    tgt, src = (torch.tensor(x, device="cuda") for x in MOVES["chain-up"])
    graph = torch.cuda.CUDAGraph()
    kv_move_all_layers(buffers, tgt, src)
    with torch.cuda.graph(graph):
        kv_move_all_layers(buffers, tgt, src)
    for name in ("swap", "cycle", "padding"):
        new_tgt, new_src = MOVES[name]
        pad = [-1] * (4 - len(new_tgt))
        tgt.copy_(torch.tensor((new_tgt + pad)[:4]))
        src.copy_(torch.tensor((new_src + pad)[:4]))
        want = [moved(b, tgt.tolist(), src.tolist()) for b in buffers]
        graph.replay()
        assert all(torch.equal(as_bytes(b), w) for b, w in zip(buffers, want, strict=True))


@pytest.mark.gpu
def test_move_past_2_gib_on_gpu():
    rows = 2**31 // 1152 + 64
    buffer = torch.zeros(rows, 576, dtype=torch.bfloat16, device="cuda")
    buffer[-9:] = torch.arange(9, dtype=torch.bfloat16, device="cuda")[:, None] + 1
    tgt = torch.arange(rows - 40, rows - 31, device="cuda")
    kv_move_all_layers([buffer], tgt, torch.arange(rows - 9, rows, device="cuda"))
    assert torch.equal(buffer[tgt], buffer[-9:])
    assert int((buffer[:, 0] != 0).sum()) == 18
