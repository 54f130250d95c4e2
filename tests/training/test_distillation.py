"""A teacher beside the rewards: its gradient by enumeration, what it is shown, and that the policy learns from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from games import GuessNumber, logged, policy, tasks, trainer_of
from hypothesis import given
from hypothesis import strategies as st
from test_trl_interface import ROWS_WITH_FAILURES, prepared

from agentsgym import ConfigError, Distillation, PolicyAgent, tiny_policy
from agentsgym.batch.layouts import trajectory_rows
from agentsgym.training.objectives.distillation import TeacherAdvantages, added_advantages
from agentsgym.training.tensors.scoring import plain_logprobs
from agentsgym.training.tensors.token_batch import TokenBatch

SEEDS = st.integers(0, 2**20)


@given(SEEDS, st.integers(2, 6))
def test_without_a_gate_the_expected_gradient_is_that_of_the_divergence(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True)
    taught = torch.randn(size, generator=generator, dtype=torch.float64).log_softmax(-1)
    own = logits.log_softmax(-1)
    divergence = (own.exp() * (own - taught)).sum()
    [expected] = torch.autograd.grad(-divergence, logits, retain_graph=True)
    # A row per token of the vocabulary, weighted by its probability.
    gaps = (taught - own.detach())[:, None]
    turns, mask = torch.zeros(size, 1, dtype=torch.long), torch.ones(size, 1, dtype=torch.long)
    added = added_advantages(gaps, turns, mask, gate=None, by="token")[:, 0]
    [found] = torch.autograd.grad((own.detach().exp() * added * own).sum(), logits)
    assert torch.allclose(found, expected, atol=1e-12)


@given(SEEDS, st.floats(0, 20))
def test_a_gate_keeps_what_the_teacher_endorses_and_attenuates_what_it_rejects(seed: int, gate: float) -> None:
    gaps = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    turns, mask = torch.zeros(3, 5, dtype=torch.long), torch.ones(3, 5, dtype=torch.long)
    added = added_advantages(gaps, turns, mask, gate=gate, by="token")
    assert torch.allclose(added, gaps / (1 + (-gate * gaps).exp()))
    assert (added[gaps > 0] >= gaps[gaps > 0] / 2 - 1e-12).all()
    assert (added[gaps < 0] >= gaps[gaps < 0] / 2 - 1e-12).all()


def test_by_turn_each_token_gets_the_mean_of_its_turn() -> None:
    turns = torch.tensor([[-1, 0, 0, -1, 1, 1, 1], [-1, -1, 2, -1, -1, -1, -1]])
    mask = (turns >= 0).long()
    mask[1] = 0  # not trained on
    gaps = torch.tensor([[0.0, 1, 3, 0, 2, 2, 5], [0.0, 0, 7, 0, 0, 0, 0]])
    added = added_advantages(gaps, turns, mask, gate=None, by="turn")
    assert added.tolist() == [[0, 2, 2, 0, 3, 3, 3], [0] * 7]


def hint(trajectory: Any) -> str | None:
    return "Higher." if trajectory.task_data["seed"] % 2 else None


def teaching(folder: Path, given: Distillation, **changes: Any) -> TeacherAdvantages:
    [objective] = prepared(folder, distillation=given, **changes).objectives
    assert isinstance(objective, TeacherAdvantages)
    return objective


def test_the_teacher_reads_the_context_and_then_the_row(tmp_path: Path) -> None:
    model, tokenizer = policy()
    env = GuessNumber(tokenizer)
    rollouts = env.rollout([{"seed": n} for n in range(4)], PolicyAgent(model, tokenizer, max_turn_tokens=4))
    rows = [row for index, one in enumerate(rollouts) for row in trajectory_rows(index, one)]
    tokens = TokenBatch.stack(rollouts, rows, pad_token_id=0, num_rows=len(rows) + 1)
    mask = tokens.agent_token_mask([True, True, True, False])
    teacher, _ = policy(seed=1)
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "temperature": 0.7}
    given = Distillation(teacher=teacher, context=hint)
    gaps = teaching(tmp_path, given, **changes).gaps(tokens, mask, rollouts)
    before = env.chat_format.render([{"role": "system", "content": "Higher."}], add_prompt=False)
    for index, one in enumerate(rollouts):
        context = before if one.task_data["seed"] % 2 else []
        ids = torch.tensor([[*context, *one.token_ids]])
        with torch.no_grad():
            logits = (teacher(input_ids=ids).logits[0] / 0.7).log_softmax(-1)
        for turn in one.turns:
            for place in range(turn.start, turn.stop):
                taught = float(logits[len(context) + place - 1, one.token_ids[place]])
                expected = (taught - one.logprobs[place]) * int(mask[index, place])
                assert float(gaps[index, place]) == pytest.approx(expected, abs=1e-5)
    assert not gaps[~mask.bool()].any()


def test_a_conversation_begins_once(tmp_path: Path) -> None:
    model, tokenizer = tiny_policy(["one two three"])
    tokenizer.bos_token = "<|im_start|>" if "<|im_start|>" in tokenizer.get_vocab() else tokenizer.eos_token
    env = GuessNumber(tokenizer)
    [rollout] = env.rollout([{"seed": 1}], PolicyAgent(model, tokenizer, max_turn_tokens=2))
    tokens = TokenBatch.stack([rollout], trajectory_rows(0, rollout), pad_token_id=0)
    mask = tokens.agent_token_mask([True])
    trainer = prepared(tmp_path)
    teacher = TeacherAdvantages(Distillation(context=hint), trainer.args, trainer._trl, tokenizer)
    ids, attention, labeled = teacher.teacher_rows(tokens, mask, [rollout])
    own, begun = tokens.ids[0].tolist(), ids[0].tolist()
    is_begun = own[0] == tokenizer.bos_token_id
    assert begun[-(len(own) - is_begun) :] == own[is_begun:]
    assert ids[0][labeled[0].bool()].tolist() == tokens.ids[0][mask[0].bool()].tolist()
    assert int(attention.sum()) == len(begun)


@pytest.mark.parametrize("by", ["token", "turn"])
def test_a_policy_learns_from_a_teacher_alone(tmp_path: Path, by: Any) -> None:
    impossible = tasks(8, secret=99)  # no reward differs
    given = Distillation(teacher=policy(seed=5)[0], weight=1.0, by=by)
    changes = {"max_steps": 40, "advantage_estimator": "grpo", "learning_rate": 3e-3}
    with trainer_of(tmp_path, dataset=impossible, distillation=given, **changes) as trainer:
        trainer.train()
    curve = logged(trainer, "distillation/kl")
    assert len(curve) == 40
    assert sum(curve[-5:]) < 0.5 * sum(curve[:5])


def test_a_policy_is_its_own_teacher_with_a_context(tmp_path: Path) -> None:
    changes = {"distillation": Distillation(context=hint, gate=5.0), "max_steps": 2}
    with trainer_of(tmp_path, **changes) as trainer:
        trainer.train()
    assert all(abs(value) > 1e-6 for value in logged(trainer, "distillation/kl"))
    nothing = {"distillation": Distillation(context=lambda _: None), "max_steps": 2}
    with trainer_of(tmp_path, **nothing) as trainer:
        trainer.train()
    assert all(abs(value) < 1e-5 for value in logged(trainer, "distillation/kl"))


def test_the_gaps_are_added_to_the_advantages(tmp_path: Path) -> None:
    teacher, _ = policy(seed=5)
    plain, taught = prepared(tmp_path), prepared(tmp_path, distillation=Distillation(teacher=teacher, weight=0.5))
    before, after = (one._generate_and_score_completions(ROWS_WITH_FAILURES) for one in (plain, taught))
    assert torch.equal(before["prompt_completion_ids"], after["prompt_completion_ids"])
    mask = before["agent_token_mask"]
    scored = plain_logprobs(teacher, before["prompt_completion_ids"], before["attention_mask"], mask)
    own = plain_logprobs(plain.model, before["prompt_completion_ids"], before["attention_mask"], mask)
    assert torch.allclose(after["advantages"] - before["advantages"], 0.5 * (scored - own), atol=1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "without a teacher needs a context"),
        ({"context": "the answer"}, r"Distillation\(context\) must be a function"),
        ({"context": hint, "weight": 0}, r"Distillation\(weight\) must be a positive number"),
        ({"context": hint, "gate": -1}, r"Distillation\(gate\) must be a non-negative number or None"),
        ({"context": hint, "by": "episode"}, r"Distillation\(by\) must be 'token' or 'turn'"),
    ],
)
def test_bad_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Distillation(**given)


def test_a_teacher_of_another_vocabulary_and_a_context_that_is_no_text_are_refused(tmp_path: Path) -> None:
    other, _ = tiny_policy(["one"])
    with pytest.raises(ConfigError, match="teacher must have the policy's vocabulary"):
        trainer_of(tmp_path, distillation=Distillation(teacher=other))
    silent: Any = lambda _: 7  # noqa: E731
    trainer = trainer_of(tmp_path, distillation=Distillation(context=silent))
    with trainer, pytest.raises(ConfigError, match="context must return a str or None, got 7"):
        trainer.train()
