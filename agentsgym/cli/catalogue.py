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
from agentsgym.envs.spec import installed_entry_points

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An environment, or a variant of an environment that is a collection.

    Attributes:
        name: Name on the command line.
        min_players: Minimum number of players.
        max_players: Maximum number of players.
        status: ``"ok"``; ``"words"`` if it needs word lists; ``"gamemaster"`` if it needs a language model as
            gamemaster; ``"broken"`` if it does not run; ``"missing"`` if its package is not installed.
        text: One-sentence description.
        offline: Whether it runs without any server.
        extra: The extra of this package that installs it; empty if none.
        is_variant: Whether it is a variant of a collection.
    """

    name: str
    min_players: int = 1
    max_players: int = 1
    status: str = "ok"
    text: str = ""
    offline: bool = True
    extra: str = ""
    is_variant: bool = False

    @property
    def players(self) -> str:
        """The number of players, or its range.

        >>> Entry(name="a").players, Entry(name="b", min_players=2, max_players=4).players
        ('1', '2-4')
        """
        fewest, most = self.min_players, self.max_players
        return str(fewest) if fewest == most else f"{fewest}-{most}"


def entries() -> list[Entry]:
    """Return every environment, then every variant of the collections."""
    environments: list[Entry] = []
    all_variants: list[Entry] = []
    for name, spec in known_specs().items():
        described = import_module(f"agentsgym.envs.{name}") if name in PACKAGED else registered_classes()[name]
        text, variants = (inspect.getdoc(described) or "").partition("\n")[0], spec.known_games()
        if variants:
            text = f"{text} List its {len(variants)} variants: agentsgym envs --text {name}:"
        most = max((facts.get("max_players", 1) for facts in variants.values()), default=1)
        extra = spec.extra if spec.packages else ""
        installed_status = "missing" if spec.missing_package() else "ok"
        environments.append(
            Entry(name=name, max_players=most, text=text, offline=spec.offline, extra=extra, status=installed_status)
        )
        for variant, facts in variants.items():
            status = facts.get("status", "ok")
            runs = status in {"ok", "words"}
            all_variants.append(
                Entry(
                    name=f"{name}:{variant}",
                    min_players=facts.get("min_players", 1),
                    max_players=facts.get("max_players", 1),
                    text=facts.get("note", ""),
                    offline=spec.offline and runs,
                    is_variant=True,
                    extra=extra,
                    status=installed_status if runs and installed_status != "ok" else status,
                )
            )
    others = [
        Entry(name=name, text=f"From the package {entry.dist.name if entry.dist else entry.value}.")
        for name, entry in installed_entry_points().items()
    ]
    return [*environments, *others, *all_variants]


def config_rows(env_class: type[MultistepEnv]) -> list[dict[str, Any]]:
    """Return each key of ``env_config``, its default and its valid values; the class's keys precede the common ones."""
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
