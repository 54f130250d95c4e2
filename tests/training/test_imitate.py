"""Behavior cloning: what carries loss, in which order rows come, and that a model learns from it."""

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import SFTTrainer
from trl.trainer import base_trainer

from agentsgym import ConfigError, StopReason, Trajectory, Turn, imitate, tiny_policy
from agentsgym.training import tiny_imitation_config
from agentsgym.training.selection.imitate import bucketed_order, imitation_config, imitation_rows

QUESTIONS = ["Is it alive?", "Is it red?", "Is it a clock?", "Is it a dog?"]
IGNORED = -100


def drawn(picture: str, *, first_id: int = 6, stop_reason: StopReason = StopReason.DONE) -> Trajectory:
    """'.' is an environment token, any letter an agent token, one letter a turn; the ids count upwards."""
    turns = [
        Turn(start=picture.index(letter), stop=picture.rindex(letter) + 1, reward=0.0)
        for letter in sorted(set(picture) - {"."})
    ]
    ids = range(first_id, first_id + len(picture))
    return Trajectory(token_ids=tuple(ids), turns=turns, messages=[], final_reward=0.0, stop_reason=stop_reason)


def small_policy() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return tiny_policy([" ".join(QUESTIONS), "Go. Yes. No.", *"abcdefghijklmnopqrstuvwxyz"], hidden_size=16)


def played(tokenizer: PreTrainedTokenizerBase, opening: str, turns: list[tuple[str, str]]) -> Trajectory:
    """A conversation as ids, the agent's turns with their end-of-turn token."""

    def encoded(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    ids, spans = encoded(f"<|user|>{opening}<|assistant|>"), []
    for question, answer in turns:
        output = encoded(f"{question}<|end|>")
        spans.append(Turn(start=len(ids), stop=len(ids) + len(output), reward=0.0))
        ids += output + encoded(f"<|user|>{answer}<|assistant|>")
    return Trajectory(token_ids=ids, turns=spans, messages=[], final_reward=0.0, stop_reason=StopReason.DONE)


def mean_loss(model: PreTrainedModel, trajectories: list[Trajectory], *, observations: bool) -> float:
    """The loss by hand, row by row, without padding."""
    total, count = 0.0, 0
    for trajectory in trajectories:
        ids, mask = list(trajectory.token_ids), trajectory.agent_token_mask
        with torch.no_grad():
            logps = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        for position in range(1, len(ids)):
            if mask[position] or (observations and position > trajectory.turns[0].start):
                total -= logps[position - 1, ids[position]].item()
                count += 1
    return total / count


@pytest.mark.parametrize(
    ("picture", "observation_loss", "labels"),
    [
        ("..AA..B.", False, ". . 8 9 . . 12 ."),
        ("..AA..B.", True, ". . 8 9 10 11 12 13"),
        ("AA.B", False, "6 7 . 9"),
        ("AA.B", True, "6 7 8 9"),
    ],
)
def test_labels_are_the_recorded_ids_where_there_is_loss(picture: str, observation_loss: bool, labels: str) -> None:
    (row,) = imitation_rows([drawn(picture)], observation_loss=observation_loss)
    assert row["input_ids"] == list(range(6, 6 + len(picture)))
    assert row["labels"] == [IGNORED if label == "." else int(label) for label in labels.split()]


def test_failed_trajectories_are_left_out() -> None:
    rows = imitation_rows([drawn("..A"), drawn("..AA", stop_reason=StopReason.FAILED), drawn(".A")])
    assert [len(row["input_ids"]) for row in rows] == [3, 2]


@pytest.mark.parametrize(
    ("trajectories", "complaint"),
    [
        ([], "at least one trajectory"),
        ([drawn("..A", stop_reason=StopReason.FAILED)], "got 1, all of which failed"),
        ([drawn("..A"), drawn("...")], "has none"),
        ([drawn("")], "environment with a tokenizer"),
    ],
)
def test_nothing_to_learn_from_is_refused(trajectories: list[Trajectory], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        imitation_rows(trajectories)


def test_trajectories_in_the_place_of_the_model_are_refused_with_the_call() -> None:
    model, tokenizer = small_policy()
    swapped: Any = [drawn("..A")], model, tokenizer
    with pytest.raises(ConfigError, match=r"call imitate\(model, trajectories, tokenizer\); got a list$"):
        imitate(*swapped)


def test_settings_that_would_go_wrong_silently_are_refused() -> None:
    model, tokenizer = small_policy()
    with pytest.raises(ConfigError, match="max_length is 3"):
        imitate(model, [drawn("..AA")], tokenizer, imitation_config(max_length=3))
    with pytest.raises(ConfigError, match="packing=False"):
        imitate(model, [drawn("..AA")], tokenizer, imitation_config(packing=True, max_length=8))
    with pytest.raises(ConfigError, match="num_steps=0"):
        tiny_imitation_config(0)


@pytest.mark.parametrize("observation_loss", [False, True])
def test_the_reported_loss_is_the_mean_over_the_chosen_tokens(observation_loss: bool, tmp_path: Path) -> None:
    model, tokenizer = small_policy()
    trajectories = [drawn("..AA..B."), drawn(".AAA", first_id=9), drawn("....A..BB...C", first_id=7)]
    expected = mean_loss(model, trajectories, observations=observation_loss)
    args = imitation_config(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=3, logging_steps=1, disable_tqdm=True
    )
    state = imitate(model, trajectories, tokenizer, args, observation_loss=observation_loss)
    assert state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-4)
    assert state.global_step == 1


def test_a_token_without_loss_has_no_gradient_as_a_label() -> None:
    """The environment's next words must not change the step: only its last token differs, and nothing follows it."""
    weights = []
    for last in (10, 11):
        model, tokenizer = small_policy()
        trajectory = drawn("..AA.")
        changed = Trajectory(
            token_ids=[*trajectory.token_ids[:-1], last],
            turns=trajectory.turns,
            messages=[],
            final_reward=0.0,
            stop_reason=StopReason.DONE,
        )
        imitate(model, [changed], tokenizer, tiny_imitation_config(2, disable_tqdm=True))
        weights.append(torch.cat([weight.flatten() for weight in model.parameters()]))
    assert torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("observation_loss", [False, True])
def test_a_tiny_model_learns_four_conversations_by_heart(observation_loss: bool) -> None:
    model, tokenizer = small_policy()
    openings = "abcd"
    conversations = [
        played(tokenizer, opening, [(question, "Yes."), (QUESTIONS[k - 1], "No.")])
        for k, (opening, question) in enumerate(zip(openings, QUESTIONS, strict=True))
    ]
    args = tiny_imitation_config(150, learning_rate=1e-2, per_device_train_batch_size=4, disable_tqdm=True)
    state = imitate(model, conversations, tokenizer, args, observation_loss=observation_loss)
    assert state.global_step == 150
    assert mean_loss(model, conversations, observations=observation_loss) < 0.02
    for opening, question in zip(openings, QUESTIONS, strict=True):
        prompt = tokenizer(f"<|user|>{opening}<|assistant|>", return_tensors="pt")
        answer = model.generate(**prompt, do_sample=False, max_new_tokens=8)[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(answer) == f"{question}<|end|>"


def test_only_the_weights_of_the_model_change() -> None:
    model, tokenizer = small_policy()
    model.eval()
    before = copy.deepcopy(model)
    imitate(model, [drawn("..AA")], tokenizer, tiny_imitation_config(1, disable_tqdm=True))
    assert not model.training
    assert model.config.use_cache is True
    ids = torch.tensor([[6, 7, 8]])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # a copy bound to the original would now state zero
        assert twin(input_ids=ids).logits.abs().sum() > 0
        assert not torch.equal(twin(input_ids=ids).logits, before(input_ids=ids).logits)


def test_equal_seeds_train_equal_models_and_callbacks_are_called() -> None:
    class Counter(TrainerCallback):
        steps = 0

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.steps += 1

    counter, weights = Counter(), []
    for _ in range(2):
        model, tokenizer = small_policy()
        trajectories = [drawn("." * k + "AA") for k in range(1, 9)]
        args = tiny_imitation_config(3, per_device_train_batch_size=2, disable_tqdm=True)
        imitate(model, trajectories, tokenizer, args, callbacks=[counter])
        weights.append(model.lm_head.weight.detach().clone())
    assert torch.equal(*weights)
    assert counter.steps == 6


@pytest.mark.parametrize(
    ("settings", "num_rows"),
    [
        ({"max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, 20),
        ({"num_train_epochs": 3, "per_device_train_batch_size": 2}, 21),
        ({"num_train_epochs": 1.5, "per_device_train_batch_size": 2}, 11),
    ],
)
def test_as_many_rows_are_laid_out_as_the_run_reads(
    settings: dict[str, Any], num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = small_policy()
    seen = []
    original = SFTTrainer.compute_loss

    def spy(self: SFTTrainer, model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> torch.Tensor:
        seen.extend(inputs["attention_mask"].sum(-1).tolist())
        return original(self, model, inputs, **kwargs)

    monkeypatch.setattr(SFTTrainer, "compute_loss", spy)
    trajectories = [drawn("." * k + "AA") for k in range(1, 8)]
    given_args = imitation_config(disable_tqdm=True, **settings)
    imitate(model, trajectories, tokenizer, given_args)
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    order = bucketed_order(lengths, batch_size=2, num_passes=math.ceil(num_rows / 7), seed=given_args.seed)
    assert seen == [lengths[row] for row in order[:num_rows]]
    assert given_args.train_sampling_strategy == "random"  # the caller's settings are not changed


lengths_strategy = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@given(lengths_strategy, st.integers(1, 7), st.integers(1, 4), st.integers(0, 99))
def test_every_pass_is_a_permutation_and_equal_seeds_agree(
    lengths: list[int], batch_size: int, num_passes: int, seed: int
) -> None:
    order = bucketed_order(lengths, batch_size=batch_size, num_passes=num_passes, seed=seed)
    assert order == bucketed_order(lengths, batch_size=batch_size, num_passes=num_passes, seed=seed)
    assert len(order) == num_passes * len(lengths)
    for start in range(0, len(order), len(lengths)):
        assert sorted(order[start : start + len(lengths)]) == list(range(len(lengths)))


@given(lengths_strategy, st.integers(1, 7), st.integers(1, 4), st.integers(0, 99))
def test_batches_inside_a_pass_do_not_overlap_in_length(
    lengths: list[int], batch_size: int, num_passes: int, seed: int
) -> None:
    """Up to 50 batches a pass are one bucket: sorted by length, each batch begins where the one before it ended."""
    lengths = lengths[: 50 * batch_size]
    order = bucketed_order(lengths, batch_size=batch_size, num_passes=num_passes, seed=seed)
    for number in range(num_passes):
        start, stop = number * len(lengths), (number + 1) * len(lengths)
        first, last = -(-start // batch_size), stop // batch_size  # the batches that lie wholly inside this pass
        batches = sorted(
            sorted(lengths[row] for row in order[k * batch_size : (k + 1) * batch_size]) for k in range(first, last)
        )
        for shorter, longer in itertools.pairwise(batches):
            assert shorter[-1] <= longer[0]


def test_batches_come_in_no_order_of_length_and_passes_differ() -> None:
    lengths = list(range(1000))
    order = bucketed_order(lengths, batch_size=4, num_passes=2, seed=0)
    means = torch.tensor([sum(order[k : k + 4]) / 4 for k in range(0, 1000, 4)])
    places = torch.arange(250.0)
    assert abs(torch.corrcoef(torch.stack([means, places]))[0, 1]) < 0.2
    assert order[:1000] != order[1000:]
    assert order != bucketed_order(lengths, batch_size=4, num_passes=2, seed=1)
    spread = [max(order[k : k + 4]) - min(order[k : k + 4]) for k in range(0, 2000, 4)]
    assert sum(spread) / len(spread) < 40  # five buckets of 200 rows over 1000 lengths; random batches spread over 600


def test_the_tiny_settings_cost_nothing_needless_on_a_cpu_and_end_at_a_tenth_of_the_rate() -> None:
    args = tiny_imitation_config(40, use_cpu=True)
    assert (args.bf16, args.gradient_checkpointing, args.save_strategy) == (False, False, "no")
    assert tiny_imitation_config(40, learning_rate=1e-4, use_cpu=True).learning_rate == 1e-4
    model, tokenizer = small_policy()
    args = tiny_imitation_config(40, logging_steps=1, disable_tqdm=True, use_cpu=True)
    state = imitate(model, [drawn("..AA")], tokenizer, args)
    rates = [entry["learning_rate"] for entry in state.log_history if "learning_rate" in entry]
    assert max(rates) == pytest.approx(3e-3)
    assert rates[-1] == pytest.approx(3e-4, rel=0.25)
    assert rates[1:] == sorted(rates[1:], reverse=True)


def test_it_reports_nothing_about_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(base_trainer, "send_telemetry", lambda **report: sent.append(report))
    monkeypatch.delenv("CI", raising=False)
    model, tokenizer = small_policy()
    imitate(model, [played(tokenizer, "Go.", [(QUESTIONS[0], "Yes.")])], tokenizer, imitation_config(max_steps=1))
    assert not sent
