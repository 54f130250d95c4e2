"""A rollout as an entry of TRL's ``rollout_func``: nothing of a failed one may be trained on."""

import dataclasses

import pytest
from test_layouts import drawn

from agentsgym.errors import ConfigError
from agentsgym.types import StopReason


def test_the_completion_begins_with_the_first_action_and_ends_with_the_last() -> None:
    rollout = drawn("..AA.B.")
    entry = rollout.to_rollout()
    assert entry["prompt_ids"] + entry["completion_ids"] == list(rollout.token_ids[:6])
    assert entry["env_mask"] == entry["action_mask"] == [1, 1, 0, 1]
    assert entry["stop_reason"] == "done"


def test_a_failed_rollout_has_no_action_and_its_stop_reason_reports_why() -> None:
    played, failed = drawn("..AA.B").to_rollout(), drawn("..AA.B", failed=True).to_rollout()
    assert failed["env_mask"] == failed["action_mask"] == [0, 0, 0, 0]
    assert failed["stop_reason"] == "failed"
    assert failed["completion_ids"] == played["completion_ids"]


def test_a_rollout_without_turns_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be converted to one row: it has no turns"):
        dataclasses.replace(drawn(".."), stop_reason=StopReason.DONE).to_rollout()
