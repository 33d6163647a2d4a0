# SPDX-License-Identifier: Apache-2.0
"""Routing counts per step, layer and expert, from what SGLang's expert-distribution recorder wrote or from a trace.

Understood:
- the recorder's .pt files in its modes per_token, per_pass and stat
  (--expert-distribution-recorder-mode; folder SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR);
- a .npz with topk_ids [steps, layers, tokens, k], logical expert numbers, -1 where a token is absent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sglang.kdtree.errors import KitError
from sglang.kdtree.optional import require
from sglang.kdtree.result import looks_of

MAX_EXPERTS = 1 << 16  # of a layer; more is a damaged file


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """tokens[step, i, expert]: how many tokens of the step chose the expert in layer layers[i]."""

    tokens: np.ndarray
    layers: list[int]
    source: str

    @property
    def steps(self) -> int:
        return self.tokens.shape[0]


def routed(tokens: np.ndarray, *, source: str) -> Counts:
    """Without the layers and the steps that route nothing: the recorder has a row for the dense
    layers too, and a step for the forward passes of a dense drafter and for the unused rest of its ring.
    """
    if not ((tokens >= 0) & (tokens < 1 << 40)).all():
        raise _unreadable(Path(source), "counts below 0, past 2^40 or no numbers")
    tokens = tokens[tokens.any(axis=(1, 2))].astype(np.int64, copy=False)
    layers = np.flatnonzero(tokens.any(axis=(0, 2)))
    if not len(layers):
        raise _unreadable(Path(source), "no routed token in it")
    return Counts(tokens=tokens[:, layers], layers=layers.tolist(), source=source)


def divided(counts: Counts, *, copies: int) -> Counts:
    """The recorder sums over ranks; ranks of one attention group all see the same tokens."""
    if copies < 1 or (counts.tokens % copies).any():
        raise KitError(
            what="--copies",
            expected="a number of ranks that recorded the same tokens, which divides every count",
            got=str(copies),
            remedy="It is the tensor-parallel size divided by the attention data-parallel size; 1 for a trace of one rank.",
        )
    return Counts(
        tokens=counts.tokens // copies, layers=counts.layers, source=counts.source
    )


def trace_files(path: Path) -> list[Path]:
    """A file, or all recordings of a folder."""
    files = sorted(path.glob("*.pt")) if path.is_dir() else [path]
    if not files:
        raise _unreadable(path, "no .pt file in this folder")
    return files


def load_counts(files: list[Path], *, experts: int | None) -> Counts:
    """The files of one recording: a trace, or one file of the recorder or one a rank."""
    if files[0].suffix == ".npz":
        return _from_npz(files[0], experts=experts)
    source = ", ".join(map(str, files))
    recordings = [(file, _load_pt(file)) for file in files]
    try:
        return _from_recorder(recordings, source=source)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        keys = "; ".join(", ".join(map(str, document)) for _, document in recordings)
        got = f"no tensors, other shapes or two modes: {keys}"
        raise _unreadable(files[0], got) from error


def _unreadable(path: Path, got: str) -> KitError:
    return KitError(
        what=f"--trace {path}",
        expected="files of SGLang's expert-distribution recorder (.pt), or an .npz with topk_ids [steps, layers, tokens, k]",
        got=got,
        remedy="Record with --record-dir, which writes such files; sglang/kdtree/probe/moe_trace.py describes both.",
    )


def _from_npz(path: Path, *, experts: int | None) -> Counts:
    try:
        with np.load(path) as archive:
            ids = archive["topk_ids"]
    except Exception as error:  # numpy raises whatever its reader meets
        raise _unreadable(path, looks_of(path)) from error
    if ids.ndim != 4 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise _unreadable(path, f"topk_ids of shape {ids.shape} and type {ids.dtype}")
    experts = experts or int(ids.max()) + 1
    if experts > MAX_EXPERTS:
        raise _unreadable(path, f"{experts} experts")
    return routed(count_ids(ids, experts=experts), source=str(path))


def count_ids(ids: np.ndarray, *, experts: int) -> np.ndarray:
    """[steps, layers, tokens, k] expert numbers, -1 for none -> [steps, layers, experts] token counts."""
    if ids.max(initial=-1) >= experts:
        raise KitError(
            what="topk_ids",
            expected=f"expert numbers below {experts}",
            got=str(int(ids.max())),
            remedy="Correct --experts.",
        )
    steps, layers = ids.shape[:2]
    flat = ids.reshape(steps * layers, -1)
    counts = np.zeros((steps * layers, experts), dtype=np.int64)
    rows = np.broadcast_to(np.arange(steps * layers)[:, None], flat.shape)
    np.add.at(counts, (rows[flat >= 0], flat[flat >= 0]), 1)
    return counts.reshape(steps, layers, experts)


def _load_pt(path: Path) -> dict[str, Any]:
    torch = require("torch", needed_for="the recorder's .pt files")
    try:
        document = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises whatever its unpickler meets
        raise _unreadable(path, looks_of(path)) from error
    if not isinstance(document, dict) or not {"records", "logical_count"} & set(
        document
    ):
        raise _unreadable(path, "neither records nor logical_count in it")
    return document


def _from_recorder(files: list[tuple[Path, dict]], *, source: str) -> Counts:
    if "logical_count" in files[0][1]:
        counts = np.concatenate(
            [document["logical_count"].numpy() for _, document in files]
        )
        return routed(counts, source=source)
    return routed(_sum_ranks(files), source=source)


def _sum_ranks(files: list[tuple[Path, dict]]) -> np.ndarray:
    """per_pass and per_token: one record a forward pass and rank; a rank records what it dispatched."""
    by_pass: dict[int, np.ndarray] = {}
    for path, document in files:
        to_logical = document["last_physical_to_logical_map"].numpy()
        for record in document["records"]:
            if "global_physical_count" not in record:
                raise _unreadable(path, "records without global_physical_count")
            logical = to_logical_counts(
                record["global_physical_count"].numpy(), to_logical
            )
            key = int(record["forward_pass_id"])
            by_pass[key] = by_pass[key] + logical if key in by_pass else logical
    if not by_pass:
        raise _unreadable(files[0][0], "a recording without any forward pass")
    return np.stack([by_pass[key] for key in sorted(by_pass)])


def to_logical_counts(physical: np.ndarray, to_logical: np.ndarray) -> np.ndarray:
    """[layers, physical] counts and map -> [layers, logical] counts."""
    layers = physical.shape[0]
    logical = np.zeros((layers, int(to_logical.max()) + 1), dtype=np.int64)
    np.add.at(logical, (np.arange(layers)[:, None], to_logical), physical)
    return logical
