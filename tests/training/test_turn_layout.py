"""Rows of one turn or of a few: the gradient of one row a rollout, and the right one where history is rewritten."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from games import GuessNumber, policy, recording, settings, tasks
from test_trl_interface import ROWS, ROWS_WITH_FAILURES, Batch, logp_gradient, prepared

from agentsgym import ConfigError, GRPOEnvTrainer, Message, PolicyAgent, ScoredRollout, Trajectory
from agentsgym.batch.layouts import LAYOUTS, turn_rows
from agentsgym.batch.views import transitions
from agentsgym.credit.registry import get_estimator
from agentsgym.training._trl import TRLInterface
from agentsgym.training.generation.batch import GenerationBatch

LOSS_TYPES = ["dapo", "cispo", "dr_grpo", "luspo", "grpo", "sapo"]
SCHEDULES: dict[str, dict[str, int]] = {
    "in step": {},
    "accumulated": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "two steps a generation": {"per_device_train_batch_size": 4, "steps_per_generation": 2},
    "two iterations": {"num_iterations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
}
# What was answered before the last answer is always shown as the same word.
FORGETS = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% if loop.revindex > 2 %}Say{% else %}{{ message['content'] }}{% endif %}<|end|>"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def newest(messages: list[Message], count: int = 3) -> list[Message]:
    """A window: it slides from the third turn on, so that the first two turns extend each other."""
    return messages[-count:]


alone = partial(newest, count=1)
HISTORIES: list[Any] = [newest, alone, "rerender"]


def rewriting(folder: Path, history: Any = newest, **changes: Any) -> GRPOEnvTrainer:
    """A trainer in the middle of training, of a game whose history is rewritten."""
    model, tokenizer = policy()
    if history == "rerender":
        tokenizer.chat_template = FORGETS
    own = {name: changes.pop(name) for name in ("eval_dataset", "agent") if name in changes}
    trainer = GRPOEnvTrainer(
        model,
        GuessNumber(tokenizer, {"history": history}),
        settings(folder, **{"layout": "turn", "max_failed_fraction": 1.0, **changes}),
        train_dataset=tasks(),
        **own,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer


def generation_gradient(trainer: GRPOEnvTrainer, rows: list[dict[str, Any]] = ROWS) -> list[torch.Tensor]:
    """The gradients of all updates on one generation batch, as the training loop computes them, added up."""
    for _ in range(trainer.args.micro_steps_per_generation):
        trainer.training_step(trainer.model, rows, None)
    gradients = [parameter.grad for parameter in trainer.model.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    return gradients  # type: ignore[return-value]


def assert_equal_gradients(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], rtol: float = 1e-4) -> None:
    assert max(gradient.abs().max() for gradient in theirs) > 1e-4
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-6)


def one_row_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYOUTS, "turn", partial(turn_rows, merge=False))  # type: ignore[arg-type]


def elsewhere_sampled(trainer: GRPOEnvTrainer) -> GRPOEnvTrainer:
    """Have another policy play, so that importance ratios are not 1 where the loss looks at them."""
    trainer.agent = PolicyAgent(*policy(5), max_turn_tokens=4)
    return trainer


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_one_row_a_turn_has_the_gradient_of_one_row_a_rollout(
    loss_type: str, schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"loss_type": loss_type, "epsilon_high": 5.0 if loss_type == "cispo" else 0.2, **SCHEDULES[schedule]}
    whole, split = (
        elsewhere_sampled(prepared(tmp_path, layout=layout, **changes)) for layout in ("trajectory", "turn")
    )
    one_row_a_turn(monkeypatch)
    theirs, ours = (generation_gradient(trainer, ROWS_WITH_FAILURES) for trainer in (whole, split))
    assert_equal_gradients(ours, theirs)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_where_history_only_grows_merged_rows_are_those_of_the_rollouts(loss_type: str, tmp_path: Path) -> None:
    whole, merged = (
        prepared(tmp_path, layout=layout, loss_type=loss_type)._generate_and_score_completions(ROWS_WITH_FAILURES)
        for layout in ("trajectory", "turn")
    )
    assert whole.keys() == merged.keys()
    learnt = whole["agent_token_mask"].any(0).nonzero().max() + 1  # no row goes on behind its last answer
    for name, tensor in whole.items():
        if tensor is not None and name not in {"prompt_completion_ids", "attention_mask"}:
            other = merged[name]
            assert torch.equal(
                tensor[..., :learnt] if tensor.dim() else tensor, other[..., :learnt] if other.dim() else other
            ), name


@pytest.mark.parametrize("loss_type", ["vespo", "gspo"])
def test_weights_of_whole_rows_see_one_row_only(
    loss_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VESPO and GSPO weigh by the ratio of a sequence, which is a row here: another number than a rollout's."""
    changes: dict[str, Any] = (
        {"loss_type": "vespo"} if loss_type == "vespo" else {"importance_sampling_level": "sequence"}
    )
    one_row_a_turn(monkeypatch)
    trainer = elsewhere_sampled(rewriting(tmp_path, **changes, **SCHEDULES["two steps a generation"]))
    assert any(gradient.any() for gradient in generation_gradient(trainer, ROWS_WITH_FAILURES))


# What is right where history is rewritten


def played_gradient(trainer: GRPOEnvTrainer, played: GenerationBatch) -> list[torch.Tensor]:
    """The policy gradient, one answer after the other, each from the prompt that it was sampled from."""
    trajectories = played.trajectories
    scored = [ScoredRollout.from_trajectory(row, group=i // 4) for i, row in enumerate(trajectories)]
    numbers: Any = get_estimator("return_to_go")(scored, discount=1.0, scale=trainer.args.scale_rewards)
    learnt = [row for row in trajectories if not row.failed]
    num_tokens = sum(sum(row.agent_token_mask) for row in learnt)
    total = torch.tensor(0.0)
    for trajectory, advantages in zip(trajectories, numbers, strict=True):
        if not trajectory.failed:
            logps = [turn.sum() for turn in answer_logps(trainer, trajectory)]
            pull = sum(logp * advantage for logp, advantage in zip(logps, advantages, strict=True))
            own = len(trajectories) * sum(trajectory.agent_token_mask)
            total = total - pull / (own if trainer.args.loss_type == "grpo" else num_tokens)
    return list(torch.autograd.grad(total, list(trainer.model.parameters())))


def answer_logps(trainer: GRPOEnvTrainer, trajectory: Trajectory) -> list[torch.Tensor]:
    nested = transitions([trajectory])
    logps: list[torch.Tensor] = []
    for prompt, answer in zip(nested["prompt_ids"][0], nested["ids"][0], strict=True):
        logits = trainer.model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        logps.append(logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0])
    return logps


@pytest.mark.parametrize("changes", [{}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
@pytest.mark.parametrize("history", HISTORIES)
def test_each_answer_is_learnt_from_the_prompt_that_it_was_given_to(
    history: Any, loss_type: str, changes: dict[str, int], tmp_path: Path
) -> None:
    trainer = rewriting(tmp_path, history, loss_type=loss_type, **changes)
    played = recording(trainer)
    ours = generation_gradient(trainer, ROWS_WITH_FAILURES)
    assert any(len(trajectory.segments) > 1 for trajectory in played[0].trajectories)
    assert_equal_gradients(ours, played_gradient(trainer, played[0]))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_merging_changes_no_gradient(loss_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"loss_type": loss_type, "num_iterations": 2}
    merged, single = (elsewhere_sampled(rewriting(tmp_path, **changes)) for _ in range(2))
    theirs = generation_gradient(merged)
    one_row_a_turn(monkeypatch)
    assert_equal_gradients(generation_gradient(single), theirs)


@pytest.mark.parametrize("history", HISTORIES)
def test_recorded_logprobs_are_those_of_the_rows(history: Any, tmp_path: Path) -> None:
    trainer = rewriting(tmp_path, history, num_iterations=2)
    batch = trainer._generate_and_score_completions(ROWS)
    old, mask = batch["old_per_token_logps"], batch["agent_token_mask"]
    scored = batch["prompt_completion_ids"], batch["attention_mask"], mask
    recomputed = TRLInterface(trainer).score(*scored)[0]
    torch.testing.assert_close(old * mask, recomputed * mask, rtol=0, atol=1e-5)
    assert not torch.equal(old * mask, recomputed * mask)  # recorded, not recomputed
    assert (old * mask)[mask == 1].max() < 0


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "dr_grpo"])
def test_the_kl_term_weighs_tokens_in_rows_of_any_kind_alike(
    loss_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy(3)[0].save_pretrained(tmp_path / "reference")
    changes = {"loss_type": loss_type, "beta": 0.5, "max_failed_fraction": 1.0}
    theirs, ours = (with_reference(tmp_path, layout=layout, **changes) for layout in ("trajectory", "turn"))
    one_row_a_turn(monkeypatch)
    whole, split = (generation_gradient(trainer, ROWS_WITH_FAILURES) for trainer in (theirs, ours))
    assert_equal_gradients(split, whole)
    assert theirs._metrics["train"]["kl"][0] > 1e-3
    assert ours._metrics["train"]["kl"][0] > 1e-3


def with_reference(folder: Path, **changes: Any) -> GRPOEnvTrainer:
    tokenizer = policy()[1]
    trainer = GRPOEnvTrainer(
        str(folder / "reference"), GuessNumber(tokenizer), settings(folder, **changes), train_dataset=tasks()
    )
    with torch.no_grad():
        for mine, other in zip(trainer.model.parameters(), policy()[0].parameters(), strict=True):
            mine.copy_(other)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer


# Rows that vary in number


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"per_device_train_batch_size": 2, "steps_per_generation": 4},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    ],
)
def test_rows_are_filled_up_to_whole_microbatches_by_such_as_teach_nothing(
    changes: dict[str, int], tmp_path: Path
) -> None:
    trainer = rewriting(tmp_path, alone, **changes)
    played = recording(trainer)
    batch = trainer._generate_and_score_completions(ROWS)
    num_rows = sum(len(trajectory.turns) for trajectory in played[0].trajectories)
    share = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    assert num_rows % share or share == 1
    assert len(batch["attention_mask"]) == math.ceil(num_rows / share) * share
    assert not batch["agent_token_mask"][num_rows:].any()
    assert not batch["advantages"][num_rows:].any()
    assert batch["num_items_in_batch"] == sum(sum(row.agent_token_mask) for row in played[0].trajectories)
    for tensor in batch.values():
        assert tensor is None or not tensor.dim() or len(tensor) == len(batch["attention_mask"])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_rows_that_only_fill_up_pull_nowhere(loss_type: str, tmp_path: Path) -> None:
    trainer = rewriting(tmp_path, alone, loss_type=loss_type, num_iterations=2)
    batch = trainer._generate_and_score_completions(ROWS)
    fillers = only_rows(batch, (~batch["agent_token_mask"].bool().any(1)).nonzero()[:, 0])
    assert len(fillers["attention_mask"])
    assert not logp_gradient(trainer, fillers).any()
    loss = trainer.compute_loss(trainer.model, fillers)
    assert loss.item() == 0.0
    assert all((one == 0).all() for one in torch.autograd.grad(loss, list(trainer.model.parameters())))


def only_rows(batch: Batch, rows: torch.Tensor) -> Batch:
    return {name: value if value is None or not value.dim() else value[rows] for name, value in batch.items()}


def of_size(trainer: GRPOEnvTrainer, size: int, batch: Batch) -> tuple[float, list[torch.Tensor]]:
    """The loss of a micro-batch and its gradient, with so many rows at once."""
    trainer.args.per_device_train_batch_size = size
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    trainer.accelerator.backward(loss)
    return loss.item(), [parameter.grad.clone() for parameter in trainer.model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_microbatch_of_many_rows_goes_in_parts_and_is_the_same(loss_type: str, tmp_path: Path) -> None:
    trainer = elsewhere_sampled(rewriting(tmp_path, alone, loss_type=loss_type, num_iterations=2))
    batch = trainer._generate_and_score_completions(ROWS)
    num_rows = len(batch["attention_mask"])
    assert num_rows > 8
    seen: list[int] = []
    score = trainer._get_per_token_logps_and_entropies

    def counted(model: Any, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(ids))
        return score(model, ids, *args, **kwargs)

    trainer._get_per_token_logps_and_entropies = counted  # type: ignore[method-assign]
    whole, gradients = of_size(trainer, num_rows, batch)
    parts, ours = of_size(trainer, 8, batch)
    assert seen == [num_rows] + [8] * (num_rows // 8)
    # Each part is of as many rows as there are rollouts in a micro-batch, which is what these divide by.
    factor = 1 if loss_type in {"dapo", "cispo"} else num_rows // 8
    assert parts == pytest.approx(factor * whole, rel=1e-4)
    assert abs(parts) > 1e-4
    assert_equal_gradients(ours, [factor * gradient for gradient in gradients])


def test_only_parts_that_hold_something_are_reported(tmp_path: Path) -> None:
    trainer = rewriting(tmp_path, alone, per_device_train_batch_size=1, gradient_accumulation_steps=8)
    batch = trainer._generate_and_score_completions(ROWS_WITH_FAILURES)
    num_learnt = int(batch["agent_token_mask"].any(1).sum())
    assert num_learnt < len(batch["attention_mask"])
    trainer.compute_loss(trainer.model, batch)
    metrics = trainer._metrics["train"]
    assert len(metrics["entropy"]) == len(metrics["clip_ratio/region_mean"]) == num_learnt
    assert min(metrics["entropy"]) > 0


# What is refused


@pytest.mark.parametrize("history", HISTORIES)
def test_one_row_a_rollout_is_refused_where_history_is_rewritten(history: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rewrites history.*single row of tokens: use layout='turn'"):
        rewriting(tmp_path, history, layout="trajectory")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": "bnpo"}, r"\(loss_type='bnpo'\) is not supported.*use 'dapo'"),
        ({"loss_type": "grpo", "beta": 0.1}, r"\(beta=0.1\) is not supported.*use 'dapo'"),
        ({"loss_type": "sapo", "beta": 0.1}, r"\(beta=0.1\) is not supported"),
        ({"entropy_coef": 0.1}, r"\(entropy_coef=0.1\) is not supported"),
        ({"use_adaptive_entropy": True}, r"\(entropy_coef=.*\) is not supported"),
    ],
)
def test_what_would_weigh_rows_of_any_number_wrongly_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(tmp_path, layout="turn", **changes)
    settings(tmp_path, **changes)


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"GRPOEnvConfig\.layout must be one of 'trajectory', 'turn', got 'turns'"):
        settings(tmp_path, layout="turns")
