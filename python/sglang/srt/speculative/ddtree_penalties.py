# SPDX-License-Identifier: Apache-2.0
"""Penalties on what a request has answered.

The penalizers are told one token of each request before a decode step, and in
speculative decoding none: penalties then have no effect, and min_new_tokens never ends.
Here each request's newly committed tokens are told before the next step is prepared,
however many they are. Under overlap scheduling that leaves out the step in flight.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, List

import torch

from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.utils.common import is_pin_memory_available

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

# Output tokens of a request that its row of the penalizers has been told.
_told: weakref.WeakKeyDictionary[Req, int] = weakref.WeakKeyDictionary()


class DDTreeDraftInput(DFlashDraftInputV2):
    """The carried state; the scheduler calls ``prepare_for_decode`` before each step."""

    @classmethod
    def of(cls, carried: DFlashDraftInputV2) -> DDTreeDraftInput:
        fields = [field.name for field in dataclasses.fields(carried) if field.init]
        return cls(**{name: getattr(carried, name) for name in fields})

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        tell_penalizers(batch)
        super().prepare_for_decode(batch)


def forget_told(reqs: List[Req]) -> None:
    """A prefill gives a request a fresh row, also after it was retracted."""
    for req in reqs:
        _told.pop(req, None)


def tell_penalizers(batch: ScheduleBatch) -> None:
    orchestrator = batch.sampling_info.penalizer_orchestrator
    if orchestrator is None or not orchestrator.is_required:
        return
    rows, tokens, counts = [], [], []
    for row, req in enumerate(batch.reqs):
        new = req.output_ids[_told.get(req, 0) :]
        _told[req] = len(req.output_ids)
        rows += [row] * len(new)
        tokens += new
        counts.append(len(new))
    if not tokens:
        return
    device = orchestrator.device
    pin_memory = is_pin_memory_available(device)

    def on_device(values: List[int]) -> torch.Tensor:
        host = torch.tensor(values, dtype=torch.int64, pin_memory=pin_memory)
        return host.to(device, non_blocking=True)

    for penalizer in orchestrator.penalizers.values():
        if penalizer.is_prepared():
            cumulate(penalizer, on_device(rows), on_device(tokens), on_device(counts))


def cumulate(
    penalizer, rows: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor
) -> None:
    """rows and tokens int64 [n]: an output token each; counts int64 [b]: by row."""
    at = (rows, tokens)
    if isinstance(penalizer, BatchedFrequencyPenalizer):
        penalizer.cumulated_frequency_penalties.index_put_(
            at, penalizer.frequency_penalties[rows, 0], accumulate=True
        )
    elif isinstance(penalizer, BatchedPresencePenalizer):
        penalizer.cumulated_presence_penalties.index_put_(
            at, penalizer.presence_penalties[rows, 0]
        )
    elif isinstance(penalizer, BatchedRepetitionPenalizer):
        penalizer.cumulated_repetition_penalties.index_put_(
            at, penalizer.repetition_penalties[rows, 0]
        )
    elif isinstance(penalizer, BatchedMinNewTokensPenalizer):
        penalizer.len_output_tokens += counts[:, None].int()
    else:
        raise NotImplementedError(
            f"DDTREE does not know how to tell a {type(penalizer).__name__} several "
            "tokens of a request."
        )
