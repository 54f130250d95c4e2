"""Take orders, hear remarks, and serve: what was ordered must survive in the notes that replace the history."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.contract import State
from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.datasets.options import DrawnOptions, Part, checked_options, dataset_of, drawn_options
from agentsgym.envs.Waiter import SPEC
from agentsgym.errors import ConfigError
from agentsgym.fields import Field, is_int, is_strings
from agentsgym.seeding import derive_seed

if TYPE_CHECKING:
    from datasets import Dataset

REMARKS = ("It rains.", "What a day!", "The music is nice.", "Is it late?")


def _words(default: list[str], at_least: int) -> Field:
    return Field(
        default=default,
        expected=f"a list of at least {at_least} different words",
        valid=lambda value: (
            is_strings(value) and len({*value}) == len(value) >= at_least and all(map(str.isalpha, value))
        ),
    )


class WaiterEnv(MultistepEnv):
    """Take each guest's order, hear remarks, and serve the guests in another order: a right drink gives a reward.

    The reward of a right drink is 1 divided by the number of guests, and ``info["right"]`` is the fraction served
    right. By default, the history is replaced by a note once it exceeds 30 tokens (``history="summarize"``), so that
    only what the agent has noted can be served. A task is its seed.

    Keys of ``env_config`` in addition to the common ones:

    - ``guests``: the names of the guests.
    - ``drinks``: what they may order.
    - ``num_remarks``: the number of remarks between the orders and the serving.
    """

    spec = SPEC
    config_fields: ClassVar[Mapping[str, Field]] = {
        "guests": _words(["Anna", "Ben", "Clara"], 1),
        "drinks": _words(["tea", "coffee", "juice", "water"], 2),
        "num_remarks": Field(default=4, expected="a non-negative int", valid=is_int(0)),
    }
    default_config: ClassVar[Mapping[str, Any]] = {
        "max_steps_per_episode": 10,
        "system_prompt": "",
        "history": "summarize",
        "summarize_over_tokens": 30,
        "summary_prompt": "Note the orders.",
    }

    def _check_config(self, config: dict[str, Any]) -> None:
        needed = 2 * len(config["guests"]) + config["num_remarks"]
        if config["max_steps_per_episode"] < needed:
            raise ConfigError(
                "env_config['max_steps_per_episode'] must allow a turn for each order, remark and guest to serve, "
                f"{needed}, got {config['max_steps_per_episode']}"
            )

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> State:
        generator, config = self.rng(session_id), self.env_config
        orders = {guest: generator.choice(config["drinks"]) for guest in config["guests"]}
        remarks = [generator.choice(REMARKS) for _ in range(config["num_remarks"])]
        served = generator.sample(config["guests"], len(orders))
        lines = [*(f"{guest} orders {drink}." for guest, drink in orders.items()), *remarks]
        return {
            "done": False,
            "step": 0,
            "right": 0,
            "orders": orders,
            "lines": [*lines, *(f"{one}?" for one in served)],
        }

    def _format_prompt(self, state: State, step: int) -> str:
        return state["lines"][step]

    def _step_episode(self, session_id: str, state: State, action: str) -> tuple[State, float, bool, dict[str, Any]]:
        orders, lines = state["orders"], state["lines"]
        is_right = action.strip() == orders.get(lines[state["step"]].removesuffix("?"))
        step, right = state["step"] + 1, state["right"] + is_right
        info = {
            "right": right / len(orders),
            "success": right == len(orders),
            "random_reward": 1 / len(self.env_config["drinks"]),
            "optimal_reward": 1.0,
        }
        return {**state, "step": step, "right": right}, is_right / len(orders), step == len(lines), info

    def _state_key(self, state: State) -> Hashable:
        return state["step"]

    def vocabulary_texts(self) -> list[str]:
        """Return texts with every word of the messages and of the answers, for a word-level tokenizer."""
        config = self.env_config
        pairs = [(guest, drink) for guest in config["guests"] for drink in config["drinks"]]
        orders = [f"{guest} orders {drink}." for guest, drink in pairs]
        # Words are tokens with the space before them, if there is one.
        notes = [" ".join([*pairs[0], *pair]) for pair in pairs]
        calls = [f"{guest}?" for guest in config["guests"]]
        return [*orders, *notes, *config["drinks"], *calls, *REMARKS, "ok", config["summary_prompt"]]

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DrawnOptions]) -> Dataset:  # type: ignore[override]
        """Return rows to train on; the options are ``size`` (1000 by default) and ``seed``."""
        return cls._rows("train", env_config, options)

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DrawnOptions]) -> Dataset:  # type: ignore[override]
        """Return rows to evaluate on, drawn with other seeds; otherwise like :meth:`get_train_dataset`."""
        return cls._rows("eval", env_config, options)

    @classmethod
    def _rows(cls, part: Part, env_config: dict[str, Any] | None, options: Mapping[str, Any]) -> Dataset:
        settings = checked_options(options, drawn_options(1000))
        seeds = (derive_seed("waiter", part, settings["seed"], index) for index in range(settings["size"]))
        return dataset_of([{"seed": seed} for seed in seeds], class_path(cls), env_config)
