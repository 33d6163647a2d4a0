# SPDX-License-Identifier: Apache-2.0
"""sgl_kernel_sm120 behind the stock Triton backend: scratch, lists and plan of a step,
eager and captured. What a target and an EAGLE-type drafter have in common.

One step, for all layers:
    stock metadata    as in the base class; what goes to Triton and validate read it
    combined list     every slot that a request reads, those of the step's own tokens
                      last, copied from req_to_token once, so a scheduler may rewrite
                      req_to_token after it
    plan              how the lists are split over the SMs, inside the graph
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Optional

import msgspec
import torch
from sgl_kernel_sm120 import (
    build_info,
    mla_tree_verify_plan,
    mla_tree_verify_workspace_bytes,
)
from sgl_kernel_sm120.attention import MAX_B

from sglang.srt.layers.attention.kdtree_serving import KDTreeServing
from sglang.srt.layers.attention.kdtree_verify import VerifyStep
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.runtime_context import get_parallel

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# Architectures on which this form has served through the real Engine, with graphs and
# without (benchmark/backend_e2e.py). On others its kernels are compiled, no more.
SERVED_ON = ("sm_90",)


class GraphBuffers(msgspec.Struct, frozen=True):
    """What captured steps read. Sized by requests x row, not by tokens x context."""

    indptr: torch.Tensor  # int32 [max_bs + 1]
    indices: torch.Tensor  # int32 [max_bs * row width]
    rows: torch.Tensor  # int64 [max_bs] rows of req_to_token; 0 = padding

    @classmethod
    def allocate(cls, max_bs: int, row_width: int, device) -> GraphBuffers:
        def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            indptr=zeros(max_bs + 1, torch.int32),
            indices=zeros(max_bs * row_width, torch.int32),
            rows=zeros(max_bs, torch.int64),
        )


class KDTreeTritonServing(KDTreeServing, TritonAttnBackend):
    def __init__(self, model_runner: ModelRunner, *, width: int):
        """All scratch, once, from maxima: a captured step must not allocate it."""
        super().__init__(model_runner)
        self.init_serving(model_runner, num_heads=self.num_head, width=width)
        # Every slot of a request, those of the step's tokens among them, is in its row.
        self.row_width = self.req_to_token.shape[1]
        self.max_batch = min(self.req_to_token_pool.size, MAX_B)
        self.graph: Optional[GraphBuffers] = None
        self.graph_bytes = 0
        if self.mode == "off":
            return
        device = torch.device(self.device)
        # A smaller step can need more: its rows fall into other tiles.
        widths = {1, width}
        self.plan = torch.zeros(
            max(plan_size(self.max_batch, w, self.num_head, device) for w in widths),
            dtype=torch.int32,
            device=device,
        )
        self.workspace = torch.empty(
            max(
                mla_tree_verify_workspace_bytes(
                    self.max_batch, w, self.num_head, device=device
                )
                for w in widths
            ),
            dtype=torch.uint8,
            device=device,
        )

    def log_start(self, facts: str) -> None:
        """On every rank: when the backend is made, and again with its graph buffers."""
        info = build_info()
        kernel, status = f"sgl_kernel_sm120 {info['version']}", ""
        if torch.device(self.device).type == "cuda":
            arch = "sm_%d%d" % torch.cuda.get_device_capability(self.device)
            kernel += f" on {arch} (built for {' '.join(info['archs'])})"
            status = status_on(arch)
        else:
            kernel += " in torch"
        logger.info(
            "kdtree_sm120 %sover Triton, tp rank %d: verify %s, %s, %s, graph buffers "
            "%.1f MB, page size %d%s.",
            f"{self.part} " if self.part else "",
            get_parallel().tp_rank,
            self.mode,
            kernel,
            facts,
            self.graph_bytes / 1e6,
            self.page_size,
            status,
        )

    # Lists and plan.

    def _fill_kv_indptr_and_indices(
        self,
        plan: KVLocPlan,
        bs: int,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_indptr: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """As the base class, but a long row is copied by many blocks at once."""
        if self.mode == "off":
            return super()._fill_kv_indptr_and_indices(
                plan, bs, seq_lens, req_pool_indices, kv_indices, kv_indptr
            )
        if kv_indptr is None:
            kv_indptr = self.kv_indptr[: bs + 1]
        self.pack_list(plan, req_pool_indices, seq_lens[:bs], kv_indptr, kv_indices)
        return kv_indptr

    def pack_list(
        self,
        plan: KVLocPlan,
        rows: torch.Tensor,
        lens: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
    ) -> None:
        """The first lens[r] slots of each row of req_to_token, one list after another.

        lens int [b], rows int [b or more], indptr int32 [b + 1], indices int32 or int64
        [at least the sum of lens]; indptr and indices are written.
        """
        torch.cumsum(lens, dim=0, dtype=indptr.dtype, out=indptr[1:])
        self.kv_index_translator.pack_read_stream(
            plan,
            req_pool_indices=rows,
            seq_lens=lens,
            indptr=indptr,
            out=indices,
            num_token_blocks=None,
        )

    def eager_step(
        self,
        forward_batch: ForwardBatch,
        lens: torch.Tensor,
        width: int,
        tree_mask: Optional[torch.Tensor],
    ) -> VerifyStep:
        """lens int [b]: slots of each request, those of its ``width`` tokens last."""
        rows = forward_batch.req_pool_indices
        bs = rows.numel()
        bound = forward_batch.seq_lens_sum
        if bound is None:  # kept on the device; the tail of the list is never read
            bound = bs * self.max_context_len
        indptr = torch.zeros(bs + 1, dtype=torch.int32, device=rows.device)
        indices = torch.empty(bound + bs * width, dtype=torch.int32, device=rows.device)
        self.pack_list(forward_batch.kv_loc_plan, rows, lens, indptr, indices)
        return VerifyStep(
            num_tokens=width,
            indptr=indptr,
            indices=indices,
            tree_mask=tree_mask,
            plan=self.plan,
            rows=rows,
        )

    def fill_graph_lists(
        self, plan: KVLocPlan, rows: torch.Tensor, lens: torch.Tensor
    ) -> None:
        """Before a replay: rows and lens int [bucket], padded requests among them."""
        bs = rows.numel()
        self.graph.rows[:bs].copy_(rows)
        self.pack_list(
            plan, rows, lens, self.graph.indptr[: bs + 1], self.graph.indices
        )

    def captured_step(
        self, bs: int, width: int, tree_mask: Optional[torch.Tensor]
    ) -> VerifyStep:
        """Views of the static buffers; a replay changes their contents."""
        return VerifyStep(
            num_tokens=width,
            indptr=self.graph.indptr[: bs + 1],
            indices=self.graph.indices,
            tree_mask=tree_mask,
            plan=self.plan,
            rows=self.graph.rows[:bs],
        )

    def launch_plan(self) -> None:
        if self.step is not None:
            mla_tree_verify_plan(
                self.step.indptr,
                self.step.indices.numel(),
                s_q=self.step.num_tokens,
                h_q=self.num_head,
                plan=self.plan,
            )

    # Steps.

    def plan_eager(self, forward_batch: ForwardBatch) -> Optional[VerifyStep]:
        """The step of an eager batch; None = Triton's."""
        raise NotImplementedError

    def plan_captured(self, forward_batch: ForwardBatch) -> Optional[VerifyStep]:
        """The step that a graph will hold; None = Triton's."""
        raise NotImplementedError

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self.step = None
        if self.mode != "off" and self.serves(forward_batch.forward_mode):
            self.step = self.plan_eager(forward_batch)
        if self.step is not None:
            self.launch_plan()
            self.tick()

    def _init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool
    ) -> None:
        if in_capture:
            self.step = None
        super()._init_forward_metadata_out_graph(forward_batch, in_capture)
        if self.mode == "off" or not self.serves(forward_batch.forward_mode):
            return
        if in_capture:
            self.step = self.plan_captured(forward_batch)
        else:
            self.tick()

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Captured: reads the static buffers only, after their last write."""
        super().init_forward_metadata_in_graph(forward_batch)
        self.launch_plan()

    def init_cuda_graph_state(
        self,
        max_bs: int,
        max_num_tokens: int,
        kv_indices_buf: Optional[torch.Tensor] = None,
        cuda_graph_num_kv_splits_buf: Optional[torch.Tensor] = None,
        *,
        decode_tokens: int,
    ) -> None:
        """decode_tokens: of a captured plain decode step; Triton's scratch is made for
        each. One, where none is captured."""
        before = tensor_bytes(self)
        if kv_indices_buf is None:
            kv_indices_buf = torch.zeros(
                max_bs * self.row_width, dtype=torch.int64, device=self.device
            )
        if self.mode != "off":
            self.graph = GraphBuffers.allocate(max_bs, self.row_width, self.device)
            self.init_graph_masks(max_bs)
        super().init_cuda_graph_state(
            max_bs, decode_tokens, kv_indices_buf, cuda_graph_num_kv_splits_buf
        )
        self.graph_bytes = tensor_bytes(self) - before

    def init_graph_masks(self, max_bs: int) -> None:
        pass


def status_on(arch: str) -> str:
    """The end of a start-up line on a GPU of this architecture."""
    if arch in SERVED_ON:
        return ""
    return f"; this form has run on {', '.join(SERVED_ON)} only, not on {arch} yet"


def plan_size(batch: int, width: int, num_heads: int, device: torch.device) -> int:
    indptr = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    return mla_tree_verify_plan(indptr, 0, s_q=width, h_q=num_heads).numel()


def tensor_bytes(owner: object) -> int:
    """Of the tensors that an object holds itself or in a struct."""
    total = 0
    for value in vars(owner).values():
        fields = [value]
        if isinstance(value, msgspec.Struct):
            fields = [getattr(value, name) for name in value.__struct_fields__]
        total += sum(t.nbytes for t in fields if isinstance(t, torch.Tensor))
    return total
