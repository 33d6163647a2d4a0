# SPDX-License-Identifier: Apache-2.0
"""The shapes that are timed, in named groups, and the text form in which the command line takes one."""

from __future__ import annotations

import dataclasses

KV_DTYPES = ("bf16", "fp8")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One verify call: requests of s_q tree nodes over h_q heads; `prefixes` are the cached tokens of each."""

    prefixes: tuple[int, ...]
    s_q: int = 9
    h_q: int = 8
    kv_dtype: str = "bf16"
    page_size: int = 1

    def __post_init__(self):
        if not self.prefixes or min(self.prefixes) < 0:
            raise ValueError(f"prefix: expected lengths >= 0, got {self.prefixes}")
        if self.s_q < 1 or self.h_q < 1:
            raise ValueError(f"q and h: expected >= 1, got q={self.s_q} h={self.h_q}")
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv: expected one of {', '.join(KV_DTYPES)}, got {self.kv_dtype}")
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page: expected a power of two, got {self.page_size}")

    @property
    def bs(self) -> int:
        return len(self.prefixes)

    @property
    def prefix(self) -> int:
        """The longest prefix; all of them are equal unless the shape is ragged."""
        return max(self.prefixes)

    @property
    def ragged(self) -> bool:
        return len(set(self.prefixes)) > 1

    @property
    def tokens(self) -> int:
        """KV rows of all requests, the draft rows included."""
        return sum(self.prefixes) + self.bs * self.s_q

    def __str__(self) -> str:
        lengths = "+".join(str(p) for p in self.prefixes) if self.ragged else str(self.prefix)
        return f"bs={self.bs},q={self.s_q},h={self.h_q},prefix={lengths},kv={self.kv_dtype},page={self.page_size}"


def parse_shape(text: str) -> Shape:
    """'bs=1,q=9,h=8,prefix=65536,kv=bf16,page=1', each part with that default. prefix=185000+1000 is a ragged batch."""
    fields = {"bs": None, "q": "9", "h": "8", "prefix": "65536", "kv": "bf16", "page": "1"}
    for part in text.split(","):
        key, sep, value = part.partition("=")
        if not sep or key not in fields:
            raise ValueError(f"shape '{text}': expected {', '.join(k + '=...' for k in fields)}, got '{part}'")
        fields[key] = value
    try:
        prefixes = tuple(int(p) for p in fields["prefix"].split("+"))
        bs = len(prefixes) if fields["bs"] is None else int(fields["bs"])
        s_q, h_q, page = int(fields["q"]), int(fields["h"]), int(fields["page"])
    except ValueError as e:
        raise ValueError(f"shape '{text}': {e}") from None
    if len(prefixes) == 1:
        prefixes *= bs
    if bs != len(prefixes):
        raise ValueError(f"shape '{text}': bs={bs}, but prefix lists {len(prefixes)} requests")
    return Shape(prefixes, s_q, h_q, fields["kv"], page)


CONTEXTS = (1024, 4096, 16384, 65536, 131072, 189440)
RAGGED = (189440,) + (1024,) * 7


def _groups() -> dict[str, list[Shape]]:
    long = (16384, 65536, 189440)
    return {
        "context": [Shape((p,)) for p in CONTEXTS],
        "tree": [Shape((p,), s_q=q) for q in (1, 17, 33, 65) for p in long],
        "heads": [Shape((p,), h_q=h) for h in (16, 64, 128) for p in long],
        "batch": [Shape((p,) * bs) for bs in (4, 8) for p in long] + [Shape(RAGGED)],
        "fp8": [Shape((p,), kv_dtype="fp8") for p in CONTEXTS]
        + [
            Shape((189440,), s_q=33, kv_dtype="fp8"),
            Shape((189440,), h_q=64, kv_dtype="fp8"),
            Shape((189440,) * 8, kv_dtype="fp8"),
        ],
        "pages": [Shape((p,), page_size=page) for page in (16, 64) for p in (65536, 189440)],
        "smoke": [Shape((4096,)), Shape((65536,)), Shape((16384,), s_q=33)],
    }


GROUPS = _groups()
DEFAULT_GROUPS = ("context", "fp8", "tree", "batch", "pages", "heads")


def select(groups: list[str], specs: list[str]) -> list[Shape]:
    """The shapes of the groups, then the ones given as text; each once, in that order."""
    chosen = [s for g in groups for s in GROUPS[g]] + [parse_shape(t) for t in specs]
    return list(dict.fromkeys(chosen))
