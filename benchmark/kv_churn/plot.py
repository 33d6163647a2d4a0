# SPDX-License-Identifier: Apache-2.0
"""Contiguity over time, one column a mix, one line a mode.

python -m kv_churn.plot churn.json churn.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PANELS = [
    ("runs_per_1k_tokens", "runs per 1,000 tokens"),
    ("block_share", "share of 64-token blocks of one run"),
    ("moved_mib", "MiB moved so far"),
]


def plot(result: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    mixes = list(dict.fromkeys(entry["mix"] for entry in result["series"]))
    figure, axes = pyplot.subplots(len(PANELS), len(mixes), figsize=(4 * len(mixes), 8), squeeze=False, sharex="col")
    for column, mix in enumerate(mixes):
        axes[0][column].set_title(mix)
        axes[-1][column].set_xlabel("decode step")
        for row, (field, label) in enumerate(PANELS):
            for entry in result["series"]:
                if entry["mix"] == mix:
                    axes[row][column].plot(entry["step"], entry[field], label=entry["mode"], linewidth=0.8)
            if column == 0:
                axes[row][column].set_ylabel(label)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
