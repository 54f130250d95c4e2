"""Make tasks as dataset rows: questions about the generated world, or a data set's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, cast

from agentsgym.envs.rows.options import Part, checked_options, part_of, rows_of
from agentsgym.envs.rows.sources import Column, is_source, read_columns, read_rows
from agentsgym.envs.Search.corpus import GENERATED
from agentsgym.envs.Search.world import World, paths_of
from agentsgym.errors import ConfigError
from agentsgym.fields import is_int, is_str, or_none, require
from agentsgym.texts import shown

if TYPE_CHECKING:
    from datasets import Dataset

ENV_CLASS_PATH = "agentsgym.envs.Search.SearchEnv"
_DEFAULTS: dict[str, Any] = {"data": None, "columns": None, "hops": (1, 2, 3, 4)}


class DatasetOptions(TypedDict, total=False):
    """Options of the rows that are made.

    Attributes:
        data: Questions of your own: a path of a JSONL file, a list of dicts, a ``datasets.Dataset``, or a dict of
            arguments of ``datasets.load_dataset``. None asks about the generated world.
        columns: The data's names of the columns ``question``, ``answers`` and ``evidence`` (which may be missing).
            ``answers`` is a list of texts, or one text.
        hops: Of the generated world: how many facts, one following from the other, lead to the answer; some of 1 to 4.
        size: Number of rows; by default one for each question.
        seed: Orders the questions and makes the tasks' seeds; it never moves one between training and evaluation.
        split: ``"disjoint"``: training and evaluation share no person (of the generated world) or no question (of your
            data); ``"all"``: both have all.
        eval_fraction: What ``"disjoint"`` keeps for evaluation, in (0, 1).
    """

    data: Any
    columns: Mapping[str, str] | None
    hops: Sequence[int]
    size: int | None
    seed: int
    split: str
    eval_fraction: float


def _is_answers(value: Any) -> bool:
    if not isinstance(value, str | list | tuple):
        return False
    values = cast("list[Any]", [value] if isinstance(value, str) else value)
    return len(values) > 0 and all(isinstance(one, str) and one.strip() for one in values)


def _is_titles(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(is_str, cast("list[Any]", value)))


_COLUMNS = {
    "question": Column(default="question", valid=lambda one: is_str(one) and bool(one.strip()), expected="a text"),
    "answers": Column(default="answers", valid=_is_answers, expected="a text or a list of at least one text"),
    "evidence": Column(default="evidence", valid=_is_titles, expected="a list of titles", is_optional=True),
}


def task_dataset(
    config: Mapping[str, Any], env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]
) -> Dataset:
    """Make rows.

    Args:
        config: The validated configuration of the environment.
        env_config: What the rows hold of it.
        part: Whether they are for training or evaluation.
        options: See :class:`DatasetOptions`.

    Raises:
        ConfigError: An option is not valid, the data lack a column, or there are no questions for this corpus.
    """
    if config["retriever"] is not None:
        raise ConfigError("env_config['retriever'] cannot be in a dataset row: give it to the environment itself")
    settings = checked_options(options, _DEFAULTS)
    require("data", settings["data"], or_none(is_source), "what rows can be read from, or None")
    if settings["data"] is not None:
        tasks = _own_tasks(settings, part)
    elif config["corpus"] == GENERATED:
        tasks = _generated_tasks(config["world"], settings, part)
    else:
        raise ConfigError(f"the corpus {shown(config['corpus'])} comes without questions: give them as data=…")
    return rows_of(tasks, ENV_CLASS_PATH, env_config, part, settings)


def _own_tasks(settings: Mapping[str, Any], part: Part) -> list[dict[str, Any]]:
    rows = read_columns(read_rows(settings["data"], "data"), _COLUMNS, settings["columns"], "data")
    for row in rows:
        row["answers"] = [row["answers"]] if isinstance(row["answers"], str) else [*row["answers"]]
    chosen = set(part_of([row["question"] for row in rows], part, settings, "questions"))
    return [row for row in rows if row["question"] in chosen]


def _generated_tasks(world: Mapping[str, Any], settings: Mapping[str, Any], part: Part) -> list[dict[str, Any]]:
    hops: Any = settings["hops"]
    is_hops = isinstance(hops, Sequence) and all(map(is_int(1), cast("Sequence[Any]", hops)))
    require("hops", hops, lambda _: is_hops, "a list of positive ints")
    made = World(**world)
    questions = [
        made.question(person, path)
        for person in part_of(made.people, part, settings, "people")
        for path in paths_of(cast("Sequence[int]", hops))
    ]
    return [{"question": one.text, "answers": [*one.answers], "evidence": [*one.evidence]} for one in questions]
