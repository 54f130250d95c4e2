"""Train one policy on four packaged environments in one run, one with tools and three without.

    python examples/mixed_environments.py                      # an embedded policy, a few minutes on a laptop CPU
    python examples/mixed_environments.py --model NAME_OR_PATH --max_turn_tokens 128
    python examples/mixed_environments.py --environments prices lake --weights 1 2   # every field of GRPOEnvConfig, too

- ``questions``: Twenty Questions over 12 objects in 5 turns.
- ``prices``: the price list, which a tool alone can read.
- ``lake``: Gymnasium's FrozenLake, without slipping.
- ``number``: TextArena's GuessTheNumber, 1 to 8 in 4 turns.

A fifth can be asked for, ``--environments questions prices lake number sums``: sums and differences of two numbers of
one digit, made by reasoning-gym. The embedded policy has to learn them by heart, for which the defaults leave too few
steps.

It prints win rates before and after beside random and optimal play, for each environment, and writes to
``outputs/mixed``: ``summary.json``, ``learning_curve.png`` and ``model/``. Ctrl-C and SIGTERM end training early and
keep the policy as it is.
"""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentsgym import (
    Agent,
    ConfigError,
    Curriculum,
    Message,
    RandomAgent,
    TrainingRun,
    Trajectory,
    TurnRequest,
    evaluate,
    make,
    mix,
    tiny_policy,
)
from agentsgym.envs import Gymnasium, PriceList, TwentyQuestions
from agentsgym.envs.ReasoningEvals import ReasoningEvalsEnv
from agentsgym.envs.TextArena import TextArenaEnv
from agentsgym.envs.TextArena.references import reference_for
from agentsgym.evaluation.mixed import pooled
from agentsgym.recipes.command_line import PolicyOptions, parse_options
from agentsgym.recipes.scripts import episodes_bar, load_policy, quiet_logging
from agentsgym.reports.tables import text_table
from agentsgym.seeding import derive_seed
from agentsgym.statistics.metrics import Evaluation, fraction_of_optimal
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
NAMES = ("questions", "prices", "lake", "number", "sums")
TAKES_LONGER = ("questions", "prices", "sums")  # the tiny policy needs more demonstrations of these
NUMBER: dict[str, Any] = {"game": "GuessTheNumber-v0", "game_options": {"max_number": 8}, "max_steps_per_episode": 4}
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
class MixOptions(PolicyOptions):
    """The mixture, the policy, and how much to play."""

    environments: list[str] = field(default_factory=lambda: list(NAMES[:4]), metadata={"help": "Some of the five."})
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
    options, args, model_config = parse_options(
        MixOptions, output_dir="outputs/mixed", tiny_defaults=TINY_DEFAULTS, defaults={"dtype": "auto"}
    )
    check_options(options)
    quiet_logging()
    start = time.monotonic()
    sources = make_sources(options.environments, is_tiny=options.model is None)
    weights = dict(zip(sources, options.weights, strict=True)) if options.weights else None
    rows = mix(sources, weights=weights, size=10_000, seed=args.seed)
    tasks: list[Any] = list(mix(sources, size=options.num_games, seed=args.seed, split="eval"))
    if options.model is None:
        policy = make_tiny_policy(rows, sources, args.seed)
    else:
        policy = load_policy(options.model, model_config, trust_remote_code=args.trust_remote_code)
    run = TrainingRun(policy, args, model_config, unit="game")

    references = {kind: play_references(run, kind, sources, tasks) for kind in ("random", "optimal")}
    run.evaluate("untrained", None, tasks, run.policy(seed=args.seed))
    if options.model is None:
        run.warm_start(demonstrate(run, sources, options), options.warm_start_steps, observation_loss=True)
        run.evaluate("imitation", None, tasks, run.policy(seed=args.seed))
    lines = {kind: pooled(parts) for kind, parts in references.items()}
    curve = run.learning_curve(before=next(reversed(run.evaluations)), references=lines)
    curriculum = None if options.weights else Curriculum("environment", low=0.02, high=0.95)
    state = run.learn(None, rows, callbacks=[curve], curriculum=curriculum)
    trained = run.evaluate("trained", None, tasks, run.policy(seed=args.seed))

    curve.draw(after=trained.win_rate)
    fractions = fractions_of_optimal(run, references)
    run.write_summary(
        **{kind: {name: one.as_dict() for name, one in parts.items()} for kind, parts in references.items()},
        fraction_of_optimal=fractions,
        win_rates_in_training=win_rates_in_training(state, sources),
        seconds=round(time.monotonic() - start, 1),
        cpu_seconds=round(time.process_time(), 1),
        settings=vars(options),
    )
    print(f"\nwin rates\n{table(run, references, fractions)}\n")
    print(f"{time.monotonic() - start:.0f} s in all. Everything is in {run.output}")
    sys.exit(run.phases.status)


def check_options(options: MixOptions) -> None:
    """Raise ConfigError for an unknown environment, and unless each one has a weight or none has."""
    for name in options.environments:
        if name not in NAMES:
            raise ConfigError(f"--environments must be some of {', '.join(NAMES)}, got {name}")
    num_weights = len(options.weights or options.environments)
    if num_weights != len(options.environments):
        raise ConfigError(
            f"--weights needs one number for each of the {len(options.environments)} environments, got {num_weights}"
        )


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


def make_tiny_policy(rows: Any, names: Iterable[str], seed: int) -> tuple[Any, Any]:
    """Make the embedded policy with the words of all environments."""
    silent = {"number", "sums"} & set(names)  # the others know their words
    players = {name: players_of(name, None, seed).random for name in silent}
    return tiny_policy(rows, agent=players, num_episodes=400, seed=seed)


def play_references(run: TrainingRun, kind: str, names: Iterable[str], tasks: Sequence[Any]) -> dict[str, Evaluation]:
    """Let the random or optimal player of each environment play its part of the evaluation's tasks."""
    found: dict[str, Evaluation] = {}
    with run.phases.measure(f"{kind} play"), episodes_bar(f"{kind} play", len(tasks), unit="game") as on_finish:
        for name in names:
            rows = [row for row in tasks if row["environment"] == name]
            env = make(rows[0])
            player: Agent = getattr(players_of(name, env, run.args.seed), kind)
            found[name] = evaluate(env, player, rows, max_concurrent=256, on_finish=on_finish)
    return found


def demonstrate(run: TrainingRun, sources: Mapping[str, Any], options: MixOptions) -> list[Trajectory]:
    """Let players that are right about half of the time play each environment."""
    demonstrations: list[Trajectory] = []
    for name, source in sources.items():
        count = options.num_demonstrations * (4 if name in TAKES_LONGER else 1)
        rows: list[Any] = list(mix({name: source}, size=count, seed=derive_seed("warm start", run.args.seed)))
        env = make(rows[0], run.tokenizer)
        demonstrations += run.play(f"{name} to imitate", env, rows, players_of(name, env, run.args.seed).shown)
    return demonstrations


def fractions_of_optimal(run: TrainingRun, references: Mapping[str, Mapping[str, Evaluation]]) -> dict[str, float]:
    """Where the trained policy's reward lies between random play (0) and optimal play (1), by environment."""
    return {
        name: fraction_of_optimal(
            _mean(_part(run, "trained", name).reward),
            random=_mean(references["random"][name].reward),
            optimal=_mean(references["optimal"][name].reward),
        )
        for name in references["random"]
    }


def win_rates_in_training(state: Any, names: Iterable[str]) -> dict[str, list[float]]:
    """Win rates over steps, as often as they were logged; none if nothing was trained."""
    if state is None:
        return {}
    keys = {name: f"win_rate/by_environment/{name}" for name in names}
    return {name: [round(log[key], 3) for log in state.log_history if key in log] for name, key in keys.items()}


def table(run: TrainingRun, references: Mapping[str, Mapping[str, Evaluation]], fractions: Mapping[str, float]) -> str:
    """One row an environment: the win rates of each player and stage, and the fraction of optimal."""
    rows: list[list[str]] = []
    for name, fraction in fractions.items():
        stages = [_part(run, stage, name) for stage in run.evaluations]
        played = [references["random"][name], *stages, references["optimal"][name]]
        rows.append([name, *(f"{_mean(one.win_rate):.1%}" for one in played), f"{fraction:.1%}"])
    return text_table(["environment", "random", *run.evaluations, "optimal", "of optimal"], rows)


def _part(run: TrainingRun, stage: str, name: str) -> Evaluation:
    whole = run.evaluations[stage]
    return whole.by_environment.get(name, whole)  # with one environment, it is the whole


def _mean(estimate: Any) -> float:
    return estimate.mean if estimate is not None else 0.0


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))  # else textarena.py hides the package of the same name
    main()
