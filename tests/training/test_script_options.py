"""What a training script reads: its own options, the trainer's, the model's, and which of them counts."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from agentsgym import ConfigError
from agentsgym.recipes.from_values import PolicyOptions, parse_options


@dataclass
class Options(PolicyOptions):
    size: int = field(default=3, metadata={"help": "How large."})


@pytest.fixture(autouse=True)
def _threads_as_found() -> Generator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def parsed(*argv: str, tiny: Any = None) -> tuple[Any, Any, Any]:
    return parse_options(
        Options,
        output_dir="outputs/mine",
        tiny_defaults=tiny or {"max_steps": 7, "learning_rate": 0.5},
        defaults={"max_steps": 5, "learning_rate": 0.25, "dtype": "auto"},
        argv=["--use_cpu", *argv],
    )


def test_the_embedded_policy_has_defaults_of_its_own() -> None:
    torch.set_num_threads(2)
    options, args, model_config = parsed("--learning_rate", "0.125")
    assert (options.model, options.size) == (None, 3)
    assert (args.max_steps, args.learning_rate, args.output_dir) == (7, 0.125, "outputs/mine")
    assert (args.logging_steps, args.save_strategy, model_config.dtype) == (20, "no", "auto")
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("flag", ["--model", "--model_name_or_path"])
def test_a_model_of_ones_own_does_not(flag: str) -> None:
    torch.set_num_threads(2)
    options, args, _ = parsed(flag, "some/model")
    assert options.model == "some/model"
    assert (args.max_steps, args.learning_rate) == (5, 0.25)
    assert torch.get_num_threads() == 2


def test_defaults_may_depend_on_the_scripts_options() -> None:
    _, args, _ = parsed("--size", "11", tiny=lambda options: {"max_steps": options.size})
    assert args.max_steps == 11


def test_a_file_counts_more_than_defaults_and_less_than_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("size: 4\nmax_steps: 9\nlearning_rate: 0.0625\n", encoding="utf-8")
    options, args, _ = parsed("--config", str(tmp_path / "run.yaml"), "--max_steps", "10")
    assert (options.size, args.max_steps, args.learning_rate) == (4, 10, 0.0625)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--load_in_4bit"], "--load_in_4bit requires --use_peft"),
        (["--model", "a", "--model_name_or_path", "b"], "are the same option: use only one"),
        (["--sizes", "3"], "^unknown arguments: --sizes 3$"),
        (["--fork_budget=40"], "^unknown arguments: --fork_budget=40: training no longer forks .*; leave fork_budget"),
    ],
)
def test_what_cannot_be_done_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(*argv)
