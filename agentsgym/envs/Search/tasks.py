"""Make dataset rows of tasks: questions about the generated world, or from a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from agentsgym.envs.datasets import questions
from agentsgym.envs.datasets.options import CommonOptions, Part, checked_options, names_in_part, row_env, rows_of
from agentsgym.envs.datasets.sources import Column
from agentsgym.envs.Search.corpus import GENERATED
from agentsgym.envs.Search.world import World, paths_of
from agentsgym.errors import ConfigError
from agentsgym.fields import Field, is_int, is_strings
from agentsgym.texts import shown

if TYPE_CHECKING:
    from datasets import Dataset


_OPTIONS: Mapping[str, Field] = {
    **questions.OPTIONS,
    "hops": Field(
        default=(1, 2, 3, 4),
        expected="a list of positive ints",
        valid=lambda value: isinstance(value, Sequence) and all(map(is_int(1), cast("Sequence[Any]", value))),
    ),
}


class DatasetOptions(CommonOptions, total=False):
    """Options of the generated rows.

    Attributes:
        data: A custom table of questions: the path to a JSONL file, a list of dicts, a ``datasets.Dataset``, or a dict
            of arguments for ``datasets.load_dataset``. None for questions about the generated world.
        columns: The data's columns for ``question``, ``answers`` and ``evidence`` (optional). ``answers`` is a list of
            texts, or one text.
        hops: The numbers of facts that lead to an answer in the generated world; a subset of 1 to 4.
        size: The number of rows; by default one per question.
        seed: The seed of the order of questions and of the tasks' seeds; it never moves a question between the splits.
        split: ``"disjoint"`` if training and evaluation share no people (generated world) or questions (custom data),
            ``"all"`` if each gets all of them.
        eval_fraction: The fraction that ``"disjoint"`` reserves for evaluation, in (0, 1).
    """

    data: Any
    columns: Mapping[str, str] | None
    hops: Sequence[int]


_COLUMNS = {
    "question": questions.QUESTION,
    "answers": Column(
        default="answers",
        valid=lambda value: (
            questions.is_text(value) or bool(is_strings(value) and value and all(map(questions.is_text, value)))
        ),
        expected="a string or a list of at least one string",
    ),
    "evidence": Column(default="evidence", valid=is_strings, expected="a list of titles", is_optional=True),
}


def task_dataset(
    env_class: type[Any], env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]
) -> Dataset:
    """Make the rows of a split, with ``env_config`` unchanged."""
    config = row_env(env_class, env_config, "retriever").env_config
    settings = checked_options(options, _OPTIONS)
    if settings["data"] is not None:
        rows = questions.read(settings, _COLUMNS)
        for row in rows:
            row["answers"] = [row["answers"]] if isinstance(row["answers"], str) else [*row["answers"]]
        tasks = questions.of_part(rows, part, settings)
    elif config["corpus"] == GENERATED:
        world = World(**config["world"])
        tasks = [
            world.task(person, path)
            for person in names_in_part(world.people, part, settings, "people")
            for path in paths_of(settings["hops"])
        ]
    else:
        raise ConfigError(f"the corpus {shown(config['corpus'])} has no built-in questions: pass questions as data=…")
    return rows_of(tasks, env_class, env_config, part, settings)
