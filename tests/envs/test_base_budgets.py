import re
from typing import Any

import pytest
from guess_game import Counting, GuessEnv, tasks
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.agents.base import Agent
from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.errors import ConfigError
from agentsgym.testing import chat_tokenizer
from agentsgym.types import Action, StopReason, TurnRequest

TOKENIZER = chat_tokenizer("chatml")
limits = st.none() | st.integers(1, 90)


class Verbose(Agent):
    """Samples as many ids as it wants or may: every second turn is ended by its own end-of-turn token."""

    def __init__(self, wanted: list[int]) -> None:
        self.wanted = wanted

    def act(self, requests: Any) -> list[Action]:
        return [self.answer(request) for request in requests]

    def answer(self, request: TurnRequest) -> Action:
        turn = request.agent_state or 0
        count = self.wanted[turn % len(self.wanted)]
        if request.max_new_tokens is not None:
            count = min(count, request.max_new_tokens)
        ids = [70 + k for k in range(count)]
        if turn % 2:
            ids[-1] = TOKENIZER.eos_token_id
        return Action(text="1", token_ids=ids, logprobs=[-1.0] * count, agent_state=turn + 1)


agents = st.builds(Verbose, st.lists(st.integers(1, 40), min_size=1, max_size=3)) | st.builds(
    lambda texts: ScriptedAgent(texts, repeat_last=True), st.lists(st.text(max_size=30), min_size=1, max_size=3)
)


@given(agent=agents, whole=limits, completion=limits, turn=limits, keep_history=st.booleans())
def test_no_budget_is_ever_exceeded(
    agent: Agent, whole: int | None, completion: int | None, turn: int | None, keep_history: bool
) -> None:
    env = GuessEnv(
        TOKENIZER,
        {
            "max_trajectory_tokens": whole,
            "max_steps_per_episode": 5,
            "error_allowance": 9,
            "episodes_per_trial": 2,
            "keep_history": keep_history,
        },
    )
    [trajectory] = env.rollout(tasks(9), agent, max_completion_length=completion, max_turn_tokens=turn)
    assert trajectory.error is None
    length = len(trajectory.token_ids)
    if not trajectory.turns:
        assert trajectory.stop_reason is StopReason.MAX_TOKENS
        assert whole is not None
        assert length >= whole
        assert (trajectory.final_reward, trajectory.agent_token_mask) == (0.0, [0] * length)
        return
    assert whole is None or length <= whole
    assert completion is None or length - trajectory.turns[0].start <= completion
    assert all(1 <= span.stop - span.start <= (turn or 99) for span in trajectory.turns)
    assert trajectory.turns[-1].stop == length
    assert trajectory.messages[-1]["role"] == "assistant"


def test_a_turn_is_limited_to_the_smallest_of_what_is_left() -> None:
    requested: list[int | None] = []

    class Asked(Counting):
        """Notes its budget."""

        def act(self, requests: Any) -> Any:
            requested.extend(request.max_new_tokens for request in requests)
            return super().act(requests)

    [free] = GuessEnv(TOKENIZER).rollout(tasks(3), Asked())
    assert requested == [None] * 3
    starts, prompt = [turn.start for turn in free.turns], free.turns[0].start
    requested.clear()
    whole = len(free.token_ids) + 3
    GuessEnv(TOKENIZER, {"max_trajectory_tokens": whole}).rollout(tasks(3), Asked())
    assert requested == [whole - start for start in starts]
    requested.clear()
    GuessEnv(TOKENIZER).rollout(tasks(3), Asked(), max_completion_length=50, max_turn_tokens=30)
    assert requested == [min(30, 50 - (start - prompt)) for start in starts]
    assert requested[0] == 30 > requested[-1]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_conversation_stops_where_the_next_turn_has_no_room(missing: int) -> None:
    [free] = GuessEnv(TOKENIZER).rollout(tasks(3), Counting())
    whole = free.turns[2].start + 1 - missing
    [trajectory] = GuessEnv(TOKENIZER, {"max_trajectory_tokens": whole}).rollout(tasks(3), Counting())
    if missing:
        assert trajectory.stop_reason is StopReason.MAX_TOKENS
        assert trajectory.token_ids == free.token_ids[: free.turns[1].stop]
        assert trajectory.messages == free.messages[:4]
        assert trajectory.final_reward == sum(free.turn_rewards[:2])
    else:
        assert trajectory.token_ids == free.token_ids[:whole]  # the third answer, without its end-of-turn token
        assert (trajectory.stop_reason, trajectory.final_reward) == (StopReason.DONE, free.final_reward)


def test_a_first_prompt_that_is_too_long_leaves_no_turn() -> None:
    env = GuessEnv(TOKENIZER, {"max_trajectory_tokens": 5})
    trajectories = env.rollout(tasks(3, 4), Counting())
    for trajectory in trajectories:
        assert (trajectory.stop_reason, list(trajectory.turns)) == (StopReason.MAX_TOKENS, [])
        assert trajectory.error is None
        assert len(trajectory.messages) == 1
    nested = env.generate(tasks(3), Counting(), return_all_steps=True)
    assert nested["ids"] == [[]]


@pytest.mark.parametrize("kind", ["chatml", "llama3", "inst", "none"])
def test_the_game_reads_no_more_than_the_budget_left_on_record(kind: Any) -> None:
    class Hearing(GuessEnv):
        """Remembers what it was given."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.heard: list[str] = []

        def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            self.heard.append(action)
            return super()._step_episode(session_id, state, action)

    tokenizer = chat_tokenizer(kind)
    env = Hearing(tokenizer, {"error_allowance": 9, "max_steps_per_episode": 2})
    text = "5 is what I think it could be"
    [trajectory] = env.rollout(tasks(5), ScriptedAgent([text], repeat_last=True), max_turn_tokens=1)
    spans = [trajectory.token_ids[turn.start : turn.stop] for turn in trajectory.turns]
    assert env.heard == [tokenizer.decode(span) for span in spans] == ["5"]
    assert trajectory.messages[-1] == {"role": "assistant", "content": "5"}
    assert trajectory.stop_reason is StopReason.DONE
    assert not trajectory.exact


def test_a_text_that_fits_exactly_is_not_cut() -> None:
    text = "I guess it is 5"
    [free] = GuessEnv(TOKENIZER, {"error_allowance": 0}).rollout(tasks(5), ScriptedAgent([text]))
    exactly = free.turns[0].stop - free.turns[0].start
    [trajectory] = GuessEnv(TOKENIZER, {"error_allowance": 0}).rollout(
        tasks(5), ScriptedAgent([text]), max_turn_tokens=exactly
    )
    assert (trajectory.token_ids, trajectory.messages) == (free.token_ids, free.messages)


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "a"])
@pytest.mark.parametrize(("name", "meant"), [("max_turn_tokens", "turn"), ("max_completion_length", "completion")])
def test_a_limit_that_is_no_positive_int_is_refused(name: str, meant: str, limit: Any) -> None:
    env = GuessEnv(TOKENIZER)
    complaint = f"the token budget of a {meant} must be a positive int or None, got {limit!r}"
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        env.rollout(tasks(1), Counting(), **{name: limit})
    assert env.num_initialized == 0
