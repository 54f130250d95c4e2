"""Let a small language model learn tic-tac-toe by playing against itself, through the same code as a large one.

    python examples/tictactoe_selfplay.py                     # an embedded policy, minutes on a laptop CPU
    python examples/tictactoe_selfplay.py --model NAME_OR_PATH --max_turn_tokens 512

One policy plays both seats of TextArena's TicTacToe; each seat is paid for itself. The embedded policy first imitates
random legal play, so that it knows the rules and no strategy; all else it learns from its own games. Before and after
it is rated against random play and against play that never loses, as O (who begins) and as X. It writes to
``outputs/tictactoe_selfplay``: ``summary.json``, transcripts of rated games, and ``model/``.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, ProgressCallback, TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import ModelConfig, TrlParser, get_peft_config

from agentsgym import Agent, GRPOEnvConfig, GRPOEnvTrainer, Message, PolicyAgent, evaluate, imitate, tiny_policy
from agentsgym.envs.TextArena import TextArenaEnv
from agentsgym.envs.TextArena.references import reference_for
from agentsgym.envs.TextArena.references import tic_tac_toe as exact
from agentsgym.evaluation.metrics import Evaluation
from agentsgym.evaluation.transcripts import render_transcript
from agentsgym.reports.tables import text_table
from agentsgym.seeding import derive_seed
from agentsgym.training.imitate import tiny_imitation_config

GAME = "TicTacToe-v0"
SEATS = {"O": 0, "X": 1}  # O begins
RIVALS = ("random", "optimal")
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
TINY_DEFAULTS: dict[str, Any] = {
    "layout": "turn",  # each turn shows the board anew
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "max_steps": 400,
    "per_device_train_batch_size": 64,
    "steps_per_generation": 4,
    "num_generations": 16,
    "max_turn_tokens": 3,
}
DEFAULTS: dict[str, Any] = {
    "advantage_estimator": "return_to_go",  # a game is compared with others from the same opening
    "output_dir": "outputs/tictactoe_selfplay",
    "logging_steps": 20,
    "save_strategy": "no",
    "report_to": "none",
    "dataloader_pin_memory": torch.accelerator.is_available(),
}


@dataclass
class GameArguments:
    """The policy, and how much to play."""

    model: str | None = field(default=None, metadata={"help": "Name or path; by default the embedded tiny policy."})
    opening_moves: int = field(default=4, metadata={"help": "Random moves before a training game, at most."})
    num_games: int = field(default=500, metadata={"help": "Games of each rating, in each seat."})
    num_demonstrations: int = field(default=1000, metadata={"help": "Random games that the tiny policy imitates."})
    warm_start_steps: int = field(default=600, metadata={"help": "Optimizer steps of that imitation."})


def board_as_lines(messages: list[Message]) -> list[Message]:
    """Show the newest board as its rows, columns and diagonals, as the player whose turn it is sees them.

    ``m`` is mine, ``t`` is theirs, and a number is an empty cell: ``0t2 345 678 036 t47 258 048 246``.
    """
    board = exact.board_of(messages[-1:])
    mine = exact.to_move(board)
    cells = [str(cell) if mark == "." else "m" if mark == mine else "t" for cell, mark in enumerate(board)]
    lines = ("".join(cells[cell] for cell in line) for line in LINES)
    return [{"role": "user", "content": " ".join(lines)}]


def vocabulary() -> list[str]:
    """Every line as it may look, and every move."""
    marks = [(str(cell), "m", "t") for cell in range(9)]
    lines = ["".join(cells) for line in LINES for cells in itertools.product(*(marks[cell] for cell in line))]
    return [*lines, " " + " ".join(lines), *map(str, range(9))]


class RandomMover(Agent):
    """Takes any empty cell of :func:`board_as_lines`; each conversation has a random stream of its own."""

    def __init__(self, seed: int) -> None:
        self.seed, self.num_conversations = seed, 0

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        """Play one move; ``agent_state`` is the conversation's random stream."""
        if agent_state is None:
            agent_state = random.Random(derive_seed("random mover", self.seed, self.num_conversations))
            self.num_conversations += 1
        return agent_state.choice(sorted(set(messages[-1]["content"]) & set("012345678"))), agent_state


def main() -> None:
    """Imitate, rate, let it play against itself, rate again, and print the comparison."""
    game, args, model_config = parse_arguments()
    logging.basicConfig(level=logging.WARNING)
    transformers_logging.set_verbosity_error()
    run = Run(game, args, model_config)
    if game.model is None:
        run.warm_start()
    run.rate("before")
    if not run.interrupted:
        run.learn()
    run.rate("after")
    run.save()
    print(f"\n{run.table()}\n\n{run.closing_words()}")
    sys.exit(run.status)


def parse_arguments() -> tuple[GameArguments, GRPOEnvConfig, ModelConfig]:
    """Read the command line and ``--config``; the defaults depend on whether the tiny policy is trained."""
    dataclasses: Any = (GameArguments, GRPOEnvConfig, ModelConfig)
    parser: Any = TrlParser(dataclasses)
    parser.set_defaults(**DEFAULTS)
    game, _, model_config = parser.parse_args_and_config()
    if game.model is None and model_config.model_name_or_path is None:
        torch.set_num_threads(1)  # a second thread gains nothing on so small a model
        parser.set_defaults(**TINY_DEFAULTS)
    game, args, model_config = parser.parse_args_and_config()
    game.model = game.model or model_config.model_name_or_path
    return game, args, model_config


class Run:
    """One run of the example: the environment, the policy, its ratings, and the clock."""

    def __init__(self, game: GameArguments, args: GRPOEnvConfig, model_config: ModelConfig) -> None:
        self.game, self.args, self.model_config = game, args, model_config
        self.output = Path(args.output_dir or DEFAULTS["output_dir"])
        self.ratings: dict[str, dict[str, Evaluation]] = {}
        self.seconds: dict[str, float] = {}
        self.interrupted = False
        self.status = 0  # of this process
        self.config: dict[str, Any] = {"game": GAME, "errors_in_a_row": 0}  # an illegal move loses
        self.view: dict[str, Any] = {}
        if game.model is None:
            self.view = {"history": board_as_lines}
            self.model, self.tokenizer = tiny_policy(vocabulary(), seed=args.seed)
        else:
            self.model, self.tokenizer = _load(game.model, model_config, trust_remote_code=args.trust_remote_code)
        self.self_play = {**self.config, "opponent": "self", "opening_moves": game.opening_moves}
        self.env = TextArenaEnv(self.tokenizer, {**self.self_play, **self.view})

    def tasks(self, purpose: str, count: int, **more: Any) -> list[dict[str, Any]]:
        """Make tasks that share no seed with those of another purpose, but by chance."""
        return [{"seed": derive_seed(purpose, self.args.seed, number), **more} for number in range(count)]

    def rate(self, when: str) -> None:
        """Play against each rival in each seat; the policy is sampled at temperature 1."""
        reference = reference_for(GAME)
        with self._phase(f"rating {when}"):
            self.ratings[when] = {}
            for rival, (mark, seat) in itertools.product(RIVALS, SEATS.items()):
                player = reference if rival == "random" else exact.SafeTicTacToe(reference.rules)
                other = player.random_player if rival == "random" else player.optimal_player
                seed = derive_seed("rating", self.args.seed, rival, mark)
                self.ratings[when][f"{mark} against {rival}"] = evaluate(
                    TextArenaEnv(self.tokenizer, {**self.config, **self.view}, opponent=other(seed=seed)),
                    PolicyAgent(self.model, self.tokenizer, seed=seed, max_turn_tokens=self.args.max_turn_tokens),
                    self.tasks(f"rating as {mark}", self.game.num_games, seat=seat),
                    references=reference if rival == "random" else None,
                    max_concurrent=256,
                )

    def warm_start(self) -> None:
        """Imitate random legal play in both seats."""
        with self._phase("demonstrations"):
            tasks = self.tasks("demonstrations", self.game.num_demonstrations)
            demonstrations = self.env.rollout(tasks, RandomMover(self.args.seed), max_concurrent=256)
        config = tiny_imitation_config(self.game.warm_start_steps, seed=self.args.seed, disable_tqdm=True)
        with self._phase("warm start"), self._interruptible(), _terminable():
            imitate(self.model, demonstrations, self.tokenizer, config)

    def learn(self) -> None:
        """Train both seats on games of the policy against itself."""
        if self.args.beta or self.args.use_vllm:  # both load from a path, so the policy must be saved there
            self._save_policy("start")
            self.model = AutoModelForCausalLM.from_pretrained(self.output / "start")
        trainer = GRPOEnvTrainer(
            self.model,
            self.env,
            self.args,
            train_dataset=TextArenaEnv.get_train_dataset(self.self_play, size=50_000, seed=self.args.seed),
            callbacks=[Progress()],
            peft_config=get_peft_config(self.model_config) if self.model_config.use_peft else None,
        )
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        with self._phase("self-play"), self._interruptible():
            trainer.train(resume_from_checkpoint=self.args.resume_from_checkpoint)
        trainer.close()
        if self.model_config.use_peft:
            adapted: Any = trainer.model
            self.model = adapted.merge_and_unload()

    def fraction_of_optimal(self, when: str) -> float:
        """What it earns from random play, between random play (0) and the best (1), the mean over both seats."""
        found = [self.ratings[when][f"{mark} against random"].fraction_of_optimal for mark in SEATS]
        return sum(one.mean for one in found if one) / len(SEATS)

    def table(self) -> str:
        """One row each for random play, optimal play, and the policy before and after; exact for the first two."""
        header = ["player", "of optimal", *(f"{mark} against {rival}" for rival in RIVALS for mark in SEATS)]
        rows = [["random", "0 %", *_exact_results("random")], ["optimal", "100 %", *_exact_results("optimal")]]
        for when, ratings in self.ratings.items():
            rows.append([when, f"{self.fraction_of_optimal(when):.1%}", *map(_results, ratings.values())])
        return text_table(header, rows)

    def closing_words(self) -> str:
        """Say how to read the table, and where the files are."""
        return (
            "Won / drawn / lost. 'Of optimal' is what is earned from random play, the mean over both seats. "
            f"{sum(self.seconds.values()):.0f} s in all. Everything is in {self.output}"
        )

    def save(self) -> None:
        """Write the policy, the summary and transcripts."""
        self._save_policy("model")
        for when, ratings in self.ratings.items():
            games = [game for one in ratings.values() for game in one.trajectories[:10]]
            text = "\n".join(map(render_transcript, games))
            (self.output / f"transcripts_{when}.txt").write_text(text, encoding="utf-8")
        summary = {
            "fraction_of_optimal": {when: self.fraction_of_optimal(when) for when in self.ratings},
            "ratings": {
                when: {name: {"won_drawn_lost": _results(one), **one.as_dict()} for name, one in ratings.items()}
                for when, ratings in self.ratings.items()
            },
            "seconds": {phase: round(seconds, 1) for phase, seconds in self.seconds.items()},
            "env_config": self.self_play,
            "seed": self.args.seed,
            "interrupted": self.interrupted,
            "settings": vars(self.game),
        }
        text = json.dumps(summary, indent=2, default=str)
        (self.output / "summary.json").write_text(text + "\n", encoding="utf-8")

    def _save_policy(self, folder: str) -> None:
        self.model.save_pretrained(self.output / folder)
        self.tokenizer.save_pretrained(self.output / folder)

    @contextmanager
    def _phase(self, name: str) -> Generator[None]:
        print(f"{name} …", flush=True)
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = time.monotonic() - start

    @contextmanager
    def _interruptible(self) -> Generator[None]:
        """Go on after Ctrl-C or SIGTERM has ended what is inside; after SIGTERM the status at the end says so."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as stopped:
            self.interrupted = True
            self.status = 0 if isinstance(stopped, KeyboardInterrupt) else 128 + signal.SIGTERM
            print("\nstopped here; keeping the policy as it is now (Ctrl-C again to quit)", flush=True)


class Progress(TrainerCallback):
    """Prints how the games against itself end."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print a line."""
        won = {mark: (logs or {}).get(f"win_rate/by_role/{seat}") for mark, seat in SEATS.items()}
        ends = [f"{mark} wins {float(one):.0%}" for mark, one in won.items() if one is not None]
        if ends:
            print(f"step {state.global_step} of {state.max_steps}: {', '.join(ends)}", flush=True)


def _results(evaluation: Evaluation) -> str:
    paid = [game.final_reward for game in evaluation.trajectories if not game.failed]
    return _shares(*(sum(reward == wanted for reward in paid) / max(1, len(paid)) for wanted in (1, 0, -1)))


def _exact_results(player: exact.Kind) -> list[str]:
    """What random or the best play comes to, by walking the whole game; the best never loses to the best."""
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


@contextmanager
def _terminable() -> Generator[None]:
    """Let SIGTERM end what is inside with SystemExit, as training does without this."""
    before = signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _load(model: str, config: ModelConfig, *, trust_remote_code: bool) -> tuple[Any, Any]:
    options = {"revision": config.model_revision, "trust_remote_code": trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(model, **options)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(
        model, dtype=config.dtype, attn_implementation=config.attn_implementation, **options
    ), tokenizer


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))  # else the file beside it hides the package textarena
    main()
