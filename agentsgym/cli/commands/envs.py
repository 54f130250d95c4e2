"""``agentsgym envs``: list the environments, or show one in detail."""

from __future__ import annotations

import inspect
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentsgym.cli import options
from agentsgym.cli.console import UsageError, cell, new_table, out, print_json, print_text, reported
from agentsgym.errors import did_you_mean
from agentsgym.texts import shown

if TYPE_CHECKING:
    from agentsgym.envs.datasets.naming import NamedEnv

_STATUSES = ("ok", "words", "gamemaster", "broken", "missing")
_COLORS = {"ok": "green", "words": "green", "gamemaster": "yellow", "missing": "yellow", "broken": "red"}


@reported
def envs(  # noqa: PLR0913, PLR0917  # options of a command
    environment: Annotated[
        str | None, typer.Argument(metavar="ENV", help="Environment to show in detail.", show_default=False)
    ] = None,
    text: Annotated[
        str | None,
        typer.Option("--text", metavar="TEXT", help="Show only environments whose name or description contains TEXT."),
    ] = None,
    players: Annotated[
        int | None,
        typer.Option("--players", metavar="N", min=1, help="Show only environments with this number of players."),
    ] = None,
    status: Annotated[
        str | None,
        typer.Option(
            "--status",
            metavar="STATUS",
            help="Show only environments with this status: ok, words (works; uses word lists), gamemaster (needs a "
            "language model as gamemaster), broken, or missing (its package is not installed).",
            autocompletion=options.one_of(*_STATUSES),
        ),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Show only environments that are installed and need no server.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="Also list the variants of collections.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """List the environments, or show one with its settings and task fields.

    Some environments are collections, such as one environment per game. Their variants, named NAME:VARIANT, are listed
    only with a filter or --all.
    """
    from agentsgym.cli.catalogue import entries  # noqa: PLC0415

    if environment is not None:
        show_env(options.find_env(environment), as_json=as_json)
        return
    if status is not None and status not in _STATUSES:
        raise UsageError(f"--status: there is no status {status!r}{did_you_mean(status, _STATUSES)}")
    is_filtered = every or offline or (text, players, status) != (None, None, None)
    chosen = [
        one
        for one in entries()
        if (is_filtered or not one.is_variant)
        and (text is None or text.lower() in f"{one.name} {one.text}".lower())
        and (players is None or one.min_players <= players <= one.max_players)
        and (status is None or one.status == status)
        and (not offline or (one.offline and one.status in ("ok", "words")))
    ]
    if as_json:
        print_json([asdict(one) for one in chosen])
        return
    table = new_table()
    table.add_column("environment", overflow="fold", ratio=3)
    table.add_column("players", justify="right")
    table.add_column("status")
    table.add_column("", ratio=4)
    for one in chosen:
        extra = f" pip install 'agentsgym[{one.extra}]'" if one.status == "missing" else ""
        status_cell = cell(one.status, _COLORS.get(one.status, ""))
        table.add_row(cell(one.name, "bold"), one.players, status_cell, cell(one.text + extra))
    if chosen:
        out().print(table)
    out().print(f"{len(chosen)} environment{'' if len(chosen) == 1 else 's'}", style="dim")


def show_env(named: NamedEnv, *, as_json: bool) -> None:
    """Print an environment's description, its configuration keys and its task fields."""
    detail = _details(named)
    if as_json:
        print_json(detail)
        return
    out().print(cell(detail["name"], "bold"))
    print_text(detail["about"])
    out().print(cell(f"class: {detail['env_class_path']}", "dim"))
    for name, value in detail["game"].items():
        if value not in ("", None):
            text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
            out().print(cell(f"{name.replace('_', ' ')}: {text}"))
    table = new_table(title="env_config", title_justify="left")
    table.add_column("key", overflow="fold", no_wrap=True)
    for heading in ("default", "valid values"):
        table.add_column(heading, overflow="fold")
    for row in detail["env_config"]:
        table.add_row(cell(row["key"]), cell(shown(row["default"], 60)), cell(row["valid"]))
    out().print(table)
    known = detail["task_data"]
    print_text("task_data: any keys" if known is None else f"task_data: {', '.join(['seed', *known])}")


def _details(named: NamedEnv) -> dict[str, Any]:
    """Describe an environment in JSON values."""
    from agentsgym.cli.catalogue import config_rows  # noqa: PLC0415
    from agentsgym.envs.dataset_rows import class_path  # noqa: PLC0415
    from agentsgym.envs.datasets import naming  # noqa: PLC0415

    spec = named.env_class.spec
    games, game = spec.known_games(), named.env_config.get(spec.game_key)
    if game is not None and spec.has_only_listed_games and game not in games:
        raise UsageError(f"unknown variant {game!r} of {named.env_class.__name__}{naming.did_you_mean(game, games)}")
    facts = named.variant if game is None else games.get(game, {})
    # join the lines of each paragraph or item of the docstring, and drop its sections on arguments and errors
    docstring = inspect.getdoc(named.env_class) or ""
    sections = r"^(?:Args|Attributes|Raises|Returns|Example|Examples):$"
    prose = re.split(sections, docstring, maxsplit=1, flags=re.MULTILINE)[0]
    about = re.sub(r"(?<=\S)\n[ \t]*(?![-*>\s]|\d+\.)", " ", prose)
    known = named.env_class.task_fields
    rows = config_rows(named.env_class)
    for row in rows:
        row["default"] = named.env_config.get(row["key"], row["default"])
    return {
        "name": named.name,
        "env_class_path": class_path(named.env_class),
        "about": re.sub(r":\w+:`~?\.?([^`]*)`", r"\1", about).replace("``", "").strip(),
        "game": {key: fact for key, fact in facts.items() if key != "env_config"},
        "env_config": rows,
        "task_data": None if known is None else sorted(known),
    }
