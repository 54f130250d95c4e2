"""Keep moving averages across batches, to serve as baselines."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, cast

from agentsgym.errors import ConfigError
from agentsgym.texts import shown


class EMABaselines:
    """An exponential moving average for each key, 0.0 before its first value: ``b ← decay·b + (1 - decay)·value``.

    Keys are None, strings, numbers and tuples of these, so that they can be restored from JSON: see
    :meth:`state_dict`. Objects can be pickled and deep-copied, and are equal if their averages are.

    >>> baselines = EMABaselines()
    >>> baselines.update(("chess", "white"), 1.0, decay=0.75)
    >>> baselines.update(("chess", "white"), 1.0, decay=0.75)
    >>> baselines.get(("chess", "white")), baselines.get(("chess", "black"))
    (0.4375, 0.0)
    >>> baselines.state_dict()
    {'baselines': [[['chess', 'white'], 0.4375]]}
    """

    def __init__(self) -> None:
        self._averages: dict[Hashable, float] = {}

    def get(self, key: Hashable) -> float:
        """The average of a key; 0.0 before its first value."""
        return self._averages.get(key, 0.0)

    def update(self, key: Hashable, value: float, *, decay: float) -> None:
        """Move the average of a key towards a value.

        Args:
            key: The key.
            value: The new value.
            decay: The weight of the old average, in [0, 1].

        Raises:
            ConfigError: The key cannot be stored in a checkpoint.
        """
        _as_json(key)  # rejected now, rather than when the first checkpoint is written
        self._averages[key] = decay * self.get(key) + (1.0 - decay) * value

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"baselines": [[key, average], …]}`` for a checkpoint: plain JSON, with tuples as lists."""
        return {"baselines": [[_as_json(key), average] for key, average in self._averages.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore all averages from a :meth:`state_dict`.

        Args:
            state: The dict, even after a round trip through JSON.
        """
        self._averages = {_from_json(key): average for key, average in state["baselines"]}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EMABaselines) and self._averages == other._averages

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"EMABaselines({self._averages})"


def _as_json(key: Hashable) -> Any:
    if isinstance(key, tuple):
        return [_as_json(part) for part in cast("tuple[Hashable, ...]", key)]
    if key is None or isinstance(key, str | int | float):
        return key
    raise ConfigError(
        "an environment or role with a moving average must be None, a str, a number or a tuple of these, "
        f"got {shown(key)}"
    )


def _from_json(key: Any) -> Hashable:
    return tuple(_from_json(part) for part in cast("list[Any]", key)) if isinstance(key, list) else key
