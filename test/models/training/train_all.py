# SPDX-License-Identifier: Apache-2.0
"""Train the target and one or more drafters in one process, as one GPU job of a few minutes.

    python -m training.train_all DATA OUT --target-seconds 110 --drafter-seconds 80 --drafter 5x256 3x512

writes OUT/target, OUT/drafter-<layers>x<width> and OUT/log.txt.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from training import train_drafter, train_target


def parse_shape(text: str) -> tuple[int, int]:
    """``5x256`` -> five layers, MLP width 256."""
    layers, width = text.split("x")
    return int(layers), int(width)


def main() -> None:
    """Command line entry."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder written by training.corpus")
    parser.add_argument("out", type=Path)
    parser.add_argument("--target-seconds", type=float, default=110.0)
    parser.add_argument("--drafter-seconds", type=float, default=80.0)
    parser.add_argument("--drafter", type=parse_shape, nargs="+", default=[(5, 256)], metavar="LAYERSxWIDTH")
    parser.add_argument("--pool-scale", type=float, default=1.0)
    parser.add_argument("--max-steps", type=int, help="stop each training early (dry run)")
    parser.add_argument("--no-long-rows", action="store_true", help="drafter without rows of 4096 tokens")
    parser.add_argument("--compile-target", action="store_true")
    parser.add_argument("--compile-drafter", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "log.txt").open("a") as log_file:

        def log(line: str) -> None:
            stamped = f"[{time.monotonic() - start:6.1f}] {line}"
            print(stamped, flush=True)
            print(stamped, file=log_file, flush=True)

        log(f"torch {torch.__version__}, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}")
        target = train_target.train(
            args.data,
            args.out / "target",
            args.target_seconds,
            max_steps=args.max_steps,
            compiled=args.compile_target,
            log=log,
        )
        pools = train_drafter.make_pools(target, args.data, log, args.pool_scale, not args.no_long_rows)
        for layers, width in args.drafter:
            train_drafter.train(
                pools,
                target,
                args.out / f"drafter-{layers}x{width}",
                args.drafter_seconds,
                num_layers=layers,
                width=width,
                max_steps=args.max_steps,
                compiled=args.compile_drafter,
                log=log,
            )
        if torch.cuda.is_available():
            log(f"peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
