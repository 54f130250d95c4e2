"""OpenAIAgent over a real HTTP server: what is sent, what is read, and where it can be used."""

import asyncio
import copy
import gc
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from guess_game import GuessEnv, tasks
from http_server import Asked, Reply, agent_of, calling, chat, request, serving

from agentsgym import Action, AgentError, ConfigError, OpenAIAgent, StopReason, TurnRequest
from agentsgym.agents.openai_server import Server
from agentsgym.agents.usage import Usage
from agentsgym.event_loop import agents_loop, run_coroutine
from agentsgym.testing import chat_tokenizer


def echo(requested: Asked) -> Reply:
    return chat(requested.output_last.upper())


def answer_to(reply: Reply, **fields: Any) -> tuple[Action, Usage]:
    with calling(lambda requested: reply) as (agent, _):
        (action,) = agent.act([request(**fields)])
    assert isinstance(action, Action)
    return action, agent.usage


def guesser(requested: Asked) -> Reply:
    """Halves what the hints have left of 1 to 9."""
    low, high = 1, 9
    output = [message["content"] for message in requested.body["messages"]]
    for guess, hint in zip(output[1::2], output[2::2], strict=True):
        low, high = (int(guess) + 1, high) if hint.startswith("Higher") else (low, int(guess) - 1)
    usage = {"prompt_tokens": 10 * len(output), "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}
    return chat(str((low + high) // 2), usage=usage)


def test_a_request_holds_the_messages_the_options_and_the_smaller_budget() -> None:
    options = {"temperature": 0.5, "stop": ["\n"], "seed": 3}
    extra = {"top_k": 4, "min_p": 0.1}
    with calling(echo, max_tokens=50, extra_body=extra, **options) as (agent, served):
        for budget in (None, 20, 80):
            (action,) = agent.act([request("hi", max_new_tokens=budget, agent_state="kept")])
            assert action == Action(text="HI", agent_state="kept")
    output = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    assert [requested.body for requested in served.requested] == [
        {**output, **options, **extra, "max_tokens": n} for n in (50, 20, 50)
    ]
    assert {requested.path for requested in served.requested} == {"/v1/chat/completions"}


def test_the_key_goes_to_the_server_it_was_given_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-environment")
    with serving(echo) as served:
        for agent in (agent_of(served, api_key="mine"), agent_of(served)):
            agent.act([request()])
            agent.close()
        monkeypatch.setenv("OPENAI_BASE_URL", served.url)
        agent = OpenAIAgent("tiny")
        agent.act([request()])
        agent.close()
    sent = [requested.headers["authorization"] for requested in served.requested]
    assert sent == ["Bearer mine", "Bearer none", "Bearer of-the-environment"]


def test_openai_itself_needs_a_key_and_has_a_name_of_its_own_for_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ConfigError, match="OpenAI requires an api_key or the environment variable OPENAI_API_KEY"):
        OpenAIAgent("gpt")
    patience: Any = {"max_concurrency": 1, "timeout_s": 1.0, "max_retries": 0, "backoff_s": 0.0, "max_answer_bytes": 9}
    server = Server(base_url=None, api_key="secret", **patience)
    assert (server.is_openai, server.url) == (True, "https://api.openai.com/v1")
    assert "secret" not in repr(server)
    other = Server(base_url="http://me:secret@localhost:8000/v1", api_key=None, **patience)
    assert (other.is_openai, other.url) == (False, "http://localhost:8000/v1")


def test_a_reasoning_models_thoughts_stay_out_of_the_text() -> None:
    action, _ = answer_to(chat("left", reasoning_content="right or left?", reasoning="right or left?"))
    assert action == Action(text="left", reasoning="right or left?")


@pytest.mark.parametrize(
    ("reply", "text", "finish_reason", "refusals"),
    [
        (chat(None, finish_reason="content_filter"), "", "stop", 1),
        (chat("I w", finish_reason="content_filter"), "I w", "stop", 1),
        (chat(None, refusal="I can't help with that."), "I can't help with that.", "stop", 1),
        (chat(None, finish_reason="length", reasoning_content="still think"), "", "length", 0),
        (chat("", finish_reason="stop"), "", "stop", 0),
        (chat("so far", finish_reason="length"), "so far", "length", 0),
        (chat(None, finish_reason="tool_calls"), "", "stop", 0),
    ],
)
def test_an_answer_may_be_empty_refused_or_cut(reply: Reply, text: str, finish_reason: Any, refusals: int) -> None:
    action, usage = answer_to(reply)
    assert (action.text, action.finish_reason, action.tool_calls) == (text, finish_reason, ())
    assert (usage.refusals, usage.failures) == (refusals, 0)


def test_it_plays_a_game_and_counts_what_it_cost() -> None:
    with calling(guesser, price_per_million=(2.0, 10.0)) as (agent, served):
        trajectories = GuessEnv().rollout(tasks(*range(1, 10)), agent, num_rollouts=2)
    assert all(trajectory.success for trajectory in trajectories)
    assert not agent.usage.failures
    num_turns = [len(trajectory.turns) for trajectory in trajectories]
    num_requests, num_read = sum(num_turns), sum(10 * (2 * k + 1) for n in num_turns for k in range(n))
    assert agent.usage == Usage(
        requests=num_requests,
        prompt_tokens=num_read,
        completion_tokens=2 * num_requests,
        cached_tokens=5 * num_requests,
        cost=pytest.approx((2.0 * num_read + 10.0 * 2 * num_requests) / 1e6),
    )
    assert len(served.requested) == num_requests


@pytest.mark.parametrize(
    "reported",
    [
        None,
        {},
        {"prompt_tokens": None, "prompt_tokens_details": None},
        {"prompt_tokens": "12", "completion_tokens": {"text": 3}, "prompt_tokens_details": {"cached_tokens": [1]}},
    ],
)
def test_a_server_may_report_no_usage(reported: Any) -> None:
    assert answer_to(chat("fine", usage=reported))[1] == Usage(requests=1)


def test_a_session_that_fails_for_good_fails_alone() -> None:
    def answer(requested: Asked) -> Reply:
        unlucky = "from 1 to 8" in requested.body["messages"][0]["content"]
        return Reply({"error": "no"}, status=500) if unlucky else guesser(requested)

    with calling(answer) as (agent, served):
        (broken,) = GuessEnv(env_config={"highest": 8}).rollout(tasks(3), agent)
        (fine,) = GuessEnv().rollout(tasks(3), agent)
        mixed = agent.act([request("a"), TurnRequest(session_id="b", messages=broken.messages, token_ids=[])])
    assert broken.stop_reason is StopReason.FAILED
    assert f"'tiny' at {served.url} returned no usable response: status 500: no" in str(broken.error)
    assert fine.stop_reason is StopReason.DONE
    assert [type(one) for one in mixed] == [Action, AgentError]
    assert (agent.usage.failures, agent.usage.retries) == (2, 4)


def test_an_episode_goes_on_while_another_waits_for_a_slow_answer() -> None:
    num_others = 5
    done: list[str] = []
    waited_for_all: list[bool] = []
    all_others_done = threading.Event()

    def answer(requested: Asked) -> Reply:
        if requested.number == 0:
            waited_for_all.append(all_others_done.wait(10))  # held back until every other episode is over
        return guesser(requested)

    def note(trajectory: Any) -> None:
        done.append(trajectory.session_id)
        if len(done) == num_others:
            all_others_done.set()

    with calling(answer) as (agent, _):
        trajectories = GuessEnv().rollout(tasks(*range(1, 2 + num_others)), agent, on_finish=note)
    assert waited_for_all == [True]
    assert all(trajectory.success for trajectory in trajectories)
    assert max(len(trajectory.turns) for trajectory in trajectories) > 1


def test_it_is_an_opponent_too() -> None:
    with calling(echo) as (agent, _):
        assert agent.get_action([{"role": "user", "content": "ready?"}], "kept") == ("READY?", "kept")
    with pytest.raises(AgentError, match="returned no usable response"):
        agent.get_action([{"role": "user", "content": "ready?"}], None)
    agent.close()


def in_this_thread(agent: OpenAIAgent) -> Any:
    return agent.act([request("a")])[0]


def in_a_notebook(agent: OpenAIAgent) -> Any:
    async def cell() -> Any:
        return agent.act([request("a")])[0]

    return asyncio.run(cell())


def on_a_loop_of_the_users(agent: OpenAIAgent) -> Any:
    return asyncio.run(agent.aact(request("a")))


def on_the_agents_loop(agent: OpenAIAgent) -> Any:
    return run_coroutine(agent.aact(request("a")))


def in_another_thread(agent: OpenAIAgent) -> Any:
    heard: list[Any] = []
    thread = threading.Thread(target=lambda: heard.append(agent.act([request("a")])[0]))
    thread.start()
    thread.join()
    return heard[0]


def after_a_copy(agent: OpenAIAgent) -> Any:
    agents = [copy.deepcopy(agent), pickle.loads(pickle.dumps(agent))]
    answers = [other.act([request("a")])[0] for other in agents]
    for other in agents:
        other.close()
    return answers[0] if answers[0] == answers[1] else None


def after_closing(agent: OpenAIAgent) -> Any:
    agent.close()
    agent.close()
    return in_this_thread(agent)


def test_one_agent_works_everywhere_and_keeps_its_connection() -> None:
    places: list[Callable[[OpenAIAgent], Any]] = [
        in_this_thread, in_a_notebook, on_a_loop_of_the_users, on_the_agents_loop, in_another_thread,
    ]  # fmt: skip
    with calling(echo) as (agent, served):
        assert [place(agent) for place in places] == [Action(text="A")] * len(places)
        assert served.num_connections == 1
        assert after_a_copy(agent) == after_closing(agent) == Action(text="A")
        assert served.num_connections == 4


def test_an_agent_that_nobody_holds_closes_its_connection() -> None:
    with serving(echo) as served:
        agent = agent_of(served)
        agent.act([request()])
        (sdk,) = [
            thing for thing in gc.get_objects() if type(thing).__name__ == "AsyncOpenAI" and not thing.is_closed()
        ]
        del agent
        gc.collect()
        while not sdk.is_closed():
            run_coroutine(asyncio.sleep(0))
    assert not agents_loop().is_closed()


def test_only_an_agent_that_is_made_loads_the_package() -> None:
    code = "import sys, agentsgym.agents.openai; assert not {'torch', 'transformers', 'openai'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_the_package_it_shows_how_to_get_it() -> None:
    code = (
        "import sys; sys.modules['openai'] = None\n"
        "from agentsgym.agents.openai import OpenAIAgent\n"
        "OpenAIAgent('tiny', base_url='http://localhost/v1')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    wanted = "MissingDependencyError: 'openai' is not installed; install it with: pip install 'agentsgym[openai]'"
    assert ran.stderr.strip().endswith(wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1}, "'temprature' is not an option of OpenAIAgent .* did you mean 'temperature'"),
        ({"max_turn_tokens": 5}, "'max_turn_tokens' is not an option of OpenAIAgent .* did you mean 'max_tokens'"),
        (
            {"extra_body": {"n": 2, "stream": True}},
            r"extra_body must not contain \['n', 'stream'\], which OpenAIAgent sets itself",
        ),
        ({"extra_body": "top_k"}, "extra_body must be a dict of fields of the request, got 'top_k'"),
        ({"max_tokens": 0}, "max_tokens must be an int of at least 1, got 0"),
        ({"max_tokens": None}, "max_tokens must be an int of at least 1, got None"),
        ({"max_concurrency": 0}, "max_concurrency must be an int of at least 1, got 0"),
        ({"max_concurrency": 2.5}, "max_concurrency must be an int of at least 1, got 2.5"),
        ({"timeout_s": 0}, "timeout_s must be a positive number, got 0"),
        ({"timeout_s": float("nan")}, "timeout_s must be a positive number, got nan"),
        ({"timeout_s": None}, "timeout_s must be a positive number, got None"),
        ({"max_retries": -1}, "max_retries must be an int of at least 0, got -1"),
        ({"backoff_s": "1"}, "backoff_s must be a number of at least 0, got '1'"),
        ({"price_per_million": 3.0}, "price_per_million must be two numbers of at least 0, got 3.0"),
        ({"price_per_million": (1.0,)}, r"price_per_million must be two numbers of at least 0, got \(1.0,\)"),
        ({"base_url": "localhost:8000/v1"}, "base_url must begin with http:// .* got 'localhost:8000/v1'"),
        ({"base_url": ""}, "base_url must begin with http:// .* got ''"),
        ({"base_url": "http://[bad/v1"}, "base_url must begin with http:// or https:// and name a host"),
        ({"token_ids": "yes"}, "token_ids must be 'auto', True or False, got 'yes'"),
    ],
)
def test_what_cannot_work_is_refused_at_once(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenAIAgent("tiny", **{"base_url": "http://localhost/v1", **options})


def test_the_games_tokenizer_need_not_be_the_models_where_the_answer_is_text() -> None:
    with calling(guesser, token_ids=False) as (agent, served):
        (trajectory,) = GuessEnv(chat_tokenizer("chatml")).rollout(tasks(7), agent)
    assert trajectory.success
    assert not trajectory.exact
    assert {requested.path for requested in served.requested} == {"/v1/chat/completions"}
