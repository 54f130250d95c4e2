"""Parse an action from the agent's text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from agentsgym.errors import ConfigError, EnvError
from agentsgym.fields import is_int
from agentsgym.texts import shown

ActionParser = Callable[[str], "int | None"]

_MAX_NUMBERED = 64  # the number of actions up to which their numbers serve as names


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTable:
    """The names of the actions.

    Attributes:
        by_name: The number of each action, by its name in the agent's text.
        parser: A function that parses an action instead of the table; None to use the table.
    """

    by_name: Mapping[str, int]
    parser: ActionParser | None = None
    _folded: Mapping[str, int] = field(init=False, repr=False, compare=False)
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        folded = {_fold(name): number for name, number in self.by_name.items()}
        if len(folded) != len(self.by_name):
            raise ConfigError(
                "env_config['actions'] must contain names that differ in more than case and spacing, got "
                f"{[*self.by_name]}"
            )
        longest_first = sorted(folded, key=len, reverse=True)
        pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")
        object.__setattr__(self, "_folded", folded)
        object.__setattr__(self, "_pattern", pattern)

    @property
    def values(self) -> tuple[int, ...]:
        """The numbers of the legal actions, each once, in the order of their names."""
        return tuple(dict.fromkeys(self.by_name.values()))

    def name_of(self, number: int) -> str:
        """Return the first name of an action."""
        return next(name for name, value in self.by_name.items() if value == number)

    def parse(self, text: str) -> int | None:
        """Return the number of the action that the text names; None if it names none, or several different ones.

        The last name in brackets takes precedence over all
        others; matching is case-insensitive.
        """
        if self.parser is not None:
            number: Any = self.parser(text)
            if hasattr(number, "item"):
                number = number.item()  # a numpy number
            if number is not None and not (is_int()(number) and number in self.by_name.values()):
                raise EnvError(
                    f"the callable env_config['actions'] must return one of {[*self.values]} or None, got "
                    f"{shown(number)}"
                )
            return number
        folded = _fold(text)
        in_brackets = [text for text in re.findall(r"\[([^\[\]]*)\]", folded) if _fold(text) in self._folded]
        if in_brackets:
            return self._folded[_fold(in_brackets[-1])]
        named = {self._folded[name] for name in self._pattern.findall(folded)}
        return named.pop() if len(named) == 1 else None


def is_actions(value: Any) -> bool:
    """Whether a value is valid for ``env_config["actions"]``: names with numbers, only names, a callable, or None."""
    if value is None or callable(value):
        return True
    if isinstance(value, Mapping):
        table = cast("Mapping[Any, Any]", value)
        return bool(table) and all(map(_is_name, table)) and all(map(is_int(), table.values()))
    if not isinstance(value, list | tuple):
        return False
    names = cast("list[Any]", value)
    return bool(names) and all(map(_is_name, names)) and len(set(map(_fold, names))) == len(names)


def action_table(setting: Any, space: Any, default_names: Iterable[str] | None) -> ActionTable:
    """Create the table of an action space from ``env_config["actions"]`` and its usual names, None if unknown."""
    from gymnasium.spaces import Discrete  # noqa: PLC0415  # optional dependency

    if not isinstance(space, Discrete):
        raise ConfigError(
            f"GymnasiumEnv supports only Discrete action spaces, but this one is {shown(space)}: wrap the environment "
            "so that its actions are discrete, and pass a callable that creates it as env_config['id']"
        )
    discrete: Any = cast("Any", space)
    start, num = int(discrete.start), int(discrete.n)
    numbers = range(start, start + num)
    if setting is None or callable(setting):
        if default_names is None and num > _MAX_NUMBERED:
            raise ConfigError(
                f"env_config['actions'] must name the actions to use, since the environment has {num}, more than "
                f"{_MAX_NUMBERED}"
            )
        names = map(str, numbers) if default_names is None else default_names
        return ActionTable(by_name=dict(zip(names, numbers, strict=True)), parser=cast("ActionParser | None", setting))
    named = cast("Mapping[str, int] | list[str]", setting)
    by_name = dict(named) if isinstance(named, Mapping) else dict(zip(named, numbers, strict=False))
    wrong = {name: number for name, number in by_name.items() if number not in numbers}
    if wrong or len(by_name) < len(named):
        raise ConfigError(
            f"env_config['actions'] must name actions from {start} to {start + num - 1}, each name once, got "
            f"{shown(wrong or named)}"
        )
    return ActionTable(by_name=by_name)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(_fold(value)) and not any(mark in value for mark in "[]\n")


def _fold(text: str) -> str:
    return " ".join(text.casefold().split())
