"""What a training script needs around the trainer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from trl import ModelConfig

from agentsgym import ScriptedAgent
from agentsgym.envs.TextArena import TextArenaEnv
from agentsgym.recipes.scripts import Phases, episodes_bar, load_policy, write_transcripts
from agentsgym.testing import chat_tokenizer
from agentsgym.tiny import tiny_model


def test_a_phase_is_measured_also_where_it_fails() -> None:
    phases = Phases()
    with pytest.raises(ValueError, match="broken"), phases.measure("first"):
        raise ValueError("broken")
    with phases.measure("second"):
        sum(range(1000))
    assert list(phases.seconds) == list(phases.cpu_seconds) == ["first", "second"]
    assert min(*phases.seconds.values(), *phases.cpu_seconds.values()) >= 0
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
