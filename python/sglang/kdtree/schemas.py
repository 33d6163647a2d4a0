# SPDX-License-Identifier: Apache-2.0
"""JSON schemas (draft 2020-12) of what each verb prints with --json, and the verb that prints them."""

from __future__ import annotations

import argparse
from typing import Any

from sglang.kdtree.result import Result, dump_json

STRING = {"type": "string"}
BOOLEAN = {"type": "boolean"}
NUMBER = {"type": "number"}
INTEGER = {"type": "integer"}
COUNT = {"type": "integer", "minimum": 0}
SHARE = {"type": "number", "minimum": 0, "maximum": 1}
NOTHING = {"type": "null"}


def optional(schema: dict) -> dict:
    return {"anyOf": [schema, NOTHING]}


def array(items: dict) -> dict:
    return {"type": "array", "items": items}


def record(**properties: dict) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def mapping(values: dict) -> dict:
    return {"type": "object", "additionalProperties": values}


def document(verb: str, **properties: dict) -> dict:
    schema = record(
        schema={"const": f"sglang.kdtree/{verb}/1"},
        exit_code={"enum": [0, 1, 2]},
        **properties,
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": verb,
        **schema,
    }


PERCENTILES = record(p50=NUMBER, p90=NUMBER)
SERVER = record(
    url=STRING,
    api={"enum": ["sglang", "completions", "chat"]},
    model=STRING,
    engine={"enum": ["sglang", "openai-compatible"]},
    version=optional(STRING),
    max_model_len=optional(COUNT),
    speculative_algorithm=optional(STRING),
    num_draft_tokens=optional(COUNT),
    attention_backend=optional(STRING),
    page_size=optional(COUNT),
)
DEVIATION = record(max_abs=NUMBER, relative=NUMBER, rows_over_ulp=COUNT, finite=BOOLEAN)
MEANS = record(
    samples=COUNT,
    sm_pct=NUMBER,
    memory_pct=NUMBER,
    power_w=NUMBER,
    power_limit_w=NUMBER,
    sm_clock_mhz=NUMBER,
    pcie_rx_mb_s=optional(NUMBER),
    pcie_tx_mb_s=optional(NUMBER),
    nvlink_rx_mb_s=optional(NUMBER),
    nvlink_tx_mb_s=optional(NUMBER),
)
REGIME = record(
    name={
        "enum": [
            "host-bound",
            "bandwidth-bound",
            "compute-bound",
            "latency-bound",
            "mixed",
        ]
    },
    reasoning=STRING,
    remedy=STRING,
)
VERIFY_OFFLINE = document(
    "probe-verify",
    mode={"const": "offline"},
    limit=NUMBER,
    wrong=COUNT,
    reproducers=array(
        record(
            file=STRING,
            layer=COUNT,
            context=COUNT,
            s_q=COUNT,
            h_q=COUNT,
            mask_layout=STRING,
            kdtree=DEVIATION,
            upstream=DEVIATION,
            verdict={
                "enum": ["both-right", "kdtree-wrong", "upstream-wrong", "both-wrong"]
            },
        )
    ),
)
VERIFY_ONLINE = document(
    "probe-verify",
    mode={"const": "online"},
    server=SERVER,
    steps=COUNT,
    rows_compared=COUNT,
    rows_over_ulp=COUNT,
    mismatches=COUNT,
    max_abs_error=optional(NUMBER),
    mean_rel_error=optional(NUMBER),
)

SCHEMAS: dict[str, dict] = {
    "doctor": document(
        "doctor",
        counts=record(OK=COUNT, WARN=COUNT, FAIL=COUNT),
        checks=array(
            record(
                name=STRING,
                status={"enum": ["OK", "WARN", "FAIL"]},
                detail=STRING,
                remedy=STRING,
            )
        ),
    ),
    "plan": document(
        "plan",
        fits=BOOLEAN,
        reason=STRING,
        mem_fraction_static=NUMBER,
        pool=record(tokens=COUNT, wanted_tokens=COUNT, page_size=COUNT),
        bytes_per_token_per_rank=record(
            target=COUNT, drafter=COUNT, used_for_the_pool=COUNT
        ),
        rank_bytes=record(
            gpu_total=COUNT,
            free_before_load=INTEGER,
            resident=COUNT,
            kv_pool=COUNT,
            slack=INTEGER,
            margin=INTEGER,
        ),
        weights=array(record(part=STRING, params=COUNT, bits=NUMBER, rank_bytes=COUNT)),
        checkpoint_bytes=record(target=COUNT, drafter=COUNT),
        late_allocations=mapping(COUNT),
        observations=array(
            record(
                mem_fraction_static=NUMBER,
                observed_tokens=COUNT,
                planned_tokens=COUNT,
                relative_error=NUMBER,
            )
        ),
        calibrations=array(
            record(
                free_bytes=INTEGER,
                resident_bytes=INTEGER,
                cell_bytes=NUMBER,
                assumed={"enum": ["cell", "free", "resident", "none"]},
                contradiction=STRING,
                used=BOOLEAN,
            )
        ),
        assumptions=array(
            record(
                what=STRING,
                kind={
                    "enum": ["derived", "assumed", "calibrated", "observed", "left out"]
                },
                why=STRING,
            )
        ),
        warnings=array(STRING),
        alternatives=array(
            record(change=STRING, mem_fraction_static=NUMBER, pool_tokens=COUNT)
        ),
        command=record(
            environment=mapping(STRING),
            flags=array(
                {"type": "array", "items": STRING, "minItems": 2, "maxItems": 2}
            ),
            shell=STRING,
        ),
    ),
    "bench-longctx": document(
        "bench-longctx",
        label=STRING,
        server=SERVER,
        settings=record(
            contexts=array(COUNT),
            texts=array({"enum": ["code", "prose", "phrase"]}),
            output_tokens=COUNT,
            repeats=COUNT,
            temperature=NUMBER,
            seed=INTEGER,
            nonce=STRING,
        ),
        rows=array(
            record(
                text={"enum": ["code", "prose", "phrase"]},
                context=COUNT,
                prompt_tokens=COUNT,
                cached_tokens=optional(COUNT),
                repeats=COUNT,
                ttft_s=PERCENTILES,
                prefill_tok_s=PERCENTILES,
                decode_tok_s=PERCENTILES,
                step_ms=PERCENTILES,
                accept_length=PERCENTILES,
                distinct_4grams=optional(SHARE),
            )
        ),
        skipped=array(record(text=STRING, context=COUNT, why=STRING)),
        warnings=array(STRING),
    ),
    "bench-compare": document(
        "bench-compare",
        **{
            side: record(
                file=STRING,
                label=STRING,
                model=STRING,
                version=optional(STRING),
                attention_backend=optional(STRING),
                speculative_algorithm=optional(STRING),
                num_draft_tokens=optional(COUNT),
            )
            for side in ("a", "b")
        },
        differs=array(STRING),
        rows=array(
            record(
                text=STRING,
                context=COUNT,
                decode_tok_s=array(NUMBER),
                decode_ratio=NUMBER,
                step_ratio=NUMBER,
                prefill_ratio=NUMBER,
                accept_length=array(NUMBER),
            )
        ),
        slower=COUNT,
    ),
    "bench-throughput": document(
        "bench-throughput", command=array(STRING), returncode=INTEGER
    ),
    "probe-commit-length": document(
        "probe-commit-length",
        server=SERVER,
        skipped_contexts=array(COUNT),
        points=array(
            record(
                text=STRING,
                context=COUNT,
                prompt_tokens=COUNT,
                steps=COUNT,
                commit_length=NUMBER,
                accepted_drafts=optional(NUMBER),
                proposed_drafts=optional(NUMBER),
                histogram=optional(array(COUNT)),
                follows_phrase=optional(SHARE),
            )
        ),
        verdict=record(
            name={
                "enum": [
                    "healthy",
                    "text-too-hard",
                    "drafter-loses-context",
                    "drafter-or-bug",
                    "inconclusive",
                ]
            },
            is_finding=BOOLEAN,
            reasoning=STRING,
            remedy=STRING,
        ),
    ),
    "probe-gpu": document(
        "probe-gpu",
        driver=STRING,
        gpus=array(record(index=COUNT, name=STRING)),
        phases=mapping(record(means=MEANS, regime=REGIME)),
        decode=optional(
            record(
                context=COUNT,
                step_ms=NUMBER,
                decode_tok_s=NUMBER,
                accept_length=NUMBER,
                kv_bytes_per_token_per_rank=optional(COUNT),
                effective_kv_gb_s=optional(NUMBER),
                peak_gb_s=optional(NUMBER),
                share_of_peak=optional(NUMBER),
            )
        ),
    ),
    "probe-moe": document(
        "probe-moe",
        source=STRING,
        steps=COUNT,
        layers=array(COUNT),
        experts=COUNT,
        ranks=COUNT,
        tokens_per_step=NUMBER,
        expert_read_us=optional(NUMBER),
        activated_per_rank=array(NUMBER),
        worst_layers=array(record(layer=COUNT, lost_share=SHARE)),
        scenarios=array(
            record(
                name=STRING,
                activated_mean=NUMBER,
                slowest_mean=NUMBER,
                idle_share=SHARE,
                lost_share=SHARE,
                time_per_step=NUMBER,
                relative_time=optional(NUMBER),
                lost_us_per_step=optional(NUMBER),
            )
        ),
    ),
    "probe-verify": {"oneOf": [VERIFY_OFFLINE, VERIFY_ONLINE]},
    "schema": mapping({}),
    "error": record(
        schema={"const": "sglang.kdtree/error/1"},
        exit_code={"const": 2},
        error=record(what=STRING, expected=STRING, got=STRING, remedy=STRING),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", choices=sorted(SCHEMAS), help="the verb, for example probe-moe"
    )


def run(args: argparse.Namespace, console: Any) -> Result:
    del console
    return Result(verb="schema", data={"json_schema": SCHEMAS[args.name]})


def render(result: Result, console: Any) -> None:
    del console
    print(dump_json(result.data["json_schema"]))
