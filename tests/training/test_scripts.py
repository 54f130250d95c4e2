"""What a training script needs around the trainer, and which of its options count."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import ModelConfig

from agentsgym import ConfigError, ScriptedAgent
from agentsgym.envs.TextArena import TextArenaEnv
from agentsgym.recipes.from_values import PolicyOptions, parse_options
from agentsgym.recipes.scripts import Phases, episodes_bar, load_policy, write_transcripts
from agentsgym.testing import chat_tokenizer
from agentsgym.tiny import tiny_model


def test_a_phase_is_measured_also_where_it_fails() -> None:
    phases = Phases()
    with pytest.raises(ValueError, match="broken"), phases.measure("first"):
        raise ValueError("broken")
    with phases.measure("second"):
        sum(range(1000))
    assert list(phases.seconds) == ["first", "second"]
    assert min(phases.seconds.values()) >= 0
    assert not phases.interrupted


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_run_goes_on_behind_a_phase_that_a_signal_ended(number: signal.Signals, status: int) -> None:
    phases, before = Phases(), signal.getsignal(signal.SIGTERM)
    with phases.interruptible():
        os.kill(os.getpid(), number)
        pytest.fail("the signal did not end the phase")
    assert phases.interrupted
    assert phases.status == status
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_error_inside_is_no_interruption() -> None:
    phases = Phases()
    with pytest.raises(ValueError, match="broken"), phases.interruptible():
        raise ValueError("broken")
    assert not phases.interrupted


def test_episodes_advance_the_bar_and_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = TextArenaEnv(env_config={"game": "GuessTheNumber-v0", "max_steps_per_episode": 2})
    with episodes_bar("games", 3, unit="game") as on_finish:
        rollouts = env.rollout([{"seed": seed} for seed in range(3)], ScriptedAgent(["4", "5"]), on_finish=on_finish)
    assert "3/3" in capsys.readouterr().err
    write_transcripts(tmp_path / "games.txt", rollouts)
    assert (tmp_path / "games.txt").read_text(encoding="utf-8").count("=== task ") == 3


def test_a_policy_is_loaded_with_a_padding_token(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    tiny_model(tokenizer).save_pretrained(tmp_path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    model, loaded = load_policy(str(tmp_path), ModelConfig(dtype="float32"))
    assert loaded.pad_token == loaded.eos_token
    assert model.num_parameters() > 0


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
    assert [parsed(*argv)[0].overwrite for argv in ([], ["--overwrite"])] == [False, True]


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
