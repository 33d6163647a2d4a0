# SPDX-License-Identifier: Apache-2.0
"""Streaming measurements: arithmetic on given timestamps, the three wire formats, prompts, comparison."""

import itertools
import json
import sys

import pytest
from docs.documents import documented
from kit.scripted import sglang_stream

from sglang.kdtree.arguments import counts
from sglang.kdtree.bench import compare, text
from sglang.kdtree.bench.client import Client, Event, Reply, ServerFacts, absorb, request_body
from sglang.kdtree.bench.longctx import DEFAULT_CONTEXTS, PromptMaker, choose_contexts, findings
from sglang.kdtree.bench.measure import measure, percentile, summarise
from sglang.kdtree.errors import KitError


def reply_at(times, counts, **fields):
    """A reply whose messages came at these seconds with these token counts."""
    events = [Event(at=at, completion_tokens=count) for at, count in zip(times, counts, strict=True)]
    defaults = {"sent_at": 10.0, "text": "", "prompt_tokens": 1_000, "completion_tokens": counts[-1] if counts else 0}
    return Reply(events=events, **(defaults | fields))


class TestMeasure:
    def test_rates_and_steps(self):
        """First token after 2 s; then 12 tokens in three steps of 0.5, 0.25 and 0.25 s."""
        got = measure(reply_at([12.0, 12.5, 12.75, 13.0], [1, 5, 9, 13], verify_steps=3, cached_tokens=200))
        assert got.ttft_s == 2.0
        assert got.prefill_tok_s == 400.0  # 800 computed tokens
        assert got.decode_tok_s == 12.0
        assert got.accept_length == 4.0
        assert got.step_ms == [500.0, 250.0, 250.0]
        assert got.step_tokens == [4, 4, 4]

    def test_merged_messages_do_not_raise_the_accept_length(self):
        """Two steps in one message: the server's own count of verify steps is what counts."""
        assert measure(reply_at([12.0, 13.0], [1, 9], verify_steps=2)).accept_length == 4.0

    def test_without_a_step_count_a_message_is_a_step(self):
        assert measure(reply_at([12.0, 12.5, 13.0], [1, 3, 4])).accept_length == 1.5

    def test_a_server_that_counts_only_at_the_end(self):
        got = measure(reply_at([12.0, 12.5, 13.0], [None, None, None], completion_tokens=9))
        assert got.decode_tok_s == 8.0 and got.accept_length == 4.0 and got.step_tokens == []

    def test_a_collapsed_decode(self):
        """63,903 tokens at one token a step of 0.357 s are 2.8 tokens/s."""
        times = [12.0 + 0.357 * i for i in range(11)]
        got = measure(reply_at(times, list(range(1, 12)), prompt_tokens=63_903, verify_steps=10))
        assert got.decode_tok_s == pytest.approx(2.801, abs=1e-3)
        assert got.accept_length == 1.0

    @pytest.mark.parametrize("counts", [[], [4]])
    def test_too_short_a_stream_is_refused(self, counts):
        with pytest.raises(KitError, match="at least two messages"):
            measure(reply_at([12.0] * len(counts), counts, completion_tokens=4))

    def test_percentiles_interpolate(self):
        assert percentile([4, 1, 3, 2], 0.5) == 2.5
        assert percentile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 0.9) == 10
        assert percentile([7], 0.9) == 7

    def test_a_row_takes_step_times_of_all_repeats(self):
        runs = [
            measure(reply_at([11.0, 11.1, 11.2], [1, 2, 3], output_ids=[1, 2, 3, 4, 5])),
            measure(reply_at([12.0, 12.3, 12.6], [1, 2, 3], output_ids=[9, 9, 9, 9, 9], cached_tokens=3)),
        ]
        row = summarise("code", 1_000, runs)
        assert row["step_ms"]["p50"] == pytest.approx(200.0)
        assert row["decode_tok_s"]["p50"] == pytest.approx((10 + 10 / 3) / 2)
        assert row["distinct_4grams"] == (1 + 1 / 2) / 2
        assert row["cached_tokens"] == 3


class TestWire:
    def test_sglang_messages_are_cumulative(self):
        reply = Reply(sent_at=0.0, events=[], text="")
        messages = sglang_stream([1, 4, 4, 9], prompt_tokens=70, cached=2, verify=2)
        for at, message in enumerate(messages[:-1]):
            absorb("sglang", reply, message, at=float(at))
        assert [(e.at, e.completion_tokens) for e in reply.events] == [(0.0, 1), (1.0, 4), (3.0, 9)]
        assert (reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens) == (70, 2, 9)
        assert reply.verify_steps == 2 and reply.output_ids == list(range(9))

    def test_sglang_with_incremental_output(self):
        reply = Reply(sent_at=0.0, events=[], text="")
        for count, piece in ((1, "ab"), (2, "c")):
            message = {"text": piece, "meta_info": {"completion_tokens": count, "prompt_tokens": 7}}
            absorb("sglang", reply, message, at=0.0)
        assert reply.text == "abc"

    def test_chat_messages_with_usage_in_each(self):
        reply = Reply(sent_at=0.0, events=[], text="")
        messages = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": "a"}}], "usage": {"prompt_tokens": 5, "completion_tokens": 1}},
            {
                "choices": [{"delta": {"reasoning_content": "bc"}}],
                "usage": {"prompt_tokens": 5, "completion_tokens": 3},
            },
            {"choices": [{"delta": {}, "finish_reason": "length"}]},
            {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}},
        ]
        for at, message in enumerate(messages):
            absorb("chat", reply, message, at=float(at))
        assert [(e.at, e.completion_tokens) for e in reply.events] == [(1.0, 1), (2.0, 3)]
        assert reply.text == "abc" and reply.completion_tokens == 3

    def test_completions_of_a_server_without_continuous_usage(self):
        reply = Reply(sent_at=0.0, events=[], text="")
        for at, message in enumerate(
            [
                {"choices": [{"text": "a"}], "usage": None},
                {"choices": [{"text": "b"}], "usage": None},
                {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}},
            ]
        ):
            absorb("completions", reply, message, at=float(at))
        assert [e.completion_tokens for e in reply.events] == [None, None]
        assert reply.completion_tokens == 4

    @pytest.mark.parametrize(
        ("api", "path", "prompt"),
        [
            ("sglang", "/generate", lambda b: b["text"]),
            ("completions", "/v1/completions", lambda b: b["prompt"]),
            ("chat", "/v1/chat/completions", lambda b: b["messages"][0]["content"]),
        ],
    )
    def test_every_request_streams_and_goes_on_past_the_end_of_text(self, api, path, prompt):
        got, body = request_body(api, "m", "hello", max_tokens=5, temperature=0.0)
        assert got == path and prompt(body) == "hello" and body["stream"] is True
        assert body.get("ignore_eos", body.get("sampling_params", {}).get("ignore_eos")) is True


class WordCounter:
    """In the place of a client: a word is a token."""

    asked = 0

    def count_tokens(self, prompt):
        self.asked += 1
        return len(prompt.split())


class TestPrompts:
    @pytest.mark.parametrize("kind", text.KINDS)
    def test_length_and_repeatability(self, kind):
        source = text.load_source(kind)
        one, same = (text.build_prompt(source, characters=5_000, seed=1, repeat=0, nonce="n") for _ in range(2))
        assert one == same and len(one) == 5_000
        other = text.build_prompt(source, characters=5_000, seed=2, repeat=0, nonce="n")
        assert (one == other) == (kind == "phrase")

    def test_no_two_prompts_share_a_prefix(self):
        nonces = {
            text.nonce_for(run=run, kind=kind, context=context, repeat=repeat)
            for run, kind, context, repeat in itertools.product("ab", text.KINDS, (1_000, 2_000), range(3))
        }
        assert len(nonces) == 36 and {len(nonce) for nonce in nonces} == {16}
        source = text.load_source("phrase")
        prompts = [text.build_prompt(source, characters=300, seed=0, repeat=0, nonce=nonce) for nonce in nonces]
        heads = {prompt[:6] for prompt in prompts}
        assert len(heads) > 30  # the first characters already differ

    def test_there_is_enough_text_for_200k_tokens(self):
        """At four characters a token, without going round."""
        assert len(text.load_source("code").text) > 800_000
        assert len(text.load_source("prose").text) > 600_000

    def test_the_window_goes_round_at_the_end(self):
        assert text.Source(kind="code", text="abcde").window(start=3, length=7) == "deabcde"
        assert text.Source(kind="code", text="abcde").window(start=8, length=2) == "de"

    @pytest.mark.parametrize("wanted", [30, 300, 1_000])
    def test_length_in_tokens_on_uneven_text(self, wanted):
        """Lines of words beside tables of one long word each: characters a token jump between 3 and 2,000."""
        table = "x" * 2_000 + "\n"
        source = text.Source(kind="code", text="".join("ab " * 50 * (i % 7) + table * (i % 5) for i in range(400)))
        counter = WordCounter()
        for repeat in range(40):
            maker = PromptMaker(counter, source, seed=0, run="r")
            counted = counter.count_tokens(maker.make(wanted, repeat=repeat))
            assert counted == pytest.approx(wanted, rel=0.01, abs=1)

    def test_even_text_is_counted_once_more_at_most(self):
        counter = WordCounter()
        maker = PromptMaker(counter, text.Source(kind="code", text="abc " * 5_000), seed=0, run="r")
        maker.make(1_000, repeat=0)
        assert counter.asked <= 3  # the sample, the first prompt, its correction

    def test_distinct_ngrams_tell_a_loop_from_text(self):
        assert text.distinct_ngrams(list(range(20))) == 1.0
        assert text.distinct_ngrams([1, 2] * 10) == 2 / 17
        assert text.distinct_ngrams([1, 2, 3]) is None
        assert text.words("The cat, twice.") == ["The", "cat", ",", "twice", "."]


class TestVerb:
    def serve(self, scripted, *, cached=0, text="abc " * 40):
        def generate(body):
            size = len(body["text"].split())
            return sglang_stream(range(1, 18, 4), prompt_tokens=size, cached=cached, verify=4, text=text)

        scripted.pages["/generate"] = (200, generate)
        scripted.pages["/tokenize"] = (200, lambda body: {"count": len(body["prompt"].split())})

    def test_rows_against_a_scripted_server(self, scripted, cli, tmp_path):
        self.serve(scripted)
        plot, out = tmp_path / "a.png", tmp_path / "a.json"
        code, document = cli(
            "bench", "longctx", "--url", scripted.url, "--contexts", "300,1k", "--text", "prose", "--text", "code",
            "--repeats", 2, "--output-tokens", 17, "--plot", plot, "--output", out,
        )  # fmt: skip
        assert code == 0 and not document["warnings"]
        assert [(row["text"], row["context"]) for row in document["rows"]] == [
            ("prose", 300), ("prose", 1000), ("code", 300), ("code", 1000),
        ]  # fmt: skip
        for row in document["rows"]:
            assert row["prompt_tokens"] == pytest.approx(row["context"], rel=0.01)
            assert row["accept_length"] == {"p50": 4.0, "p90": 4.0}
        assert document["server"]["attention_backend"] == "kdtree_sm120"
        assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert json.loads(out.read_text()) == document
        prompts = [body["text"] for path, body in scripted.requests if path == "/generate"]
        assert len(prompts) == len({prompt[:18] for prompt in prompts}) == 8

    def test_a_cached_prefix_is_a_finding(self, scripted, cli):
        self.serve(scripted, cached=250)
        code, document = cli("bench", "longctx", "--url", scripted.url, "--contexts", "300", "--text", "code")
        assert code == 1 and "250 prompt tokens came from a cache" in document["warnings"][0]

    def test_contexts_beyond_the_server_are_skipped_and_said(self, scripted, cli):
        self.serve(scripted)
        code, document = cli("bench", "longctx", "--url", scripted.url, "--contexts", "300,8k", "--text", "code")
        assert code == 1
        assert [row["context"] for row in document["skipped"]] == [8_000]
        assert "3968 tokens that the server holds beside 128" in document["skipped"][0]["why"]

    def test_a_loop_is_said_but_not_on_the_phrase(self):
        row = {"text": "code", "context": 1, "cached_tokens": None, "distinct_4grams": 0.1}
        assert "10% of the answer's 4-grams" in findings([row])[0]
        assert findings([row | {"text": "phrase"}]) == []

    def test_contexts_as_people_write_them(self):
        assert counts("1k, 16K,185000,1.5k,200_000,1M") == [1_000, 16_000, 185_000, 1_500, 200_000, 1_000_000]

    @pytest.mark.parametrize(
        ("context", "pool", "chosen"),
        [
            (200_000, 400_000, [1, 4, 16, 32, 64, 128, 185, 197]),
            (200_000, 195_011, [1, 4, 16, 32, 64, 128, 185, 192]),
            (262_144, 262_144, [1, 4, 16, 32, 64, 128, 185, 200]),
            (4_096, 16_384, [1, 3.86]),
            (512, None, [0.31]),
            (None, None, [1, 4, 16, 32, 64, 128, 185, 200]),
        ],
    )
    def test_contexts_by_default_are_what_the_server_holds(self, context, pool, chosen):
        facts = ServerFacts(
            url="", api="sglang", model="m", engine="sglang", max_model_len=context, num_draft_tokens=9, page_size=1,
            raw={"max_total_num_tokens": pool},
        )  # fmt: skip
        got, beyond = choose_contexts(None, facts, DEFAULT_CONTEXTS, 128)
        assert [count / 1000 for count in got] == chosen and not beyond

    def test_a_plain_call_finds_nothing_amiss_on_a_server_that_ends_below_the_longest(self, scripted, cli):
        self.serve(scripted)
        scripted.pages["/server_info"][1]["max_total_num_tokens"] = 2_000
        code, document = cli("bench", "longctx", "--url", scripted.url, "--repeats", 1, "--output-tokens", 17)
        assert code == 0 and not document["skipped"]
        assert document["settings"]["contexts"] == [1_000, 1_880] and len(document["rows"]) == 4

    def test_contexts_beyond_the_pool_are_skipped_too(self, scripted, cli, cli_error):
        self.serve(scripted)
        scripted.pages["/server_info"][1]["max_total_num_tokens"] = 1_000
        line = ("bench", "longctx", "--url", scripted.url, "--text", "code", "--output-tokens", 17, "--contexts")
        code, document = cli(*line, "300,964,965")
        assert code == 1 and [row["context"] for row in document["skipped"]] == [965]
        assert "964 at most" in cli_error(*line, "2k")["expected"]


class TestBadServer:
    def test_nobody_listens(self, cli_error):
        error = cli_error("bench", "longctx", "--url", "http://127.0.0.1:9")
        assert "ConnectionError" in error["got"] and "--url" in error["remedy"]

    def test_no_scheme(self, cli_error):
        assert cli_error("bench", "longctx", "--url", "localhost:30000")["what"] == "--url"

    def test_a_wrong_model_name_lists_the_right_ones(self, scripted, cli_error):
        error = cli_error("bench", "longctx", "--url", scripted.url, "--model", "gpt-9")
        assert error["what"] == "--model" and "'tiny'" in error["expected"]

    def test_no_sglang_server(self, scripted, cli_error):
        del scripted.pages["/model_info"]
        assert "--api completions" in cli_error("bench", "longctx", "--url", scripted.url)["remedy"]

    def test_a_key_is_sent_and_its_lack_explained(self, scripted, cli_error, monkeypatch):
        scripted.pages["/v1/models"] = (401, "no")
        monkeypatch.setenv("SGLANG_API_KEY", "secret")
        assert "--api-key" in cli_error("bench", "longctx", "--url", scripted.url)["remedy"]
        assert scripted.headers[-1]["Authorization"] == "Bearer secret"

    def test_truncated_json(self, scripted, cli_error):
        scripted.pages["/server_info"] = (200, '{"version": "0.5.')
        assert cli_error("bench", "longctx", "--url", scripted.url)["expected"] == "complete JSON"

    @pytest.mark.parametrize(
        ("page", "said"),
        [
            (['{"text": "a", "meta_in'], "complete JSON in every message"),
            ([{"text": "a", "meta_info": {"completion_tokens": 1, "prompt_tokens": 9}}], "[DONE]"),
            ([{"error": {"message": "too long"}}], "generated text"),
            ([[1, 2]], "a JSON object"),
            ([{"text": "a"}, "[DONE]"], "messages of the form of --api sglang"),
            ([{"text": "a", "meta_info": None}, "[DONE]"], "messages of the form of --api sglang"),
        ],
    )
    def test_a_broken_stream(self, scripted, page, said):
        scripted.pages["/generate"] = (200, page)
        with pytest.raises(KitError) as caught:
            Client(scripted.url).stream("x", max_tokens=4, temperature=0.0)
        assert said in caught.value.expected

    @pytest.mark.parametrize("page", ["<html>", [1], {"count": "many"}])
    def test_a_tokenizer_that_answers_something_else(self, scripted, cli_error, page):
        """A page that is no JSON is an error; one without a count is a server that offers none."""
        text = page if isinstance(page, str) else json.dumps(page)
        scripted.pages |= {"/tokenize": (200, text), "/generate": (200, sglang_stream([1, 2], prompt_tokens=0))}
        error = cli_error("bench", "longctx", "--url", scripted.url, "--contexts", "300")
        assert error["expected"] == ("complete JSON" if page == "<html>" else "prompt_tokens in the answer")

    @pytest.mark.parametrize("page", [{"data": None}, {"data": [1]}, [], {}])
    def test_a_list_of_models_of_another_form(self, scripted, cli_error, page):
        scripted.pages["/v1/models"] = (200, page if isinstance(page, dict) else json.dumps(page))
        error = cli_error("bench", "longctx", "--url", scripted.url, "--api", "chat")
        assert error["expected"] == "a list of served models"

    def test_a_connection_that_breaks_in_the_middle(self, scripted):
        """The server announces more than it sends."""
        scripted.pages["/generate"] = (200, sglang_stream([1, 2], prompt_tokens=9)[:1])
        scripted.promised_length = 10_000
        with pytest.raises(KitError, match="in the middle"):
            Client(scripted.url).stream("x", max_tokens=4, temperature=0.0)

    def test_a_refusal_is_passed_on(self, scripted):
        scripted.pages["/generate"] = (400, {"error": "input too long"})
        with pytest.raises(KitError, match="input too long"):
            Client(scripted.url).stream("x", max_tokens=4, temperature=0.0)

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--contexts", "1k,long"],
            ["--contexts", "0.0001k"],
            ["--contexts", ""],
            ["--output-tokens", 1],
            ["--repeats", 0],
            ["--temperature", "nan"],
            ["--timeout", 0],
            ["--url", "http://"],
            ["--url", "http://127.0.0.1:999999"],
        ],
    )
    def test_bad_arguments(self, cli_error, arguments):
        assert cli_error("bench", "longctx", *arguments)["what"] == arguments[0]

    @pytest.mark.parametrize(
        "arguments", [["--plot", "/proc/x.png"], ["--plot", "x.docx"], ["--output", "/"], ["--plot", "/"]]
    )
    def test_a_file_that_could_not_be_written_is_refused_before_the_measurement(self, cli_error, arguments, scripted):
        error = cli_error("bench", "longctx", "--url", scripted.url, *arguments)
        assert error["what"] == " ".join(arguments) and not scripted.requests


class TestCompare:
    def run_of(self, path, speeds, **changes):
        def same(value):
            return {"p50": value, "p90": value}

        server = dict(
            url="http://x", api="sglang", model="m", engine="sglang", version="1", max_model_len=None,
            speculative_algorithm="DDTREE", num_draft_tokens=9, attention_backend="triton", page_size=1,
        )  # fmt: skip
        document = {
            "schema": "sglang.kdtree/bench-longctx/1",
            "exit_code": 0,
            "label": "",
            "server": server | changes,
            "settings": dict(
                contexts=list(speeds), texts=["prose"], output_tokens=8, repeats=1, temperature=0.0, seed=0, nonce="n"
            ),
            "rows": [
                dict(
                    text="prose", context=context, prompt_tokens=context, cached_tokens=0, repeats=1, ttft_s=same(1.0),
                    prefill_tok_s=same(1.0), decode_tok_s=same(speed), step_ms=same(1000 / speed),
                    accept_length=same(1.0), distinct_4grams=1.0,
                )
                for context, speed in speeds.items()
            ],
            "skipped": [],
            "warnings": [],
        }  # fmt: skip
        path.write_text(json.dumps(document))
        return path

    def test_a_published_table(self, cli, tmp_path, monkeypatch):
        """Triton with graphs against the custom kernel: 3.0x, 4.3x, 6.1x. In the documents' words."""
        monkeypatch.chdir(tmp_path)
        for name in ("a.json", "stock.json"):
            self.run_of(tmp_path / name, {4_000: 39.0, 16_000: 6.8, 65_000: 1.5})
        for name in ("b.json", "ours.json"):
            self.run_of(tmp_path / name, {4_000: 116.5, 16_000: 29.1, 65_000: 9.2}, attention_backend="kdtree_sm120")
        line = documented("docs/kit.md", "python -m sglang.kdtree bench compare")
        code, document = cli(*line[3:])
        assert code == 0
        assert [round(row["decode_ratio"], 1) for row in document["rows"]] == [3.0, 4.3, 6.1]
        assert document["differs"] == ["attention_backend: triton against kdtree_sm120"]
        assert (tmp_path / "ab.png").stat().st_size > 10_000
        shorter = documented("docs/deploy-kimi-k2.6.md", "python -m sglang.kdtree bench compare")
        assert cli(*shorter[3:])[1]["rows"] == document["rows"]

    def test_a_slower_run_is_a_finding(self, cli, tmp_path):
        a = self.run_of(tmp_path / "a.json", {1_000: 100.0, 2_000: 50.0})
        b = self.run_of(tmp_path / "b.json", {1_000: 98.0, 2_000: 40.0})
        code, document = cli("bench", "compare", a, b)
        assert code == 1 and document["slower"] == 1

    def test_what_a_run_warned_of_is_said_again(self, cli, tmp_path):
        a, b = (self.run_of(tmp_path / name, {1_000: 100.0}) for name in ("a.json", "b.json"))
        b.write_text(json.dumps(json.loads(b.read_text()) | {"warnings": ["prose at 1,000: a loop"]}))
        assert cli("bench", "compare", a, b)[1]["differs"] == ["B, prose at 1,000: a loop"]

    def test_only_what_both_measured_is_compared(self):
        assert compare.compare_rows([], [{"text": "code", "context": 1}]) == []

    def test_wrong_files(self, cli_error, tmp_path):
        path = self.run_of(tmp_path / "a.json", {1_000: 1.0})
        (tmp_path / "cut.json").write_text(path.read_text()[:60])
        (tmp_path / "other.json").write_text('{"schema": "sglang.kdtree/plan/1"}')
        assert cli_error("bench", "compare", path, tmp_path / "none.json")["got"].startswith("No such file")
        assert "60 characters read" in cli_error("bench", "compare", path, tmp_path / "cut.json")["got"]
        assert "bench longctx" in cli_error("bench", "compare", path, tmp_path / "other.json")["remedy"]
        lame = json.loads(path.read_text())
        lame["rows"][0]["step_ms"]["p50"] = "fast"
        (tmp_path / "lame.json").write_text(json.dumps(lame))
        error = cli_error("bench", "compare", path, tmp_path / "lame.json")
        assert error["what"].endswith("lame.json: $.rows[0].step_ms.p50") and "'fast'" in error["got"]
        nothing = self.run_of(tmp_path / "b.json", {9_000: 1.0})
        assert cli_error("bench", "compare", path, nothing)["got"] == "none in common"


class TestThroughput:
    def test_it_only_hands_over(self):
        from sglang.kdtree.bench.throughput import command_line

        wanted = [sys.executable, "-m", "sglang.benchmark.serving", "--num-prompts", "3"]
        assert command_line(["--", "--num-prompts", "3"]) == command_line(["--num-prompts", "3"]) == wanted

    def test_upstreams_status_is_passed_on(self, cli, monkeypatch):
        from sglang.kdtree.bench import throughput

        monkeypatch.setattr(throughput, "check_needs", lambda arguments: None)
        for status, code in ((0, 0), (3, 2)):
            program = [sys.executable, "-c", f"print('a report'); raise SystemExit({status})"]
            monkeypatch.setattr(throughput, "command_line", lambda arguments, program=program: program)
            got, document = cli("bench", "throughput", "--", "--num-prompts", "3")
            assert (got, document["returncode"]) == (code, status)

    def test_what_upstream_needs_is_named(self, cli_error, monkeypatch):
        import importlib.util

        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert "pip install datasets" in cli_error("bench", "throughput", "--", "--num-prompts", 3)["remedy"]

    @pytest.mark.parametrize("arguments", [[], ["--"]])
    def test_without_arguments_it_says_what_to_hand_over(self, cli_error, arguments):
        """Upstream would look for a server on port 30000 and fetch a data set."""
        error = cli_error("bench", "throughput", *arguments)
        assert error["what"] == "-- ARGUMENTS" and "--dataset-name" in error["remedy"]

    def test_upstream_still_has_the_module(self):
        import importlib.util

        assert importlib.util.find_spec("sglang.benchmark.serving")
