# SPDX-License-Identifier: Apache-2.0
"""A streaming client for SGLang's /generate and for OpenAI-compatible completions and chat."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import requests

from sglang.kdtree.arguments import count
from sglang.kdtree.errors import KitError, require_at_least

APIS = ("sglang", "completions", "chat")
CONNECT_TIMEOUT_S = 5.0


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the stream that carried new tokens."""

    at: float  # seconds on the client's monotonic clock
    completion_tokens: int | None  # so far; None where the server does not say


class Reply(msgspec.Struct, kw_only=True):
    sent_at: float
    events: list[Event]
    text: str
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    verify_steps: int | None = None
    output_ids: list[int] | None = None
    meta: dict[str, Any] = {}


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    api: str
    model: str
    engine: str  # "sglang" or "openai-compatible"
    version: str | None = None
    max_model_len: int | None = None
    speculative_algorithm: str | None = None
    num_draft_tokens: int | None = None
    attention_backend: str | None = None
    page_size: int | None = None
    raw: dict[str, Any] = {}

    def room(self, output_tokens: int) -> int | None:
        """The longest prompt that leaves so many tokens to answer with, in the context and in the
        KV pool with the reserve of two trees; None if the server says neither.
        """
        pool = self.raw.get("max_total_num_tokens")
        reserve = 2 * (self.num_draft_tokens or 0) + (self.page_size or 1)
        limits = [self.max_model_len, pool - reserve if type(pool) is int else None]
        known = [limit for limit in limits if type(limit) is int]
        return min(known) - output_tokens if known else None

    def public(self) -> dict[str, Any]:
        fields = msgspec.structs.asdict(self)
        del fields["raw"]
        return fields


class Client:
    def __init__(
        self,
        url: str,
        *,
        api: str = "sglang",
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 3600.0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if not url.startswith(("http://", "https://")):
            raise KitError(
                what="--url",
                expected="http://HOST:PORT",
                got=repr(url),
                remedy="Give the server's address with its scheme.",
            )
        self.url = url.rstrip("/")
        self.api = api
        self.model = model
        self.timeout_s = timeout_s
        self.clock = clock
        self.session = requests.Session()
        self.session.trust_env = (
            False  # a proxy in the environment must not see a local server
        )
        if api_key:
            self.session.headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str, *, timeout_s: float = 30.0) -> requests.Response:
        return self._send("GET", path, timeout_s=timeout_s)

    def get_json(self, path: str) -> Any | None:
        """The JSON at path, or None if the server has no such page."""
        reply = self.get(path)
        if reply.status_code == 404:
            return None
        self.check_status(reply, path)
        return self._json(reply, path)

    def _json(self, reply: requests.Response, path: str) -> Any:
        try:
            return reply.json()
        except requests.exceptions.JSONDecodeError as error:
            raise KitError(
                what=f"{self.url}{path}",
                expected="complete JSON",
                got=f"{reply.text[:80]!r}...",
                remedy="Something between here and the server cut the answer, or this is no SGLang server.",
            ) from error

    def count_tokens(self, prompt: str) -> int | None:
        """By the server's own tokenizer, without a chat template; None if it does not offer one."""
        reply = self._send(
            "POST",
            "/tokenize",
            json_body={"model": self.model, "prompt": prompt},
            timeout_s=300.0,
        )
        if reply.status_code != 200:
            return None
        answer = self._json(reply, "/tokenize")
        count = answer.get("count") if isinstance(answer, dict) else None
        return count if type(count) is int else None

    def post(self, path: str) -> None:
        self.check_status(self._send("POST", path, timeout_s=self.timeout_s), path)

    def facts(self) -> ServerFacts:
        """Who answers, checked against --model."""
        listed = self.get_json("/v1/models")
        entries = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(entries, list) or not all(
            isinstance(entry, dict) for entry in entries
        ):
            entries = []
        names = [entry.get("id") for entry in entries]
        if self.api != "sglang" and not names:
            raise KitError(
                what=f"{self.url}/v1/models",
                expected="a list of served models",
                got="none",
                remedy="Is this an OpenAI-compatible server? Use --api sglang for /generate.",
            )
        if self.model and names and self.model not in names:
            raise KitError(
                what="--model",
                expected=f"one of {', '.join(map(repr, names))}",
                got=repr(self.model),
                remedy="Leave --model out to take the first that the server lists.",
            )
        self.model = self.model or (names[0] if names else "default")
        info = self.get_json("/server_info") if self.get_json("/model_info") else None
        info = info if isinstance(info, dict) else {}
        if self.api == "sglang" and not info:
            raise KitError(
                what=f"{self.url}/model_info",
                expected="an SGLang server",
                got="no such page",
                remedy="Use --api completions or --api chat for other servers.",
            )
        return ServerFacts(
            url=self.url,
            api=self.api,
            model=self.model,
            engine="sglang" if info else "openai-compatible",
            version=info.get("version"),
            max_model_len=entries[0].get("max_model_len") if entries else None,
            speculative_algorithm=info.get("speculative_algorithm"),
            num_draft_tokens=info.get("speculative_num_draft_tokens"),
            attention_backend=info.get("attention_backend"),
            page_size=info.get("page_size"),
            raw=info,
        )

    def stream(
        self,
        prompt: str,
        *,
        max_tokens: int,
        temperature: float,
        on_first_token: Callable[[], None] = lambda: None,
    ) -> Reply:
        path, body = request_body(
            self.api,
            self.model or "default",
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
        )
        sent_at = self.clock()
        reply = Reply(sent_at=sent_at, events=[], text="")
        response = self._send(
            "POST", path, json_body=body, stream=True, timeout_s=self.timeout_s
        )
        self.check_status(response, path)
        started = finished = False
        source = f"{self.url}{path}"
        for message in sse_messages(self._lines(response, source), source=source):
            if message is None:
                finished = True
                break
            try:
                absorb(self.api, reply, message, at=self.clock())
            except (AttributeError, KeyError, TypeError) as error:
                raise KitError(
                    what=source,
                    expected=f"messages of the form of --api {self.api}",
                    got=f"{json.dumps(message)[:120]} ({type(error).__name__}: {error})",
                    remedy="Is another --api meant?",
                ) from error
            if len(reply.events) == 1 and not started:
                started = True
                on_first_token()
        if not finished:
            raise KitError(
                what=f"{self.url}{path}",
                expected="a stream that ends with [DONE]",
                got=f"the end after {len(reply.events)} messages",
                remedy="The server stopped in the middle: read its log.",
            )
        return reply

    def _lines(self, response: requests.Response, source: str) -> Iterator[bytes]:
        try:
            yield from response.iter_lines(chunk_size=1)
        except requests.exceptions.RequestException as error:
            raise KitError(
                what=source,
                expected="a stream that ends with [DONE]",
                got=f"{type(error).__name__} in the middle",
                remedy="The server stopped or was too slow for --timeout: read its log.",
            ) from error

    def _send(
        self, method: str, path: str, *, timeout_s: float, json_body=None, stream=False
    ) -> requests.Response:
        try:
            return self.session.request(
                method,
                self.url + path,
                json=json_body,
                stream=stream,
                timeout=(CONNECT_TIMEOUT_S, timeout_s),
            )
        except requests.exceptions.InvalidURL as error:
            raise KitError(
                what="--url",
                expected="http://HOST:PORT",
                got=repr(self.url),
                remedy=f"Correct it: {error}",
            ) from error
        except requests.exceptions.RequestException as error:
            raise KitError(
                what=f"{self.url}{path}",
                expected="a server that answers",
                got=type(error).__name__,
                remedy="Start the server, or correct --url.",
            ) from error

    def check_status(self, response: requests.Response, path: str) -> None:
        if response.status_code in (401, 403):
            raise KitError(
                what=f"{self.url}{path}",
                expected="to be let in",
                got=f"HTTP {response.status_code}",
                remedy="Give the server's key with --api-key or in SGLANG_API_KEY.",
            )
        if response.status_code >= 400:
            raise KitError(
                what=f"{self.url}{path}",
                expected="HTTP 200",
                got=f"HTTP {response.status_code}: {response.text[:300]}",
                remedy="The server refused the request: its message says why.",
            )


def request_body(
    api: str, model: str, prompt: str, *, max_tokens: int, temperature: float
) -> tuple[str, dict]:
    """ignore_eos keeps the number of decoded tokens the same in every run; servers that do not know it ignore it."""
    if api == "sglang":
        sampling = {
            "max_new_tokens": max_tokens,
            "temperature": temperature,
            "ignore_eos": True,
        }
        return "/generate", {
            "text": prompt,
            "sampling_params": sampling,
            "stream": True,
        }
    body = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if api == "completions":
        return "/v1/completions", body | {"prompt": prompt}
    return "/v1/chat/completions", body | {
        "messages": [{"role": "user", "content": prompt}]
    }


def sse_messages(lines: Iterator[bytes], *, source: str) -> Iterator[dict | None]:
    """The JSON of each data line; None for [DONE]."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        if payload == b"[DONE]":
            yield None
            return
        try:
            message = json.loads(payload)
        except json.JSONDecodeError as error:
            raise KitError(
                what=source,
                expected="complete JSON in every message of the stream",
                got=f"{payload[:80]!r} ({error.msg})",
                remedy="Something between here and the server cut the stream.",
            ) from error
        if not isinstance(message, dict):
            raise KitError(
                what=source,
                expected="a JSON object in every message of the stream",
                got=f"{payload[:80]!r}",
                remedy="Is this an SGLang or OpenAI-compatible server?",
            )
        if message.get("error"):
            raise KitError(
                what=source,
                expected="generated text",
                got=json.dumps(message["error"]),
                remedy="The server refused the request: its message says why.",
            )
        yield message


def absorb(api: str, reply: Reply, message: dict, *, at: float) -> None:
    """Add one message to the reply; only those with new tokens become events."""
    if api == "sglang":
        _absorb_sglang(reply, message, at=at)
    else:
        _absorb_openai(reply, message, at=at)


def _absorb_sglang(reply: Reply, message: dict, *, at: float) -> None:
    meta = message["meta_info"]
    tokens = meta.get("completion_tokens") or 0
    text = message.get("text", "")
    # The text is cumulative unless the server runs with --incremental-streaming-output.
    reply.text = text if text.startswith(reply.text) else reply.text + text
    reply.output_ids = message.get("output_ids", reply.output_ids)
    if tokens > (reply.completion_tokens or 0):
        reply.events.append(Event(at=at, completion_tokens=tokens))
    reply.prompt_tokens = meta.get("prompt_tokens", reply.prompt_tokens)
    reply.cached_tokens = meta.get("cached_tokens", reply.cached_tokens)
    reply.completion_tokens = tokens
    reply.verify_steps = meta.get("spec_verify_ct", reply.verify_steps)
    reply.meta = meta


def _absorb_openai(reply: Reply, message: dict, *, at: float) -> None:
    usage = message.get("usage") or {}
    text = ""
    for choice in message.get("choices") or []:
        delta = choice.get("delta") or {}
        text += (
            choice.get("text")
            or delta.get("content")
            or delta.get("reasoning_content")
            or ""
        )
    reply.text += text
    tokens = usage.get("completion_tokens") if message.get("choices") else None
    grew = tokens is not None and tokens > (reply.completion_tokens or 0)
    if grew or (text and tokens is None):
        reply.events.append(Event(at=at, completion_tokens=tokens))
    if usage:
        reply.prompt_tokens = usage.get("prompt_tokens", reply.prompt_tokens)
        reply.completion_tokens = usage.get(
            "completion_tokens", reply.completion_tokens
        )
        details = usage.get("prompt_tokens_details") or {}
        reply.cached_tokens = details.get("cached_tokens", reply.cached_tokens)


def add_server_arguments(parser, *, output_tokens: int = 128) -> None:
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:30000", help="the server")
    add(
        "--api",
        choices=APIS,
        default="sglang",
        help="sglang = /generate, or an OpenAI-compatible API; chat applies the model's chat template",
    )
    add("--model", help="served model name (default: the first that the server lists)")
    add("--api-key", help="default: the environment variable SGLANG_API_KEY")
    seconds = "seconds for one request"
    add("--timeout", type=float, default=3600.0, metavar="S", help=seconds)
    decoded = "tokens to decode"
    add("--output-tokens", type=count, default=output_tokens, metavar="N", help=decoded)


def client_from(args, environ) -> Client:
    require_at_least("--timeout", args.timeout, 1)
    return Client(
        args.url,
        api=args.api,
        model=args.model,
        api_key=args.api_key or environ.get("SGLANG_API_KEY"),
        timeout_s=args.timeout,
    )
