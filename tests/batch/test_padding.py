import dataclasses
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentsgym.batch.views import loss_mask, pad_right, pad_task_groups
from agentsgym.types import StopReason, Trajectory, Turn

PAD = -7


def trajectory(length: int, task_index: int, *, failed: bool = False, logprobs: Any = None) -> Trajectory:
    """A trajectory whose tokens behind the first are one turn."""
    return Trajectory(
        token_ids=list(range(1, length + 1)),
        turns=[Turn(start=min(1, length), stop=length, reward=1.0)],
        messages=[{"role": "user", "content": f"{length}"}],
        per_token_rewards=[0.5] * length,
        logprobs=logprobs,
        final_reward=float(length),
        stop_reason=StopReason.FAILED if failed else StopReason.DONE,
        session_id=f"{task_index}/{length}",
        task_index=task_index,
    )


@given(st.lists(st.integers()), st.integers(0, 5))
def test_a_row_is_filled_on_the_right(row: list[int], missing: int) -> None:
    padded = pad_right(row, len(row) + missing, PAD)
    assert padded == row + [PAD] * missing
    assert padded is not row


@given(st.lists(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=3), max_size=4))
def test_each_task_is_padded_to_its_own_longest(groups: list[list[tuple[int, bool]]]) -> None:
    rows = [trajectory(length, task, failed=failed) for task, group in enumerate(groups) for length, failed in group]
    widths = [max(length for length, _ in group) for group in groups for _ in group]
    padded = pad_task_groups(rows, pad_token_id=PAD)
    for n, (row, width) in enumerate(zip(rows, widths, strict=True)):
        length = len(row.token_ids)
        fill = width - length
        agent = 0 if row.failed else 1
        assert padded["padded_full_token_ids"][n] == [*row.token_ids, *[PAD] * fill]
        assert padded["padded_full_attention_mask"][n] == [1] * length + [0] * fill
        assert padded["padded_agent_token_mask"][n] == [0] * min(1, length) + [agent] * (length - 1) + [0] * fill
        assert padded["padded_per_token_rewards"][n] == [0.5] * length + [0.0] * fill
    assert padded["final_rewards"] == [row.final_reward for row in rows]
    assert padded["session_ids"] == [row.session_id for row in rows]
    assert padded["final_completion_messages"] == [row.messages for row in rows]
    assert padded["stop_reasons"] == [row.stop_reason for row in rows]


def test_log_probabilities_are_padded_or_unknown() -> None:
    rows = [trajectory(1, 0, logprobs=[-1.0]), trajectory(3, 0), trajectory(2, 1, logprobs=[0.0, -2.0])]
    assert pad_task_groups(rows, pad_token_id=PAD)["padded_logprobs"] == [[-1.0, 0.0, 0.0], None, [0.0, -2.0]]


def test_a_failed_rollout_is_masked_and_another_is_not() -> None:
    row = trajectory(4, 0)
    assert loss_mask(row) == row.agent_token_mask == [0, 1, 1, 1]
    assert loss_mask(dataclasses.replace(row, stop_reason=StopReason.FAILED)) == [0] * 4
    assert all(loss_mask(dataclasses.replace(row, stop_reason=reason)) != [0] * 4 for reason in [*StopReason][:-1])


def test_rows_do_not_share_lists_with_their_trajectories() -> None:
    row = trajectory(3, 0, logprobs=[0.0, -1.0, -2.0])
    padded: dict[str, Any] = pad_task_groups([row], pad_token_id=PAD)
    padded["padded_full_token_ids"][0].append(99)
    padded["padded_logprobs"][0].append(99)
    padded["final_completion_messages"][0].clear()
    assert list(row.token_ids) == [1, 2, 3]
    assert list(row.logprobs or ()) == [0.0, -1.0, -2.0]
    assert len(row.messages) == 1
