"""Read a command out of what the agent said."""

from __future__ import annotations

import re

from agentsgym.envs.thoughts import without_thoughts

MOST_CHARS = 200  # of a command
_TAGGED = re.compile(r"<action>(.*?)</action>", re.S | re.I)


def read_command(text: str) -> str | None:
    r"""Give the command that the agent says; None where it says none.

    Thoughts do not count. The last ``<action>…</action>`` goes before all else, then the last line; a prompt sign in
    front of it, and quotes, brackets and a full stop around it are left out, and spaces are single.

    >>> read_command("I will try.\n> go east."), read_command("<action>open  door</action>"), read_command("<think>Hm")
    ('go east', 'open door', None)
    """
    said = without_thoughts(text)
    tagged = _TAGGED.findall(said)
    lines = [line for line in (tagged[-1] if tagged else said).splitlines() if line.strip()]
    if not lines:
        return None
    command = " ".join(lines[-1].split()).lstrip("> ").strip("\"'`[]").rstrip(". ")
    return command if 0 < len(command) <= MOST_CHARS else None


def listed(commands: list[str]) -> str:
    """Write the commands that can be given, for a prompt.

    >>> listed(["go east", "look"])
    'Possible commands: go east, look'
    """
    return "Possible commands: " + ", ".join(commands)
