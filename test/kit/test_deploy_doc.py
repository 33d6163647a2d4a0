# SPDX-License-Identifier: Apache-2.0
"""The kit's documents: their commands parse, their paths exist, their figures are what plan prints."""

import re
import shlex
from pathlib import Path

import pytest

from sglang.kdtree.cli import VERBS, build_parser
from sglang.kdtree.plan import buffers

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "deploy-kimi-k2.6.md").read_text()
KIT = (ROOT / "docs" / "kit.md").read_text()
COMMAND = re.compile(r"^python -m sglang\.kdtree (.+)$", flags=re.M)
COMMANDS = COMMAND.findall(TEXT)


@pytest.mark.parametrize("command", COMMANDS + COMMAND.findall(KIT))
def test_every_command_of_the_kit_parses(command):
    build_parser().parse_args(shlex.split(command))


def test_all_verbs_an_operator_needs_are_shown():
    assert len(COMMANDS) >= 8
    for verb in (
        "doctor",
        "plan",
        "bench longctx",
        "bench compare",
        "probe commit-length",
        "probe gpu",
        "probe verify",
    ):
        assert any(command.startswith(verb) for command in COMMANDS), verb


def test_every_verb_is_in_the_kits_table_and_examples():
    for path in VERBS:
        assert f"| `{' '.join(path)}` |" in KIT
        assert any(command.startswith(" ".join(path)) for command in COMMAND.findall(KIT))


def test_every_path_exists():
    for path in set(re.findall(r"`((?:docker|test|docs|python)/[\w./-]+)`", TEXT + KIT)):
        assert (ROOT / path).exists(), path


def test_the_table_of_pools_is_what_plan_prints(cli, data):
    rows = re.findall(r"^\| (0\.\d+) \| ([\d,]+) tokens \| ([\d.]+) GB \|$", TEXT, flags=re.M)
    assert [fraction for fraction, _, _ in rows] == ["0.85", "0.93", "0.94"]
    for fraction, tokens, slack in rows:
        _, document = cli(
            "plan", "--model", data / "kimi_k2_6.json", "--draft", data / "kimi_k2_6_dflash.json", "--context", 200_000,
            "--mem-fraction-static", fraction,
        )  # fmt: skip
        assert f"{document['pool']['tokens']:,}" == tokens
        assert f"{document['rank_bytes']['slack'] / 1e9:.2f}" == slack


def test_the_table_of_the_two_known_pools(cli, data):
    """Within 3 % by the accounting that is assumed for their server; the plain call has it beside its own."""
    numbers = r"([\d,]+) \| ([\d,]+) \| ([+-]\d\.\d) % \| ([\d,]+)"
    rows = re.findall(rf"^\| (0\.\d+) \| {numbers} \|$", TEXT, flags=re.M)
    assert [row[:2] for row in rows] == [("0.85", "101,134"), ("0.93", "195,011")]
    for fraction, seen, *said in rows:
        wish = ["--model", data / "kimi_k2_6.json", "--draft", data / "kimi_k2_6_dflash.json", "--context", 90_000]
        wish += ["--mem-fraction-static", fraction]
        plain = cli("plan", *wish)[1]["pool"]
        pools = [cli("plan", *wish, "--accounting", "layer-scaled")[1]["pool"]["tokens"], plain["tokens"]]
        assert plain["by_accounting"] == {"layer-scaled": pools[0], "own-geometry": pools[1]}
        off = pools[0] / int(seen.replace(",", "")) - 1
        assert abs(off) < 0.03
        assert said == [f"{pools[0]:,}", f"{100 * off:+.1f}", f"{pools[1]:,}"]


def test_what_fewer_requests_free():
    rows = [buffers.row_table_bytes(max_requests=n, context=200_000, tree_size=9, page_size=1) / 1e6 for n in (64, 8)]
    assert "({:.0f} MB against {:.0f} MB)".format(*rows) in TEXT
    graphs = [buffers.triton_buffer_bytes(batch=n, context=200_000, tree_size=9, heads=8) / 1e9 for n in (64, 8)]
    said = re.sub(r"\s+", " ", TEXT)
    assert f"{graphs[0]:.2f} GB at 64 requests and {graphs[1]:.2f} GB at 8" in said


def test_the_flags_it_explains_are_the_recipes():
    import yaml

    recipe = yaml.safe_load((ROOT / "docker" / "kimi-k2.6.yaml").read_text())
    assert f"--max-running-requests {recipe['max-running-requests']}`, not 64" in TEXT
    assert f"--chunked-prefill-size {recipe['chunked-prefill-size']}`" in TEXT
    assert f"Start with {recipe['mem-fraction-static']:g}" in TEXT
    assert sum(key.startswith("speculative-") for key in recipe) == 3


class TestReadingAReport:
    """docs/validate.md: its line is the server's, its verdicts are the probe's, its limits are the code's."""

    PAGE = (ROOT / "docs" / "validate.md").read_text()

    def test_the_line_is_what_the_server_logs(self):
        torch = pytest.importorskip("torch")
        errors = pytest.importorskip("sglang.srt.layers.attention.kdtree_verify").VerifyErrors
        (line,) = re.findall(r"^kdtree_sm120 validate: (.+), 8 steps$", self.PAGE, flags=re.M)
        said = errors.describe(torch.ones(3, len(errors._COLUMNS), dtype=torch.float64))
        number = re.compile(r"\d+(\.\d+e[-+]\d+)?")
        assert number.sub("N", line) == number.sub("N", said)

    def test_every_part_of_the_line_is_explained(self):
        (line,) = re.findall(r"^kdtree_sm120 validate: (.+), 8 steps$", self.PAGE, flags=re.M)
        words = re.sub(r"[\d.]+(e[-+]\d+)?", "", line)
        table = self.PAGE.partition("## A mismatch")[0]
        rows = re.findall(r"^\| ([a-z ,]+) \| [^|]+ \| [^|]+ \|$", table, flags=re.M)
        for name in (name.strip() for row in rows if row != "part" for name in row.split(",")):
            assert name in words, name
        assert len(rows) == 7  # with the head

    def test_the_verdicts_and_limits_are_those_of_the_code(self):
        from sglang.kdtree.probe.verify import VERDICTS

        assert re.findall(r"^\| `([\w-]+)` \|", self.PAGE, flags=re.M) == list(VERDICTS)
        errors = pytest.importorskip("sglang.srt.layers.attention.kdtree_verify").VerifyErrors
        assert (errors.MISMATCH_LIMIT, errors.MISMATCH_LIMIT_FP8) == (2**-6, 2**-2)
        assert "than 2^-6 of their" in self.PAGE and "fp8 KV 2^-2" in self.PAGE

    def test_the_panels_are_on_the_dashboard(self):
        board = (ROOT / "docker/grafana/dashboards/kdtree.json").read_text()
        for panel in re.findall(r'"([A-Z][a-z ]+)"', self.PAGE.partition("## A mismatch")[0]):
            assert f'"title": "{panel}"' in board, panel
