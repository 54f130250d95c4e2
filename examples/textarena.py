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

import functools
import itertools
import json
import logging
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
import torch
from transformers import AutoModelForCausalLM, PrinterCallback, ProgressCallback
from transformers.utils import logging as transformers_logging
from trl import ModelConfig, TrlParser, get_peft_config

from agentsgym import (
    Agent,
    ConfigError,
    GRPOEnvConfig,
    GRPOEnvTrainer,
    LearningCurve,
    Message,
    PolicyAgent,
    evaluate,
    imitate,
    tiny_policy,
)
from agentsgym.envs.TextArena import LegalAgent, TextArenaEnv
from agentsgym.envs.TextArena.references import Reference, reference_for
from agentsgym.envs.TextArena.references.frozen_lake import last_map
from agentsgym.evaluation.metrics import Evaluation
from agentsgym.reports.tables import comparison_table
from agentsgym.seeding import derive_seed
from agentsgym.training.imitate import tiny_imitation_config
from agentsgym.training.scripts import LossBar, Phases, episodes_bar, load_policy, write_transcripts

TINY_DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "max_steps": 800,
    "per_device_train_batch_size": 32,
    "steps_per_generation": 2,
    "num_generations": 8,
    "max_turn_tokens": 3,
}
DEFAULTS: dict[str, Any] = {
    "output_dir": "outputs/textarena",
    "logging_steps": 20,
    "save_strategy": "no",
    "report_to": "none",
    "dataloader_pin_memory": torch.accelerator.is_available(),
}


@dataclass
class GameArguments:
    """The game, the policy, and how much to play."""

    game: str = field(default="FrozenLake-v0", metadata={"help": "Any id of TextArena's."})
    opponent: str = field(default="random", metadata={"help": "Who plays the other seats."})
    model: str | None = field(default=None, metadata={"help": "Name or path; by default the embedded tiny policy."})
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
    game, args, model_config = parse_arguments()
    logging.basicConfig(level=logging.WARNING)
    transformers_logging.set_verbosity_error()
    run = Run(game, args, model_config)
    run.evaluate_references()
    if game.model is None:
        run.warm_start()
    run.evaluate("before", run.policy(), run.env)
    if not run.phases.interrupted:
        run.learn()
    run.save_policy("model")
    run.evaluate("after", run.policy(), run.env)
    run.save_summary()
    print(f"\n{comparison_table(run.evaluations)}\n\n{run.closing_words()}")
    sys.exit(run.phases.status)


def parse_arguments() -> tuple[GameArguments, GRPOEnvConfig, ModelConfig]:
    """Read the command line; the defaults depend on whether the tiny policy is trained."""
    dataclasses: Any = (GameArguments, GRPOEnvConfig, ModelConfig)
    parser: Any = TrlParser(dataclasses)
    parser.set_defaults(**DEFAULTS)
    game, *_ = parser.parse_args_and_config()
    if game.model is None:
        torch.set_num_threads(1)  # a second thread gains nothing on so small a model
        layout = "turn" if game.game in BRIEFS else "trajectory"  # what is told anew each turn is a prompt each turn
        parser.set_defaults(**TINY_DEFAULTS, layout=layout)
    return parser.parse_args_and_config()


class Run:
    """One run of the example: the game, the policy, what was measured, and the clock."""

    def __init__(self, game: GameArguments, args: GRPOEnvConfig, model_config: ModelConfig) -> None:
        self.game, self.args, self.model_config = game, args, model_config
        self.output = Path(args.output_dir or DEFAULTS["output_dir"])
        self.evaluations: dict[str, Evaluation] = {}
        self.phases = Phases()
        self.config: dict[str, Any] = {
            "game": game.game,
            "opponent": game.opponent,
            "max_steps_per_episode": game.max_steps_per_episode,
        }
        self.table = TextArenaEnv(env_config=self.config)  # where the references read the game's own words
        self.brief = BRIEFS.get(game.game) if game.model is None else None
        if game.model is None:
            self.model, self.tokenizer = tiny_policy(self.texts(), seed=args.seed)
        else:
            self.model, self.tokenizer = load_policy(game.model, model_config, trust_remote_code=args.trust_remote_code)
        told: dict[str, Any] = {"history": self.brief.tell} if self.brief else {}
        self.env = TextArenaEnv(self.tokenizer, self.config | told)

    def texts(self) -> list[str]:
        """The words of the tiny policy: of the brief, or what the game and random play say."""
        if self.brief:
            return self.brief.words
        rollouts = self.table.rollout(self.tasks("words", 300), LegalAgent(self.table, seed=self.args.seed))
        return [message["content"] for rollout in rollouts for message in rollout.messages]

    def tasks(self, purpose: str, count: int) -> list[dict[str, Any]]:
        """Make tasks that share no seed with those of another purpose, but by chance."""
        return [{"seed": derive_seed(purpose, self.args.seed, number)} for number in range(count)]

    def policy(self) -> PolicyAgent:
        """The policy as it is now, sampled at temperature 1."""
        seed = derive_seed("evaluation", self.args.seed)
        return PolicyAgent(self.model, self.tokenizer, seed=seed, max_turn_tokens=self.args.max_turn_tokens)

    @functools.cached_property
    def reference(self) -> Reference | None:
        """The game's exact values, if they are known."""
        if self.table.num_players > 1 and self.game.opponent != "random":
            return None
        with suppress(ConfigError):  # none is known, or not for so few moves
            return reference_for(self.game.game, max_steps_per_episode=self.game.max_steps_per_episode)
        return None

    def evaluate_references(self) -> None:
        """Play at random, and as well as can be where that is known."""
        if self.reference is None:
            self.evaluate("random", LegalAgent(self.table, seed=self.args.seed), self.table)
        else:
            self.evaluate("random", self.reference.random_player(self.args.seed), self.table)
            self.evaluate("optimal", self.reference.optimal_player(self.args.seed), self.table)

    def evaluate(self, name: str, agent: Agent, env: TextArenaEnv) -> None:
        """Play the evaluation's tasks, the same for every player."""
        tasks, reference = self.tasks("evaluation", self.game.num_games), self.reference
        with self.phases.measure(name), episodes_bar(name, len(tasks), unit="game") as on_finish:
            self.evaluations[name] = evaluate(
                env, agent, tasks, max_concurrent=256, references=reference, on_finish=on_finish
            )

    def warm_start(self) -> None:
        """Imitate a player that mostly blunders, or random play where no brief tells the best moves."""
        seed = derive_seed("demonstrations", self.args.seed)
        player = Blunderer(self.brief, self.game.blunders, seed) if self.brief else LegalAgent(self.env, seed=seed)
        tasks = self.tasks("demonstrations", self.game.num_demonstrations)
        with self.phases.measure("demonstrations"):
            demonstrations = self.env.rollout(tasks, player, max_concurrent=256)
        config = tiny_imitation_config(self.game.warm_start_steps, seed=self.args.seed, disable_tqdm=True)
        with (
            self.phases.measure("warm start"),
            self.phases.interruptible(),
            LossBar("warm start", config.max_steps) as bar,
        ):
            imitate(self.model, demonstrations, self.tokenizer, config, callbacks=[bar])

    def learn(self) -> None:
        """Train with GRPO, and draw the learning curve."""
        win_rates = {name: one.win_rate for name, one in self.evaluations.items() if one.win_rate}
        before = win_rates.pop("before", None)
        curve = LearningCurve(self.output / "learning_curve.png", before=before, references=win_rates)
        if self.args.beta or self.args.use_vllm:  # both load from a path, so the policy must be saved there
            self.save_policy("start")
            self.model = AutoModelForCausalLM.from_pretrained(self.output / "start")
        trainer = GRPOEnvTrainer(
            self.model,
            self.env,
            self.args,
            train_dataset=TextArenaEnv.get_train_dataset(self.config, size=20_000, seed=self.args.seed),
            callbacks=[curve],
            peft_config=get_peft_config(self.model_config) if self.model_config.use_peft else None,
        )
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        with self.phases.measure("reinforcement learning"), self.phases.interruptible():
            trainer.train(resume_from_checkpoint=self.args.resume_from_checkpoint)
        trainer.close()
        curve.close()
        if self.model_config.use_peft:
            adapted: Any = trainer.model
            self.model = adapted.merge_and_unload()

    def save_policy(self, folder: str) -> None:
        """Write the policy as it is now."""
        self.model.save_pretrained(self.output / folder)
        self.tokenizer.save_pretrained(self.output / folder)

    def save_summary(self) -> None:
        """Write the summary and the transcripts."""
        for name in ("before", "after"):
            write_transcripts(self.output / f"transcripts_{name}.txt", self.evaluations[name].trajectories)
        summary: dict[str, Any] = {name: evaluation.as_dict() for name, evaluation in self.evaluations.items()}
        summary |= {
            "seconds": self.phases.seconds,
            "cpu_seconds": self.phases.cpu_seconds,
            "env_config": self.config,
            "seed": self.args.seed,
        }
        summary |= {"settings": vars(self.game), "interrupted": self.phases.interrupted}
        (self.output / "summary.json").write_text(json.dumps(summary, indent=2, default=str) + "\n", encoding="utf-8")

    def closing_words(self) -> str:
        """Say what was played, what it took, and where the files are."""
        return (
            f"{self.game.game}, at most {self.game.max_steps_per_episode} moves; "
            f"{sum(self.phases.cpu_seconds.values()):.0f} s of processor time. "
            f"Everything is in {self.output}: summary.json, learning_curve.png, transcripts_*.txt, model/"
        )


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))  # else this file hides the package of the same name
    main()
