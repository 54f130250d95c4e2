"""Train a small language model to play a TextArena game, with the same code as a large one.

    python examples/textarena.py                                # FrozenLake with a built-in tiny policy, three minutes
    python examples/textarena.py --game GuessTheNumber-v0
    python examples/textarena.py --game Wordle-v0 --model NAME_OR_PATH --max_turn_tokens 512

The tiny policy first imitates a player whose moves are random three times out of four, and then improves by
reinforcement learning. For this policy, FrozenLake and GuessTheNumber are rendered in a few words, since it would learn
much less from the full text in the same time.
The script writes ``summary.json``, ``learning_curve.png``, transcripts and ``model/`` to ``outputs/textarena``. Ctrl-C
ends training early and keeps the policy.
"""

from __future__ import annotations

import itertools
import random
import re
import sys
import time
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
from agentsgym.recipes.from_values import PolicyOptions, parse_options
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
    """Options for the game, the policy and the number of games."""

    game: str = field(default="FrozenLake-v0", metadata={"help": "Id of a TextArena game."})
    opponent: str = field(
        default="random", metadata={"help": "Player of the other seats: random, first, self, or a registered name."}
    )
    max_steps_per_episode: int = field(default=10, metadata={"help": "Maximum number of the agent's moves in a game."})
    num_games: int = field(default=400, metadata={"help": "Number of games in each evaluation."})
    blunders: float = field(default=0.75, metadata={"help": "Fraction of random moves in the imitated games."})
    num_demonstrations: int = field(default=3000, metadata={"help": "Number of games that the tiny policy imitates."})
    warm_start_steps: int = field(default=1500, metadata={"help": "Number of optimizer steps of imitation."})


@dataclass(frozen=True, kw_only=True)
class View:
    """A short rendering of a game's state, for a policy too small to read the original text.

    Attributes:
        render: A function for ``env_config["history"]`` that replaces the conversation so far with one message.
        words: The words of these messages and of the moves.
        moves: A function that takes such a message and returns the best moves and all legal moves.
    """

    render: Callable[[list[Message]], list[Message]]
    words: list[str]
    moves: Callable[[str], tuple[list[str], list[str]]]


def render_bounds(messages: list[Message]) -> list[Message]:
    """Render the numbers between which the secret lies: ``above-5 below-12``."""
    known = re.search(r"above-(\d+) below-(\d+)", messages[0]["content"])  # from earlier turns
    low, high = (int(known[1]), int(known[2])) if known else (0, 21)
    for message, reply in itertools.pairwise(messages):
        number = re.search(r"\d+", message["content"])
        if message["role"] == "assistant" and number and "is higher" in reply["content"]:
            low = max(low, int(number[0]))
        elif message["role"] == "assistant" and number and "is lower" in reply["content"]:
            high = min(high, int(number[0]))
    return [{"role": "user", "content": f"above-{low} below-{high}"}]


def render_lake(messages: list[Message]) -> list[Message]:
    """Render the rows and columns of the player and the holes: ``you-0-0 hole-1-2 hole-2-0 hole-3-1``."""
    board = last_map(messages[-1]["content"])
    places = [(name, *place) for name, letter in LAKE_LETTERS.items() for place in np.argwhere(board == letter)]
    return [{"role": "user", "content": " ".join(f"{name}-{row}-{column}" for name, row, column in places)}]


def number_moves(bounds: str) -> tuple[list[str], list[str]]:
    """Return the middle of the remaining numbers, and all numbers."""
    low, high = map(int, re.findall(r"\d+", bounds))
    return [str((low + high) // 2)], NUMBERS


def lake_moves(lake: str) -> tuple[list[str], list[str]]:
    """Return the moves along a shortest path around the holes, and all moves that stay on the board."""
    places = [(int(row), int(column)) for row, column in re.findall(r"(\d)-(\d)", lake)]
    (row, column), *holes = places
    distance, queue = {(3, 3): 0}, deque([(3, 3)])
    while queue:
        place = queue.popleft()
        for near in ((place[0] - down, place[1] - right) for down, right in STEPS.values()):
            if 0 <= min(near) <= max(near) < 4 and near not in holes and near not in distance:
                distance[near] = distance[place] + 1
                queue.append(near)
    ends = {move: (row + down, column + right) for move, (down, right) in STEPS.items()}
    nearer = [move for move, end in ends.items() if distance.get(end, 1 << 30) < distance[row, column]]
    return nearer, [move for move, end in ends.items() if 0 <= min(end) <= max(end) < 4]


NUMBERS = [str(number) for number in range(1, 21)]
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
LAKE_LETTERS = {"you": "P", "hole": "H"}  # the goal is always in the last corner
PLACES = [f"{row}-{column}" for row in range(4) for column in range(4)]
VIEWS = {
    "GuessTheNumber-v0": View(
        render=render_bounds,
        words=[*NUMBERS, *(f"above-{number}" for number in range(21)), *(f" below-{number}" for number in range(22))],
        moves=number_moves,
    ),
    "FrozenLake-v0": View(
        render=render_lake,
        words=[*STEPS, *(f"you-{place}" for place in PLACES), *(f" hole-{place}" for place in PLACES)],
        moves=lake_moves,
    ),
}


class Blunderer(Agent):
    """Plays some of its moves at random, and the others well.

    Args:
        view: The rendering of the game.
        blunders: The fraction of moves that are drawn from all moves.
        seed: Random seed; each conversation has its own random stream.
    """

    def __init__(self, view: View, blunders: float, seed: int) -> None:
        self.view, self.blunders = view, blunders
        self.seed, self.num_conversations = seed, 0

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        """Play one move; ``agent_state`` is the conversation's random stream."""
        if agent_state is None:
            agent_state = random.Random(derive_seed("blunderer", self.seed, self.num_conversations))
            self.num_conversations += 1
        best_moves, all_moves = self.view.moves(messages[-1]["content"])
        return agent_state.choice(all_moves if agent_state.random() < self.blunders else best_moves), agent_state


def main() -> None:
    """Evaluate, imitate, train, evaluate again, and print the comparison."""
    game, args, model_config = parse_options(GameOptions, output_dir="outputs/textarena", tiny_defaults=tiny_defaults)
    quiet_logging()
    config: dict[str, Any] = {
        "game": game.game,
        "opponent": game.opponent,
        "max_steps_per_episode": game.max_steps_per_episode,
    }
    original = TextArenaEnv(env_config=config)  # the reference players need the original text
    view = VIEWS.get(game.game) if game.model is None else None
    if game.model is None:
        policy = tiny_policy(view.words if view else texts_of(original, args.seed), seed=args.seed)
    else:
        policy = load_policy(game.model, model_config, trust_remote_code=args.trust_remote_code)
    run = TrainingRun(policy, args, model_config, unit="game", overwrite=game.overwrite)
    history: dict[str, Any] = {"history": view.render} if view else {}
    env = TextArenaEnv(run.tokenizer, config | history)
    tasks = make_tasks("evaluation", game.num_games, args.seed)

    reference = known_reference(game, original)
    for name, player in reference_players(reference, original, args.seed).items():
        run.evaluate(name, original, tasks, player, references=reference)
    if game.model is None:  # it imitates a player that mostly blunders, or random play if the game has no view
        seed = derive_seed("demonstrations", args.seed)
        games = make_tasks("demonstrations", game.num_demonstrations, args.seed)
        player = Blunderer(view, game.blunders, seed) if view else LegalAgent(env, seed=seed)
        run.warm_start(run.play("demonstrations", env, games, player), game.warm_start_steps)
    run.evaluate("before", env, tasks, references=reference)
    curve = run.learning_curve(references=["random", "optimal"] if reference else ["random"])
    run.learn(env, TextArenaEnv.get_train_dataset(config, size=20_000, seed=args.seed), callbacks=[curve])
    after = run.evaluate("after", env, tasks, references=reference)

    curve.draw(after=after.win_rate)
    run.write_transcripts("before", "after")
    run.write_summary(cpu_seconds=round(time.process_time(), 1), env_config=config, settings=vars(game))
    print(f"\n{comparison_table(run.evaluations)}\n\n{closing_words(run, game)}")
    sys.exit(run.phases.status)


def tiny_defaults(game: GameOptions) -> dict[str, Any]:
    """Return the default settings of the tiny policy; with a view, each turn has a separate prompt."""
    return {**TINY_DEFAULTS, "layout": "turn" if game.game in VIEWS else "trajectory"}


def make_tasks(purpose: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Create tasks whose seeds differ between purposes."""
    return [{"seed": derive_seed(purpose, seed, number)} for number in range(count)]


def texts_of(env: TextArenaEnv, seed: int) -> list[str]:
    """Return the messages of games played at random."""
    rollouts = env.rollout(make_tasks("words", 300, seed), LegalAgent(env, seed=seed))
    return [message["content"] for rollout in rollouts for message in rollout.messages]


def known_reference(game: GameOptions, env: TextArenaEnv) -> Reference | None:
    """Return the game's exact values, or None if they are unknown."""
    if env.num_players > 1 and game.opponent != "random":
        return None
    with suppress(ConfigError):  # unknown, at least for this number of moves
        return reference_for(game.game, max_steps_per_episode=game.max_steps_per_episode)
    return None


def reference_players(reference: Reference | None, env: TextArenaEnv, seed: int) -> dict[str, Agent]:
    """Return a random player, and an optimal one if the game's values are known."""
    if reference is None:
        return {"random": LegalAgent(env, seed=seed)}
    return {"random": reference.random_player(seed), "optimal": reference.optimal_player(seed)}


def closing_words(run: TrainingRun, game: GameOptions) -> str:
    """Describe the game, the CPU time and where the files are."""
    return (
        f"{game.game}, at most {game.max_steps_per_episode} moves; "
        f"{time.process_time():.0f} s of CPU time. "
        f"Everything is in {run.output}."
    )


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))  # otherwise this file would shadow the package of that name
    main()
