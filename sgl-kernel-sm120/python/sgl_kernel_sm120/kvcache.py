# SPDX-License-Identifier: Apache-2.0
"""Moving KV rows in all layers at once, for the compaction of an accepted path and for defragmentation."""

import torch

from . import _library
from ._check import check_contiguous, check_device, check_dtype, check_ndim, check_shape, describe, fail

_OP = "kv_move_all_layers"


def kv_move_all_layers(kv_buffers, tgt, src):
    """buffer[tgt[i]] = the old buffer[src[i]] for every i at once, in every buffer. In place.

    kv_buffers  list of [slots, ...] tensors; rows of any dtype and size, contiguous inside, row stride free. Buffers of
                different row sizes (target and drafter) may be mixed; they may not overlap each other
    tgt, src    int64 [n], on the device of the buffers, any overlap between them

    All sources are read before any target is written, so chains and cycles are safe. A pair with a negative index is
    padding and moves nothing. Two pairs with one target must have one source.
    """
    if kv_buffers:
        _library.require_kernel(_OP, kv_buffers[0])
        _kv_move_all_layers(kv_buffers, tgt, src)


def _move(kv_buffers, tgt, src):
    _check(kv_buffers, tgt, src)
    real = (tgt >= 0) & (src >= 0)
    tgt, src = tgt[real], src[real]
    for buffer in kv_buffers:
        _bytes(buffer)[tgt] = _bytes(buffer)[src]  # the right side is a copy


def _bytes(buffer):
    """Rows as bytes where the dtype is a byte wide: torch cannot index-assign every float8."""
    return buffer.view(torch.uint8) if buffer.element_size() == 1 else buffer


def _check(kv_buffers, tgt, src):
    check_ndim(_OP, "tgt", tgt, 1, "[n]")
    check_device(_OP, tgt.device, src=src)
    check_dtype(_OP, "tgt", tgt, (torch.int64,))
    check_dtype(_OP, "src", src, (torch.int64,))
    check_shape(_OP, "src", src, tuple(tgt.shape), "[n]")
    check_contiguous(_OP, tgt=tgt, src=src)
    for i, buffer in enumerate(kv_buffers):
        name = f"kv_buffers[{i}]"
        if buffer.dim() < 2:
            fail(_OP, name, "at least 2 dimensions [slots, ...]", describe(buffer))
        check_device(_OP, tgt.device, **{name: buffer})
        if buffer.shape[0] and not buffer[0].is_contiguous():
            fail(_OP, name, "rows that are contiguous inside", f"strides {list(buffer.stride())}")


_kv_move_all_layers = _library.register(_OP, "Tensor(a!)[] kv_buffers, Tensor tgt, Tensor src", cpu=_move, fake=_check)
