"""What a generation batch holds, and which task groups begin and are trained on: none too old, none lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from games import TextAgent, tasks, trainer_of
from hypothesis import given
from hypothesis import strategies as st
from test_trl_interface import ROWS, ROWS_WITH_FAILURES, only, parameter_gradients, prepared

from agentsgym.training._trl import TRLInterface
from agentsgym.training.generation.in_flight import GroupsInFlight, TaskOrder


def test_what_a_generation_batch_holds(tmp_path: Path) -> None:
    trainer = prepared(tmp_path, beta=0.0)
    batch = trainer._generate_and_score_completions(ROWS_WITH_FAILURES)
    assert list(batch) == [
        "prompt_completion_ids",  # TRL reads the number of rows from the first value
        "attention_mask",
        "agent_token_mask",
        "advantages",
        "turn_index",
        "old_per_token_logps",
        "ref_per_token_logps",
        "sampling_per_token_logps",
        "importance_sampling_ratio",
        "num_items_in_batch",
        "num_rollouts",
    ]
    ids, attention_mask, mask = (batch[key] for key in list(batch)[:3])
    assert ids.shape == attention_mask.shape == mask.shape == batch["advantages"].shape
    assert len(ids) == len(ROWS_WITH_FAILURES)
    assert {tensor.dtype for tensor in (ids, attention_mask, mask)} == {torch.long}
    assert batch["advantages"].dtype == torch.float32
    assert (attention_mask.diff(dim=1) <= 0).all()  # padded on the right
    assert attention_mask.sum(1).max() == ids.shape[1]
    assert (ids[attention_mask == 0] == trainer.processing_class.pad_token_id).all()
    assert (mask <= attention_mask).all()
    assert (batch["advantages"][mask == 0] == 0).all()
    assert batch["num_items_in_batch"].dim() == 0
    assert batch["num_items_in_batch"] == mask.sum()
    for name in ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio"):
        assert batch[name] is None
    assert torch.equal(batch["turn_index"] >= 0, mask == 1)
    starts = (mask.diff(dim=1, prepend=torch.zeros(len(mask), 1)) == 1).cumsum(1)  # each turn is a run of agent tokens
    assert torch.equal(batch["turn_index"], torch.where(mask == 1, starts - 1, -1))
    assert mask.any(1).tolist() == [True] * 6 + [False] * 2
    assert attention_mask.any(1).all()  # a failed row stays, with its tokens


@pytest.mark.parametrize(
    ("changes", "are_needed"),
    [
        ({}, False),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, False),
        ({"steps_per_generation": 2}, True),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, True),
        ({"num_iterations": 2}, True),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 2}, False),
    ],
)
def test_the_samplers_logprobs_are_the_old_ones_where_updates_lag_behind(
    changes: dict[str, int], are_needed: bool, tmp_path: Path
) -> None:
    trainer = prepared(tmp_path, per_device_train_batch_size=4, **changes)
    batch = trainer._generate_and_score_completions(ROWS_WITH_FAILURES)
    old, mask = batch["old_per_token_logps"], batch["agent_token_mask"]
    assert (old is not None) == are_needed
    if old is not None:
        scored = batch["prompt_completion_ids"], batch["attention_mask"], mask
        recomputed = TRLInterface(trainer).score(*scored)[0]
        torch.testing.assert_close(old * mask, recomputed * mask, rtol=0, atol=1e-5)
        assert not torch.equal(old * mask, recomputed * mask)  # recorded, not recomputed
        assert (old * mask)[mask == 1].max() < 0


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.5, "temperature": 1.3}])
def test_recorded_logprobs_are_those_that_trl_computes(sampling: dict[str, float], tmp_path: Path) -> None:
    trainer = prepared(tmp_path, num_iterations=2, **sampling)
    batch = trainer._generate_and_score_completions(ROWS)
    old, mask = batch["old_per_token_logps"], batch["agent_token_mask"]
    scored = batch["prompt_completion_ids"], batch["attention_mask"], mask
    recomputed = TRLInterface(trainer).score(*scored)[0]
    torch.testing.assert_close(old * mask, recomputed * mask, rtol=0, atol=1e-5)


def test_an_agent_without_logprobs_has_them_recomputed(tmp_path: Path) -> None:
    trainer = prepared(tmp_path, num_iterations=2, agent=TextAgent())
    batch = trainer._generate_and_score_completions(ROWS)
    scored = (batch[key] for key in ("prompt_completion_ids", "attention_mask", "agent_token_mask"))
    assert torch.equal(batch["old_per_token_logps"], TRLInterface(trainer).score(*scored)[0])


def test_a_microbatch_of_failed_rollouts_alone_has_no_gradient(tmp_path: Path) -> None:
    trainer = prepared(tmp_path)
    batch = trainer._generate_and_score_completions(ROWS_WITH_FAILURES)
    loss = trainer.compute_loss(trainer.model, only(batch, slice(6, 8)))
    assert loss.item() == 0.0
    assert all((gradient == 0).all() for gradient in parameter_gradients(trainer, loss))


@pytest.mark.parametrize("task_data", [{"breaks": True}, {"cannot_start": True}])
def test_a_batch_of_failed_rollouts_alone_does_not_break_the_run(task_data: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, dataset=tasks(4, **task_data), max_failed_fraction=1.0, max_steps=1)
    weights = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    if "cannot_start" in task_data:
        assert trainer.state.log_history[0]["failed"] == 1.0
        assert all(map(torch.equal, weights, trainer.model.parameters()))


@st.composite
def lengths(draw: st.DrawFn) -> list[int]:
    """How many ticks each group lasts: most are short, some very long."""
    return draw(st.lists(st.integers(1, 3) | st.integers(20, 60), min_size=60, max_size=60))


class Play:
    """Groups that last some ticks each, whatever else happens."""

    def __init__(self, in_flight: GroupsInFlight, lasts: list[int], last_batch: int | None) -> None:
        self.in_flight, self.lasts, self.last_batch = in_flight, lasts, last_batch
        self.now = 0
        self.ends: dict[tuple[int, int], int] = {}
        self.begun: dict[int, int] = {}

    def tick(self, num_updates: int, next_batch: int) -> None:
        while self.in_flight.may_begin(num_updates, next_batch, self.last_batch):
            number = len(self.begun)
            self.in_flight.begin(number, num_updates)
            self.begun[number] = num_updates
            for rollout in range(self.in_flight.num_rollouts):
                lasts = self.lasts[(number * self.in_flight.num_rollouts + rollout) % len(self.lasts)]
                self.ends[number, rollout] = self.now + lasts
        assert self.in_flight.num_live <= self.in_flight.size * self.in_flight.num_rollouts
        self.now += 1
        for one in [one for one, end in self.ends.items() if end <= self.now]:
            self.in_flight.finish(one[0])
            del self.ends[one]

    def take(self, batch: int) -> list[int]:
        for _ in range(200):
            if (taken := self.in_flight.take(batch)) is not None:
                return taken
            self.tick(batch, batch)
        pytest.fail("a batch was waited for without end")


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), lengths(), st.integers(0, 6), st.booleans())
def test_no_group_is_older_than_it_may_be_and_none_is_lost(
    size: int, num_rollouts: int, max_staleness: int, lasts: list[int], train_ticks: int, is_end_known: bool
) -> None:
    num_batches = len(lasts) // size // 2
    play = Play(GroupsInFlight(size, num_rollouts, max_staleness), lasts, num_batches - 1 if is_end_known else None)
    trained = Counter[int]()
    for batch in range(num_batches):
        taken = play.take(batch)
        assert len(taken) == size
        assert all(batch - play.begun[one] <= max_staleness for one in taken)
        trained.update(taken)
        for _ in range(train_ticks):
            play.tick(batch, batch + 1)
    assert max(trained.values()) == 1
    oldest_left = min((play.begun[one] for one in play.begun if one not in trained), default=num_batches)
    assert num_batches - oldest_left <= max_staleness  # what is left can still be trained on in time
    if is_end_known:
        assert len(play.begun) == num_batches * size  # nothing begins that nobody would train on


def test_with_one_update_ahead_batches_are_trained_on_in_the_order_in_which_they_began() -> None:
    in_flight = GroupsInFlight(2, 1, 1)
    for number in range(2):
        in_flight.begin(number, 0)
    in_flight.finish(0)
    in_flight.begin(2, 0)
    in_flight.finish(2)
    assert in_flight.take(0) == [0, 2]  # whichever is finished first
    in_flight.begin(3, 1)
    in_flight.finish(3)
    assert in_flight.take(1) is None  # group 1 began two updates before the next batch: it is waited for
    in_flight.finish(1)
    assert in_flight.take(1) == [1, 3]


def test_nothing_begins_while_a_whole_batch_waits() -> None:
    in_flight = GroupsInFlight(2, 1, 9)
    for number in range(2):
        in_flight.begin(number, 0)
        in_flight.finish(number)
    assert not in_flight.may_begin(0, 1)
    assert in_flight.take(0) == [0, 1]
    assert in_flight.may_begin(0, 1)


@given(st.integers(1, 20), st.integers(0, 3), st.integers(1, 4))
def test_each_pass_deals_every_row_once_and_ranks_share_the_groups(num_rows: int, seed: int, num_ranks: int) -> None:
    order = TaskOrder(num_rows, seed)
    dealt = sorted(
        number
        for rank in range(num_ranks)
        for number, _ in zip(order.untrained(rank, num_ranks), range(3 * num_rows), strict=False)
    )[: 3 * num_rows]
    assert dealt == list(range(3 * num_rows))
    rows = [order.row(number) for number in dealt]
    for start in range(0, 3 * num_rows, num_rows):
        assert sorted(rows[start : start + num_rows]) == list(range(num_rows))
    assert [order.row(number) for number in reversed(dealt)] == rows[::-1]


def test_without_shuffling_rows_come_as_they_stand() -> None:
    order = TaskOrder(3, 0, shuffle=False)
    assert [order.row(number) for number in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@given(st.lists(st.integers(0, 12), unique=True))
def test_what_was_not_trained_on_is_dealt_again_after_a_resume(trained: list[int]) -> None:
    order, resumed = TaskOrder(5, 0), TaskOrder(5, 0)
    order.trained(trained)
    resumed.load_state_dict(order.state_dict())
    left = [number for number, _ in zip(resumed.untrained(0, 1), range(20), strict=False)]
    assert left == [number for number in range(40) if number not in trained][:20]
