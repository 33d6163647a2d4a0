# SPDX-License-Identifier: Apache-2.0
"""What both trainings share: parameter groups, learning rate, time-boxed loop, CUDA graph capture."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

PEAK_RATE = 2e-3
WARM_UP = 0.03
FINAL_RATE = 0.02
WEIGHT_DECAY = 0.1

Log = Callable[[str], None]


def learning_rate(fraction: float) -> float:
    """Linear warm-up, then cosine, as a function of the fraction of training done."""
    if fraction < WARM_UP:
        return PEAK_RATE * (fraction / WARM_UP + 0.01)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (fraction - WARM_UP) / (1 - WARM_UP))))
    return PEAK_RATE * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


def make_optimizer(*modules: nn.Module) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms and embeddings do not (the mask's row is trained by nothing else)."""
    decayed, kept = [], []
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                (decayed if parameter.dim() >= 2 and "embed" not in name else kept).append(parameter)
    on_cuda = decayed[0].is_cuda
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": kept, "weight_decay": 0.0}],
        lr=torch.tensor(PEAK_RATE, device=decayed[0].device),
        betas=(0.9, 0.98),
        eps=1e-9,
        fused=on_cuda,
        capturable=on_cuda,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Write the learning rate in place, where a captured step reads it."""
    for group in optimizer.param_groups:
        group["lr"].fill_(rate)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters that the optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One update with the gradient norm clipped to 1."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(parameters_of(optimizer), 1.0)
    optimizer.step()


def captured(step: Callable[[], None], log: Log, warm_up: int = 3) -> Callable[[], None]:
    """``step`` as one CUDA graph launch; itself where there is no GPU or the capture fails.

    ``step`` must have fixed shapes, draw its own data on the device and write results in place. The
    warm-up runs are real steps.
    """
    if not torch.cuda.is_available():
        return step
    start = time.monotonic()
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm_up):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        log(f"captured one step after {time.monotonic() - start:.1f} s")
        return graph.replay
    except RuntimeError as error:
        log(f"capture failed, continuing without: {error}")
        torch.cuda.synchronize()
        return step


class TimeBox:
    """Counts steps and tells the fraction of the time, or of the steps, that is used up."""

    def __init__(self, seconds: float, max_steps: int | None = None) -> None:
        self.seconds, self.max_steps = seconds, max_steps
        self.start = time.monotonic()
        self.steps = 0

    def elapsed(self) -> float:
        """Seconds since the start, after all queued work of the device."""
        if torch.cuda.is_available() and self.steps % 8 == 0:
            torch.cuda.synchronize()
        return time.monotonic() - self.start

    def fraction(self) -> float:
        """Share of the box that is used, 1 at its end."""
        by_time = self.elapsed() / self.seconds
        by_steps = self.steps / self.max_steps if self.max_steps else 0.0
        return min(1.0, max(by_time, by_steps))
