"""``agentsgym envs``: the catalogue, and one environment in detail."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentsgym.cli import options
from agentsgym.cli.console import UsageError, cell, out, print_json, reported, say

if TYPE_CHECKING:
    from agentsgym.cli.catalogue import Entry
    from agentsgym.cli.naming import NamedEnv

_STATUSES = ("ok", "words", "gamemaster", "broken", "missing")
_COLORS = {"ok": "green", "words": "green", "gamemaster": "yellow", "missing": "yellow", "broken": "red"}


@reported
def envs(  # noqa: PLR0913, PLR0917  # options of a command
    environment: Annotated[
        str | None,
        typer.Argument(metavar="ENV", help="Environment to show in detail.", show_default=False),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            "--text", metavar="WORD", help="Show only environments whose name or description contains this word."
        ),
    ] = None,
    players: Annotated[
        int | None,
        typer.Option("--players", metavar="N", min=1, help="Show only environments for this number of players."),
    ] = None,
    status: Annotated[
        str | None,
        typer.Option(
            "--status",
            metavar="STATUS",
            help=f"Show only environments with this status: {', '.join(_STATUSES)}.",
            autocompletion=options.one_of(*_STATUSES),
        ),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Show only environments that are installed and need no server.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="Also show every game of each group, unfiltered.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """List the environments, or show one with its settings and tasks.

    Without a filter, only the groups are listed, not their games.
    """
    from agentsgym.cli.catalogue import entries  # noqa: PLC0415
    from agentsgym.cli.naming import find_env, nearest  # noqa: PLC0415

    if environment is not None:
        _show_one(find_env(environment), as_json=as_json)
        return
    if status is not None and status not in _STATUSES:
        near = nearest(status, _STATUSES, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"--status must be one of {', '.join(_STATUSES)}, got {status!r}{hint}")
    is_filtered = every or offline or (text, players, status) != (None, None, None)
    chosen = [one for one in entries() if _is_chosen(one, text, players, status) and (is_filtered or not one.is_game)]
    if offline:
        chosen = [one for one in chosen if one.offline and one.status in ("ok", "words")]
    if as_json:
        print_json([asdict(one) for one in chosen])
    else:
        _show_list(chosen)


def _is_chosen(entry: Entry, text: str | None, players: int | None, status: str | None) -> bool:
    return (
        (text is None or text.lower() in f"{entry.name} {entry.text}".lower())
        and (players is None or entry.min_players <= players <= entry.max_players)
        and (status is None or entry.status == status)
    )


def _show_list(chosen: Sequence[Entry]) -> None:
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("environment", overflow="fold", ratio=3)
    table.add_column("players", justify="right")
    table.add_column("status")
    table.add_column("", ratio=4)
    for one in chosen:
        extra = f" pip install 'agentsgym[{one.extra}]'" if one.status == "missing" else ""
        status = cell(one.status, _COLORS.get(one.status, ""))
        table.add_row(cell(one.name, "bold"), one.players, status, cell(one.text + extra))
    if chosen:
        out().print(table)
    out().print(f"{len(chosen)} environment{'' if len(chosen) == 1 else 's'}", style="dim")


def _show_one(named: NamedEnv, *, as_json: bool) -> None:
    detail = _detail(named)
    if as_json:
        print_json(detail)
        return
    out().print(cell(detail["name"], "bold"))
    say(detail["about"])
    out().print(cell(f"class: {detail['env_class_path']}", "dim"))
    for name, value in detail["game"].items():
        if value not in ("", None):
            out().print(cell(f"{name.replace('_', ' ')}: {_words(value)}"))
    _show_table("env_config", ("key", "default", "must be"), [
        (row["key"], _short(row["default"]), row["valid"]) for row in detail["env_config"]
    ])  # fmt: skip
    known = detail["task_data"]
    say("task_data: any keys" if known is None else f"task_data: {', '.join(['seed', *known])}")


def _detail(named: NamedEnv) -> dict[str, Any]:
    import inspect  # noqa: PLC0415

    from agentsgym.cli.catalogue import config_rows  # noqa: PLC0415
    from agentsgym.cli.naming import did_you_mean  # noqa: PLC0415
    from agentsgym.envs.dataset_rows import class_path  # noqa: PLC0415

    spec = named.env_class.spec
    games, game = spec.known_games(), named.env_config.get(spec.game_key)
    if game is not None and spec.has_only_listed_games and game not in games:
        raise UsageError(f"unknown game {game!r}{did_you_mean(game, games)}")
    known = named.env_class.task_fields
    rows = config_rows(named.env_class)
    for row in rows:
        row["default"] = named.env_config.get(row["key"], row["default"])
    return {
        "name": named.name,
        "env_class_path": class_path(named.env_class),
        "about": _about(inspect.getdoc(named.env_class) or ""),
        "game": {} if game is None else games.get(game, {}),
        "env_config": rows,
        "task_data": None if known is None else sorted(known),
    }


def _about(docstring: str) -> str:
    """Return a docstring's prose with one line per paragraph or item, without arguments and errors."""
    prose = re.split(
        r"^(?:Args|Attributes|Raises|Returns|Example|Examples):$", docstring, maxsplit=1, flags=re.MULTILINE
    )[0]
    lines = re.sub(r"(?<=\S)\n[ \t]*(?![-*>\s]|\d+\.)", " ", prose)
    return re.sub(r":\w+:`~?\.?([^`]*)`", r"\1", lines).replace("``", "").strip()


def _words(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _short(value: Any) -> str:
    from agentsgym.texts import shown  # noqa: PLC0415

    return shown(value, 60)


def _show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*map(cell, row))
    out().print(table)
