"""Questions with answers that can be checked: mathematics, choices, puzzles; in one turn or with several attempts."""

from __future__ import annotations

import string
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, cast

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.ReasoningEvals import SPEC
from agentsgym.envs.ReasoningEvals.extraction import (
    EXTRACTORS,
    FINDERS,
    Extractor,
    Kind,
    extracted,
    gold_answer,
    readings,
)
from agentsgym.envs.ReasoningEvals.generated import check_generated, make_item
from agentsgym.envs.ReasoningEvals.grading import GRADES, Verdict, by_callable, by_generator, check_installed, kind_of
from agentsgym.envs.ReasoningEvals.tasks import DatasetOptions, are_choices, task_dataset
from agentsgym.envs.shared.numbers import canonical, without_thoughts
from agentsgym.errors import ConfigError, EnvError, TaskError
from agentsgym.fields import Field, is_bool, is_int, is_number, is_positive_number
from agentsgym.texts import sentence_of, shown
from agentsgym.types import Action

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_FORMS = {
    "tag": "Then write the final answer, and nothing else, between <answer> and </answer>.",
    "boxed": r"Then write the final answer, and nothing else, in \boxed{}.",
    "hashes": "Then write a last line of #### and the final answer.",
    "choice": 'Then end with "The answer is (X)", where X is the letter of your choice.',
    "number": "Then end with the final answer, a number.",
    "line": "Answer with the final answer alone, on one line.",
}
_FORMS["auto"] = _FORMS["tag"]
_REASON = "Work out the answer step by step."

WRONG = "That is not right."


def _names_or_callable(table: Mapping[str, Any]) -> tuple[str, Callable[[Any], bool]]:
    names = ", ".join(map(repr, table))
    return (
        f"one of {names}, or a function",
        lambda value: callable(value) or (isinstance(value, str) and value in table),
    )


_EXTRACTORS = _names_or_callable({"auto": None, **EXTRACTORS})
_GRADERS = _names_or_callable(GRADES)


class ReasoningEvalsEnv(MultistepEnv):
    """Question and answer, graded by rule.

    A task is a question of your own, ``{"question": str, "answer": str, "choices": [str, …], "seed": int}``
    (``choices`` for multiple choice, with the letter as the answer), or a problem that ``reasoning-gym`` makes,
    ``{"task": str, "difficulty": int | dict | None, "item": int, "seed": int}``; without an ``item`` the task's seed
    says which.

    Keys of ``env_config`` beside the common ones:

    - ``max_attempts``: how often the agent may answer; between two attempts it is told that the first was not right.
    - ``extractor``: where the answer stands: ``"auto"`` (default), ``"tag"``, ``"boxed"``, ``"hashes"``, ``"choice"``,
      ``"number"``, ``"line"``, or a function from what the agent said to the answer, None if there is none.
    - ``grader``: ``"auto"`` (default: equal text, equal numbers, then ``math-verify``), ``"text"``, ``"number"``,
      ``"choice"``, ``"math"``, or a function ``(answer, right answer) -> bool or number in [0, 1]``. Problems of
      ``reasoning-gym`` are graded by what made them.
    - ``grading_timeout_s``: time to grade one answer in; one that takes longer is wrong.
    - ``partial_credit``: whether an answer that is partly right is paid for that, as far as it is better than those
      before it; otherwise only a right one is.
    - ``wrong_penalty``, ``invalid_penalty``: what a wrong answer costs, and one that cannot be found in what was said.
    """

    spec = SPEC
    config_fields: ClassVar[Mapping[str, Field]] = {
        "max_attempts": Field(default=1, expected="a positive int", valid=is_int(1)),
        "extractor": Field(default="auto", expected=_EXTRACTORS[0], valid=_EXTRACTORS[1]),
        "grader": Field(default="auto", expected=_GRADERS[0], valid=_GRADERS[1]),
        "grading_timeout_s": Field(default=5.0, expected="a number > 0", valid=is_positive_number),
        "partial_credit": Field(default=False, expected="True or False", valid=is_bool),
        "wrong_penalty": Field(default=0.0, expected="a number >= 0", valid=is_number(0)),
        "invalid_penalty": Field(default=0.0, expected="a number >= 0", valid=is_number(0)),
    }
    task_fields: ClassVar[Collection[str] | None] = ("question", "answer", "choices", "task", "difficulty", "item")

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None = None, env_config: dict[str, Any] | None = None
    ) -> None:
        """Check the configuration; arguments as for every environment.

        Raises:
            ConfigError: As for every environment.
            MissingDependencyError: Answers are to be graded with ``math-verify``, and it is not installed.
        """
        super().__init__(tokenizer, env_config)
        check_installed(self.env_config["grader"])

    def _check_config(self, config: dict[str, Any]) -> None:
        attempts, turns = config["max_attempts"], config["max_steps_per_episode"]
        if attempts > turns:
            raise ConfigError(
                "env_config['max_attempts'] must be at most env_config['max_steps_per_episode'], "
                f"got {attempts} and {turns}"
            )

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        if task_data.get("task") is not None:
            self._check_generated(task_data)
            return
        for name in ("question", "answer"):
            value = task_data.get(name)
            if not (isinstance(value, str) and value.strip()):
                raise TaskError(f"task_data[{name!r}] must be a string, got {shown(value)}")
        choices = task_data.get("choices")
        if choices is not None:
            _check_choices(choices, task_data["answer"])

    def _check_generated(self, task_data: Mapping[str, Any]) -> None:
        item = task_data.get("item")
        if item is not None and not is_int(0)(item):
            raise TaskError(f"task_data['item'] must be an int >= 0 or None, got {shown(item)}")
        for name in ("question", "answer", "choices"):
            if task_data.get(name) is not None:
                raise TaskError(f"task_data must not have both a 'task' of reasoning-gym and a {name!r}")
        try:
            check_generated(task_data["task"], task_data.get("difficulty"))
        except ConfigError as error:
            raise TaskError(f"task_data cannot be played: {sentence_of(error)}") from error

    def _system_prompt(self) -> str | None:
        extractor = self.env_config["extractor"]
        return None if callable(extractor) else f"{_REASON} {_FORMS[extractor]}"

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        self._check_task(task_data)
        problem: dict[str, Any] | None = None
        if task_data.get("task") is not None:
            number = task_data.get("item")
            number = task_data.get("seed") if number is None else number
            number = self.rng(session_id).getrandbits(31) if number is None else number
            problem = {"task": task_data["task"], "difficulty": task_data.get("difficulty"), "item": abs(number)}
            item = make_item(**problem)
            question, gold, choices = item.question, item.solution, None
        else:
            question, choices = task_data["question"], task_data.get("choices")
            gold = gold_answer(task_data["answer"])
        return {
            "problem": problem,
            "gold": gold,
            "kind": kind_of(gold, has_choices=bool(choices)) if problem is None else _kind_of_generated(gold),
            "observation": _with_choices(question, choices),
            "num_attempts": 0,
            "best_score": 0.0,
            "done": False,
        }

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return state["observation"]

    def _step_episode(
        self, session_id: str, state: dict[str, Any], action: str
    ) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        return self._step_action(session_id, state, Action(text=action))

    def _step_action(
        self, session_id: str, state: dict[str, Any], action: Action
    ) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        answer = self._extract(action, state["kind"])
        num_attempts = state["num_attempts"] + 1
        num_left = self.env_config["max_attempts"] - num_attempts
        state = {**state, "num_attempts": num_attempts}
        if answer is None:
            state["observation"] = f"{self._no_answer(action)} {_attempts(num_left)}"
            info = {"success": False, "invalid": True, "num_attempts": num_attempts, "score": 0.0}
            return state, -self.env_config["invalid_penalty"], num_left <= 0, info
        verdict = self._grade(state, answer, action)
        is_right = verdict.score == 1.0
        info = {"success": is_right, "answer": canonical(answer), "num_attempts": num_attempts, "score": verdict.score}
        if verdict.note:
            info["grading"] = verdict.note
        reward = self._reward(state, verdict)
        state["best_score"] = max(state["best_score"], verdict.score)
        state["observation"] = f"{WRONG} {_attempts(num_left)}"
        return state, reward, is_right or num_left <= 0, info

    def _extract(self, action: Action, kind: Kind, extractors: Mapping[str, Extractor] = EXTRACTORS) -> str | None:
        extractor = self.env_config["extractor"]
        said = without_thoughts(action.text)
        if not callable(extractor):
            if extractor == "auto":
                return extracted(said, kind, is_cut=action.finish_reason == "length", extractors=extractors)
            return extractors[extractor](said)
        answer: Any = extractor(said)
        if not (answer is None or isinstance(answer, str)):
            raise EnvError(f"the extractor must return a str or None, got {shown(answer)}")
        return answer or None

    def _grade(self, state: Mapping[str, Any], answer: str, action: Action) -> Verdict:
        grader, limit_s = self.env_config["grader"], self.env_config["grading_timeout_s"]
        if state["problem"] is not None:
            written = None if callable(self.env_config["extractor"]) else self._extract(action, state["kind"], FINDERS)
            return by_generator(state["problem"], readings(written) if written else [answer], limit_s)
        if callable(grader):
            return by_callable(cast("Callable[[str, str], Any]", grader), answer, state["gold"])
        return GRADES[grader](answer, state["gold"], limit_s)

    def _reward(self, state: Mapping[str, Any], verdict: Verdict) -> float:
        cost: float = 0.0 if verdict.score == 1.0 else self.env_config["wrong_penalty"]
        if self.env_config["partial_credit"]:
            return max(0.0, verdict.score - state["best_score"]) - cost
        return float(verdict.score == 1.0) - cost

    def _no_answer(self, action: Action) -> str:
        extractor = self.env_config["extractor"]
        reason = "You were cut off before your answer." if action.finish_reason == "length" else "No answer was found."
        return reason if callable(extractor) else f"{reason} {_FORMS[extractor].removeprefix('Then ').capitalize()}"

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:
        """Rows to train on; the options are those of :class:`~.tasks.DatasetOptions`.

        Raises:
            ConfigError: The configuration or an option is not valid, or the data lack a column.
        """
        return task_dataset(cls, env_config, "train", options)

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:
        """Rows to evaluate on: other questions, or other problems of the same generator, than those to train on.

        Arguments and errors are those of :meth:`get_train_dataset`.
        """
        return task_dataset(cls, env_config, "eval", options)


def _check_choices(choices: Any, answer: str) -> None:
    if not are_choices(choices):
        raise TaskError(f"task_data['choices'] must be a list of 2 to 26 strings, got {shown(choices)}")
    letters = string.ascii_uppercase[: len(choices)]
    if answer.strip() not in [*letters]:
        raise TaskError(f"task_data['answer'] must be the letter of a choice, one of {letters}, got {shown(answer)}")


def _kind_of_generated(solution: str | None) -> Kind:
    kind = kind_of(solution, has_choices=False)
    return "text" if kind == "choice" else kind  # a letter there may be part of a puzzle


def _with_choices(question: str, choices: Sequence[str] | None) -> str:
    if not choices:
        return question
    lines = [f"{letter}. {choice}" for letter, choice in zip(string.ascii_uppercase, choices, strict=False)]
    return "\n".join([question, *lines])


def _attempts(num_left: int) -> str:
    return f"You have {num_left} {'attempt' if num_left == 1 else 'attempts'} left."
