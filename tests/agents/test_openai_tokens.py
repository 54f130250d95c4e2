"""OpenAIAgent with exact tokens, against a server that computes its answers from the ids it is sent, as vLLM does."""

import gc
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from guess_game import GuessEnv, tasks
from http_server import HANG_UP, Asked, Reply, ToyModel, agent_of, calling, chat, completion, serving

from agentsgym import Action, AgentError, ConfigError, TurnRequest
from agentsgym.testing import chat_tokenizer

TOKENIZER: Any = chat_tokenizer("llama3")
END: int = TOKENIZER.convert_tokens_to_ids("<|eot_id|>")
PIECES = [TOKENIZER.encode(text, add_special_tokens=False)[0] for text in "1234567899 \n"]
# The control token of another role among them: it must be recorded like any other.
MODEL = ToyModel([*PIECES, *range(40, 60), TOKENIZER.convert_tokens_to_ids("<|start_header_id|>")], END)


def decode(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def vllm(requested: Asked) -> Reply:
    assert requested.path == "/v1/completions"
    return completion(MODEL, decode, requested.body)


def request(ids: list[int], **fields: Any) -> TurnRequest:
    return TurnRequest(session_id="a", messages=[{"role": "user", "content": "3"}], token_ids=ids, **fields)


def test_a_rollout_is_exact_ids_and_logprobs_alike() -> None:
    with calling(vllm, max_tokens=6, max_concurrency=4) as (agent, served):
        env = GuessEnv(TOKENIZER, {"max_steps_per_episode": 4})
        trajectories = env.rollout(tasks(3, 7), agent, num_rollouts=5)
    prompts = [requested.body["prompt"] for requested in served.requested[1:]]  # the first requested whether it can
    recorded: list[list[int]] = []
    for trajectory in trajectories:
        assert trajectory.exact
        assert trajectory.logprobs is not None
        ids = list(trajectory.token_ids)
        for turn in trajectory.turns:
            recorded.append(ids[: turn.start])
            spoken, logprobs = MODEL.sample(ids[: turn.start], 6, {END})
            assert ids[turn.start : turn.stop] == spoken
            assert list(trajectory.logprobs[turn.start : turn.stop]) == logprobs
    assert sorted(prompts) == sorted(recorded)
    assert {requested.body["prompt"][0] for requested in served.requested} == {TOKENIZER.bos_token_id}
    endings = {trajectory.token_ids[turn.stop - 1] for trajectory in trajectories for turn in trajectory.turns}
    assert END in endings
    assert len(endings) > 1
    assert agent.usage.requests == len(prompts)


def test_the_request_is_what_vllm_documents() -> None:
    with calling(vllm, max_tokens=9, temperature=0.7, extra_body={"top_k": 5}) as (agent, served):
        agent.act([request([5, 6], max_new_tokens=4), request([7], max_new_tokens=40)])
    fixed = {"model": "tiny", "logprobs": 0, "return_token_ids": True, "temperature": 0.7, "top_k": 5}
    first, *others = [requested.body for requested in served.requested]
    assert first == {**fixed, "prompt": [5], "max_tokens": 1}
    assert sorted(others, key=str) == [
        {**fixed, "prompt": [5, 6], "max_tokens": 4},
        {**fixed, "prompt": [7], "max_tokens": 9},
    ]


def test_a_tokenizer_adds_its_end_of_turn_to_what_the_server_stops_at() -> None:
    model = ToyModel([END, *range(40, 50)], end_id=None)
    with serving(lambda requested: completion(model, decode, requested.body)) as served:
        knowing, ignorant = agent_of(served, tokenizer=TOKENIZER, max_tokens=60), agent_of(served, max_tokens=60)
        (stopped,), (ran_on,) = knowing.act([request([9])]), ignorant.act([request([9])])
        knowing.close()
        ignorant.close()
    assert isinstance(stopped, Action)
    assert isinstance(ran_on, Action)
    assert stopped.token_ids is not None
    assert ran_on.token_ids is not None
    assert stopped.token_ids[-1] == END
    assert stopped.token_ids == ran_on.token_ids[: len(stopped.token_ids)]
    assert (stopped.finish_reason, ran_on.finish_reason, len(ran_on.token_ids)) == ("stop", "length", 60)
    assert "stop_token_ids" not in served.requested[-1].body


def only_text(requested: Asked) -> Reply:
    """Ignores what it does not know, as llama.cpp does."""
    if requested.path == "/v1/chat/completions":
        return chat("3")
    return Reply({"choices": [{"text": "3", "index": 0, "logprobs": None, "finish_reason": "stop"}]})


def no_such_path(requested: Asked) -> Reply:
    return chat("3") if requested.path == "/v1/chat/completions" else Reply({"error": "not found"}, status=404)


def only_strings(requested: Asked) -> Reply:
    return chat("3") if "messages" in requested.body else Reply({"error": "prompt must be a string"}, status=400)


def error_with_status_200(requested: Asked) -> Reply:
    return chat("3") if "messages" in requested.body else Reply({"error": "Unexpected endpoint"})


UNABLE = [only_text, no_such_path, only_strings, error_with_status_200]


@pytest.mark.parametrize("server", UNABLE)
def test_a_server_that_gives_no_ids_is_called_once_and_then_for_text(
    server: Callable[[Asked], Reply], caplog: pytest.LogCaptureFixture
) -> None:
    with calling(server, max_retries=1) as (agent, served), caplog.at_level(logging.WARNING, "agentsgym.agents.openai"):
        trajectories = GuessEnv(TOKENIZER).rollout(tasks(3), agent, num_rollouts=6)
        num_requested = len(served.requested)
        trajectories += GuessEnv(TOKENIZER).rollout(tasks(3), agent)
    assert all(trajectory.success and not trajectory.exact for trajectory in trajectories)
    (message,) = caplog.messages
    assert message.startswith(f"'tiny' at {served.url} returns no token ids (")
    assert len(served.requested) == num_requested + 1
    assert sum(requested.path == "/v1/completions" for requested in served.requested) in (
        1,
        2,
    )  # requested again where it may pass


@pytest.mark.parametrize("server", UNABLE)
def test_to_insist_on_exact_tokens_is_an_error_there(server: Callable[[Asked], Reply]) -> None:
    with calling(server, token_ids=True) as (agent, _):
        with pytest.raises(
            ConfigError,
            match=r"token_ids=True, but 'tiny' at .* returns no token ids: (the response|status|it reported)",
        ):
            GuessEnv(TOKENIZER).rollout(tasks(3), agent, num_rollouts=2)
        with pytest.raises(ConfigError, match="token_ids=True requires an environment with a tokenizer"):
            GuessEnv().rollout(tasks(3), agent)


def test_trouble_at_the_first_request_is_silent_about_what_the_server_can() -> None:
    troubles = [Reply({"error": "loading"}, status=503), HANG_UP, Reply({"error": "slow down"}, status=429)]

    def answer(requested: Asked) -> Reply:
        return troubles[requested.number] if requested.number < len(troubles) else vllm(requested)

    with calling(answer, max_retries=0) as (agent, _):
        answers = [agent.act([request([n + 1])])[0] for n in range(5)]
    assert [type(one) for one in answers] == [AgentError] * 3 + [Action] * 2
    assert all(one.token_ids for one in answers if isinstance(one, Action))


def test_sessions_that_begin_together_share_the_first_request_and_its_failure() -> None:
    def answer(requested: Asked) -> Reply:
        return vllm(requested) if requested.number else Reply({"error": "loading"}, status=503)

    with calling(answer, max_retries=0) as (agent, served):
        faults = agent.act([request([n + 1]) for n in range(6)])
        assert len(served.requested) == 1
        actions = agent.act([request([n + 1]) for n in range(6)])
    assert all(isinstance(one, AgentError) for one in faults)
    assert all(isinstance(one, Action) and one.token_ids for one in actions)
    assert len(served.requested) == 2 + 6


def test_a_first_request_that_fails_when_nobody_waits_is_not_logged_as_a_bug(caplog: pytest.LogCaptureFixture) -> None:
    failing = threading.Event()

    def answer(requested: Asked) -> Reply:
        failing.wait(10)
        return Reply({"error": "loading"}, status=500)

    with calling(answer, max_retries=0) as (agent, _):
        env = GuessEnv(chat_tokenizer())
        (trajectory,) = env.rollout(tasks(3), agent, turn_timeout_s=0.2)
        probe = agent._client.probe  # type: ignore[union-attr]
        failing.set()
        while not probe.done():  # type: ignore[union-attr]
            time.sleep(0.01)
        del probe
        gc.collect()
    assert "the agent took longer than turn_timeout_s = 0.2" in str(trajectory.error)
    assert "never retrieved" not in caplog.text


def broken(**fields: Any) -> Reply:
    choice = {"index": 0, "text": "3", "token_ids": [5], "prompt_token_ids": [9], "finish_reason": "stop"}
    logprobs = {"token_logprobs": [-0.5]}
    return Reply({"choices": [{**choice, "logprobs": logprobs, **fields}]})


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (broken(token_ids=None), "the response has no token ids: None"),
        (broken(token_ids=[]), r"the response has no token ids: \[\]"),
        (broken(token_ids=["5"]), "the response has no token ids"),
        (broken(token_ids=[5, 6, 7, 8]), "the response has 4 tokens, more than the limit of 3"),
        (broken(prompt_token_ids=[8, 9]), "the response is for a different prompt from the one that was sent"),
        (broken(logprobs={"token_logprobs": [-0.5, -0.5]}), "has 1 token ids, and its log-probabilities do not match"),
        (broken(logprobs=[-0.5]), "has 1 token ids, and its log-probabilities do not match"),
        (broken(logprobs={"token_logprobs": [None]}), "log-probabilities that are not numbers"),
        (broken(finish_reason="abort"), "the response has an unknown finish reason: 'abort'"),
        (broken(text=["3"]), "the response's content is not text"),
    ],
)
def test_ids_that_cannot_be_trusted_are_not_recorded(reply: Reply, cause: str) -> None:
    with calling(lambda requested: reply if requested.number else vllm(requested), max_retries=1) as (agent, _):
        (fault,) = agent.act([request([9], max_new_tokens=3)])
    assert isinstance(fault, AgentError)
    with pytest.raises(AgentError, match=f"'tiny' at .* returned no usable response: .*{cause}"):
        raise fault


def test_a_server_may_give_ids_without_logprobs() -> None:
    with calling(lambda requested: broken(logprobs=None)) as (agent, _):
        assert agent.act([request([9])]) == [Action(text="3", token_ids=[5])]


def test_a_log_probability_that_a_server_does_not_know_is_none() -> None:
    """JSON has no infinity, so that servers write -9999 for it."""
    with calling(lambda requested: broken(logprobs={"token_logprobs": [-9999.0]})) as (agent, _):
        [action] = agent.act([request([9])])
    assert isinstance(action, Action)
    assert action.logprobs is not None
    assert math.isnan(action.logprobs[0])
