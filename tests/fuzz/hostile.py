"""Values that nobody means, and the check that they end in a sentence."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from agentsgym.errors import AgentsGymError
from agentsgym.types import Trajectory

#: How often each test draws: two minutes for all of them; for an hour, AGENTSGYM_FUZZ=30.
TIMES = float(os.environ.get("AGENTSGYM_FUZZ", "1"))
NOT_A_SENTENCE = (
    "KeyError",
    "AttributeError",
    "IndexError",
    "TypeError",
    "ValueError",
    "RecursionError",
    "OverflowError",
)


def drawn(number: int, *, shrinks: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Draw so many examples, of whatever size and however slow, never from an earlier run's."""
    healthy = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if shrinks else [])]
    return settings(
        phases=phases,
        max_examples=max(1, int(number * TIMES)),
        deadline=None,
        suppress_health_check=healthy,
        database=None,
    )


SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.sampled_from([2**31, 2**63, -(2**64), 10**400]),
    st.floats(),
    st.sampled_from([0.5, 1e200, -1e200, 1e39]),
    st.text(max_size=8),
    st.sampled_from(["", "\ud800", "\x00", "auto", "train", "<|im_end|>", "1", "a" * 5000, "../../etc", "{", "[0 3]"]),
    st.binary(max_size=4),
    st.complex_numbers(),
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.text(max_size=6), SCALARS), inner, max_size=3),
    ),
    max_leaves=6,
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=8,
)


def mappings(names: list[str], values: st.SearchStrategy[Any] = VALUES) -> st.SearchStrategy[dict[Any, Any]]:
    """Mappings with some of the names, and seldom one that is unknown."""
    keys = st.one_of(st.sampled_from(names), st.sampled_from(names), SCALARS) if names else SCALARS
    return st.dictionaries(keys, values, max_size=3)


@contextlib.contextmanager
def only_sentences(*allowed: type[BaseException]) -> Generator[None]:
    """Accept success, agentsgym's errors, the allowed ones, and a TypeError of the call itself."""
    try:
        yield
    except (AgentsGymError, *allowed):
        pass
    except TypeError as error:
        *_, innermost = traceback.extract_tb(error.__traceback__)
        if Path(innermost.filename).parent != Path(__file__).parent:
            raise


def check_played(trajectory: Trajectory) -> None:
    """A failed episode of a packaged environment names no bare error."""
    error = trajectory.error or ""
    assert not any(f"{name}:" in error or f"{name}(" in error for name in NOT_A_SENTENCE), error


def with_one_changed(values: Mapping[str, Any], draw: Callable[[st.SearchStrategy[Any]], Any]) -> dict[str, Any]:
    """Replace or remove a value somewhere in nested mappings and lists."""
    changed: Any = {**values}
    place: Any = changed
    while True:
        key = draw(st.sampled_from(sorted(place, key=str) if isinstance(place, dict) else range(len(place))))
        inner = place[key]
        if isinstance(inner, dict | list) and inner and draw(st.booleans()):
            place[key] = type(inner)(inner)
            place = place[key]
            continue
        if isinstance(place, dict) and draw(st.integers(0, 5)) == 0:
            del place[key]
        else:
            place[key] = draw(VALUES)
        return changed
