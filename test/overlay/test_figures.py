# SPDX-License-Identifier: Apache-2.0
"""Figures in the documents' prose: each measured one is computed from a result file, or says why there is none.

A figure is a number with a unit that somebody has to measure. docs/figures.toml lists them by document:

    [["docs/page.md"]]
    text = "takes {:.1f} ms and up to {:.0f} % of it"     # as in the document, line breaks aside
    from = "benchmark/results/cpu/result.json"            # its contents are `data` in the expressions; of a folder
                                                          # there are sizes: size("a/file")
    values = ["data['ms']", "100 * max(row['share'] for row in data['rows'])"]

    [["docs/page.md"]]
    text = "at most 3 %"
    why = "a limit of the code"
    test = "test/kit/test_plan.py"                        # where it is held, if anywhere

    [["docs/page.md"]]
    table = "benchmark/kv_churn/table.py:cost_table"      # a table without a block of benchmark/report.py
    from = "benchmark/results/cpu/churn.json"

A block of benchmark/report.py, or of the small model's card, needs no entry: it is checked there.
"""

import json
import re
import tomllib
from pathlib import Path

import pytest

from overlay.description import module_at

ROOT = Path(__file__).resolve().parents[2]
LISTED = tomllib.loads((ROOT / "docs" / "figures.toml").read_text())
PAGES = ["README.md", "benchmark/README.md", "sgl-kernel-sm120/README.md", "test/models/README.md"]
NOTES = (ROOT / "sgl-kernel-sm120" / "csrc").rglob("NOTES.md")
DOCUMENTS = [ROOT / name for name in PAGES] + sorted([*(ROOT / "docs").rglob("*.md*"), *NOTES])
UNIT = r"us|ms|s|seconds?|minutes?|hours?|tok/s|tokens? a (?:step|second)|[GT]B/s|TFLOP/s|[KMGT]i?B|W|%|times|points?"
FIGURE = re.compile(rf"(?<![\w.])\d[\d,]*(?:\.\d+)?(?: to \d[\d,.]*\d)? ?(?:{UNIT})(?!\w)")
GENERATED = re.compile(r"<!-- results:.*?<!-- /results -->|<!-- ([a-z-]+):begin -->.*?<!-- \1:end -->", re.DOTALL)
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`|^    .*?$", re.MULTILINE | re.DOTALL)


def joined(text: str) -> str:
    return " ".join(text.split())


def prose(text: str) -> str:
    return joined(CODE.sub(" ` ", GENERATED.sub(" ", text)))


def size(path: str) -> int:
    """Bytes of a file, or of the files in a folder."""
    place = ROOT / path
    return sum(file.stat().st_size for file in ([place] if place.is_file() else place.iterdir()))


def source(entry: dict) -> object:
    if (ROOT / entry["from"]).is_dir():
        return None
    text = (ROOT / entry["from"]).read_text()
    return json.loads(text) if entry["from"].endswith(".json") else text


def shown(entry: dict) -> str:
    """What the document has to say, by this entry."""
    if "table" in entry:
        path, _, name = entry["table"].partition(":")
        return getattr(module_at(ROOT / path), name)(source(entry))
    if "values" not in entry:
        return entry["text"]
    names = {"data": source(entry), "re": re, "size": size}
    return entry["text"].format(*(eval(value, names) for value in entry["values"]))


def unlisted(text: str, entries: list[str]) -> list[str]:
    """Figures of a document that stand in none of the texts."""
    for entry in sorted(map(joined, entries), key=len, reverse=True):
        text = text.replace(entry, " ")
    return FIGURE.findall(text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_figure_has_its_source(document):
    text = prose(document.read_text())
    expected = [prose(shown(entry)) for entry in LISTED.get(document.relative_to(ROOT).as_posix(), [])]
    assert [sentence for sentence in expected if sentence not in text] == [], "not what the result file gives, or gone"
    assert unlisted(text, expected) == [], "measured by whom? list it in docs/figures.toml"


def test_every_entry_says_where_its_figures_come_from():
    assert set(LISTED) <= {path.relative_to(ROOT).as_posix() for path in DOCUMENTS}
    for entry in (entry for entries in LISTED.values() for entry in entries):
        assert ("from" in entry) != ("why" in entry) and set(entry) <= {
            "text",
            "table",
            "from",
            "values",
            "why",
            "test",
        }
        assert ("from" in entry) == ("values" in entry or "table" in entry), entry
        assert (ROOT / entry.get("test", "docs")).exists(), entry
    computed = sum("from" in entry for entries in LISTED.values() for entry in entries)
    assert computed > 4


def test_a_figure_from_nowhere_is_seen():
    page = (
        "Takes\n1.5 ms, see `9 ms`.\n<!-- results: a b -->\n7 us\n<!-- /results -->\n```\n8 us\n```\n3.2 to 6.4 times\n"
    )
    text = prose(page + "\n    10 us in a block\n\n99 % of 10 layers, 5,000 tokens, v1.5 s\n")
    assert unlisted(text, []) == ["1.5 ms", "3.2 to 6.4 times", "99 %"]
    assert unlisted(text, ["Takes\n1.5 ms", "99 % of 10"]) == ["3.2 to 6.4 times"]
