"""Train a tiny policy to play Twenty Questions with TRL's GRPOTrainer on a CPU, after a warm start by imitation.

::

    python examples/stock_trl.py                     # one row per rollout: GRPO on the final reward
    python examples/stock_trl.py --credit turn       # one row per turn, each trained with its own advantage
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL warns that rollout_func may change

from trl import GRPOConfig, GRPOTrainer

from agentsgym import PolicyAgent, evaluate, tiny_policy
from agentsgym.agents.policy.loading import limit_threads
from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES, ImitationPlayer, TwentyQuestionsEnv
from agentsgym.interop import environment_reward, prompt_dataset, rollout_func
from agentsgym.reports.tables import comparison_table
from agentsgym.training.selection.imitate import imitate, tiny_imitation_config

ENV_CONFIG: dict[str, Any] = {
    "objects": list(DEMO_OBJECTS[:8]),
    "properties": list(DEMO_PROPERTIES),
    "max_steps_per_episode": 5,
    "final_guess": True,
    "system_prompt": "",
}
ROLLOUTS = 8  # per task
MAX_TURN_TOKENS = 12


def main() -> None:
    """Imitate, evaluate, train, and evaluate again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--credit", choices=["final", "turn"], default="final", help="credit for complete rollouts, or for each turn"
    )
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps; default: 120")
    parser.add_argument("--warm-up", type=int, default=800, help="optimizer steps of imitation; default: 800")
    parser.add_argument("--tasks", type=int, default=512, help="number of training rows; default: 512")
    options = parser.parse_args()

    model, tokenizer = tiny_policy(TwentyQuestionsEnv(env_config=ENV_CONFIG))
    limit_threads(model)  # more threads slow down a model this small
    env = TwentyQuestionsEnv(tokenizer, ENV_CONFIG)
    rows = env.get_train_dataset(size=options.tasks, split="all")
    demonstrations = env.rollout([dict(row) for row in rows], ImitationPlayer(env, 0), max_concurrent=256)
    imitate(model, demonstrations, tokenizer, tiny_imitation_config(options.warm_up, disable_tqdm=True))

    by_turn = options.credit == "turn"
    # With credit by turn, each of the 8 rollouts of a group becomes up to 5 rows, one per distinct advantage, plus one
    # row per group that balances their sum.
    num_generations = 5 * ROLLOUTS + 1 if by_turn else ROLLOUTS
    credit: dict[str, Any] = {"credit": "turn", "rollouts_per_group": ROLLOUTS} if by_turn else {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model,
            reward_funcs=environment_reward,
            rollout_func=rollout_func(env, max_turn_tokens=MAX_TURN_TOKENS, **credit),
            train_dataset=prompt_dataset(rows),
            processing_class=tokenizer,
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to="none",
                disable_tqdm=True,
                save_strategy="no",
                logging_steps=10,
                max_steps=options.steps,
                learning_rate=1e-3,
                lr_scheduler_type="constant",
                num_generations=num_generations,
                per_device_train_batch_size=4 * num_generations,
                max_completion_length=512,  # of the entire rollout, including observations
                scale_rewards="none" if by_turn else "group",
            ),
        )
        tests = env.get_eval_dataset(size=128, split="all")
        agent = PolicyAgent(model, tokenizer, max_turn_tokens=MAX_TURN_TOKENS)
        before = evaluate(env, agent, tests, max_concurrent=256)
        trainer.train()
        after = evaluate(env, agent, tests, max_concurrent=256)
    print(comparison_table({"before": before, "after": after}))


if __name__ == "__main__":
    main()
