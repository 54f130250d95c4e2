"""Conversations as people read them: chosen, bounded, and inert whatever they hold."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agentsgym.observers.shown import (
    COLUMNS,
    Conversation,
    choose_by_rank,
    print_conversations,
    trace_of,
    turn_advantages,
)
from agentsgym.texts import visible
from agentsgym.types import Message, StopReason, Trajectory, Turn

HOSTILE = "\x1b]0;owned\x07\x1b[2J<script>alert(1)</script>\u202eevil\u2066\ud800 [bold]x[/bold] :smile: [/nothing]"


def played(*answers: str, text: str = "Guess.", **changes: object) -> Trajectory:
    """Two tokens an answer, each answer one of two turns in which 0, 1, 2, … is rewarded."""
    messages: list[Message] = []
    turns: list[Turn] = []
    for k, answer in enumerate(answers):
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        turns.append(Turn(start=3 * k + 1, stop=3 * k + 3, reward=float(k), message_index=2 * k + 1, invalid=k == 1))
    trajectory = Trajectory(
        token_ids=[0] * 3 * len(answers),
        turns=turns,
        messages=messages,
        final_reward=float(sum(range(len(answers)))),
        stop_reason=StopReason.MAX_TURNS,
        task_data={"seed": 4},
        info={"success": False},
    )
    return replace(trajectory, **changes)  # pyright: ignore[reportArgumentType]


def printed(conversation: Conversation, width: int = 80) -> str:
    terminal = io.StringIO()
    console = Console(file=terminal, width=width, markup=True, force_terminal=True, color_system=None)
    print_conversations([conversation], "training, step 7:", console)
    return terminal.getvalue()


def test_each_turn_has_its_reward_and_its_advantage() -> None:
    shown = Conversation.of(played("one", "two"), [0.0, 1.0, 1.0, 0.0, -1.0, -2.0], "Guess")
    assert shown.facts["turn_rewards"] == [0.0, 1.0]
    assert shown.facts["turn_advantages"] == [1.0, -1.5]
    assert shown.text.splitlines() == [
        "[user] Guess.",
        "[assistant, turn 0, reward +0, advantage +1] one",
        "[user] Guess.",
        "[assistant, turn 1, reward +1, advantage -1.5, invalid] two",
    ]
    row = dict(zip(COLUMNS, shown.row(7), strict=True))
    assert row | {"conversation": ""} == {
        "step": 7,
        "task": 0,
        "rollout": 0,
        "environment": "Guess",
        "outcome": "lost",
        "stop_reason": "max_turns",
        "reward": 1.0,
        "num_turns": 2,
        "turn_rewards": "0 1",
        "turn_advantages": "1 -1.5",
        "conversation": "",
    }
    messages, metadata = trace_of(shown, {"step": 7})
    assert [one["role"] for one in messages] == ["user", "assistant"] * 2
    assert (metadata["status"], metadata["step"], metadata["invalid_turns"]) == ("ok", 7, [1])


def test_a_turn_without_tokens_has_no_advantage() -> None:
    text_only = played("one")
    text_only = replace(text_only, turns=[replace(text_only.turns[0], start=1, stop=1)])
    assert turn_advantages(text_only, [0.5, 0.5, 0.5]) == [None]
    assert "advantage" not in Conversation.of(text_only, [0.5, 0.5, 0.5]).text


def test_calls_of_tools_are_shown() -> None:
    call = {"type": "function", "id": "7", "function": {"name": "price", "arguments": {"good": "eggs\x1b[2J"}}}
    messages: list[Message] = [
        {"role": "user", "content": "How much?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "7", "name": "price"},
    ]
    shown = Conversation.of(played("x", messages=messages))
    assert "reward +0] price({'good': 'eggs\\\\x1b[2J'})" in shown.text
    assert shown.messages[2] == {"role": "tool", "content": "3", "tool_call_id": "7"}


def test_what_a_terminal_would_obey_is_written_out() -> None:
    shown = Conversation.of(
        played(HOSTILE, text=HOSTILE, task_data={HOSTILE: [HOSTILE]}, error=HOSTILE, stop_reason=StopReason.FAILED),
        environment=visible(HOSTILE),
    )
    for text in (printed(shown), shown.text, json.dumps(shown.row(1), ensure_ascii=False), json.dumps(shown.facts)):
        assert not set(text) & {"\x1b", "\x07", "\u202e", "\u2066", "\ud800"}
    assert "\\x1b[2J<script>alert(1)" in shown.text
    assert "[bold]x[/bold] :smile: [/nothing]" in " ".join(printed(shown, 400).split())
    orjson.dumps(trace_of(shown, {}))  # as trackio writes it; half a surrogate pair would be refused


def test_long_ones_lose_their_middle() -> None:
    shown = Conversation.of(played(*["x" * 1_000_000] * 3), [0.5] * 9)
    assert len(shown.text) <= 20_000
    assert max(len(one["content"]) for one in shown.messages) <= 20_000
    assert len(printed(shown)) < 8_000
    many = Conversation.of(played(*map(str, range(5000))), [0.5] * 15_000)
    assert len(many.messages) == 401
    assert many.messages[200]["content"] == "… 9600 messages are left out …"
    assert many.notes[1] == "turn 0, reward +0, advantage +0.5"
    assert many.notes[400] == "turn 4999, reward +4999, advantage +0.5"  # beside its own answer
    assert many.messages[400]["content"] == "4999"
    assert len(many.facts["turn_rewards"]) == 5000
    assert len(printed(many).splitlines()) < 80
    assert max(len(str(cell)) for cell in many.row(0)) <= 20_000


@given(st.text(), st.integers(20, 200))
def test_no_text_breaks_the_frame(text: str, width: int) -> None:
    lines = printed(Conversation.of(played(text, text=text)), width).splitlines()
    assert lines == [visible(one) for one in lines]
    assert all(one[0] in "│╭╰t" for one in lines if one.strip())


def test_advantages_that_have_no_mean_end_nothing() -> None:
    shown = Conversation.of(played("x"), [0.0, math.inf, -math.inf])
    assert shown.facts["turn_advantages"] == [None]
    assert json.dumps(shown.row(1), allow_nan=False)
    earned = Conversation.of(replace(played("x", "y"), final_reward=math.inf), [math.inf] * 6)
    row = dict(zip(COLUMNS, earned.row(1), strict=True))
    assert (row["reward"], row["turn_advantages"]) == ("inf", "inf inf")


@pytest.mark.parametrize(
    ("number", "expected"), [(0, []), (1, [2]), (2, [2, 0]), (3, [2, 3, 0]), (4, [2, 1, 3, 0]), (9, [2, 1, 3, 0])]
)
def test_the_best_and_the_worst_are_always_among_them(number: int, expected: list[int]) -> None:
    assert choose_by_rank([-1.0, 1.0, 2.0, 0.5], number) == expected


def test_there_may_be_nothing_to_choose_from() -> None:
    assert choose_by_rank([], 3) == []
