# SPDX-License-Identifier: Apache-2.0
"""One test for each edit of an upstream module: what fails without it."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from sglang.srt.mem_cache import allocation, allocation_sizing, torch_slots


def test_input_embeds_take_the_model_dtype():
    from sglang.srt.model_executor.model_runner import ModelRunner

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        runner = SimpleNamespace(dtype=dtype, _pp_kwargs=lambda _: {}, is_generation=True)
        batch = SimpleNamespace(input_embeds=torch.ones(2, 3), replace_embeds=None, replace_positions=None)
        assert ModelRunner._extend_forward_kwargs(runner, batch, None)["input_embeds"].dtype == dtype


def test_deterministic_inference_starts_on_cpu(monkeypatch):
    from sglang.srt.model_executor import model_runner

    flags = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=True))
    monkeypatch.setattr(model_runner, "get_exec", lambda: flags)
    model_runner.ModelRunner.maybe_enable_batch_invariant_mode(SimpleNamespace())
    assert torch.mm(torch.eye(2), torch.eye(2)).tolist() == [[1, 0], [0, 1]]


@pytest.fixture
def no_triton(monkeypatch):
    """A backend that is not named torch_native, on a platform without Triton."""
    for module in (allocation, torch_slots):
        monkeypatch.setattr(module, "attention_backends", lambda: ("kdtree_sm120", "kdtree_sm120"))


def test_slot_ranges_are_written_without_triton(no_triton):
    table = torch.zeros(3, 8, dtype=torch.int32)
    allocation.assign_req_to_token_pool_func(
        torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([3, 1]), torch.tensor([7, 8, 9]), 2
    )
    assert table.tolist() == [[9, 0, 0, 0, 0, 0, 0, 0], [0] * 8, [0, 7, 8, 0, 0, 0, 0, 0]]


def test_last_slot_is_found_without_triton(no_triton):
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    last = allocation.get_last_loc(table, torch.tensor([1, 2]), torch.tensor([3, 0]))
    assert last.tolist() == [6, -1]


@pytest.mark.parametrize("algorithm", ["DFLASH", "DDTREE"])
@pytest.mark.parametrize("num_tokens", [8, 40])
def test_row_holds_the_reservation(monkeypatch, algorithm, num_tokens):
    """A request at the context limit has 2N slots reserved behind its committed tokens, in the same row."""
    spec = SimpleNamespace(speculative_algorithm=algorithm, speculative_num_steps=1, speculative_eagle_topk=1)
    monkeypatch.setattr(allocation_sizing, "get_spec", lambda: spec)
    monkeypatch.setattr(allocation_sizing, "get_alloc_page_size", lambda: 1)
    monkeypatch.setattr(allocation_sizing, "max_speculative_num_draft_tokens", lambda: num_tokens)
    assert allocation_sizing.get_req_to_token_extra_context_len() >= 2 * num_tokens


@pytest.mark.parametrize(("algorithm", "masked"), [("DDTREE", True), ("DFLASH", False)])
def test_a_tree_is_captured_with_its_mask(monkeypatch, algorithm, masked):
    from sglang.srt import runtime_context
    from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy

    class TritonAttnBackend:  # the policy goes by this name
        pass

    monkeypatch.setattr(runtime_context, "get_spec", lambda: SimpleNamespace(speculative_algorithm=algorithm))
    assert resolve_dflash_verify_mask_policy(TritonAttnBackend()) == ("TritonAttnBackend", masked)


class DraftBegins(Exception):
    pass


@pytest.mark.parametrize("on_cpu", [True, False])
def test_record_stream_is_not_called_on_cpu_tensors(on_cpu):
    """A decode step of stock DFLASH, up to its draft: torch refuses record_stream on a CPU tensor. On a device the
    call is still made."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    class Worker:
        device = "cpu"

        def _validate_phase1_sampling_support(self, batch):
            pass

        @property
        def target_worker(self):
            raise DraftBegins

    recorded = []
    on_device = MagicMock(spec=torch.Tensor, is_cpu=False, record_stream=recorded.append)
    on_device.__len__.return_value = 1
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, is_extend_in_batch=False, spec_info=object.__new__(DFlashDraftInputV2),
        seq_lens=torch.tensor([5]) if on_cpu else on_device,
    )  # fmt: skip
    with pytest.raises(DraftBegins):
        DFlashWorkerV2.forward_batch_generation(Worker(), batch)
    assert len(recorded) == (not on_cpu)


def test_custom_ops_run_on_cpu():
    from sglang.srt.utils.common import direct_register_custom_op

    def kdtree_test_double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    library = torch.library.Library("kdtree_test", "FRAGMENT")
    direct_register_custom_op("kdtree_test_double", kdtree_test_double, [], target_lib=library)
    assert torch.ops.kdtree_test.kdtree_test_double(torch.ones(2)).tolist() == [2, 2]
