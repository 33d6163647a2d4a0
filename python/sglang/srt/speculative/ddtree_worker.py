# SPDX-License-Identifier: Apache-2.0
"""DDTREE worker: drafting, prefill and the drafter's KV are DFLASH's; a decode step
verifies a tree instead of a chain.

    draft    one block forward, the best tokens of each position
    build    the most probable paths under a budget of N nodes          sgl_kernel_sm120
    verify   one target forward over the N nodes, masked
    accept   walk along the target's tokens                             sgl_kernel_sm120
    commit   target KV of the path to the front of the window           sgl_kernel_sm120
             the drafter's KV anew, from the path's hidden states

Shapes are fixed by the number of nodes N, the block size L and the batch size; nothing is
read back to the host. N is chosen before the step, from counts of earlier ones.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, List, Optional

import sgl_kernel_sm120
import torch
from sgl_kernel_sm120 import Acceptance, DraftTree

from sglang.srt.layers.attention.kdtree_metadata import full_mask
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from sglang.srt.speculative.ddtree_block import draft_forward_batch
from sglang.srt.speculative.ddtree_budget import (
    AdaptiveBudget,
    Decision,
    FixedBudget,
    options_up_to,
    parse_budget,
)
from sglang.srt.speculative.ddtree_checks import (
    check_tree_ops,
    kv_buffers_of,
    refuse_drafter,
    refuse_target,
    refuse_verify_backend,
    verify_backend_of,
)
from sglang.srt.speculative.ddtree_costs import cost_table
from sglang.srt.speculative.ddtree_draft import DraftCandidates, is_capture_safe
from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput
from sglang.srt.speculative.ddtree_penalties import DDTreeDraftInput, forget_told
from sglang.srt.speculative.ddtree_report import (
    DDTreeReport,
    StepCounts,
    option_codes,
    report_labels,
)
from sglang.srt.speculative.ddtree_sampling import adjust_logits, target_tokens
from sglang.srt.speculative.ddtree_step import (
    TreeStep,
    block_of_masks,
    chain_tree,
    host_lens,
    node_rows,
    usable_ranks,
)
from sglang.srt.speculative.ddtree_widths import VerifyWidths
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.spec_sampling_mask import SpeculativeSamplingMaskCapture
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    draft_tp_context,
)

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

logger = logging.getLogger(__name__)


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
        self.num_ranks = usable_ranks(
            spec.speculative_ddtree_topk,
            self.num_nodes,
            int(self.model_runner.model_config.vocab_size),
        )
        width = parse_budget(spec.speculative_ddtree_budget, self.num_nodes)
        self.is_adaptive = width is None
        # An adaptive one replaces it as soon as steps can be timed.
        self.budget = FixedBudget(self.num_nodes if width is None else width)
        self.report: Optional[DDTreeReport] = None
        self.widths = VerifyWidths(self.model_runner)
        self.candidates = self.make_candidates()
        self.kv_buffers: List[torch.Tensor] = []  # the target's, once it has a pool
        logger.info(
            "DDTREE: %d nodes at most, budget %s, %d ranks of each of %d draft positions.",
            self.num_nodes,
            width or "auto",
            self.num_ranks,
            self.block_size - 1,
        )

    def make_candidates(self, **more) -> DraftCandidates:
        return DraftCandidates(
            lm_head=unwrap_lora_layer(self.target_worker.model_runner.model.lm_head),
            block_size=int(self.block_size),
            num_ranks=self.num_ranks,
            tp_group=get_parallel().tp_group,
            device=torch.device(self.device),
            **more,
        )

    def init_attention_backends(self):
        super().init_attention_backends()
        self.kv_buffers = kv_buffers_of(self.model_runner.token_to_kv_pool)
        refuse_verify_backend(verify_backend_of(self.model_runner.attn_backend))

    def init_cuda_graphs(self):
        super().init_cuda_graphs()
        options = self.budget.options
        if self.is_adaptive:
            options = options_up_to(self.num_nodes, int(self.block_size))
        if torch.device(self.device).type != "cpu":
            self.widths.capture(option.width for option in options)
        if self.is_adaptive:
            self.budget = AdaptiveBudget(options, cost_table(self, options))
        self.option_codes = option_codes(
            self.budget.options if self.is_adaptive else (), torch.device(self.device)
        )
        self.report = DDTreeReport(self.budget, self.num_ranks, report_labels())

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        self.budget.forget(rid)

    # What of the parent assumes a chain.

    def _defer_target_verify_gather(self):
        return None  # acceptance reads the logits of every node

    def _maybe_build_draft_sampler(self):
        """The tail of the draft graph: the parent's takes the best token alone."""
        candidates = self.make_candidates(
            max_batch_size=max(get_exec().graph.cuda_graph_config.decode.bs)
        )
        if not is_capture_safe(candidates.lm_head):
            logger.info("DDTREE: the lm_head is quantised; candidates stay eager.")
            return None
        return candidates

    def _validate_phase1_sampling_support(self, batch: ScheduleBatch) -> None:
        """The parent warns here that it cannot sample. A node's token is sampled from
        the target's distribution as plain decoding adjusts it, but for penalties:
        inside a tree they are those of tokens committed before (ddtree_penalties)."""

    def _make_next_draft_input_prefill(self, **fields) -> DDTreeDraftInput:
        return DDTreeDraftInput.of(super()._make_next_draft_input_prefill(**fields))

    def _make_next_draft_input_decode(self, **fields) -> DDTreeDraftInput:
        return DDTreeDraftInput.of(super()._make_next_draft_input_decode(**fields))

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
            self.report.start(batch.reqs)
            # Requests that decode in a mixed step come last, and keep their rows.
            forget_told(batch.reqs[: len(batch.reqs) - len(batch.decoding_reqs or ())])
            return super().forward_batch_generation(
                batch, on_publish, grammar_barrier, pp_proxy_tensors
            )
        step = self.plan_step(batch, self.choose(batch))
        log_probs, ids = self.draft_candidates(step)
        tree = self.build_tree(step, log_probs, ids)
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
            tree.tokens, tree.parents, wanted, step.max_path
        )
        new_seq_lens = step.prefix_lens + accepted.accept_len
        if on_publish is not None:
            on_publish(new_seq_lens)
        self.fill_logprobs(step, accepted, wanted, logits)
        self.commit(step, accepted, logits.hidden_states)
        logits.hidden_states = None  # keeps it out of the copy to the host
        logits.auxiliary_device_output = self.count(
            step, tree, log_probs, ids, accepted
        )
        return GenerationBatchResult(
            logits_output=logits,
            next_token_ids=accepted.out_tokens.reshape(-1),
            accept_lens=accepted.accept_len,
            can_run_cuda_graph=verified.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=accepted.bonus, new_seq_lens=new_seq_lens
            ),
            speculative_num_draft_tokens=step.num_nodes,
            speculative_output_stride=step.max_path,
            new_seq_lens=new_seq_lens,
            routed_experts_output=verified.routed_experts_output,
            indexer_topk_output=verified.indexer_topk_output,
        )

    def choose(self, batch: ScheduleBatch) -> Decision:
        rids = [req.rid for req in batch.reqs]
        _, total = host_lens(batch, batch.spec_info, 0)
        return self.budget.choose(rids, total // max(len(rids), 1))

    def plan_step(self, batch: ScheduleBatch, decision: Decision) -> TreeStep:
        carried = batch.spec_info
        if not isinstance(carried, DFlashDraftInputV2):
            raise RuntimeError(
                "DDTREE: the running batch carries "
                f"{type(carried).__name__} instead of DFlashDraftInputV2."
            )
        block_size = int(self.block_size)
        window = max(decision.option.width, block_size)
        max_lens_cpu, max_lens_sum = host_lens(batch, carried, window)
        root = carried.bonus_tokens.view(-1)
        block_ids = block_of_masks(
            len(root), block_size, int(self._mask_token_id), root.device
        )
        positions = root.new_empty(len(root), window)
        # The scheduler reserved the slots and wrote them behind the prefix.
        plan = self.model_runner.kv_index_translator.plan_uniform_extend(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=(
                max_lens_cpu if batch.seq_lens_cpu is None else batch.seq_lens_cpu
            ),
            width=window,
            positions_out=positions,
            anchor_src=root,
            anchor_out=block_ids,
        )
        return TreeStep(
            batch=batch,
            carried=carried,
            decision=decision,
            block_size=block_size,
            prefix_lens=batch.seq_lens,
            max_lens_cpu=max_lens_cpu,
            max_lens_sum=max_lens_sum,
            plan=plan,
            positions=positions,
            block_ids=block_ids,
            learns=self.budget.learns(decision.option),
        )

    def draft_candidates(self, step: TreeStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and token ids, both [b, L - 1, K], best first. After a graph
        they are its buffers: read them before the next step drafts."""
        with torch.inference_mode(), draft_tp_context(self.draft_parallel_layout):
            drafted = self.draft_model_runner.forward(draft_forward_batch(self, step))
            if self._draft_sampler is not None and drafted.can_run_graph:
                return self._draft_sampler.captured(step.batch_size)
            return self.candidates.of(drafted.logits_output.hidden_states)

    def build_tree(
        self, step: TreeStep, log_probs: torch.Tensor, ids: torch.Tensor
    ) -> DraftTree:
        option, root = step.decision.option, step.root
        if not option.is_chain:
            return sgl_kernel_sm120.ddtree_build(
                root,
                ids,
                log_probs,
                option.width,
                min_log_prob=step.decision.min_log_prob,
                num_paths=self.num_nodes if self.is_adaptive else None,
            )
        chain = chain_tree(root, ids, option.width)
        if not step.learns:
            return chain
        # What trees would bring is learnt while the chain is verified, too.
        paths = sgl_kernel_sm120.ddtree_build(
            root, ids, log_probs, 1, num_paths=self.num_nodes
        )
        return chain._replace(path_log_probs=paths.path_log_probs)

    def count(
        self,
        step: TreeStep,
        tree: DraftTree,
        log_probs: torch.Tensor,
        ids: torch.Tensor,
        accepted: Acceptance,
    ) -> StepCounts:
        codes = self.option_codes if step.learns else self.option_codes[:0]
        counts = sgl_kernel_sm120.tree_count(
            tree, ids, log_probs, accepted, step.num_nodes, codes
        )
        return StepCounts(self.report, step.decision.option, counts)

    def verify(self, step: TreeStep, tree: DraftTree) -> GenerationBatchResult:
        with self.widths.use(step.num_nodes):
            return self.verify_tree(step, tree)

    def verify_tree(self, step: TreeStep, tree: DraftTree) -> GenerationBatchResult:
        batch = step.batch
        mask, mask_mode = self.tree_mask(step, tree)
        columns = None if step.window == step.num_nodes else slice(0, step.num_nodes)
        verify_input = DDTreeVerifyInput(
            draft_token=tree.tokens.reshape(-1),
            positions=step.node_positions(tree),
            draft_token_num=step.num_nodes,
            custom_mask=mask,
            tree_mask_mode=mask_mode,
            max_tree_depth=step.max_path,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=step.plan,
            kv_loc_cols=columns,
        )
        batch.out_cache_loc = step.plan.virtual_write_ids(cols=columns)
        kept = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu = step.max_lens_cpu
        batch.seq_lens_sum = step.max_lens_sum
        forward_batch, _ = verify_input.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = kept
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
        # Stock backends know one layout.
        mode = getattr(backend, "tree_mask_mode", TreeMaskMode.FULL_MASK)
        mask = tree.visible.flatten()
        if mode == TreeMaskMode.FULL_MASK:
            max_cells = step.max_lens_sum * step.num_nodes
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
        adjust_logits(logits, info, step.num_nodes, grammar_mask)
        wanted = target_tokens(
            logits,
            info,
            None if info.is_all_greedy else step.node_positions(tree),
            step.num_nodes,
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
        info = step.batch.sampling_info
        if info.sampling_mask_batch_indices is None and not step.batch.return_logprob:
            return
        rows = node_rows(accepted.path, step.num_nodes)
        if info.sampling_mask_batch_indices is not None:
            capture = SpeculativeSamplingMaskCapture.from_logits(
                info,
                next_token_logits=logits.next_token_logits[rows.flatten()],
                draft_input=step.carried,
                draft_token_num=step.max_path,
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
        hidden = hidden.reshape(-1, hidden.shape[-1])
        slots = step.plan.write_ids(self.model_runner.kv_index_translator)
        draft_ids = self._draft_write_ids(step.plan)
        draft_slots = step.of_path(draft_ids)
        if not step.decision.option.is_chain:  # whose path is where it belongs
            front = draft_slots if draft_ids is slots else step.of_path(slots)
            slots = slots.long().view(step.positions.shape)
            # The path is padded with column numbers: past its end a slot keeps its KV.
            sgl_kernel_sm120.kv_move_all_layers(
                self.kv_buffers,
                front.long().flatten(),
                slots.gather(1, accepted.path).flatten(),
            )
            hidden = hidden[node_rows(accepted.path, step.num_nodes).flatten()]
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden,
            cache_loc=draft_slots.flatten(),
            cache_loc_2d=draft_slots,
            positions=step.of_path(step.positions).flatten(),
            commit_lens=accepted.accept_len,
        )
