"""Train one policy on five packaged environments in one run, one with tools and four without.

    python examples/mixed_environments.py                      # an embedded policy, a few minutes on a laptop CPU
    python examples/mixed_environments.py --model NAME_OR_PATH --max_turn_tokens 128
    python examples/mixed_environments.py --environments prices lake --weights 1 2   # every field of GRPOEnvConfig, too

- ``questions``: Twenty Questions over 12 objects in 5 turns.
- ``prices``: the price list, which a tool alone can read.
- ``lake``: Gymnasium's FrozenLake, without slipping.
- ``number``: TextArena's GuessTheNumber, 1 to 16 in 4 turns.
- ``sums``: sums and differences of two numbers of one digit, made by reasoning-gym.

It prints win rates before and after beside random and optimal play, for each environment, and writes to
``outputs/mixed``: ``summary.json``, ``learning_curve.png`` and ``model/``. Ctrl-C and SIGTERM end training early and
keep the policy as it is.
"""

from __future__ import annotations

import json
import logging
import random
import re
import signal
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, ProgressCallback
from transformers.utils import logging as transformers_logging
from trl import TrlParser

from agentsgym import (
    Agent,
    ConfigError,
    Curriculum,
    GRPOEnvConfig,
    GRPOEnvTrainer,
    LearningCurve,
    Message,
    PolicyAgent,
    RandomAgent,
    Trajectory,
    TurnRequest,
    evaluate,
    evaluate_mixed,
    imitate,
    make,
    mix,
    tiny_policy,
)
from agentsgym.envs import Gymnasium, PriceList, TwentyQuestions
from agentsgym.envs.ReasoningEvals import ReasoningEvalsEnv
from agentsgym.envs.TextArena import TextArenaEnv
from agentsgym.envs.TextArena.references import reference_for
from agentsgym.evaluation.metrics import Evaluation, fraction_of_optimal
from agentsgym.reports.tables import text_table
from agentsgym.seeding import derive_seed
from agentsgym.training.imitate import tiny_imitation_config
from agentsgym.types import Action

TINY_DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-4,
    "lr_scheduler_type": "constant",
    "max_steps": 600,
    "per_device_train_batch_size": 32,
    "steps_per_generation": 4,
    "num_generations": 8,
    "max_turn_tokens": 16,
}
DEFAULTS: dict[str, Any] = {
    "output_dir": "outputs/mixed",
    "logging_steps": 20,
    "save_strategy": "no",
    "report_to": "none",
    "dataloader_pin_memory": torch.accelerator.is_available(),
}
NAMES = ("questions", "prices", "lake", "number", "sums")
BY_HEART = ("questions", "sums")  # what the tiny policy has to learn by heart takes more demonstrations
NUMBER: dict[str, Any] = {"game": "GuessTheNumber-v0", "game_options": {"max_number": 16}, "max_steps_per_episode": 4}
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
DIFFERENCES_AND_SUMS = [str(number) for number in range(-9, 19)]


class Calculator(Agent):
    """Solves the sums."""

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        """Find the two numbers and what is between them."""
        [(a, sign, b)] = re.findall(r"(\d+) ([+-]) (\d+) =", messages[-1]["content"])
        return str(int(a) + int(b) if sign == "+" else int(a) - int(b)), agent_state


class HalfRandom(Agent):
    """Plays like one player or another, drawn for each turn; both see every turn.

    Args:
        good: Plays about half of the turns.
        bad: Plays the others.
        seed: Makes the random stream.
    """

    def __init__(self, good: Agent, bad: Agent, seed: int) -> None:
        self._players = (good, bad)
        self._stream = random.Random(derive_seed("half random", seed))

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        """Ask both players and take the answer of one."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: TurnRequest) -> Action:
        states = request.agent_state or (None, None)
        said: list[Any] = []
        for player, state in zip(self._players, states, strict=True):
            said += player.act([replace(request, agent_state=state)])
        return replace(self._stream.choice(said), agent_state=tuple(action.agent_state for action in said))


@dataclass(frozen=True, slots=True, kw_only=True)
class Players:
    """Who plays an environment beside the policy.

    Attributes:
        random: Knows how a move is written, and nothing else.
        optimal: Plays best.
        shown: Is imitated first: right about half of the time.
    """

    random: Agent
    optimal: Agent
    shown: Agent


def players_of(name: str, env: Any, seed: int) -> Players:
    """Make the players of an environment; those of the numbers and sums read the conversation alone."""
    match name:
        case "questions":
            shown = TwentyQuestions.ImitationPlayer(env, seed)
            return Players(
                random=TwentyQuestions.RandomPlayer(env, seed), optimal=TwentyQuestions.GreedyPlayer(env), shown=shown
            )
        case "prices":
            shown = PriceList.ImitationPlayer(env, seed)
            return Players(
                random=PriceList.RandomPlayer(env, seed), optimal=PriceList.ReferencePlayer(env, seed), shown=shown
            )
        case "lake":
            bad, good = Gymnasium.RandomPlayer(env, seed), Gymnasium.OptimalPlayer(env)
        case "number":
            turns = NUMBER["max_steps_per_episode"]
            reference = reference_for(NUMBER["game"], NUMBER["game_options"], max_steps_per_episode=turns)
            bad, good = reference.random_player(seed), reference.optimal_player(seed)
        case _:
            bad, good = RandomAgent(DIFFERENCES_AND_SUMS, seed=seed), Calculator()
    return Players(random=bad, optimal=good, shown=HalfRandom(good, bad, seed))


@dataclass
class MixArguments:
    """The mixture, the policy, and how much to play."""

    model: str | None = field(default=None, metadata={"help": "Name or path; by default the embedded tiny policy."})
    environments: list[str] = field(default_factory=lambda: list(NAMES), metadata={"help": "Some of the five."})
    weights: list[float] | None = field(
        default=None, metadata={"help": "A share for each environment; by default win rates decide."}
    )
    num_games: int = field(default=1000, metadata={"help": "Games of each evaluation, shared equally."})
    num_demonstrations: int = field(
        default=2000, metadata={"help": "Games of each environment that are imitated (of two, four times as many)."}
    )
    warm_start_steps: int = field(default=3000, metadata={"help": "Optimizer steps of that imitation."})


def main() -> None:
    """Evaluate, imitate, train on all at once, evaluate again, and print the comparison."""
    options, args = parse_arguments()
    logging.basicConfig(level=logging.WARNING)
    transformers_logging.set_verbosity_error()
    run = Run(options, args)
    run.play_references()
    run.evaluate("untrained")
    if options.model is None:
        run.imitate()
        run.evaluate("imitation")
    if not run.interrupted:
        run.train()
    run.evaluate("trained")
    run.save()
    print(f"\nwin rates\n{run.table()}\n\n{run.seconds():.0f} s in all. Everything is in {run.output}")
    sys.exit(run.status)


def parse_arguments() -> tuple[MixArguments, GRPOEnvConfig]:
    """Read the command line; the defaults depend on whether the tiny policy is trained."""
    dataclasses: Any = (MixArguments, GRPOEnvConfig)
    parser: Any = TrlParser(dataclasses)
    parser.set_defaults(**DEFAULTS)
    options, _ = parser.parse_args_and_config()
    for name in options.environments:
        if name not in NAMES:
            raise ConfigError(f"--environments must be some of {', '.join(NAMES)}, got {name}")
    num_weights = len(options.weights or options.environments)
    if num_weights != len(options.environments):
        raise ConfigError(
            f"--weights needs one number for each of the {len(options.environments)} environments, got {num_weights}"
        )
    if options.model is None:
        torch.set_num_threads(1)  # a second thread gains nothing on so small a model
        parser.set_defaults(**TINY_DEFAULTS)
    return parser.parse_args_and_config()


def make_sources(names: Sequence[str], *, is_tiny: bool) -> dict[str, Any]:
    """The sources, as ``mix`` takes them; the tiny policy learns the rules by playing."""
    prompt = {"system_prompt": ""} if is_tiny else {}
    questions = {
        "objects": list(TwentyQuestions.DEMO_OBJECTS[:12]),
        "properties": list(TwentyQuestions.DEMO_PROPERTIES),
        "max_steps_per_episode": 5,
        "final_guess": True,
    }
    prices = {"goods": ["apple", "egg", "pear"], "kinds": ["price"], "max_steps_per_episode": 4}
    lake = {"make_kwargs": {"is_slippery": False}, "max_steps_per_episode": 10}
    size = {"size": 1000}
    sources = {
        "questions": (TwentyQuestions.TwentyQuestionsEnv, questions | prompt, {"split": "all", **size}),
        "prices": (PriceList.PriceListEnv, prices | prompt, size),
        "lake": (Gymnasium.GymnasiumEnv, lake | prompt, size),
        "number": (TextArenaEnv, NUMBER | prompt, size),
        "sums": (
            ReasoningEvalsEnv,
            {"extractor": "number"} | prompt,
            {"task": "chain_sum", "difficulty": SUMS, **size},
        ),
    }
    return {name: sources[name] for name in names}


class Run:
    """One run of the example: the mixture, the policy, what was measured, and the clock."""

    def __init__(self, options: MixArguments, args: GRPOEnvConfig) -> None:
        self.options, self.args = options, args
        self.output = Path(args.output_dir or DEFAULTS["output_dir"])
        self.start = time.monotonic()
        self.interrupted = False
        self.status = 0  # of this process
        self.sources = make_sources(options.environments, is_tiny=options.model is None)
        weights = dict(zip(self.sources, options.weights, strict=True)) if options.weights else None
        self.rows = mix(self.sources, weights=weights, size=10_000, seed=args.seed)
        self.tasks: list[Any] = list(mix(self.sources, size=options.num_games, seed=args.seed, split="eval"))
        self.model, self.tokenizer = self._policy()
        self.references: dict[str, dict[str, Evaluation]] = {}
        self.evaluations: dict[str, Evaluation] = {}
        self.history: dict[str, list[float]] = {}

    def _policy(self) -> tuple[Any, Any]:
        """Load the model, or make the embedded one with the words of all environments."""
        if self.options.model is not None:
            tokenizer = AutoTokenizer.from_pretrained(self.options.model)
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            return AutoModelForCausalLM.from_pretrained(self.options.model), tokenizer
        seed = self.args.seed
        silent = {"number", "sums"} & set(self.sources)  # the others know their words
        players = {name: players_of(name, None, seed).random for name in silent}
        return tiny_policy(self.rows, agent=players, num_episodes=400, seed=seed)

    def play_references(self) -> None:
        """Let random and optimal players play the evaluation's tasks."""
        print("random and optimal play …", flush=True)
        for kind in ("random", "optimal"):
            self.references[kind] = {}
            for name in self.sources:
                rows = [row for row in self.tasks if row["environment"] == name]
                env = make(rows[0])
                player: Agent = getattr(players_of(name, env, self.args.seed), kind)
                self.references[kind][name] = evaluate(env, player, rows, max_concurrent=256)

    def evaluate(self, stage: str) -> None:
        """Let the policy play the evaluation's tasks as it is now."""
        agent = PolicyAgent(self.model, self.tokenizer, seed=self.args.seed, max_turn_tokens=self.args.max_turn_tokens)
        self.evaluations[stage] = evaluate_mixed(agent, self.tasks, self.tokenizer, max_concurrent=256)

    def imitate(self) -> None:
        """Imitate players that are right about half of the time."""
        seed, options = self.args.seed, self.options
        print("imitation …", flush=True)
        demonstrations: list[Trajectory] = []
        for name, source in self.sources.items():
            count = options.num_demonstrations * (4 if name in BY_HEART else 1)
            rows: list[Any] = list(mix({name: source}, size=count, seed=derive_seed("warm start", seed)))
            env = make(rows[0], self.tokenizer)
            demonstrations += env.rollout(rows, players_of(name, env, seed).shown, max_concurrent=256)
        config = tiny_imitation_config(options.warm_start_steps, seed=seed, disable_tqdm=True)
        with self._interruptible(), _terminable():
            imitate(self.model, demonstrations, self.tokenizer, config, observation_loss=True)

    def train(self) -> None:
        """Train on all environments in one run."""
        before = list(self.evaluations.values())[-1].win_rate
        curve = LearningCurve(self.output / "learning_curve.png", before=before)
        trainer = GRPOEnvTrainer(
            self.model,
            None,
            self.args,
            train_dataset=self.rows,
            processing_class=self.tokenizer,
            callbacks=[curve],
            curriculum=None if self.options.weights else Curriculum("environment", low=0.02, high=0.95),
        )
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        with self._interruptible():
            trainer.train(resume_from_checkpoint=self.args.resume_from_checkpoint)
        for name in self.sources:
            key = f"win_rate/by_environment/{name}"
            self.history[name] = [round(log[key], 3) for log in trainer.state.log_history if key in log]
        trainer.close()
        curve.close()

    def seconds(self) -> float:
        """How long the run has taken so far."""
        return time.monotonic() - self.start

    def fractions_of_optimal(self) -> dict[str, float]:
        """Where the trained policy's reward lies between random play (0) and optimal play (1)."""
        fractions: dict[str, float] = {}
        for name in self.sources:
            random_play, optimal = (_mean(self.references[kind][name].reward) for kind in ("random", "optimal"))
            trained = _mean(self._part("trained", name).reward)
            fractions[name] = fraction_of_optimal(trained, random=random_play, optimal=optimal)
        return fractions

    def save(self) -> None:
        """Write the policy and the summary."""
        self.model.save_pretrained(self.output / "model")
        self.tokenizer.save_pretrained(self.output / "model")
        summary: dict[str, Any] = {name: evaluation.as_dict() for name, evaluation in self.evaluations.items()}
        for kind, parts in self.references.items():
            summary[kind] = {name: evaluation.as_dict() for name, evaluation in parts.items()}
        summary |= {
            "fraction_of_optimal": self.fractions_of_optimal(),
            "win_rates_in_training": self.history,  # over steps, as often as is logged
            "seconds": round(self.seconds(), 1),
            "cpu_seconds": round(time.process_time(), 1),
            "seed": self.args.seed,
            "interrupted": self.interrupted,
            "settings": vars(self.options),
        }
        (self.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")

    def table(self) -> str:
        """One row an environment: the win rates of each player and stage, and the fraction of optimal."""
        fractions = self.fractions_of_optimal()
        rows: list[list[str]] = []
        for name, fraction in fractions.items():
            stages = [self._part(stage, name) for stage in self.evaluations]
            played = [self.references["random"][name], *stages, self.references["optimal"][name]]
            rows.append([name, *(f"{_mean(one.win_rate):.1%}" for one in played), f"{fraction:.1%}"])
        return text_table(["environment", "random", *self.evaluations, "optimal", "of optimal"], rows)

    def _part(self, stage: str, name: str) -> Evaluation:
        whole = self.evaluations[stage]
        return whole.by_environment.get(name, whole)  # with one environment, it is the whole

    @contextmanager
    def _interruptible(self) -> Generator[None]:
        """Go on after Ctrl-C or SIGTERM has ended what is inside; after SIGTERM the status at the end says so."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as stopped:
            self.interrupted = True
            self.status = 0 if isinstance(stopped, KeyboardInterrupt) else 128 + signal.SIGTERM
            print("\nstopped here; keeping the policy as it is now (Ctrl-C again to quit)", flush=True)


@contextmanager
def _terminable() -> Generator[None]:
    """Let SIGTERM end what is inside with SystemExit, as training does without this."""
    before = signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _mean(estimate: Any) -> float:
    return estimate.mean if estimate is not None else 0.0


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))  # else textarena.py hides the package of the same name
    main()
