"""Learn text worlds of 20 to 30 turns with one way to give credit after the other: the benchmark of credit, in engines.

::

    python -m benchmarks.credit_worlds --games households --seeds 0     # from the repository's root; needs the extras
    python -m benchmarks.credit_worlds --report                         # alfworld and textworld

As in :mod:`benchmarks.credit` every arm of a game and a seed learns from the same warm start, which imitates
walkthroughs, on the same tasks and the same reward. What is compared is the fraction of games that are solved; the arm
``warm_start`` learns no further. Games are made here, by seed, and played by the real engines.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from agentsgym.envs.ALFWorld import ALFWorldEnv, ReferencePlayer
from agentsgym.envs.ALFWorld.households import generate_households
from agentsgym.envs.ALFWorld.households.rooms import KINDS
from agentsgym.envs.engines import shared_processes
from agentsgym.envs.TextWorld import TextWorldEnv
from agentsgym.envs.TextWorld.engine import TextWorldEngine
from agentsgym.seeding import derive_seed
from agentsgym.tiny import tiny_policy
from benchmarks.credit import WARM_START, Game, main
from benchmarks.credit_watched import Watched

ARMS: Final = (WARM_START, "grpo", "return_to_go", "mt_grpo", "gigpo")
_REMEMBER_MB: Final = 512.0
NOTHING: Final = "Nothing happens."  # what ALFWorld says
_NO_WAY: Final = "You can't go that way."
_HELD_OUT: Final = "held out"
_NUM_NEW: Final = 24
_NOT_TAKEN: Final[dict[str, Any]] = {"text": NOTHING, "took": False}
_HOUSEHOLDS: Final = Path("outputs/credit_worlds/households")
_TITLE = re.compile(r"-= (.*?) =-")
_TASK = re.compile(r"Your task is to: (.*?)\.?$")
_SEEN = re.compile(r"(?:you see|carrying:) ([^.]*)")
_THING = re.compile(r"\w+ \d+")
_WAYS = re.compile(r"\b(north|east|south|west)\b")

Step = tuple[dict[str, Any], float, bool, dict[str, Any]]


class WatchedWorld(Watched):
    """A world, scored by whether it was solved."""

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Step:
        state, reward, done, info = super()._step_episode(session_id, state, action)
        info = {key: value for key, value in info.items() if key != "score"}
        self.last_info[session_id] = info
        return state, reward, done, info

    def anchors(self) -> dict[str, float]:
        """Nothing and all."""
        return {"optimal_reward": 1.0, "random_reward": 0.0}


class WatchedHousehold(WatchedWorld, ALFWorldEnv):
    """A household of ALFWorld's; its engine is not asked about commands that it is known not to take."""

    @property
    def processes(self) -> Any:
        """Answers for the engine where it would say that nothing happens."""
        return _Sparing(super().processes, self.active_states)

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return in_few_words(super()._format_prompt(state, step))


def in_few_words(text: str) -> str:
    """Say what ALFWorld says in as few words as tell the same; tokens are what a small policy's turns cost.

    >>> in_few_words("You arrive at shelf 1. On the shelf 1, you see a mug 1, and a pen 2.")
    'mug 1 pen 2.'
    >>> in_few_words("You arrive at safe 1. The safe 1 is closed."), in_few_words("You open the safe 1.")
    ('closed.', 'done.')
    """
    if text == NOTHING:
        return "no."
    task = _TASK.search(text)
    seen = _SEEN.search(text)
    if seen:
        what = " ".join(_THING.findall(seen[1])) or "nothing"
    else:
        what = "closed" if text.endswith("is closed.") else "done"
    return f"{what}. {task[1]}." if task else f"{what}."


class _Sparing:
    """Processes of engines that are spared what was not among the commands that they named last."""

    def __init__(self, processes: Any, states: Mapping[str, dict[str, Any]]) -> None:
        self.begin, self._step, self.end = processes.begin, processes.step, processes.end
        self._states = states

    def step(self, session_id: str, command: str) -> dict[str, Any]:
        """Play a command; result and errors as of the processes themselves."""
        seen = self._states[session_id]["seen"]
        return self._step(session_id, command) if command in seen["commands"] else seen | _NOT_TAKEN


class QuestEngine(TextWorldEngine):
    """TextWorld's engine, which says rooms in a line, and names its positions, so that they are remembered."""

    def start(self, game: dict[str, Any]) -> dict[str, Any]:
        """Begin a game; arguments, result and errors as of the engine itself."""
        return _told(super().start(game))

    def step(self, command: str) -> dict[str, Any]:
        """Play a command; result and errors as of the engine itself."""
        return _told(super().step(command))


def _told(answer: dict[str, Any]) -> dict[str, Any]:
    """Say a room by its name, its ways out and its coin; leave out the objective, which spells the way to the coin."""
    text = answer["text"]
    title = _TITLE.search(text)
    if title and "cookbook" not in text and "recipe" not in text.lower():
        ways = ", ".join(dict.fromkeys(_WAYS.findall(text[title.end() :])))
        coin = " A coin!" if "coin" in text[title.end() :] else ""
        text = f"{title[1]}: {ways}.{coin}"
    else:
        text = " ".join(text.split())
    return answer | {"text": text, "state_key": answer["key"]}


class WatchedQuest(WatchedWorld, TextWorldEnv):
    """A quest of TextWorld's, whose engine is asked about no command but those that it named."""

    engine = "benchmarks.credit_worlds:QuestEngine"

    def _refusal(self, state: dict[str, Any], command: str) -> str | None:
        return None if command in state["answer"]["admissible"] else _NO_WAY

    def _processes(self) -> Any:
        keys = ("num_processes", "step_timeout_s", "start_timeout_s")
        settings = {key: self.env_config[key] for key in keys}
        return shared_processes(self.engine, remember_mb=_REMEMBER_MB, **settings, **self._process_limits())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World(Game):
    """A game whose tasks are worlds of their own.

    Attributes:
        num_worlds: How many are learned, each several times.
        sizes: Of the tiny model.
        heard: Texts that demonstrations do not hold, for the vocabulary.
    """

    __hash__ = object.__hash__  # what is cached for one is that one's

    num_worlds: int = 120
    sizes: Mapping[str, int] = field(default_factory=lambda: {"max_positions": 4096})
    heard: tuple[str, ...] = ()

    def worlds(self, *, new: bool) -> list[dict[str, Any]]:
        """The worlds that are learned, or new ones, in a fixed order."""
        raise NotImplementedError

    def tasks(self, purpose: str, seed: int, count: int) -> list[dict[str, Any]]:
        """Worlds in a random order, all of them before one comes again."""
        worlds = self.worlds(new=purpose == _HELD_OUT)
        generator = random.Random(derive_seed("worlds", purpose, seed))
        rounds = [generator.sample(worlds, len(worlds)) for _ in range(-(-count // len(worlds)) if worlds else 0)]
        return [
            {**world, "seed": derive_seed("world", purpose, seed, index)}
            for index, world in enumerate([world for one in rounds for world in one][:count])
        ]

    def held_out_tasks(self, seed: int) -> list[dict[str, Any]]:
        """New worlds, once each."""
        return self.tasks(_HELD_OUT, seed, len(self.worlds(new=True)))

    def policy(self, seed: int) -> tuple[Any, Any]:
        """Make the model, and a tokenizer that knows the words of all worlds."""
        return tiny_policy(_texts(self), seed=seed, **self.sizes)


@cache
def _texts(world: World) -> list[str]:
    env = world.make()
    tasks = [{**one, "seed": 0} for new in (False, True) for one in world.worlds(new=new)[:40]]
    played = env.rollout(tasks, world.demonstrator(env, 0))
    return sorted({message["content"] for game in played for message in game.messages} | {*world.heard})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Households(World):
    """Generated households of ALFWorld's.

    Attributes:
        size: Of the households.
    """

    size: str = "tiny"
    task_types: tuple[str, ...] = ()

    def worlds(self, *, new: bool) -> list[dict[str, Any]]:
        """Those of the split for training, or of that with other rooms and combinations."""
        folder = _households(self.size, self.num_worlds)
        games = sorted((folder / "json_2.1.1" / ("valid_unseen" if new else "train")).glob("*/*/game.tw-pddl"))
        return [{"game": str(game.relative_to(folder)), "task_type": game.parts[-3].split("-")[0]} for game in games]

    def make(self, tokenizer: Any = None, *, paid: str = "turns") -> Watched:
        """The environment."""
        env = self.env_class(tokenizer, {**self.env_config, "data": str(_households(self.size, self.num_worlds))})
        env.last_info = {}
        return env


@cache
def _households(size: str, num_worlds: int) -> Path:
    folder = _HOUSEHOLDS.resolve() / f"{size}-{num_worlds}"
    if not folder.exists():
        generate_households(folder, {"train": num_worlds, "valid_unseen": _NUM_NEW}, size=size)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quests(World):
    """Quests of TextWorld's, told apart by the seeds that they are made from."""

    def worlds(self, *, new: bool) -> list[dict[str, Any]]:
        """Seeds."""
        first, count = (10_000, _NUM_NEW) if new else (0, self.num_worlds)
        return [{"game_seed": first + index} for index in range(count)]


def _reference_player(env: Any, seed: int) -> Any:
    return env.reference_player(seed)


#: What is in households, as the game calls it.
_NAMES: Final = tuple(
    f"take {name.lower()} {number} from {name.lower()} {number}"
    for kind in KINDS.values()
    for name in (*kind.objects, *kind.receptacles, *kind.appliances)
    for number in range(1, 4)
)
_SHORT: Final = {"system_prompt": "", "num_processes": 1}

GAMES: Final[Mapping[str, Game]] = {
    "households": Households(
        env_class=WatchedHousehold,
        env_config={
            **_SHORT,
            "max_steps_per_episode": 20,
            "show_commands": False,
            "reward": "progress",
            "remember_mb": _REMEMBER_MB,
        },
        demonstrator=ReferencePlayer,
        num_demonstrations=360,
        warm_start_steps=700,
        num_worlds=360,
        heard=("no.", "closed.", "done.", "nothing.", *_NAMES),
        num_episodes=1536,
        batch_size=64,
        num_updates=4,
        learning_rate=2e-4,
        num_evaluated=192,
    ),
    "coin_collector": Quests(
        env_class=WatchedQuest,
        env_config={
            **_SHORT,
            "max_steps_per_episode": 30,
            "kind": "coin_collector",
            "options": {"level": 20},
            "admissible_commands": False,
            "progress_share": 0.5,
        },
        demonstrator=_reference_player,
        num_demonstrations=24,
        warm_start_steps=60,
        num_worlds=24,
        heard=(_NO_WAY,),
        num_episodes=2560,
        batch_size=64,
        num_updates=8,
        learning_rate=2e-4,
        num_evaluated=96,
    ),
    "cooking": Quests(
        env_class=WatchedQuest,
        env_config={
            **_SHORT,
            "max_steps_per_episode": 20,
            "kind": "cooking",
            "options": {"recipe": 1, "take": 1, "cook": True, "cut": True},
            "admissible_commands": False,
        },
        demonstrator=_reference_player,
        num_demonstrations=24,
        warm_start_steps=400,
        num_worlds=24,
        heard=(_NO_WAY,),
        num_episodes=1536,
        batch_size=64,
        num_updates=8,
        learning_rate=2e-4,
        num_evaluated=192,
    ),
}

if __name__ == "__main__":
    main(GAMES, ARMS, "outputs/credit_worlds")
