"""What a server sends is bounded in bytes, in time and in depth; a copy of an agent holds no key."""

import copy
import functools
import gzip
import os
import pickle
import time
import tracemalloc
import zlib
from typing import Any

import pytest
from http_server import Reply, Served, chat, serving

from agentsgym.agents.openai import OpenAIAgent
from agentsgym.errors import AgentError, ConfigError
from agentsgym.types import Action, TurnRequest

KEY = "key-that-nobody-may-see"
GOOD = chat("fine")


def request() -> TurnRequest:
    return TurnRequest(session_id="s", messages=[{"role": "user", "content": "hello"}], token_ids=[])


def agent_of(served: Served, **options: Any) -> OpenAIAgent:
    settings: Any = {"base_url": served.url, "api_key": KEY, "backoff_s": 0.0, "max_retries": 0, **options}
    return OpenAIAgent("tiny", **settings)


def error_of(reply: Reply, **options: Any) -> str:
    with serving(lambda requested: reply) as served:
        agent = agent_of(served, **options)
        try:
            (error,) = agent.act([request()])
        except ConfigError as refusal:
            error = refusal
        agent.close()
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
        with serving(lambda requested, reply=reply: reply) as served:
            agent = agent_of(served, max_answer_bytes=size)
            assert [*agent.act([request()]), *agent.act([request()])] == [Action(text="fine")] * 2
            agent.close()
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
    with serving(lambda requested: chat("fine", usage={"prompt_tokens": 10**400, "completion_tokens": -3})) as served:
        agent = agent_of(served, price_per_million=(1.0, 1.0))
        assert agent.act([request()]) == [Action(text="fine")]
        agent.close()
    assert (agent.usage.prompt_tokens, agent.usage.completion_tokens, agent.usage.cost) == (0, 0, 0.0)


@pytest.mark.parametrize("made", [copy.deepcopy, lambda agent: pickle.loads(pickle.dumps(agent))])
def test_a_copy_has_no_key_and_reports_it(made: Any) -> None:
    with serving(lambda requested: GOOD) as served:
        agent = agent_of(served)
        assert KEY.encode() not in pickle.dumps(agent)
        with pytest.raises(ConfigError, match=r"was copied or sent .*, which drops its api_key: pass a func"):
            made(made(agent)).act([request()])
        assert not served.requested
        assert agent.act([request()]) == [Action(text="fine")]
        agent.close()


def test_a_copy_reads_the_environment_or_the_function_for_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-environment")
    monkeypatch.setenv("MY_KEY", "of-the-function")
    with serving(lambda requested: GOOD) as served:
        monkeypatch.setenv("OPENAI_BASE_URL", served.url)
        agents = [agent_of(served, base_url=None), agent_of(served, api_key=functools.partial(os.getenv, "MY_KEY"))]
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
