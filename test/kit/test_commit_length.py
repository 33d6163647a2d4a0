# SPDX-License-Identifier: Apache-2.0
"""The commit-length probe: its numbers from a stream, and the verdict for each way a drafter can fail."""

import pytest
from kit.scripted import sglang_stream

from sglang.kdtree.bench.client import Event, Reply
from sglang.kdtree.bench.text import PHRASE
from sglang.kdtree.cli import main
from sglang.kdtree.probe.commit_length import Point, chain_length, judge, phrase_share, point_from


def point(text, context, commit, follows=1.0):
    return Point(
        text=text,
        context=context,
        prompt_tokens=context,
        steps=16,
        commit_length=commit,
        accepted_drafts=commit - 1,
        proposed_drafts=8.0,
        histogram=None,
        follows_phrase=follows if text == "phrase" else None,
    )


def points(phrase, novel):
    contexts = (1_000, 16_000, 64_000, 128_000)
    return [
        *(point("phrase", context, value) for context, value in zip(contexts, phrase, strict=True)),
        *(point("prose", context, value) for context, value in zip(contexts, novel, strict=True)),
    ]


class TestVerdict:
    def test_a_working_drafter_on_hard_text(self):
        """7.88 / 7.00 / 7.00 / 7.88 on the phrase and 1.00 on novel prose: the drafter works, the text is hard."""
        verdict = judge(points([7.88, 7.00, 7.00, 7.88], [1.0, 1.0, 1.0, 1.0]))
        assert verdict.name == "text-too-hard" and not verdict.is_finding
        assert "7.00 to 7.88" in verdict.reasoning

    def test_healthy(self):
        assert judge(points([7.9, 7.5, 7.0, 7.0], [2.6, 2.4, 2.2, 2.0])).name == "healthy"

    def test_a_drafter_that_loses_the_context(self):
        verdict = judge(points([7.88, 7.0, 2.1, 1.2], [2.0, 1.5, 1.2, 1.0]))
        assert verdict.name == "drafter-loses-context" and verdict.is_finding
        assert "64,000 (2.10), 128,000 (1.20)" in verdict.reasoning

    def test_a_drop_within_the_kept_share_is_no_loss(self):
        assert judge(points([7.0, 7.0, 7.0, 4.3], [2.0] * 4)).name == "healthy"
        assert judge(points([7.0, 7.0, 7.0, 4.1], [2.0] * 4)).name == "drafter-loses-context"

    def test_not_even_the_phrase(self):
        verdict = judge(points([1.2, 1.1, 1.0, 1.0], [1.0] * 4))
        assert verdict.name == "drafter-or-bug" and "probe verify" in verdict.remedy

    def test_a_target_that_strays_proves_nothing(self):
        stray = [point("phrase", 1_000, 1.1, follows=0.3), point("prose", 1_000, 1.0)]
        assert judge(stray).name == "inconclusive"


class TestPoint:
    def test_numbers_of_a_stream(self):
        """One token from the prefill, then 63 in 8 steps: 7.875 a step, 6.875 of 8 drafts accepted."""
        events = [Event(at=float(i), completion_tokens=count) for i, count in enumerate([1, 33, 64])]
        meta = {
            "spec_num_correct_drafts": 55,
            "spec_num_proposed_drafts": 64,
            "spec_correct_drafts_histogram": [0, 0, 0, 0, 0, 0, 1, 7],
            "ddtree": [None, None, {"steps": 8, "tree_tokens": 63, "chain_tokens": 50, "stops": {"6:leaf": 8}}],
        }
        reply = Reply(
            sent_at=0.0, events=events, text=PHRASE, prompt_tokens=999, completion_tokens=64, verify_steps=8, meta=meta
        )
        got = point_from(reply, kind="phrase", context=1_000)
        assert got.commit_length == 7.875
        assert got.accepted_drafts == 6.875
        assert got.proposed_drafts == 8.0
        assert got.histogram == [0, 0, 0, 0, 0, 0, 1, 7]
        assert got.follows_phrase == 1.0
        assert got.chain_length == 6.25

    @pytest.mark.parametrize("values", [None, [], [None], [{}], {"tree_tokens": 1}, [{"tree_tokens": 0}]])
    def test_without_ddtrees_totals_there_is_no_chain(self, values):
        assert chain_length({"ddtree": values}, 7.0) is None and chain_length({}, 7.0) is None

    @pytest.mark.parametrize(
        ("text", "share"),
        [
            ("sat on the mat. The cat sat", 1.0),  # starts in the middle of the phrase
            ("The cat sat on the dog. ", 6 / 7),
            ("", 0.0),
            ("import os", 0.0),
        ],
    )
    def test_share_of_the_phrase(self, text, share):
        assert phrase_share(text) == pytest.approx(share)


class TestVerb:
    def serve(self, scripted):
        def generate(body):
            predictable = "cat" in body["text"][:60]
            counts = [1, 9, 17, 25, 33] if predictable else [1, 2, 3, 4, 5]
            return sglang_stream(
                counts,
                prompt_tokens=len(body["text"].split()),
                verify=4,
                text=PHRASE * 5,
                spec_num_correct_drafts=28 if predictable else 0,
                spec_num_proposed_drafts=32,
            )

        scripted.pages["/generate"] = (200, generate)
        scripted.pages["/tokenize"] = (200, lambda body: {"count": len(body["prompt"].split())})

    def test_against_a_scripted_server(self, scripted, cli, capsys):
        self.serve(scripted)
        code, document = cli(
            "probe", "commit-length", "--url", scripted.url, "--contexts", "500,2k,64k", "--output-tokens", 33
        )  # fmt: skip
        assert code == 0
        assert document["skipped_contexts"] == [64_000]
        assert [(p["text"], p["context"], p["commit_length"]) for p in document["points"]] == [
            ("phrase", 500, 8.0), ("phrase", 2_000, 8.0), ("prose", 500, 1.0), ("prose", 2_000, 1.0),
        ]  # fmt: skip
        assert document["points"][0]["accepted_drafts"] == 7.0
        assert document["verdict"]["name"] == "text-too-hard"
        assert main(["probe", "commit-length", "--url", scripted.url, "--contexts", "500,64k"]) == 0
        assert "skipped, the server holds less: 64,000" in capsys.readouterr().out

    def test_a_server_that_does_not_speculate(self, scripted, cli_error):
        scripted.pages["/server_info"] = (200, {"version": "0.5.23", "speculative_algorithm": None})
        assert "DDTREE" in cli_error("probe", "commit-length", "--url", scripted.url)["remedy"]

    def test_contexts_that_are_all_too_long(self, scripted, cli_error):
        error = cli_error("probe", "commit-length", "--url", scripted.url, "--contexts", "64k")
        assert error["what"] == "--contexts"
