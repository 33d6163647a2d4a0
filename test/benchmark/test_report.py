# SPDX-License-Identifier: Apache-2.0
"""Tables in the documents: generated from the result file, and checked against it."""

import json
import re
import shutil

import pytest
import report
from docs.documents import ROOT
from verify_bench import results

BLOCK = "# Title\n\n<!-- results: {table} r.json -->\n{body}\n<!-- /results -->\n\ntail\n"


@pytest.fixture
def tree(tmp_path, make_result):
    times = {}
    for prefix, ours in ((4096, 8.0), (189440, 80.0)):
        times["ours", f"prefix={prefix}"] = ours
        times["triton_extend", f"prefix={prefix}"] = ours * 100
        times["flashinfer_100k", f"prefix={prefix}"] = ours * 5.5
        times["ladder_128bit_s64", f"prefix={prefix}"] = ours * 20
        times["ours", f"prefix={prefix},kv=fp8"] = ours / 1.6
        times["ours", f"prefix={prefix},page=64"] = ours / 1.25
    times["ours", "prefix=189440,q=33"] = 300.0
    times["ours", "prefix=189440+1024+1024"] = 90.0
    results.save(tmp_path / "r.json", make_result(times))
    return tmp_path


def write(tree, table, body="old", name="README.md"):
    path = tree / name
    path.write_text(BLOCK.format(table=table, body=body))
    return path


def test_context_table(tree):
    path = write(tree, "context")
    assert report.main([], root=tree) == 0
    assert path.read_text() == BLOCK.format(
        table="context",
        body="\n".join([
            "| prefix | Triton extend | Triton decode* | FlashInfer* | FlashInfer 100 KB* | ours | GB/s | % copy "
            "| vs Triton extend | vs FlashInfer 100 KB |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
            "| 4,096 | 800 | - | - | 44.0 | 8.0 | 591 | 15 | 100x | 5.5x |",
            "| 189,440 | 8,000 | - | - | 440 | 80.0 | 2,728 | 68 | 100x | 5.5x |",
        ]),
    )  # fmt: skip


def test_check_accepts_what_was_written_and_refuses_a_changed_number(tree, capsys):
    path = write(tree, "context")
    assert report.main(["--check"], root=tree) == 1
    assert "old" in path.read_text(), "--check writes nothing"
    report.main([], root=tree)
    assert report.main(["--check"], root=tree) == 0
    path.write_text(path.read_text().replace("| 80.0 |", "| 79.0 |"))
    capsys.readouterr()
    assert report.main(["--check"], root=tree) == 1
    out = capsys.readouterr()
    assert "-| 189,440 | 8,000 | - | - | 440 | 79.0 |" in out.out and "1 document(s) differ" in out.err


def test_check_notices_a_new_result_file(tree):
    write(tree, "context")
    report.main([], root=tree)
    data = json.loads((tree / "r.json").read_text())
    row = next(r for r in data["rows"] if r["arm"] == "ours" and r["prefix"] == 4096)
    for key in ("us_p20", "us_p50", "us_p80"):
        row[key] *= 2
    row["gbps"] /= 2
    results.save(tree / "r.json", data)
    assert report.main(["--check"], root=tree) == 1


@pytest.mark.parametrize("name", list(report.TABLES))
def test_every_table_renders_and_is_stable(tree, name):
    for kind, file in (  # tables of files of other kinds
        ("acceptance", "cpu/acceptance.json"),
        ("experiments", "h200/verify_experiments.json"),
        ("ddtree", "h200/ddtree.json"),
        ("commit_length", "h200/commit_length.json"),
    ):
        if name.startswith(kind):
            shutil.copy(report.ROOT / "benchmark/results" / file, tree / "r.json")
    path = write(tree, name)
    assert report.main([], root=tree) == 0
    text = path.read_text()
    assert (
        "\nold\n" not in text
        and text.startswith("# Title\n\n<!-- results:")
        and text.endswith("<!-- /results -->\n\ntail\n")
    )
    assert report.main(["--check"], root=tree) == 0


def test_fp8_and_page_tables_compare_with_the_base_shape(tree):
    data = results.load(tree / "r.json")
    assert "| 1, 9, 8 | 189,440 | fp8 | 1 | 80.0 | 50.0 | 1.60x | 2,182 |" in report.fp8(data)
    assert "| 1, 9, 8 | 189,440 | bf16 | 64 | 80.0 | 64.0 | 1.25x | 3,410 |" in report.pages(data)


def test_shapes_table_names_ragged_batches(tree):
    text = report.shapes(results.load(tree / "r.json"))
    assert "| 1, 33, 8 | 189,440 |" in text and "| 3, 9, 8 | 1 x 189,440 + 2 x 1,024 |" in text


def test_header_names_card_rates_and_versions(tree):
    text = report.header(results.load(tree / "r.json"))
    assert (
        "Test GPU, 100 SMs" in text
        and "copy 4,000 GB/s" in text
        and "mma.sync bf16 600 TFLOP/s" in text
        and "torch 2.11" in text
    )
    assert "sglang" not in text, "what was not there has no version"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- results: context -->\n<!-- /results -->\n", "expected '<!-- results: TABLE FILE -->'"),
        ("<!-- results: nope r.json -->\n<!-- /results -->\n", "no table 'nope'"),
        ("<!-- results: context r.json -->\n", "no '<!-- /results -->'"),
        (
            "<!-- results: context r.json -->\n<!-- results: ladder r.json -->\n<!-- /results -->\n",
            "no '<!-- /results -->'",
        ),
        ("<!-- results: context none.json -->\n<!-- /results -->\n", "none.json"),
        ("<!-- results: context bad.json -->\n<!-- /results -->\n", "not a result file"),
    ],
)
def test_bad_blocks_are_errors_with_a_place(tree, capsys, text, message):
    (tree / "bad.json").write_text("{}")
    path = tree / "doc.md"
    path.write_text(text)
    assert report.main(["--check"], root=tree) == 2
    error = capsys.readouterr().err
    assert message in error and f"{path}:1" in error and path.read_text() == text


def test_only_documents_with_blocks_outside_build_folders(tree):
    (tree / "plain.md").write_text("no block\n")
    (tree / "build").mkdir()
    write(tree, "nope", name="build/x.md")
    path = write(tree, "context")
    assert report.documents(tree) == [path]


def test_an_example_in_a_fence_is_left_alone(tree):
    example = "```\n<!-- results: context none.json -->\n<!-- /results -->\n```\n"
    path = write(tree, "context", body="old\n")
    path.write_text(example + path.read_text())
    assert report.main([], root=tree) == 0
    assert path.read_text().startswith(example) and "| 4,096 |" in path.read_text()


def test_the_tree_is_up_to_date():
    """Every table in this repository's documents is what its result file gives."""
    assert report.main(["--check"]) == 0


def test_every_table_is_named_in_the_readme():
    text = (ROOT / "benchmark" / "README.md").read_text()
    part = text.partition("## Tables in documents")[2].partition("##")[0]
    named = set(re.findall(r"`([a-z0-9_]+)`", part)) - {"acceptance", "one_rank", "two_ranks"}
    assert named == {*report.TABLES, *report.OPTIONAL_TABLES}
