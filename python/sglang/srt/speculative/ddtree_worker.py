# SPDX-License-Identifier: Apache-2.0
"""DDTREE worker: drafting, prefill and the drafter's KV are DFLASH's; a decode step
verifies a tree instead of a chain.

    draft    one block forward, the best tokens of each position
    build    the most probable paths under a budget of N nodes          sgl_kernel_sm120
    verify   one target forward over the N nodes, masked
    accept   walk along the target's tokens                             sgl_kernel_sm120
    commit   target KV of the path to the front of the window           sgl_kernel_sm120
             the drafter's KV anew, from the path's hidden states

Shapes are fixed by N, the block size L and the batch size; nothing is read back to the
host.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, List, Optional

import msgspec
import sgl_kernel_sm120
import torch
from sgl_kernel_sm120 import Acceptance, DraftTree

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.layers.attention.kdtree_metadata import full_mask
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.torch_kv_pool import TorchMHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.ddtree_draft import top_candidates
from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput
from sglang.srt.speculative.ddtree_sampling import adjust_logits, target_tokens
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_worker_v2 import (
    DFlashWorkerV2,
    _resolve_dflash_embedding_module,
)
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_sampling_mask import SpeculativeSamplingMaskCapture
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    draft_tp_context,
)

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan

logger = logging.getLogger(__name__)


class TreeStep(msgspec.Struct, frozen=True):
    """One decode step's fixed inputs."""

    batch: ScheduleBatch
    carried: DFlashDraftInputV2
    prefix_lens: torch.Tensor  # [b] committed tokens
    max_lens_cpu: torch.Tensor  # [b] on the host: at least prefix_lens + N
    plan: KVLocPlan  # the window of N slots behind each prefix

    @property
    def batch_size(self) -> int:
        return self.prefix_lens.numel()

    @property
    def root(self) -> torch.Tensor:
        """int64 [b]: the bonus token of the step before."""
        return self.carried.bonus_tokens.view(-1)


class DDTreeWorker(DFlashWorkerV2):
    def __init__(self, server_args, gpu_id, nccl_port, target_worker):
        spec = get_spec()
        self.num_nodes = int(spec.speculative_num_draft_tokens)
        refuse_target(target_worker.model_runner)
        # The parent takes the verify width for the drafter's block size.
        with spec.override(
            speculative_num_draft_tokens=spec.speculative_dflash_block_size
        ):
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        refuse_drafter(self)
        check_tree_ops(torch.device(self.device))
        # Nodes on a path, the root included.
        self.max_path = min(int(self.block_size), self.num_nodes)
        self.num_ranks = usable_ranks(
            spec.speculative_ddtree_topk,
            self.num_nodes,
            int(self.model_runner.model_config.vocab_size),
        )
        self.kv_buffers: List[torch.Tensor] = []  # the target's, once it has a pool
        logger.info(
            "DDTREE: %d nodes, %d ranks of each of %d draft positions.",
            self.num_nodes,
            self.num_ranks,
            self.block_size - 1,
        )

    def init_attention_backends(self):
        super().init_attention_backends()
        self.kv_buffers = kv_buffers_of(self.model_runner.token_to_kv_pool)
        refuse_verify_backend(verify_backend_of(self.model_runner.attn_backend))

    # What of the parent assumes a chain.

    def _defer_target_verify_gather(self):
        return None  # acceptance reads the logits of every node

    def _maybe_build_draft_sampler(self):
        return None  # the parent's folds a greedy head into the draft graph

    def _validate_phase1_sampling_support(self, batch: ScheduleBatch) -> None:
        """The parent warns here that it cannot sample. A node's token is sampled from
        the target's distribution as plain decoding adjusts it, but for penalties:
        inside a tree they are those of the tokens committed before the step."""

    def prewarm_sampling(self):
        return self.model_runner.prewarm_sampling()

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish=None,
        grammar_barrier=None,
        pp_proxy_tensors=None,
    ) -> GenerationBatchResult:
        mode = batch.forward_mode
        if mode.is_extend() or batch.is_extend_in_batch or mode.is_idle():
            return super().forward_batch_generation(
                batch, on_publish, grammar_barrier, pp_proxy_tensors
            )
        step = self.plan_step(batch)
        tree = self.draft_tree(step)
        # Starts its copy to the host, which has to be ahead of the verify launch.
        grammar_tree = (
            GrammarTree.from_device(tree.first_child, tree.next_sibling, tree.tokens)
            if batch.has_grammar
            else None
        )
        verified = self.verify(step, tree)
        logits = verified.logits_output
        wanted = self.sample_target(
            step, tree, logits.next_token_logits, grammar_tree, grammar_barrier
        )
        accepted = sgl_kernel_sm120.tree_accept(
            tree.tokens, tree.parents, wanted, self.max_path
        )
        new_seq_lens = step.prefix_lens + accepted.accept_len.to(step.prefix_lens.dtype)
        if on_publish is not None:
            on_publish(new_seq_lens)
        self.fill_logprobs(step, accepted, wanted, logits)
        self.commit(step, accepted, logits.hidden_states)
        logits.hidden_states = None  # keeps it out of the copy to the host
        return GenerationBatchResult(
            logits_output=logits,
            next_token_ids=accepted.out_tokens.reshape(-1),
            accept_lens=accepted.accept_len,
            can_run_cuda_graph=verified.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=accepted.bonus, new_seq_lens=new_seq_lens
            ),
            speculative_num_draft_tokens=self.num_nodes,
            speculative_output_stride=self.max_path,
            new_seq_lens=new_seq_lens,
            routed_experts_output=verified.routed_experts_output,
            indexer_topk_output=verified.indexer_topk_output,
        )

    def plan_step(self, batch: ScheduleBatch) -> TreeStep:
        carried = batch.spec_info
        if not isinstance(carried, DFlashDraftInputV2):
            raise RuntimeError(
                "DDTREE: the running batch carries "
                f"{type(carried).__name__} instead of DFlashDraftInputV2."
            )
        lens_cpu, max_lens_cpu = host_lens(batch, carried, self.num_nodes)
        # The scheduler reserved the slots and wrote them behind the prefix.
        plan = self.model_runner.kv_index_translator.plan_uniform_extend(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=lens_cpu,
            width=self.num_nodes,
        )
        return TreeStep(
            batch=batch,
            carried=carried,
            prefix_lens=batch.seq_lens,
            max_lens_cpu=max_lens_cpu,
            plan=plan,
        )

    def draft_tree(self, step: TreeStep) -> DraftTree:
        log_probs, ids = self.draft_candidates(step)
        return sgl_kernel_sm120.ddtree_build(step.root, ids, log_probs, self.num_nodes)

    def draft_candidates(self, step: TreeStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and token ids, both [b, L - 1, K], best first."""
        lm_head = unwrap_lora_layer(self.target_worker.model_runner.model.lm_head)
        with torch.inference_mode(), draft_tp_context(self.draft_parallel_layout):
            hidden = self.draft_model_runner.forward(
                self.draft_forward_batch(step)
            ).logits_output.hidden_states
            hidden = hidden.view(step.batch_size, int(self.block_size), -1)[:, 1:]
            log_probs, ids = top_candidates(
                hidden.reshape(-1, hidden.shape[-1]),
                lm_head,
                self.num_ranks,
                get_parallel().tp_group,
            )
        shape = (step.batch_size, int(self.block_size) - 1, self.num_ranks)
        return log_probs.view(shape), ids.view(shape)

    def draft_forward_batch(self, step: TreeStep) -> ForwardBatch:
        """The block [root, mask, mask, ...] behind each prefix."""
        length, batch = int(self.block_size), step.batch
        num_tokens = step.batch_size * length
        ids = step.root.new_full((step.batch_size, length), int(self._mask_token_id))
        ids[:, 0] = step.root
        embedding = unwrap_lora_layer(
            _resolve_dflash_embedding_module(
                self.draft_model, self.target_worker.model_runner.model
            )
        )
        embeds = embedding(ids) * self._noise_embed_scale
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=step.batch_size,
            input_ids=ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=step.prefix_lens,
            out_cache_loc=None,
            seq_lens_sum=int(step.max_lens_cpu.sum()),
            seq_lens_cpu=step.max_lens_cpu,
            positions=(step.prefix_lens[:, None] + self._block_pos_offsets).flatten(),
            input_embeds=embeds.view(num_tokens, -1),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            num_token_non_padded=(
                torch.full((), num_tokens, dtype=torch.int32, device=self.device)
                if enable_num_token_non_padded()
                else None
            ),
            global_num_token_non_padded_cpu=num_tokens,
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )
        step.plan.bind(
            forward_batch,
            self.draft_model_runner.kv_index_translator,
            cols=slice(0, length),
        )
        return forward_batch

    def verify(self, step: TreeStep, tree: DraftTree) -> GenerationBatchResult:
        batch = step.batch
        mask, mask_mode = self.tree_mask(step, tree)
        verify_input = DDTreeVerifyInput(
            draft_token=tree.tokens.reshape(-1),
            positions=(step.prefix_lens[:, None] + tree.depth).reshape(-1).long(),
            draft_token_num=self.num_nodes,
            custom_mask=mask,
            tree_mask_mode=mask_mode,
            max_tree_depth=self.max_path,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=step.plan,
        )
        batch.out_cache_loc = step.plan.write_virtual
        host_lens = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu = step.max_lens_cpu
        batch.seq_lens_sum = int(step.max_lens_cpu.sum())
        forward_batch, _ = verify_input.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = host_lens
        return self.target_worker.forward_batch_generation(
            batch=None,
            forward_batch=forward_batch,
            is_verify=True,
            skip_attn_backend_init=True,
        )

    def tree_mask(
        self, step: TreeStep, tree: DraftTree
    ) -> tuple[torch.Tensor, TreeMaskMode]:
        """The mask in the layout of the backend that verifies, in its buffer if it has
        one that is large enough."""
        backend = verify_backend_of(self.model_runner.attn_backend)
        static = backend.verify_mask
        # Stock backends know no layout but upstream's.
        mode = getattr(backend, "tree_mask_mode", TreeMaskMode.FULL_MASK)
        mask = tree.visible.flatten()
        if mode == TreeMaskMode.FULL_MASK:
            max_cells = int(step.max_lens_cpu.sum()) * self.num_nodes
            mask = full_mask(tree.visible, step.prefix_lens, max_cells)
        elif static is not None and static.fits(step.batch_size):
            mask = static.buffer[: mask.numel()].copy_(mask)
        return mask, mode

    def sample_target(
        self,
        step: TreeStep,
        tree: DraftTree,
        logits: torch.Tensor,
        grammar_tree: Optional[GrammarTree],
        grammar_barrier,
    ) -> torch.Tensor:
        """int64 [b, N]: the token that the target puts after each node."""
        info = step.batch.sampling_info
        grammar_mask = None
        if grammar_tree is not None:
            grammar_mask = build_grammar_vocab_mask(
                reqs=step.batch.reqs,
                tree=grammar_tree,
                sampling_info=info,
                device=logits.device,
                barrier=grammar_barrier,
            )
        adjust_logits(logits, info, self.num_nodes, grammar_mask)
        wanted = target_tokens(
            logits,
            info,
            (step.prefix_lens[:, None] + tree.depth).reshape(-1),
            self.num_nodes,
            self.model_runner.sampler,
        )
        self._tp_sync.sync(
            (
                SpecTpSyncSite.DFLASH_ACCEPT_GREEDY
                if info.is_all_greedy
                else SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE
            ),
            wanted,
        )
        return wanted

    def fill_logprobs(
        self, step: TreeStep, accepted: Acceptance, wanted: torch.Tensor, logits
    ) -> None:
        rows = self.node_rows(accepted.path)
        info = step.batch.sampling_info
        if info.sampling_mask_batch_indices is not None:
            capture = SpeculativeSamplingMaskCapture.from_logits(
                info,
                next_token_logits=logits.next_token_logits[rows.flatten()],
                draft_input=step.carried,
                draft_token_num=self.max_path,
                bs=step.batch_size,
            )
            logits.sampling_mask_output = capture.build_output(
                out_tokens=accepted.out_tokens, commit_lens=accepted.accept_len
            )
        if step.batch.return_logprob:
            compute_spec_logprobs(
                step.batch, logits, wanted.reshape(-1), accept_index=rows
            )

    def commit(
        self, step: TreeStep, accepted: Acceptance, hidden: Optional[torch.Tensor]
    ) -> None:
        if hidden is None:
            raise RuntimeError("DDTREE: the target returned no hidden states.")
        rows = self.node_rows(accepted.path).flatten()
        slots = step.plan.write_ids(self.model_runner.kv_index_translator).long()
        front = slots.view(step.batch_size, self.num_nodes)[:, : self.max_path]
        # The path is padded with column numbers: past its end a slot keeps its KV.
        sgl_kernel_sm120.kv_move_all_layers(
            self.kv_buffers, front.reshape(-1), slots[rows]
        )
        draft_slots = self._draft_write_ids(step.plan)
        draft_slots = draft_slots.view(step.batch_size, self.num_nodes)
        draft_slots = draft_slots[:, : self.max_path].contiguous()
        chain = torch.arange(self.max_path, device=rows.device)
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden.reshape(-1, hidden.shape[-1])[rows],
            cache_loc=draft_slots.flatten(),
            cache_loc_2d=draft_slots,
            positions=(step.prefix_lens[:, None] + chain).flatten(),
            commit_lens=accepted.accept_len,
        )

    def node_rows(self, path: torch.Tensor) -> torch.Tensor:
        """[b, max_path]: rows of the packed [b * N, ...] tensors."""
        first = torch.arange(path.shape[0], device=path.device) * self.num_nodes
        return path + first[:, None]


def host_lens(
    batch: ScheduleBatch, carried: DFlashDraftInputV2, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[b] on the host, at least: the prefix lengths; the prefix lengths + num_nodes."""
    if batch.seq_lens_cpu is not None:
        return batch.seq_lens_cpu, batch.seq_lens_cpu + num_nodes
    # Where no backend wants lengths on the host, what is reserved bounds both.
    reserved = carried.nxt_kv_lens_cpu
    if reserved is None:
        reserved = torch.tensor([req.kv.kv_allocated_len for req in batch.reqs])
    return reserved, reserved


def usable_ranks(wanted: Optional[int], num_nodes: int, vocab_size: int) -> int:
    """Ranks of a draft position that can become nodes, as far as the kernel goes."""
    useful = min(num_nodes - 1, vocab_size)
    ranks = min(wanted or useful, useful, sgl_kernel_sm120.tree.MAX_TOPK)
    if wanted is None and ranks < useful:
        logger.info(
            "DDTREE: a tree of %d nodes could use %d ranks of a draft position; it gets "
            "%d, the kernel's limit.",
            num_nodes,
            useful,
            ranks,
        )
    return ranks


def verify_backend_of(backend):
    """The leaf backend that runs TARGET_VERIFY, under upstream's wrappers."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    while isinstance(backend, HybridAttnBackend):
        backend = backend._select_backend(ForwardMode.TARGET_VERIFY)
    return backend


def kv_buffers_of(pool) -> List[torch.Tensor]:
    """The pool's per-layer buffers, a row a slot."""
    # Other subclasses keep more for a slot (scales, index keys), which would stay behind.
    if type(pool) is MLATokenToKVPool:
        return list(pool.kv_buffer)
    if type(pool) in (MHATokenToKVPool, TorchMHATokenToKVPool) and not pool.use_hnd:
        return [*pool.k_buffer, *pool.v_buffer]
    raise ValueError(
        f"DDTREE cannot move accepted KV in a {type(pool).__name__}; it serves MLA and "
        "MHA pools with a row a slot."
    )


def refuse_verify_backend(backend) -> None:
    """An attention backend that drops the mask would verify the tree as a chain."""
    if not hasattr(backend, "tree_mask_mode") and not isinstance(
        backend, TritonAttnBackend
    ):
        raise ValueError(
            f"DDTREE: {type(backend).__name__} verifies drafts here and carries no tree "
            "mask; use --attention-backend kdtree_sm120, torch_reference or triton."
        )


def refuse_target(runner) -> None:
    if getattr(runner.model, "lm_head", None) is None:
        raise ValueError(
            "DDTREE drafts with the target's lm_head, and "
            f"{type(runner.model).__name__} has none."
        )
    if mambaish_config(runner.model_config) is not None:
        raise ValueError(
            "DDTREE does not support hybrid (linear attention or mamba) targets: a "
            "recurrent state cannot follow a tree."
        )


def refuse_drafter(worker: DDTreeWorker) -> None:
    if worker.selector is not None or worker.lilicorr is not None or worker._is_domino:
        raise ValueError(
            "DDTREE needs a plain DFlash drafter; this one has a head that drafts a "
            "chain. Use --speculative-algorithm DFLASH."
        )


def check_tree_ops(device: torch.device) -> None:
    """Fail at start-up, not at the first request, where an op has no kernel."""
    root = torch.zeros(1, dtype=torch.int64, device=device)
    candidate = torch.ones(1, 1, 1, dtype=torch.int64, device=device)
    tree = sgl_kernel_sm120.ddtree_build(root, candidate, candidate.float() - 2, 2)
    sgl_kernel_sm120.tree_accept(tree.tokens, tree.parents, tree.tokens, 2)
    buffer = torch.zeros(1, 1, device=device)
    sgl_kernel_sm120.kv_move_all_layers([buffer], root, root)
