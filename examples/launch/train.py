"""Train as specified by a run file, on several processes, across which the weights may be sharded.

    accelerate launch --config_file examples/launch/accelerate/fsdp2.yaml examples/launch/train.py \
        examples/launch/runs/all_weights.yaml --set training.max_steps=100

The file has the format of ``agentsgym train``. That command also evaluates before and after training and supports a
warm start, for which each process needs all weights, so it shards them only while it trains, without a warm start. Here
only the trainer evaluates (``training.eval_strategy`` and ``training.eval_steps``), on the tasks of the file's
``evaluation``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from agentsgym import ConfigError, GRPOEnvTrainer
from agentsgym.cli.console import UsageError
from agentsgym.cli.options import key_values
from agentsgym.recipes.scripts import quiet_logging
from agentsgym.recipes.train import prepare


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the file, train and save; errors end the process with one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="the run file")
    parser.add_argument("--set", action="append", default=[], metavar="PLACE=VALUE", help="replace a value of the file")
    options = parser.parse_args(arguments)
    quiet_logging()
    try:
        train(options.file, key_values(options.set, "--set"))
    except (ConfigError, UsageError) as error:
        sys.exit(f"error: {error}")


def train(file: str, overrides: dict[str, Any]) -> None:
    """Train as specified by a run file, and print a summary on the main process.

    Raises:
        ConfigError: A value is invalid, or the file has a warm start.
    """
    course = prepare(file, overrides=overrides)
    run, args = course.run, course.run.args
    if course.recipe.warm_start is not None:
        raise ConfigError(
            f"{file}: warm_start is only supported by agentsgym train: run it first, and set 'model' to the saved model"
        )
    trainer = GRPOEnvTrainer(
        run.model,
        course.env,
        args,
        train_dataset=course.worlds.train_rows(),
        eval_dataset=course.worlds.eval_rows() if args.eval_strategy != "no" else None,
        processing_class=run.tokenizer,
        peft_config=run.peft_config,
    )
    with trainer:
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        accelerator = trainer.accelerator
        if accelerator.is_main_process:
            kind = accelerator.distributed_type.value
            print(f"{kind}, {accelerator.num_processes} processes: step {trainer.state.global_step}, {args.output_dir}")


if __name__ == "__main__":
    main()
