"""``docs/cli.md`` has every command, with an example, and every key of a configuration; what it names exists."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from agentsgym.cli.app import app
from agentsgym.recipes.recipe import EnvironmentPart, EvaluationPart, Recipe, WarmStart

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
GROUP: Any = typer.main.get_command(app)
OPTIONS: dict[str, set[str]] = {
    name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for name, command in GROUP.commands.items()
}
SECTIONS = {section.split("\n", 1)[0]: section for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}


def test_every_command_has_a_section_and_a_row_in_the_overview() -> None:
    assert {name for name in SECTIONS if name.islower()} == set(OPTIONS)  # other headings begin with a capital
    assert set(re.findall(r"\[`(\w+)`\]\(#\w+\)", PAGE.split("\n## ", 1)[0])) == set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_section_has_an_example_and_names_options_of_its_command_alone(name: str) -> None:
    section = SECTIONS[name]
    assert re.search(rf"^(?:\$ )?agentsgym {name} ", section, re.MULTILINE)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", section)) <= OPTIONS[name]


def test_the_other_sections_name_options_that_exist() -> None:
    known = {option for options in OPTIONS.values() for option in options} | {"--help", "--install-completion"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", PAGE)) <= known


def test_every_key_of_a_configuration_has_a_row() -> None:
    rows = re.findall(r"^\| (`[\w.]+`(?:, `\w+`)*) \| ", SECTIONS["train"], re.MULTILINE)
    documented = {
        f"{first.rpartition('.')[0]}.{key.rpartition('.')[2]}".lstrip(".")
        for first, keys in ((names[0], names) for names in (re.findall(r"`([\w.]+)`", row) for row in rows))
        for key in keys
    }
    parts = {"environments": EnvironmentPart, "warm_start": WarmStart, "evaluation": EvaluationPart}
    nested = {f"{name}.{field.name.rstrip('_')}" for name, part in parts.items() for field in fields(part)}
    top = {field.name for field in fields(Recipe)} - {"folder", "name", "warm_start", "evaluation"}
    assert documented == nested | top
