"""Generation of the environments' pages from their classes and the catalog of ``agentsgym envs``."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agentsgym.cli.catalogue import Entry, config_rows, entries
from agentsgym.cli.options import find_env
from agentsgym.envs import PACKAGED
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.datasets.naming import NamedEnv
from agentsgym.envs.players import has_random_player, imitation_player, random_player, reference_player
from agentsgym.envs.TextArena.references import REFERENCES
from agentsgym.errors import AgentsGymError
from agentsgym.texts import shown
from manual_pages.links import ROOT
from manual_pages.texts import as_markdown, cell, code, meanings_of, page, prose_of, table

INDEX = "reference/environments.md"
_STATUSES = {
    "ok": "works",
    "words": "works, uses word lists",
    "gamemaster": "needs a language model as gamemaster",
    "broken": "does not work",
    "missing": "its package is not installed",
}


def environment_pages() -> dict[str, str]:
    """Return the page that lists all environments, and a page for each group, by their paths in the site."""
    games: dict[str, list[Entry]] = {group: [] for group in PACKAGED}
    groups: dict[str, Entry] = {}
    for entry in entries():
        group = entry.name.partition(":")[0]
        if entry.is_variant:
            games[group].append(entry)
        elif group in PACKAGED:
            groups[group] = entry
    pages = {_where(group): _group_page(entry, games[group]) for group, entry in groups.items()}
    return {INDEX: _index(groups, games), **pages}


def _where(group: str) -> str:
    return f"reference/environments/{group}.md"


def _index(groups: Mapping[str, Entry], games: Mapping[str, list[Entry]]) -> str:
    rows = [
        [
            f"[{group}](environments/{group}.md)",
            f"`{_class_of(group).__name__}`",
            _about(entry),
            str(len(games[group]) or 1),
        ]
        for group, entry in groups.items()
    ]
    return page(
        "# All environments",
        "All built-in environments, as listed by `agentsgym envs`. This list and the pages to which it links are "
        "generated from the classes. [Environments](../environments.md) explains how to write your own.",
        table(["name", "class", "description", "variants"], rows),
        "```bash\nagentsgym envs                   # the same list, in the terminal\n"
        "agentsgym envs TwentyQuestions   # one environment with its settings\n"
        "agentsgym play TwentyQuestions   # play it yourself\n```",
        "## Settings of all environments",
        "Keys of `env_config`. If a class has a different default, its page says so. See also "
        "[Environments](../environments.md#env_config).",
        _settings(_common_rows(), meanings_of(MultistepEnv)),
    )


def _about(entry: Entry) -> str:
    """Return the description of a group, without the command that lists its games."""
    return cell(re.sub(r" \d+ games: .*", "", entry.text))


def _class_of(group: str) -> type[MultistepEnv]:
    module, _, name = PACKAGED[group].rpartition(".")
    return getattr(importlib.import_module(module), name)


def _common_rows() -> list[dict[str, Any]]:
    return [row for row in config_rows(MultistepEnv) if not row["own"]]


def _settings(rows: list[dict[str, Any]], meanings: Mapping[str, str]) -> str:
    for row in rows:
        if row["key"] not in meanings:
            raise ValueError(
                f"env_config[{row['key']!r}] is not documented: add `- ``KEY``: …` to the class's docstring"
            )
    return table(
        ["key", "default", "must be", "meaning"],
        [[f"`{row['key']}`", _default(row["default"]), row["valid"], meanings[row["key"]]] for row in rows],
    )


def _default(value: Any) -> str:
    return code(value) if len(repr(value)) <= 80 else f"`{shown(value, 80)}`"


def _group_page(entry: Entry, games: list[Entry]) -> str:
    env_class = _class_of(entry.name)
    named = find_env(entry.name)
    rows = config_rows(env_class)
    meanings = meanings_of(env_class)
    common = {row["key"]: row["default"] for row in _common_rows()}
    own = [row for row in rows if row["own"]]
    changed = [row for row in rows if not row["own"] and row["default"] != common[row["key"]]]
    return page(
        f"# {entry.name}",
        prose_of(env_class),
        "\n".join(f"- {what}: {says}" for what, says in _facts(entry, env_class)),
        _commands(entry.name, games),
        "## Settings",
        f"Keys of `env_config`, in addition to [those of all environments](../environments.md#{_ALL}).",
        _settings(own, meanings),
        "### Different defaults" if changed else "",
        _settings(changed, meanings),
        *_tools(named),
        "## Players",
        "\n".join(f"- {kind}: {player}" for kind, player in _players(named)),
        *_games(games),
    )


_ALL = "settings-of-all-environments"


def _facts(entry: Entry, env_class: type[MultistepEnv]) -> Iterator[tuple[str, str]]:
    yield "class", f"[`{PACKAGED[entry.name]}`][{env_class.__module__}.{env_class.__qualname__}]"
    if entry.extra:
        yield "requires", f"`pip install 'agentsgym[{entry.extra}]'`"
    if entry.max_players > 1:
        yield "players", entry.players
    fields = env_class.task_fields
    yield "task_data keys", "any" if fields is None else ", ".join(f"`{key}`" for key in ("seed", *sorted(fields)))
    if written := _written_about(env_class.__name__):
        yield "in the manual", written


def _written_about(name: str) -> str:
    """Return the link to the manual's page about a class, as in docs/environments.md; empty if there is none."""
    text = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `{name}` \|.*(\[[^\]]+\]\()([^)]+\)) \|$", text, re.MULTILINE)
    return f"{row[1]}../../{row[2]}" if row else ""


def _commands(group: str, games: list[Entry]) -> str:
    playable = [game.name for game in games if game.offline]
    name = playable[0] if playable else group
    if group == "Tools":
        return ""  # it has no tools until the user passes some
    return f"```bash\nagentsgym envs {group}\nagentsgym play {name}\nagentsgym eval {name} --agent random -n 20\n```"


def _tools(named: NamedEnv) -> Iterator[str]:
    try:
        schemas = named.build().tool_schemas
    except AgentsGymError:  # tools must be passed, a variant must be chosen, or a package is missing
        return
    functions = [schema["function"] for schema in schemas]
    if functions:
        yield "## Tools"
        yield table(
            ["tool", "description", "arguments"],
            [[f"`{one['name']}`", as_markdown(one["description"]), _arguments(one["parameters"])] for one in functions],
        )


def _arguments(parameters: Mapping[str, Any]) -> str:
    return "<br>".join(
        f"`{name}` ({known.get('type', 'any')}): {known.get('description', '')}"
        for name, known in parameters.get("properties", {}).items()
    )


def _players(named: NamedEnv) -> Iterator[tuple[str, str]]:
    if named.name == "TextArena":
        named = find_env("TextArena:TicTacToe-v0")
        yield "reference", "exact values and reference players for the games marked below"
    try:
        env = named.build()
    except AgentsGymError as error:
        yield "unavailable", str(error)
        return
    makers: dict[str, Callable[[MultistepEnv], Any]] = {"reference": reference_player, "imitation": imitation_player}
    is_own = has_random_player(named.env_class)
    yield "random", f"`{_path(random_player(env))}`{'' if is_own else ', which answers with words from the prompts'}"
    for kind, make in makers.items():
        if kind == "reference" and named.name.startswith("TextArena:"):
            continue
        try:
            yield kind, f"`{_path(make(env))}`"
        except AgentsGymError:
            yield kind, "none"


def _path(player: Any) -> str:
    return f"{type(player).__module__}.{type(player).__qualname__}"


def _games(games: list[Entry]) -> Iterator[str]:
    if not games:
        return
    yield "## Variants"
    yield "The names are those for the command line."
    yield table(
        ["name", "players", "status", "exact values", "remarks"],
        [[f"`{game.name}`", game.players, _STATUSES[game.status], _known(game), _remark(game)] for game in games],
    )


def _known(game: Entry) -> str:
    name = game.name.partition(":")[2].partition("-v")[0]
    has_values = game.name.startswith("Gymnasium:") or name in REFERENCES
    return "[random and optimal play](../../references.md)" if has_values else ""


def _remark(game: Entry) -> str:
    return "" if game.name.startswith("Gymnasium:") or game.text in _STATUSES.values() else game.text
