"""Make tasks as dataset rows: a data set's questions, or problems that ``reasoning-gym`` makes."""

from __future__ import annotations

import logging
import math
import string
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.datasets import questions
from agentsgym.envs.datasets.options import CommonOptions, Part, checked_options, row_env, rows_of, task_seed
from agentsgym.envs.datasets.sources import Column
from agentsgym.envs.ReasoningEvals.extraction import gold_answer
from agentsgym.envs.ReasoningEvals.generated import Difficulty, check_generated, make_item
from agentsgym.errors import ConfigError
from agentsgym.fields import Field, is_int, is_strings, require
from agentsgym.seeding import derive_seed
from agentsgym.texts import sentence_of, shown

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

DEFAULT_TASK = "chain_sum"
_ANY = Field(default=None, expected="anything", valid=lambda _: True)  # checked where problems are made
_OPTIONS: Mapping[str, Field] = {**questions.OPTIONS, "task": _ANY, "difficulty": _ANY}
_DEFAULT_SIZE = 1000  # of what has no end
_TRIES_BY_SHARE = 50  # so that all miss once in 1e21 rows, where there are questions enough


class DatasetOptions(CommonOptions, total=False):
    """Options of the rows that are made.

    Attributes:
        data: Questions of your own: a path of a JSONL file, a list of dicts, a ``datasets.Dataset``, or a dict of
            arguments of ``datasets.load_dataset``.
        columns: The data's names of the columns ``question``, ``answer`` and ``choices`` (which may be missing). An
            answer is a text or a number. A whole solution that ends in ``####`` or a box is cut down to what stands
            there. With ``choices`` it is the letter, the place from 0, or the text of the right one.
        task: Without ``data``: the name of a generator of ``reasoning-gym``, or several; ``"chain_sum"`` by default.
        difficulty: Of its problems: a level from 0, a dict of the generator's options, or None for its defaults.
        size: Number of rows; by default one a question, or 1,000 problems.
        seed: Orders the questions, and makes the problems.
        split: ``"disjoint"``: training and evaluation share no question, for which problems are made already here;
            ``"all"``: both have all of your questions, or whatever problems come.
        eval_fraction: The part of the questions that ``"disjoint"`` keeps for evaluation, in (0, 1).
    """

    data: Any
    columns: Mapping[str, str] | None
    task: str | Sequence[str] | None
    difficulty: Difficulty


def _is_answer(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number or questions.is_text(value)


def are_choices(value: Any) -> bool:
    """Whether these are choices that letters can name: 2 to 26 texts."""
    return is_strings(value) and 2 <= len(value) <= len(string.ascii_uppercase)


_COLUMNS = {
    "question": questions.QUESTION,
    "answer": Column(default="answer", valid=_is_answer, expected="a string or a number"),
    "choices": Column(default="choices", valid=are_choices, expected="a list of 2 to 26 strings", is_optional=True),
}


def task_dataset(
    env_class: type[Any], env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]
) -> Dataset:
    """Make the rows of a part, with ``env_config`` as it is given.

    Raises:
        ConfigError: An option is not valid, the data lack a column, or there is no such generator or difficulty.
    """
    row_env(env_class, env_config, "extractor", "grader")
    settings = checked_options(options, _OPTIONS)
    if settings["data"] is None:
        tasks = _generated_tasks(settings, part)
    elif settings["task"] is None and settings["difficulty"] is None:
        tasks = _own_tasks(settings, part)
    else:
        raise ConfigError("data cannot be combined with task or difficulty: questions come from one of them")
    return rows_of(tasks, class_path(env_class), env_config, part, settings)


def _own_tasks(settings: Mapping[str, Any], part: Part) -> list[dict[str, Any]]:
    rows = questions.read(settings, _COLUMNS)
    for index, row in enumerate(rows):
        row["answer"] = _answer(row, index)
    return questions.of_part(rows, part, settings)


def _answer(row: Mapping[str, Any], index: int) -> str:
    answer, choices = row["answer"], row.get("choices")
    if choices is None:
        return gold_answer(str(answer))
    letters = string.ascii_uppercase[: len(choices)]
    if is_int(0)(answer) and answer < len(choices):
        return letters[answer]
    text = str(answer).strip()
    if text in [*letters]:
        return text
    if text in choices:
        return letters[choices.index(text)]
    raise ConfigError(f"data[{index}]: the answer must be one of {letters}, its index or its text, got {shown(answer)}")


def _generated_tasks(settings: Mapping[str, Any], part: Part) -> list[dict[str, Any]]:
    given = settings["task"]
    names: list[Any] = [DEFAULT_TASK] if given is None else [given] if isinstance(given, str) else [*given]
    require("task", names, bool, "the name of a generator, or several")
    for name in names:
        check_generated(name, settings["difficulty"])
    size = _DEFAULT_SIZE if settings["size"] is None else settings["size"]
    difficulty = settings["difficulty"]
    tasks = ({"task": names[index % len(names)], "difficulty": difficulty} for index in range(size))
    return [{**task, "item": _item(task, part, settings, index)} for index, task in enumerate(tasks)]


def _item(task: Mapping[str, Any], part: Part, settings: Mapping[str, Any], index: int) -> int:
    """Number a row's problem; with ``"disjoint"`` the first whose question falls to the part, by a hash of its text."""
    topic = "agentsgym.envs.ReasoningEvals.ReasoningEvalsEnv item"
    if settings["split"] == "all":
        return task_seed(part, "task", topic, settings["seed"], index)
    share: float = settings["eval_fraction"] if part == "eval" else 1 - settings["eval_fraction"]
    num_tries = math.ceil(_TRIES_BY_SHARE / share)
    for attempt in range(num_tries):
        item = task_seed(part, "task", f"{topic} {attempt}" if attempt else topic, settings["seed"], index)
        try:
            question = make_item(task["task"], task["difficulty"], item).question
        except Exception as error:  # noqa: BLE001  # the generator's own fault at one problem
            logger.warning(
                "%s cannot generate problem %d, which is skipped: %s", task["task"], item, sentence_of(error)
            )
            continue
        if (derive_seed("question split", question) < settings["eval_fraction"] * 2**63) == (part == "eval"):
            return item
    raise ConfigError(
        f"none of {num_tries} problems of {task['task']!r} at the difficulty {shown(task['difficulty'])} is in the "
        f"{part} split: too few different questions to split; use split='all'"
    )
