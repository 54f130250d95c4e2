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
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final

from agentsgym.envs.ALFWorld import ALFWorldEnv, ReferencePlayer
from agentsgym.envs.players import reference_player
from agentsgym.envs.shared.engines import shared_processes
from agentsgym.envs.TextWorld import TextWorldEnv
from agentsgym.envs.TextWorld.engine import TextWorldEngine
from agentsgym.seeding import derive_seed
from agentsgym.tiny import tiny_policy
from benchmarks import world_texts
from benchmarks.credit import WARM_START, Game, main
from benchmarks.credit_watched import Watched
from tools.households import generate_households
from tools.households.rooms import KINDS

ARMS: Final = (WARM_START, "grpo", "return_to_go", "mt_grpo", "gigpo")
_CACHE_MB: Final = 512.0
_HELD_OUT: Final = "held out"
_NUM_NEW: Final = 24
_NOT_TAKEN: Final[dict[str, Any]] = {"text": world_texts.NOTHING, "understood": False}
_HOUSEHOLDS: Final = Path("outputs/credit_worlds/households")

Step = tuple[dict[str, Any], float, bool, dict[str, Any]]


class WatchedWorld(Watched):
    """A world, scored by whether it was solved."""

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Step:
        state, reward, done, info = super()._step_episode(session_id, state, action)
        info = {key: value for key, value in info.items() if key != "score"}
        self.last_info[session_id] = info
        return state, reward, done, info

    def anchors(self) -> dict[str, float]:
        """Nothing and all: random play, of commands that a game takes, won 0 of 960 quests and 4 of 480 households."""
        return {"optimal_reward": 1.0, "random_reward": 0.0}


class WatchedHousehold(WatchedWorld, ALFWorldEnv):
    """A household of ALFWorld; commands that its engine is known to reject are not sent to it."""

    def _processes(self) -> Any:
        """Answers for the engine where it would print that nothing happens."""
        return _Sparing(super()._processes(), self.active_states)

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return world_texts.of_household(super()._format_prompt(state, step))


class _Sparing:
    """Processes of engines that are spared what was not among the commands that they named last."""

    def __init__(self, processes: Any, states: Mapping[str, dict[str, Any]]) -> None:
        self.begin, self._step, self.end = processes.begin, processes.step, processes.end
        self._states = states

    def step(self, session_id: str, command: str) -> dict[str, Any]:
        """Play a command; result and errors as of the processes themselves."""
        seen = self._states[session_id.partition(" ")[2]]["response"]  # behind the environment's own name
        return self._step(session_id, command) if command in seen["admissible"] else seen | _NOT_TAKEN


class _KeyedEngine(TextWorldEngine):
    """TextWorld's engine with shorter texts, and keys of its positions, so that answers are cached."""

    def start(self, game: dict[str, Any]) -> dict[str, Any]:
        """Begin a game; arguments, result and errors as of the engine itself."""
        return self._told(super().start(game))

    def step(self, command: str) -> dict[str, Any]:
        """Play a command; result and errors as of the engine itself."""
        return self._told(super().step(command))

    def _told(self, answer: dict[str, Any]) -> dict[str, Any]:
        return answer | {"text": self.say(answer), "state_key": answer["key"]}

    def say(self, answer: dict[str, Any]) -> str:
        """Shorten the text of an answer."""
        raise NotImplementedError


class MazeEngine(_KeyedEngine):
    """The engine of coin collectors."""

    def say(self, answer: dict[str, Any]) -> str:
        """Say a room in a line."""
        return world_texts.of_maze(answer["text"])


class KitchenEngine(_KeyedEngine):
    """The engine of kitchens."""

    def say(self, answer: dict[str, Any]) -> str:
        """Say what lies where, or the recipe."""
        return world_texts.of_kitchen(answer["text"], answer["admissible"])


class WatchedQuest(WatchedWorld, TextWorldEnv):
    """A quest of TextWorld, whose engine only receives commands that it listed."""

    refusal: ClassVar[str]

    def _rejection_reason(self, state: dict[str, Any], command: str) -> str | None:
        return None if command in state["response"]["admissible"] else self.refusal

    def _processes(self) -> Any:
        keys = ("num_processes", "step_timeout_s", "start_timeout_s")
        settings = {key: self.env_config[key] for key in keys}
        return shared_processes(self.engine, cache_mb=_CACHE_MB, **settings, **self._process_limits())


class WatchedMaze(WatchedQuest):
    """A coin collector."""

    engine = "benchmarks.credit_worlds:MazeEngine"
    refusal = "You can't go that way."


class WatchedKitchen(WatchedQuest):
    """A recipe to be cooked."""

    engine = "benchmarks.credit_worlds:KitchenEngine"
    refusal = " no ;"


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
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent))
        generate_households(partial, {"train": num_worlds, "valid_unseen": _NUM_NEW}, size=size, searching=True)
        if folder.exists():  # another process was faster, and came to the same
            shutil.rmtree(partial)
        else:
            partial.rename(folder)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quests(World):
    """Quests of TextWorld, identified by the seeds that generate them."""

    def worlds(self, *, new: bool) -> list[dict[str, Any]]:
        """Seeds."""
        first, count = (10_000, _NUM_NEW) if new else (0, self.num_worlds)
        return [{"game_seed": first + index} for index in range(count)]


#: What is in households, as the game calls it.
_NAMES: Final = tuple(
    f"take {name.lower()} {number} from {name.lower()} {number} ; {name.lower()} {number}"
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
            "show_commands": "none",
            "reward": "progress",
            "rejected_is_invalid": True,
            "error_allowance": 1,
            "cache_mb": _CACHE_MB,
        },
        demonstrator=ReferencePlayer,
        num_demonstrations=24,
        warm_start_steps=120,
        num_worlds=24,
        heard=(" no ;", " closed ;", " done ;", " nothing ;", *_NAMES),
        num_episodes=15360,
        batch_size=64,
        num_updates=2,
        learning_rate=3e-4,
        num_evaluated=192,
    ),
    "coin_collector": Quests(
        env_class=WatchedMaze,
        env_config={
            **_SHORT,
            "max_steps_per_episode": 30,
            "kind": "coin_collector",
            "options": {"level": 20},
            "admissible_commands": False,
            "progress_share": 0.5,
        },
        demonstrator=reference_player,
        num_demonstrations=24,
        warm_start_steps=90,
        num_worlds=24,
        heard=(WatchedMaze.refusal,),
        num_episodes=2560,
        batch_size=64,
        num_updates=8,
        learning_rate=2e-4,
        num_evaluated=96,
    ),
    "cooking": Quests(
        env_class=WatchedKitchen,
        env_config={
            **_SHORT,
            "max_steps_per_episode": 20,
            "kind": "cooking",
            "options": {"recipe": 1, "take": 1, "cook": True, "cut": True},
            "admissible_commands": False,
        },
        demonstrator=reference_player,
        num_demonstrations=96,
        warm_start_steps=160,
        num_worlds=96,
        heard=(WatchedKitchen.refusal,),
        num_episodes=5120,
        batch_size=64,
        num_updates=1,
        learning_rate=1e-3,
        num_evaluated=192,
    ),
}

if __name__ == "__main__":
    main(GAMES, ARMS, "outputs/credit_worlds")
