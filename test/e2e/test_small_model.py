# SPDX-License-Identifier: Apache-2.0
"""The small model behind real servers: DDTREE gives what DFLASH and plain decoding give, and takes the verify steps
that torch counted without a server.

Servers, in this order: plain; DFLASH; DDTREE as `make serve` starts it, but for the flag that seeds need; DDTREE with
pages, a small pool and no overlap.
What a request can ask for is asked of both DDTREE servers; test_oracle.py has the other two pairings of page size and
overlap.
"""

import importlib.util
import math
import re
from argparse import Namespace

import pytest
from docs.documents import documented
from e2e import workloads
from e2e.distributions import chi_square_p, contingency
from e2e.plugins import plugin_environment
from e2e.servers import ENVIRONMENT, MODELS, STRICT, TARGET, meta, speculative, token_ids
from e2e.workloads import GREEDY, check_abort, check_stop_strings

pytestmark = pytest.mark.server

KDTREE = [*TARGET, "--max-total-tokens", "16384", "--attention-backend", "kdtree_sm120"]
# Request seeds need this flag; it also makes plain decoding sample by seed alone.
SEEDS = ["--enable-deterministic-inference"]

PLAIN = [*KDTREE, *SEEDS]
# A machine without an accelerator needs no --device.
del PLAIN[PLAIN.index("--device") : PLAIN.index("--device") + 2]
DFLASH = [*KDTREE, *speculative("DFLASH")]
# What `make serve` starts. Page size 1, overlap scheduling.
DDTREE = [*KDTREE, *speculative("DDTREE"), "--speculative-num-draft-tokens", "32"]
PAGED = [
    *TARGET, "--attention-backend", "kdtree_sm120", *speculative("DDTREE"), "--speculative-num-draft-tokens", "16",
    "--page-size", "16", "--max-total-tokens", "704", "--max-running-requests", "8", "--chunked-prefill-size", "64",
    "--disable-overlap-schedule", *SEEDS,
    # With hasty_admission: requests are admitted as if they were to answer almost nothing. The pool runs full, and the
    # scheduler has to retract some.
    "--schedule-conservativeness", "0.01",
]  # fmt: skip
SAMPLES = 200  # of each DDTREE server, and twice as many of plain decoding


@pytest.fixture(scope="module")
def plain(servers):
    """What plain decoding answers to every workload."""
    server = servers.get(PLAIN)
    answers = {
        "conversation": workloads.converse(server)[0],
        "ragged": token_ids(server.generate(*workloads.ragged_batch())),
        "grammar": token_ids(server.generate(*workloads.grammar_batch())),
        "seeded": token_ids(server.generate(*workloads.seeded_batch())),
        "sampled": token_ids(server.generate(*workloads.sampled_batch(2 * SAMPLES, first_seed=7_000_000))),
    }
    server.assert_all_slots_are_back()
    return answers


@pytest.fixture
def dflash(plain, servers):
    return servers.get(DFLASH)


@pytest.fixture
def ddtree(plain, servers):
    server = servers.get([*DDTREE, *SEEDS])
    yield server
    server.assert_all_slots_are_back()


@pytest.fixture(scope="module")
def hasty_admission(tmp_path_factory):
    module = MODELS.parent / "e2e" / "admission_plugin" / "hasty_admission.py"
    return plugin_environment(tmp_path_factory.mktemp("plugin"), module)


@pytest.fixture
def paged(plain, servers, hasty_admission):
    server = servers.get(PAGED, hasty_admission | STRICT)
    yield server
    server.assert_all_slots_are_back()


def check_greedy(server, entries, walk):
    """Tokens and verify steps of 128 tokens, all prompts at once, against the walk computed in torch."""
    outputs = server.generate([entry["prompt"] for entry in entries], GREEDY | {"max_new_tokens": 128})
    assert token_ids(outputs) == [entry["tokens"] for entry in entries]
    if walk != "plain":
        assert meta(outputs, "spec_verify_ct") == [entry["steps"][walk] for entry in entries]


def test_plain_decoding(plain, servers, expected):
    server = servers.get(PLAIN)
    check_greedy(server, expected, "plain")
    server.assert_all_slots_are_back()


def test_dflash_takes_the_counted_steps(dflash, expected):
    check_greedy(dflash, expected, "chain")
    dflash.assert_all_slots_are_back()


def test_this_server_is_the_one_of_make_serve():
    path = MODELS.parents[1] / "scripts" / "serve.py"
    spec = importlib.util.spec_from_file_location("serve", path)
    serve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)
    command, environment = serve.server(Namespace(model="", draft="", port=1, args="", device="cpu"))
    theirs = flags(command[command.index("sglang.launch_server") + 1 :])
    assert (theirs.pop("--host"), theirs.pop("--port")) == ("127.0.0.1", "1")
    # How an idle server waits is no matter of what it answers.
    theirs.pop("--sleep-on-idle", None)
    assert theirs == {name: value for name, value in flags(DDTREE).items() if name != "--sleep-on-idle"}
    assert ENVIRONMENT.items() <= environment.items()


def test_this_server_is_the_one_of_the_documents():
    places = {"TARGET": str(MODELS / "target"), "DRAFTER": str(MODELS / "drafter")}
    for words in (
        documented("docs/ddtree.md", "python -m sglang.launch_server"),
        documented("docs/upstream/advanced_features/ddtree.mdx", "python -m sglang.launch_server"),
    ):
        theirs = flags([places.get(word, word) for word in words[3:]])
        assert int(theirs.pop("--speculative-num-draft-tokens")) in (16, 32)
        assert theirs.items() <= flags(DDTREE).items()


def flags(arguments):
    """{flag: its value, or None}"""
    following = [*arguments[1:], "--"]
    pairs = zip(arguments, following, strict=True)
    return {flag: None if value.startswith("--") else value for flag, value in pairs if flag.startswith("--")}


def test_tree_of_32_takes_the_counted_steps(ddtree, expected):
    """20 requests at once, overlap scheduling on, page size 1."""
    check_greedy(ddtree, expected, "tree32")


def test_conversation_reads_the_prefix_cache(ddtree, plain):
    answers, cached = workloads.converse(ddtree)
    assert answers == plain["conversation"]
    assert all(later > earlier for earlier, later in zip(cached, cached[1:], strict=False))
    # A second time everything but the last token is cached, KV that trees wrote and compaction moved.
    assert workloads.converse(ddtree)[0] == plain["conversation"]


def test_ragged_batch(ddtree, plain):
    assert token_ids(ddtree.generate(*workloads.ragged_batch())) == plain["ragged"]


def test_stop_string_inside_an_accepted_path(ddtree, expected):
    check_stop_strings(ddtree, expected[0]["prompt"], 128, ends=range(20, 100, 18))


def test_abort_in_the_middle(ddtree, expected):
    assert check_abort(ddtree, "def f(", expected[1]["prompt"], 128) == expected[1]["tokens"]
    ddtree.assert_all_slots_are_back()
    (output,) = ddtree.generate(["def f("], GREEDY | {"max_new_tokens": 8})
    assert len(output["output_ids"]) == 8


def test_logprobs_are_of_the_accepted_path(ddtree, expected):
    """The log-probability of each greedy token is the largest one at its place, whatever node it came from."""
    (output,) = ddtree.generate(
        [expected[0]["prompt"]], GREEDY | {"max_new_tokens": 48}, return_logprob=True, top_logprobs_num=2
    )
    info = output["meta_info"]
    assert [token for _, token, _ in info["output_token_logprobs"]] == expected[0]["tokens"][:48]
    for (logprob, token, _), top in zip(info["output_token_logprobs"], info["output_top_logprobs"], strict=True):
        assert top[0][1] == token
        assert top[0][0] == pytest.approx(logprob, abs=1e-4)
        assert top[0][0] > top[1][0]


def test_sampling_mask_follows_the_accepted_path(ddtree, expected):
    (output,) = ddtree.generate(
        [expected[0]["prompt"]], GREEDY | {"max_new_tokens": 24, "top_k": 1}, return_sampling_mask=True
    )
    assert output["meta_info"]["output_token_sampling_mask"] == [[token] for token in expected[0]["tokens"][:24]]


def test_structured_output(ddtree, plain):
    outputs = ddtree.generate(*workloads.grammar_batch())
    assert token_ids(outputs) == plain["grammar"]
    assert re.fullmatch("[a-c]{3}(x|yz)*y?[0-9]{0,4}", outputs[0]["text"])


def check_seeded_sampling(server, plain):
    """Token for token what plain decoding draws."""
    outputs = server.generate(*workloads.seeded_batch())
    assert token_ids(outputs) == plain["seeded"]
    assert sum(meta(outputs, "spec_verify_ct")) < 0.95 * 12 * 31, "hardly any draft was accepted"


def test_seeded_sampling(ddtree, plain):
    check_seeded_sampling(ddtree, plain)


@pytest.fixture(scope="module")
def drawn():
    """What DDTREE servers drew at temperature 1; each has seeds of its own, so that all samples are independent."""
    return []


def check_distribution(ours, theirs):
    """Chi-square of two samples at a level of 1e-3 for each of the tokens that a verification drew. The seeds are
    given, so the samples are the same in every run."""
    for place in range(1, workloads.SAMPLED_TOKENS):  # token 0 comes from the prefill
        table = contingency([answer[place] for answer in ours], [answer[place] for answer in theirs])
        assert len(table) >= 4, "a few tokens have all the probability: the test says nothing"
        assert chi_square_p(table) > 1e-3, (place, table)


def test_temperature_one_samples_the_plain_distribution(ddtree, plain, drawn):
    drawn += token_ids(ddtree.generate(*workloads.sampled_batch(SAMPLES, first_seed=8_000_000)))
    check_distribution(drawn, plain["sampled"])


def test_chi_square_tells_distributions_apart():
    assert chi_square_p([[310, 290], [200, 215], [90, 95]]) > 0.1
    assert chi_square_p([[310, 220], [200, 285], [90, 95]]) < 1e-4
    # One degree of freedom has a closed form; the statistic of this table is 50 / 63.
    assert chi_square_p([[10, 20], [30, 40]]) == pytest.approx(math.erfc(math.sqrt(25 / 63)))


@pytest.fixture
def short(expected):
    entries = [entry for entry in expected if entry["prompt_tokens"] < 160][:8]
    assert len(entries) == 8
    return entries


def test_tree_of_16_takes_the_counted_steps_in_pages_without_overlap(paged, short):
    """Two at a time: more do not fit into the pool, and a retracted request drafts anew from another token."""
    for pair in zip(short[::2], short[1::2], strict=True):
        check_greedy(paged, pair, "tree16")


def test_full_pool_retracts_and_answers_the_same(paged, short):
    """Eight requests that need 1700 slots at their ends, in a pool of 704."""
    outputs = paged.generate([entry["prompt"] for entry in short], GREEDY | {"max_new_tokens": 128})
    assert token_ids(outputs) == [entry["tokens"] for entry in short]
    assert sum(meta(outputs, "num_retractions")) > 0


def test_ragged_batch_and_conversation_in_pages(paged, plain):
    assert token_ids(paged.generate(*workloads.ragged_batch())) == plain["ragged"]
    assert workloads.converse(paged)[0] == plain["conversation"]


def test_seeded_sampling_in_pages(paged, plain):
    check_seeded_sampling(paged, plain)


def test_temperature_one_samples_the_plain_distribution_in_pages(paged, plain, drawn):
    """Alone, and together with what the other server drew."""
    ours = token_ids(paged.generate(*workloads.sampled_batch(SAMPLES, first_seed=9_000_000)))
    check_distribution(ours, plain["sampled"])
    check_distribution(drawn + ours, plain["sampled"])


def test_stop_string_and_abort_in_pages(paged, short):
    check_stop_strings(paged, short[0]["prompt"], 128, ends=range(20, 100, 18))
    hardest = max(short, key=lambda entry: entry["steps"]["tree16"])
    assert check_abort(paged, hardest["prompt"], short[1]["prompt"], 64) == short[1]["tokens"][:64]
