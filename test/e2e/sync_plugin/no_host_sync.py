# SPDX-License-Identifier: Apache-2.0
"""Test aid, loaded by a server's processes on a GPU: whatever waits for the device while a decode batch is launched,
from the batch to the copies of its results, is an error there. It ends the scheduler."""

import contextlib
import functools
import logging

WARM_STEPS = 32  # kernels are compiled and loaded

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def no_host_sync():
    import torch

    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_that_it_sees():
    import torch

    one = torch.ones(1, device="cuda")
    try:
        with no_host_sync():
            one.item()
    except RuntimeError:
        return
    raise AssertionError("torch's sync debug mode finds nothing")


def install():
    from sglang.srt.managers.scheduler import Scheduler

    run_batch, steps = Scheduler.run_batch, {"greedy": 0, "sampled": 0}

    @functools.wraps(run_batch)
    def watched(self, batch, *args, **kwargs):
        if not batch.forward_mode.is_decode():
            return run_batch(self, batch, *args, **kwargs)
        kind = "greedy" if batch.sampling_info.is_all_greedy else "sampled"
        steps[kind] += 1
        if steps[kind] <= WARM_STEPS:
            return run_batch(self, batch, *args, **kwargs)
        if steps[kind] == WARM_STEPS + 1:
            check_that_it_sees()
        with no_host_sync():
            result = run_batch(self, batch, *args, **kwargs)
        logger.info("no host sync in step %d (%s)", steps[kind] - WARM_STEPS, kind)
        return result

    Scheduler.run_batch = watched
