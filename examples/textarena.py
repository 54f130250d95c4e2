"""Train a small language model to play a game of TextArena's, through the same code as a large one.

    python examples/textarena.py                                # FrozenLake, an embedded policy, three minutes
    python examples/textarena.py --game GuessTheNumber-v0
    python examples/textarena.py --game Wordle-v0 --model NAME_OR_PATH --max_turn_tokens 512

The embedded policy first imitates a player whose moves are random three times out of four, and then learns by playing.
FrozenLake and GuessTheNumber are told to it in few words, which decides how much it learns in that time. The run writes
``summary.json``, ``learning_curve.png``, transcripts and ``model/`` to ``outputs/textarena``. Ctrl-C keeps the policy
as it is then.
"""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agentsgym import Agent, ConfigError, Message, TrainingRun, tiny_policy
from agentsgym.envs.TextArena import LegalAgent, TextArenaEnv
from agentsgym.envs.TextArena.references import Reference, reference_for
from agentsgym.envs.TextArena.references.frozen_lake import last_map
from agentsgym.recipes.command_line import PolicyOptions, parse_options
from agentsgym.recipes.scripts import load_policy, quiet_logging
from agentsgym.reports.tables import comparison_table
from agentsgym.seeding import derive_seed

TINY_DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "max_steps": 800,
    "per_device_train_batch_size": 32,
    "steps_per_generation": 2,
    "num_generations": 8,
    "max_turn_tokens": 3,
}


@dataclass
class GameOptions(PolicyOptions):
    """The game, the policy, and how much to play."""

    game: str = field(default="FrozenLake-v0", metadata={"help": "Any id of TextArena's."})
    opponent: str = field(default="random", metadata={"help": "Who plays the other seats."})
    max_steps_per_episode: int = field(default=10, metadata={"help": "The agent's moves in a game at most."})
    num_games: int = field(default=400, metadata={"help": "Games of each evaluation."})
    blunders: float = field(default=0.75, metadata={"help": "Share of random moves in what the tiny policy imitates."})
    num_demonstrations: int = field(default=3000, metadata={"help": "Games that the tiny policy imitates first."})
    warm_start_steps: int = field(default=1500, metadata={"help": "Optimizer steps of that imitation."})


@dataclass(frozen=True, kw_only=True)
class Brief:
    """A game in few words, for a policy too small to read the game's own.

    Attributes:
        tell: Sums up the conversation so far in one message; it is what ``env_config["history"]`` takes.
        words: Every word that it uses.
        moves: The best moves and all moves, by what is told.
    """

    tell: Callable[[list[Message]], list[Message]]
    words: list[str]
    moves: Callable[[str], tuple[list[str], list[str]]]


def tell_guesses(messages: list[Message]) -> list[Message]:
    """Tell between which numbers the secret lies: ``above-5 below-12``."""
    told = re.search(r"above-(\d+) below-(\d+)", messages[0]["content"])  # what is rewritten stays so
    low, high = (int(told[1]), int(told[2])) if told else (0, 21)
    for said, heard in itertools.pairwise(messages):
        number = re.search(r"\d+", said["content"])
        if said["role"] == "assistant" and number and "is higher" in heard["content"]:
            low = max(low, int(number[0]))
        elif said["role"] == "assistant" and number and "is lower" in heard["content"]:
            high = min(high, int(number[0]))
    return [{"role": "user", "content": f"above-{low} below-{high}"}]


def tell_lake(messages: list[Message]) -> list[Message]:
    """Tell where the player and the holes are, by row and column: ``you-0-0 hole-1-2 hole-2-0 hole-3-1``."""
    board = last_map(messages[-1]["content"])
    places = [(name, *place) for name, letter in LAKE_LETTERS.items() for place in np.argwhere(board == letter)]
    return [{"role": "user", "content": " ".join(f"{name}-{row}-{column}" for name, row, column in places)}]


def guesses(told: str) -> tuple[list[str], list[str]]:
    """The middle of what is left; any number."""
    low, high = map(int, re.findall(r"\d+", told))
    return [str((low + high) // 2)], NUMBERS


def steps(told: str) -> tuple[list[str], list[str]]:
    """The steps along a shortest way around the holes; those that stay on the board."""
    places = [(int(row), int(column)) for row, column in re.findall(r"(\d)-(\d)", told)]
    (row, column), *holes = places
    distance, queue = {(3, 3): 0}, deque([(3, 3)])
    while queue:
        there = queue.popleft()
        for near in ((there[0] - down, there[1] - right) for down, right in STEPS.values()):
            if 0 <= min(near) <= max(near) < 4 and near not in holes and near not in distance:
                distance[near] = distance[there] + 1
                queue.append(near)
    ends = {move: (row + down, column + right) for move, (down, right) in STEPS.items()}
    nearer = [move for move, end in ends.items() if distance.get(end, 1 << 30) < distance[row, column]]
    return nearer, [move for move, end in ends.items() if 0 <= min(end) <= max(end) < 4]


NUMBERS = [str(number) for number in range(1, 21)]
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
LAKE_LETTERS = {"you": "P", "hole": "H"}  # the goal is always in the last corner
PLACES = [f"{row}-{column}" for row in range(4) for column in range(4)]
BRIEFS = {
    "GuessTheNumber-v0": Brief(
        tell=tell_guesses,
        words=[*NUMBERS, *(f"above-{number}" for number in range(21)), *(f" below-{number}" for number in range(22))],
        moves=guesses,
    ),
    "FrozenLake-v0": Brief(
        tell=tell_lake,
        words=[*STEPS, *(f"you-{place}" for place in PLACES), *(f" hole-{place}" for place in PLACES)],
        moves=steps,
    ),
}


class Blunderer(Agent):
    """Plays well now and then, and any move else.

    Args:
        brief: Tells it the game.
        blunders: The fraction of moves that are drawn from all.
        seed: Makes the random stream of every conversation.
    """

    def __init__(self, brief: Brief, blunders: float, seed: int) -> None:
        self.brief, self.blunders = brief, blunders
        self.seed, self.num_conversations = seed, 0

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        """Play one move; ``agent_state`` is the conversation's random stream."""
        if agent_state is None:
            agent_state = random.Random(derive_seed("blunderer", self.seed, self.num_conversations))
            self.num_conversations += 1
        best, every = self.brief.moves(messages[-1]["content"])
        return agent_state.choice(every if agent_state.random() < self.blunders else best), agent_state


def main() -> None:
    """Evaluate, imitate, train, evaluate again, and print the comparison."""
    game, args, model_config = parse_options(GameOptions, output_dir="outputs/textarena", tiny_defaults=tiny_defaults)
    quiet_logging()
    config: dict[str, Any] = {
        "game": game.game,
        "opponent": game.opponent,
        "max_steps_per_episode": game.max_steps_per_episode,
    }
    table = TextArenaEnv(env_config=config)  # where the references read the game's own words
    brief = BRIEFS.get(game.game) if game.model is None else None
    if game.model is None:
        policy = tiny_policy(brief.words if brief else words_of(table, args.seed), seed=args.seed)
    else:
        policy = load_policy(game.model, model_config, trust_remote_code=args.trust_remote_code)
    run = TrainingRun(policy, args, model_config, unit="game")
    told: dict[str, Any] = {"history": brief.tell} if brief else {}
    env = TextArenaEnv(run.tokenizer, config | told)
    tasks = make_tasks("evaluation", game.num_games, args.seed)

    reference = known_reference(game, table)
    for name, player in reference_players(reference, table, args.seed).items():
        run.evaluate(name, table, tasks, player, references=reference)
    if game.model is None:  # it imitates a player that mostly blunders, or random play where no brief tells the moves
        seed = derive_seed("demonstrations", args.seed)
        shown = make_tasks("demonstrations", game.num_demonstrations, args.seed)
        player = Blunderer(brief, game.blunders, seed) if brief else LegalAgent(env, seed=seed)
        run.warm_start(run.play("demonstrations", env, shown, player), game.warm_start_steps)
    run.evaluate("before", env, tasks, references=reference)
    curve = run.learning_curve(references=["random", "optimal"] if reference else ["random"])
    run.learn(env, TextArenaEnv.get_train_dataset(config, size=20_000, seed=args.seed), callbacks=[curve])
    after = run.evaluate("after", env, tasks, references=reference)

    curve.draw(after=after.win_rate)
    run.write_transcripts("before", "after")
    run.write_summary(cpu_seconds=run.phases.cpu_seconds, env_config=config, settings=vars(game))
    print(f"\n{comparison_table(run.evaluations)}\n\n{closing_words(run, game)}")
    sys.exit(run.phases.status)


def tiny_defaults(game: GameOptions) -> dict[str, Any]:
    """The settings of the embedded policy: what is told anew each turn is a prompt each turn."""
    return {**TINY_DEFAULTS, "layout": "turn" if game.game in BRIEFS else "trajectory"}


def make_tasks(purpose: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Make tasks that share no seed with those of another purpose, but by chance."""
    return [{"seed": derive_seed(purpose, seed, number)} for number in range(count)]


def words_of(table: TextArenaEnv, seed: int) -> list[str]:
    """What a game and random play say."""
    rollouts = table.rollout(make_tasks("words", 300, seed), LegalAgent(table, seed=seed))
    return [message["content"] for rollout in rollouts for message in rollout.messages]


def known_reference(game: GameOptions, table: TextArenaEnv) -> Reference | None:
    """The game's exact values, if they are known."""
    if table.num_players > 1 and game.opponent != "random":
        return None
    with suppress(ConfigError):  # none is known, or not for so few moves
        return reference_for(game.game, max_steps_per_episode=game.max_steps_per_episode)
    return None


def reference_players(reference: Reference | None, table: TextArenaEnv, seed: int) -> dict[str, Agent]:
    """Those who play at random, and as well as can be where that is known."""
    if reference is None:
        return {"random": LegalAgent(table, seed=seed)}
    return {"random": reference.random_player(seed), "optimal": reference.optimal_player(seed)}


def closing_words(run: TrainingRun, game: GameOptions) -> str:
    """Say what was played, what it took, and where the files are."""
    return (
        f"{game.game}, at most {game.max_steps_per_episode} moves; "
        f"{sum(run.phases.cpu_seconds.values()):.0f} s of processor time. "
        f"Everything is in {run.output}: summary.json, learning_curve.png, transcripts_*.txt, model/"
    )


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))  # else this file hides the package of the same name
    main()
