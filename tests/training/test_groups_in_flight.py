"""Which task groups begin and which are trained on: none becomes too old, none is lost, and nothing waits for ever."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.training.generation.in_flight import GroupsInFlight, TaskOrder


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
