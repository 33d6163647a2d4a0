# SPDX-License-Identifier: Apache-2.0
"""The launch command that a plan stands for."""

from __future__ import annotations

from sglang.kdtree.plan.solve import Wish

KV_FLAG = {"bf16": "auto", "fp8": "fp8_e4m3"}
ENVIRONMENT = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def launch_flags(
    wish: Wish, *, fraction: float, model: str, draft: str | None
) -> list[tuple[str, str]]:
    flags = [
        ("--model-path", model),
        *([("--trust-remote-code", "")] if wish.target.brings_code else []),
        ("--tp-size", str(wish.gpus)),
        ("--attention-backend", wish.backend),
        ("--mem-fraction-static", f"{fraction:g}"),
        ("--context-length", str(wish.context)),
        ("--max-running-requests", str(wish.max_requests)),
        ("--chunked-prefill-size", str(wish.chunk)),
        ("--page-size", str(wish.page_size)),
    ]
    if wish.kv_dtype != "bf16":
        flags.append(("--kv-cache-dtype", KV_FLAG[wish.kv_dtype]))
    if wish.attention_dp > 1:
        flags += [("--dp-size", str(wish.attention_dp)), ("--enable-dp-attention", "")]
    if wish.expert_parallel > 1:
        flags.append(("--ep-size", str(wish.expert_parallel)))
    if wish.redundant_experts:
        flags.append(("--ep-num-redundant-experts", str(wish.redundant_experts)))
    if wish.drafter and draft:
        flags += [
            ("--speculative-algorithm", "DDTREE"),
            ("--speculative-draft-model-path", draft),
            ("--speculative-num-draft-tokens", str(wish.tree_size)),
        ]
    return flags


def shell_command(flags: list[tuple[str, str]]) -> str:
    head = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
    lines = [f"{head} python -m sglang.launch_server"]
    lines += [f"  {name} {value}".rstrip() for name, value in flags]
    return " \\\n".join(lines)
