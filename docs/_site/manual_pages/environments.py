"""The pages of the environments, made from their classes and from the catalogue of ``agentsgym envs``."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agentsgym.cli.catalogue import Entry, config_rows, entries
from agentsgym.cli.naming import NamedEnv, find_env
from agentsgym.envs import PACKAGED
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.players import has_random_player, imitation_player, random_player, reference_player
from agentsgym.envs.TextArena.references import REFERENCES
from agentsgym.errors import AgentsGymError
from agentsgym.texts import shown
from manual_pages.links import ROOT
from manual_pages.texts import as_markdown, cell, code, meanings_of, page, prose_of, table

INDEX = "reference/environments.md"
_STATUSES = {
    "ok": "plays",
    "words": "plays, with word lists",
    "gamemaster": "needs a language model as its gamemaster",
    "broken": "does not run",
    "missing": "its package is not installed",
}


def environment_pages() -> dict[str, str]:
    """The list of all environments and a page for each group, by where they stand in the site."""
    games: dict[str, list[Entry]] = {group: [] for group in PACKAGED}
    groups: dict[str, Entry] = {}
    for entry in entries():
        group = entry.name.partition(":")[0]
        if entry.is_game:
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
        "Every environment of the package, as `agentsgym envs` lists them. This list and the pages that it leads to "
        "are made from the classes themselves. How to write your own is said in [Environments](../environments.md).",
        table(["name", "class", "what it is", "games"], rows),
        "```bash\nagentsgym envs                   # the same list, in the terminal\n"
        "agentsgym envs TwentyQuestions   # one of them, with its settings\n"
        "agentsgym play TwentyQuestions   # play it yourself\n```",
        "## Settings that all of them have",
        "Keys of `env_config`. A class may have another default for one of them; its own page says so. More in "
        "[Environments](../environments.md#env_config).",
        _settings(_common_rows(), meanings_of(MultistepEnv)),
    )


def _about(entry: Entry) -> str:
    """What a group is, without the command that lists its games."""
    return cell(re.sub(r" \d+ games: .*", "", entry.text))


def _class_of(group: str) -> type[MultistepEnv]:
    module, _, name = PACKAGED[group].rpartition(".")
    return getattr(importlib.import_module(module), name)


def _common_rows() -> list[dict[str, Any]]:
    return [row for row in config_rows(MultistepEnv) if not row["own"]]


def _settings(rows: list[dict[str, Any]], meanings: Mapping[str, str]) -> str:
    for row in rows:
        if row["key"] not in meanings:
            raise ValueError(f"no docstring says what env_config[{row['key']!r}] means: add it as `- ``key``: …`")
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
        f"Keys of `env_config`, beside [those that all environments have](../environments.md#{_ALL}).",
        _settings(own, meanings),
        "### Other defaults" if changed else "",
        _settings(changed, meanings),
        *_tools(named),
        "## Players",
        "\n".join(f"- {kind}: {player}" for kind, player in _players(named)),
        *_games(games),
    )


_ALL = "settings-that-all-of-them-have"


def _facts(entry: Entry, env_class: type[MultistepEnv]) -> Iterator[tuple[str, str]]:
    yield "class", f"[`{PACKAGED[entry.name]}`][{env_class.__module__}.{env_class.__qualname__}]"
    if entry.extra:
        yield "needs", f"`pip install 'agentsgym[{entry.extra}]'`"
    if entry.max_players > 1:
        yield "players", entry.players
    known = env_class.task_fields
    yield "keys of a task", "any" if known is None else ", ".join(f"`{key}`" for key in ("seed", *sorted(known)))
    if written := _written_about(env_class.__name__):
        yield "in the manual", written


def _written_about(name: str) -> str:
    """The link to the page that is written about a class, as docs/environments.md gives it."""
    text = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `{name}` \|.*(\[[^\]]+\]\()([^)]+\)) \|$", text, re.MULTILINE)
    return f"{row[1]}../../{row[2]}" if row else ""


def _commands(group: str, games: list[Entry]) -> str:
    playable = [game.name for game in games if game.offline]
    name = playable[0] if playable else group
    if group == "Tools":
        return ""  # it has no tools until it is given some
    return f"```bash\nagentsgym envs {group}\nagentsgym play {name}\nagentsgym eval {name} --agent random -n 20\n```"


def _tools(named: NamedEnv) -> Iterator[str]:
    try:
        schemas = named.build().tool_schemas
    except AgentsGymError:  # it has none until it is given some, or a game must be chosen, or a package is missing
        return
    functions = [schema["function"] for schema in schemas]
    if functions:
        yield "## Tools"
        yield table(
            ["tool", "what it does", "arguments"],
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
        yield "reference", "exact values and players of the games that are marked below"
    try:
        env = named.build()
    except AgentsGymError as error:
        yield "none", str(error)
        return
    makers: dict[str, Callable[[MultistepEnv], Any]] = {"reference": reference_player, "to imitate": imitation_player}
    is_own = has_random_player(named.env_class)
    yield "random", f"`{_path(random_player(env))}`{'' if is_own else ', which says what the prompts show'}"
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
    yield "## Games"
    yield "Names for the command line; what follows the colon is the game."
    yield table(
        ["name", "players", "status", "known", "remarks"],
        [[f"`{game.name}`", game.players, _STATUSES[game.status], _known(game), _remark(game)] for game in games],
    )


def _known(game: Entry) -> str:
    name = game.name.partition(":")[2].partition("-v")[0]
    has_values = game.name.startswith("Gymnasium:") or name in REFERENCES
    return "[random and optimal play](../../references.md)" if has_values else ""


def _remark(game: Entry) -> str:
    return "" if game.name.startswith("Gymnasium:") or game.text in _STATUSES.values() else game.text
