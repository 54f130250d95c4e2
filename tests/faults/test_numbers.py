"""NaN and infinity: where they stop a run, what they leave behind, and which numbers an agent may not report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from games import GuessNumber, has_moved, policy, trainer_of
from safetensors.torch import load_file

from agentsgym.agents.base import Agent
from agentsgym.agents.policy.agent import PolicyAgent
from agentsgym.agents.policy.sampling import Sampler, SamplingParams
from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.errors import ConfigError, NonFiniteError, TooManyFailuresError
from agentsgym.training.finite import check_weights
from agentsgym.training.selection.imitate import imitate, imitation_config
from agentsgym.types import Action, TurnRequest

pytestmark = pytest.mark.filterwarnings("default")  # the trainer's libraries warn

NAME = "model.layers.0.mlp.up_proj.weight"


class Reporting(Agent):
    """Answers one word, with the log-probability that it is given for it."""

    def __init__(self, logprob: float) -> None:
        self.logprob = logprob

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        return [Action(text="one", token_ids=[7, 2], logprobs=[self.logprob, -1.0]) for _ in requests]


def nth(call: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A hook that puts a value into the n-th gradient that it sees, from 1 on."""
    calls = iter(range(1, 1000))

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        if next(calls) == call:
            gradient = gradient.clone()
            gradient[0, 0] = value
        return gradient

    return hook


def parameter(trainer: Any, name: str = NAME) -> torch.nn.Parameter:
    return dict(trainer.model.named_parameters())[name]


class HugeRewards(GuessNumber):
    """Gives large rewards, negative and positive in turn."""

    size = 1e200

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        state, _, done, info = super()._step_episode(session_id, state, action)
        return state, self.size * (1 if session_id[-1] in "02468ace" else -1), done, info


def test_rewards_that_overflow_are_named_by_rollout(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, env_class=HugeRewards)
    named = r"_step_episode's reward must lie within ±3\.4e\+38, .* got -?1e\+200"
    with pytest.raises(TooManyFailuresError, match=named):
        trainer.train()


def test_the_largest_rewards_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HugeRewards, "size", 3e38 / 8)  # the sum over turns is a reward too
    trainer = trainer_of(tmp_path, env_class=HugeRewards, advantage_estimator="return_to_go", scale_rewards="batch")
    trainer.train()
    assert has_moved(trainer)


@pytest.mark.parametrize(("value", "message"), [(math.nan, "NaN"), (math.inf, "infinity"), (-math.inf, "infinity")])
def test_a_gradient_that_is_not_finite_stops_the_run_before_it_is_used(
    value: float, message: str, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, max_steps=4, save_strategy="steps", save_steps=1)
    parameter(trainer).register_hook(nth(2, value))
    with pytest.raises(NonFiniteError, match=f"^step 2: the gradient of '{NAME}' contains {message}; the step was"):
        trainer.train()
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    trainer.save_model(str(tmp_path / "saved"))  # the weights from before the step
    saved, before = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "checkpoint-1"))
    assert all(tensor.isfinite().all() for tensor in before.values())
    assert all(torch.equal(saved[name], before[name]) for name in before)


def test_of_several_gradients_the_one_nearest_to_the_loss_is_named(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    for name in ("model.layers.0.self_attn.q_proj.weight", NAME):
        parameter(trainer, name).register_hook(nth(1, math.nan))
    with pytest.raises(NonFiniteError, match=f"step 1: the gradient of '{NAME}' contains NaN, as 2 of 12 do"):
        trainer.train()


def test_a_gradient_too_large_for_its_square_stops_the_run(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    parameter(trainer).register_hook(nth(1, 1e30))
    with pytest.raises(NonFiniteError, match=f"the norm of the gradient overflows, mostly from '{NAME}';"):
        trainer.train()
    assert not has_moved(trainer)


def test_the_micro_batch_is_named_whose_loss_is_not_finite(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=4, per_device_train_batch_size=2)
    compute_loss, calls = trainer.compute_loss, iter(range(1, 1000))

    def compute(*args: Any, **kwargs: Any) -> torch.Tensor:
        return compute_loss(*args, **kwargs) * (math.inf if next(calls) == 7 else 1)

    trainer.compute_loss = compute
    with pytest.raises(
        NonFiniteError, match=r"^step 2: the loss of micro-batch 3 of 4 is (nan|-?inf); the step was skipped"
    ):
        trainer.train()


def test_weights_that_a_step_broke_are_not_saved(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, learning_rate=1e38, max_grad_norm=0, optim="sgd", save_strategy="steps", save_steps=1
    )
    parameter(trainer).register_hook(nth(1, 1e5))
    with pytest.raises(NonFiniteError, match=f"^after step 1: the weight '{NAME}' contains infinity; they are not"):
        trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))
    with pytest.raises(NonFiniteError, match="in the model that is to be saved"):
        trainer.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()


def test_a_run_does_not_begin_with_weights_that_are_not_finite(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    with torch.no_grad():
        parameter(trainer)[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=f"^before step 1: the weight '{NAME}' contains NaN"):
        trainer.train()


@pytest.mark.parametrize("name", [NAME, "value_head.head.weight"])
def test_a_weight_that_something_else_broke_is_distinguished_from_a_gradient(name: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, advantage_estimator="turn_gae", value_head="shared", max_steps=3)
    assert trainer.value_model is not None
    weight = trainer.value_model.head.weight if name.startswith("value") else parameter(trainer)

    compute_loss, calls = trainer.compute_loss, iter(range(1, 1000))

    def compute(*args: Any, **kwargs: Any) -> torch.Tensor:
        if next(calls) == 2:
            weight.data[0, 0] = math.nan
        return compute_loss(*args, **kwargs)

    trainer.compute_loss = compute
    with pytest.raises(
        NonFiniteError, match=f"^step 2.* the weight '{name}' contains NaN; it already did before the step"
    ):
        trainer.train()


def test_the_gradient_of_a_value_head_is_checked_too(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, advantage_estimator="turn_gae", value_head="shared", max_steps=3)
    assert trainer.value_model is not None
    trainer.value_model.head.weight.register_hook(nth(2, math.nan))
    with pytest.raises(NonFiniteError, match=r"^step 2: the gradient of 'value_head\.head\.weight' contains NaN"):
        trainer.train()
    assert all(weight.isfinite().all() for weight in trainer.value_model.parameters())


def test_a_run_goes_on_after_one_that_broke(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    parameter(trainer).register_hook(nth(1, math.nan))
    with pytest.raises(NonFiniteError):
        trainer.train()
    trainer.train()
    assert has_moved(trainer)


def test_imitation_stops_too() -> None:
    model, tokenizer = policy()
    games = GuessNumber(tokenizer).rollout([{"seed": 0}], ScriptedAgent(["one", "two"]), 4)
    model.get_parameter(NAME).register_hook(nth(2, math.nan))
    with pytest.raises(NonFiniteError, match=f"^step 2: the gradient of '{NAME}' contains NaN"):
        imitate(model, games, tokenizer, imitation_config(max_steps=3, use_cpu=True, disable_tqdm=True))
    assert all(weight.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("logprob", [-1e4, -300.0, 3.0, 0.01, math.inf, -math.inf])
def test_a_log_probability_that_no_sampler_gives_fails_its_episode(logprob: float, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, num_iterations=2, agent=Reporting(logprob))
    with pytest.raises(TooManyFailuresError, match=r"an Action's logprobs\[0\] must be NaN .* or between -104 .* got"):
        trainer.train()
    assert not has_moved(trainer)


@pytest.mark.parametrize("logprob", [0.0, 1e-4, -103.5, math.nan])
def test_log_probabilities_at_the_edge_are_taken(logprob: float) -> None:
    [game] = GuessNumber(policy()[1]).rollout([{"seed": 0}], Reporting(logprob))
    assert not game.failed


def test_an_unknown_log_probability_hides_no_impossible_one() -> None:
    action = Action(text="one", token_ids=[7, 7, 2], logprobs=[math.nan, -1e4, -1.0])
    [game] = GuessNumber(policy()[1]).rollout([{"seed": 0}], ScriptedAgent([action]))
    assert "logprobs[1]" in (game.error or "")


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_policy_whose_logits_became_nan_or_infinite_reports_it(temperature: float, broken: float) -> None:
    model, tokenizer = policy()
    env, agent = GuessNumber(tokenizer), PolicyAgent(model, tokenizer, sampling=SamplingParams(temperature=temperature))
    assert not env.rollout([{"seed": 0}], agent)[0].failed
    with torch.no_grad():
        model.get_parameter("lm_head.weight")[3] = broken
    [game] = env.rollout([{"seed": 0}], agent)
    assert "NonFiniteError: the policy's logits are NaN or infinite, so no token can be drawn" in (game.error or "")


def test_a_policy_whose_logits_are_nan_from_the_first_is_refused() -> None:
    model, tokenizer = policy()
    with torch.no_grad():
        model.get_parameter("lm_head.weight")[3] = math.nan
    with pytest.raises(
        ConfigError, match="LlamaForCausalLM cannot be sampled: the policy's logits are NaN or infinite"
    ):
        GuessNumber(tokenizer).rollout([{"seed": 0}], PolicyAgent(model, tokenizer))


def test_tokens_that_are_ruled_out_are_no_fault() -> None:
    logits = torch.tensor([[0.0, -math.inf, -math.inf]])
    assert Sampler(SamplingParams()).draw(logits, torch.tensor([0.5])) == ([0], [0.0])


def test_what_a_penalty_alone_makes_possible_has_no_log_probability() -> None:
    seen = torch.tensor([[True, False]])
    tokens, [logprob] = Sampler(SamplingParams(repetition_penalty=4.0)).draw(
        torch.tensor([[400.0, 200.0]]), torch.tensor([0.5]), seen
    )
    assert tokens == [1]
    assert math.isnan(logprob)


def test_weights_whose_squares_overflow_are_weights() -> None:
    check_weights([("large", torch.tensor([1e30]))], "here")
    with pytest.raises(NonFiniteError, match=r"^here: the weight 'larger' contains infinity"):
        check_weights([("large", torch.tensor([1e30])), ("larger", torch.tensor([-math.inf]))], "here")
