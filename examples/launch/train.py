"""Train as a run file says, and nothing else: for several processes, and for weights that are sharded over them.

    accelerate launch --config_file examples/launch/accelerate/fsdp2.yaml examples/launch/train.py \
        examples/launch/runs/all_weights.yaml --set training.max_steps=100

The file is that of ``agentsgym train``, which also evaluates before and after training and warms up: each process then
plays with the whole model, which sharded weights do not allow. Here an evaluation is the trainer's own
(``training.eval_strategy`` and ``training.eval_steps``), on the tasks of the file's ``evaluation``.
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
    """Read the file, train, save; the first process says what was done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="the run file")
    parser.add_argument("--set", action="append", default=[], metavar="PLACE=VALUE", help="replace a value of it")
    options = parser.parse_args(arguments)
    quiet_logging()
    try:
        train(options.file, key_values(options.set, "--set"))
    except (ConfigError, UsageError) as error:
        sys.exit(f"error: {error}")


def train(file: str, overrides: dict[str, Any]) -> None:
    """Train as a file says.

    Raises:
        ConfigError: A value is not valid, or the file asks for what is not done here.
    """
    course = prepare(file, overrides=overrides)
    run, args = course.run, course.run.args
    if course.recipe.warm_start is not None:
        raise ConfigError(f"{file}: warm_start is for agentsgym train; name the model that it saved as 'model' here")
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
