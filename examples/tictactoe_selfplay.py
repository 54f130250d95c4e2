"""Let a small language model learn tic-tac-toe by playing against itself, with the same code as a large one.

    python examples/tictactoe_selfplay.py                     # a built-in tiny policy, minutes on a laptop CPU
    python examples/tictactoe_selfplay.py --model NAME_OR_PATH --max_turn_tokens 512

One policy plays both seats of TextArena's TicTacToe, each with its own reward. The tiny policy first imitates random
legal play, so that it knows the rules but no strategy; it learns everything else from its own games. Before and
after training it is rated against random play and against play that never loses, both as O (who moves first) and as X.
The script writes ``summary.json``, transcripts of rated games and ``model/`` to ``outputs/tictactoe_selfplay``.
"""

from __future__ import annotations

import itertools
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from agentsgym import Agent, Message, TrainingRun, evaluate, tiny_policy
from agentsgym.envs.TextArena import TextArenaEnv
from agentsgym.envs.TextArena.references import reference_for
from agentsgym.envs.TextArena.references import tic_tac_toe as exact
from agentsgym.recipes.from_values import PolicyOptions, parse_options
from agentsgym.recipes.scripts import episodes_bar, load_policy, quiet_logging, write_transcripts
from agentsgym.reports.tables import text_table
from agentsgym.seeding import derive_seed
from agentsgym.statistics.metrics import Evaluation
from agentsgym.training.selection.league import League

GAME = "TicTacToe-v0"
CONFIG: dict[str, Any] = {"game": GAME, "errors_in_a_row": 0}  # an illegal move loses
SEATS = {"O": 0, "X": 1}  # O moves first
RIVALS = ("random", "optimal")
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
TINY_DEFAULTS: dict[str, Any] = {
    "layout": "turn",  # each turn has a separate prompt, which shows the board
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "max_steps": 400,
    "per_device_train_batch_size": 64,
    "steps_per_generation": 4,
    "num_generations": 16,
    "max_turn_tokens": 3,
}
DEFAULTS: dict[str, Any] = {
    "advantage_estimator": "return_to_go"  # compares a turn with the same turn of other games from the same opening
}


@dataclass
class GameOptions(PolicyOptions):
    """Options for the policy and the number of games."""

    opening_moves: int = field(default=4, metadata={"help": "Maximum number of random moves before a training game."})
    num_games: int = field(default=500, metadata={"help": "Number of games in each rating, in each seat."})
    num_demonstrations: int = field(
        default=1000, metadata={"help": "Number of random games that the tiny policy imitates."}
    )
    warm_start_steps: int = field(default=600, metadata={"help": "Number of optimizer steps of imitation."})
    league: bool = field(
        default=False,
        metadata={"help": "Whether to play against a league of earlier copies and references instead of itself."},
    )


def board_as_lines(messages: list[Message]) -> list[Message]:
    """Render the latest board as its rows, columns and diagonals, from the view of the player to move.

    ``m`` is mine, ``t`` is theirs, and a number is an empty cell: ``0t2 345 678 036 t47 258 048 246``.
    """
    board = exact.board_of(messages[-1:])
    mine = exact.to_move(board)
    cells = [str(cell) if mark == "." else "m" if mark == mine else "t" for cell, mark in enumerate(board)]
    lines = ("".join(cells[cell] for cell in line) for line in LINES)
    return [{"role": "user", "content": " ".join(lines)}]


def vocabulary() -> list[str]:
    """Return every possible line and every move."""
    marks = [(str(cell), "m", "t") for cell in range(9)]
    lines = ["".join(cells) for line in LINES for cells in itertools.product(*(marks[cell] for cell in line))]
    return [*lines, " " + " ".join(lines), *map(str, range(9))]


class RandomMover(Agent):
    """Picks a random empty cell of :func:`board_as_lines`; each conversation has its own random stream."""

    def __init__(self, seed: int) -> None:
        self.seed, self.num_conversations = seed, 0

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        """Play one move; ``agent_state`` is the conversation's random stream."""
        if agent_state is None:
            agent_state = random.Random(derive_seed("random mover", self.seed, self.num_conversations))
            self.num_conversations += 1
        return agent_state.choice(sorted(set(messages[-1]["content"]) & set("012345678"))), agent_state


def main() -> None:
    """Imitate, rate, train in self-play, rate again, and print the comparison."""
    game, args, model_config = parse_options(
        GameOptions, output_dir="outputs/tictactoe_selfplay", tiny_defaults=TINY_DEFAULTS, defaults=DEFAULTS
    )
    quiet_logging()
    if game.model is None:
        view: dict[str, Any] = {"history": board_as_lines}
        policy = tiny_policy(vocabulary(), seed=args.seed)
    else:
        view = {}
        policy = load_policy(game.model, model_config, trust_remote_code=args.trust_remote_code)
    run = TrainingRun(policy, args, model_config, unit="game", overwrite=game.overwrite)
    self_play = {**CONFIG, "opponent": "self", "opening_moves": game.opening_moves}
    env = TextArenaEnv(run.tokenizer, {**self_play, **view})

    if game.model is None:  # it imitates random legal play in both seats
        tasks = make_tasks("demonstrations", game.num_demonstrations, args.seed)
        demonstrations = run.play("demonstrations", env, tasks, RandomMover(args.seed))
        run.warm_start(demonstrations, game.warm_start_steps)
    ratings = {"before": rate(run, "before", game.num_games, view)}
    callbacks: list[TrainerCallback] = [Progress()]
    if game.league:
        self_play = {**CONFIG, "opening_moves": game.opening_moves}
        league = make_league(args.seed, max_turn_tokens=args.max_turn_tokens, **view)
        env = TextArenaEnv(run.tokenizer, {**self_play, **view}, opponent=league)
        callbacks.append(league)
    rows = TextArenaEnv.get_train_dataset(self_play, size=50_000, seed=args.seed)
    run.learn(env, rows, label="self-play", callbacks=callbacks)
    ratings["after"] = rate(run, "after", game.num_games, view)

    write_ratings(run, ratings, env_config=self_play, settings=vars(game))
    print(f"\n{table(ratings)}\n\n{closing_words(run)}")
    sys.exit(run.phases.status)


def make_league(seed: int, **options: Any) -> League:
    """Create a league of earlier copies of the policy, random play, and play that never loses."""
    reference = reference_for(GAME)
    safe = exact.SafeTicTacToe(reference.rules)
    return League(
        {"random": reference.random_player(seed=seed), "never loses": safe.optimal_player(seed=seed)}, **options
    )


def make_tasks(purpose: str, count: int, seed: int, **more: Any) -> list[dict[str, Any]]:
    """Create tasks whose seeds differ between purposes."""
    return [{"seed": derive_seed(purpose, seed, number), **more} for number in range(count)]


def rate(run: TrainingRun, when: str, num_games: int, view: dict[str, Any]) -> dict[str, Evaluation]:
    """Play against each rival in each seat, sampling the policy at temperature 1."""
    reference, label, ratings = reference_for(GAME), f"rating {when}", dict[str, Evaluation]()
    num_total = num_games * len(RIVALS) * len(SEATS)
    with run.phases.measure(label), episodes_bar(label, num_total, unit="game") as on_finish:
        for rival, (mark, seat) in itertools.product(RIVALS, SEATS.items()):
            player = reference if rival == "random" else exact.SafeTicTacToe(reference.rules)
            other = player.random_player if rival == "random" else player.optimal_player
            seed = derive_seed("rating", run.args.seed, rival, mark)
            ratings[f"{mark} against {rival}"] = evaluate(
                TextArenaEnv(run.tokenizer, {**CONFIG, **view}, opponent=other(seed=seed)),
                run.policy(seed=seed),
                make_tasks(f"rating as {mark}", num_games, run.args.seed, seat=seat),
                references=reference if rival == "random" else None,
                max_concurrent=256,
                on_finish=on_finish,
            )
    return ratings


def fraction_of_optimal(ratings: dict[str, Evaluation]) -> float:
    """Return the mean reward against random play over both seats, scaled from random (0) to optimal play (1)."""
    found = [ratings[f"{mark} against random"].fraction_of_optimal for mark in SEATS]
    return sum(one.mean for one in found if one) / len(SEATS)


def write_ratings(run: TrainingRun, ratings: dict[str, dict[str, Evaluation]], **more: Any) -> None:
    """Write the summary, and transcripts of ten games of each rating."""
    for when, parts in ratings.items():
        games = [game for one in parts.values() for game in one.trajectories[:10]]
        write_transcripts(run.output / f"transcripts_{when}.txt", games)
    run.write_summary(
        fraction_of_optimal={when: fraction_of_optimal(parts) for when, parts in ratings.items()},
        ratings={
            when: {name: {"won_drawn_lost": _results(one), **one.as_dict()} for name, one in parts.items()}
            for when, parts in ratings.items()
        },
        **more,
    )


def table(ratings: dict[str, dict[str, Evaluation]]) -> str:
    """Tabulate random and optimal play, which are computed exactly, and the policy before and after training."""
    header = ["player", "% of optimal", *(f"{mark} against {rival}" for rival in RIVALS for mark in SEATS)]
    rows = [["random", "0%", *_exact_results("random")], ["optimal", "100%", *_exact_results("optimal")]]
    for when, parts in ratings.items():
        rows.append([when, f"{fraction_of_optimal(parts):.1%}", *map(_results, parts.values())])
    return text_table(header, rows)


def closing_words(run: TrainingRun) -> str:
    """Explain the table and where the files are."""
    return (
        "Won / drawn / lost. '% of optimal' is the reward against random play, averaged over both seats and scaled so "
        "that random play is 0% and optimal play 100%. "
        f"{run.phases.total_seconds:.0f} s in total. Everything is in {run.output}"
    )


class Progress(TrainerCallback):
    """Prints win rates of the self-play games."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print a line."""
        won = {mark: (logs or {}).get(f"win_rate/by_role/{seat}") for mark, seat in SEATS.items()}
        ends = [f"{mark} wins {float(one):.0%}" for mark, one in won.items() if one is not None]
        if ends:
            print(f"step {state.global_step} of {state.max_steps}: {', '.join(ends)}", flush=True)


def _results(evaluation: Evaluation) -> str:
    rewards = [game.final_reward for game in evaluation.trajectories if not game.failed]
    return _shares(*(rewards.count(result) / max(1, len(rewards)) for result in (1, 0, -1)))


def _exact_results(player: exact.Kind) -> list[str]:
    """Compute the results of random or optimal play from the full game tree; optimal rivals always draw."""
    results: list[str] = []
    for rival, mark in itertools.product(RIVALS, SEATS):
        other: exact.Kind = "random" if rival == "random" else "safe"
        mine: exact.Kind = "safe" if (player, other) == ("optimal", "safe") else player
        first, second = (mine, other) if mark == "O" else (other, mine)
        shares = exact.outcome(exact.EMPTY, first, second)
        results.append(_shares(*(float(one) for one in (shares if mark == "O" else reversed(shares)))))
    return results


def _shares(won: float, drawn: float, lost: float) -> str:
    return f"{100 * won:.1f} / {100 * drawn:.1f} / {100 * lost:.1f}"


if __name__ == "__main__":
    sys.path.remove(
        str(Path(__file__).resolve().parent)
    )  # otherwise textarena.py would shadow the package of that name
    main()
