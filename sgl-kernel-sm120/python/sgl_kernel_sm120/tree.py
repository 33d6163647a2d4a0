# SPDX-License-Identifier: Apache-2.0
"""Token trees: best-first construction, links, masks, acceptance. Fixed shapes, no host sync.

A tree of N nodes is in breadth-first order, node 0 is the root (the carried bonus token), a parent comes before its
children, siblings are neighbours, best first. Nodes that the drafter could not fill come last and are `unused`.
"""

from typing import NamedTuple

import torch

from . import _library
from ._check import check_contiguous, check_device, check_dtype, check_ndim, check_range, check_shape
from .reference import BITS_PER_WORD, bits_to_bool

MAX_NODES = 128
MAX_TOPK = 64
MAX_DEPTH = 31
MAX_B = 256

ROOT_PARENT = -1
UNUSED_PARENT = -2
NO_NODE = -1
NUM_COUNTS = 6


class DraftTree(NamedTuple):
    """One tree a request, N nodes each. An unused node has the root's token, depth 0, and sees itself alone."""

    tokens: torch.Tensor  # int64 [b, N]
    parents: torch.Tensor  # int32 [b, N]; root -1, unused -2
    depth: torch.Tensor  # int32 [b, N]; root 0
    first_child: torch.Tensor  # int32 [b, N]; -1 = none
    next_sibling: torch.Tensor  # int32 [b, N]; -1 = none
    visible: torch.Tensor  # bool [b, N, N]; row i sees itself and its ancestors
    used: torch.Tensor  # int32 [b]; nodes in use, the root included
    path_log_probs: torch.Tensor  # fp32 [b, M]; of the M most probable paths, best first; root 0, none -inf


class Acceptance(NamedTuple):
    path: torch.Tensor  # int64 [b, max_len]; accepted nodes from the root, then each column's own number
    accept_len: torch.Tensor  # int32 [b]; accepted nodes, the root included = tokens committed, the bonus included
    out_tokens: torch.Tensor  # int64 [b, max_len]; tokens committed: accepted children, then the bonus, then 0
    bonus: torch.Tensor  # int64 [b]; the target's token after the last accepted node


def ddtree_build(root, ids, log_probs, num_nodes, *, min_log_prob=float("-inf"), num_paths=None) -> DraftTree:
    """The num_nodes - 1 most probable paths below the root, with all their ancestors.

    root int64 [b]; ids int64 and log_probs fp32 [b, D, K]: the K best tokens of each of D positions, best first. The
    weight of a path is the fp32 sum of its log-probabilities, added from the root down. Of equal weights the shorter
    path wins, then the lexicographically smaller rank path. A token of log-probability -inf or NaN never becomes a
    node, nor does a path below min_log_prob; the root always is one. A log-probability above 0, or above that of a
    better rank, counts as 0 or as that one: so a parent is never less probable than its child.

    path_log_probs has num_paths columns (num_nodes by default, and at least): the weights of the root and the most
    probable paths, whether they became nodes or not. They tell what a larger tree would bring.
    """
    _library.require_kernel("ddtree_build", root)
    check_ndim("ddtree_build", "root", root, 1, "[b]")
    check_range("ddtree_build", "num_nodes", num_nodes, 1, MAX_NODES)
    num_paths = num_nodes if num_paths is None else num_paths
    check_range("ddtree_build", "num_paths", num_paths, num_nodes, MAX_NODES)
    b, n = root.shape[0], num_nodes
    tree = DraftTree(
        tokens=root.new_empty(b, n),
        parents=root.new_empty(b, n, dtype=torch.int32),
        depth=root.new_empty(b, n, dtype=torch.int32),
        first_child=root.new_empty(b, n, dtype=torch.int32),
        next_sibling=root.new_empty(b, n, dtype=torch.int32),
        visible=root.new_empty(b, n, n, dtype=torch.bool),
        used=root.new_empty(b, dtype=torch.int32),
        path_log_probs=root.new_empty(b, num_paths, dtype=torch.float32),
    )
    _ddtree_build(root.contiguous(), ids.contiguous(), log_probs.contiguous(), *tree, min_log_prob)
    return tree


def tree_accept(tokens, parents, target_tokens, max_len) -> Acceptance:
    """Walk from the root while the target's token after the current node is one of its children; at most max_len nodes.

    tokens int64, parents int32, target_tokens int64 [b, N]; target_tokens[r, i] is what the target puts after node i
    (its argmax, or a sample). Of children with equal tokens the first is taken.
    """
    _library.require_kernel("tree_accept", tokens)
    check_ndim("tree_accept", "tokens", tokens, 2, "[b, N]")
    check_range("tree_accept", "max_len", max_len, 1, MAX_NODES)
    b = tokens.shape[0]
    accepted = Acceptance(
        path=tokens.new_empty(b, max_len),
        accept_len=tokens.new_empty(b, dtype=torch.int32),
        out_tokens=tokens.new_empty(b, max_len),
        bonus=tokens.new_empty(b),
    )
    _tree_accept(tokens.contiguous(), parents.contiguous(), target_tokens.contiguous(), *accepted)
    return accepted


def tree_count(tree, ids, log_probs, accepted, num_nodes, options):
    """What a verify step tells the host of its requests, in one tensor: int32 [b, 6 + O], of O options.

    tree, accepted: what ddtree_build and tree_accept gave for ids int64 and log_probs fp32 [b, D, K], D at least 1.
    num_nodes: rows of a request that were verified. The columns:

        0  nodes in use                             1  num_nodes
        2  tokens committed                         3  that a chain of best candidates would have committed, at least
        4  1 where that chain may go on beyond      5  rank of the token that ended the walk among its candidates, K =
           what was verified                           none of them; -1 = the draft ended
        6  bits of fp32: for each of options int32 [O] the sum of the probabilities of its nodes without the root, by
           log_probs; w > 0 = the w most probable nodes, at most M, w < 0 = a chain of -w nodes
    """
    _library.require_kernel("tree_count", ids)
    check_ndim("tree_count", "options", options, 1, "[O]")
    counts = ids.new_empty(ids.shape[0], NUM_COUNTS + options.shape[0], dtype=torch.int32)
    _tree_count(
        ids.contiguous(), log_probs.contiguous(), tree.path_log_probs, tree.used, accepted.accept_len,
        accepted.out_tokens, options, counts, num_nodes,
    )  # fmt: skip
    return counts


def pack_tree_mask(visible, *, words=None):
    """bool [b, N, N] -> int64 [b, N, ceil(N / 64)], MaskLayout.BITS: bit j % 64 of word j // 64 is visible[..., j]."""
    _library.require_kernel("pack_tree_mask", visible)
    check_ndim("pack_tree_mask", "visible", visible, 3, "[b, N, N]")
    b, n, _ = visible.shape
    if words is None:
        words = visible.new_empty(b, n, (n + BITS_PER_WORD - 1) // BITS_PER_WORD, dtype=torch.int64)
    _pack_tree_mask(visible, words)
    return words


def unpack_tree_mask(words, num_nodes):
    """int64 [b, N, ceil(N / 64)] -> bool [b, N, N]: the inverse of pack_tree_mask. Pure torch, on any device."""
    n = num_nodes
    check_range("unpack_tree_mask", "num_nodes", n, 1, MAX_NODES)
    check_dtype("unpack_tree_mask", "words", words, (torch.int64,))
    layout = (words.shape[0], n, (n + BITS_PER_WORD - 1) // BITS_PER_WORD)
    check_shape("unpack_tree_mask", "words", words, layout, "[b, N, ceil(N / 64)]")
    return bits_to_bool(words, n)


def tree_links(parents):
    """int32 [b, N] -> (first_child, next_sibling), int32 [b, N], -1 = none. Children in order of their node numbers."""
    n = parents.shape[1]
    node = torch.arange(n, dtype=torch.int32, device=parents.device)
    is_child = parents[:, None, :] == node[:, None]  # [b, node, child]
    is_sibling = (parents[:, :, None] == parents[:, None, :]) & (parents >= 0)[:, :, None] & (node > node[:, None])
    first, following = (torch.where(x, node, n).amin(dim=2) for x in (is_child, is_sibling))
    return torch.where(first < n, first, NO_NODE), torch.where(following < n, following, NO_NODE)


def tree_visibility(parents, max_depth):
    """int32 [b, N] -> bool [b, N, N]: row i sees itself and its ancestors, of which it has at most max_depth."""
    n = parents.shape[1]
    node = torch.arange(n, device=parents.device)
    visible = torch.eye(n, dtype=torch.bool, device=parents.device).repeat(parents.shape[0], 1, 1)
    ancestor = parents.long()
    for _ in range(max_depth):
        visible |= ancestor[:, :, None] == node
        above = parents.long().gather(1, ancestor.clamp(min=0))
        ancestor = torch.where(ancestor < 0, NO_NODE, above)
    return visible


def _build(root, ids, log_probs, *outputs_and_limit):
    *outputs, min_log_prob = outputs_and_limit
    tree = DraftTree(*outputs)
    _check_build(root, ids, log_probs, *outputs_and_limit)
    (b, max_depth, _), n = ids.shape, tree.tokens.shape[1]
    tree.tokens.copy_(root[:, None].expand(b, n))
    tree.parents.fill_(UNUSED_PARENT)
    tree.parents[:, 0] = ROOT_PARENT
    tree.depth.zero_()
    tree.used.fill_(1)
    tree.path_log_probs.fill_(float("-inf"))
    tree.path_log_probs[:, 0] = 0.0
    width = tree.path_log_probs.shape[1] - 1
    if width > 0 and max_depth > 0:
        weight, token, parent = _beams(ids, log_probs, width)
        _pick_nodes(weight, token, parent, width, min_log_prob, tree)
    for target, source in zip((tree.first_child, tree.next_sibling), tree_links(tree.parents), strict=True):
        target.copy_(source)
    tree.visible.copy_(tree_visibility(tree.parents, max_depth))


def _beams(ids, log_probs, width):
    """The best `width` paths of every depth: weight, last token, place of the parent, each [b, D * width].

    A place is an index into that flat order; the root has -1.

    A beam is exact: a path among the best `width` of all is among the best `width` of its depth, and so is its parent.
    Within a depth the paths are kept in lexicographic order, so that a stable sort by weight breaks ties as promised.
    """
    b, max_depth, k = ids.shape
    minus_inf = float("-inf")
    is_real = log_probs > minus_inf  # NaN is not
    in_order = torch.where(is_real, log_probs, 0.0).clamp(max=0.0).cummin(dim=-1).values
    log_probs = torch.where(is_real, in_order, minus_inf)
    beam = torch.full((b, width), minus_inf, device=ids.device)
    beam[:, 0] = 0.0
    weights, tokens, parents = [], [], []
    for d in range(max_depth):
        paths = (beam[:, :, None] + log_probs[:, d, None, :]).flatten(1)  # [b, width * K], lexicographic
        best = paths.sort(dim=1, descending=True, stable=True).indices[:, :width]
        best = best.sort(dim=1).values
        beam = paths.gather(1, best)
        above = best // k
        weights.append(beam)
        tokens.append(ids[:, d].gather(1, best % k))
        parents.append(above + (d - 1) * width if d else torch.full_like(above, -1))
    return (torch.cat(x, dim=1) for x in (weights, tokens, parents))


def _pick_nodes(weight, token, parent, width, min_log_prob, tree):
    """The best paths of all depths become nodes 1, 2, ... in depth-major order, which is breadth-first."""
    n, total = tree.tokens.shape[1], weight.shape[1]
    best = weight.sort(dim=1, descending=True, stable=True)
    tree.path_log_probs[:, 1:] = best.values[:, :width]
    if n == 1:
        return
    chosen = best.values[:, : n - 1]
    filled = (chosen > float("-inf")) & (chosen >= min_log_prob)
    place = torch.where(filled, best.indices[:, : n - 1], total).sort(dim=1).values
    filled = place < total
    place = place.clamp(max=total - 1)

    node = torch.arange(1, n, device=weight.device).expand_as(place)
    node_at = torch.zeros_like(parent).scatter_reduce_(1, place, torch.where(filled, node, 0), "amax")
    above = parent.gather(1, place)
    above = torch.where(above < 0, 0, node_at.gather(1, above.clamp(min=0)))
    tree.tokens[:, 1:] = torch.where(filled, token.gather(1, place), tree.tokens[:, :1])
    tree.parents[:, 1:] = torch.where(filled, above, UNUSED_PARENT)
    tree.depth[:, 1:] = torch.where(filled, place // width + 1, 0)
    tree.used.add_(filled.sum(dim=1))


def _accept(tokens, parents, target_tokens, path, accept_len, out_tokens, bonus):
    _check_accept(tokens, parents, target_tokens, path, accept_len, out_tokens, bonus)
    b = tokens.shape[0]
    at = torch.zeros(b, dtype=torch.int64, device=tokens.device)
    walking = torch.ones(b, dtype=torch.bool, device=tokens.device)
    accept_len.zero_()
    for column in range(path.shape[1]):
        wanted = target_tokens.gather(1, at[:, None])
        path[:, column] = torch.where(walking, at, column)
        out_tokens[:, column] = torch.where(walking, wanted[:, 0], 0)
        bonus.copy_(wanted[:, 0])
        accept_len += walking
        match = (parents == at[:, None]) & (tokens == wanted)
        walking = walking & match.any(dim=1)
        at = torch.where(walking, match.int().argmax(dim=1), at)


def _count(ids, log_probs, path_log_probs, used, accept_len, out_tokens, options, counts, num_nodes):
    _check_count(ids, log_probs, path_log_probs, used, accept_len, out_tokens, options, counts, num_nodes)
    depths, k = ids.shape[1:]
    columns = min(depths, out_tokens.shape[1])
    length = accept_len.long()
    is_candidate = ids[:, :columns] == out_tokens[:, :columns, None]
    committed = torch.arange(columns, device=ids.device) < length[:, None]
    # Every committed token is one of the target's, so a chain commits the leading ones that are best candidates.
    spine = (is_candidate[:, :, 0] & committed).long().cumprod(dim=1).sum(dim=1)
    last = (length - 1).clamp(0, columns - 1)[:, None, None]
    at_end = is_candidate.gather(1, last.expand(-1, 1, k))[:, 0]
    rank = torch.where(at_end.any(dim=1), at_end.int().argmax(dim=1), k)
    counts[:, 0] = used
    counts[:, 1] = num_nodes
    counts[:, 2] = accept_len
    counts[:, 3] = spine + 1
    counts[:, 4] = (spine == length) & (spine < depths)
    counts[:, 5] = torch.where(length - 1 < depths, rank, -1)
    none = torch.zeros(ids.shape[0], 1, device=ids.device)
    trees = torch.cat([none, path_log_probs[:, 1:].exp()], dim=1).cumsum(dim=1)
    chain = torch.cat([none, log_probs[:, :, 0].cumsum(dim=1).exp().cumsum(dim=1)], dim=1)
    of_trees = trees[:, (options.long() - 1).clamp(0, trees.shape[1] - 1)]
    of_chain = chain[:, (-options.long() - 1).clamp(0, depths)]
    counts[:, NUM_COUNTS:] = torch.where(options < 0, of_chain, of_trees).view(torch.int32)


def _pack(visible, words):
    _check_pack(visible, words)
    n = visible.shape[2]
    padded = torch.nn.functional.pad(visible != 0, (0, words.shape[2] * BITS_PER_WORD - n))
    bit = torch.arange(BITS_PER_WORD, device=visible.device)
    words.copy_((padded.unflatten(2, (-1, BITS_PER_WORD)).long() << bit).sum(dim=3))


def _check_build(
    root, ids, log_probs, tokens, parents, depth, first_child, next_sibling, visible, used, path_log_probs, min_log_prob
):
    op = "ddtree_build"
    outputs = dict(tokens=tokens, parents=parents, depth=depth, first_child=first_child, next_sibling=next_sibling)
    check_ndim(op, "ids", ids, 3, "[b, D, K]")
    b, max_depth, k = ids.shape
    check_ndim(op, "tokens", tokens, 2, "[b, N]")
    n = tokens.shape[1]
    check_range(op, "ids: b", b, 1, MAX_B)
    check_range(op, "ids: D", max_depth, 0, MAX_DEPTH)
    check_range(op, "ids: K", k, 1, MAX_TOPK)
    check_range(op, "tokens: N", n, 1, MAX_NODES)
    check_ndim(op, "path_log_probs", path_log_probs, 2, "[b, M]")
    m = path_log_probs.shape[1]
    check_range(op, "path_log_probs: M", m, n, MAX_NODES)
    check_device(
        op, root.device, ids=ids, log_probs=log_probs, **outputs, visible=visible, used=used,
        path_log_probs=path_log_probs,
    )  # fmt: skip
    check_dtype(op, "root", root, (torch.int64,))
    check_dtype(op, "ids", ids, (torch.int64,))
    check_dtype(op, "log_probs", log_probs, (torch.float32,), "weights are fp32 sums; cast with .float()")
    check_shape(op, "root", root, (b,), "[b]")
    check_shape(op, "log_probs", log_probs, (b, max_depth, k), "[b, D, K]")
    for name, tensor in outputs.items():
        check_dtype(op, name, tensor, (torch.int64 if name == "tokens" else torch.int32,))
        check_shape(op, name, tensor, (b, n), "[b, N]")
    check_dtype(op, "visible", visible, (torch.bool,))
    check_shape(op, "visible", visible, (b, n, n), "[b, N, N]")
    check_dtype(op, "used", used, (torch.int32,))
    check_shape(op, "used", used, (b,), "[b]")
    check_dtype(op, "path_log_probs", path_log_probs, (torch.float32,))
    check_shape(op, "path_log_probs", path_log_probs, (b, m), "[b, M]")


def _check_accept(tokens, parents, target_tokens, path, accept_len, out_tokens, bonus):
    op = "tree_accept"
    check_ndim(op, "tokens", tokens, 2, "[b, N]")
    check_ndim(op, "path", path, 2, "[b, max_len]")
    b, n = tokens.shape
    check_range(op, "tokens: N", n, 1, MAX_NODES)
    check_device(
        op, tokens.device, parents=parents, target_tokens=target_tokens, path=path, accept_len=accept_len,
        out_tokens=out_tokens, bonus=bonus,
    )  # fmt: skip
    int64 = dict(tokens=tokens, target_tokens=target_tokens, path=path, out_tokens=out_tokens, bonus=bonus)
    for name, tensor in int64.items():
        check_dtype(op, name, tensor, (torch.int64,))
    check_dtype(op, "parents", parents, (torch.int32,))
    check_dtype(op, "accept_len", accept_len, (torch.int32,))
    check_shape(op, "parents", parents, (b, n), "[b, N]")
    check_shape(op, "target_tokens", target_tokens, (b, n), "[b, N]")
    check_shape(op, "path", path, (b, path.shape[1]), "[b, max_len]")
    check_shape(op, "out_tokens", out_tokens, (b, path.shape[1]), "[b, max_len]")
    check_shape(op, "accept_len", accept_len, (b,), "[b]")
    check_shape(op, "bonus", bonus, (b,), "[b]")


def _check_count(ids, log_probs, path_log_probs, used, accept_len, out_tokens, options, counts, num_nodes):
    op = "tree_count"
    check_ndim(op, "ids", ids, 3, "[b, D, K]")
    check_ndim(op, "path_log_probs", path_log_probs, 2, "[b, M]")
    check_ndim(op, "out_tokens", out_tokens, 2, "[b, max_len]")
    b, depths, k = ids.shape
    check_range(op, "ids: D", depths, 1, MAX_DEPTH)
    check_range(op, "ids: K", k, 1, MAX_TOPK)
    check_range(op, "path_log_probs: M", path_log_probs.shape[1], 1, MAX_NODES)
    check_range(op, "num_nodes", num_nodes, 1, MAX_NODES)
    check_device(
        op, ids.device, log_probs=log_probs, path_log_probs=path_log_probs, used=used, accept_len=accept_len,
        out_tokens=out_tokens, options=options, counts=counts,
    )  # fmt: skip
    for dtype, tensors in (
        (torch.int64, dict(ids=ids, out_tokens=out_tokens)),
        (torch.float32, dict(log_probs=log_probs, path_log_probs=path_log_probs)),
        (torch.int32, dict(used=used, accept_len=accept_len, options=options, counts=counts)),
    ):
        for name, tensor in tensors.items():
            check_dtype(op, name, tensor, (dtype,))
    check_shape(op, "log_probs", log_probs, (b, depths, k), "[b, D, K]")
    check_shape(op, "path_log_probs", path_log_probs, (b, path_log_probs.shape[1]), "[b, M]")
    check_shape(op, "used", used, (b,), "[b]")
    check_shape(op, "accept_len", accept_len, (b,), "[b]")
    check_shape(op, "out_tokens", out_tokens, (b, out_tokens.shape[1]), "[b, max_len]")
    check_shape(op, "counts", counts, (b, NUM_COUNTS + options.shape[0]), "[b, 6 + O]")


def _check_pack(visible, words):
    op = "pack_tree_mask"
    check_ndim(op, "visible", visible, 3, "[b, N, N]")
    b, n, _ = visible.shape
    check_range(op, "visible: N", n, 1, MAX_NODES)
    check_device(op, visible.device, words=words)
    check_dtype(op, "visible", visible, (torch.bool, torch.uint8))
    check_dtype(op, "words", words, (torch.int64,))
    check_shape(op, "visible", visible, (b, n, n), "[b, N, N]")
    check_shape(op, "words", words, (b, n, (n + BITS_PER_WORD - 1) // BITS_PER_WORD), "[b, N, ceil(N / 64)]")
    check_contiguous(op, visible=visible, words=words)


_ddtree_build = _library.register(
    "ddtree_build",
    "Tensor root, Tensor ids, Tensor log_probs, Tensor(a!) tokens, Tensor(b!) parents, Tensor(c!) depth, "
    "Tensor(d!) first_child, Tensor(e!) next_sibling, Tensor(f!) visible, Tensor(g!) used, "
    "Tensor(h!) path_log_probs, float min_log_prob",
    cpu=_build,
    fake=_check_build,
)
_tree_accept = _library.register(
    "tree_accept",
    "Tensor tokens, Tensor parents, Tensor target_tokens, Tensor(a!) path, Tensor(b!) accept_len, "
    "Tensor(c!) out_tokens, Tensor(d!) bonus",
    cpu=_accept,
    fake=_check_accept,
)
_tree_count = _library.register(
    "tree_count",
    "Tensor ids, Tensor log_probs, Tensor path_log_probs, Tensor used, Tensor accept_len, Tensor out_tokens, "
    "Tensor options, Tensor(a!) counts, int num_nodes",
    cpu=_count,
    fake=_check_count,
)
_pack_tree_mask = _library.register("pack_tree_mask", "Tensor visible, Tensor(a!) words", cpu=_pack, fake=_check_pack)
