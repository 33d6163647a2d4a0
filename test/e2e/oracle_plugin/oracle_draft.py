# SPDX-License-Identifier: Apache-2.0
"""Test aid, loaded by the server's processes: draft candidates that hide the true continuation at a low rank, and
requests that break one part of DDTREE on purpose.

The real drafter still runs. A request whose id begins with "mask-" or "move-" is served without the tree mask (the tree
is verified as a chain in node order), or without moving accepted KV; then the step must not be shared with sound ones.

The candidates of a position depend on the prompt and the position alone, so that every run, whatever its batches and
steps are, sees the same ones, and the verify steps can be counted without a server.
"""

import json
import os

import torch

SEED = 3
MISSING = 0.1  # share of positions where the truth is not among the candidates at all
RANKS = 3  # else it is one of the best three


def candidates_of(truth, row, position, depths, ranks):
    """int64 [depths, ranks], best first: candidates of prompt ``row`` at ``position`` and the positions behind it."""
    return torch.stack([candidates_at(truth[row], row, at, ranks) for at in range(position, position + depths)])


def candidates_at(full, row, at, ranks):
    """full: prompt and answer; at: a position in it, or past its end."""
    generator = torch.Generator().manual_seed((SEED * 1009 + row) * 1_000_003 + at)
    ids = torch.randperm(1900, generator=generator)[:ranks] + 100
    missing = torch.rand((), generator=generator) < MISSING
    rank = int(torch.randint(0, min(RANKS, ranks), (), generator=generator))
    if at < len(full) and not missing:
        ids = torch.where(ids == full[at], 99, ids)
        ids[rank] = full[at]
    return ids


def log_probs_of(depths, ranks):
    """float64 [depths, ranks], the same behind every position. No two paths are equally probable."""
    rank, depth = torch.arange(ranks, dtype=torch.float64), torch.arange(depths, dtype=torch.float64)
    return -(0.7 + 0.6 * rank**1.1) * (1 + 0.01 * depth[:, None])


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
            known = next((i for i, full in enumerate(truth) if full[: len(prompt)] == prompt), None)
            if known is not None:  # the server's own warm-up request is drafted as usual
                ids[row] = candidates_of(truth, known, int(step.prefix_lens[row]) + 1, *ids.shape[1:])
                log_probs[row] = log_probs_of(*ids.shape[1:])
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
