"""Notes that replace a history: when they are requested, what the agent sees then, and what is recorded and trained."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import Action, Agent, MultistepEnv, RolloutStore, ScriptedAgent, TurnRequest, evaluate
from agentsgym.batch.layouts import turn_rows
from agentsgym.envs.Tools import ToolEnv
from agentsgym.errors import ConfigError
from agentsgym.evaluation.replay import replay
from agentsgym.testing import chat_tokenizer
from agentsgym.types import Message, StopReason, ToolCall, Trajectory

TOKENIZER = chat_tokenizer("chatml")
PROMPT = "Take notes."


class Facts(MultistepEnv):
    """States a fact per turn; each answer brings 1."""

    def _system_prompt(self) -> str:
        return "Listen."

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "k": 0, "drawn": 0}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        state["drawn"] += 1
        return f"Fact {step}."

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        k = state["k"] + 1
        return {**state, "k": k}, 1.0, k == 6, {"drawn": state["drawn"]}

    def _state_key(self, state: dict[str, Any]) -> Any:
        return state["k"]

    def _potential(self, state: dict[str, Any]) -> float:
        return float(state["k"])


class NoteTaker(Agent):
    """Answers "ok", and writes a note when it is prompted for one; keeps the messages of each request."""

    def __init__(self, note: str = "My note.") -> None:
        self.note, self.seen = note, list[list[Message]]()

    def act(self, requests: Sequence[TurnRequest]) -> list[Action]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: TurnRequest) -> Action:
        self.seen.append([*request.messages])
        text = self.note if request.messages[-1]["content"] == PROMPT else "ok"
        ids = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
        ids = ids[: request.max_new_tokens]
        return Action(text=TOKENIZER.decode(ids, skip_special_tokens=True), token_ids=ids, logprobs=[-0.5] * len(ids))


def play(agent: Agent, env_class: type[MultistepEnv] = Facts, tokenizer: Any = TOKENIZER, **config: Any) -> Trajectory:
    settings = {"history": "summarize", "summarize_over_tokens": 90, "summary_prompt": PROMPT, **config}
    [played] = env_class(tokenizer, settings).rollout([{"seed": 0}], agent)
    return played


def test_a_note_replaces_the_history_and_the_episode_goes_on() -> None:
    agent = NoteTaker()
    played = play(agent)
    assert (played.stop_reason, played.final_reward, len(played.segments)) == (StopReason.DONE, 6.0, 2)
    [note] = played.info["note_turns"]
    assert played.info["num_notes"] == 1
    assert [turn.reward for turn in played.turns] == [0.0 if k == note else 1.0 for k in range(7)]
    requested, next_prompt = agent.seen[note], agent.seen[note + 1]
    assert [message["content"] for message in requested[-2:]] == ["ok", PROMPT]
    assert [(message["role"], message["content"]) for message in next_prompt] == [
        ("system", "Listen."),
        ("user", "Fact 0."),
        ("assistant", "My note."),
        ("user", f"Fact {note}."),
    ]
    assert played.info["drawn"] == 6  # the environment's prompt is drawn once per turn


def test_every_turn_is_sampled_from_exactly_the_recorded_prompt() -> None:
    class Exact(NoteTaker):
        def __init__(self) -> None:
            super().__init__()
            self.prompts = list[list[int]]()

        def _answer(self, request: TurnRequest) -> Action:
            self.prompts.append([*request.token_ids])
            return super()._answer(request)

    agent = Exact()
    played = play(agent)
    assert [played.token_ids[turn.prompt_start : turn.start] for turn in played.turns] == agent.prompts
    rows = turn_rows(0, played)
    assert [[k for k, _ in row.turns] for row in rows] == [[0, 1, 2, 3, 4], [5, 6]]  # the note is the last of its row


def test_a_note_has_a_state_of_its_own_and_the_potential_of_the_state() -> None:
    played = play(NoteTaker())
    [note] = played.info["note_turns"]
    assert played.turns[note].state_key == (0, ("note", note))
    assert played.turns[note].potential == played.turns[note + 1].potential == float(note)


@given(st.integers(1, 400), st.integers(0, 40))
def test_notes_never_follow_each_other_and_no_turn_is_lost(limit: int, length: int) -> None:
    played = play(NoteTaker("x" * length), summarize_over_tokens=limit)
    notes = played.info["note_turns"]
    assert all(second - first > 1 for first, second in pairwise(notes))
    assert 0 not in notes
    assert len(played.turns) == 6 + len(notes)
    assert played.final_reward == 6.0
    before = [turn for k, turn in enumerate(played.turns) if k not in notes and k - 1 not in notes and k]
    assert all(turn.start - turn.prompt_start <= limit for turn in before)


def test_notes_keep_an_episode_within_a_budget_that_it_would_exceed_otherwise() -> None:
    budget = {"max_trajectory_tokens": 110}
    assert play(NoteTaker(), summarize_over_tokens=10_000, **budget).stop_reason is StopReason.MAX_TOKENS
    assert play(NoteTaker(), summarize_over_tokens=70, **budget).stop_reason is StopReason.DONE


def test_without_room_for_a_note_the_budget_ends_the_episode_as_ever() -> None:
    played = play(NoteTaker("y" * 400), summarize_over_tokens=100, max_trajectory_tokens=130)
    assert played.stop_reason in {StopReason.MAX_TOKENS, StopReason.DONE}
    assert not played.failed


def test_without_a_tokenizer_four_characters_count_as_a_token() -> None:
    agent = ScriptedAgent(["ok"] * 3 + ["A note."] + ["ok"] * 9)
    played = play(agent, tokenizer=None, summarize_over_tokens=9)
    assert played.info["num_notes"] >= 1
    assert not played.failed


def test_a_state_score_after_a_last_note_goes_to_the_last_turn_of_the_game() -> None:
    class Scored(Facts):
        def _score_state(self, state: dict[str, Any]) -> float:
            return float(state["k"])

    played = play(NoteTaker(), Scored, summarize_over_tokens=60, max_trajectory_tokens=120)
    assert not played.failed
    assert all(played.turns[k].reward == 0.0 for k in played.info["note_turns"])


def read(page: int) -> str:
    """Read a page.

    Args:
        page: Its number.
    """
    return f"page {page}"


class Reading(ToolEnv):
    """Reads pages, and then answers."""

    default_config: ClassVar = {"max_steps_per_episode": 8, "system_prompt": ""}

    def _tools(self) -> list[Any]:
        return [read]

    def _reward_answer(self, state: dict[str, Any], answer: str) -> float:
        return float(answer == "done")


def test_results_of_tools_after_a_note_are_messages_of_the_user() -> None:
    class Reader(Agent):
        def __init__(self) -> None:
            self.seen = list[list[Message]]()

        def act(self, requests: Sequence[TurnRequest]) -> list[Action]:
            return [self._answer(request.messages, request.agent_state or 0) for request in requests]

        def _answer(self, messages: Sequence[Message], count: int) -> Action:
            self.seen.append([*messages])
            if messages[-1]["content"] == PROMPT:
                return Action(text="Read some pages.", agent_state=count)
            if count == 4:
                return Action(text="done")
            call = ToolCall(name="read", arguments={"page": count})
            return Action(text="", tool_calls=(call,), agent_state=count + 1)

    agent = Reader()
    settings = {"history": "summarize", "summarize_over_tokens": 10, "summary_prompt": PROMPT}
    [played] = Reading(None, settings).rollout([{"question": "What is in the book?", "seed": 0}], agent)
    assert not played.failed, played.error
    assert (played.final_reward, played.info["num_notes"] > 0) == (1.0, True)
    after = agent.seen[played.info["note_turns"][0] + 1]
    assert [message["role"] for message in after] == ["user", "assistant", "user"]
    assert after[-1]["content"].startswith("page")


def test_an_episode_by_hand_includes_the_notes() -> None:
    env = Facts(TOKENIZER, {"history": "summarize", "summarize_over_tokens": 90, "summary_prompt": PROMPT})
    messages, done, rewards = env.reset({"seed": 0}), False, list[float]()
    while not done:
        messages, reward, done, _ = env.step("My note." if messages[-1]["content"] == PROMPT else "ok")
        rewards.append(reward)
    assert sorted(rewards) == [0.0] + [1.0] * 6


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"history": "summarize"}, "'summarize' requires"),
        ({"summarize_over_tokens": 100}, "100 has no effect without"),
        ({"history": "rerender", "summarize_over_tokens": 100}, "100 has no effect without"),
    ],
)
def test_a_limit_and_notes_are_set_together(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Facts(TOKENIZER, config)


@pytest.mark.parametrize("tokenizer", [None, TOKENIZER])
def test_a_replay_writes_the_notes_where_they_were_written(tokenizer: Any, tmp_path: Path) -> None:
    settings = {"history": "summarize", "summarize_over_tokens": 70, "summary_prompt": PROMPT}
    found = evaluate(Facts(TOKENIZER, settings), NoteTaker(), [{"seed": 0}], store=tmp_path, agent_name="notes")
    [record] = RolloutStore(tmp_path).records()
    assert record.trajectory.info["note_turns"] == found.trajectories[0].info["note_turns"] != []
    again = replay(record, Facts(tokenizer, settings))
    assert (again.difference, again.impossible) == (None, None)
