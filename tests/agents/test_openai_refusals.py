"""OpenAIAgent against a server that refuses the key or the model: the run ends with one sentence, and sends no more."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import http_server
import pytest
from guess_game import GuessEnv, tasks
from http_server import KEY, Asked, Reply, agent_of, chat, request, serving

from agentsgym import Action, Agent, AgentError, ConfigError, OpenAIAgent, ScriptedAgent, Trajectory, TurnRequest
from agentsgym.agents import openai_client
from agentsgym.testing import chat_tokenizer

NUM_SLOTS = 3
calling = partial(http_server.calling, api_key=KEY, max_concurrency=NUM_SLOTS)


def refusal(status: int = 401) -> Reply:
    return Reply({"error": {"message": f"not with {KEY}"}}, status=status)


def refusing_together() -> Callable[[Asked], Reply]:
    """Refuse once every slot is taken, so that the number of requests in flight is known."""
    barrier = threading.Barrier(NUM_SLOTS)

    def answer(requested: Asked) -> Reply:
        barrier.wait(30)
        return refusal()

    return answer


class Batching(Agent):
    """An agent that answers in batches, by means of another one."""

    def __init__(self, inner: OpenAIAgent) -> None:
        self.inner = inner
        self.num_calls = 0

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        self.num_calls += 1
        return self.inner.act(requests)


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (401, "api_key (on the command line --api-key-env)"),
        (403, "api_key (on the command line --api-key-env), and whether it may use the model"),
        (404, "the model's name and base_url (on the command line --base-url)"),
    ],
)
def test_the_sentence_names_server_status_and_what_to_check(status: int, remedy: str) -> None:
    with calling(lambda requested: refusal(status)) as (agent, served), pytest.raises(ConfigError) as raised:
        agent.act([request()])
    assert str(raised.value) == (
        f"'tiny' at {served.url} refuses every request: status {status}: not with ***; check {remedy}"
    )
    assert len(served.requested) == 1
    assert (agent.usage.requests, agent.usage.retries, agent.usage.failures) == (1, 0, 1)


def test_a_key_that_was_not_sent_is_part_of_the_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with calling(lambda requested: refusal(), api_key=None) as (agent, served):
        with pytest.raises(ConfigError, match=r"--api-key-env\), which is not set: OPENAI_API_KEY is sent only if"):
            agent.get_action([{"role": "user", "content": "hi"}], None)
        monkeypatch.setenv("OPENAI_API_KEY", "of the shell")
        monkeypatch.setenv("OPENAI_BASE_URL", served.url)
        other = agent_of(served, base_url=None, api_key=None)
        with pytest.raises(ConfigError, match=r"status 401: .*; check OPENAI_API_KEY$"):
            other.act([request()])
        other.close()


def test_a_call_for_many_sends_no_more_than_was_in_flight() -> None:
    refused = pytest.raises(ConfigError, match="refuses every request: status 401")
    with calling(refusing_together()) as (agent, served), refused:
        agent.act([request(str(n)) for n in range(12)])
    assert len(served.requested) == NUM_SLOTS


@pytest.mark.parametrize("is_batched", [False, True], ids=["concurrent", "batched"])
@pytest.mark.parametrize("tokenizer", [None, chat_tokenizer("chatml")], ids=["text", "tokens"])
def test_a_rollout_sends_no_more_than_was_in_flight(is_batched: bool, tokenizer: Any) -> None:
    num_in_flight = NUM_SLOTS if tokenizer is None else 1  # one request finds out whether the server gives ids
    with calling(refusing_together() if tokenizer is None else lambda requested: refusal()) as (inner, served):
        batching = Batching(inner)
        with pytest.raises(ConfigError, match="refuses every request: status 401"):
            GuessEnv(tokenizer).rollout(tasks(*range(12)), batching if is_batched else inner)
    assert len(served.requested) == num_in_flight
    assert batching.num_calls == is_batched  # a batch is not halved to find out whom the server refuses


@pytest.mark.parametrize("is_batched", [False, True], ids=["concurrent", "batched"])
def test_what_was_finished_before_has_been_given_to_on_finish(is_batched: bool) -> None:
    with calling(lambda requested: refusal() if requested.number == 2 else chat("5")) as (inner, served):
        finished: list[Trajectory] = []
        env = GuessEnv(env_config={"max_steps_per_episode": 1})
        with pytest.raises(ConfigError, match="refuses every request: status 401"):
            env.rollout(
                tasks(5, 5, 5, 5), Batching(inner) if is_batched else inner, max_concurrent=1, on_finish=finished.append
            )
    assert [one.success for one in finished] == [True, True]
    assert len(served.requested) == 3
    assert not env.active_states


def test_the_next_rollout_and_the_next_turn_after_finish_try_again() -> None:
    """A server may have been given the right key meanwhile."""
    with calling(lambda requested: refusal() if requested.number in (0, 2) else chat("5")) as (agent, _):
        with pytest.raises(ConfigError):
            agent.act([request()])
        agent.finish()
        assert agent.act([request()]) == [Action(text="5")]
        with pytest.raises(ConfigError):
            GuessEnv().rollout(tasks(5), agent)
        assert GuessEnv().rollout(tasks(5), agent)[0].success


class Numbered(GuessEnv):
    """A game of which each session begins with another prompt."""

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return f"{next(self.numbers)}: {super()._format_prompt(state, step)}"

    numbers = count()


class Hooked(GuessEnv):
    """A game whose step calls an agent of its own."""

    master: OpenAIAgent

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        self.master.get_action([{"role": "user", "content": action}], None)
        return super()._step_episode(session_id, state, action)


class Swallowing(Agent):
    """An agent that hides why its own agent cannot answer."""

    def __init__(self, inner: OpenAIAgent) -> None:
        self.inner = inner

    def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
        try:
            return self.inner.get_action(messages, agent_state)
        except ConfigError as error:
            raise RuntimeError("no answer") from error


@pytest.mark.parametrize("is_hook", [False, True], ids=["agent", "hook"])
def test_a_hidden_refusal_is_not_retried(is_hook: bool) -> None:
    with calling(lambda requested: refusal()) as (inner, served):
        env = Hooked()
        env.master = inner
        trajectories = env.rollout(tasks(*range(30)), ScriptedAgent(["5"]) if is_hook else Swallowing(inner))
    assert [one.failed for one in trajectories] == [True] * 30
    assert all("refuses every request: status 401: not with ***" in str(one.error) for one in trajectories)
    assert len(served.requested) == 1


def test_a_refusal_is_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "_REFUSED_S", 0.0)
    with calling(lambda requested: chat("5") if requested.number else refusal()) as (agent, _):
        with pytest.raises(ConfigError):
            agent.act([request()])
        assert agent.act([request()]) == [Action(text="5")]


@pytest.mark.parametrize("status", [403, 404])
def test_a_server_that_has_answered_before_refuses_one_session(status: int) -> None:
    """A gateway's filter refuses single prompts, for example."""
    with calling(lambda requested: refusal(status) if requested.number == 1 else chat("fine")) as (agent, _):
        assert agent.act([request()]) == [Action(text="fine")]
        (error,) = agent.act([request()])
        assert agent.act([request()]) == [Action(text="fine")]
    assert isinstance(error, AgentError)
    assert f"returned no usable response: status {status}: not with ***" in str(error)


def test_a_key_that_is_taken_back_ends_the_run() -> None:
    """A filter that refuses single prompts cannot be distinguished from it by one refusal, but by ten in a row."""

    def answer(requested: Asked) -> Reply:
        return refusal(403) if requested.number >= 2 else chat("5")

    with calling(answer, max_concurrency=1) as (agent, served):
        finished: list[Trajectory] = []
        with pytest.raises(ConfigError, match=r"refuses every request: status 403: .* whether it may use the model"):
            Numbered().rollout(tasks(*[5] * 200), agent, on_finish=finished.append)
        with pytest.raises(ConfigError, match="refuses every request"):
            agent.act([request("once more")])
    assert [one.failed for one in finished] == [False] * 2 + [True] * 9
    assert len(served.requested) == 2 + 10 + 1  # the next rollout sends again, and is refused at once


def test_a_prompt_that_a_filter_refuses_may_be_the_first_of_many_rollouts() -> None:
    def answer(requested: Asked) -> Reply:
        return refusal(403) if requested.output_last == "bad" else chat("fine")

    with calling(answer, max_concurrency=1) as (agent, _):
        answers = agent.act([request("good"), *[request("bad")] * 20, request("good")])
        assert [isinstance(one, AgentError) for one in answers] == [False, *[True] * 20, False]
        with pytest.raises(ConfigError, match="refuses every request: status 403"):
            agent.act([request("bad")] * 50)


def test_a_server_without_completions_is_no_refusal() -> None:
    def answer(requested: Asked) -> Reply:
        return refusal(404) if requested.path.endswith("/v1/completions") else chat("5")

    with calling(answer) as (agent, _):
        (trajectory,) = GuessEnv(chat_tokenizer("chatml")).rollout(tasks(5), agent)
    assert trajectory.success


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", None])
def test_a_redirect_to_another_server_is_refused_and_one_to_another_path_followed(host: str | None) -> None:
    with serving(lambda requested: chat("stolen")) as other:
        port = other.url.rpartition(":")[2].partition("/")[0]
        place = "/v1/elsewhere" if host is None else f"http://me:password@{host}:{port}/v1/elsewhere?key=a-secret"

        def answer(requested: Asked) -> Reply:
            return (
                chat("here")
                if requested.path == "/v1/elsewhere"
                else Reply({}, status=307, headers={"Location": place})
            )

        with calling(answer) as (agent, served):
            (given,) = agent.act([request()])
        if host is None:
            assert isinstance(given, Action)
            assert given.text == "here"
            return
        assert isinstance(given, AgentError)
        wanted = f"it redirects to another server, http://{host}:{port}, and the conversation is not sent there"
        assert wanted in str(given)
        assert "secret" not in str(given)
        assert "password" not in str(given)
        assert len(served.requested) == 1
    assert not other.requested
