# SPDX-License-Identifier: Apache-2.0
"""The commit of a move: rows and tree name the new slots."""

from __future__ import annotations

from typing import NamedTuple, Sequence

import torch


class Piece(NamedTuple):
    """Units [lo, hi) of a row and where they go."""

    req: object
    lo: int
    hi: int
    targets: torch.Tensor  # int64 [hi - lo], units.
    tree_owned: bool
    values: list[torch.Tensor]  # Of the tree's nodes that hold these slots.


class SlotRewriter:
    """Rewrites ``req_to_token`` and the values of tree nodes. It only writes to tensors
    that exist before it starts, so that a failure elsewhere leaves them alone."""

    def __init__(self, req_to_token: torch.Tensor, *, num_slots: int, page_size: int):
        self.req_to_token = req_to_token
        self.page = page_size
        device = req_to_token.device
        # Slot -> where it is now; the identity except inside __call__.
        self.remap = torch.arange(num_slots, dtype=torch.int64, device=device)
        self._offsets = torch.arange(page_size, dtype=torch.int64, device=device)

    def sources_of(self, piece: Piece) -> torch.Tensor:
        """int64 [(hi - lo) * page]: the slots that the row names now."""
        row = self.req_to_token[piece.req.kv.req_pool_idx]
        return row[piece.lo * self.page : piece.hi * self.page].to(torch.int64)

    def targets_of(self, piece: Piece) -> torch.Tensor:
        """int64 [(hi - lo) * page]: the slots of the target units."""
        if self.page == 1:
            return piece.targets
        return (piece.targets[:, None] * self.page + self._offsets).reshape(-1)

    def __call__(
        self, pieces: Sequence[Piece], src: torch.Tensor, tgt: torch.Tensor
    ) -> None:
        """``src`` and ``tgt`` are those of all ``pieces``, one after the other."""
        table, at = self.req_to_token, 0
        shared = any(piece.tree_owned for piece in pieces)
        if shared:
            self.remap[src] = tgt
        for piece in pieces:
            columns = slice(piece.lo * self.page, piece.hi * self.page)
            size = columns.stop - columns.start
            if piece.tree_owned:
                for value in piece.values:
                    value.copy_(self.remap[value])
                # Whoever shares the prefix has its slots at the same positions.
                slots = table[:, columns]
                slots.copy_(self.remap[slots.to(torch.int64)])
            else:
                row = table[piece.req.kv.req_pool_idx]
                row[columns] = tgt[at : at + size].to(table.dtype)
            at += size
        if shared:
            self.remap[src] = src
