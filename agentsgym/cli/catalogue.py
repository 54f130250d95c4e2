"""The environments that there are: what they are, how many play, and what they need."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from agentsgym.cli.naming import ENVIRONMENTS, GROUPS, GYMNASIUM_GAMES, TEXT_WORLD_KINDS, text_arena_games
from agentsgym.envs.dataset_rows import registered_classes

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv

#: The extra that a group needs, and the package by which one sees that it is there.
_EXTRAS = {
    "ALFWorld": ("alfworld", "alfworld"),
    "Gymnasium": ("gymnasium", "gymnasium"),
    "OpenEnv": ("openenv", "websockets"),
    "ScienceWorld": ("scienceworld", "scienceworld"),
    "TextArena": ("textarena", "textarena"),
    "TextWorld": ("textworld", "textworld"),
}
_NEEDS = {
    "ok": "",
    "words": "",
    "gamemaster": "a language model as its gamemaster",
    "broken": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One environment or game.

    Attributes:
        name: What other commands call it.
        min_players: The fewest players.
        max_players: The most.
        status: ``"ok"``; ``"words"``: it plays with word lists; ``"gamemaster"``: it needs a language model;
            ``"broken"``: it does not run; ``"missing"``: its package is not installed.
        text: What it is, a sentence.
        offline: Whether it plays without any server.
        extra: The extra of the package that it comes with; empty if none.
        is_game: Whether it is one game of a group.
    """

    name: str
    min_players: int = 1
    max_players: int = 1
    status: str = "ok"
    text: str = ""
    offline: bool = True
    extra: str = ""
    is_game: bool = False

    @property
    def players(self) -> str:
        """How many play.

        >>> Entry(name="a").players, Entry(name="b", min_players=2, max_players=4).players
        ('1', '2-4')
        """
        fewest, most = self.min_players, self.max_players
        return str(fewest) if fewest == most else f"{fewest}-{most}"

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def entries() -> list[Entry]:
    """Everything there is, groups before their games."""
    return [*_groups(), *_registered(), *_gymnasium(), *_text_world(), *_text_arena()]


def first_sentence(env_class: type[MultistepEnv]) -> str:
    """What a class says of itself in its first line."""
    return (inspect.getdoc(env_class) or "").partition("\n")[0]


def _groups() -> Iterator[Entry]:
    games = len(text_arena_games())
    for group in GROUPS:
        text = _docstring_of_file(group)
        most = 1
        if group == "TextArena":
            text, most = f"{text} {games} games: agentsgym envs --text TextArena:", 15
        yield Entry(name=group, max_players=most, text=text, offline=group != "OpenEnv", **_needs(group))


def _registered() -> Iterator[Entry]:
    for path, env_class in registered_classes().items():
        yield Entry(name=path, text=first_sentence(env_class))
    for entry in importlib.metadata.entry_points(group="agentsgym.envs"):
        yield Entry(name=entry.name, text=f"Of the package {entry.dist.name if entry.dist else entry.value}.")


def _gymnasium() -> Iterator[Entry]:
    for game in GYMNASIUM_GAMES:
        name = f"Gymnasium:{game}"
        yield Entry(name=name, text="Random and optimal play are known.", is_game=True, **_needs("Gymnasium"))


def _text_world() -> Iterator[Entry]:
    for kind in TEXT_WORLD_KINDS:
        yield Entry(name=f"TextWorld:{kind}", text="Made from a seed.", is_game=True, **_needs("TextWorld"))


def _text_arena() -> Iterator[Entry]:
    needs = _needs("TextArena")
    for game, known in text_arena_games().items():
        status = needs["status"] if known["status"] in ("ok", "words") and needs["status"] != "ok" else known["status"]
        yield Entry(
            name=f"TextArena:{game}",
            min_players=known["min_players"],
            max_players=known["max_players"],
            text=known["reason"] or _NEEDS[known["status"]],
            offline=known["status"] in ("ok", "words"),
            is_game=True,
            extra=needs["extra"],
            status=status,
        )


def _needs(group: str) -> dict[str, Any]:
    extra, package = _EXTRAS.get(group, ("", ""))
    return {"extra": extra, "status": "missing" if package and not importlib.util.find_spec(package) else "ok"}


def _docstring_of_file(group: str) -> str:
    """The first line of a group's ``__init__``, read without importing it."""
    source = ENVIRONMENTS / group / "__init__.py"
    return (ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def config_rows(env_class: type[MultistepEnv]) -> list[dict[str, Any]]:
    """Every key of ``env_config`` with its default and what is valid, a class's own before the common ones."""
    from agentsgym.envs.config import COMMON_FIELDS  # noqa: PLC0415

    defaults: Mapping[str, Any] = env_class.default_config
    return [
        {
            "key": key,
            "default": defaults.get(key, known.default),
            "valid": known.expected,
            "own": key not in COMMON_FIELDS,
        }
        for key, known in {**env_class.config_fields, **COMMON_FIELDS}.items()
    ]
