# SPDX-License-Identifier: Apache-2.0
"""python -m one_rank.tune_experts: the tiles of upstream's fused MoE kernel for the experts that stand in.

    cd benchmark && python -m one_rank.tune_experts --out results/h200/expert_tiles.json     # on a GPU, under a minute

Upstream looks for tuned tiles in a file for each number of experts, width and GPU, with an entry a number of tokens,
and in a second file for the second product. Its own tuner is not in its wheel and wants a cluster of ray workers; this
one times the same kernel through the same call, for the tokens of this benchmark's steps. Tiles are compiled by several
processes side by side and then timed by one: a CUDA graph over the weights of several layers, more than the L2 holds.
--out gets every time, --tiles (tuned/ beside this file) the two files, which every arm reads. Each result is compared
with torch first.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import itertools
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from verify_bench import result_file

from . import experts
from .experts import PRODUCTS
from .shapes import SCALES

HERE = Path(__file__).resolve().parent
FORMAT = "expert_tiles-1"
HEADER_KEYS = {
    "format": str, "date": str, "commit": str, "gpu": dict, "versions": dict, "copy_gbps": (int, float),
    "experts": int, "width": int, "hidden": int,
}  # fmt: skip
ROW_KEYS = {
    "product": str, "tokens": int, "tiles": dict, "us_p20": (int, float), "us_p50": (int, float),
    "us_p80": (int, float), "bytes": int, "chosen": bool,
}  # fmt: skip
MISSING_KEYS = {"product": str, "tokens": int, "tiles": dict, "reason": str}

TOKENS = (1, 9, 17, 33)  # plain decoding and trees; a chain of 8 finds the nearest
LAYERS = 4  # of weights to rotate over
WORKERS = 14
TOLERANCE = 2.0**-6  # of the largest element: bf16 sums in another order


def candidates(product: str, tokens: int) -> list[dict[str, int]]:
    """Reading weights needs many bytes on their way: small tiles for many blocks, or long ones with more stages."""
    widths, depths = {"up": ((16, 32, 64), (64, 128, 256)), "down": ((32, 64, 128), (64, 128, 256))}[product]
    found = [experts.SMALL]
    for rows in (16, 32, 64):
        if rows > 16 and rows >= 2 * tokens:
            continue
        for n, k, warps in itertools.product(widths, depths, (4, 8)):
            if warps == 8 and n < 64:
                continue
            for stages in (3, 4, 5) if product == "up" else (2, 3, 4):
                # Behind its first 256 columns the second product has nothing to load ahead.
                if product == "down" and k == 256 and stages > 2:
                    continue
                if rows > 16 and (stages == 3 or k == 64):  # more tokens than one tile: a coarser search
                    continue
                found.append(
                    {
                        "BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 1,
                        "num_warps": warps, "num_stages": stages,
                    }
                )  # fmt: skip
    return found


@dataclasses.dataclass(eq=False)  # caches below go by identity
class Experts:
    """Weights of ``layers`` layers and a batch of which every token goes to every expert."""

    layers: int
    device: str
    experts: int
    width: int
    hidden: int
    dtype: str = "bfloat16"

    def __post_init__(self):
        import torch

        self.options = {"device": self.device, "dtype": getattr(torch, self.dtype)}

        def random(*shape):
            return torch.randn(*shape, **self.options) / shape[-1] ** 0.5

        torch.manual_seed(0)
        self.weights = {
            "up": [random(self.experts, 2 * self.width, self.hidden) for _ in range(self.layers)],
            "down": [random(self.experts, self.hidden, self.width) for _ in range(self.layers)],
        }

    def bytes(self, product: str) -> int:
        """That a layer reads whatever the number of tokens is."""
        return self.weights[product][0].nbytes

    @functools.lru_cache  # noqa: B019 (kept as long as the process)
    def batch(self, tokens: int) -> dict[str, Any]:
        import torch

        ids = torch.stack([torch.randperm(self.experts) for _ in range(tokens)]).to(self.device, torch.int32)
        shapes = {"up": (tokens, self.hidden), "down": (tokens * self.experts, self.width)}
        columns = {"up": 2 * self.width, "down": self.hidden}
        return {
            "ids": ids,
            "shares": torch.rand(tokens, self.experts, device=self.device),
            "inputs": {name: torch.randn(*shape, **self.options) for name, shape in shapes.items()},
            "outputs": {name: torch.zeros(tokens, self.experts, columns[name], **self.options) for name in PRODUCTS},
        }

    @functools.lru_cache  # noqa: B019
    def order(self, tokens: int, rows: int) -> tuple:
        from sglang.srt.layers.moe.moe_runner.triton_utils import moe_align_block_size

        return moe_align_block_size(self.batch(tokens)["ids"], rows, self.experts)

    def run(self, product: str, tokens: int, tiles: dict[str, int], layer: int = 0):
        """Upstream's kernel as its fused_experts calls it. -> [tokens, experts, columns]"""
        import triton.language as tl

        from sglang.kernels.ops.moe.fused_moe_triton_kernels import invoke_fused_moe_kernel

        batch = self.batch(tokens)
        output = batch["outputs"][product]
        order = self.order(tokens, tiles["BLOCK_SIZE_M"])
        invoke_fused_moe_kernel(
            batch["inputs"][product], self.weights[product][layer], None,
            output.view(-1, output.shape[-1]) if product == "up" else output, None, None, None,
            batch["shares"], batch["ids"], *order, product == "down", self.experts if product == "up" else 1, tiles,
            compute_type=getattr(tl, self.dtype), use_fp8_w8a8=False, use_int8_w8a8=False, use_int8_w8a16=False,
            use_int4_w4a16=False, per_channel_quant=False, filter_expert=False, router_topk=self.experts,
        )  # fmt: skip
        return output

    def expected(self, product: str, tokens: int, layer: int = 0):
        """The same in torch."""
        import torch

        batch, weights = self.batch(tokens), self.weights[product][layer].float()
        chosen = weights[batch["ids"].long()]
        if product == "up":
            return torch.einsum("th,tenh->ten", batch["inputs"][product].float(), chosen)
        inputs = batch["inputs"][product].float().view(tokens, self.experts, -1)
        return torch.einsum("bew,behw->beh", inputs, chosen) * batch["shares"][..., None]

    def reason_wrong(self, product: str, tokens: int, tiles: dict[str, int], expected) -> str | None:
        """Whether the kernel with these tiles gives what torch gives."""
        error = (self.run(product, tokens, tiles).float() - expected).abs().max() / expected.abs().max()
        return None if error < TOLERANCE else f"off by {float(error):.3g} of the largest element, over {TOLERANCE:.3g}"


def experts_of(model: dict[str, Any], device: str, layers: int = LAYERS) -> Experts:
    return Experts(layers, device, model["n_routed_experts"], model["moe_intermediate_size"], model["hidden_size"])


@functools.lru_cache
def worker_experts() -> Experts:
    return experts_of(SCALES["full"].model, "cuda", layers=1)


def compile_one(item: tuple[str, int, dict[str, int]]) -> str | None:
    """In a worker: fill Triton's cache. -> why these tiles do not run here"""
    product, tokens, tiles = item
    try:
        worker_experts().run(product, tokens, tiles)
    except Exception as error:  # out of shared memory, or not compiled
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}" if str(error) else repr(error)
    return None


def tune(items: list[tuple[str, int, dict[str, int]]], reasons: list[str | None], budget_ms: float) -> dict:
    """-> rows and not_available, on the GPU of this process"""
    import torch
    from verify_bench import timing

    model = experts_of(SCALES["full"].model, "cuda")
    expected = functools.lru_cache(maxsize=1)(model.expected)
    rows, missing = [], []
    for (product, tokens, tiles), reason in zip(items, reasons, strict=True):
        reason = reason or model.reason_wrong(product, tokens, tiles, expected(product, tokens))
        if reason is not None:
            missing.append({"product": product, "tokens": tokens, "tiles": tiles, "reason": reason})
            continue

        def call(layer, product=product, tokens=tokens, tiles=tiles):
            model.run(product, tokens, tiles, layer)

        measured = timing.measure(call, LAYERS, torch.device("cuda"), budget_ms=budget_ms, min_replays=3)
        rows.append(
            {
                "product": product, "tokens": tokens, "tiles": tiles, "us_p20": round(measured.p20, 3),
                "us_p50": round(measured.p50, 3), "us_p80": round(measured.p80, 3), "bytes": model.bytes(product),
                "chosen": False,
            }
        )  # fmt: skip
    return {"rows": rows, "not_available": missing}


def choose(rows: list[dict]) -> dict[str, dict[str, dict[str, int]]]:
    """Mark the fastest. Both products of a step share one order of its tokens, and so the rows of their tiles.
    -> product -> tokens -> tiles"""
    chosen: dict[str, dict[str, dict[str, int]]] = {product: {} for product in PRODUCTS}
    for tokens in sorted({row["tokens"] for row in rows}):
        best: dict[int, dict[str, dict]] = {}
        for row in rows:
            if row["tokens"] == tokens:
                of = best.setdefault(row["tiles"]["BLOCK_SIZE_M"], {})
                if row["product"] not in of or row["us_p50"] < of[row["product"]]["us_p50"]:
                    of[row["product"]] = row
        pairs = [of for of in best.values() if set(of) == set(PRODUCTS)]
        if not pairs:
            raise ValueError(f"no tiles ran for both products of {tokens} tokens")
        for product, row in min(pairs, key=lambda of: sum(row["us_p50"] for row in of.values())).items():
            row["chosen"] = True
            chosen[product][str(tokens)] = row["tiles"]
    return chosen


def problems(data: dict) -> list[str]:
    """What is wrong with a result file; empty when it is one."""
    found, rows = result_file.field_problems(
        data, format=FORMAT, header_keys=HEADER_KEYS, row_keys=ROW_KEYS, missing_keys=MISSING_KEYS
    )
    chosen = [(row["tokens"], row["product"]) for _, row in rows if row["chosen"]]
    if not found and sorted(chosen) != sorted({(row["tokens"], p) for _, row in rows for p in PRODUCTS}):
        found.append("not one row of each product is chosen for each number of tokens")
    return found


def load(path: Path) -> dict:
    return result_file.load(path, problems)


def table(data: dict) -> tuple[list[str], list[list[str]]]:
    """What a layer's experts read, what that takes at the speed of a copy, and what they take."""
    columns = ["tokens", "weights read, MB", "at the speed of a copy, us", "small tiles, us", "tuned, us", "TB/s"]
    columns += [f"{product}: rows x columns x depth, warps, stages" for product in PRODUCTS]
    lines = []
    for tokens in sorted({row["tokens"] for row in data["rows"]}):
        rows = [row for row in data["rows"] if row["tokens"] == tokens]
        tuned = {row["product"]: row for row in rows if row["chosen"]}
        small = {row["product"]: row for row in rows if row["tiles"] == experts.SMALL}
        size = sum(row["bytes"] for row in tuned.values())
        us = sum(row["us_p50"] for row in tuned.values())
        lines.append(
            [
                f"{tokens}", f"{size / 1e6:.0f}", f"{size / data['header']['copy_gbps'] / 1e3:.1f}",
                f"{sum(row['us_p50'] for row in small.values()):.1f}" if set(small) == set(PRODUCTS) else "-",
                f"{us:.1f}", f"{size / us / 1e6:.2f}", *(describe(tuned[product]["tiles"]) for product in PRODUCTS),
            ]
        )  # fmt: skip
    return columns, lines


def describe(tiles: dict[str, int]) -> str:
    shape = " x ".join(str(tiles[f"BLOCK_SIZE_{axis}"]) for axis in "MNK")
    return f"{shape}, {tiles['num_warps']}, {tiles['num_stages']}" if "num_warps" in tiles else shape


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the result file")
    parser.add_argument("--tiles", type=Path, default=experts.TUNED, help="the folder that gets upstream's two files")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--budget-ms", type=float, default=12.0, help="of a product with some tiles, about")
    parser.add_argument("--workers", type=int, default=min(WORKERS, os.cpu_count() or 1), help="that compile")
    parser.add_argument("--commit", help="what the header says, where there is no git checkout")
    args = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        parser.error("no CUDA device; tiles are timed on the GPU that they are for")
    items = [(p, t, tiles) for t in sorted(args.tokens) for p in PRODUCTS for tiles in candidates(p, t)]
    # One item for each compiled kernel, which is the same for all of these numbers of tokens.
    with ProcessPoolExecutor(args.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        kernels = {(p, json.dumps(tiles)): (p, t, tiles) for p, t, tiles in reversed(items)}
        found = pool.map(compile_one, kernels.values())
        reason_of = dict(zip(kernels, found, strict=True))
    import triton
    from verify_bench.probes import copy_gbps
    from verify_bench.results import commit, gpu_info, versions_of

    model = SCALES["full"].model
    print(f"{len(kernels)} kernels compiled by {args.workers} processes", flush=True)
    data = tune(items, [reason_of[p, json.dumps(tiles)] for p, _, tiles in items], args.budget_ms)
    for reason in sorted({f"{m['product']}, {m['tokens']} tokens: {m['reason']}" for m in data["not_available"]}):
        print(reason, flush=True)
    chosen = choose(data["rows"])
    data["header"] = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": args.commit or commit(HERE.parent.parent),
        "gpu": gpu_info(),
        "versions": versions_of("sglang", "triton"),
        "copy_gbps": round(copy_gbps(), 1),
        "experts": model["n_routed_experts"],
        "width": model["moe_intermediate_size"],
        "hidden": model["hidden_size"],
    }
    result_file.save(args.out, data)
    for product in PRODUCTS:
        path = experts.place(args.tiles, model, torch.cuda.get_device_name(), triton.__version__, product)
        experts.write(path, chosen[product])
        print(f"wrote {path}")
    columns, lines = table(data)
    for line in (columns, *lines):
        print(" | ".join(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
