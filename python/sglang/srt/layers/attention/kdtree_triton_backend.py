# SPDX-License-Identifier: Apache-2.0
"""kdtree_sm120 over the stock Triton backend: TARGET_VERIFY and plain DECODE of MLA
layers run on sgl_kernel_sm120, eager and captured; the rest is inherited.

What has run where: this form has not run on a GPU yet. It has run on a CPU, where
TRITON_INTERPRET=1 interprets the stock kernels and the op takes its torch form. Graph
capture and replay have been imitated there (static buffers filled for other batches),
not run.

One step, for all layers:
    stock metadata    prefix lists, as in the base class; fallbacks and validate read it
    combined list     prefix then draft slots of each request, read from req_to_token
                      once, so a scheduler may rewrite req_to_token after it
    tree mask         QLEN_ONLY bytes [b, N, N]; in a graph always there, causal for a
                      chain, and rewritten before each replay
    plan              how the lists are split over the SMs, inside the graph
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Dict, List, Optional

import msgspec
import torch
from sgl_kernel_sm120 import (
    build_info,
    mla_tree_verify_plan,
    mla_tree_verify_workspace_bytes,
)
from sgl_kernel_sm120.attention import MAX_B, MAX_H_Q

from sglang.srt.layers.attention.kdtree_metadata import (
    chain_visible,
    draft_cells,
    full_mask,
    visible_of_full_mask,
)
from sglang.srt.layers.attention.kdtree_report import (
    KDTreeMetrics,
    Validation,
    metric_labels,
)
from sglang.srt.layers.attention.kdtree_verify import (
    QK_HEAD_DIM,
    V_HEAD_DIM,
    TreeVerifier,
    VerifyStep,
)
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask, tree_mask_numel
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.spec_info import SpecInput

logger = logging.getLogger(__name__)

GPU_STATUS = "this CUDA form has not run on a GPU yet"


class Maskless(msgspec.Struct, frozen=True):
    """A spec_info that shows the base class the width of a verification, not its mask,
    which is in a layout that it does not read."""

    num_tokens_per_req: int
    custom_mask: None = None


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


class KDTreeTritonBackend(TritonAttnBackend):
    def __init__(self, model_runner: ModelRunner, *args, **kwargs):
        super().__init__(model_runner, *args, **kwargs)
        self.mode = get_exec().kernel.kdtree_verify
        self.speculates = get_spec().speculative_algorithm is not None
        # Verified tokens a request, or 1.
        self.width = int(self.target_verify_num_tokens_per_req)
        # Every slot of a request, those under verification among them, is in its row.
        self.row_width = self.req_to_token.shape[1]
        self.max_batch = min(self.req_to_token_pool.size, MAX_B)
        self.step: Optional[VerifyStep] = None
        self.graph: Optional[GraphBuffers] = None
        self.graph_bytes = 0
        self.in_capture = False
        self.fallbacks: Dict[str, int] = {}
        self.metrics = KDTreeMetrics(metric_labels())
        self.validation: Optional[Validation] = None
        self.tree_mask: Optional[VerifyMask] = None
        self.full_mask: Optional[torch.Tensor] = None
        # What a speculative worker puts into spec_info.custom_mask.
        self.tree_mask_mode = TreeMaskMode.FULL_MASK
        if self.mode != "off":
            self.init_kernel(model_runner)
        self.log_start()

    def init_kernel(self, model_runner: ModelRunner) -> None:
        """All scratch, once, from maxima: a captured step must not allocate it."""
        device = torch.device(self.device)
        # TreeVerifier.plan_step is not used: the list is packed by one launch here.
        self.verifier = TreeVerifier(
            req_to_token=self.req_to_token, page_size=self.page_size
        )
        self.plan = torch.zeros(
            plan_size(self.max_batch, self.width, self.num_head, device),
            dtype=torch.int32,
            device=device,
        )
        self.workspace = torch.empty(
            mla_tree_verify_workspace_bytes(
                self.max_batch, self.width, self.num_head, device=device
            ),
            dtype=torch.uint8,
            device=device,
        )
        self.causal = chain_visible(1, self.width, device).to(torch.uint8)
        unserved = unserved_mla_layers(model_runner.model)
        for reason, layers in unserved.items():
            logger.warning(
                "kdtree_sm120: %d MLA layer(s) go to Triton: %s", len(layers), reason
            )
        # The stock kernel needs the mask with its prefix columns.
        self.keeps_full_mask = self.mode == "validate" or bool(unserved)
        if self.speculates:
            self.tree_mask_mode = TreeMaskMode.QLEN_ONLY
            max_bs = self.req_to_token_pool.size
            self.tree_mask = VerifyMask(
                buffer=torch.zeros(
                    tree_mask_numel(TreeMaskMode.QLEN_ONLY, max_bs, self.width, 0),
                    dtype=torch.uint8,
                    device=device,
                ),
                mode=TreeMaskMode.QLEN_ONLY,
                max_bs=max_bs,
            )
        if self.mode == "validate":
            pool = self.token_to_kv_pool
            self.validation = Validation(
                first_layer=pool.start_layer,
                num_layers=pool.layer_num,
                num_tokens=self.width,
                num_heads=self.num_head,
                dtype=model_runner.dtype,
                kv_dtype=pool.get_key_buffer(pool.start_layer).dtype,
                device=device,
                page_size=self.verifier.page_size,
                req_to_token=self.req_to_token,
                tp_rank=get_parallel().tp_rank,
                metrics=self.metrics,
                dump_dir=get_exec().kernel.kdtree_dump_dir,
            )

    def log_start(self) -> None:
        """On every rank: when the backend is made, and again with its graph buffers."""
        info = build_info()
        kernel = f"sgl_kernel_sm120 {info['version']}"
        if torch.device(self.device).type == "cuda":
            major, minor = torch.cuda.get_device_capability(self.device)
            kernel += f" on sm_{major}{minor} (built for {' '.join(info['archs'])})"
        else:
            kernel += " in torch"
        logger.info(
            "kdtree_sm120 over Triton, tp rank %d: verify %s, %s, mask %s, %d verified "
            "tokens, graph buffers %.1f MB, page size %d; %s.",
            get_parallel().tp_rank,
            self.mode,
            kernel,
            self.tree_mask_mode.name if self.speculates else "none",
            self.width,
            self.graph_bytes / 1e6,
            self.page_size,
            GPU_STATUS,
        )

    # Metadata of a step.

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """An eager step."""
        super().init_forward_metadata(forward_batch)
        self.step = None
        if self.mode == "off":
            return
        if forward_batch.forward_mode.is_target_verify():
            self.plan_eager_verify(forward_batch)
        elif forward_batch.forward_mode.is_decode() and self.can_serve_batch(
            forward_batch.batch_size, 1
        ):
            self.step = self.decode_step(
                forward_batch.batch_size,
                self.forward_metadata.kv_indices,
                forward_batch.req_pool_indices,
            )
        self.launch_plan()
        if self.step is not None and self.validation is not None:
            self.validation.tick()

    def can_serve_batch(self, batch_size: int, width: int) -> bool:
        reason = None
        if batch_size > self.max_batch:
            reason = f"more than {MAX_B} requests"
        elif width > self.width:
            reason = f"more than {self.width} tokens a request"
        if reason is not None:
            self.count_fallback(reason)
        return reason is None

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
        if kv_indptr is None:
            kv_indptr = self.kv_indptr[: bs + 1]
        self.pack_list(plan, req_pool_indices, seq_lens[:bs], kv_indptr, kv_indices)
        return kv_indptr

    def decode_step(
        self, batch_size: int, kv_indices: torch.Tensor, rows: torch.Tensor
    ) -> VerifyStep:
        """The stock list of a decode step ends with the token of the step."""
        return VerifyStep(
            num_tokens=1,
            indptr=self.kv_indptr[: batch_size + 1],
            indices=kv_indices,
            tree_mask=None,
            plan=self.plan,
            rows=rows,
        )

    def plan_eager_verify(self, forward_batch: ForwardBatch) -> None:
        spec_info, prefix_lens = forward_batch.spec_info, forward_batch.seq_lens
        rows = forward_batch.req_pool_indices
        bs, width = rows.numel(), self._target_verify_num_tokens_per_req(spec_info)
        visible = self.visible_of(spec_info, prefix_lens, bs, width)
        self.set_eager_stock_mask(forward_batch, visible)
        if not self.can_serve_batch(bs, width):
            return
        total = forward_batch.seq_lens_sum
        if total is None:
            total = bs * self.max_context_len
        indptr = torch.zeros(bs + 1, dtype=torch.int32, device=rows.device)
        indices = torch.empty(total + bs * width, dtype=torch.int32, device=rows.device)
        self.pack_list(
            forward_batch.kv_loc_plan, rows, prefix_lens + width, indptr, indices
        )
        self.step = VerifyStep(
            num_tokens=width,
            indptr=indptr,
            indices=indices,
            tree_mask=visible,
            plan=self.plan,
            rows=rows,
        )

    def pack_list(
        self,
        plan: KVLocPlan,
        rows: torch.Tensor,
        lens: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
    ) -> None:
        """The first lens[r] slots of each row of req_to_token, one list after another."""
        torch.cumsum(lens, dim=0, dtype=indptr.dtype, out=indptr[1:])
        self.kv_index_translator.pack_read_stream(
            plan,
            req_pool_indices=rows,
            seq_lens=lens,
            indptr=indptr,
            out=indices,
            num_token_blocks=None,
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

    # Masks.

    @property
    def verify_mask(self) -> Optional[VerifyMask]:
        """The buffer that EAGLE's and DDTREE's workers fill in place."""
        return self._verify_mask if self.mode == "off" else self.tree_mask

    def visible_of(
        self,
        spec_info: Optional[SpecInput],
        prefix_lens: torch.Tensor,
        bs: int,
        width: int,
    ) -> Optional[torch.Tensor]:
        """[up to bs, N, N] bytes of the batch's mask, whatever its layout; None = a
        chain."""
        mask = None if spec_info is None else spec_info.custom_mask
        if mask is None:
            return None
        if mask_layout_of(spec_info, mask, bs * width * width) == (
            TreeMaskMode.QLEN_ONLY
        ):
            real = min(bs, mask.numel() // (width * width))
            return mask[: real * width * width].view(real, width, width)
        return visible_of_full_mask(mask, prefix_lens[:bs], width)

    def set_eager_stock_mask(
        self, forward_batch: ForwardBatch, visible: Optional[torch.Tensor]
    ) -> None:
        """Replace the mask that the base class took from spec_info, whose layout it
        does not read."""
        mask = None
        if visible is not None and self.keeps_full_mask:
            bs, width = visible.shape[:2]
            total = forward_batch.seq_lens_sum
            if total is None:
                total = bs * self.max_context_len
            mask = full_mask(
                visible.bool(), forward_batch.seq_lens, width * (total + bs * width)
            )
        self.forward_metadata.custom_mask = mask
        self.eager_batch = forward_batch

    def write_graph_mask(
        self,
        spec_info: Optional[SpecInput],
        prefix_lens: torch.Tensor,
        bs: int,
        width: int,
    ) -> None:
        """Every byte of the batch's block, those of padded requests too: none may stay
        from an earlier step."""
        target = self.tree_mask.buffer[: bs * width * width].view(bs, width, width)
        visible = None
        if not self.in_capture:  # there spec_info holds a dummy mask
            visible = self.visible_of(spec_info, prefix_lens, bs, width)
        if visible is None:
            target.copy_(self.causal[:, :width, :width].expand_as(target))
            return
        real = visible.shape[0]
        if visible.data_ptr() != target.data_ptr():
            target[:real].copy_(visible)
        target[real:].copy_(self.causal[:, :width, :width].expand(bs - real, -1, -1))

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: SpecInput, cuda_graph_bs: Optional[int]
    ) -> None:
        """The draft has finished: redo what was made of its mask before."""
        if self.tree_mask is None:
            return
        if cuda_graph_bs is None:
            if self.step is not None and self.keeps_full_mask:
                self.set_eager_stock_mask(self.eager_batch, self.step.tree_mask)
            return
        width = self._target_verify_num_tokens_per_req(spec_info)
        ends = self.graph.indptr[: cuda_graph_bs + 1]
        self.write_graph_mask(spec_info, ends.diff() - width, cuda_graph_bs, width)

    # CUDA graphs.

    def init_cuda_graph_state(
        self,
        max_bs: int,
        max_num_tokens: int,
        kv_indices_buf: Optional[torch.Tensor] = None,
        cuda_graph_num_kv_splits_buf: Optional[torch.Tensor] = None,
    ) -> None:
        before = tensor_bytes(self)
        if kv_indices_buf is None:
            kv_indices_buf = torch.zeros(
                max_bs * self.row_width, dtype=torch.int64, device=self.device
            )
        num_draft_tokens = self.num_draft_tokens
        if self.mode != "off":
            self.num_draft_tokens = None  # the base class allocates no mask then
            self.graph = GraphBuffers.allocate(max_bs, self.row_width, self.device)
            if self.speculates and self.keeps_full_mask:
                self.full_mask = torch.ones(
                    max_bs * self.width * self.row_width,
                    dtype=torch.uint8,
                    device=self.device,
                )
        # A target that speculates captures no decode step: a line of scratch will do
        # for what would be allocated for each token.
        super().init_cuda_graph_state(
            max_bs,
            1 if self.speculates else max_num_tokens,
            kv_indices_buf,
            cuda_graph_num_kv_splits_buf,
        )
        self.num_draft_tokens = num_draft_tokens
        self.graph_bytes = tensor_bytes(self) - before
        self.log_start()

    def _init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool
    ) -> None:
        self.in_capture = in_capture
        if in_capture:
            self.step = None
        super()._init_forward_metadata_out_graph(forward_batch, in_capture)
        self.in_capture = False
        if self.mode == "off":
            return
        if in_capture:
            self.step = self.graph_step(forward_batch)
        elif self.validation is not None:
            self.validation.tick()

    def graph_step(self, forward_batch: ForwardBatch) -> Optional[VerifyStep]:
        """Views of the static buffers; a replay changes their contents."""
        bs, mode = forward_batch.batch_size, forward_batch.forward_mode
        if mode.is_decode() and self.can_serve_batch(bs, 1):
            return self.decode_step(
                bs, self.cuda_graph_kv_indices, self.graph.rows[:bs]
            )
        if not mode.is_target_verify():
            return None
        width = self._target_verify_num_tokens_per_req(forward_batch.spec_info)
        if not self.can_serve_batch(bs, width):
            return None
        mask = self.tree_mask.buffer[: bs * width * width]
        return VerifyStep(
            num_tokens=width,
            indptr=self.graph.indptr[: bs + 1],
            indices=self.graph.indices,
            tree_mask=mask.view(bs, width, width),
            plan=self.plan,
            rows=self.graph.rows[:bs],
        )

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Captured: reads the static buffers only, after their last write."""
        super().init_forward_metadata_in_graph(forward_batch)
        if self.step is None:
            return
        if self.full_mask is not None and self.step.tree_mask is not None:
            prefix_lens = self.step.indptr.diff() - self.step.num_tokens
            cells = draft_cells(prefix_lens, self.step.num_tokens)
            self.full_mask.scatter_(0, cells.flatten(), self.step.tree_mask.flatten())
        self.launch_plan()

    def _update_decode_kv_buffers(
        self,
        plan: KVLocPlan,
        bs: int,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
    ):
        if self.graph is not None:
            self.graph.rows[:bs].copy_(req_pool_indices[:bs])
        return super()._update_decode_kv_buffers(plan, bs, seq_lens, req_pool_indices)

    def _update_target_verify_buffers(
        self,
        plan: KVLocPlan,
        bs: int,
        seq_lens: torch.Tensor,
        spec_info: Optional[SpecInput],
        req_pool_indices: torch.Tensor,
    ):
        if self.mode == "off":
            return super()._update_target_verify_buffers(
                plan, bs, seq_lens, spec_info, req_pool_indices
            )
        width = self._target_verify_num_tokens_per_req(spec_info)
        if width != self.width:
            raise RuntimeError(
                f"kdtree_sm120: graphs were captured for {self.width} tokens a "
                f"request, and this verification has {width}."
            )
        stock = super()._update_target_verify_buffers(
            plan, bs, seq_lens, Maskless(width), req_pool_indices
        )
        self.graph.rows[:bs].copy_(req_pool_indices[:bs])
        self.pack_list(
            plan,
            req_pool_indices[:bs],
            seq_lens[:bs] + width,
            self.graph.indptr[: bs + 1],
            self.graph.indices,
        )
        self.write_graph_mask(spec_info, seq_lens, bs, width)
        return stock

    def _build_cuda_graph_forward_metadata(
        self, bs, forward_mode, spec_info, swa_out_cache_loc=None
    ):
        metadata = super()._build_cuda_graph_forward_metadata(
            bs, forward_mode, spec_info, swa_out_cache_loc
        )
        if self.mode != "off" and forward_mode.is_target_verify():
            metadata.custom_mask = self.full_mask
        return metadata

    # Layers.

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **options,
    ) -> torch.Tensor:
        def stock():
            return super(KDTreeTritonBackend, self).forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache, **options
            )

        if self.mode == "off" or not forward_batch.forward_mode.is_target_verify():
            return stock()
        return self.attend(q, k, v, layer, forward_batch, save_kv_cache, options, stock)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **options,
    ) -> torch.Tensor:
        def stock():
            return super(KDTreeTritonBackend, self).forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache, **options
            )

        if self.mode == "off":
            return stock()
        return self.attend(q, k, v, layer, forward_batch, save_kv_cache, options, stock)

    def attend(
        self, q, k, v, layer, forward_batch, save_kv_cache, options, stock
    ) -> torch.Tensor:
        reason = reason_unserved(layer, k, v, options)
        if reason is None and layer.tp_q_head_num != self.num_head:
            reason = "number of heads"  # the plan is made for one
        if reason is not None:
            self.count_fallback(f"{reason} (layer {layer.layer_id})", reason)
        if reason is not None or self.step is None:
            self.refuse_lost_mask(layer, forward_batch)
            return stock()
        kv_cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        flat_q = q.reshape(-1, layer.tp_q_head_num * QK_HEAD_DIM)
        if self.mode == "validate":
            reference = stock()  # writes the KV
            ours = self.verifier.run(
                self.step, flat_q, kv_cache, layer, workspace=self.workspace
            )
            self.validation.compare(layer, self.step, flat_q, kv_cache, ours, reference)
            return reference
        if save_kv_cache:
            self.write_latent(layer, forward_batch, k, v)
        return self.verifier.run(
            self.step, flat_q, kv_cache, layer, workspace=self.workspace
        )

    def write_latent(
        self,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        if layer.k_scale is not None:
            k = k / layer.k_scale
        self.token_to_kv_pool.set_kv_buffer(
            layer, KVWriteLoc.for_batch(forward_batch), k, v
        )

    def refuse_lost_mask(
        self, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> None:
        """Triton without the mask would verify a tree as a chain."""
        if (
            forward_batch.forward_mode.is_target_verify()
            and forward_batch.spec_info is not None
            and forward_batch.spec_info.custom_mask is not None
            and self.forward_metadata.custom_mask is None
            and get_spec().speculative_algorithm != "DFLASH"
        ):
            raise NotImplementedError(
                f"kdtree_sm120 cannot serve layer {layer.layer_id} here "
                f"({', '.join(self.fallbacks)}), and --kdtree-verify on keeps no mask "
                "that Triton reads. Use --kdtree-verify off."
            )

    def count_fallback(self, what: str, reason: Optional[str] = None) -> None:
        """``what`` is logged the first time, ``reason`` is the metric's label."""
        reason = reason or what
        if what not in self.fallbacks:
            logger.warning("kdtree_sm120: to Triton: %s", what)
        self.fallbacks[what] = self.fallbacks.get(what, 0) + 1
        self.metrics.fell_back(reason)


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


def mask_layout_of(
    spec_info: SpecInput, mask: torch.Tensor, qlen_cells: int
) -> TreeMaskMode:
    if isinstance(spec_info, DDTreeVerifyInput):
        return spec_info.tree_mask_mode
    # EAGLE's worker builds in the layout of ``verify_mask``; the runner's stand-in for
    # an idle batch is larger, of FULL layout and all ones.
    if isinstance(spec_info, EagleVerifyInput) and (
        mask.numel() <= qlen_cells or mask.dtype == torch.uint8
    ):
        return TreeMaskMode.QLEN_ONLY
    return TreeMaskMode.FULL_MASK


def reason_unserved_layer(layer: RadixAttention) -> Optional[str]:
    if (layer.qk_head_dim, layer.v_head_dim) != (QK_HEAD_DIM, V_HEAD_DIM):
        return "head size"
    if layer.tp_k_head_num != 1 or layer.tp_q_head_num > MAX_H_Q:
        return "number of heads"
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        return "sliding window"
    if layer.is_cross_attention:
        return "cross attention"
    if layer.attn_type != AttentionType.DECODER:
        return "attention type"
    if layer.xai_temperature_len > 0:
        return "temperature by length"
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        return "logit cap method"
    return None


def reason_unserved(
    layer: RadixAttention,
    k: Optional[torch.Tensor],
    v: Optional[torch.Tensor],
    options: dict,
) -> Optional[str]:
    for name, value in options.items():
        if value is not None:
            return name.replace("_", " ")
    if k is None or v is None:
        return "KV from the pool"
    return reason_unserved_layer(layer)


def unserved_mla_layers(model: torch.nn.Module) -> Dict[str, List[int]]:
    """Absorbed MLA layers by why they are not served. Others (the dense form of MLA
    layers) take part in prefill only."""
    unserved: Dict[str, List[int]] = {}
    for module in model.modules():
        if isinstance(module, RadixAttention) and module.qk_head_dim == QK_HEAD_DIM:
            reason = reason_unserved_layer(module)
            if reason is not None:
                unserved.setdefault(reason, []).append(module.layer_id)
    return unserved
