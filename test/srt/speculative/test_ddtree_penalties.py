# SPDX-License-Identifier: Apache-2.0
"""Penalizers that are told several tokens of a request at once hold what they would if told one at a time."""

import random
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
from sglang.srt.speculative.ddtree_penalties import DDTreeDraftInput, cumulate, forget_told, tell_penalizers
from sglang.srt.speculative.ddtree_worker import DDTreeWorker
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2

VOCAB = 12
KINDS = {
    BatchedFrequencyPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
    BatchedMinNewTokensPenalizer,
}


class Request:
    def __init__(self, **parameters):
        defaults = dict(
            frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, min_new_tokens=0, stop_token_ids={3}
        )
        self.sampling_params = SimpleNamespace(**defaults | parameters)
        self.eos_token_ids, self.output_ids = {5}, []
        self.origin_input_ids = [1, 2]
        self.tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=5)


class Batch:
    device = "cpu"

    def __init__(self, reqs):
        self.reqs = reqs
        self.sampling_info = SimpleNamespace(penalizer_orchestrator=BatchedPenalizerOrchestrator(VOCAB, self, KINDS))


def penalised(batch):
    logits = torch.linspace(-2, 2, VOCAB).repeat(len(batch.reqs), 1)
    batch.sampling_info.penalizer_orchestrator.apply(logits)
    return logits


def one_at_a_time(request):
    """What plain decoding has told a request's penalizers, alone in its batch."""
    batch = Batch([request])
    for token in request.output_ids:
        batch.sampling_info.penalizer_orchestrator.cumulate_output_tokens(torch.tensor([token]))
    return penalised(batch)[0]


PARAMETERS = [
    dict(frequency_penalty=0.5),
    dict(presence_penalty=1.5, min_new_tokens=4),
    dict(repetition_penalty=1.3),
    dict(),
    dict(frequency_penalty=-0.25, presence_penalty=0.75, repetition_penalty=0.8, min_new_tokens=2),
]


def test_several_tokens_of_each_request():
    rng = random.Random(0)
    requests = [Request(**parameters) for parameters in PARAMETERS]
    batch = Batch(requests)
    for _ in range(6):
        for request in requests:
            request.output_ids += [rng.randrange(VOCAB) for _ in range(rng.randrange(4))]
        tell_penalizers(batch)
        tell_penalizers(batch)  # nothing new: nothing happens
        expected = torch.stack([one_at_a_time(request) for request in requests])
        torch.testing.assert_close(penalised(batch), expected)


def test_after_a_prefill_a_request_is_told_from_its_beginning():
    """A retracted request comes back with a fresh row and with what it had answered."""
    request = Request(frequency_penalty=0.5)
    request.output_ids = [4, 4, 7]
    tell_penalizers(Batch([request]))
    again = Batch([request])
    forget_told([request])
    request.output_ids.append(4)
    tell_penalizers(again)
    torch.testing.assert_close(penalised(again)[0], one_at_a_time(request))


def test_a_request_that_decodes_in_a_mixed_step_is_not_told_again(monkeypatch):
    """It keeps its row, behind those whose prefill gives them a fresh one."""
    monkeypatch.setattr(DFlashWorkerV2, "forward_batch_generation", lambda self, *batch: None)
    worker = object.__new__(DDTreeWorker)
    worker.report = SimpleNamespace(start=lambda reqs: None)
    new, running = Request(frequency_penalty=0.5), Request(frequency_penalty=0.5)
    batch = Batch([new, running])
    running.output_ids = [4, 4, 7]
    tell_penalizers(batch)
    step = dict(forward_mode=ForwardMode.MIXED, is_extend_in_batch=True, reqs=[new, running], decoding_reqs=[running])
    worker.forward_batch_generation(SimpleNamespace(**step))
    new.output_ids, running.output_ids = [6], [4, 4, 7, 4]
    tell_penalizers(batch)
    torch.testing.assert_close(penalised(batch)[0], one_at_a_time(new))
    torch.testing.assert_close(penalised(batch)[1], one_at_a_time(running))


def test_without_penalties_nothing_is_done():
    request = Request()
    request.output_ids = [4]
    batch = Batch([request])
    tell_penalizers(batch)
    assert torch.equal(penalised(batch)[0], torch.linspace(-2, 2, VOCAB))
    tell_penalizers(SimpleNamespace(sampling_info=SimpleNamespace(penalizer_orchestrator=None)))


def test_an_unknown_penalizer_is_not_passed_over():
    with pytest.raises(NotImplementedError, match="SimpleNamespace several tokens"):
        cumulate(SimpleNamespace(), *[torch.zeros(1, dtype=torch.int64)] * 3)


def test_the_carried_state_tells_before_it_prepares(monkeypatch):
    order = []
    monkeypatch.setattr(DFlashDraftInputV2, "prepare_for_decode", lambda self, batch: order.append("prepared"))
    monkeypatch.setattr("sglang.srt.speculative.ddtree_penalties.tell_penalizers", lambda batch: order.append("told"))
    plain = make_draft_input_v2(bonus_tokens=torch.tensor([3]), new_seq_lens=torch.tensor([9]))
    plain.nxt_kv_lens_sum = 7
    carried = DDTreeDraftInput.of(plain)
    assert isinstance(carried, DFlashDraftInputV2) and carried.spec_input_type == plain.spec_input_type
    assert carried.bonus_tokens is plain.bonus_tokens and carried.nxt_kv_lens_sum == 7
    carried.prepare_for_decode(None)
    assert order == ["told", "prepared"]
