"""Parse a command from the agent's text."""

from __future__ import annotations

import re

from agentsgym.envs.shared.numbers import without_thoughts

MOST_CHARS = 200  # in a command
_TAGGED = re.compile(r"<action>(.*?)(?:</action>|$)", re.S | re.I)


def read_command(text: str) -> str | None:
    r"""Return the command in the agent's text; None if there is none.

    Thoughts are ignored. The last ``<action>…</action>``, which the end of the text may close, takes precedence;
    otherwise the last line that is not empty after removing a leading prompt sign and surrounding quotes, stars,
    brackets and a full stop; spaces are single. Unprintable characters count as spaces: an interpreter may stop at a
    NUL.

    >>> read_command("I will try.\n> go east."), read_command("<action>open  door</action>"), read_command("<think>Hm")
    ('go east', 'open door', None)
    """
    text = without_thoughts(text)
    tagged = _TAGGED.findall(text)
    for line in reversed((tagged[-1] if tagged else text).splitlines()):
        printable = "".join(char if char.isprintable() else " " for char in line)
        command = " ".join(printable.split()).lstrip("> \"'`*[]").rstrip(". \"'`*[]")
        if command:
            return command if len(command) <= MOST_CHARS else None
    return None


def listed(commands: list[str]) -> str:
    """Format the admissible commands for a prompt.

    >>> listed(["go east", "look"])
    'Possible commands: go east, look'
    """
    return "Possible commands: " + ", ".join(commands)
