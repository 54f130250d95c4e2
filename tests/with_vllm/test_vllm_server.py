"""OpenAIAgent over a real vLLM server: what it records is what was sampled, from the prompt that was recorded."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from guess_game import GuessEnv, tasks
from http_server import Asked, Reply, serving

from agentsgym.agents.openai import OpenAIAgent
from agentsgym.errors import AgentError, ConfigError
from agentsgym.testing import chat_tokenizer
from agentsgym.types import Action, Trajectory, TurnRequest

TOKENIZER: Any = chat_tokenizer("llama3")
END: int = TOKENIZER.convert_tokens_to_ids("<|eot_id|>")
STOPS = (END, TOKENIZER.pad_token_id)  # the template's and the model's
GAME = {"max_steps_per_episode": 4, "error_allowance": 4}
EXACT = 1e-4
Gap = Callable[[Sequence[Trajectory], float], float]


def request(ids: list[int], text: str = "hello", **fields: Any) -> TurnRequest:
    return TurnRequest(session_id="a", messages=[{"role": "user", "content": text}], token_ids=ids, **fields)


def passing_on(url: str, heard: list[dict[str, Any]]) -> Callable[[Asked], Reply]:
    """Sends each request on to the real server and keeps what that states."""

    def answer(requested: Asked) -> Reply:
        whole = urllib.request.Request(
            url.removesuffix("/v1") + requested.path,
            json.dumps(requested.body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(whole, timeout=60) as response:
                body = json.load(response)
        except urllib.error.HTTPError as error:
            return Reply(error.read(), status=error.code)
        heard.append({"requested": requested.body, "output": body["choices"][0]})
        return Reply(body)

    return answer


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_rollout_over_the_server_is_exact(vllm_server: str, largest_gap: Gap, temperature: float) -> None:
    heard: list[dict[str, Any]] = []
    with serving(passing_on(vllm_server, heard)) as served:
        agent = OpenAIAgent(
            "tiny", base_url=served.url, token_ids=True, tokenizer=TOKENIZER, max_tokens=24, temperature=temperature
        )
        trajectories = GuessEnv(TOKENIZER, GAME).rollout(tasks(3, 7, 8), agent, num_rollouts=8)
        agent.close()

    reported = {(tuple(one["requested"]["prompt"]), tuple(one["output"]["token_ids"])) for one in heard[1:]}
    recorded: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for trajectory in trajectories:
        assert trajectory.exact
        ids = list(trajectory.token_ids)
        recorded |= {(tuple(ids[: turn.start]), tuple(ids[turn.start : turn.stop])) for turn in trajectory.turns}
        for turn, following in pairwise(trajectory.turns):
            between = ids[turn.stop : following.start]
            assert (ids[turn.stop - 1] in STOPS) != (
                END in between[:1]
            )  # an end, sampled or from the template, not two
    assert recorded == reported
    assert all(one["output"]["prompt_token_ids"] == one["requested"]["prompt"] for one in heard)
    assert {ids[-1] == END for _, ids in recorded} == {True, False}
    assert all(len(ids) == 24 or ids[-1] in STOPS for _, ids in recorded)
    assert len(recorded) > 3 * 4
    assert largest_gap(trajectories, temperature) < EXACT

    usage = agent.usage
    assert usage.requests == sum(len(trajectory.turns) for trajectory in trajectories)
    assert usage.prompt_tokens == sum(len(one["requested"]["prompt"]) for one in heard)
    assert usage.completion_tokens == sum(len(one["output"]["token_ids"]) for one in heard)
    assert usage.failures == usage.retries == 0


def test_greedy_answers_do_not_depend_on_who_calls_beside(vllm_server: str) -> None:
    prompts = [TOKENIZER.encode(text, add_special_tokens=False) for text in ("one", "two words", "and three more")]
    agent = OpenAIAgent("tiny", base_url=vllm_server, temperature=0, max_tokens=12)
    together = agent.act([request(prompt) for prompt in prompts])
    assert together == [agent.act([request(prompt)])[0] for prompt in prompts]
    (short,) = agent.act([request(prompts[0], max_new_tokens=5)])
    agent.close()
    assert isinstance(short, Action)
    assert isinstance(together[0], Action)
    assert list(short.token_ids or ()) == list(together[0].token_ids or ())[:5]
    assert short.token_ids is not None
    assert short.finish_reason == ("stop" if short.token_ids[-1] in STOPS else "length")


def test_text_is_requested_where_the_game_has_no_tokens(vllm_server: str) -> None:
    agent = OpenAIAgent("tiny", base_url=vllm_server, max_tokens=8, seed=1)
    trajectories = GuessEnv(env_config=GAME).rollout(tasks(3), agent, num_rollouts=2)
    text, state = agent.get_action([{"role": "user", "content": "hello"}], "kept")
    agent.close()
    assert text
    assert state == "kept"
    assert all(turn.stop == turn.start for trajectory in trajectories for turn in trajectory.turns)
    assert not any(trajectory.failed for trajectory in trajectories)


def test_what_the_server_refuses_is_reported_in_its_own_words(vllm_server: str) -> None:
    agent = OpenAIAgent("tiny", base_url=vllm_server, max_tokens=8)
    fine, too_long = agent.act([request([5, 6]), request([5] * 1030)])
    stranger = OpenAIAgent("nobody", base_url=vllm_server)
    with pytest.raises(ConfigError, match=r"status 404: The model `nobody` does not exist.*; check the model's name"):
        stranger.act([request([5])])
    agent.close()
    stranger.close()
    assert isinstance(fine, Action)
    assert isinstance(too_long, AgentError)
    assert f"'tiny' at {vllm_server} returned no usable response: status 400: This model's maximum context" in str(
        too_long
    )
