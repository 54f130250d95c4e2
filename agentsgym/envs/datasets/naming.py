"""Find the environment that a name on the command line or in a configuration file refers to."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agentsgym.envs import PACKAGED
from agentsgym.envs.dataset_rows import registered_classes
from agentsgym.envs.spec import EnvSpec, installed_entry_points
from agentsgym.envs.subclass import build
from agentsgym.errors import ConfigError
from agentsgym.interruptions import is_interruption
from agentsgym.removed import REMOVED
from agentsgym.texts import sentence_of, shown

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedEnv:
    """The environment and settings that a name refers to.

    Attributes:
        name: The name as typed.
        env_class: The class.
        env_config: The configuration from the name and the options.
        dataset_options: The dataset options from the name.
        variant: The facts about the variant, if they fix settings.
    """

    name: str
    env_class: type[MultistepEnv]
    env_config: dict[str, Any] = field(default_factory=dict[str, Any])
    dataset_options: dict[str, Any] = field(default_factory=dict[str, Any])
    variant: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def settings(self, kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the given settings of a kind (``env_config``, ``dataset`` or ``evaluation``) with the fixed ones.

        Raises:
            ConfigError: The variant fixes a setting at another value.
        """
        fixed: Mapping[str, Any] = self.variant.get(kind, {})
        for key, value in given.items():
            if key in fixed and value != fixed[key]:  # NaN differs from itself
                raise ConfigError(f"{self.name} fixes {key} at {shown(fixed[key])}, got {shown(value)}: leave it out")
        return {**given, **fixed}

    def build(self, tokenizer: Any = None) -> MultistepEnv:
        """Build the environment.

        Raises:
            ConfigError: The configuration is invalid.
            MissingDependencyError: The environment needs a package that is not installed.
        """
        return build(self.env_class, tokenizer, self.env_config)


def find_env(name: str, env_config: dict[str, Any] | None = None) -> NamedEnv:
    """Find the environment and settings that a name refers to.

    Args:
        name: The name of a packaged environment or of an entry point, a class's dotted path, or
            ``path/to/file.py:Class`` (the class is optional if the file has one environment). A colon and a game may
            follow if the class's :class:`~agentsgym.envs.spec.EnvSpec` has a key for it.
        env_config: Keys of ``env_config`` from other options.

    Raises:
        ConfigError: There is no such environment; the message suggests similar names.
    """
    given = env_config or {}
    if Path(name).suffix in {".yaml", ".yml"}:
        raise ConfigError(f"{name} is a configuration: run it with agentsgym train {name}, or name its class")
    if ".py:" in name or name.endswith(".py"):
        file, colon, rest = name.partition(".py:")
        path, (class_name, _, game) = f"{file}.py" if colon else name, rest.partition(":")
        env_class = _class_of_file(Path(path), class_name)
    else:
        path, _, game = name.partition(":")
        env_class = _find_class(PACKAGED.get(path, path), name)
    spec = env_class.spec
    if not game:
        return NamedEnv(name=name, env_class=env_class, env_config=given)
    if spec.dataset_key:
        options = {spec.dataset_key: game.split(",")}
        return NamedEnv(name=name, env_class=env_class, env_config=given, dataset_options=options)
    if not (key := spec.game_key):
        return _fixed_variant(NamedEnv(name=name, env_class=env_class, env_config=given), path, game)
    if given.get(key, game) != game:
        raise ConfigError(
            f"the variant is set twice: to {shown(game)} in {shown(name)}, and to {given[key]!r} in {key}"
        )
    return NamedEnv(name=name, env_class=env_class, env_config={**given, key: game})


def _fixed_variant(named: NamedEnv, path: str, game: str) -> NamedEnv:
    """Return the environment with the settings that a variant fixes."""
    games = named.env_class.spec.known_games()
    if game not in games:
        known = f"it has {', '.join(games)}" if games else "use it without a colon"
        raise ConfigError(f"{shown(path)} has no variant {shown(game)}: {known}")
    fixed = replace(named, variant=games[game], dataset_options=games[game].get("dataset", {}))
    return replace(fixed, env_config=fixed.settings("env_config", named.env_config))


def name_of_env(class_path: str | None, env_config: Mapping[str, Any]) -> str | None:
    """Return an environment's name, with its game, as :func:`find_env` accepts it; for a user-defined one, its class.

    >>> name_of_env("my_games.chess.Chess", {})
    'Chess'
    """
    if class_path is None:
        return None
    named = {path: name for name, path in PACKAGED.items()}
    name = named.get(class_path) or class_path.replace(":", ".").rpartition(".")[2] or class_path
    spec = known_specs().get(name if class_path in named else class_path, EnvSpec())
    game = env_config.get(spec.game_key)
    games: Mapping[str, Mapping[str, Any]] = {} if spec.game_key or spec.dataset_key else spec.known_games()
    for variant, facts in games.items():
        fixed: Mapping[str, Any] = facts.get("env_config", {})
        if fixed and all(env_config.get(key) == value for key, value in fixed.items()):
            game = variant
    return f"{name}:{game}" if game and isinstance(game, str) else name


@functools.cache
def packaged_specs() -> Mapping[str, EnvSpec]:
    """The spec of each packaged environment, by name, without importing the environments."""
    return {name: importlib.import_module(f"agentsgym.envs.{name}").SPEC for name in PACKAGED}


def known_specs() -> dict[str, EnvSpec]:
    """Return the specs of the packaged environments and of the registered classes by name, without importing any."""
    return {**packaged_specs(), **{path: env_class.spec for path, env_class in registered_classes().items()}}


def known_names() -> list[str]:
    """Return all names of environments and games; omits games of entry points, since listing them imports code."""
    specs = known_specs()
    games = [f"{name}:{game}" for name, spec in specs.items() for game in spec.known_games()]
    return [*specs, *games, *installed_entry_points()]


def completions(incomplete: str) -> list[str]:
    """Return names for shell completion; games are included only after their environment has been typed."""
    names = known_names()
    name, colon, _ = incomplete.partition(":")
    if colon and name in installed_entry_points():
        from agentsgym.envs.datasets.environments import find  # noqa: PLC0415

        with contextlib.suppress(Exception):  # third-party code; shell completion cannot show errors
            names += [f"{name}:{game}" for game in find(name).spec.known_games()]
    return [one for one in names if one.startswith(incomplete) and (":" not in one or ":" in incomplete)] or [
        one for one in names if one.startswith(incomplete)
    ]


def nearest(word: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return known names that a misspelled word may stand for, the likeliest first, ignoring case and environment."""
    names = list(dict.fromkeys(known))
    low = word.lower()
    lowered: dict[str, str] = {name.lower(): name for name in names}
    parts = {name.lower().partition(":")[2] or name.lower(): name for name in names}
    found = [lowered[one] for one in difflib.get_close_matches(low, lowered, n=most, cutoff=0.6)]
    found += [parts[one] for one in difflib.get_close_matches(low, parts, n=most, cutoff=0.7)]
    first = [lowered[low]] if low in lowered else []
    return list(dict.fromkeys([*first, *found]))[:most]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name, which suggests similar names."""
    if (name := word.partition(":")[0]) in REMOVED:
        return f": {REMOVED[name]}"
    near = nearest(word, known)
    return f"; did you mean {' or '.join(near)}?" if near else "; `agentsgym envs` lists the environments"


def _find_class(path: str, name: str) -> type[MultistepEnv]:
    from agentsgym.envs.datasets.environments import find  # noqa: PLC0415

    try:
        return find(path)
    except ConfigError as error:
        unknown = error
    if "." in path:
        try:
            return find(path, allow_import=True)  # a path from the user may be imported; one from dataset rows may not
        except ConfigError as error:
            unknown = error
    reason = f" ({sentence_of(unknown.__cause__ or unknown, 200)})" if "." in path else ""
    if f"{path}.py" in {one.name for one in Path().glob("*.py")}:
        meant = f"; did you mean {path}.py{name.removeprefix(path)}?"
    else:
        meant = did_you_mean(name, [*known_names(), *PACKAGED.values()])
    raise ConfigError(f"there is no environment {shown(name)}{reason}{meant}") from unknown


def _class_of_file(path: Path, class_name: str) -> type[MultistepEnv]:
    from agentsgym.envs.base import MultistepEnv  # noqa: PLC0415

    module = module_of_file(path)
    found: dict[str, type[MultistepEnv]] = {
        name: value
        for name, value in cast("dict[str, object]", vars(module)).items()
        if isinstance(value, type) and issubclass(value, MultistepEnv) and value.__module__ == module.__name__
    }
    if class_name in found:
        return found[class_name]
    if not class_name and len(found) == 1:
        return next(iter(found.values()))
    if class_name:
        raise ConfigError(f"{path} has no environment {shown(class_name)}; it has {', '.join(found) or 'none'}")
    among = f" with one of {', '.join(found)}" if found else ""
    raise ConfigError(f"{path} must contain exactly one environment, got {len(found)}: name one as {path}:CLASS{among}")


def module_of_file(path: Path) -> Any:
    """Import a file as Python runs a script: it can import the other modules in its folder."""
    if not path.is_file():
        near = nearest(path.name, [one.name for one in path.parent.glob("*.py")]) if path.parent.is_dir() else []
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"there is no file {shown(str(path))}{hint}")
    name = path.stem
    known = sys.modules.get(name)
    if known is not None:
        origin = getattr(known, "__file__", None)
        if origin is not None and Path(origin).resolve() == path.resolve():
            return known
        raise ConfigError(f"{path} has the same name as the loaded module {name!r}: rename the file")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be imported as a Python module")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module  # unpickling an environment looks up its class under this name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if is_interruption(error):
            raise
        lines = [
            line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == str(path)
        ]
        line = error.lineno if isinstance(error, SyntaxError) else next(reversed(lines), None)
        place = "" if line is None else f", line {line}"
        raise ConfigError(f"{path}{place} raised {type(error).__name__}: {sentence_of(error)}") from error
    return module
