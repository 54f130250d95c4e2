"""Budgets of turns and tokens, and trials of several episodes."""

import re
from typing import Any

import pytest
from guess_game import MISS, WIN, Counting, GuessEnv, tasks
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import Action, Agent, ConfigError, ScriptedAgent, StopReason, TurnRequest
from agentsgym.testing import chat_tokenizer

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


class Watching(Agent):
    """Guesses 1, 2, 3, … and notes with which state and how many messages each turn began."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, int]] = []

    def act(self, requests: Any) -> list[Action]:
        return [self.answer(request) for request in requests]

    def answer(self, request: TurnRequest) -> Action:
        self.seen.append((request.agent_state, len(request.messages)))
        number = (request.agent_state or 0) + 1
        return Action(text=str(number), agent_state=number)


def trial(keep_history: bool, free_shots: int, **config: Any) -> GuessEnv:
    return GuessEnv(
        TOKENIZER, {"episodes_per_trial": 3, "free_shots": free_shots, "keep_history": keep_history, **config}
    )


@pytest.mark.parametrize("free_shots", [0, 1, 2])
def test_without_history_the_trajectory_is_the_last_episode(free_shots: int) -> None:
    env, agent = trial(False, free_shots), Watching()
    [trajectory] = env.rollout(tasks(2), agent)
    assert env.num_initialized == 3
    assert agent.seen == [(None, 1), (1, 3)] * 3
    assert [message["content"] for message in trajectory.messages[1::2]] == ["1", "2"]
    assert TOKENIZER.decode(trajectory.token_ids).count("Guess a number") == 1
    assert (trajectory.turn_rewards, trajectory.final_reward) == ([MISS, WIN], MISS + WIN)
    assert {turn.episode for turn in trajectory.turns} == {2}


@pytest.mark.parametrize("free_shots", [0, 1, 2])
def test_with_history_the_episodes_share_one_conversation(free_shots: int) -> None:
    env = trial(True, free_shots, max_steps_per_episode=4, system_prompt="Learn.")
    agent = Watching()
    [trajectory] = env.rollout(tasks(2), agent)
    # It counts on through the conversation: after 1, 2 it can only miss.
    assert agent.seen == [(None, 2), *((k, 2 + 2 * k) for k in range(1, 10))]
    earned = [[MISS, WIN], [MISS] * 4, [MISS] * 4]
    assert trajectory.turn_rewards == [
        0.0 if index < free_shots else reward for index, episode in enumerate(earned) for reward in episode
    ]
    assert trajectory.final_reward == pytest.approx(sum(map(sum, earned[free_shots:])))
    assert [turn.episode for turn in trajectory.turns] == [0] * 2 + [1] * 4 + [2] * 4
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert [message["role"] for message in trajectory.messages].count("system") == 1
    assert sum(message["content"] == "Guess a number from 1 to 9." for message in trajectory.messages) == 3
    rendered = TOKENIZER.apply_chat_template(trajectory.messages, tokenize=False)
    assert rendered.removesuffix("\n") == TOKENIZER.decode(trajectory.token_ids)


@given(keep_history=st.booleans(), free_shots=st.integers(0, 2), turn_credit=st.sampled_from(["step", "final"]))
def test_tokens_are_rewarded_for_what_is_not_practice(keep_history: bool, free_shots: int, turn_credit: str) -> None:
    env = trial(keep_history, free_shots, turn_credit=turn_credit, max_steps_per_episode=3)
    [trajectory] = env.rollout(tasks(2), Counting())
    assert sum(trajectory.per_token_rewards) == pytest.approx(trajectory.final_reward)
    assert trajectory.final_reward == pytest.approx(sum(trajectory.turn_rewards))


@pytest.mark.parametrize("keep_history", [False, True])
def test_each_episode_has_its_own_start_shared_by_the_rollouts(keep_history: bool) -> None:
    class Noting(GuessEnv):
        """Remembers every solution by session."""

        def __init__(self, **config: Any) -> None:
            super().__init__(env_config=config)
            self.solutions: dict[str, list[int]] = {}

        def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
            state = super()._initialize_episode(session_id, task_data)
            self.solutions.setdefault(session_id, []).append(state["solution"])
            return state

    env = Noting(
        episodes_per_trial=3, keep_history=keep_history, highest=10**9, max_steps_per_episode=2, error_allowance=9
    )
    env.rollout([{"seed": 8}, {}], ScriptedAgent(["1"], repeat_last=True), 2)
    first, second, third, fourth = env.solutions.values()
    assert first == second != third == fourth
    assert len({*first, *third}) == 6


@pytest.mark.parametrize("keep_history", [False, True])
def test_practice_may_end_badly(keep_history: bool) -> None:
    env = trial(keep_history, 2, error_allowance=0)
    [trajectory] = env.rollout(tasks(2), ScriptedAgent(["a", "b", "2"] if keep_history else ["2"]))
    assert (trajectory.final_reward, trajectory.stop_reason) == (WIN, StopReason.DONE)


def test_a_full_conversation_ends_the_trial() -> None:
    env = trial(True, 1, max_trajectory_tokens=60, max_steps_per_episode=50)
    [trajectory] = env.rollout(tasks(9), ScriptedAgent(["1"], repeat_last=True))
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert env.num_initialized == 1
    assert trajectory.final_reward == 0.0
    assert set(trajectory.turn_rewards) == {0.0}


def test_a_fresh_conversation_has_a_fresh_budget() -> None:
    budget = {"max_trajectory_tokens": 60}
    [single] = GuessEnv(TOKENIZER, budget).rollout(tasks(9), ScriptedAgent(["1"], repeat_last=True))
    env = trial(False, 1, **budget)
    [trajectory] = env.rollout(tasks(9), ScriptedAgent(["1"], repeat_last=True))
    assert single.stop_reason is trajectory.stop_reason is StopReason.MAX_TOKENS
    assert env.num_initialized == 3
    assert len(trajectory.turns) == len(single.turns)


def test_a_final_reward_is_computed_for_each_episode_that_is_not_practice() -> None:
    class Counted(GuessEnv):
        """Every episode is worth ten times its number of turns."""

        def _final_reward(self, state: dict[str, Any], turn_rewards: list[float]) -> float:
            return 10.0 * len(turn_rewards)

    config = {"episodes_per_trial": 3, "free_shots": 1, "keep_history": True, "max_steps_per_episode": 4}
    assert Counted(env_config=config).rollout(tasks(2), Counting())[0].final_reward == 80.0
    config["keep_history"] = False
    assert Counted(env_config=config).rollout(tasks(2), Counting())[0].final_reward == 20.0


def test_a_fault_in_a_later_episode_fails_the_trial_and_keeps_its_turns() -> None:
    [trajectory] = trial(True, 0).rollout(tasks(2), ScriptedAgent(["1", "2", "1"]))
    assert (trajectory.stop_reason, trajectory.final_reward) == (StopReason.FAILED, 0.0)
    assert trajectory.turn_rewards == [MISS, WIN, MISS]
    assert set(trajectory.per_token_rewards) == {0.0}


def test_a_win_in_practice_is_no_win_of_the_episode_that_had_no_room() -> None:
    [practice] = GuessEnv(TOKENIZER).rollout(tasks(1), ScriptedAgent(["1"]))
    assert practice.success is True
    env = trial(True, 2, max_trajectory_tokens=len(practice.token_ids) + 5)
    [trajectory] = env.rollout(tasks(1), ScriptedAgent(["1"], repeat_last=True))
    assert env.num_initialized == 2
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert (trajectory.success, trajectory.info) == (None, {})
    assert [message["content"] for message in trajectory.messages] == [*(m["content"] for m in practice.messages)]


@pytest.mark.parametrize(("last", "success"), [("1", True), ("2", False)])
def test_the_last_episode_alone_reports_whether_the_game_was_won(last: str, success: bool) -> None:
    env = trial(True, 2, max_steps_per_episode=1)
    [trajectory] = env.rollout(tasks(1), ScriptedAgent(["1", "1", last]))
    assert trajectory.success is success
