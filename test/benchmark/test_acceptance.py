# SPDX-License-Identifier: Apache-2.0
"""The acceptance study: how far each way follows an answer, and the result file."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from acceptance import ROW_COSTS, WIDTHS, arm, engine, plot, results, table
from docs.documents import documented

walk = pytest.importorskip("acceptance.walk", reason="the fork of sglang is not installed")

RESULT = Path(__file__).resolve().parents[2] / "benchmark" / "results" / "cpu" / "acceptance.json"


@pytest.fixture
def scores():
    return (torch.randn(7, 90, generator=torch.Generator().manual_seed(1)) * 3).log_softmax(-1)


def test_the_paths_are_the_most_probable_ones():
    found = walk.best_paths([[math.log(0.6), math.log(0.3)], [math.log(0.5), math.log(0.4)]], 5)
    assert [path for path, _ in found] == [(0,), (0, 0), (1,), (0, 1), (1, 0)]
    assert [math.exp(weight) for _, weight in found] == pytest.approx([0.6, 0.3, 0.3, 0.24, 0.15])


def test_every_way_follows_the_chain(scores):
    step = walk.Step(scores, scores.argmax(-1).tolist())
    assert step.chain() == 7
    assert all(step.seeded(width) == min(7, width - 1) for width in WIDTHS)
    assert step.tree(64) >= step.tree(8) >= 1


def test_a_second_rank_ends_the_chain_and_not_the_trees(scores):
    ranked = scores.sort(-1, descending=True).indices
    likely = int((scores.topk(2, -1).values[:, 1]).argmax())  # where the second candidate is most probable
    wanted = ranked[:, 0].tolist()
    wanted[likely] = int(ranked[likely, 1])
    step = walk.Step(scores, wanted)
    assert step.chain() == likely
    assert all(step.seeded(width) >= step.chain() for width in WIDTHS)
    lengths = [step.tree(width) for width in (2, 4, *WIDTHS)]
    assert lengths == sorted(lengths)


def test_a_token_that_is_no_candidate_ends_every_way(scores):
    wanted = scores.argmax(-1).tolist()
    wanted[2] = int(scores[2].argmin())
    step = walk.Step(scores, wanted)
    assert step.chain() == 2 and step.seeded(64) == 2 and step.tree(64) <= 2


def test_promises_are_sums_of_path_probabilities(scores):
    step = walk.Step(scores, [])
    spine = scores.max(-1).values.cumsum(0).exp()
    chain = walk.Option(width=8, is_chain=True)
    assert step.promised(chain) == pytest.approx(float(spine.sum()), rel=1e-4)
    assert step.promised(walk.Option(width=2)) == pytest.approx(float(spine[0]), rel=1e-4)


def test_all_ways_walk_the_whole_answer(scores):
    tokens = torch.randint(0, 90, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    log_probs = scores.expand(39, 7, 90).clone()
    for start in range(39):  # drafts that are right two times out of three
        for depth, token in enumerate(tokens[start + 1 : start + 8]):
            if (start + depth) % 3:
                log_probs[start, depth, token] = 0.0
    study = walk.Study(8)
    tallies = {way: walk.Tally() for way in study.ways()}
    study.add(tokens, log_probs, 8, tallies)
    assert {tally.tokens for tally in tallies.values()} == {39}
    assert tallies["chain"].rows == 8 * tallies["chain"].steps
    assert tallies["tree 64"].steps <= tallies["tree 8"].steps < 39
    for tally in tallies.values():
        assert tally.cost[0.0] == tally.steps
        assert tally.cost[0.2] == pytest.approx(tally.steps + 0.2 * (tally.rows - tally.steps))


def test_the_committed_file_is_consistent_and_fills_its_tables(tmp_path):
    data = results.load(RESULT)
    for make in (table.acceptance_lengths, table.acceptance_adaptive):
        lines = make(data).splitlines()
        assert len({line.count("|") for line in lines}) == 1
    assert len(table.acceptance_adaptive(data).splitlines()) == 2 + len(ROW_COSTS)
    kinds = next(iter(data["walks"]["0"].values()))
    kinds["chain"]["accept_length"] += 0.1
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="chain: accept_length is"):
        results.load(broken)


def test_the_committed_record_is_what_the_command_writes(tmp_path, monkeypatch):
    """Of one greedy answer; sampled ones depend on the order of all."""
    monkeypatch.syspath_prepend(str(arm.MODELS))
    offline = pytest.importorskip("acceptance.offline")
    monkeypatch.setattr(offline, "RECORDED", {"repeat": 1})
    assert offline.record(tmp_path / "record.json") == 0
    found = json.loads((tmp_path / "record.json").read_text())
    committed = json.loads((Path(__file__).parents[1] / "srt" / "speculative" / "recorded_steps.json").read_text())
    (answer,) = found.pop("answers")
    wanted = next(a for a in committed.pop("answers") if a["kind"] == "repeat")
    assert found == committed and answer["accepted"] == wanted["accepted"]
    for ours, theirs in zip(answer["promised"], wanted["promised"], strict=True):
        assert ours == pytest.approx(theirs, abs=1)


# Of real Engines.


def told(steps, rows, answers=(), seconds=1.0):
    return {
        "seconds": seconds, "batch_seconds": [seconds], "answers": list(answers), "tokens": 12, "steps": steps,
        "batch_steps": [steps], "rows": rows, "tree_tokens": 12, "chain_tokens": 10,
    }  # fmt: skip


def found_cells():
    """Two rounds of two kinds, one of them sampled as well."""
    found = {}
    for temperature, kind in (("0", "code"), ("0", "prose"), ("1", "code")):
        for size in (1, 8):
            for name, steps, rows, seconds in (
                ("dflash", 4, 32, 1.0), ("chain", 4, 32, 1.02), ("tree 16", 3, 48, 0.8), ("auto", 3, 30, 0.9)
            ):  # fmt: skip
                if name == "dflash" and temperature == "1":
                    continue
                rounds = [told(steps, rows, seconds=seconds), told(steps, rows, seconds=2 * seconds)]
                found[name, temperature, kind, size] = rounds
    return found


def engine_document(found):
    header = {
        "format": results.ENGINE_FORMAT, "date": "2026-01-01T00:00:00Z", "commit": "c" * 40, "device": "cuda",
        "gpu": {"name": "NVIDIA H200"}, "versions": {"torch": "2.11"}, "tokens": 4, "paired": False,
    }  # fmt: skip
    return {"header": header, "rows": engine.rows_of_file(found), "walks": [], "problems": []}


def test_ratios_are_taken_within_rounds():
    """The second round is twice as slow for all arms: no ratio moves."""
    rows = engine.rows_of_file(found_cells())
    auto = next(row for row in rows if row["arm"] == "auto" and row["temperature"] == "0")
    assert auto["over_dflash"] == pytest.approx([1 / 0.9] * 3, abs=1e-4)
    assert auto["over_chain"] == pytest.approx([1.02 / 0.9] * 3, abs=1e-4)
    assert auto["tok_s"] == pytest.approx([12 / 0.9, 6 / 0.9], abs=0.1) and auto["rounds"] == 2
    assert (auto["accept_length"], auto["rows_per_token"]) == (4.0, 2.5)
    assert not any("over_dflash" in row for row in rows if row["temperature"] == "1")


@pytest.mark.parametrize(
    ("tok_s", "shown"), [([1.0, 400.0, 100.0, 200.0], "150"), ([3.0, 1.0, 2.0], "2"), ([10.0, 13.0], "12")]
)
def test_a_speed_is_the_median_of_the_rounds(tok_s, shown):
    """Of an even number of them the mean of the two in the middle."""
    assert table.speed_cell({"tok_s": tok_s}) == shown
    assert (
        table.speed_cell({"tok_s": tok_s, "over_dflash": engine.quantiles([1.0, 3.0, 2.0, 9.0])}) == f"{shown}, 2.50x"
    )


def test_the_tables_of_engines(tmp_path):
    path = tmp_path / "acceptance.json"
    found = found_cells()
    del found["auto", "0", "prose", 8], found["tree 16", "0", "prose", 8]
    path.write_text(json.dumps(engine_document(found)))
    data = results.load_engine(path)
    lengths = table.engine_acceptance(data).splitlines()
    assert lengths[0] == "| tokens a step / rows a token | code, T = 0 | prose, T = 0 | code, T = 1 |"
    assert lengths[2] == "| chain (DFLASH) | 3.00 / 2.7 | 3.00 / 2.7 | - |"
    speeds = table.engine_speeds(data).splitlines()
    assert speeds[0].count("at once") == 4 and "| tree 16 | 11, 1.25x |" in speeds[4]
    assert len({line.count("|") for line in speeds}) == 1 and speeds[4].endswith("| - |")
    against = table.engine_against_chain(data).splitlines()
    assert against[2] == "| code, T = 0, 1 at once | 2 | 1.111 / 1.111 / 1.111 | 1.133 / 1.133 / 1.133 |"
    assert against[-1].startswith("| code, T = 1, 8 at once | 2 | - |")
    assert "NVIDIA H200" in table.engine_header(data)
    plot.draw_engine(data, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_an_inconsistent_file_of_engines_is_refused(tmp_path):
    path = tmp_path / "acceptance.json"
    for change, message in (
        ({"accept_length": 9.0}, "accept_length is 9.0"), ({"tok_s": [1.0]}, "1 speeds of 2 rounds"),
        ({"tokens": 26, "accept_length": 4.333, "rows_per_token": 2.462}, "arms gave"),
    ):  # fmt: skip
        data = engine_document(found_cells())
        data["rows"][0] |= change
        if "tokens" in change:
            data["rows"][0] |= {"steps": 6, "rows": 64}
        path.write_text(json.dumps(data))
        with pytest.raises(ValueError, match=message):
            results.load_engine(path)


def test_each_arm_is_another_engine():
    arguments = [arm.arguments_of(name, "cuda") for name in arm.ARMS]
    assert len({json.dumps(a, sort_keys=True) for a in arguments}) == len(arm.ARMS) == 7
    assert arm.arguments_of("tree 64", "cuda")["speculative_num_draft_tokens"] == 64
    assert arm.arguments_of("auto", "cpu")["speculative_ddtree_budget"] == "auto"
    with pytest.raises(ValueError, match="arm: expected one of dflash, chain"):
        arm.speculation_of("tree 7")


class Generator:
    """An Engine whose requests take 2, 3, 4, ... steps. Each is told of its first token, the last request first, and of
    its end; a clock goes on by a second before every chunk."""

    now = 0.0

    def generate(self, prompts, parameters, stream):
        count = parameters["max_new_tokens"]
        assert stream and parameters["stream_interval"] > count
        for length in (1, count):
            for i in reversed(range(len(prompts))):
                Generator.now += 1
                steps, rows = 2 + i, [None, {"nodes_verified": 9, "tree_tokens": 8, "chain_tokens": 6}]
                meta = {"completion_tokens": length, "spec_verify_ct": steps, "ddtree": rows}
                yield {"index": i, "output_ids": [1] * length, "meta_info": meta}


def test_a_batch_takes_the_steps_of_its_longest_request(monkeypatch):
    monkeypatch.setattr(arm, "time", SimpleNamespace(perf_counter=lambda: Generator.now))
    found = arm.generate(Generator(), "dflash", [["a", "b"], ["c", "d"]], 0.0, 5)
    assert (found["tokens"], found["steps"], found["batch_steps"]) == (16, 10, [3, 3])
    # From the first token of the batch's last request to the last chunk.
    assert found["batch_seconds"] == [2.0, 2.0] and found["seconds"] == 4.0
    assert found["rows"] == 8 * 10 and len(found["answers"]) == 4
    assert (found["tree_tokens"], found["chain_tokens"]) == (16, 16)
    tree = arm.generate(Generator(), "tree 8", [["a", "b"]], 0.0, 5)
    assert (tree["rows"], tree["tree_tokens"], tree["chain_tokens"]) == (18, 16, 12)


def test_prompts_fill_whole_batches():
    assert engine.batches_of(["a", "b", "c"], 1) == [["a"], ["b"], ["c"]]
    assert engine.batches_of(["a", "b", "c"], 8) == [["a", "b", "c", "a", "b", "c", "a", "b"]]
    assert engine.batches_of(list("abcdefghij"), 8) == [list("abcdefgh")]
    entries = [{"kind": kind, "prompt": f"{kind} {i}"} for i in range(9) for kind in ("code", "prose", "repeat")]
    assert {kind: len(p) for kind, p in engine.chosen_prompts(entries, None).items()} == {
        "code": 4, "prose": 2, "noise": 0, "long": 0
    }  # fmt: skip


def test_rounds_end_with_the_time_and_sample_at_first(monkeypatch):
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(engine.time, "monotonic", lambda: next(clock))
    asked = []

    class Fake:
        links = dict.fromkeys(("dflash", "auto", "tree 8"))
        started = {name: {"can_sample": name == "auto"} for name in links}

        def ask(self, name, **job):
            if name == "tree 8" and len(asked) > 10:
                raise EOFError
            asked.append((name, job["temperature"]))
            return told(3, 24)

    kept = []
    found = engine.measure(Fake(), {"code": ["a"]}, 12, 40, 9, keep=lambda found: kept.append(len(found)))
    assert len(kept) == 2 * len(found["auto", "0", "code", 1]) and kept[-1] == len(found)
    assert {key[0] for key in found} == {"dflash", "auto"}  # not the one that was lost
    rounds = {key: len(value) for key, value in found.items()}
    assert rounds["dflash", "0", "code", 1] == rounds["auto", "0", "code", 8] >= engine.MIN_ROUNDS
    assert rounds["auto", "1", "code", 1] == 1 and ("dflash", "1", "code", 1) not in rounds
    assert asked.count(("dflash", 0.0)) == 2 * (rounds["dflash", "0", "code", 1] + 1)


def test_a_paired_run_goes_prompt_by_prompt_and_arms_take_turns():
    asked = []

    class Fake:
        links = dict.fromkeys(("dflash", "auto"))
        started = {name: {"can_sample": True} for name in links}

        def ask(self, name, batches, temperature, tokens):
            asked.append((name, temperature, *batches))
            return told(3, 24)

    prompts = {"code": ["a", "b"]}
    found = engine.measure(Fake(), prompts, 12, 1e9, 2, keep=lambda found: None, is_paired=True)
    assert [len(rounds) for rounds in found.values()] == [2] * 6  # two arms; greedy, greedy in batches, sampled
    assert (
        len(found["auto", "1", "code", 1][0]["batch_seconds"]) == 2 and found["auto", "0", "code", 1][0]["steps"] == 6
    )
    sampled = engine.measure(Fake(), prompts, 12, 1e9, 4, lambda found: None, is_paired=True, temperatures=["1"])
    assert {key[1:] for key in sampled} == {("1", "code", 1)} and [len(rounds) for rounds in sampled.values()] == [4, 4]
    greedy = [(name, batch) for name, temperature, batch in asked if temperature == 0 and len(batch) == 1]
    in_order = [("dflash", ["a"]), ("auto", ["a"]), ("dflash", ["b"]), ("auto", ["b"])]
    first_of_second_round = [("auto", ["a"]), ("dflash", ["a"]), ("auto", ["b"]), ("dflash", ["b"])]
    assert greedy == in_order + in_order + first_of_second_round  # what warms up, and two rounds


def test_what_a_machine_adds_to_a_time_does_not_move_the_least_ones():
    """Another prompt is disturbed in each round; auto takes 3 steps of 1.2 for 4 of 1."""
    found = {}
    for name, steps, ms in (("dflash", 4, 1.0), ("auto", 3, 1.2)):
        for i in range(3):
            seconds = [steps * ms * (5 if i == j else 1) / 1e3 for j in range(3)]
            found.setdefault((name, "0", "code", 1), []).append({
                "seconds": sum(seconds), "batch_seconds": seconds, "tokens": 36, "steps": 3 * steps,
                "batch_steps": [steps] * 3, "rows": 24 * steps,
                "tree_tokens": 36, "chain_tokens": 36 if name == "dflash" else 30,
            })  # fmt: skip
    chain, auto = engine.rows_of_file(found)
    assert (chain["least_step_ms"], auto["least_step_ms"]) == (1.0, 1.2)
    assert auto["over_dflash_least"] == pytest.approx(4 / 3 / 1.2, abs=1e-4)
    assert auto["over_dflash_same_text"] == pytest.approx(36 / 30 / 1.2, abs=1e-4)
    assert auto["over_dflash_interval"] == [auto["over_dflash"][1]] * 2  # all rounds were equally disturbed
    assert engine.interval_of_median([1.0, 1.1, 0.9, 1.05, 0.95]) == engine.interval_of_median(
        [1.0, 1.1, 0.9, 1.05, 0.95]
    )
    low, high = engine.interval_of_median([0.9 + 0.01 * i for i in range(21)])
    assert 0.9 < low < 1.0 < high < 1.1
    (line,) = table.engine_paired({"rows": [chain, auto]}).splitlines()[2:]
    assert line.startswith(
        "| code, T = 0, 1 at once | auto | 3.00 -> 4.00 | 1.00 -> 1.20 | 1.111 (1.111 to 1.111) | 1.111"
    )


def test_layers_that_are_added_add_nothing(tmp_path):
    from acceptance.deeper import make_deeper
    from safetensors.torch import load_file

    make_deeper(arm.MODELS, 5, tmp_path / "models")
    before, after = (load_file(folder / "target" / "model.safetensors") for folder in (arm.MODELS, tmp_path / "models"))
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    added = [name for name in after if name not in before]
    assert {name.split(".")[2] for name in added} == {"3", "4"}
    assert all(name.endswith(("o_proj.weight", "down_proj.weight")) == (not after[name].any()) for name in added)
    assert json.loads((tmp_path / "models" / "target" / "config.json").read_text())["num_hidden_layers"] == 5
    assert arm.arguments_of("auto", "cuda", tmp_path / "models", (1, 8))["cuda_graph_bs_decode"] == [1, 8]
    with pytest.raises(ValueError, match="layers: expected at least the 3 trained ones; got 2"):
        make_deeper(arm.MODELS, 2, tmp_path / "more")


def test_arms_of_a_paired_run_share_no_core(monkeypatch):
    monkeypatch.setattr(engine.os, "sched_getaffinity", lambda pid: set(range(16)))
    assert engine.cores_of(["a", "b", "c"]) == {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7], "c": [8, 9, 10, 11]}
    monkeypatch.setattr(engine.os, "sched_getaffinity", lambda pid: {0, 1})
    assert engine.cores_of(["a", "b"]) == {}


def test_steps_that_the_walk_does_not_take_are_a_problem():
    walks = [
        {"arm": "tree 8", "temperature": "0", "kind": "code", "steps": 101, "walk_steps": 100},
        {"arm": "tree 8", "temperature": "0", "kind": "prose", "steps": 110, "walk_steps": 100},
    ]
    assert engine.problems_of(walks, "cpu") == [
        "tree 8, T = 0, code: 101 steps, 100 in the walk", "tree 8, T = 0, prose: 110 steps, 100 in the walk"
    ]  # fmt: skip
    assert [p.split(":")[0] for p in engine.problems_of(walks, "cuda")] == ["tree 8, T = 0, prose"]


def test_answers_of_an_engine_are_walked_in_every_way(monkeypatch):
    """Of one arm: the first tree. Scores that know the answer let every way take whole blocks."""
    tokens = list(range(10, 34))
    known = torch.full((len(tokens), arm.BLOCK - 1, 90), -9.0)
    for start in range(len(tokens)):
        for depth, token in enumerate(tokens[start + 1 : start + arm.BLOCK]):
            known[start, depth, token] = 0.0
    monkeypatch.syspath_prepend(str(arm.MODELS))
    scores = pytest.importorskip("acceptance.scores")
    encode = SimpleNamespace(encode=lambda prompt: SimpleNamespace(ids=[1, 2]))
    monkeypatch.setattr(scores, "load_models", lambda: (None, None, encode))
    monkeypatch.setattr(scores, "log_probs_of", lambda target, drafter, continuation: known)
    told = [
        {"arm": name, "temperature": "0", "kind": "code", "steps": 3, "answers": [tokens]}
        for name in ("dflash", "tree 16", "tree 64")
    ]
    ways = engine.ways_of(told, {"code": ["a"]})["0"]["code"]
    assert {ways[way]["steps"] for way in ("chain", "tree 64", "seeded 8", "seeded 64")} == {3}
    assert ways["chain"]["tokens"] == 23
    assert len(table.engine_ways({"ways": {"0": {"code": ways}}}).splitlines()) == 2 + 1 + 2 * len(WIDTHS)
    assert len(table.engine_adaptive({"ways": {"0": {"code": ways}}}).splitlines()) == 2 + len(ROW_COSTS)


@pytest.mark.parametrize("name", ["acceptance", "acceptance_auto", "acceptance_auto_sampled"])
def test_the_committed_files_of_engines_are_consistent_and_fill_their_tables(name):
    path = RESULT.parents[1] / "h200" / f"{name}.json"
    data = results.load_engine(path)
    assert "first_answers" not in data, "finish it with --walk"
    tables = [table.engine_acceptance, table.engine_speeds, table.engine_against_chain]
    if data["header"].get("paired"):
        tables = [table.engine_paired, table.engine_ways, table.engine_adaptive]
        assert {t for t, _ in table.columns_of({"walks": data["ways"]})} == {row["temperature"] for row in data["rows"]}
    for make in tables:
        assert len({line.count("|") for line in make(data).splitlines()}) == 1


def test_auto_keeps_its_promise_in_the_committed_files():
    """At most 2 % slower than upstream's chain: greedy answers by least times, sampled ones on the same text."""
    greedy, sampled = (
        [
            row
            for row in results.load_engine(RESULT.parents[1] / "h200" / f"{name}.json")["rows"]
            if row["arm"] == "auto"
        ]
        for name in ("acceptance_auto", "acceptance_auto_sampled")
    )
    ratios = [row["over_dflash_least"] for row in greedy if row["temperature"] == "0"]
    ratios += [row["over_dflash_same_text"] for row in sampled]
    assert len(ratios) == 13 and min(ratios) >= 0.98


COMMIT_LENGTH = RESULT.parents[1] / "h200" / "commit_length.json"


def test_the_committed_lengths_are_those_of_the_documented_command_and_fill_their_tables():
    from sglang.kdtree.cli import build_parser

    data = results.load_commit_length(COMMIT_LENGTH)
    words = documented("docs/ddtree.md", "python -m sglang.kdtree probe commit-length")
    asked = build_parser().parse_args(words[3:])
    for run in data["runs"].values():
        assert [(p["text"], p["context"]) for p in run["points"]] == [
            (text, context) for text in ("phrase", asked.novel) for context in asked.contexts
        ]
        # The first token is the prefill's.
        assert {round(p["steps"] * p["commit_length"]) for p in run["points"]} == {asked.output_tokens - 1}
    lines = table.commit_length(data).splitlines()
    assert lines[0] == "| context | phrase, yarn_window | prose, yarn_window | phrase, yarn | prose, yarn |"
    assert len(lines) == 2 + len(asked.contexts) and not any("| - |" in line for line in lines)
    del data["runs"]["yarn"]["points"][-1]
    assert table.commit_length(data).splitlines()[-1].endswith("| - |")
    header = table.commit_length_header(data)
    assert data["header"]["gpu"] in header and data["header"]["commit"][:12] in header


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 18}, "phrase at 1000: 18 steps, 17 in its histogram"),
        ({"chain_length": 7.6}, "expected 1 <= chain <= commit <= 8, got 7.6"),
        ({"accepted_drafts": 5.0}, "5.0 accepted drafts, 6.47"),
        (None, "yarn: schema 'other/1', expected 'sglang.kdtree/probe-commit-length/1'"),
    ],
)
def test_an_inconsistent_file_of_commit_lengths_is_refused(tmp_path, change, message):
    data = json.loads(COMMIT_LENGTH.read_text())
    if change is None:
        data["runs"]["yarn"]["schema"] = "other/1"
    else:
        data["runs"]["yarn_window"]["points"][0] |= change
    path = tmp_path / "r.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        results.load_commit_length(path)
