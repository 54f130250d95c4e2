"""Tables, frames and colors of evaluations and stores."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from agentsgym import ConfigError, ScriptedAgent, StopReason, Trajectory, Turn
from agentsgym.envs import TwentyQuestionsEnv
from agentsgym.reports.colors import BLUE, CSS, INK, PAPER, REFERENCES, VERMILION, strength
from agentsgym.reports.frames import rollouts_frame
from agentsgym.reports.tables import comparison_table, text_table
from agentsgym.statistics.metrics import Estimate, Evaluation, summarize


def evaluation(**fields: Any) -> Evaluation:
    numbers: dict[str, Any] = {
        "win_rate": Estimate(mean=0.4121, low=0.37, high=0.4549),
        "reward": Estimate(mean=1.256, low=-0.5, high=1.31),
        "turns": Estimate(mean=6.54, low=6.4, high=6.66),
        "num_episodes": 512,
        "num_failed": 0,
        "stop_reasons": {},
        "trajectories": [],
    }
    return Evaluation(**(numbers | fields))


def test_the_comparison_shows_it_in_one_look() -> None:
    after = Estimate(mean=0.875, low=0.8411, high=1.0)
    table = comparison_table({"random": evaluation(), "after training": evaluation(win_rate=after, num_episodes=64)})
    assert table.splitlines() == [
        "agent           win rate   95% interval  turns  95% interval  reward   95% interval  episodes",
        "--------------  --------  -------------  -----  ------------  ------  -------------  --------",
        "random             41.2%   [37.0, 45.5]    6.5    [6.4, 6.7]    1.26  [-0.50, 1.31]       512",
        "after training     87.5%  [84.1, 100.0]    6.5    [6.4, 6.7]    1.26  [-0.50, 1.31]        64",
    ]


def test_failures_get_a_column_only_if_there_are_any() -> None:
    table = comparison_table({"a": evaluation(), "b": evaluation(num_failed=3)})
    assert table.splitlines()[0].endswith("episodes  failed")
    assert [line.split()[-1] for line in table.splitlines()[2:]] == ["0", "3"]
    assert "failed" not in comparison_table({"a": evaluation()})


def test_the_fraction_of_optimal_gets_a_column_only_if_it_is_known() -> None:
    placed = evaluation(fraction_of_optimal=Estimate(mean=0.8, low=0.75, high=0.851))
    table = comparison_table({"random": evaluation(), "trained": placed})
    assert table.splitlines()[0].endswith("of optimal  95% interval  episodes")
    assert [line.split()[-3:] for line in table.splitlines()[2:]] == [["1.31]", "-", "512"], ["[75.0,", "85.1]", "512"]]
    assert "of optimal" not in comparison_table({"random": evaluation()})


def test_what_was_not_computed_is_a_dash() -> None:
    (row,) = comparison_table({"a": evaluation(win_rate=None, turns=None)}).splitlines()[2:]
    assert row.split() == ["a", "-", "-", "1.26", "[-0.50,", "1.31]", "512"]


def test_nothing_is_printed_as_minus_zero() -> None:
    zero = Estimate(mean=-0.0, low=-0.004, high=-0.0001)
    (row,) = comparison_table({"a": evaluation(reward=zero, win_rate=zero, turns=zero)}).splitlines()[2:]
    assert row.split() == ["a", "0.0%", "[-0.4,", "0.0]", "0.0", "[0.0,", "0.0]", "0.00", "[0.00,", "0.00]", "512"]


def test_a_comparison_needs_an_evaluation() -> None:
    with pytest.raises(ValueError, match="must contain at least one evaluation"):
        comparison_table({})


def test_different_confidences_do_not_compare() -> None:
    with pytest.raises(ValueError, match=r"the same confidence level, got \[0\.9, 0\.95\]"):
        comparison_table({"a": evaluation(), "b": evaluation(confidence=0.9)})


cells = st.text(st.characters(codec="ascii", exclude_categories=["C", "Z"]), min_size=1, max_size=8)


@given(st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=5))
def test_columns_are_as_wide_as_their_widest_cell(rows: list[tuple[str, ...]]) -> None:
    header = ["name", "x", "y"]
    lines = text_table(header, rows).splitlines()
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(3)]
    assert {len(line) for line in lines} == {sum(widths) + 4}
    assert [line.split() for line in lines[2:]] == [list(row) for row in rows]


def test_a_row_with_a_missing_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        text_table(["a", "b"], [["only one"]])


def test_a_cell_is_one_short_line_that_no_terminal_obeys() -> None:
    table = text_table(["agent", "x"], [["\x1b[31mme\n\tand\x07 you", "1"], ["z" * 5000, "\r2"]])
    assert table.splitlines()[2].startswith("\\x1b[31mme\\n\\tand\\x07 you")
    assert len(table.splitlines()) == 4
    assert max(map(len, table.splitlines())) == 101 + 2 + 3


def rollout(task: int = 0, **changes: object) -> Trajectory:
    fields: dict[str, object] = {
        "token_ids": [7, 8, 9, 7],
        "turns": [Turn(start=1, stop=3, reward=0.5, message_index=1), Turn(start=3, stop=4, reward=0.0, invalid=True)],
        "messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "left"}],
        "logprobs": [0.0, -0.5, -1.5, math.nan],
        "per_token_rewards": [0.0, 0.25, 0.25, 0.0],
        "final_reward": 0.5,
        "stop_reason": StopReason.DONE,
        "info": {"success": True},
        "task_index": task,
    }
    return Trajectory(**(fields | changes))  # pyright: ignore[reportArgumentType]


def framed_evaluation() -> Evaluation:
    failed = rollout(1, stop_reason=StopReason.FAILED, error="turn 0 of Game\nEnvError: gone", final_reward=0.0)
    return summarize([rollout(), failed, rollout(2, final_rewards={"x": 0.5, 1: -0.5})])


def test_an_evaluation_has_a_row_a_rollout() -> None:
    frame = framed_evaluation().to_pandas()
    assert frame["task"].tolist() == [0, 1, 2]
    assert frame["outcome"].tolist() == ["won", "failed", "won"]
    assert frame["turns"].tolist() == [2, 2, 2]
    assert frame["invalid_turns"].tolist() == [1, 1, 1]
    assert frame["agent_tokens"].tolist() == [3, 3, 3]
    assert frame.loc[1, "error"] == "turn 0 of Game"
    assert frame.loc[2, ["reward/x", "reward/1"]].tolist() == [0.5, -0.5]
    assert frame["reward/x"].isna().tolist() == [True, True, False]


def test_turns_and_tokens_have_rows_of_their_own() -> None:
    turns = rollout().to_pandas()
    assert turns["text"].tolist() == ["left", "go"]
    assert turns["logprob"].tolist()[:1] == [-2.0]
    assert math.isnan(turns["logprob"].tolist()[1])
    assert turns[["tokens", "prompt_tokens", "reward"]].to_numpy().tolist() == [[2, 1, 0.5], [1, 3, 0.0]]
    first, second = rollout().turns
    assert rollout(turns=[first, replace(second, parent=0)]).to_pandas()["parent"].tolist()[1:] == [0]
    tokens = rollout().to_pandas("token")
    assert tokens["mask"].tolist() == rollout().agent_token_mask
    assert tokens["reward"].tolist() == [0.0, 0.25, 0.25, 0.0]
    assert tokens["logprob"].isna().tolist() == [True, False, False, True]
    assert len(framed_evaluation().to_pandas(by="turn")) == 6
    assert rollouts_frame([rollout(), rollout(4)], "token")["task"].tolist() == [0] * 4 + [4] * 4


def test_what_is_not_known_is_missing() -> None:
    bare = rollout(logprobs=None, per_token_rewards=[], messages=[])
    assert bare.to_pandas()["text"].isna().all()
    assert bare.to_pandas("token")[["reward", "logprob"]].isna().all(axis=None)
    assert len(rollouts_frame([])) == 0


def test_a_turn_without_tokens_has_no_logprob() -> None:
    env = TwentyQuestionsEnv(env_config={"max_steps_per_episode": 1})  # no tokenizer
    [played] = env.rollout([{"solution": "cat", "seed": 0}], ScriptedAgent(["Is it alive?"]))
    assert played.logprobs is not None
    assert played.to_pandas()["logprob"].isna().all()


def test_another_kind_of_row_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"by must be one of rollout, turn, token, got 'tokens'; did you mean 'token'\?"
    ):
        rollout().to_pandas("tokens")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="by must be one of rollout, turn, token, got 'task'"):
        framed_evaluation().to_pandas(by="task")  # pyright: ignore[reportArgumentType]


def test_the_sums_of_the_rows_are_those_of_the_evaluation() -> None:
    env = TwentyQuestionsEnv(env_config={"max_steps_per_episode": 3})
    tasks = [{"solution": name, "seed": 0} for name in list(env.candidates.objects)[:4]]
    result = summarize(env.rollout(tasks, ScriptedAgent(["Is it alive?"] * 3), 2))
    frame = result.to_pandas()
    assert result.reward is not None
    assert frame["reward"].mean() == pytest.approx(result.reward.mean)
    assert result.to_pandas("turn").groupby(["task", "rollout"]).size().tolist() == frame["turns"].tolist()


SERIES = (BLUE, VERMILION, *REFERENCES)
# Of linear RGB, at full severity: Machado, Oliveira & Fernandes 2009, table 1.
SEEN = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])  # sRGB, D65


def linear(color: str) -> NDArray[np.float64]:
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)] if color.startswith("#") else list(map(int, color.split()))
    values = np.array(parts) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """CIE L*a*b*: one unit is about what can just be seen."""
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / TO_XYZ.sum(axis=1)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2."""
    light, dark = sorted((float(TO_XYZ[1] @ linear(color)) for color in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("vision", SEEN)
def test_the_series_can_be_distinguished(vision: str) -> None:
    seen = [lab(SEEN[vision] @ linear(color)) for color in SERIES]
    assert min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2)) > 20
    for theme in CSS.values():
        positive, negative = (lab(SEEN[vision] @ linear(theme[name])) for name in ("positive", "negative"))
        assert float(np.linalg.norm(positive - negative)) > 40


def test_lines_and_texts_stand_out_from_the_paper() -> None:
    assert min(contrast(color, PAPER) for color in SERIES) > 3  # WCAG 2.2, 1.4.11
    assert contrast(INK, PAPER) > 7
    for theme in CSS.values():
        assert min(contrast(theme[name], theme["paper"]) for name in ("ink", "faint")) > 4.5  # WCAG 2.2, 1.4.3
        assert contrast(theme["ink"], theme["given"]) > 4.5
    assert CSS["light"].keys() == CSS["dark"].keys()


@given(st.floats(), st.floats(0, allow_infinity=False))
def test_the_strength_of_a_color_keeps_sign_and_bounds(value: float, limit: float) -> None:
    strong = strength(value, limit)
    assert -1 <= strong <= 1
    assert (strong == 0) == (value == 0 or math.isnan(value) or limit == 0)
    assert strong == 0 or (strong > 0) == (value > 0)
