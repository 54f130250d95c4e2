"""A waiter's orders, which must survive in notes: an environment of one's own, with its players and its datasets.

    agentsgym check examples/waiter.py
    agentsgym eval examples/waiter.py --agent random
    agentsgym play examples/waiter.py

docs/notes.md explains the environment, and benchmarks/notes.py trains on it.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from agentsgym import ConfigError, Field, MultistepEnv, TaskError, TurnRequest
from agentsgym.agents.scripted_player import Notes, ScriptedPlayer
from agentsgym.envs.contract import State
from agentsgym.envs.datasets.options import DrawnOptions, Part, drawn_dataset
from agentsgym.fields import is_fraction, is_int, is_strings, require
from agentsgym.seeding import derive_seed
from agentsgym.texts import shown

if TYPE_CHECKING:
    from datasets import Dataset

REMARKS = ("It rains.", "What a day!", "The music is nice.", "Is it late?")
_SYSTEM_PROMPT = "You are a waiter. Answer ok until a guest's name is called, then answer the ordered drink."


def _words(*default: str) -> Field:
    return Field(
        default=list(default),
        expected="a list of two or more different words",
        valid=lambda value: is_strings(value) and len({*value}) == len(value) >= 2 and all(map(str.isalpha, value)),
    )


class WaiterEnv(MultistepEnv):
    """Take each guest's order, hear remarks, and serve the guests in another order: a right drink gives a reward.

    The reward of a right drink is 1 divided by the number of guests, and ``info["right"]`` is the fraction served
    right. By default, the history is replaced by a note once it exceeds 46 tokens (``history="summarize"``), so that
    only what the agent has noted can be served. A task is ``{"orders": {"Anna": "tea", "Ben": "juice", "Clara": "tea"},
    "seed": 3}``; the seed determines the remarks and the order of serving. :meth:`tasks` draws such tasks.

    Keys of ``env_config`` in addition to the common ones:

    - ``guests``: the names of the guests.
    - ``drinks``: what they may order.
    - ``num_remarks``: the number of remarks between the orders and the serving.
    """

    config_fields: ClassVar[Mapping[str, Field]] = {
        "guests": _words("Anna", "Ben", "Clara"),
        "drinks": _words("tea", "coffee", "juice", "water"),
        "num_remarks": Field(default=4, expected="a non-negative int", valid=is_int(0)),
    }
    default_config: ClassVar[Mapping[str, Any]] = {
        "max_steps_per_episode": 10,
        "history": "summarize",
        "summarize_over_tokens": 46,
        "summary_prompt": "Note the orders.",
    }
    task_fields = ("orders",)

    def _check_config(self, config: dict[str, Any]) -> None:
        needed = 2 * len(config["guests"]) + config["num_remarks"]
        if config["max_steps_per_episode"] < needed:
            raise ConfigError(
                "env_config['max_steps_per_episode'] must allow a turn for each order, remark and guest to serve, "
                f"{needed}, got {config['max_steps_per_episode']}"
            )

    def tasks(self, count: int, *, seed: int = 0, part: Part = "train") -> list[dict[str, Any]]:
        """Draw tasks; no combination of orders is in both parts.

        The indices of the drinks sum to a multiple of the number of drinks in ``"eval"``, and never in ``"train"``.

        Args:
            count: The number of tasks, at least 1.
            seed: The random seed; equal seeds give equal tasks.
            part: ``"train"`` or ``"eval"``.

        Raises:
            ConfigError: ``count`` is not a positive int.
        """
        require("count", count, is_int(1), "a positive int")
        guests, drinks = self.env_config["guests"], self.env_config["drinks"]
        tasks: list[dict[str, Any]] = []
        for index in range(count):
            task_seed = derive_seed("waiter", part, seed, index)
            generator = random.Random(task_seed)
            places = [generator.randrange(len(drinks)) for _ in guests[1:]]
            remainder = 0 if part == "eval" else generator.randrange(1, len(drinks))
            places.append((remainder - sum(places)) % len(drinks))
            orders = {guest: drinks[place] for guest, place in zip(guests, places, strict=True)}
            tasks.append({"orders": orders, "seed": task_seed})
        return tasks

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        orders, guests, drinks = task_data.get("orders"), self.env_config["guests"], self.env_config["drinks"]
        if (
            not isinstance(orders, Mapping)
            or {*orders} != {*guests}
            or any(drink not in drinks for drink in orders.values())
        ):
            raise TaskError(
                f"task_data['orders'] must map each of {', '.join(guests)} to one of {', '.join(drinks)}, "
                f"got {shown(orders)}"
            )

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> State:
        generator, config = self.rng(session_id), self.env_config
        orders = {guest: task_data["orders"][guest] for guest in config["guests"]}
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

    def _system_prompt(self) -> str:
        return _SYSTEM_PROMPT

    def vocabulary_texts(self) -> list[str]:
        """Return texts with every word of the messages and of the answers, for a word-level tokenizer."""
        config = self.env_config
        pairs = [(guest, drink) for guest in config["guests"] for drink in config["drinks"]]
        orders = [f"{guest} orders {drink}." for guest, drink in pairs]
        # Words are tokens with the space before them, if there is one.
        notes = [" ".join([*pairs[0], *pair]) for pair in pairs]
        calls = [f"{guest}?" for guest in config["guests"]]
        system = _SYSTEM_PROMPT if config["system_prompt"] is None else config["system_prompt"]
        texts = (system, *orders, *notes, *config["drinks"], *calls, *REMARKS, "ok", config["summary_prompt"])
        return [text for text in texts if text]

    def random_player(self, seed: int = 0) -> ReferencePlayer:
        """Create the player that notes and serves any drink."""
        return RandomPlayer(self, seed)

    def reference_player(self, seed: int = 0) -> ReferencePlayer:
        """Create the player that plays optimally."""
        return ReferencePlayer(self, seed)

    def imitation_player(self, seed: int = 0) -> ReferencePlayer:
        """Create the demonstrator for a warm start."""
        return ImitationPlayer(self, seed)

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DrawnOptions]) -> Dataset:  # type: ignore[override]
        """Return rows to train on; the options are ``size`` (1000 by default) and ``seed``."""
        return drawn_dataset(cls, env_config, "train", options)

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DrawnOptions]) -> Dataset:  # type: ignore[override]
        """Return rows to evaluate on, with other orders; otherwise like :meth:`get_train_dataset`."""
        return drawn_dataset(cls, env_config, "eval", options)


class ReferencePlayer(ScriptedPlayer[Notes]):
    """Plays optimally: notes every order, and serves what the note contains."""

    def __init__(self, env: WaiterEnv, seed: int = 0) -> None:
        super().__init__(env, seed)
        self._guests: list[str] = env.env_config["guests"]
        self._drinks: list[str] = env.env_config["drinks"]
        self._summary_prompt: str = env.env_config["summary_prompt"]

    def _begin(self, request: TurnRequest, generator: random.Random) -> Notes:
        return Notes(generator=generator)

    def _play(self, request: TurnRequest, notes: Notes) -> str:
        last = request.messages[-1]["content"]
        orders = self._known_orders([message["content"] for message in request.messages])
        if last == self._summary_prompt:
            return " ".join(f"{guest} {self._noted(orders.get(guest), notes.generator)}" for guest in self._guests)
        guest = last.removesuffix("?")
        return self._served(orders.get(guest), notes.generator) if guest in self._guests else "ok"

    def _known_orders(self, texts: list[str]) -> dict[str, str]:
        orders: dict[str, str] = {}
        for words in (text.split() for text in texts):
            if words[1:2] == ["orders"]:
                orders[words[0]] = words[2].removesuffix(".")
            elif len(words) == 2 * len(self._guests) and words[::2] == self._guests:
                orders |= dict(zip(words[::2], words[1::2], strict=True))
        return orders

    def _noted(self, drink: str | None, generator: random.Random) -> str:
        return drink or generator.choice(self._drinks)

    def _served(self, drink: str | None, generator: random.Random) -> str:
        return drink or generator.choice(self._drinks)


class RandomPlayer(ReferencePlayer):
    """Notes and serves any drink."""

    def _noted(self, drink: str | None, generator: random.Random) -> str:
        return generator.choice(self._drinks)

    def _served(self, drink: str | None, generator: random.Random) -> str:
        return generator.choice(self._drinks)


class ImitationPlayer(ReferencePlayer):
    """The demonstrator for a warm start: serves what the note contains, but notes any drink in a fraction of cases.

    Args:
        env: The environment, as in :class:`ReferencePlayer`.
        seed: The seed, as in :class:`ReferencePlayer`.
        noise: This fraction, in [0, 1].
    """

    def __init__(self, env: WaiterEnv, seed: int = 0, *, noise: float = 0.3) -> None:
        super().__init__(env, seed)
        require("noise", noise, is_fraction, "a number in [0, 1]")
        self._noise = noise

    def _noted(self, drink: str | None, generator: random.Random) -> str:
        return super()._noted(None if generator.random() < self._noise else drink, generator)
