"""Let the embedded policy learn FrozenLake through GymnasiumEnv, and place it between random and optimal play.

The policy first imitates random play, so that it begins at random play and knows how an action is written; everything
else it learns by reward::

    python benchmarks/learn_frozen_lake.py --seeds 0 1 2 3 4
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from agentsgym import GRPOEnvConfig, GRPOEnvTrainer, PolicyAgent, evaluate, imitate, tiny_policy
from agentsgym.envs.Gymnasium import GymnasiumEnv, OptimalPlayer, RandomPlayer
from agentsgym.evaluation import Evaluation
from agentsgym.reports.tables import comparison_table
from agentsgym.seeding import derive_seed
from agentsgym.training import tiny_imitation_config

NUM_GAMES = 512


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--slippery", action="store_true", help="play on slippery ice")
    parser.add_argument("--random-maps", action="store_true", help="draw a map for each task")
    parser.add_argument("--max-turns", type=int, default=20)
    parser.add_argument("--warm-start-steps", type=int, default=150)
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of reinforcement learning")
    return parser.parse_args()


def learn(options: argparse.Namespace, seed: int) -> dict[str, Evaluation]:
    """Train one policy, and evaluate it before and after beside the two references."""
    config: dict[str, Any] = {
        "make_kwargs": {"is_slippery": options.slippery},
        "max_steps_per_episode": options.max_turns,
        "system_prompt": "",  # the tiny policy learns the rules by playing
    }
    model, tokenizer = tiny_policy(GymnasiumEnv(None, config), seed=seed)
    env = GymnasiumEnv(tokenizer, config)
    maps = {"random_maps": options.random_maps}
    tasks = env.get_eval_dataset(size=NUM_GAMES, **maps)

    def policy() -> PolicyAgent:
        return PolicyAgent(model, tokenizer, seed=derive_seed("evaluation", seed), max_turn_tokens=4)

    evaluations = {name: evaluate(env, player, tasks) for name, player in references(env, seed).items()}
    shown: list[Any] = list(env.get_train_dataset(size=512, seed=seed, **maps))
    demonstrations = env.rollout(shown, RandomPlayer(env, seed=seed))
    settings = tiny_imitation_config(options.warm_start_steps, seed=seed, disable_tqdm=True, report_to="none")
    imitate(model, demonstrations, tokenizer, settings)
    evaluations["before"] = evaluate(env, policy(), tasks, max_concurrent=128)
    args = GRPOEnvConfig(
        output_dir="outputs/frozen_lake",
        advantage_estimator="gigpo",
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_steps=options.steps,
        per_device_train_batch_size=32,
        steps_per_generation=2,
        num_generations=16,
        max_turn_tokens=4,
        seed=seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = GRPOEnvTrainer(model, env, args, train_dataset=env.get_train_dataset(size=4096, seed=seed, **maps))
    trainer.train()
    trainer.close()
    evaluations["after"] = evaluate(env, policy(), tasks, max_concurrent=128)
    return evaluations


def references(env: GymnasiumEnv, seed: int) -> dict[str, Any]:
    """The two players at the ends of the scale."""
    return {"random": RandomPlayer(env, seed=seed), "optimal": OptimalPlayer(env)}


def main() -> None:
    """Learn with each seed, and print the results."""
    torch.set_num_threads(1)  # a second thread gains nothing on so small a model
    options = parse()
    for seed in options.seeds:
        start = time.process_time()
        evaluations = learn(options, seed)
        print(f"seed {seed}, {time.process_time() - start:.0f} s of processor time")
        print(comparison_table(evaluations), flush=True)


if __name__ == "__main__":
    main()
