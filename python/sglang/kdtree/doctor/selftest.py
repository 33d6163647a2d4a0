# SPDX-License-Identifier: Apache-2.0
"""Small computations with known answers: the tree ops, the verify op, and SGLang's prefix-cache core."""

from __future__ import annotations

from collections.abc import Iterable

from sglang.kdtree.doctor.check import Finding, fail, good, warn

REINSTALL = "Reinstall sgl-kernel-sm120 and report this."


def tree_core() -> Iterable[Finding]:
    """Build a tree whose best-first order is known, and walk it.

    Two positions with two candidates each, log-probabilities -1, -2 and -1, -3: the four best
    paths are a (-1), b (-2), ac (-2), bc (-3); the shorter path wins the tie. Breadth first the
    nodes are root, a, b, ac, and the fifth is bc.
    """
    import sgl_kernel_sm120 as kernels
    import torch

    ids = torch.tensor([[[11, 12], [21, 22]]])
    log_probs = torch.tensor([[[-1.0, -2.0], [-1.0, -3.0]]])
    tree = kernels.ddtree_build(torch.tensor([7]), ids, log_probs, 5)
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    if tokens != [7, 11, 12, 21, 21] or parents != [-1, 0, 0, 1, 2]:
        return _broken(f"tree of tokens {tokens}, parents {parents}")
    target = torch.tensor([[12, 0, 21, 0, 99]])
    walk = kernels.tree_accept(tree.tokens, tree.parents, target, 3)
    path, bonus = walk.path[0].tolist(), int(walk.bonus[0])
    if path != [0, 2, 4] or bonus != 99:
        return _broken(f"path {path}, bonus {bonus}")
    return good("tree core", "best-first tree and acceptance walk as expected")


def _broken(got: str) -> list[Finding]:
    return fail("tree core", f"wrong result: {got}", REINSTALL)


def verify_op() -> Iterable[Finding]:
    """On the CPU and on each GPU. All scores equal: the output is the mean of the values a row may see, which is exact."""
    import torch

    devices = {"CPU": "cpu"}
    devices |= {f"GPU {i}": f"cuda:{i}" for i in range(torch.cuda.device_count())}
    wanted = [(1 + 2) / 2, (1 + 2 + 4) / 3, (1 + 2 + 8) / 3]
    wanted = torch.tensor(wanted).to(torch.bfloat16).tolist()
    for name, device in devices.items():
        means = visible_means(device)
        if means != wanted:
            detail = f"{name}: means {means} instead of {wanted}"
            return fail("verify op", detail, REINSTALL)
    where = ", ".join(devices)
    return good("verify op", f"prefix, drafts and tree mask as expected ({where})")


def visible_means(device: str) -> list[float]:
    """One prefix slot of value 1 and drafts of 2, 4, 8, where row 2 does not see draft 1; -> the output of each row."""
    import sgl_kernel_sm120 as kernels
    import torch

    visible = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.uint8)
    kv = torch.zeros(8, 576, dtype=torch.bfloat16)
    slots = [5, 2, 7, 1]  # one prefix slot, three draft slots
    for position, slot in enumerate(slots):
        kv[slot, :512] = float(2**position)
    out = kernels.mla_tree_verify(
        torch.zeros(1, 3, 2, 576, dtype=torch.bfloat16, device=device),
        kv.to(device),
        torch.tensor([0, 4], device=device),
        torch.tensor(slots, device=device),
        sm_scale=1.0,
        tree_mask=visible[None].to(device),
        mask_layout=kernels.MaskLayout.QLEN,
    )
    return out[0, :, 0, 0].tolist()


def prefix_cache_core() -> Iterable[Finding]:
    """Which implementation of the radix tree this Python and torch get."""
    from sglang.srt.environ import envs

    wanted = envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.get()
    if wanted != "rust":
        return good("prefix cache", f"tree core {wanted}, by environment")
    try:
        from sglang.srt.mem_cache.rust_tree_core import mem_cache
    except ImportError as error:
        remedy = "Correct but slower; upstream's wheel bundles the compiled core for some Python versions only."
        return warn("prefix cache", f"Python tree core: {error}", remedy)
    name = mem_cache.__file__.rsplit("/", 1)[-1]
    return good("prefix cache", f"compiled tree core, {name}")
