"""The configuration of a training run, read from a YAML file or from plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from agentsgym.errors import ConfigError
from agentsgym.fields import (
    has_str_keys,
    is_bool,
    is_fraction,
    is_int,
    is_number,
    is_positive_number,
    is_str,
    is_text,
    or_none,
    require,
)
from agentsgym.recipes.sections import (
    Keys,
    PlacedError,
    as_mapping,
    check_section,
    mapping_of,
    must_be,
    read_section,
    values_of_yaml,
)
from agentsgym.texts import sentence_of

_WHOLE = "a positive int"


@dataclass(frozen=True, kw_only=True)
class EnvironmentPart:
    """An environment to train on.

    Attributes:
        class_: Environment as on the command line: ``NAME``, ``NAME:VARIANT``, ``file.py:Class`` (relative to the
            configuration) or the dotted path of a class; in Python also the class itself.
        env_config: Configuration of the environment.
        dataset: Options for the environment's dataset.
        weight: Share of the tasks, relative to the other weights.
        label: Name in metrics; None to derive it from ``class``.
    """

    class_: Any = field(
        metadata=must_be("the name of an environment", lambda one: is_text(one) or isinstance(one, type))
    )
    env_config: dict[str, Any] = field(default_factory=dict[str, Any], metadata=must_be("a mapping", has_str_keys))
    dataset: dict[str, Any] = field(default_factory=dict[str, Any], metadata=must_be("a mapping", has_str_keys))
    weight: float = field(default=1.0, metadata=must_be("a number above 0", is_positive_number))
    label: str | None = field(
        default=None,
        metadata=must_be("a string without '/', or null", or_none(lambda one: is_text(one) and "/" not in one)),
    )

    def __post_init__(self) -> None:
        check_section(self)


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """The demonstrations that the policy imitates before training.

    Attributes:
        player: Source of the demonstrations: one of the environment's players, ``"random"``, ``"reference"`` or
            ``"imitation"``, or the folder of a rollout store.
        noise: Fraction of the episodes that the random player plays instead.
        num_episodes: Number of episodes to play, or maximum number to read from the store.
        filters: Conditions on the store's rollouts: a value per column, or ``{min: …, max: …}``.
        max_steps: Number of optimizer steps.
        observation_loss: Whether the policy also learns to predict observations.
        weight: Weight of the loss on the same demonstrations during the training that follows; 0 for none.
        settings: Further fields of TRL's ``SFTConfig``.
    """

    player: str = field(metadata=must_be("random, reference, imitation, or the folder of a rollout store", is_text))
    noise: float = field(default=0.0, metadata=must_be("a number in [0, 1]", is_fraction))
    num_episodes: int = field(default=2000, metadata=must_be(_WHOLE, is_int(1)))
    filters: dict[str, Any] = field(default_factory=dict[str, Any], metadata=mapping_of("columns to values"))
    max_steps: int = field(default=300, metadata=must_be(_WHOLE, is_int(1)))
    observation_loss: bool = field(default=False, metadata=must_be("true or false", is_bool))
    weight: float = field(default=0.0, metadata=must_be("a number >= 0", is_number(0)))
    settings: dict[str, Any] = field(default_factory=dict[str, Any], metadata=mapping_of("fields of SFTConfig"))

    def __post_init__(self) -> None:
        check_section(self)
        if self.noise and (self.from_store or self.player == "random"):
            source = "a rollout store" if self.from_store else "the random player alone"
            raise PlacedError(("noise",), f"cannot be set if the demonstrations come from {source}")
        if self.filters and not self.from_store:
            raise PlacedError(
                ("filters",), f"are only valid with the folder of a rollout store, but the player is {self.player!r}"
            )

    @property
    def from_store(self) -> bool:
        """Whether stored rollouts are imitated."""
        return self.player not in PLAYERS


PLAYERS = ("random", "reference", "imitation")


@dataclass(frozen=True, kw_only=True)
class EvaluationPart:
    """Settings for evaluating the policy before and after training.

    Attributes:
        num_tasks: Maximum number of tasks per environment.
        num_rollouts: Episodes per task for the policy; the random and reference players play each task once.
        store: Whether to store these episodes in the run's rollout store; None to do so if training stores its own.
        env_config: Keys that replace those of every environment during evaluation, such as ``{"opponent": "random"}``
            for an environment that is trained in self-play.
    """

    num_tasks: int = field(default=200, metadata=must_be(_WHOLE, is_int(1)))
    num_rollouts: int = field(default=1, metadata=must_be(_WHOLE, is_int(1)))
    store: bool | None = field(default=None, metadata=must_be("true, false, or null", or_none(is_bool)))
    env_config: dict[str, Any] = field(default_factory=dict[str, Any], metadata=must_be("a mapping", has_str_keys))

    def __post_init__(self) -> None:
        check_section(self)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Configuration of a training run for :func:`agentsgym.train`, for configurations built in Python.

    Attributes:
        environments: One or more environments to train on.
        model: ``"tiny"`` for the built-in tiny policy, ``"smollm2"``, a folder, a GGUF file, or a name on the Hub.
        tiny: Sizes of the tiny policy: arguments of :func:`agentsgym.tiny_policy`.
        model_settings: Fields of TRL's ``ModelConfig``: adapters, dtype and attention.
        warm_start: Demonstrations to imitate first; None for no warm start.
        training: Fields of :class:`agentsgym.GRPOEnvConfig`.
        num_train_tasks: Maximum number of distinct training tasks per environment.
        evaluation: Evaluation before and after training.
        folder: Folder that relative paths in ``class`` and ``player`` start from.
        name: Name of the run, used for ``output_dir`` if ``training`` does not set it.
    """

    environments: tuple[EnvironmentPart, ...]
    model: str = field(
        default="tiny", metadata=must_be("tiny, smollm2, a folder, a GGUF file, or a name on the Hub", is_text)
    )
    tiny: dict[str, Any] = field(default_factory=dict[str, Any], metadata=mapping_of("sizes of the embedded policy"))
    model_settings: dict[str, Any] = field(default_factory=dict[str, Any], metadata=mapping_of("fields of ModelConfig"))
    warm_start: WarmStart | None = None
    training: dict[str, Any] = field(default_factory=dict[str, Any], metadata=mapping_of("fields of GRPOEnvConfig"))
    num_train_tasks: int = field(default=10_000, metadata=must_be(_WHOLE, is_int(1)))
    evaluation: EvaluationPart = field(default_factory=EvaluationPart)
    folder: Path = Path()
    name: str = field(default="run", metadata=must_be("a string", is_str))

    def __post_init__(self) -> None:
        check_section(self)
        if not self.environments:
            raise PlacedError(("environments",), "must have at least one environment")
        if self.tiny and self.model != "tiny":
            raise PlacedError(("tiny",), f"is only valid with model: tiny, but the model is {self.model!r}")


def read_recipe(config: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read a configuration.

    Args:
        config: YAML file, or the contents of one.
        overrides: Values that replace those of ``config``, keyed as in
            ``{"training.max_steps": 20, "environments.0.weight": 2}``.

    Raises:
        ConfigError: The file cannot be read, a key is unknown or missing, or a value is invalid; the key is named.
    """
    with naming_the_file(config, overrides):
        if not isinstance(config, str | Path):
            return _recipe(_overridden(as_mapping(config), overrides or {}), {})
        path = Path(config)
        values = _overridden(as_mapping(values_of_yaml(_text_of(path))), overrides or {})
        return _recipe(values, {"folder": path.parent, "name": path.stem})


@contextmanager
def naming_the_file(config: Any, overrides: Mapping[str, Any] | None) -> Generator[None]:
    """Add the file and the line to errors about a value of a file."""
    path = Path(config) if isinstance(config, str | Path) else None
    try:
        yield
    except PlacedError as error:
        if path is None:
            raise
        is_replaced = any(error.keys[: len(keys)] == keys for keys in map(_keys, overrides or {}))
        line = None if is_replaced else _line_of(_text_of(path), error.keys)
        raise ConfigError(f"{path}{f', line {line}' if line else ''}: {sentence_of(error)}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error


def _recipe(values: dict[str, Any], own: Mapping[str, Any]) -> Recipe:
    """Build a recipe from plain values, section by section."""
    for name in own:
        if name in values:
            raise PlacedError((name,), "cannot be set in a file")
    sections: dict[str, Any] = {**values, **own}
    if values.get("environments") is not None:
        given = values["environments"]
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise PlacedError(("environments",), "must be a list of environments, each with its 'class'")
        parts = [_section(EnvironmentPart, one, "environments", i) for i, one in enumerate(cast("list[Any]", given))]
        sections["environments"] = tuple(parts)
    else:
        raise PlacedError((), "has no 'environments', which must be a list of environments, each with its 'class'")
    for name, section in (("warm_start", WarmStart), ("evaluation", EvaluationPart)):
        if values.get(name) is not None:
            sections[name] = _section(section, values[name], name)
        elif name == "evaluation":
            sections.pop(name, None)
    _check_names(values)
    return read_section(Recipe, sections)


def _check_names(values: Mapping[str, Any]) -> None:
    """Reject a top-level key that belongs in a section, and name the section."""
    from agentsgym.training.config import GRPOEnvConfig  # noqa: PLC0415  # slow to import

    sections = {"training": GRPOEnvConfig, "warm_start": WarmStart, "evaluation": EvaluationPart}
    for name in values.keys() - {one.name for one in dataclasses.fields(Recipe)}:
        for place, section in sections.items():
            if name in {one.name for one in dataclasses.fields(section)}:
                raise PlacedError((name,), f"is unknown here; did you mean '{place}.{name}'?")


def _section(section: type[Any], values: Any, *keys: str | int) -> Any:
    if isinstance(values, section):
        return values
    try:
        return read_section(section, values)
    except PlacedError as error:
        raise error.below(*keys) from None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} cannot be read: {sentence_of(error)}") from error


def _keys(place: str) -> Keys:
    """Split a dotted key; its numbers are indices in lists."""
    parts = place.replace("[", ".").replace("]", "").split(".")
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def _overridden(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Replace values by their dotted keys, in a copy."""
    for place, value in overrides.items():
        require("the key of an override", place, is_str, "a str such as 'training.max_steps'")
        values = _replaced(values, _keys(place), value, ())
    return values


def _replaced(values: Any, keys: Keys, value: Any, above: Keys) -> Any:
    if not keys:
        return value
    first, *rest = keys
    if isinstance(values, list) and isinstance(first, int):
        own = [*cast("list[Any]", values)]
        if first >= len(own):
            raise PlacedError((*above, first), f"cannot be set: the list has {len(own)} items, counted from 0")
        own[first] = _replaced(own[first], tuple(rest), value, (*above, first))
        return own
    if values is not None and not has_str_keys(values):
        raise PlacedError(above, f"is not a mapping, so {first!r} cannot be set")
    known: dict[str, Any] = {} if values is None else as_mapping(values)
    return {**known, str(first): _replaced(known.get(str(first)), tuple(rest), value, (*above, first))}


def _line_of(text: str, keys: Keys) -> int | None:
    """Return the line of a value in a file, counted from 1; the line of its section if the value is missing."""
    untyped: Any = yaml
    node: Any = untyped.compose(text, Loader=yaml.SafeLoader)
    line: int | None = None
    for one in keys:
        if isinstance(node, yaml.SequenceNode) and isinstance(one, int) and one < len(node.value):
            node = node.value[one]
            line = node.start_mark.line + 1
            continue
        pairs: list[Any] = node.value if isinstance(node, yaml.MappingNode) else []
        found = next((pair for pair in pairs if pair[0].value == one), None)
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line


def as_values(recipe: Recipe) -> dict[str, Any]:
    """Convert a recipe to plain values, for a summary."""
    values = dataclasses.asdict(recipe)
    del values["folder"]
    for one in values["environments"]:
        one["class"] = one.pop("class_")
    return values
