"""Which tokens are learnt in which row, and in which context."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import ConfigError, StopReason, Trajectory, Turn
from agentsgym.batch.layouts import LAYOUTS, Layout, TrainingRow, trajectory_rows, turn_rows

unmerged = partial(turn_rows, merge=False)


def drawn(picture: str) -> Trajectory:
    """A trajectory drawn with '.' for an environment token, one letter an action, '|' before each new segment."""
    turns: list[Turn] = []
    token_ids: list[int] = []
    for part in picture.split("|"):
        first = len(token_ids)
        for letter in sorted({*part} - {"."}):
            start, stop = first + part.index(letter), first + part.rindex(letter) + 1
            turns.append(Turn(start=start, stop=stop, reward=0.0, prompt_start=first))
        token_ids += map(ord, part)
    return Trajectory(token_ids=token_ids, turns=turns, messages=[], final_reward=0.0, stop_reason=StopReason.DONE)


def pictured(trajectory: Trajectory, rows: list[TrainingRow]) -> list[str]:
    """Each row's tokens, those that are not learnt in it in lower case."""
    return [
        "".join(
            chr(token) if k >= 0 else chr(token).lower()
            for token, k in zip(row.cut(trajectory.token_ids), row.turn_index(), strict=True)
        )
        for row in rows
    ]


@pytest.mark.parametrize(
    ("picture", "merged", "single"),
    [
        ("..AA.B", ["..AA.B"], ["..AA", "..aa.B"]),
        ("..AA.B..", ["..AA.B"], ["..AA", "..aa.B"]),  # nothing is learnt from an observation without answer
        ("..A|...B", ["..A", "...B"], ["..A", "...B"]),
        ("..A.B|...C.D|.E", ["..A.B", "...C.D", ".E"], ["..A", "..a.B", "...C", "...c.D", ".E"]),
        ("AB|C", ["AB", "C"], ["A", "aB", "C"]),
        ("...", ["..."], ["..."]),
        ("", [""], [""]),
    ],
)
def test_what_is_learnt_in_which_row(picture: str, merged: list[str], single: list[str]) -> None:
    trajectory = drawn(picture)
    assert pictured(trajectory, turn_rows(7, trajectory)) == merged
    assert pictured(trajectory, unmerged(7, trajectory)) == single
    assert {row.rollout for row in [*turn_rows(7, trajectory), *unmerged(7, trajectory)]} == {7}


@pytest.mark.parametrize(("picture", "row"), [("..AA.B..", "..AA.B"), ("..", "..")])
def test_one_row_a_rollout_is_all_of_it_up_to_its_last_action(picture: str, row: str) -> None:
    trajectory = drawn(picture)
    assert pictured(trajectory, trajectory_rows(0, trajectory)) == [row]


@pytest.mark.parametrize(("picture", "count"), [("..A|...B", 1), ("..A.B|...C|.D", 2)])
def test_one_row_a_rollout_is_refused_where_its_history_was_rewritten(picture: str, count: int) -> None:
    with pytest.raises(ConfigError, match=rf"history was rewritten {count} times: use layout='turn'"):
        trajectory_rows(0, drawn(picture))


def test_layouts_have_the_names_of_the_settings() -> None:
    assert dict(LAYOUTS) == {"trajectory": trajectory_rows, "turn": turn_rows}


@st.composite
def trajectories(draw: st.DrawFn, *, is_rewritten: bool = True) -> Trajectory:
    """Rollouts whose every token is another, so that a token reports where it stood."""
    lengths = st.tuples(st.booleans() if is_rewritten else st.just(False), st.integers(0, 3), st.integers(0, 3))
    turns: list[Turn] = []
    end = first = 0
    for opens_segment, num_prompt_tokens, num_tokens in draw(st.lists(lengths, max_size=6)):
        first = end if opens_segment and turns else first
        start = end + num_prompt_tokens
        end = start + num_tokens
        turns.append(Turn(start=start, stop=end, reward=0.0, prompt_start=first))
    end += draw(st.integers(0, 2))
    return Trajectory(
        token_ids=range(100, 100 + end), turns=turns, messages=[], final_reward=0.0, stop_reason=StopReason.DONE
    )


def learnt(trajectory: Trajectory, rows: list[TrainingRow]) -> list[tuple[int, int, list[int]]]:
    """Every learnt token with its turn and the tokens before it in its row, in the order of the rows."""
    found: list[tuple[int, int, list[int]]] = []
    for row in rows:
        tokens = row.cut(trajectory.token_ids)
        assert len(tokens) == len(row) == len(row.turn_index())
        found += [(tokens[i], k, tokens[:i]) for i, k in enumerate(row.turn_index()) if k >= 0]
    return found


def wanted(trajectory: Trajectory) -> list[tuple[int, int, list[int]]]:
    """Every agent token with its turn and what it was sampled after."""
    ids = trajectory.token_ids
    return [
        (ids[i], k, list(ids[turn.prompt_start : i]))
        for k, turn in enumerate(trajectory.turns)
        for i in range(turn.start, turn.stop)
    ]


@pytest.mark.parametrize("layout", [turn_rows, unmerged])
@given(trajectory=trajectories())
def test_each_agent_token_is_learnt_once_after_exactly_what_it_was_sampled_after(
    layout: Layout, trajectory: Trajectory
) -> None:
    rows = layout(3, trajectory)
    assert learnt(trajectory, rows) == wanted(trajectory)
    assert {row.rollout for row in rows} == {3}
    assert [k for row in rows for k, _ in row.turns] == list(range(len(trajectory.turns)))
    assert all(turn is trajectory.turns[k] for row in rows for k, turn in row.turns)


@given(trajectory=trajectories(is_rewritten=False))
def test_so_it_is_in_one_row_a_rollout(trajectory: Trajectory) -> None:
    [row] = trajectory_rows(3, trajectory)
    assert learnt(trajectory, [row]) == wanted(trajectory)
    stop = trajectory.turns[-1].stop if trajectory.turns else len(trajectory.token_ids)
    assert row.cut(trajectory.token_ids) == list(trajectory.token_ids)[:stop]


@given(trajectory=trajectories())
def test_merged_rows_hold_no_token_twice_and_are_as_few_as_can_be(trajectory: Trajectory) -> None:
    rows = turn_rows(0, trajectory)
    held = [token for row in rows for token in row.cut(trajectory.token_ids)]
    assert len(held) == len(set(held))
    assert len(rows) == max(1, len({turn.prompt_start for turn in trajectory.turns}))
    assert len(unmerged(0, trajectory)) == max(1, len(trajectory.turns))


@given(trajectory=trajectories())
def test_a_rewritten_rollout_is_no_single_row(trajectory: Trajectory) -> None:
    if len(trajectory.segments) == 1:
        assert trajectory_rows(0, trajectory)
    else:
        with pytest.raises(ConfigError, match="layout='turn'"):
            trajectory_rows(0, trajectory)
