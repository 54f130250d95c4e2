"""OpenAIAgent against a server that breaks: what may pass is retried, what does not fails one session."""

import json
import threading
from collections.abc import Callable
from email.utils import formatdate
from functools import partial
from typing import Any

import http_server
import pytest
from http_server import HANG_UP, KEY, Asked, Reply, agent_of, chat, request, serving

from agentsgym import Action, AgentError, ConfigError, OpenAIAgent
from agentsgym.agents.openai_client import _retry_after_s

GOOD = chat("fine", usage={"prompt_tokens": 3, "completion_tokens": 1})
calling = partial(http_server.calling, api_key=KEY)


def first(broken: Reply) -> Callable[[Asked], Reply]:
    return lambda requested: GOOD if requested.number else broken


def error(status: int, message: str = "busy", **headers: str) -> Reply:
    return Reply({"error": {"message": message}}, status=status, headers=headers)


def fault_of(agent: OpenAIAgent) -> str:
    try:
        (fault,) = agent.act([request()])
    except ConfigError as refusal:
        fault = refusal
    assert isinstance(fault, AgentError | ConfigError)
    assert agent.usage.failures == 1
    return str(fault)


@pytest.mark.parametrize(
    "broken",
    [
        error(500),
        error(503),
        error(408),
        error(409),
        error(429),
        Reply(b"<html>bad gateway</html>", status=502),
        Reply(GOOD.content[:-20]),
        Reply(b""),
        Reply(b"<html>welcome</html>"),
        Reply([1, 2]),
        Reply({"error": {"message": "upstream timed out"}}),
        Reply({"choices": []}),
        Reply({"choices": [{"index": 0, "finish_reason": "stop"}]}),
        Reply({"choices": [{"message": {"content": 7}, "finish_reason": "stop"}]}),
        Reply(GOOD.body, cut=30),
        HANG_UP,
    ],
    ids=lambda reply: "hang up" if reply is HANG_UP else f"{reply.status} {reply.content[:24]!r} cut {reply.cut}",
)
def test_what_may_pass_is_tried_again(broken: Reply) -> None:
    with calling(first(broken)) as (agent, served):
        assert agent.act([request()]) == [Action(text="fine")]
    assert len(served.requested) == 2
    assert served.requested[0].body == served.requested[1].body
    assert (agent.usage.requests, agent.usage.retries, agent.usage.failures) == (1, 1, 0)
    assert (agent.usage.prompt_tokens, agent.usage.completion_tokens) == (3, 1)


@pytest.mark.parametrize("status", [400, 405, 413, 422])
def test_what_will_not_pass_is_not(status: int) -> None:
    with calling(lambda requested: error(status, f"no luck with {KEY}")) as (agent, served):
        fault = fault_of(agent)
    assert len(served.requested) == 1
    assert fault.rstrip().endswith(
        f"'tiny' at {served.url} returned no usable response: status {status}: no luck with ***"
    )


@pytest.mark.parametrize(
    "reply",
    [
        error(401, f"Incorrect API key provided: {KEY}"),
        error(400, "x" * 290 + KEY),
        Reply(f"<pre>Authorization: Bearer {KEY}</pre>".encode()),
        Reply({"error": {"your key": KEY}}),
        Reply({"echo": {"authorization": KEY}}),
        Reply({"choices": [{"message": {"content": [KEY]}}]}),
    ],
    ids=range(6),
)
def test_the_key_is_in_no_fault_and_no_log(reply: Reply, caplog: pytest.LogCaptureFixture) -> None:
    with calling(lambda requested: reply, max_retries=1) as (agent, served), caplog.at_level("DEBUG", "agentsgym"):
        fault = fault_of(agent)
    assert f"Bearer {KEY}" in served.requested[0].headers.values()
    assert "returned no usable response: " in fault or "refuses every request: " in fault
    assert KEY[:10] not in fault + caplog.text


def test_patience_ends_with_a_sentence_that_names_server_model_and_cause() -> None:
    with calling(lambda requested: error(503, "warming up"), max_retries=3) as (agent, served):
        fault = fault_of(agent)
    assert len(served.requested) == 4
    assert agent.usage.retries == 3
    assert f"'tiny' at {served.url} returned no usable response: status 503: warming up" in fault
    assert KEY not in fault


def test_nobody_listens() -> None:
    with serving(first(GOOD)) as served:
        pass
    fault = fault_of(agent_of(served))
    assert f"'tiny' at {served.url} returned no usable response: the connection failed (Connect" in fault


def test_a_timeout_ends_one_try(caplog: pytest.LogCaptureFixture) -> None:
    gone = threading.Event()

    def answer(requested: Asked) -> Reply:
        if requested.number == 0:
            gone.wait(30)
        return GOOD

    with calling(answer, timeout_s=0.1) as (agent, _), caplog.at_level("INFO"):
        assert agent.act([request()]) == [Action(text="fine")]
        gone.set()
    assert agent.usage.retries == 1
    assert "no response within 0.1 s; retrying" in caplog.text


def test_a_timeout_counts_the_whole_answer_not_the_gaps_between_its_bytes() -> None:
    with calling(lambda requested: Reply(GOOD.body, seconds_a_byte=0.02), timeout_s=0.2, max_retries=0) as (agent, _):
        assert "no response within 0.2 s" in fault_of(agent)


@pytest.mark.parametrize(("shown", "backoff_s", "least_s"), [("0.2", 0.0, 0.2), ("0", 0.2, 0.1)])
def test_the_server_shows_how_long_to_wait_but_never_nothing(shown: str, backoff_s: float, least_s: float) -> None:
    with calling(first(error(429, **{"Retry-After": shown})), backoff_s=backoff_s) as (agent, served):
        assert agent.act([request()]) == [Action(text="fine")]
    assert served.requested[1].arrived - served.requested[0].arrived >= least_s


def test_a_wait_that_is_too_long_is_not_begun() -> None:
    with calling(lambda requested: error(429, "come back tomorrow", **{"Retry-After": "86400"})) as (agent, served):
        assert "status 429: come back tomorrow" in fault_of(agent)
    assert len(served.requested) == 1


def test_retry_after_is_seconds_or_a_date() -> None:
    assert _retry_after_s({"retry-after": "2.5"}) == 2.5
    assert _retry_after_s({"retry-after": "-3"}) == 0.0
    assert _retry_after_s({"retry-after": formatdate(0, usegmt=True)}) == 0.0
    assert (_retry_after_s({"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}) or 0) > 1e9
    assert _retry_after_s({"retry-after": "soon"}) is None
    assert _retry_after_s({"retry-after": "nan"}) == 0.0
    assert _retry_after_s({}) is None


def test_waits_grow_with_each_try_and_differ_by_chance(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "agentsgym.agents.openai_client")
    with calling(lambda requested: error(500), backoff_s=0.01, max_retries=4) as (agent, served):
        fault_of(agent)
    arrivals = [requested.arrived for requested in served.requested]
    waits: list[Any] = [record.args[-1] for record in caplog.records if isinstance(record.args, tuple)]
    fractions = [wait / (0.01 * 2**n) for n, wait in enumerate(waits)]
    assert len(fractions) == 4
    assert all(0.5 <= fraction <= 1.0 for fraction in fractions)
    assert len(set(fractions)) == 4
    assert all(after - before >= wait for before, after, wait in zip(arrivals, arrivals[1:], waits, strict=False))


def test_the_bound_on_open_requests_is_reached_and_held() -> None:
    together = threading.Barrier(3)

    def answer(requested: Asked) -> Reply:
        together.wait(30)  # three are open, or the test hangs
        return chat(requested.output_last)

    with calling(answer, max_concurrency=3) as (agent, served):
        answers = agent.act([request(str(n)) for n in range(12)])
    assert answers == [Action(text=str(n)) for n in range(12)]
    assert served.most_open == 3
    assert served.num_connections <= 3


def test_a_request_that_waits_for_its_retry_keeps_nobody_from_requesting() -> None:
    others_done = threading.Event()

    def answer(requested: Asked) -> Reply:
        if requested.output_last == "unlucky" and not others_done.is_set():
            return error(500, **{"Retry-After": "0.05"})
        if requested.output_last == "last":
            others_done.set()
        return chat(requested.output_last)

    with calling(answer, max_concurrency=1, max_retries=100) as (agent, served):
        names = ["unlucky", "one", "two", "last"]
        assert agent.act([request(name) for name in names]) == [Action(text=name) for name in names]
    assert (
        json.dumps([requested.output_last for requested in served.requested][:4]) == '["unlucky", "one", "two", "last"]'
    )
