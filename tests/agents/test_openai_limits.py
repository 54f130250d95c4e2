"""What a server sends is bounded in bytes, time and depth; no part of a key is left in a copy or a message."""

import base64
import copy
import functools
import gzip
import html
import json
import os
import pickle
import time
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import http_server
import pytest
from http_server import KEY, Reply, agent_of, chat, request, serving
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import Action, AgentError, ConfigError, OpenAIAgent
from agentsgym.agents.openai_server import KeyMask, url_secrets, without_credentials

GOOD = chat("fine")
calling = functools.partial(http_server.calling, api_key=KEY, max_retries=0)


def error_of(reply: Reply, **options: Any) -> str:
    with calling(lambda requested: reply, **options) as (agent, _):
        try:
            (error,) = agent.act([request()])
        except ConfigError as refusal:
            error = refusal
    assert isinstance(error, AgentError | ConfigError)
    assert len(str(error)) < 2000
    return str(error)


@functools.cache
def bomb(num_bytes: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    block = b" " * 1_000_000
    return b"".join([*(packer.compress(block) for _ in range(num_bytes // len(block))), packer.flush()])


def zipped(content: bytes, status: int = 200, encoding: str = "gzip", **headers: str) -> Reply:
    return Reply(content, status=status, headers={"Content-Encoding": encoding, **headers})


def test_a_bomb_is_not_read_to_its_end() -> None:
    reply = zipped(bomb(300_000_000))
    error_of(GOOD, max_answer_bytes=1)  # what is imported and kept is not counted below
    tracemalloc.start()
    try:
        error = error_of(reply)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error.endswith("returned no usable response: the response is longer than max_answer_bytes = 16000000")
    assert peak < 40_000_000


def test_time_goes_on_while_an_answer_is_decompressed() -> None:
    began = time.monotonic()
    error = error_of(zipped(bomb(300_000_000)), max_answer_bytes=10**12, timeout_s=0.05)
    assert "no response within 0.05 s" in error
    assert time.monotonic() - began < 30  # an order of magnitude, not a measurement


@pytest.mark.parametrize("status", [307, 401, 500])
def test_the_text_of_an_error_is_read_in_part(status: int) -> None:
    plain = b'{"error": {"message": "' + b"busy " * 10_000_000
    location = {"Location": "/v1/elsewhere"} if status == 307 else {}
    assert f"status {status}" in error_of(Reply(plain, status=status)) or status == 307
    assert len(error_of(zipped(bomb(300_000_000), status=status, **location))) < 1000


def test_an_answer_of_the_most_bytes_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(GOOD.content)
    assert "longer than max_answer_bytes" in error_of(GOOD, max_answer_bytes=size - 1)
    for reply in (GOOD, zipped(gzip.compress(GOOD.content)), zipped(zlib.compress(GOOD.content), encoding="deflate")):
        with calling(lambda requested, reply=reply: reply, max_answer_bytes=size) as (agent, served):
            assert [*agent.act([request()]), *agent.act([request()])] == [Action(text="fine")] * 2
        assert served.num_connections == 1
        assert served.requested[0].headers["accept-encoding"] == "gzip"


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (Reply(b"[" * 1_000_000), "the response is JSON that is nested too deeply to be parsed"),
        (Reply(b'{"choices": ' + b"1" * 5000 + b"}"), "the response is JSON that cannot be parsed: Exceeds the limit"),
        (Reply(b"[" * 100_000, status=500), "status 500: [[["),
        (zipped(b"no gzip"), "the response cannot be decompressed"),
        (zipped(gzip.compress(GOOD.content)[:-9]), "the response is cut off"),
        (zipped(b"", encoding="br"), "the response is encoded as 'br', but only gzip was requested"),
        (zipped(bomb(2_000_000), encoding="gzip, gzip"), "the response is encoded as 'gzip, gzip'"),
        (Reply({"error": {"a": ["b" * 500_000] * 5}}), "it reported {'a': ['bbb"),
        (Reply({"choices": ["x" * 500_000]}), "the response has no choices: {'choices': ['xxx"),
        (Reply(b"\xff\xfe\xfa", headers={"Content-Type": "text/html; charset=punycode"}), "not JSON"),
        (Reply({"error": {"message": "\x1b[2J\x07gone"}}, status=400), "status 400: \\x1b[2J\\x07gone"),
    ],
    ids=range(11),
)
def test_a_strange_answer_gets_a_sentence(reply: Reply, sentence: str) -> None:
    assert sentence in error_of(reply)


def test_numbers_that_no_server_counts_to_are_not_counted() -> None:
    reply = chat("fine", usage={"prompt_tokens": 10**400, "completion_tokens": -3})
    with calling(lambda requested: reply, price_per_million=(1.0, 1.0)) as (agent, _):
        assert agent.act([request()]) == [Action(text="fine")]
    assert (agent.usage.prompt_tokens, agent.usage.completion_tokens, agent.usage.cost) == (0, 0, 0.0)


@pytest.mark.parametrize("made", [copy.deepcopy, lambda agent: pickle.loads(pickle.dumps(agent))])
def test_a_copy_has_no_key_and_reports_it(made: Any) -> None:
    with calling(lambda requested: GOOD) as (agent, served):
        assert KEY.encode() not in pickle.dumps(agent)
        with pytest.raises(ConfigError, match=r"was copied or sent .*, which drops its api_key: pass a func"):
            made(made(agent)).act([request()])
        assert not served.requested
        assert agent.act([request()]) == [Action(text="fine")]


def test_a_copy_reads_the_environment_or_the_function_for_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-environment")
    monkeypatch.setenv("MY_KEY", "of-the-function")
    with serving(lambda requested: GOOD) as served:
        monkeypatch.setenv("OPENAI_BASE_URL", served.url)
        agents = [
            agent_of(served, api_key=KEY, base_url=None),
            agent_of(served, api_key=functools.partial(os.getenv, "MY_KEY")),
        ]
        for agent in map(copy.deepcopy, agents):
            assert agent.act([request()]) == [Action(text="fine")]
            agent.close()
    sent = [requested.headers["authorization"] for requested in served.requested]
    assert sent == ["Bearer of-the-environment", "Bearer of-the-function"]


@pytest.mark.parametrize("key", [f"{KEY}\n", f" {KEY}", f"{KEY}é", "", 7])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(key: Any) -> None:
    with pytest.raises(ConfigError, match="api_key must be") as raised:
        OpenAIAgent("tiny", base_url="http://localhost/v1", api_key=key)
    assert KEY[:6] not in str(raised.value)


@pytest.mark.parametrize("url", ["somebody:hunter2hunter@host/v1", "ftp://somebody:hunter2hunter@host"])
def test_an_address_that_is_none_is_shown_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url must begin with http") as raised:
        OpenAIAgent("tiny", base_url=url)
    assert "hunter2" not in str(raised.value)
    assert "host" in str(raised.value)


LONG_KEY = "sk-proj-Zq8&x/Wm3+T7vR2k"


@pytest.mark.parametrize(
    "write",
    [
        str,
        str.upper,
        lambda key: key[3:12],
        lambda key: key + key,
        lambda key: quote(key, safe=""),
        lambda key: "".join(f"%{byte:02X}" for byte in key.encode()),
        html.escape,
        lambda key: json.dumps({"Authorization": f"Bearer {key}"}),
        lambda key: base64.b64encode(f"Bearer {key}".encode()).decode(),
        lambda key: base64.b64encode(f"user:{key}".encode()).decode(),
        lambda key: base64.urlsafe_b64encode(f"x:{key}".encode()).decode(),
        lambda key: key.encode().hex(),
        lambda key: f"{key[:6]}***{key[-4:]}",
        lambda key: f"Incorrect API key provided: {key[:8]}**********{key[-4:]}.",
        lambda key: f"{key[:10]}...",
    ],
)  # fmt: skip
def test_no_run_of_the_key_is_left(write: Callable[[str], str]) -> None:
    masked = KeyMask([LONG_KEY]).masked(f"no luck with '{write(LONG_KEY)}', sorry")
    assert masked.startswith("no luck with '")
    assert masked.endswith("', sorry")
    for form in (LONG_KEY, quote(LONG_KEY, safe=""), html.escape(LONG_KEY), LONG_KEY.encode().hex()):
        runs = {form[i : i + 8].lower() for i in range(len(form) - 7)}
        assert not [run for run in runs if run in masked.lower()]
    assert LONG_KEY[:6] not in masked
    assert LONG_KEY[-4:] not in masked


@given(st.text(), st.text(), st.text("abcdefgh0123-", min_size=8, max_size=60))
def test_whatever_stands_around_it_the_key_goes(before: str, after: str, key: str) -> None:
    masked = KeyMask([key]).masked(before + key + after)
    assert key not in masked
    assert "***" in masked


@pytest.mark.parametrize(
    ("message", "left"),
    [
        ("the key that ends in T7vR2k is revoked", "the key that ends in *** is revoked"),
        ("ending with 'vR2k', starting with sk-p.", "ending with '***', starting with ***."),
        ("its last four characters are: vR2k", "its last four characters are: ***"),
        ("key (T7vR2k): no; prefix sk-pro", "key (***): no; prefix ***"),
        ("no key=sk-p***, token:sk-p…R2k, or sk-pr[redacted]2k)", "no *** *** or ***"),
        ("sk-pro----2k sk-proxxxxxxR2k sk-p###2k", "*** *** ***"),
    ],
)
def test_an_end_of_the_key_is_masked_where_it_is_named(message: str, left: str) -> None:
    assert KeyMask([LONG_KEY]).masked(message) == left


def test_an_end_that_looks_like_a_word_stays_unless_it_is_called_one() -> None:
    mask = KeyMask(["secret-of-our-server"])
    text = "the server is no secret, its observer starts in a server-room; xvR2k and vR2kx are other words"
    assert mask.masked(text) == text
    assert mask.masked("it ends with server") == "it ends with ***"
    assert KeyMask([LONG_KEY]).masked(text) == text


def test_other_words_stay() -> None:
    text = "the model's context is 8192 tokens... and ** of them are free; token-short is no key"
    assert KeyMask([LONG_KEY]).masked(text) == text
    assert KeyMask(["", "x", "abc"]).masked("x abc") == "x abc"


def test_the_password_of_an_address_is_a_secret_too() -> None:
    url = "https://somebody:hunter%402hunter@gateway.example/v1?api-version=3"
    mask = KeyMask(url_secrets(url))
    assert mask.masked("wrong: somebody, hunter@2hunter or hunter%402hunter") == "wrong: ***, *** or ***"
    assert without_credentials(url) == "https://gateway.example/v1"
    mask = KeyMask(url_secrets("https://host/v1?api-version=2024-02-01&api-key=abc%2Bdefgh&sig=klmn+opqr"))
    assert mask.masked("2024-02-01: abc%2Bdefgh, abc+defgh, klmn opqr") == "2024-02-01: ***, ***, ***"
    assert without_credentials("somebody:hunter2@gateway.example") == "gateway.example"
