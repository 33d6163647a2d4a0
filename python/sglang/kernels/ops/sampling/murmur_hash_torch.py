# SPDX-License-Identifier: Apache-2.0
"""The sampler's 32-bit Murmur3 hash in torch, bit for bit that of the Triton kernel."""

import torch

_MASK = 0xFFFFFFFF


def murmur_hash32_torch(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """seed [n] (64 bit), positions [n], col_indices [m] -> uint32 [n, m].

    One 16-byte key a cell: seed (low word, high word), position, column.
    """
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.long()
    words = (
        seed[:, None] & _MASK,
        (seed[:, None] >> 32) & _MASK,
        positions.long()[:, None] & _MASK,
        col_indices.long()[None, :] & _MASK,
    )
    state = torch.zeros((), dtype=torch.int64, device=seed.device)
    for word in words:
        state = _mix(state, word)
    state = state ^ 16  # the key's length in bytes
    state = _multiply(state ^ (state >> 16), 0x85EBCA6B)
    state = _multiply(state ^ (state >> 13), 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)


def _mix(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = _multiply(_rotate(_multiply(word, 0xCC9E2D51), 15), 0x1B873593)
    return (_rotate(state ^ word, 13) * 5 + 0xE6546B64) & _MASK


def _multiply(word: torch.Tensor, factor: int) -> torch.Tensor:
    # The low 64 bits of the product are exact whatever its sign.
    return (word * factor) & _MASK


def _rotate(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _MASK
