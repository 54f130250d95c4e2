"""Read a command out of what the agent said."""

from __future__ import annotations

import re

from agentsgym.envs.shared.numbers import without_thoughts

MOST_CHARS = 200  # of a command
_TAGGED = re.compile(r"<action>(.*?)(?:</action>|$)", re.S | re.I)


def read_command(text: str) -> str | None:
    r"""Give the command that the agent says; None where it says none.

    Thoughts do not count. The last ``<action>…</action>``, which the end of the text may close, goes before all else,
    then the last line of which something is left without a prompt sign in front, and quotes, stars, brackets and a full
    stop around it; spaces are single. What cannot be printed counts as a space: an interpreter may end at a NUL.

    >>> read_command("I will try.\n> go east."), read_command("<action>open  door</action>"), read_command("<think>Hm")
    ('go east', 'open door', None)
    """
    said = without_thoughts(text)
    tagged = _TAGGED.findall(said)
    for line in reversed((tagged[-1] if tagged else said).splitlines()):
        printable = "".join(char if char.isprintable() else " " for char in line)
        command = " ".join(printable.split()).lstrip("> \"'`*[]").rstrip(". \"'`*[]")
        if command:
            return command if len(command) <= MOST_CHARS else None
    return None


def listed(commands: list[str]) -> str:
    """Write the commands that can be given, for a prompt.

    >>> listed(["go east", "look"])
    'Possible commands: go east, look'
    """
    return "Possible commands: " + ", ".join(commands)
