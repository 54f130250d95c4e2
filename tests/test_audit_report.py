"""How the report of an audit reads, and what it counts."""

import pytest
from test_audit import FAILED, GOOD, put, with_turn

from agentsgym import AgentsGymError, audit


def test_nothing_is_fine() -> None:
    report = audit([])
    report.raise_if_broken()
    assert (report.ok, report.num_trajectories) == (True, 0)


def test_the_report_reads_well() -> None:
    report = audit([GOOD, FAILED, put(GOOD, logprobs=None, final_reward=5.0)])
    assert str(report).splitlines() == [
        "3 trajectories (1 failed), 9 turns (0 invalid, 0 encoded afterwards, 3 without log-probabilities), "
        "36 tokens (18 of agents) in 3 segments",
        "1 problems",
        "  trajectory 2 (session s): [outcome] final_reward must be the sum of the turn rewards, 6.0, got 5.0",
    ]
    with pytest.raises(AgentsGymError, match="final_reward must be the sum"):
        report.raise_if_broken()


def test_a_turn_without_tokens_counts_for_nothing() -> None:
    silent = audit([put(with_turn(GOOD, 1, start=5, stop=5), logprobs=None)])
    assert (silent.num_turns, silent.num_turns_without_logprobs, silent.num_agent_tokens) == (3, 2, 3)
    backwards = audit([with_turn(GOOD, 1, start=5, stop=4)])
    assert (backwards.num_turns, backwards.num_agent_tokens) == (3, 3)


def test_a_long_report_is_cut_and_keeps_every_problem() -> None:
    report = audit([put(GOOD, final_reward=5.0)] * 23)
    assert len(report.problems) == 23
    assert str(report).splitlines()[-1] == "  and 3 more"
