"""A person's lines become actions and calls; what is shown is inert; the end of the input ends the game."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import ConfigError, TurnRequest
from agentsgym.agents.human import HumanAgent, PlayerLeft, read_calls, signature
from agentsgym.envs import PriceListEnv

TOOLS: list[dict[str, Any]] = [
    {"function": {"name": "price", "parameters": {"properties": {"good": {}}}}},
    {"function": {"name": "add", "parameters": {"properties": {"a": {}, "b": {}}}}},
]
TASK = {"goods": ["egg", "pear"], "prices": {"egg": 3, "pear": 4}, "seed": 1}


def typed(*lines: str) -> Callable[[str], str]:
    """What ``input`` would give for these lines."""
    left = iter(lines)

    def read(_: str) -> str:
        line = next(left, None)
        if line is None:
            raise EOFError
        return line

    return read


def calls(line: str) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, dict(call.arguments)) for call in read_calls(line, TOOLS)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('price(good="egg")', [("price", {"good": "egg"})]),
        ("add(3, 4)", [("add", {"a": 3, "b": 4})]),
        ("add(3, b=-4.5)", [("add", {"a": 3, "b": -4.5})]),
        ("price(good='a'); add(1, 2)", [("price", {"good": "a"}), ("add", {"a": 1, "b": 2})]),
        ('{"name": "price", "arguments": {"good": "egg"}}', [("price", {"good": "egg"})]),
        ('[{"name": "add", "arguments": {}}, {"name": "price"}]', [("add", {}), ("price", {})]),
        ("7", []),
        ("I would say seven (more or less).", []),
        ("", []),
    ],
)
def test_a_line_calls_tools_or_answers(line: str, expected: list[tuple[str, dict[str, Any]]]) -> None:
    assert calls(line) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("prize(good='egg')", "there is no tool 'prize'; did you mean 'price'?"),
        ("price(egg)", "the argument good of price must be a literal, such as 3 or 'text'"),
        ("price('a', 'b')", "price accepts 1 arguments, got 2"),
        ("add(1, a=2)", "each argument of add must be passed once, by name or by position"),
        ("add(**{})", "each argument of add must be passed once"),
        ("price(good='egg'", "this is not a valid call"),
        ("price('a') and add(1, 2)", "each call must be written as"),
        ('{"name": "price"', "this is not valid JSON"),
        ('{"tool": "price"}', 'a call in JSON must be {"name": …, "arguments": {…}}'),
        ("[1]", "got 1"),
    ],
)
def test_a_call_that_cannot_be_made_is_explained(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_calls(line, TOOLS)
    assert message in str(refused.value)


@given(st.text(max_size=60) | st.builds(lambda text: f"price({text})", st.text("()[]{}'\",=*ab1 \\\n;:", max_size=40)))
def test_no_line_breaks_the_game(line: str) -> None:
    with contextlib.suppress(ConfigError):
        read_calls(line, TOOLS)


def test_a_game_with_tools_is_played_to_its_end() -> None:
    shown: list[tuple[str, str]] = []
    lines = ("price(good='egg'); price(good='pear')", "add(3, 4, 5)", "add(3, 4)", "7")
    agent = HumanAgent(read=typed(*lines), show=lambda role, text: shown.append((role, text)))
    [trajectory] = PriceListEnv().rollout([TASK], agent)
    assert (trajectory.success, trajectory.num_turns) == (True, 3)
    roles = [role for role, _ in shown]
    assert roles == ["system", "tools", "user", "tool", "tool", "note", "tool"]
    assert shown[1][1].startswith("price(good): Look up what a good costs.\nadd(a, b)")
    assert shown[5][1] == "add accepts 2 arguments, got 3\nPlease try again."
    assert shown[6][1] == "7"


def test_the_end_of_the_input_leaves_the_game() -> None:
    with pytest.raises(PlayerLeft):
        PriceListEnv().rollout([TASK], HumanAgent(read=typed("add(1, 2)"), show=lambda role, text: None))


def test_a_line_goes_on_behind_a_backslash() -> None:
    agent = HumanAgent(read=typed("one\\", "two\\", "three"), show=lambda role, text: None)
    request = TurnRequest(session_id="", messages=[{"role": "user", "content": "?"}], token_ids=())
    assert agent.act([request])[0].text == "one\ntwo\nthree"


def test_by_default_it_prints_inertly(capsys: pytest.CaptureFixture[str]) -> None:
    output = "\x1b[31mred \u202e" + "x" * 1_000_000
    request = TurnRequest(session_id="", messages=[{"role": "system", "content": output}], token_ids=())
    HumanAgent(read=typed("ok")).act([request])
    printed = capsys.readouterr().out
    assert printed.startswith("[system] \\x1b[31mred \\u202exxx")
    assert len(printed) < 21_000
    assert "characters are omitted" in printed


def test_a_signature_names_arguments_and_what_it_does() -> None:
    assert signature(TOOLS[1]) == "add(a, b)"
