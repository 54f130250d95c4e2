"""``docs/cli.md`` has the help texts as they are printed; ``python tests/cli/test_cli_page.py`` writes them anew."""

from __future__ import annotations

import re
from pathlib import Path

from command_line import ran

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
BLOCK = re.compile(r"```text\n\$ (agentsgym[^\n]*--help)\n.*?```", re.DOTALL)


def with_help(page: str) -> str:
    """The page with the help texts as they are now."""

    def block(match: re.Match[str]) -> str:
        command = match[1]
        help_text = "\n".join(line.rstrip() for line in ran(*command.split()[1:]).out.rstrip().splitlines())
        return f"```text\n$ {command}\n{help_text}\n```"

    return BLOCK.sub(block, page)


def test_the_help_texts_are_those_of_the_commands() -> None:
    page = PAGE.read_text(encoding="utf-8")
    commands = [match[1].split()[1] for match in BLOCK.finditer(page)]
    assert commands == [
        "--help",
        "envs",
        "check",
        "new",
        "eval",
        "play",
        "audit",
        "export",
        "replay",
        "compare",
        "view",
        "train",
    ]
    assert with_help(page) == page


if __name__ == "__main__":
    PAGE.write_text(with_help(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
