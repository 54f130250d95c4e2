"""How an environment plugs in: the names of its pip extra, games and players, which are imported only when used."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from agentsgym.errors import ConfigError, MissingDependencyError, import_extra
from agentsgym.fields import is_number
from agentsgym.texts import shown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """A description of an environment, available without importing it; inherited by subclasses as ``spec``.

    Dotted names have the form ``"package.module:attribute"`` and are imported when they are first used.

    Attributes:
        packages: Top-level modules that the environment requires.
        extra: The pip extra of agentsgym that installs the environment's requirements.
        offline: Whether the environment can be played without a server.
        game_key: The key of ``env_config`` whose value follows the colon in ``NAME:VARIANT``.
        dataset_key: The dataset option whose values, separated by commas, follow the colon instead.
        games: Dotted name of the known variants: names, a mapping from names to facts, or a function that returns
            either. ``agentsgym envs`` lists the facts ``note``, ``min_players``, ``max_players`` and ``status``.
            Without either key, a variant is named by its facts ``env_config``, ``dataset`` (options of the dataset) and
            ``evaluation`` (options of ``agentsgym eval``), which it fixes: other values for them are refused.
        has_only_listed_games: Whether ``games`` is complete.
        random: Dotted name of the random player, called as ``player(env, seed=seed)``.
        reference: Dotted name of the best player, called in the same way.
        imitation: Dotted name of the demonstrator for a warm start, called in the same way.
        anchors: Dotted name of a function that takes the environment, and returns a function from a task to the
            mean rewards of random and optimal play, or None if they are unknown.
        fingerprint: Dotted name of a function that returns a digest of all that scores depend on beside the settings,
            which results of ``agentsgym eval`` contain.
    """

    packages: tuple[str, ...] = ()
    extra: str = ""
    offline: bool = True
    game_key: str = ""
    dataset_key: str = ""
    games: str = ""
    has_only_listed_games: bool = False
    random: str = ""
    reference: str = ""
    imitation: str = ""
    anchors: str = ""
    fingerprint: str = ""

    def __post_init__(self) -> None:
        for field in ("games", "random", "reference", "imitation", "anchors", "fingerprint"):
            name = getattr(self, field)
            if name and not all(name.partition(":")):
                raise ConfigError(f"EnvSpec.{field} must be written 'package.module:attribute', got {shown(name)}")
        if self.game_key and self.dataset_key:
            raise ConfigError(
                "EnvSpec accepts either game_key or dataset_key, not both, since only one value follows the colon"
            )

    def known_games(self) -> Mapping[str, Mapping[str, Any]]:
        """The facts about each known variant; empty if none are listed."""
        found: Any = imported(self.games) if self.games else ()
        listed: Any = found() if callable(found) else found
        return cast("Any", listed) if isinstance(listed, Mapping) else {game: {} for game in listed}

    def missing_package(self) -> str | None:
        """The first of ``packages`` that is not installed (none is imported); None if all are installed."""
        for package in self.packages:
            try:
                found = importlib.util.find_spec(package)
            except ValueError:  # sys.modules has None for it
                found = None
            if found is None:
                return package
        return None

    def check_installed(self) -> None:
        """Raise :class:`MissingDependencyError`, with the extra's name, if one of ``packages`` is not installed."""
        package = self.missing_package()
        if package is not None:
            raise MissingDependencyError(package, self.extra)

    def load(self, module: str) -> Any:
        """Import a module that the extra installs.

        Raises:
            MissingDependencyError: The module is not installed.
        """
        return import_extra(module, self.extra)


def imported(name: str) -> Any:
    """Import the attribute that a dotted name refers to.

    >>> imported("math:sqrt")(4.0)
    2.0
    """
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def installed_entry_points() -> dict[str, EntryPoint]:
    """The environments that other packages provide as entry points, by name, without loading them."""
    import importlib.metadata  # noqa: PLC0415  # slow, and not needed in an engine's process

    return {entry.name: entry for entry in importlib.metadata.entry_points(group="agentsgym.envs")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """The mean final rewards of two players under the same rules and limits.

    Attributes:
        random: Mean reward of a player that chooses each legal action with equal probability.
        optimal: Mean reward of the best possible player; not below ``random``.
        exact: Whether these are the exact means; False for estimates, such as the mean reward of a strong player.

    >>> Anchors(random=0.25, optimal=1.0)
    Anchors(random=0.25, optimal=1.0, exact=True)
    """

    random: float
    optimal: float
    exact: bool = True

    def __post_init__(self) -> None:
        if not (is_number()(self.random) and is_number()(self.optimal)):
            raise ConfigError(f"anchors must be finite numbers, got {shown(self.random)} and {shown(self.optimal)}")
        if self.optimal < self.random and not math.isclose(self.optimal, self.random, abs_tol=1e-9):
            raise ConfigError(f"optimal must be at least random, got {self.optimal!r} and {self.random!r}")
