"""The available environments: descriptions, numbers of players, and requirements."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentsgym.envs import PACKAGED
from agentsgym.envs.dataset_rows import registered_classes
from agentsgym.envs.datasets.naming import known_specs
from agentsgym.envs.spec import installed

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One environment, or one game of a group.

    Attributes:
        name: Name on the command line.
        min_players: Minimum number of players.
        max_players: Maximum number of players.
        status: ``"ok"``; ``"words"``: it runs with word lists; ``"gamemaster"``: it needs a language model;
            ``"broken"``: it does not run; ``"missing"``: its package is not installed.
        text: One-sentence description.
        offline: Whether it runs without any server.
        extra: Extra of this package that installs it; empty if none.
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
        """The number of players, or its range.

        >>> Entry(name="a").players, Entry(name="b", min_players=2, max_players=4).players
        ('1', '2-4')
        """
        fewest, most = self.min_players, self.max_players
        return str(fewest) if fewest == most else f"{fewest}-{most}"


def entries() -> list[Entry]:
    """Return every environment, then every game of the groups."""
    environments: list[Entry] = []
    all_games: list[Entry] = []
    for name, spec in known_specs().items():
        described = import_module(f"agentsgym.envs.{name}") if name in PACKAGED else registered_classes()[name]
        text, games = (inspect.getdoc(described) or "").partition("\n")[0], spec.known_games()
        if games:
            text = f"{text} {len(games)} games: agentsgym envs --text {name}:"
        most = max((facts.get("max_players", 1) for facts in games.values()), default=1)
        extra = spec.extra if spec.packages else ""
        own = "missing" if spec.missing_package() else "ok"
        environments.append(
            Entry(name=name, max_players=most, text=text, offline=spec.offline, extra=extra, status=own)
        )
        for game, facts in games.items():
            status = facts.get("status", "ok")
            plays = status in {"ok", "words"}
            all_games.append(
                Entry(
                    name=f"{name}:{game}",
                    min_players=facts.get("min_players", 1),
                    max_players=facts.get("max_players", 1),
                    text=facts.get("note", ""),
                    offline=spec.offline and plays,
                    is_game=True,
                    extra=extra,
                    status=own if plays and own != "ok" else status,
                )
            )
    others = [
        Entry(name=name, text=f"From the package {entry.dist.name if entry.dist else entry.value}.")
        for name, entry in installed().items()
    ]
    return [*environments, *others, *all_games]


def config_rows(env_class: type[MultistepEnv]) -> list[dict[str, Any]]:
    """Return every key of ``env_config`` with its default and valid values, the class's keys before the common ones."""
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
