# SPDX-License-Identifier: Apache-2.0
"""Train the target on the corpus, in a time box.

    python -m training.train_target DATA OUT --seconds 110

Loss: next-token cross-entropy, plus a look-ahead loss on the last feature layer. Small heads, thrown away
afterwards, predict the tokens 2..8 ahead from that layer, so that the hidden states carry what a drafter
of 8-token blocks has to read out of them. The last part of the time runs on rows of 4096 tokens.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.architecture import BLOCK_SIZE, BOS_ID, CONTEXT_LENGTH, HIDDEN, NUM_DRAFTS, RMSNorm, Target
from training.checkpoint import load_target, save_target
from training.optimisation import Log, TimeBox, captured, descend, learning_rate, make_optimizer, set_rate
from training.rows import IGNORED, RowMix, sample_rows

LOOK_AHEAD_WEIGHT = 0.3
LOOK_AHEAD_DECAY = 4.0
BALANCE_STEP = 1e-3
REPORT_EVERY = 500


@dataclass(frozen=True)
class Phase:
    """One stretch of training with its own row length, up to ``until`` of the time box."""

    until: float
    rows: int
    length: int
    mix: RowMix
    compiled: bool = False  # compiling takes longer than a short phase gains by it


PHASES = (
    Phase(
        until=0.8,
        rows=32,
        length=1024,
        mix=RowMix(tiled=2, tiled_random=1, block_copy=1, block_copy_random=1),
        compiled=True,
    ),
    Phase(until=1.0, rows=8, length=CONTEXT_LENGTH, mix=RowMix(tiled=1, block_copy=1)),
)


class LookAhead(nn.Module):
    """Heads that predict the tokens 2..BLOCK_SIZE ahead of a position from its hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Parameter(torch.randn(NUM_DRAFTS, HIDDEN, HIDDEN) * HIDDEN**-0.5)
        self.norm = RMSNorm(HIDDEN)
        distance = torch.arange(NUM_DRAFTS, dtype=torch.float32)
        self.register_buffer("weights", torch.exp(-distance / LOOK_AHEAD_DECAY), persistent=False)

    def forward(self, hidden: Tensor, labels: Tensor, head: nn.Linear) -> Tensor:
        """Loss of one random distance; hidden [b, s, h], labels [b, s]."""
        choice = torch.randint(NUM_DRAFTS, (1,), device=hidden.device)
        steps = hidden.shape[1] - BLOCK_SIZE
        target = torch.arange(steps, device=hidden.device) + choice + 2
        mapped = hidden[:, :steps] + hidden[:, :steps] @ self.maps.index_select(0, choice)[0]
        logits = head(self.norm(mapped))
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels[:, target].flatten(), ignore_index=IGNORED)
        return loss * self.weights[choice][0]


def next_token_loss(target: Target, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of the next token and the last feature layer's output, [b, s - 1, h]."""
    hidden, features = target(ids[:, :-1])
    logits = target.lm_head(hidden)
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
    return loss, features[..., -HIDDEN:]


@torch.no_grad()
def evaluate_text(target: Target, stream: Tensor, length: int, rows: int, tail: int | None = None) -> float:
    """Mean loss over consecutive windows of the stream; with ``tail`` over their last tokens only."""
    total, count = 0.0, min(rows, stream.numel() // length)
    for row in range(count):
        ids = stream[row * length : (row + 1) * length].long()[None].clone()
        ids[:, 0] = BOS_ID
        losses = F.cross_entropy(target.logits(ids[:, :-1])[0].float(), ids[0, 1:], reduction="none")
        total += float(losses[-tail:].mean() if tail else losses.mean())
    return total / count


@torch.no_grad()
def evaluate_copying(target: Target, stream: Tensor, length: int, rows: int) -> float:
    """Share of greedy hits on repeated random tokens from the third repetition on."""
    ids, labels = sample_rows(stream, rows, length, RowMix(tiled_random=rows))
    hits = (target.logits(ids[:, :-1]).argmax(-1) == labels[:, 1:])[:, length // 2 :]
    return float(hits.float().mean())


class TargetTraining:
    """Model, optimizer and captured steps of one training run."""

    def __init__(self, stream: Tensor, dropout: float, compiled: bool) -> None:
        device = stream.device
        self.stream = stream
        self.target = Target(dropout).to(device).train()
        self.look_ahead = LookAhead().to(device)
        self.optimizer = make_optimizer(self.target, self.look_ahead)
        self.balance_step = torch.tensor(BALANCE_STEP, device=device)
        self.loss_sum = torch.zeros(2, device=device)
        self.compiled_loss = torch.compile(next_token_loss, dynamic=False) if compiled else next_token_loss

    def step(self, phase: Phase) -> None:
        """Draw rows, update the weights, move the routers' biases towards an even load."""
        device = self.stream.device
        loss_function = self.compiled_loss if phase.compiled else next_token_loss
        ids, labels = sample_rows(self.stream, phase.rows, phase.length, phase.mix)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False):
            loss, hidden = loss_function(self.target, ids, labels)
            ahead = self.look_ahead(hidden, labels, self.target.lm_head)
        descend(self.optimizer, loss + LOOK_AHEAD_WEIGHT * ahead)
        with torch.no_grad():
            for layer in self.target.expert_layers():
                layer.correction_bias += self.balance_step * torch.sign(layer.load.mean() - layer.load)
            self.loss_sum += torch.stack((loss, ahead))

    def mean_losses(self, steps: int) -> list[float]:
        """Mean losses since the last call."""
        means = (self.loss_sum / steps).tolist()
        self.loss_sum.zero_()
        return means


def train(
    data_dir: Path,
    out_dir: Path,
    seconds: float,
    *,
    phases: tuple[Phase, ...] = PHASES,
    max_steps: int | None = None,
    dropout: float = 0.05,
    compiled: bool = False,
    seed: int = 20,
    log: Log = print,
) -> Target:
    """Train, export, and return the exported (bfloat16-rounded) target."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    stream = torch.from_numpy(np.load(data_dir / "train.npy").astype(np.int32)).to(device)
    held_out = torch.from_numpy(np.load(data_dir / "heldout.npy").astype(np.int32)).to(device)
    run = TargetTraining(stream, dropout, compiled)
    log(f"target: {sum(p.numel() for p in run.target.parameters()) / 1e6:.2f} M parameters, {stream.numel()} tokens")
    box, tokens, since = TimeBox(seconds, max_steps), 0, 0
    for phase in phases:
        step = captured(lambda phase=phase: run.step(phase), log)
        while (fraction := box.fraction()) < phase.until:
            set_rate(run.optimizer, learning_rate(fraction))
            run.balance_step.fill_(BALANCE_STEP * max(0.0, 1 - 1.1 * fraction))
            step()
            box.steps += 1
            since += 1
            tokens += phase.rows * phase.length
            if box.steps % REPORT_EVERY == 0 or box.steps <= 2:
                report(run, held_out, box, since, phase, log)
                since = 0
    elapsed = box.elapsed()
    save_target(run.target, out_dir, data_dir / "tokenizer.json")
    exported = load_target(out_dir).to(device)
    log(
        f"target done: {box.steps} steps, {tokens / 1e6:.0f} M tokens, {elapsed:.1f} s; exported weights: "
        f"held-out {evaluate_text(exported, held_out, 512, 64):.4f}, "
        f"at 4096 (last 1024) {evaluate_text(exported, held_out, CONTEXT_LENGTH, 16, 1024):.4f}, "
        f"train {evaluate_text(exported, stream, 512, 64):.4f}, "
        f"copying {evaluate_copying(exported, held_out, 512, 16):.4f}"
    )
    return exported


def report(run: TargetTraining, held_out: Tensor, box: TimeBox, since: int, phase: Phase, log: Log) -> None:
    """One progress line with held-out losses."""
    run.target.eval()
    loss, ahead = run.mean_losses(since)
    load = [round(v, 2) for v in run.target.expert_layers()[-1].load.tolist()]
    log(
        f"target step {box.steps} ({box.elapsed():.1f} s, {phase.length} tokens) loss {loss:.3f} ahead {ahead:.3f} "
        f"held-out {evaluate_text(run.target, held_out, 512, 16):.3f} "
        f"copying {evaluate_copying(run.target, held_out, 256, 8):.3f} load {load}"
    )
    run.target.train()


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder written by training.corpus")
    parser.add_argument("out", type=Path, help="folder of the checkpoint")
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--compile", action="store_true", help="compile the loss (worth it for long runs)")
    args = parser.parse_args()
    train(args.data, args.out, args.seconds, max_steps=args.max_steps, dropout=args.dropout, compiled=args.compile)


if __name__ == "__main__":
    main()
