# SPDX-License-Identifier: Apache-2.0
"""DDTREE: a DFLASH drafter's block, verified as the tree of its most probable paths.

Importing this module registers the algorithm. It imports nothing of the runtime at the
top: it loads while arguments are parsed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

NAME = "DDTREE"


class DDTreeAlgo(CustomSpecAlgo):
    """A member of the DFLASH family whose draft block (L tokens) and verification (N tree
    nodes) differ in width."""

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def supports_mixed_chunk(self) -> bool:
        return True

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def get_platform_worker_cls(self) -> Optional[type]:
        return None

    def create_future_map(
        self,
        device,
        req_to_token_pool,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ):
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def get_num_tokens_per_req_for_target_verify(
        self, num_draft_tokens: int, is_draft_worker: bool
    ) -> int:
        from sglang.srt.runtime_context import get_spec

        if is_draft_worker:
            return get_spec().speculative_dflash_block_size
        return num_draft_tokens

    def handle_server_args(self, server_args: ServerArgs) -> None:
        from sglang.srt.speculative.ddtree_args import resolve_ddtree_args

        resolve_ddtree_args(server_args)


@SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=DDTreeAlgo)
def create_ddtree_worker(server_args: ServerArgs) -> type:
    from sglang.srt.speculative.ddtree_worker import DDTreeWorker

    return DDTreeWorker


def verifies_tree() -> bool:
    """Whether a verification of this server needs its mask on every attention backend."""
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_algorithm == NAME
