# SPDX-License-Identifier: Apache-2.0
"""Test aid, loaded by the server's processes: draft candidates that hide the true continuation at a low rank, and
requests that break one part of DDTREE on purpose.

The real drafter still runs. A request whose id begins with "mask-" or "move-" is served without the tree mask (the tree
is verified as a chain in node order), or without moving accepted KV; then the step must not be shared with sound ones.
"""

import json
import os

import torch

GENERATOR = torch.Generator().manual_seed(3)
MISSING = 0.1  # share of positions where the truth is not among the candidates at all
RANKS = 3  # else it is one of the best three


def hide_truth(ids, log_probs, full, position):
    """Candidates of one request, in place. full: prompt and answer; position: of the first draft token."""
    depths, ranks = ids.shape
    for depth in range(depths):
        ids[depth] = torch.randperm(1900, generator=GENERATOR)[:ranks] + 100
        at = position + depth
        if at < len(full) and torch.rand((), generator=GENERATOR) > MISSING:
            ids[depth] = torch.where(ids[depth] == full[at], 99, ids[depth])
            ids[depth, int(torch.randint(0, min(RANKS, ranks), (), generator=GENERATOR))] = full[at]
    log_probs[:] = torch.linspace(-0.7, -9, ranks)


def install():
    import sglang.srt.speculative.spec_info  # noqa: F401  registers the algorithm first
    from sglang.srt.speculative import ddtree_worker

    worker = ddtree_worker.DDTreeWorker
    with open(os.environ["ORACLE_TRUTH"]) as file:
        truth = [prompt + answer for prompt, answer in json.load(file)]
    candidates, verify, commit = worker.draft_candidates, worker.verify, worker.commit

    def broken(step, part):
        return any(request.rid.startswith(f"{part}-") for request in step.batch.reqs)

    def oracle_candidates(self, step):
        log_probs, ids = (tensor.clone() for tensor in candidates(self, step))
        for row, request in enumerate(step.batch.reqs):
            prompt = list(request.origin_input_ids)
            full = next((known for known in truth if known[: len(prompt)] == prompt), None)
            if full is not None:  # the server's own warm-up request is drafted as usual
                hide_truth(ids[row], log_probs[row], full, int(step.prefix_lens[row]) + 1)
        return log_probs, ids

    def chain_verify(self, step, tree):
        if broken(step, "mask"):
            tree = tree._replace(visible=torch.ones_like(tree.visible).tril())
        return verify(self, step, tree)

    def motionless_commit(self, step, accepted, hidden):
        buffers = self.kv_buffers
        if broken(step, "move"):
            self.kv_buffers = []
        commit(self, step, accepted, hidden)
        self.kv_buffers = buffers

    worker.draft_candidates, worker.verify, worker.commit = oracle_candidates, chain_verify, motionless_commit
