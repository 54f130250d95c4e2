"""Learn one game with one way to give credit after the other, on equal budgets, and compare how many episodes it takes.

::

    python -m benchmarks.credit --games maze --arms grpo return_to_go --seeds 0 1 2     # from the repository's root
    python -m benchmarks.credit --report

    tiny policy ─▶ warm start, once per game and seed ─▶ each arm, from there ─▶ OUT/runs.jsonl ─▶ tables and pictures

An arm is an estimator with its options, its scale, its discount, and its reward: something for each turn, or
nothing but the win. All else is the same for all arms of a game, the warm start's weights, the tasks and their order
included. A run that stands in ``runs.jsonl`` is not played again, so that a grid may be spread over hours; two
processes may share it if they take different seeds.
"""

# pyright: reportUnknownMemberType=false
# transformers and datasets leave parts of their signatures untyped.

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal, cast

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from transformers.utils import logging as transformers_logging

from agentsgym import Agent, GRPOEnvConfig, GRPOEnvTrainer, MultistepEnv, PolicyAgent, Trajectory, evaluate
from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES, ImitationPlayer
from agentsgym.seeding import derive_seed
from agentsgym.tiny import tiny_policy
from agentsgym.training.selection.imitate import imitate, tiny_imitation_config
from benchmarks.credit_games import BlindPlayer, CarelessGuesser
from benchmarks.credit_report import Run, keep, read_runs, write_report
from benchmarks.credit_watched import Watched, WatchedGuess, WatchedMaze, WatchedTree, WatchedTwentyQuestions

NUM_ROLLOUTS = 8  # a task
MAX_TURN_TOKENS = 12
WARM_START: Final = "warm_start"  # the name of the arm that learns no further


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to give credit.

    Attributes:
        estimator: Name of an estimator, or the estimator itself.
        paid: ``"turns"``: rewards during the game; ``"win"``: 1 at the end of a game that is won.
        scale: ``scale_rewards``.
        discount: γ over turns.
        settings: Any other fields of ``GRPOEnvConfig``.
    """

    estimator: str | Callable[..., Any]
    paid: Literal["turns", "win"] = "turns"
    scale: str = "group"
    discount: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


_OTHERS: Final = {"estimator_kwargs": {"baseline": "others"}}
_VALUES: Final = {"value_head": "separate", "value_head_kwargs": {"learning_rate": 1e-3}}

_ECHO: Final = {"observation_loss_weight": 0.1}

#: The first is what TRL's own trainer does: the final reward against its group, the same for every token.
ARMS: Final[Mapping[str, Arm]] = {
    "win_grpo": Arm(estimator="grpo", paid="win"),
    "win_grpo_echo": Arm(estimator="grpo", paid="win", settings=_ECHO),
    "win_return_to_go": Arm(estimator="return_to_go", paid="win"),
    "win_return_to_go_95": Arm(estimator="return_to_go", paid="win", discount=0.95),
    "win_gigpo": Arm(estimator="gigpo", paid="win"),
    "win_gigpo_95": Arm(estimator="gigpo", paid="win", discount=0.95),
    "grpo": Arm(estimator="grpo"),
    "grpo_unscaled": Arm(estimator="grpo", scale="none"),
    "reward": Arm(estimator="reward", scale="none"),
    "rloo": Arm(estimator="rloo", scale="none"),
    "rae": Arm(estimator="rae", scale="none"),
    "return_to_go": Arm(estimator="return_to_go"),
    "return_to_go_echo": Arm(estimator="return_to_go", settings=_ECHO),
    "return_to_go_echo_1": Arm(estimator="return_to_go", settings={"observation_loss_weight": 1.0}),
    "return_to_go_95": Arm(estimator="return_to_go", discount=0.95),
    "return_to_go_90": Arm(estimator="return_to_go", discount=0.9),
    "return_to_go_batch": Arm(estimator="return_to_go", scale="batch"),
    "return_to_go_unscaled": Arm(estimator="return_to_go", scale="none"),
    "return_to_go_unscaled_95": Arm(estimator="return_to_go", scale="none", discount=0.95),
    "rebn": Arm(estimator="rebn", scale="batch"),
    "rebn_95": Arm(estimator="rebn", scale="batch", discount=0.95),
    "mt_grpo": Arm(estimator="mt_grpo"),
    "gigpo": Arm(estimator="gigpo"),
    "gigpo_95": Arm(estimator="gigpo", discount=0.95),
    "gigpo_90": Arm(estimator="gigpo", discount=0.9),
    "gigpo_others": Arm(estimator="gigpo", settings=_OTHERS),
    "gigpo_others_unscaled": Arm(estimator="gigpo", scale="none", settings=_OTHERS),
    "turn_gae": Arm(estimator="turn_gae", scale="batch", settings=_VALUES),
    "turn_gae_95": Arm(estimator="turn_gae", scale="batch", discount=0.95, settings=_VALUES),
    "bilevel_gae": Arm(estimator="bilevel_gae", scale="batch", settings=_VALUES),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """A game, who shows it to the policy first, and how long it is then played.

    Attributes:
        env_class: The game.
        env_config: Its configuration, ``reward_scheme`` left to the arm.
        demonstrator: Makes the player that the warm start imitates, from the environment and a seed.
        num_demonstrations: Its games.
        warm_start_steps: Optimizer steps of the imitation.
        num_episodes: What an arm plays.
        batch_size: Episodes of a generation batch.
        num_updates: Optimizer steps that a generation batch is split into.
        num_iterations: How often it is trained on.
        num_evaluated: Games that are played afterwards.
        learning_rate: Constant.
        secrets: What tasks take turns with as their ``solution``; empty where a seed is all that a task has.
        variant_of: The game whose warm starts it begins from, if not its own.
    """

    env_class: type[Watched]
    env_config: Mapping[str, Any]
    demonstrator: Callable[[Any, int], Agent]
    num_demonstrations: int = 2000
    warm_start_steps: int = 300
    num_episodes: int = 4096
    batch_size: int = 32
    num_updates: int = 2
    num_iterations: int = 1
    num_evaluated: int = 1024
    learning_rate: float = 1e-3
    secrets: Sequence[str] = ()
    variant_of: str = ""

    def make(self, tokenizer: Any = None, *, paid: str = "turns") -> Watched:
        """The environment."""
        scheme = {"reward_scheme": "win"} if paid == "win" else {}
        env = self.env_class(tokenizer, {**self.env_config, **scheme})
        env.last_info = {}
        return env

    def tasks(self, purpose: str, seed: int, count: int) -> list[dict[str, Any]]:
        """Tasks for one purpose, which share no seed with those for another."""
        tasks = [{"seed": derive_seed("credit", purpose, seed, i)} for i in range(count)]
        if not self.secrets:
            return tasks
        return [task | {"solution": self.secrets[i % len(self.secrets)]} for i, task in enumerate(tasks)]

    def held_out_tasks(self, seed: int) -> list[dict[str, Any]]:
        """Tasks unlike those that are learned, to be played afterwards; there may be none."""
        return []

    def policy(self, seed: int) -> tuple[Any, Any]:
        """Make the model before it has learned anything, and its tokenizer."""
        return tiny_policy(cast("Any", self.make()), seed=seed)


def _blind_player(env: Any, seed: int) -> Agent:
    return BlindPlayer(env.actions_of, seed)


_TWENTY_QUESTIONS: Final = Game(  # the example's own objects, turns and warm start
    env_class=WatchedTwentyQuestions,
    env_config={
        "objects": list(DEMO_OBJECTS),
        "properties": list(DEMO_PROPERTIES),
        "max_steps_per_episode": 7,
        "final_guess": True,
        "system_prompt": "",
    },
    demonstrator=ImitationPlayer,
    num_demonstrations=16_000,
    warm_start_steps=3500,
    num_episodes=16_384,
    batch_size=64,
    num_updates=4,
    learning_rate=5e-4,
    secrets=DEMO_OBJECTS,
)

GAMES: Final[Mapping[str, Game]] = {
    "guess": Game(
        env_class=WatchedGuess, env_config={}, demonstrator=CarelessGuesser, warm_start_steps=1000, num_episodes=6400
    ),
    "rounds": Game(
        env_class=WatchedGuess,
        env_config={"rounds": 5},
        demonstrator=CarelessGuesser,
        warm_start_steps=1000,
        num_episodes=5120,
    ),
    "many_rounds": Game(
        env_class=WatchedGuess,
        env_config={"rounds": 12, "max_steps_per_episode": 48},
        demonstrator=CarelessGuesser,
        warm_start_steps=1000,
        num_episodes=3840,
    ),
    "maze": Game(env_class=WatchedMaze, env_config={}, demonstrator=_blind_player),
    "apples": Game(env_class=WatchedTree, env_config={}, demonstrator=_blind_player, num_episodes=2048),
    "twenty_questions": _TWENTY_QUESTIONS,
    "twenty_questions_8": replace(_TWENTY_QUESTIONS, num_updates=8, variant_of="twenty_questions"),
    "twenty_questions_twice": replace(_TWENTY_QUESTIONS, num_iterations=2, variant_of="twenty_questions"),
}


def warm_start(name: str, seed: int, folder: Path, games: Mapping[str, Game] = GAMES) -> Path:
    """Make the policy that every arm of a game and a seed starts from, unless it is there.

    Args:
        name: Of the game.
        seed: Of the model and of the demonstrations.
        folder: Where policies and runs are kept.
        games: All games, by name.

    Returns:
        Where it lies.
    """
    name = games[name].variant_of or name
    path = folder / "warm" / f"{name}-{seed}"
    if path.exists():
        return path
    game = games[name]
    model, tokenizer = game.policy(seed)
    env = game.make(tokenizer)
    tasks = game.tasks("demonstrations", seed, game.num_demonstrations)
    demonstrations = env.rollout(tasks, game.demonstrator(env, seed), max_concurrent=256)
    config = tiny_imitation_config(game.warm_start_steps, seed=seed, disable_tqdm=True)
    imitate(model, demonstrations, tokenizer, config, observation_loss=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=path.parent))
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if path.exists():  # another process was faster, and came to the same
        shutil.rmtree(partial)
    else:
        partial.rename(path)
    return path


def trainer_of(
    game: Game, arm: Arm, seed: int, policy: Path, num_episodes: int, agent_of: Callable[[Any, Any], Any] | None = None
) -> tuple[GRPOEnvTrainer, Watched]:
    """Return the trainer of a game for an arm, from the policy in a folder, and the environment.

    ``agent_of`` makes the sampler from the model and its tokenizer; None is the trainer's own.
    """
    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), cast("Any", AutoTokenizer).from_pretrained(policy)
    env = game.make(tokenizer, paid=arm.paid)
    num_batches = num_episodes // game.batch_size
    args = GRPOEnvConfig(
        output_dir=str(policy / "run"),  # nothing is written there
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        seed=seed,
        max_steps=num_batches * game.num_updates * game.num_iterations,
        num_iterations=game.num_iterations,
        per_device_train_batch_size=game.batch_size // game.num_updates,
        steps_per_generation=game.num_updates,
        num_generations=NUM_ROLLOUTS,
        max_turn_tokens=MAX_TURN_TOKENS,
        learning_rate=game.learning_rate,
        lr_scheduler_type="constant",
        advantage_estimator=cast("Any", arm.estimator),  # a field of the command line, so annotated as a name only
        scale_rewards=arm.scale,
        discount=arm.discount,
        **arm.settings,
    )
    tasks = game.tasks("training", seed, num_batches * game.batch_size // NUM_ROLLOUTS)
    rows = Dataset.from_list([{"task_data": task} for task in tasks])
    agent = agent_of(model, tokenizer) if agent_of else None
    trainer = GRPOEnvTrainer(model, env, args, train_dataset=rows, agent=agent)
    trainer.remove_callback(PrinterCallback)
    return trainer, env


def learn(
    name: str, arm: str, seed: int, folder: Path, games: Mapping[str, Game] = GAMES, arms: Mapping[str, Arm] = ARMS
) -> Run:
    """Learn a game with one arm, unless it is ``warm_start``, and play it afterwards."""
    game = games[name]
    start_folder = warm_start(name, seed, folder, games)
    start = time.process_time()
    if arm == WARM_START:
        env = game.make(AutoTokenizer.from_pretrained(start_folder))
        policy = AutoModelForCausalLM.from_pretrained(start_folder)
    else:
        trainer, env = trainer_of(game, arms[arm], seed, start_folder, game.num_episodes)
        trainer.train()
        policy = cast("Any", trainer).model
    seconds = time.process_time() - start
    played = [score_of(info) for info in env.last_info.values()]
    afterwards = played_by(policy, env, game.tasks("evaluation", seed, game.num_evaluated), seed)
    held_out = played_by(policy, env, game.held_out_tasks(seed), seed)
    anchors = env.anchors()
    return Run(
        game=name,
        arm=arm,
        seed=seed,
        batch_size=game.batch_size,
        random_score=anchors["random_reward"],
        optimal_score=anchors["optimal_reward"],
        scores=[fmean(played[i : i + game.batch_size]) for i in range(0, len(played), game.batch_size)],
        final_score=fmean(score_of(game.info) for game in afterwards),
        final_win_rate=fmean(bool(game.success) for game in afterwards),
        num_evaluated=len(afterwards),
        cpu_s=round(seconds, 1),
        held_out_win_rate=fmean(bool(game.success) for game in held_out) if held_out else None,
    )


def played_by(policy: Any, env: MultistepEnv, tasks: Sequence[Mapping[str, Any]], seed: int) -> Sequence[Trajectory]:
    """Play tasks once each with a policy, sampled; there may be none."""
    if not tasks:
        return ()
    tokenizer: Any = env.tokenizer
    agent = PolicyAgent(policy, tokenizer, seed=derive_seed("evaluation", seed), max_turn_tokens=MAX_TURN_TOKENS)
    return evaluate(env, agent, tasks, max_concurrent=256).trajectories


def score_of(info: Mapping[str, Any]) -> float:
    """What a game is about, in [0, 1], whatever the reward: the fraction that was found, or the win."""
    return float(info.get("score", info["success"]))


def main(
    games: Mapping[str, Game] = GAMES,
    names: Sequence[str] = (*ARMS,),
    out: str = "outputs/credit",
    arms: Mapping[str, Arm] = ARMS,
) -> None:
    """Play what is not there yet, or write the report.

    Args:
        games: What may be played, by name.
        names: The arms that may be played.
        out: The folder of the runs, unless the command line names one.
        arms: How each arm gives credit.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", nargs="+", choices=games, default=list(games), help="default: all")
    parser.add_argument("--arms", nargs="+", choices=names, default=list(names), help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)), help="default: 0 to 4")
    parser.add_argument("--episodes", type=int, help="episodes of each run; default: the game's own")
    parser.add_argument("--out", type=Path, default=Path(out), help=f"default: {out}")
    parser.add_argument("--report", action="store_true", help="write report.md and pictures of these games and arms")
    options = parser.parse_args()
    path = options.out / "runs.jsonl"
    if options.report:
        runs = [run for run in read_runs(path) if run.game in options.games and run.arm in options.arms]
        print(write_report(runs, options.out))
        return
    if options.episodes:
        games = {name: replace(game, num_episodes=options.episodes) for name, game in games.items()}
    torch.set_num_threads(1)  # a second thread gains nothing on so small a model
    transformers_logging.set_verbosity_error()
    for seed, name, arm in product(options.seeds, options.games, options.arms):
        if (name, arm, seed) in {(run.game, run.arm, run.seed) for run in read_runs(path)}:
            continue
        run = learn(name, arm, seed, options.out, games, arms)
        keep(run, path)
        print(f"{name} {arm} seed {seed}: {run.final_fraction:.0%} of optimal after {run.cpu_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
