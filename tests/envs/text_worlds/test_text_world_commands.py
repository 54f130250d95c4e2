"""What is read as a command of a text world."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.envs.shared.text_worlds.env import MAX_COMMAND_CHARS, format_commands, read_command


@pytest.mark.parametrize(
    ("message", "command"),
    [
        ("go east", "go east"),
        ("  Take  the\tkey. ", "Take the key"),
        ("I go there.\n\n> go east\n", "go east"),
        ("<think>Not north.</think>go east", "go east"),
        ("<action>open door</action> or <ACTION>\nlook\n</ACTION> because", "look"),
        ("I open it. <action>open door", "open door"),  # cut at a stop string
        ("take \0coin\x07", "take coin"),  # a NUL ends TextWorld's interpreter
        ("[go east]", "go east"),
        ("`go east`", "go east"),
        ('" go east. "', "go east"),
        ("<think>go east", None),
        ("", None),
        (" \n>. \n", None),
        ("go " * 100, None),
    ],
)
def test_one_command_is_read(message: str, command: str | None) -> None:
    assert read_command(message) == command


@given(st.text())
def test_whatever_is_answered_a_command_is_one_short_line(message: str) -> None:
    command = read_command(message)
    assert command is None or (0 < len(command) <= MAX_COMMAND_CHARS and len(command.splitlines()) == 1)
    assert command is None or (command == " ".join(command.split()) and command.isprintable())


@given(st.lists(st.from_regex(r"[a-z]+( [a-z]+){0,3}", fullmatch=True), min_size=1))
def test_every_command_that_is_listed_is_read_as_it_stands(commands: list[str]) -> None:
    assert format_commands(commands).removeprefix("Possible commands: ").split(", ") == commands
    assert [read_command(command) for command in commands] == commands
