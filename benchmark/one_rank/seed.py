# SPDX-License-Identifier: Apache-2.0
"""Puts a long context into a server at once. Loaded as a plugin by the server's processes; see ``plugin_folder``.

When the scheduler has been built, slots for ONE_RANK_SEED tokens are taken from its allocator, all KV buffers (the
drafter's too) are filled with noise, and a fixed path of tokens is put into the prefix cache with these slots. A prompt
that begins with the path then has a cached prefix of real slots and real rows of req_to_token, and only its tail is
prefilled. The noise makes attention as costly as any other content would.
"""

from __future__ import annotations

import os
import random
from array import array
from pathlib import Path

TOKENS_VARIABLE = "ONE_RANK_SEED"
TILES_VARIABLE = "SGLANG_MOE_CONFIG_DIR"  # see experts.py
FIRST_ID = 8  # below are special tokens


def path_ids(count: int, vocab_size: int, seed: int = 1) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(FIRST_ID, vocab_size) for _ in range(count)]


def plugin_folder(folder: Path) -> Path:
    """Make ``folder`` one that, on PYTHONPATH, has every process of a server load this file."""
    name = "one_rank_seed"
    info = folder / f"{name}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(Path(__file__).read_text())
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:install\n")
    return folder


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", after_init, HookType.AFTER)


def after_init(result, scheduler, *args, **kwargs):
    seed(scheduler, int(os.environ[TOKENS_VARIABLE]))
    return result


def seed(scheduler, count: int) -> None:
    import torch

    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    count -= count % allocator.page_size
    # EAGLE's cache is keyed by pairs of tokens: one more token for as many slots.
    pairs = bool(tree.tree_core.is_eagle)
    ids = path_ids(count + pairs, scheduler.model_config.vocab_size)
    slots = allocator.alloc(count)
    key = RadixKey(array("q", ids), None, is_bigram=pairs)
    tree.insert(InsertParams(key=key, value=slots.to(torch.int64)))
    runners = [scheduler.tp_worker.model_runner]
    if scheduler.draft_worker is not None:
        runners += scheduler.draft_worker._draft_model_runners()
    for runner in runners:
        pool = runner.token_to_kv_pool
        for name in ("kv_buffer", "k_buffer", "v_buffer"):
            for buffer in getattr(pool, name, None) or ():
                fill_with_noise(buffer)
    if TILES_VARIABLE in os.environ:
        check_tiles(scheduler.tp_worker.model_runner.model)
    print(f"one_rank: {count} tokens seeded, {len(runners)} KV pools filled", flush=True)


def check_tiles(model) -> None:
    """Upstream falls back to its rule where it finds no file of the experts' shape; a measurement must not."""
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import get_moe_configs

    shapes = {tuple(m.w2_weight.shape) for m in model.modules() if hasattr(m, "w2_weight")}
    if not shapes:
        raise RuntimeError("one_rank: the model has no fused experts")
    for experts, _, width in shapes:
        for down in (False, True):
            if not get_moe_configs(experts, width, None, 0, 0, per_channel_quant=False, down_moe=down):
                raise RuntimeError(
                    f"one_rank: no tiles of {experts} experts of width {width} under "
                    f"{TILES_VARIABLE}={os.environ.get(TILES_VARIABLE)}, expected the files of tune_experts.py"
                )


def fill_with_noise(buffer) -> None:
    if buffer.dtype.is_floating_point and buffer.dtype.itemsize > 1:
        buffer.normal_()
    else:  # bytes that as e4m3 are numbers below 2
        import torch

        buffer.view(torch.uint8).random_(0, 0x40)
