# SPDX-License-Identifier: Apache-2.0
"""The one list of mla_tree_verify cases, for tests and benchmarks, and the inputs that belong to a case.

Inputs are hostile by default: every slot that no request owns holds NaN, slots are scattered, lengths are ragged.
"""

from dataclasses import dataclass, field, replace

import torch

from sgl_kernel_sm120 import MaskLayout

D_QK, D_V = 576, 512
SM_SCALE = D_QK**-0.5
KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}
FP8_MAX = 448.0


@dataclass(frozen=True)
class Case:
    """prefixes: prefix length of each request. Minus m: the list is m entries shorter than s_q, so at -s_q empty."""

    name: str
    prefixes: tuple[int, ...]
    s_q: int = 9
    h_q: int = 8
    layout: MaskLayout = MaskLayout.QLEN
    tree: str = "tree"  # tree | random (any bits, rows of zeros too) | causal | all
    kv: str = "bf16"
    page_size: int = 1
    index_dtype: torch.dtype = torch.int64
    indptr_dtype: torch.dtype = torch.int32
    draft_slots: bool = False
    q_layout: str = "packed"  # packed | strided | wide (row stride 2^20 elements)
    scores: str = (
        "normal"  # normal | growing (the running max moves in every tile) | low (all logits below -5e4) | zero | tiny
    )
    slots: str = "scattered"  # scattered | high (past 2^31 elements)
    logit_cap: float = 0.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    big: bool = False  # needs gigabytes: GPU only

    @property
    def b(self) -> int:
        return len(self.prefixes)

    @property
    def pairs(self) -> int:
        """(row, head, key) triples: the cost of a naive loop."""
        return sum(max(p, 0) + self.s_q for p in self.prefixes) * self.s_q * self.h_q


@dataclass
class Inputs:
    case: Case
    arguments: dict  # keyword arguments of mla_tree_verify
    visible: torch.Tensor  # bool [b, s_q, s_q]: the tree, of which tree_mask is an encoding
    slots: list[list[int]] = field(repr=False)  # all keys of each request: prefix, then draft

    @property
    def prefixes(self) -> list[int]:
        return [max(p, 0) for p in self.case.prefixes]

    def changed(self, **arguments) -> "Inputs":
        return replace(self, arguments={**self.arguments, **arguments})


def make_tree(s_q: int, kind: str, generator: torch.Generator) -> torch.Tensor:
    """bool [s_q, s_q]. "random" is no tree: it has earlier and later keys, and rows that see no draft key."""
    if kind == "causal":
        return torch.ones(s_q, s_q, dtype=torch.bool).tril()
    if kind == "all":
        return torch.ones(s_q, s_q, dtype=torch.bool)
    if kind == "random":
        bits = torch.rand(s_q, s_q, generator=generator) < 0.5
        bits[torch.rand(s_q, generator=generator) < 0.25] = False
        return bits
    visible = torch.eye(s_q, dtype=torch.bool)
    for node in range(1, s_q):
        visible[node] |= visible[int(torch.randint(0, node, (), generator=generator))]
    return visible


def encode_mask(visible: torch.Tensor, prefixes: list[int], layout: MaskLayout):
    """-> tree_mask, mask_indptr. Bit by bit on purpose: pack_tree_mask is compared with it."""
    b, s_q, _ = visible.shape
    if layout == MaskLayout.CAUSAL:
        return None, None
    if layout == MaskLayout.QLEN:
        return visible.clone(), None
    if layout == MaskLayout.BITS:
        rows = []
        for row in visible.reshape(b * s_q, s_q).tolist():
            words = [sum(bit << (j % 64) for j, bit in enumerate(row) if j // 64 == w) for w in range((s_q + 63) // 64)]
            rows.append([w - 2**64 if w >= 2**63 else w for w in words])
        return torch.tensor(rows, dtype=torch.int64).view(b, s_q, -1), None
    # The prefix columns say "not visible": nothing may read them.
    blocks = [
        torch.cat([torch.zeros(s_q, p, dtype=torch.bool), v], 1).flatten()
        for p, v in zip(prefixes, visible, strict=True)
    ]
    sizes = torch.tensor([0] + [block.numel() for block in blocks])
    return torch.cat(blocks), sizes.cumsum(0)


def make_slots(case: Case, generator: torch.Generator) -> tuple[list[list[int]], int]:
    """-> slots of every request, number of slots of the cache. Page by page; the pages of a request are scattered."""
    page = case.page_size
    lengths = [max(p + case.s_q, 0) for p in case.prefixes]
    pages = [-(-n // page) for n in lengths]
    spare = 3  # pages that nobody owns
    order = torch.randperm(sum(pages) + spare, generator=generator).tolist()
    num_slots = (sum(pages) + spare) * page
    if case.slots == "high":
        first = -(-(2**31) // (D_QK * page)) + 1
        order = [first + p for p in order]
        num_slots += first * page
    slots = []
    for n, count in zip(lengths, pages, strict=True):
        mine, order = order[:count], order[count:]
        slots.append([p * page + i for p in mine for i in range(page)][:n])
    return slots, num_slots


def make_inputs(case: Case, device="cpu", *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """The arguments of a call on `device`; q (and a kv cache of the case's "bf16") take `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    b, s_q, h_q = case.b, case.s_q, case.h_q
    slots, num_slots = make_slots(case, generator)
    owned = torch.tensor(sorted({s for request in slots for s in request}), dtype=torch.int64)

    rows = torch.randn(len(owned), D_QK, generator=generator)
    q = torch.randn(b, s_q, h_q, D_QK, generator=generator)
    if case.scores == "zero":
        q.zero_()
    elif case.scores == "low":  # every logit is near -1e5. Small integers: their dot products are exact in fp32
        q, rows = (torch.randint(-2, 3, x.shape, generator=generator).float() for x in (q, rows))
        q[..., -1], rows[:, -1] = -5376.0, FP8_MAX
    elif case.scores == "tiny":  # values below what fp16 can hold
        rows *= 1e-8
    elif case.scores == "growing":
        rank = {s: i for request in slots for i, s in enumerate(request)}
        rows[:, -1] = torch.tensor([1.0 + 0.25 * rank[int(s)] for s in owned]).clamp(max=FP8_MAX)
        q[..., -1] = 8.0
    kv_dtype = dtype if case.kv == "bf16" else KV_DTYPES[case.kv]
    kv_cache = poisoned((num_slots, D_QK), kv_dtype, device)
    write_rows(kv_cache, owned.to(device), rows.to(kv_dtype).to(device))

    visible = torch.stack([make_tree(s_q, case.tree, generator) for _ in range(b)])
    if case.layout == MaskLayout.CAUSAL:
        visible = torch.ones(b, s_q, s_q, dtype=torch.bool).tril()
    prefixes = [max(p, 0) for p in case.prefixes]
    tree_mask, mask_indptr = encode_mask(visible, prefixes, case.layout)
    lists = [request[:p] if case.draft_slots else request for request, p in zip(slots, prefixes, strict=True)]
    indptr = torch.tensor([0] + [len(x) for x in lists]).cumsum(0)
    arguments = dict(
        q=lay_out(q.to(dtype).to(device), case.q_layout),
        kv_cache=kv_cache,
        kv_indptr=indptr.to(case.indptr_dtype).to(device),
        kv_indices=torch.tensor([s for x in lists for s in x], dtype=case.index_dtype, device=device),
        sm_scale=SM_SCALE,
        mask_layout=case.layout,
        logit_cap=case.logit_cap,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
        page_size=case.page_size,
    )
    if case.draft_slots:
        draft = [request[p:] for request, p in zip(slots, prefixes, strict=True)]
        arguments["draft_slots"] = torch.tensor(draft, dtype=case.index_dtype, device=device)
    if tree_mask is not None:
        arguments["tree_mask"] = tree_mask.to(device)
    if mask_indptr is not None:
        arguments["mask_indptr"] = mask_indptr.to(device)
    return Inputs(case, arguments, visible, slots)


def poisoned(shape, dtype: torch.dtype, device) -> torch.Tensor:
    """All NaN; 0x7f bytes are the NaN of float8_e4m3fn."""
    if dtype == torch.float8_e4m3fn:
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(dtype)
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def write_rows(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    if cache.element_size() == 1:
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    cache[slots] = rows


def lay_out(q: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values under other strides; what lies between the rows is NaN."""
    b, s_q, h_q, d = q.shape
    if layout == "packed":
        return q
    if layout == "strided":  # heads outside rows, and a gap after each
        storage = poisoned((b, h_q, s_q, d + 64), q.dtype, q.device)
        view = storage[..., :d].transpose(1, 2)
    else:
        row = 2**20
        storage = torch.empty(b * s_q * row, dtype=q.dtype, device=q.device)
        view = storage.as_strided((b, s_q, h_q, d), (s_q * row, row, d, 1))
    view.copy_(q)
    return view


def _sweep() -> list[Case]:
    edge = (0, 1, 31, 32, 33, 63, 64, 65)
    cases = [
        # Lengths around tile edges, empty and short lists.
        Case("edges", edge),
        Case("edges-int32", edge, index_dtype=torch.int32),
        Case("edges-s_q-1", edge, s_q=1, layout=MaskLayout.CAUSAL),
        Case("edges-s_q-33", edge, s_q=33, h_q=2),
        Case("empty-and-short", (-9, 5, -8, -3, 0), layout=MaskLayout.CAUSAL),
        Case("empty-and-short-random", (-9, 5, -8, -3, 0), tree="random"),
        Case("decode-empty", (-1, 0, 7), s_q=1, layout=MaskLayout.CAUSAL),
        Case("prefix-0-random", (0, 0), tree="random"),
        Case("ragged", (700, 1, 64, 0), s_q=5, h_q=4),
        # Every layout, with a tree and with any bits.
        *[
            Case(f"{layout.name.lower()}-{tree}", (37, 5, 0), layout=layout, tree=tree)
            for layout in (MaskLayout.QLEN, MaskLayout.BITS, MaskLayout.FULL)
            for tree in ("tree", "random", "all")
        ],
        *[
            Case(f"bits-s_q-{n}", (3, 40), s_q=n, h_q=1, layout=MaskLayout.BITS, tree="random")
            for n in (1, 2, 63, 64, 65, 128)
        ],
        # Index and list forms.
        *[
            Case(f"index-{str(i)[6:]}-indptr-{str(p)[6:]}-{'split' if d else 'combined'}", (18, 0, 33), h_q=2,
                 index_dtype=i, indptr_dtype=p, draft_slots=d)
            for i in (torch.int32, torch.int64)
            for p in (torch.int32, torch.int64)
            for d in (False, True)
        ],
        Case("split-full-mask", (18, 0, 33), draft_slots=True, layout=MaskLayout.FULL),
        # Heads and rows.
        *[Case(f"h_q-{h}", (50, 3), s_q=3, h_q=h) for h in (1, 4, 6, 8, 12, 16, 64, 128)],
        *[Case(f"s_q-{s}", (45,), s_q=s, h_q=2) for s in (1, 2, 8, 15, 16, 17, 32, 33, 65, 128)],
        # Pages.
        *[
            Case(f"page-{page}-{kv}", (130, 16, 0, 63), s_q=4, h_q=4, page_size=page, kv=kv)
            for page in (1, 2, 16, 32, 64)
            for kv in ("bf16", "fp8")
        ],
        # Number formats and scales.
        Case("fp8", (37, 5, 0), kv="fp8"),
        Case("fp8-scales", (37, 5), kv="fp8", k_scale=0.5, v_scale=2.0, layout=MaskLayout.BITS),
        Case("logit-cap", (37, 5), logit_cap=0.7),
        Case("growing", (300, 5), scores="growing"),
        Case("low-logits", (70, 0), scores="low"),
        Case("low-logits-fp8", (70, 0), scores="low", kv="fp8"),
        Case("tiny-values", (300, 5), scores="tiny"),
        Case("zero-scores", (33, 0), scores="zero", tree="random"),
        Case("strided-q", (37, 5), q_layout="strided"),
    ]  # fmt: skip
    for kv in ("bf16", "fp8"):
        cases += [
            Case(f"long-{kv}", (5001, 4096), kv=kv),
            Case(f"wide-rows-{kv}", (2100,), s_q=33, h_q=16, kv=kv),
            Case(f"many-heads-{kv}", (1500, 77), h_q=128, kv=kv),
            Case(f"ragged-long-{kv}", (16384, 1000, 1, 0, 513, 2048, 31, 900), kv=kv),
        ]
    cases += [
        Case("batch-256", tuple((i * 37) % 200 for i in range(256)), s_q=2, h_q=4),
        Case("high-slots", (700, 64), slots="high", big=True),
        Case("high-slots-int32", (700, 64), slots="high", index_dtype=torch.int32, big=True),
        Case("high-slots-fp8-page-64", (700, 64), slots="high", kv="fp8", page_size=64, big=True),
        Case("wide-q", (40,) * 256, s_q=9, h_q=2, q_layout="wide", big=True),
    ]
    names = [case.name for case in cases]
    assert len(names) == len(set(names)), "case names must be unique"
    return cases


CASES = _sweep()
NAIVE_CASES = [case for case in CASES if case.pairs <= 30_000 and not case.big]
CPU_CASES = [case for case in CASES if case.pairs <= 3_000_000 and not case.big]


def ids(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]
