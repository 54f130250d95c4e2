"""Ask questions about a price list that only a tool can read, with tools that add and multiply.

The prices are redrawn for every task, so a policy must learn to look them up with tools, and cannot memorize the table.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, cast

from agentsgym.envs.boundary import system_messages
from agentsgym.envs.contract import State, Stepped
from agentsgym.envs.datasets.options import DrawnOptions, drawn_dataset
from agentsgym.envs.PriceList import SPEC
from agentsgym.envs.Tools.env import TOOL_FIELDS, ToolEnv
from agentsgym.envs.Tools.sources import SessionTools, parallel
from agentsgym.errors import TaskError, did_you_mean
from agentsgym.fields import Field, is_dict, is_int, is_list, is_strings, or_none, require
from agentsgym.seeding import derive_seed
from agentsgym.texts import shown
from agentsgym.types import Action

if TYPE_CHECKING:
    from datasets import Dataset

KINDS = ("price", "sum", "product")
MAX_TIMES = 4

_QUESTION = re.compile(
    r"What is (?:(?P<times>\d+) times )?the price of an? (?P<one>[\w-]+)(?: plus the price of an? (?P<other>[\w-]+))?\?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about prices.

    Attributes:
        goods: One good, or two whose prices are added.
        times: The factor that the price is multiplied by; None for no multiplication.
    """

    goods: tuple[str, ...]
    times: int | None = None

    def text(self) -> str:
        """Format the question.

        >>> Question(goods=("pear",), times=3).text()
        'What is 3 times the price of a pear?'
        """
        prices = " plus ".join(f"the price of a{'n' * (name[0] in 'aeiou')} {name}" for name in self.goods)
        return f"What is {prices}?" if self.times is None else f"What is {self.times} times {prices}?"

    def answer(self, prices: Mapping[str, int]) -> int:
        """Compute the answer."""
        return sum(prices[name] for name in self.goods) * (1 if self.times is None else self.times)

    @classmethod
    def parse(cls, text: str) -> Question | None:
        """Parse a question; None if the text is not one.

        >>> Question.parse("What is the price of a pear plus the price of an egg?")
        Question(goods=('pear', 'egg'), times=None)
        """
        found = _QUESTION.fullmatch(text.strip())
        if found is None:
            return None
        goods = tuple(name for name in (found["one"], found["other"]) if name)
        return cls(goods=goods, times=int(found["times"]) if found["times"] else None)


GOODS = ("apple", "bread", "cheese", "egg", "fish", "honey", "melon", "pear")
_SYSTEM_PROMPT = (
    "You answer questions about a price list that only your tools can read. Look up every price that you need, "
    "calculate with the tools, and give the answer as a number without any other words."
)


class Till:
    """The tools of one session: its price list and a calculator."""

    def __init__(self, task_data: Mapping[str, Any], _: random.Random) -> None:
        self._prices: dict[str, int] = dict(task_data["prices"])

    @parallel
    def price(self, good: str) -> int:
        """Look up what a good costs.

        Args:
            good: The good.
        """
        if good not in self._prices:
            raise ValueError(f"{shown(good)} is not on the price list{did_you_mean(good, self._prices)}")
        return self._prices[good]

    @parallel
    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    @parallel
    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a * b


class PriceListEnv(ToolEnv):
    """Questions whose answer must be looked up and calculated; the reward is 1 for the right number, 0 for any other.

    A task is ``{"goods": ["pear", "egg"], "times": None, "prices": {...}}``; :meth:`tasks` draws such tasks.

    Keys of ``env_config`` in addition to the common ones and those of :class:`ToolEnv`:

    - ``goods``: the goods on the price list.
    - ``kinds``: the kinds of questions.
    - ``max_price``: the maximum price of a good; the minimum is 1.
    """

    spec = SPEC
    config_fields: ClassVar[Mapping[str, Field]] = {
        **TOOL_FIELDS,
        "goods": Field(
            default=list(GOODS),
            expected="a list of two or more lower-case words",
            valid=lambda value: (
                is_strings(value) and len(value) >= 2 and all(word.isalpha() and word.islower() for word in value)
            ),
        ),
        "kinds": Field(
            default=list(KINDS),
            expected=f"a non-empty list of names from {', '.join(KINDS)}",
            valid=lambda value: is_strings(value) and len(value) > 0 and {*value} <= {*KINDS},
        ),
        "max_price": Field(default=9, expected="a positive int", valid=is_int(1)),
    }
    default_config: ClassVar[Mapping[str, Any]] = {"max_steps_per_episode": 6, "tool_timeout_s": None}
    task_fields = ("goods", "times", "prices")

    @property
    def max_answer(self) -> int:
        """The largest possible answer; the smallest is 1."""
        factors: dict[str, int] = {"price": 1, "sum": 2, "product": MAX_TIMES}
        return max(factors[kind] for kind in self.env_config["kinds"]) * self.env_config["max_price"]

    def tasks(self, count: int, *, seed: int = 0, part: str = "train") -> list[dict[str, Any]]:
        """Draw tasks, with equal numbers of every kind of question.

        Args:
            count: The number of tasks, at least 1.
            seed: The random seed; equal seeds give equal tasks.
            part: ``"train"`` or ``"eval"``, whose tasks are drawn with different seeds.

        Raises:
            ConfigError: ``count`` is not a positive int.
        """
        require("count", count, is_int(1), "a positive int")
        config = self.env_config
        goods: list[str] = config["goods"]
        tasks: list[dict[str, Any]] = []
        for index in range(count):
            kind = config["kinds"][index % len(config["kinds"])]
            task_seed = derive_seed("price list", part, seed, index)
            generator = random.Random(task_seed)
            task = {
                "goods": generator.sample(goods, 2 if kind == "sum" else 1),
                "times": generator.randint(2, MAX_TIMES) if kind == "product" else None,
                "prices": {name: generator.randint(1, config["max_price"]) for name in goods},
                "seed": task_seed,
            }
            tasks.append(task)
        return tasks

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        goods, prices, times = map(cast("Any", task_data.get), ("goods", "prices", "times"))
        are_prices = is_dict(prices) and all(map(is_int(1), prices.values()))
        require("task_data['prices']", prices, lambda _: are_prices, "a dict of positive ints by good", TaskError)
        are_goods = is_list(goods) and len(goods) in (1, 2) and all(good in prices for good in goods)
        require("task_data['goods']", goods, lambda _: are_goods, "a list of one or two goods in 'prices'", TaskError)
        is_factor = or_none(lambda value: is_int(1)(value) and len(goods) == 1)
        require("task_data['times']", times, is_factor, "None, or a positive int if there is only one good", TaskError)

    def _tools(self) -> Any:
        return [SessionTools(tools_class=Till), *super()._tools()]

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> State:
        question = Question(goods=tuple(task_data["goods"]), times=task_data.get("times"))
        task = {**task_data, "question": question.text(), "answer": question.answer(task_data["prices"])}
        return super()._initialize_episode(session_id, task)

    def _step_action(self, session_id: str, state: State, action: Action) -> Stepped:
        next_state, reward, done, info = super()._step_action(session_id, state, action)
        # Random play draws an answer uniformly; optimal play gives the right one.
        config, share = self.env_config, 1.0 / self.max_answer
        random_reward = share * config["answer_reward"] + (1.0 - share) * config["wrong_answer_reward"]
        info = {**info, "random_reward": random_reward, "optimal_reward": config["answer_reward"]}
        return next_state, reward, done, info

    def _system_prompt(self) -> str:
        return _SYSTEM_PROMPT

    def vocabulary_texts(self) -> list[str]:
        """Return texts with every word of the messages and the possible actions, for a word-level tokenizer."""
        goods: list[str] = self.env_config["goods"]
        highest: int = self.env_config["max_price"]
        numbers = range(max(self.max_answer, highest * highest) + 1)  # an agent may multiply any two prices
        questions = [
            Question(goods=(good, other)).text() for good, other in zip(goods, [*goods[1:], goods[0]], strict=True)
        ]
        questions += [Question(goods=(goods[0],), times=times).text() for times in range(2, MAX_TIMES + 1)]
        questions += [Question(goods=(name,)).text() for name in goods]
        calls = [f'<tool_call>{{"name": "price", "arguments": {{"good": "{name}"}}}}</tool_call>' for name in goods]
        calls += [
            f'<tool_call>{{"name": "{name}", "arguments": {{"a": {number}, "b": {number}}}}}</tool_call>'
            for name in ("add", "multiply")
            for number in numbers
        ]
        system = [message["content"] for message in system_messages(self)]
        tools = [schema["function"]["name"] for schema in self.tool_schemas]
        return [text for text in (*system, *tools, *map(str, numbers), *questions, *calls) if text]

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DrawnOptions]) -> Dataset:  # type: ignore[override]
        """Return rows to train on; the options are ``size`` (1000 by default) and ``seed``."""
        return drawn_dataset(cls, env_config, "train", options)

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DrawnOptions]) -> Dataset:  # type: ignore[override]
        """Return rows to evaluate on, drawn with other seeds; otherwise like :meth:`get_train_dataset`."""
        return drawn_dataset(cls, env_config, "eval", options)
