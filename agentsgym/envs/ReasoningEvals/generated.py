"""Generate problems with ``reasoning-gym`` from a generator's name, a difficulty and a number, and grade answers."""

from __future__ import annotations

import base64
import functools
import json
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from agentsgym.envs.ReasoningEvals import SPEC
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import is_dict, is_int, or_none, require
from agentsgym.seeding import derive_seed
from agentsgym.texts import sentence_of, shown

Difficulty = int | Mapping[str, Any] | None

_BY_GLOBAL = "its problems depend on Python's global random generator and cannot be reproduced"
_BY_HASH = "its problems depend on the order of sets, which differs between processes, and cannot be reproduced"

#: Unsupported generators, with the reason (reasoning-gym 0.1.25).
UNSOUND: Mapping[str, str] = {
    "codeio": _BY_GLOBAL,
    "composite": "it only combines other generators, which can be named directly",
    "game_of_life_halting": "it accepts any text as the right answer to some of its problems",
    "isomorphic_strings": _BY_HASH,
    "list_functions": _BY_GLOBAL,
    "polynomial_multiplication": _BY_HASH,
    "pool_matrix": "it seeds NumPy's global random generator",
    "ransom_note": _BY_HASH,
}
#: Generators that grade answers but provide no solutions, so no reference player can solve their problems.
WITHOUT_SOLUTION = frozenset(("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"))


@dataclass(frozen=True, slots=True)
class Item:
    """A problem.

    Attributes:
        generator: The generator, which also grades answers.
        entry: The generator's output: ``question``, ``answer`` and ``metadata``.
    """

    generator: Any
    entry: dict[str, Any]

    @property
    def question(self) -> str:
        """The question."""
        return str(self.entry["question"])

    @property
    def solution(self) -> str | None:
        """A right answer; None if the generator provides none."""
        answer = self.entry["answer"]
        return answer if isinstance(answer, str) else None


def _factory() -> Any:
    SPEC.load("reasoning_gym")
    from reasoning_gym import factory  # noqa: PLC0415

    return cast("Any", factory)


def task_names() -> list[str]:
    """Return the names of the supported generators."""
    return sorted({*_factory().DATASETS} - UNSOUND.keys())


def check_generated(task: Any, difficulty: Any) -> None:
    """Validate the name and the difficulty of a generator.

    Raises:
        ConfigError: The name is unknown or unsupported, or the difficulty does not exist.
        MissingDependencyError: ``reasoning-gym`` is not installed.
    """
    known = _factory().DATASETS
    if not isinstance(task, str) or task not in known:
        raise ConfigError(f"reasoning-gym has no task {shown(task)}{did_you_mean(task, task_names())}")
    if task in UNSOUND:
        raise ConfigError(f"the reasoning-gym task {task!r} is not supported: {UNSOUND[task]}")
    expected = "a level (an int >= 0), a dict of the generator's options, or None"
    require(f"the difficulty of {task!r}", difficulty, or_none(lambda it: is_int(0)(it) or is_dict(it)), expected)
    try:
        _generator(task, cast("Difficulty", difficulty), 0)
    except ConfigError:
        raise
    except Exception as error:  # the package's checks, which include assertions
        raise ConfigError(
            f"{task!r} cannot be created with the difficulty {shown(cast('object', difficulty))}: {sentence_of(error)}"
        ) from error


def make_item(task: str, difficulty: Difficulty, item: int) -> Item:
    """Generate a problem, or return a cached one; equal arguments give the same question on every machine.

    In a few generators, the solution and metadata depend on the order of sets, which differs between processes: to
    grade in another process, send the entry (:func:`pack`).

    Args:
        task: The name of the generator.
        difficulty: A level of the generator's curriculum (0 is easiest), a dict of options, or None for the defaults.
        item: The number of the problem, at least 0.
    """
    return _cached_item(json.dumps([task, difficulty], sort_keys=True), item)


def score(item: Item, answer: str) -> float:
    """Return an answer's score in [0, 1]; only 1.0 means right, and some generators give any answer a small score."""
    value = float(item.generator.score_answer(answer, item.entry))
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0


def pack(item: Item) -> str:
    """Serialize a problem's entry for another process of this library, as a pickle, since JSON has no tuples."""
    return base64.b64encode(pickle.dumps(item.entry)).decode()


def unpack(task: str, difficulty: Difficulty, text: str) -> Item:
    """Rebuild a problem from the output of :func:`pack`, which must come from a process of this library."""
    return Item(_cached_generator(json.dumps([task, difficulty], sort_keys=True)), pickle.loads(base64.b64decode(text)))


@functools.lru_cache(maxsize=16)
def _cached_generator(settings: str) -> Any:
    """Create a generator for grading, which needs no seed; recently used ones are cached."""
    task, difficulty = json.loads(settings)
    return _generator(task, difficulty, 0)


@functools.lru_cache(maxsize=64)
def _cached_item(settings: str, item: int) -> Item:
    task, difficulty = json.loads(settings)
    return _make_item(task, difficulty, item)


def _make_item(task: str, difficulty: Difficulty, item: int) -> Item:
    generator = _generator(task, difficulty, derive_seed("reasoning-gym", task, item) % 2**31)
    return Item(generator, generator[0])


def _generator(task: str, difficulty: Difficulty, seed: int) -> Any:
    if not isinstance(difficulty, int):
        return _factory().create_dataset(task, size=1, seed=seed, **(difficulty or {}))
    if task not in _factory().CURRICULA:
        raise ConfigError(f"{task!r} has no levels of difficulty: pass a dict of its options, or None")
    curriculum = _factory().create_curriculum(task)
    highest = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=1) - 1
    require(f"the difficulty of {task!r}", difficulty, lambda it: it <= highest, f"a level from 0 to {highest}")
    curriculum.set_global_level(difficulty)
    config = curriculum.generate_configuration({"size": 1, "seed": seed})
    return _factory().DATASETS[task][0](config)
