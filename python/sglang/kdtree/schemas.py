# SPDX-License-Identifier: Apache-2.0
"""JSON schemas (draft 2020-12) of what each verb prints with --json, and the verb that prints them."""

from __future__ import annotations

import argparse
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from sglang.kdtree.bench import client, text
from sglang.kdtree.doctor.check import FAIL, OK, WARN, Finding
from sglang.kdtree.plan.calibrate import Calibration
from sglang.kdtree.probe import commit_length, moe_model, regime, verify
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


def with_more(schema: dict, **properties: dict) -> dict:
    return record(**schema["properties"], **properties)


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


def of(struct: type, *without: str, **given: dict) -> dict:
    """The record of a struct's fields by their types, except those given or left out."""
    hints = {k: v for k, v in get_type_hints(struct).items() if k not in without}
    return record(**{name: given.get(name) or by_type(t) for name, t in hints.items()})


def by_type(hint: Any) -> dict:
    choices = get_args(hint)
    if type(None) in choices:
        return optional(by_type(next(t for t in choices if t is not type(None))))
    if get_origin(hint) is list:
        return array(by_type(choices[0]))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return of(hint)
    return {str: STRING, bool: BOOLEAN, int: COUNT, float: NUMBER}[hint]


PERCENTILES = record(p50=NUMBER, p90=NUMBER)
API = {"enum": list(client.APIS)}
TEXT = {"enum": list(text.KINDS)}
SERVER = of(
    client.ServerFacts, "raw", api=API, engine={"enum": ["sglang", "openai-compatible"]}
)
VERIFY_OFFLINE = document(
    "probe-verify",
    mode={"const": "offline"},
    limit=NUMBER,
    wrong=COUNT,
    reproducers=array(of(verify.Judgement, verdict={"enum": list(verify.VERDICTS)})),
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
        counts=record(**dict.fromkeys((OK, WARN, FAIL), COUNT)),
        checks=array(of(Finding, status={"enum": [OK, WARN, FAIL]})),
    ),
    "plan": document(
        "plan",
        fits=BOOLEAN,
        reason=STRING,
        mem_fraction_static=NUMBER,
        pool=record(
            tokens=COUNT,
            wanted_tokens=COUNT,
            page_size=COUNT,
            by_accounting=mapping(COUNT),
        ),
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
            with_more(
                of(
                    Calibration,
                    free_bytes=INTEGER,
                    resident_bytes=INTEGER,
                    assumed={"enum": ["cell", "free", "resident", "none"]},
                ),
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
            texts=array(TEXT),
            output_tokens=COUNT,
            repeats=COUNT,
            temperature=NUMBER,
            seed=INTEGER,
            nonce=STRING,
        ),
        rows=array(
            record(
                text=TEXT,
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
            of(commit_length.Point, text=TEXT, follows_phrase=optional(SHARE))
        ),
        verdict=of(commit_length.Verdict, name={"enum": list(commit_length.VERDICTS)}),
    ),
    "probe-gpu": document(
        "probe-gpu",
        driver=STRING,
        gpus=array(record(index=COUNT, name=STRING)),
        phases=mapping(
            record(
                means=of(regime.Means),
                regime=of(regime.Regime, name={"enum": list(regime.NAMES)}),
            )
        ),
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
            with_more(
                of(moe_model.Cost, idle_share=SHARE, lost_share=SHARE),
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
