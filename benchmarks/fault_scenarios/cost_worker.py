"""One checkout under measurement: a line in (``rollout`` or ``step``), the CPU seconds it took out.

It is run with the checkout in front of the path, and imports nothing of agentsgym that is not public.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from rollout_overhead import Size, make_script, rollouts

import agentsgym
from agentsgym import GRPOEnvConfig, GRPOEnvTrainer, tiny_policy
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv

SIZE = Size(64, 16)
NUM_STEPS = 2
ENV_CONFIG: dict[str, Any] = {"max_steps_per_episode": 7, "error_allowance": 7}


def rollout_work() -> Callable[[], object]:
    """The game of ``rollout_overhead``, with an agent that answers at once."""
    script = make_script(SIZE.num_turns)
    return lambda: rollouts(script, SIZE)


def step_work() -> Callable[[], object]:
    """Training steps of Twenty Questions with a small policy."""
    model, tokenizer = tiny_policy(TwentyQuestionsEnv(env_config=ENV_CONFIG), hidden_size=64, seed=0)
    args = GRPOEnvConfig(
        output_dir=tempfile.mkdtemp(),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        max_steps=NUM_STEPS,
        max_turn_tokens=12,
        num_generations=8,
        per_device_train_batch_size=16,
        log_level="error",
        logging_strategy="no",
    )
    env = TwentyQuestionsEnv(tokenizer, ENV_CONFIG)
    trainer = GRPOEnvTrainer(model, env, args, train_dataset=TwentyQuestionsEnv.get_train_dataset(ENV_CONFIG))
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    def train() -> None:
        model.load_state_dict(weights)  # each time the same episodes
        trainer.train()

    return train


def main() -> None:
    """Answer until there is nothing left to do."""
    if Path(sys.argv[1]) not in Path(agentsgym.__file__).parents:
        raise RuntimeError(f"{agentsgym.__file__} is measured, which is not in {sys.argv[1]}")
    torch.set_num_threads(1)
    out, sys.stdout = sys.stdout, sys.stderr  # what trainers print goes elsewhere
    works = {"rollout": rollout_work(), "step": step_work()}
    for line in sys.stdin:
        gc.collect()
        start = time.process_time()
        works[line.strip()]()
        print(time.process_time() - start, file=out, flush=True)


if __name__ == "__main__":
    main()
