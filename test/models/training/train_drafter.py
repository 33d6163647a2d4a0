# SPDX-License-Identifier: Apache-2.0
"""Train the DFlash drafter on text that the frozen target continued itself, in a time box.

    python -m training.train_drafter DATA TARGET OUT --seconds 80

The pool mixes greedy rows and rows sampled at temperature 1, prompts from the corpus and tiled prompts
(so that the drafter learns to copy), and some rows of 4096 tokens. Loss: cross-entropy of the seven tokens
after an anchor, at the seven masked positions of its block; earlier positions weigh more.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.architecture import BLOCK_SIZE, CONTEXT_LENGTH, NUM_DRAFTS, Drafter, Target, generate
from training.checkpoint import load_target, save_drafter
from training.optimisation import Log, TimeBox, captured, descend, learning_rate, make_optimizer, set_rate
from training.rows import RowMix, sample_rows

POSITION_DECAY = 4.0  # weight of the k-th masked position: exp(-(k - 1) / 4)
ROW_LENGTH = 512
REPORT_EVERY = 500


@dataclass(frozen=True)
class Round:
    """Rows that the target continues: prompt length, row length, share decoded greedily, kind of prompt."""

    rows: int
    prompt: int
    length: int
    greedy: float
    tiled: bool = False


ROUNDS = (
    Round(4096, 256, ROW_LENGTH, 0.6),
    Round(4096, 128, ROW_LENGTH, 0.6),
    Round(4096, 384, ROW_LENGTH, 0.7),
    Round(4096, 384, ROW_LENGTH, 0.4),
    Round(4096, 32, ROW_LENGTH, 0.5),
    Round(4096, 224, ROW_LENGTH, 0.8, tiled=True),
)
LONG_ROUNDS = (
    Round(192, CONTEXT_LENGTH - 384, CONTEXT_LENGTH, 0.6),
    Round(64, CONTEXT_LENGTH - 384, CONTEXT_LENGTH, 0.8, tiled=True),
)


@dataclass
class Pool:
    """Token rows [n, s], their features [n, s, 2h], and the first and last usable anchor of each row."""

    rows: Tensor
    features: Tensor
    first: Tensor
    last: Tensor

    def draw(self, count: int, anchors: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random rows with random anchors: rows [count, s], features, anchors [count, anchors]."""
        device = self.rows.device
        index = torch.randint(self.rows.shape[0], (count,), device=device)
        span = (self.last[index] - self.first[index] + 1)[:, None]
        offset = (torch.rand(count, anchors, device=device) * span).long().minimum(span - 1)
        return self.rows[index], self.features[index], self.first[index][:, None] + offset


@torch.no_grad()
def make_pool(target: Target, stream: Tensor, rounds: tuple[Round, ...], log: Log) -> Pool:
    """Let the target continue prompts from the stream, and compute the features of the results."""
    device = stream.device
    box = TimeBox(1.0)
    rows, first, features = [], [], []
    amp = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)
    with amp:
        for spec in rounds:
            mix = RowMix(tiled=spec.rows) if spec.tiled else RowMix()
            prompts, _ = sample_rows(stream, spec.rows, spec.prompt, mix)
            temperature = (torch.rand(spec.rows, device=device) >= spec.greedy).float()
            rows.append(generate(target, prompts, spec.length - spec.prompt, temperature))
            first.append(torch.full((spec.rows,), spec.prompt - 1, device=device))
        tokens = torch.cat(rows)
        chunk = max(1, 256 * ROW_LENGTH // tokens.shape[1])
        for part in tokens.split(chunk):
            features.append(target.features(part).to(torch.bfloat16 if device.type == "cuda" else torch.float32))
    start = torch.cat(first)
    last = torch.full_like(start, tokens.shape[1] - BLOCK_SIZE)
    log(f"pool: {tokens.shape[0]} rows x {tokens.shape[1]} tokens in {box.elapsed():.1f} s")
    return Pool(tokens, torch.cat(features), start, last)


def block_losses(drafter: Drafter, target: Target, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each masked position [NUM_DRAFTS] and the mean number of drafts a chain accepts."""
    rows, features, anchors = batch
    offsets = torch.arange(1, BLOCK_SIZE, device=rows.device)
    labels = rows.gather(1, (anchors[..., None] + offsets).flatten(1)).view(*anchors.shape, NUM_DRAFTS)
    hidden = drafter(features, rows.gather(1, anchors), anchors, target.embed_tokens.weight)
    logits = target.lm_head(hidden).float()
    losses = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view_as(labels)
    accepted = (logits.argmax(-1) == labels).float().cumprod(-1).sum(-1)
    return losses.mean((0, 1)), accepted.detach().mean()


class DrafterTraining:
    """Model, optimizer and steps of one drafter."""

    def __init__(self, target: Target, num_layers: int, width: int, compiled: bool) -> None:
        device = target.lm_head.weight.device
        self.device, self.target = device, target
        self.drafter = Drafter(num_layers, width).to(device).train()
        self.optimizer = make_optimizer(self.drafter)
        weights = torch.exp(-torch.arange(NUM_DRAFTS, device=device) / POSITION_DECAY)
        self.weights = weights / weights.sum()
        self.sums = torch.zeros(2, device=device)
        self.compiled_losses = torch.compile(block_losses, dynamic=False) if compiled else block_losses

    def losses(self, pool: Pool, rows: int, anchors: int, compiled: bool = False) -> tuple[Tensor, Tensor]:
        """Losses by position and accepted drafts of random blocks."""
        on_cuda = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=on_cuda, cache_enabled=False):
            function = self.compiled_losses if compiled else block_losses
            return function(self.drafter, self.target, pool.draw(rows, anchors))

    def step(self, pool: Pool, rows: int, anchors: int, compiled: bool) -> None:
        """One update."""
        losses, accepted = self.losses(pool, rows, anchors, compiled)
        loss = (losses * self.weights).sum()
        descend(self.optimizer, loss)
        self.sums += torch.stack((loss.detach(), accepted))


@dataclass
class Pools:
    """Everything a drafter is trained and judged on; shared by the variants of one run."""

    short: Pool
    long: Pool | None
    held_out: dict[str, Pool]


def make_pools(target: Target, data_dir: Path, log: Log, scale: float = 1.0, with_long: bool = True) -> Pools:
    """Generate all pools; ``scale`` shrinks them for a dry run."""
    device = target.lm_head.weight.device

    def scaled(rounds: tuple[Round, ...]) -> tuple[Round, ...]:
        return tuple(Round(max(2, int(r.rows * scale)), r.prompt, r.length, r.greedy, r.tiled) for r in rounds)

    stream, held_out = (
        torch.from_numpy(np.load(data_dir / f"{name}.npy").astype(np.int32)).to(device) for name in ("train", "heldout")
    )
    held_rounds = {
        "text T=0": (Round(512, 256, 384, 1.0),),
        "text T=1": (Round(512, 256, 384, 0.0),),
        "tiled T=0": (Round(256, 128, 256, 1.0, tiled=True),),
    }
    return Pools(
        make_pool(target, stream, scaled(ROUNDS), log),
        make_pool(target, stream, scaled(LONG_ROUNDS), log) if with_long else None,
        {name: make_pool(target, held_out, scaled(rounds), lambda _: None) for name, rounds in held_rounds.items()},
    )


@torch.no_grad()
def judge(run: DrafterTraining, pools: Pools, rows: int) -> str:
    """Held-out accepted drafts per kind of row, and losses by position for greedy text."""
    parts = []
    for name, pool in pools.held_out.items():
        results = [run.losses(pool, rows, 48) for _ in range(4)]
        parts.append(f"{name} {sum(float(r[1]) for r in results) / 4:.3f}")
        if name == "text T=0":
            by_position = (sum(r[0] for r in results) / 4).tolist()
    return f"accepted {', '.join(parts)}; loss by position {[round(v, 2) for v in by_position]}"


def train(
    pools: Pools,
    target: Target,
    out_dir: Path,
    seconds: float,
    *,
    num_layers: int = 5,
    width: int = 256,
    rows: int = 64,
    anchors: int = 48,
    long_every: int = 6,
    max_steps: int | None = None,
    compiled: bool = False,
    seed: int = 21,
    log: Log = print,
) -> Drafter:
    """Train one drafter and export it; every ``long_every``-th step draws long rows."""
    torch.manual_seed(seed)
    target.requires_grad_(False).eval()
    run = DrafterTraining(target, num_layers, width, compiled)
    log(f"drafter: {num_layers} layers, width {width}, {sum(p.numel() for p in run.drafter.parameters()) / 1e6:.2f} M")
    box = TimeBox(seconds, max_steps)
    set_rate(run.optimizer, learning_rate(0.0))
    step = captured(lambda: run.step(pools.short, rows, anchors, compiled), log)
    long_step = None
    if pools.long is not None:
        long_step = captured(lambda: run.step(pools.long, max(1, rows // 8), anchors, False), log)
    since = 0
    while (fraction := box.fraction()) < 1.0:
        set_rate(run.optimizer, learning_rate(fraction))
        (long_step if long_step and box.steps % long_every == long_every - 1 else step)()
        box.steps += 1
        since += 1
        if box.steps % REPORT_EVERY == 0 or box.steps <= 2:
            loss, accepted = (run.sums / since).tolist()
            run.sums.zero_()
            since = 0
            log(
                f"drafter step {box.steps} ({box.elapsed():.1f} s) loss {loss:.3f} accepted {accepted:.3f} | held-out: "
                f"{judge(run, pools, rows)}"
            )
    elapsed = box.elapsed()
    save_drafter(run.drafter, out_dir)
    log(
        f"drafter done: {box.steps} steps x {rows} rows x {anchors} blocks, {elapsed:.1f} s; held-out: "
        f"{judge(run, pools, rows)}"
    )
    return run.drafter


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder written by training.corpus")
    parser.add_argument("target", type=Path, help="checkpoint of the target")
    parser.add_argument("out", type=Path, help="folder of the drafter's checkpoint")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--pool-scale", type=float, default=1.0)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(args.target).to(device)
    pools = make_pools(target, args.data, print, args.pool_scale)
    train(
        pools,
        target,
        args.out,
        args.seconds,
        num_layers=args.layers,
        width=args.width,
        max_steps=args.max_steps,
        compiled=args.compile,
    )


if __name__ == "__main__":
    main()
