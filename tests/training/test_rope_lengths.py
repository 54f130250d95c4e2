"""A model whose RoPE changes with the length is trained up to where it is fixed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import DistributedType
from games import NUMBERS, GuessNumber, logged, policy, recording, settings, tasks, trainer_of
from transformers import AutoModelForCausalLM

from agentsgym import Agent, ConfigError, GRPOEnvTrainer
from agentsgym.tiny import tiny_model
from agentsgym.training.model_checks import check_exactness

LENGTH = 64


def dynamic_policy() -> tuple[Any, Any]:
    model, tokenizer = policy()
    config = model.config
    config.max_position_embeddings = LENGTH
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    changed: Any = AutoModelForCausalLM.from_config(config)
    changed.load_state_dict(model.state_dict())
    return changed, tokenizer


class Insisting(Agent):
    """Always guesses the same, whatever the length."""

    def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
        return NUMBERS[0], None


@pytest.mark.parametrize("agent", [None, Insisting()])
def test_no_row_is_longer_and_the_first_ratios_are_1(agent: Any, tmp_path: Path) -> None:
    model, tokenizer = dynamic_policy()
    env = GuessNumber(tokenizer, {"max_steps_per_episode": 30, "error_allowance": 30})
    args = settings(tmp_path, num_iterations=2, learning_rate=1e-6)
    with GRPOEnvTrainer(model, env, args, tasks(), agent=agent) as trainer:
        played = recording(trainer)
        trainer.train()
    lengths = [len(one.token_ids) for batch in played for one in batch.trajectories]
    assert LENGTH - 20 < max(lengths) <= LENGTH
    assert logged(trainer, "stop/max_tokens")[0] > 0
    assert agent is not None or logged(trainer, "ratio/turn_01")[0] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"use_vllm": True}, "vllm_max_model_length must be at most 64, got None: beyond, the"),
        ({"use_vllm": True, "vllm_max_model_length": 65}, "vllm_max_model_length must be at most 64, got 65"),
        ({"use_vllm": True, "vllm_max_model_length": 64}, None),
        ({"use_vllm": True, "vllm_mode": "server"}, None),
        ({"pad_to_multiple_of": 48}, None),
    ],
)
def test_settings_that_reach_beyond_are_refused(changes: dict[str, Any], complaint: str | None) -> None:
    model, _ = dynamic_policy()
    values = {"use_vllm": False, "vllm_mode": "colocate", "vllm_max_model_length": None, "pad_to_multiple_of": None}
    values |= {"disable_dropout": False, "temperature": 1.0}
    args: Any = SimpleNamespace(**values | changes)
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType.FSDP)  # whose head is not run
    if complaint is None:
        check_exactness(model, agent := Agent(), args, accelerator)
        assert agent.context_length == (args.pad_to_multiple_of or LENGTH)  # rows are padded to the multiple
        return
    with pytest.raises(ConfigError, match=complaint):
        check_exactness(model, Agent(), args, accelerator)


def test_a_context_that_ends_episodes_early_is_warned_of_before_anything_is_played(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for most in (1023, 1024):
        trainer_of(tmp_path, model=tiny_model(policy()[1], max_positions=1024), max_completion_length=most).close()
    assert caplog.text.count("has a context of 1024 tokens, where episodes end with max_tokens: max_comp") == 1
