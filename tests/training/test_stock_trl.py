"""TRL's own trainer with our rollout function, and its tool loop with our environments."""

from __future__ import annotations

from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from games import logged, policy, tasks, trainer_of
from number_games import GuessNumber
from peft import LoraConfig
from stock import Recorded, stock_settings, stock_trainer
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOTrainer

import agentsgym
import agentsgym.training
from agentsgym import ConfigError, GRPOEnvTrainer, TooManyFailuresError, Trajectory
from agentsgym.envs import ToolEnv
from agentsgym.envs.dataset_rows import class_path
from agentsgym.interop import as_environment_factory, prompt_dataset, rollout_func
from agentsgym.testing import chat_tokenizer

KEYS = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "action_mask", "step_rewards", "final_reward")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def recorded(trainer: Any) -> list[tuple[bool, dict[str, Any]]]:
    function = trainer.rollout_func
    assert isinstance(function, Recorded)
    return function.calls


def watched(trainer: GRPOEnvTrainer) -> list[tuple[bool, list[Trajectory]]]:
    """The batches that our trainer plays from now on."""
    found: list[tuple[bool, list[Trajectory]]] = []
    play = trainer.generator.generate

    def generate(rows: Any, phase: Any) -> Any:
        batch = play(rows, phase)
        found.append((phase.is_training, list(batch.trajectories)))
        return batch

    trainer.generator.generate = generate
    return found


def test_it_plays_what_our_trainer_plays_bit_for_bit(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "learning_rate": 0.0, "max_steps": 3, "seed": 5, "gradient_accumulation_steps": 2, "steps_per_generation": 1,
        "temperature": 1.3, "top_k": 12,
    }  # fmt: skip
    ours = trainer_of(tmp_path / "ours", dataset=tasks(12), eval_dataset=tasks(2), **changes)
    batches = watched(ours)
    theirs = stock_trainer(tmp_path / "stock", rows=tasks(12), eval_dataset=prompt_dataset(tasks(2)), **changes)
    for trainer in (ours, theirs):
        trainer.evaluate()
        trainer.train()
        trainer.evaluate()
    calls = recorded(theirs)
    assert [is_training for is_training, _ in calls] == [is_training for is_training, _ in batches]
    assert sum(is_training for is_training, _ in calls) == 6
    for (_, batch), (_, call) in zip(batches, calls, strict=True):
        expected = [trajectory.to_rollout() for trajectory in batch]
        for key in KEYS:
            assert call[key] == [row[key] for row in expected], key
    assert calls[0][1] == calls[-1][1] != calls[1][1]  # an evaluation plays the same again


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_run_that_is_resumed_plays_what_it_would_have_played(checkpointing: bool, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_steps": 3, "save_steps": 2, "save_strategy": "steps"}
    whole = stock_trainer(tmp_path, gradient_checkpointing=checkpointing, **changes)
    whole.train()
    resumed = stock_trainer(tmp_path, gradient_checkpointing=checkpointing, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(recorded(resumed)) == 1
    assert recorded(resumed)[0] == recorded(whole)[2]


def step_of(trainer: Any) -> dict[str, torch.Tensor]:
    """What one optimizer step changes in the weights, which plain SGD at a learning rate of 1 makes the gradient."""
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    return {name: tensor - before[name] for name, tensor in trainer.model.state_dict().items()}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """How far two gradients are apart, by the length of the second."""
    squares = [((one[name] - other[name]) ** 2).sum() for name in one]
    return float(sum(squares) / sum((tensor**2).sum() for tensor in other.values())) ** 0.5


SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1}


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_rows_by_turn_have_the_gradient_of_our_own_trainer(loss_type: str, tmp_path: Path) -> None:
    ours = step_of(trainer_of(tmp_path / "ours", loss_type=loss_type, epsilon_high=5.0, **SGD))
    by_turn = {"credit": "turn", "rollouts_per_group": 4}
    stock = {"scale_rewards": "none", "loss_type": loss_type, "epsilon_high": 5.0, **SGD}
    roomy = stock_trainer(
        tmp_path / "roomy", rollouts=by_turn, num_generations=24, per_device_train_batch_size=48, **stock
    )
    assert distance(step_of(roomy), ours) < 1e-4
    assert logged(roomy, "reward")[0] == pytest.approx(0, abs=1e-6)
    assert logged(roomy, "final_reward")[0] != 0
    tight = stock_trainer(
        tmp_path / "tight", rollouts=by_turn, num_generations=5, per_device_train_batch_size=10, **stock
    )
    final = stock_trainer(tmp_path / "final", loss_type=loss_type, epsilon_high=5.0, **SGD)
    off = distance(step_of(tight), ours)
    assert 0.05 < off < distance(step_of(final), ours)  # a mean over the rollout is nearer than its final reward


def test_a_row_a_rollout_has_the_gradient_of_grpo(tmp_path: Path) -> None:
    ours = step_of(trainer_of(tmp_path / "ours", advantage_estimator="grpo", **SGD))
    assert (
        distance(step_of(stock_trainer(tmp_path / "stock", **SGD)), ours) < 1e-3
    )  # TRL adds 1e-4 to what it divides by


def test_observations_are_not_trained(tmp_path: Path) -> None:
    trainer = stock_trainer(tmp_path, max_steps=1)
    trainer.train()
    [(_, call)] = recorded(trainer)
    agent = sum(map(sum, call["env_mask"]))
    assert agent < sum(map(len, call["completion_ids"]))
    assert logged(trainer, "completions/mean_length") == [agent / 8]
    assert call["env_mask"] == call["action_mask"]


def test_failed_rollouts_train_nothing_and_too_many_end_the_run(tmp_path: Path) -> None:
    rows = [{"task_data": {"seed": seed, "fears": "six" if seed == 1 else "no such word"}} for seed in range(2)]
    trainer = stock_trainer(tmp_path, rows=rows, max_steps=1, rollouts={"max_failed_fraction": 1.0})
    trainer.train()
    [(_, call)] = recorded(trainer)
    failed = [index for index, reason in enumerate(call["stop_reason"]) if reason == "failed"]
    assert 0 < len(failed) < 8
    for index in range(8):
        assert (call["row_reward"][index] is None) == (not any(call["env_mask"][index])) == (index in failed)
    assert logged(trainer, "loss")
    strict = stock_trainer(tmp_path, rows=rows, rollouts={"max_failed_fraction": 0.0})
    with pytest.raises(TooManyFailuresError, match="that word again"):
        strict.train()


def test_adapters_are_trained_and_sampled(tmp_path: Path) -> None:
    trainer = stock_trainer(tmp_path, peft_config=LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    trainer.train()
    first, second = (call for _, call in recorded(trainer))
    assert first["completion_ids"] != second["completion_ids"]


def test_rows_build_their_own_environments_and_a_class_is_built_with_the_tokenizer(tmp_path: Path) -> None:
    agentsgym.register(GuessNumber)  # another test of this process may have done so by another name
    rows = [
        {"env_class_path": class_path(GuessNumber), "env_config": {"max_steps_per_episode": turns}, "task_data": {}}
        for turns in (1, 3)
    ]
    tokenizer = policy()[1]
    named = stock_trainer(tmp_path, rows=rows, env=lambda _: GuessNumber(tokenizer), max_steps=1)
    with pytest.raises(ConfigError, match="env=None"):
        named.train()
    trainer = stock_trainer(tmp_path, rows=rows, max_steps=1)
    trainer.rollout_func = Recorded(rollout_func(max_turn_tokens=4))
    trainer.train()
    [(_, call)] = recorded(trainer)
    assert {len(rewards) for rewards in call["step_rewards"]} >= {1, 3}
    built = stock_trainer(tmp_path, env=GuessNumber, max_steps=1)
    built.train()
    assert recorded(built)


def test_groups_of_several_batches_of_one_task_are_distinguished(tmp_path: Path) -> None:
    trainer = stock_trainer(tmp_path, rows=[{"task_data": {"secret": 1}}] * 2, max_steps=1)
    trainer.train()
    [(_, call)] = recorded(trainer)
    first, second = call["completion_ids"][:4], call["completion_ids"][4:]
    assert first != second
    assert any(one != other for one, other in pairwise(first))


def test_a_budget_that_ends_most_rollouts_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stock_trainer(tmp_path, max_completion_length=6, env_config={"max_steps_per_episode": 9}).train()
    [warning] = [record.getMessage() for record in caplog.records if "max_completion_length=6" in record.getMessage()]
    assert "reached their token budget" in warning


BY_TURN = {"credit": "turn", "rollouts_per_group": 2}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mask_truncated_completions": True}, "by the last token"),
        ({"use_transformers_continuous_batching": True}, "keeps its own key/value cache"),
        ({"cache_implementation": "static"}, "keep their own key/value cache"),
        ({"generation_kwargs": {"top_p": 0.5}}, "unless use_vllm"),
        ({"env_config": {"history": "rerender"}}, "as one sequence of tokens"),
        ({"reward_funcs": lambda prompts, **_: [0.0] * len(prompts), "rollouts": BY_TURN}, "scale_rewards='none'"),
        ({"rollouts": BY_TURN, "scale_rewards": "none", "loss_type": "grpo"}, "dapo, cispo, dr_grpo"),
        ({"rollouts": BY_TURN, "scale_rewards": "none", "importance_sampling_level": "sequence"}, "use 'token'"),
        ({"rollouts": BY_TURN, "scale_rewards": "none", "top_entropy_quantile": 0.5}, "leave it at 1"),
        ({"rollouts": {"credit": "turn", "rollouts_per_group": 4}, "scale_rewards": "none"}, "below 4, got 4"),
        (
            {
                "rollouts": BY_TURN, "scale_rewards": "none", "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 4, "steps_per_generation": 5, "num_generations": 5,
            },
            None,
        ),
    ],
)  # fmt: skip
def test_what_would_go_silently_wrong_is_refused_by_name(
    changes: dict[str, Any], reason: str | None, tmp_path: Path
) -> None:
    trainer = stock_trainer(tmp_path, **changes)
    if reason is None:  # the groups are whole, whatever the micro-batches are
        trainer.train()
        return
    with pytest.raises(ConfigError, match=reason):
        trainer.train()


def test_tools_and_further_rewards_are_refused(tmp_path: Path) -> None:
    trainer = stock_trainer(tmp_path)
    trainer.tools = [print]
    with pytest.raises(ConfigError, match="ignores env_mask"):
        trainer.train()
    rewards = [lambda prompts, **_: [0.0] * len(prompts)] * 2
    both = stock_trainer(tmp_path, rollouts=BY_TURN, scale_rewards="none", reward_funcs=rewards)
    with pytest.raises(ConfigError, match=r"pass only agentsgym\.interop\.environment_reward"):
        both.train()
    other = stock_trainer(tmp_path)
    other.rollout_func = lambda prompts, trainer: {
        name: values for name, values in rollout_func(GuessNumber(trainer.processing_class))(prompts, trainer).items()
        if name != "row_reward"
    }  # fmt: skip
    with pytest.raises(ConfigError, match="needs the rows returned by agentsgym's rollout_func"):
        other.train()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"credit": "turns"}, "'final' or 'turn'"),
        ({"credit": "turn"}, "rollouts_per_group"),
        ({"rollouts_per_group": 2}, "must be set with credit='turn'"),
        ({"max_turn_tokens": 0}, "max_turn_tokens"),
        ({"advantage_estimator": "return_too_go"}, "return_to_go"),
        ({"scale_rewards": True}, "'none', 'group' or 'batch'"),
        ({"advantage_estimator": "turn_gae"}, "requires a value head"),
        ({"stop_strings": "stop"}, "stop_strings.*a list of strings"),
    ],
)
def test_arguments_are_checked_when_the_function_is_made(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        rollout_func(**arguments)


def test_a_trainer_that_does_not_repeat_rows_is_notified(tmp_path: Path) -> None:
    trainer = stock_trainer(tmp_path)
    prompts = prompt_dataset(tasks(8))["prompt"]
    with pytest.raises(ConfigError, match="must repeat each row 4 times"):
        trainer.rollout_func(list(prompts), trainer)


def test_what_is_no_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        stock_trainer(tmp_path, env=GuessNumber()).train()
    with pytest.raises(ConfigError, match="env must be a MultistepEnv"):
        stock_trainer(tmp_path, env=lambda _: "a game").train()


def test_it_is_found_beside_our_trainer_too() -> None:
    assert agentsgym.training.rollout_func is rollout_func
    with pytest.raises(AttributeError, match="no attribute 'rollout'"):
        agentsgym.training.rollout  # noqa: B018


TEMPLATE = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


BEGINNINGS = (
    call("add", '{"first": 3, "second": 4}'),
    call("add", '{"first": "many", "second": 4}'),
    "I would rather not.",
    call("answer", '{"action": "8"}') + "\n" + call("add", '{"first": 1, "second": 1}'),
)
ANSWERS = {
    "<tool_response>\n7\n": call("answer", '{"action": "7"}'),
    "'first' of 'add' must be an integer": call("jump", "{}"),
}


class Scripted(Qwen3ForCausalLM):
    """Begins in each of four ways, and goes on from what it was given; its weights are trained as they are."""

    tokenizer: Any
    prompts: list[str]

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        beginnings = cycle(BEGINNINGS)
        output: list[torch.Tensor] = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            text = self.tokenizer.decode(ids[mask.bool()])
            self.prompts.append(text)
            reported = text.rpartition("<|im_start|>user\n")[2]
            answer = next((answer for key, answer in ANSWERS.items() if key in reported), "That is all.")
            if "<tool_response>" not in reported:
                answer = next(beginnings)
            output.append(torch.tensor(self.tokenizer.encode(answer + "<|im_end|>", add_special_tokens=False)))
        pad = self.tokenizer.pad_token_id
        padded = torch.nn.utils.rnn.pad_sequence(output, batch_first=True, padding_value=pad)
        return torch.cat([input_ids, padded], dim=1)


def add(first: int, second: int) -> int:
    """Add two numbers.

    Args:
        first: One of them.
        second: The other.
    """
    return first + second


def test_trls_tool_loop_plays_rewards_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = TEMPLATE
    size = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=len(tokenizer), num_hidden_layers=1, head_dim=8, **size)
    model = Scripted(config)
    model.tokenizer, model.prompts = tokenizer, []
    env = ToolEnv(tools=[add], env_config={"call_reward": 0.25})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = GRPOTrainer(
        model,
        environment_factory=as_environment_factory(env),
        train_dataset=prompt_dataset([{"question": "What is 3 + 4?", "answer": "7"}], instruction="Reply."),
        processing_class=tokenizer,
        args=stock_settings(
            tmp_path, max_steps=1, num_generations=4, per_device_train_batch_size=4, max_completion_length=2000
        ),
    )
    trainer.train()

    assert "<|im_start|>user\nReply.\n\nWhat is 3 + 4?<|im_end|>" in model.prompts[0]
    assert '"name": "add"' in model.prompts[0]
    assert '"name": "answer"' in model.prompts[0]
    turns = [text.count("<|im_start|>assistant\n") for text in model.prompts]
    assert turns == [1, 1, 1, 1, 2, 2, 2, 3, 3]  # who calls nothing plays on no longer
    assert "{'error': 'The episode is over.'}" in model.prompts[6]  # the second call of one turn, after the answer
    log = trainer.state.log_history[0]
    assert log["reward"] == pytest.approx((0.25 + 1.0) / 4)  # the first is right; nothing else was worth anything
    assert not env.active_states
    assert any(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
