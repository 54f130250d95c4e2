"""How well a judge agrees with labels: the numbers, the file, and the command."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_games import ScriptedJudge, data_of, longest_first
from typer.testing import CliRunner

from agentsgym import ConfigError, Criterion, Judge
from agentsgym.cli.app import app
from agentsgym.evaluation.judge_agreement import Agreement, judge_agreement, read_labels
from agentsgym.statistics.intervals import cohen_kappa, kappa_estimate, share_estimate, weighted_kappa

POLITE = {"polite": "Polite?"}
CLEAR = [Criterion("clear", "Clear?", scale=(1, 5))]


def output(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "A guest."}, {"role": "assistant", "content": text}]


def write(folder: Path, rows: Sequence[Any]) -> Path:
    file = folder / "labels.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def kappa_by_hand(labels: Sequence[float], given: Sequence[float]) -> float | None:
    """Cohen's kappa from the table of counts."""
    number = len(labels)
    observed = sum(a == b for a, b in zip(labels, given, strict=True)) / number
    expected = sum(labels.count(one) * given.count(one) for one in {*labels, *given}) / number**2
    return None if expected == 1 else (observed - expected) / (1 - expected)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_kappa_is_that_of_the_table(pairs: list[tuple[int, int]]) -> None:
    labels, found = ([float(one) for one in side] for side in zip(*pairs, strict=True))
    expected = kappa_by_hand(labels, found)
    assert cohen_kappa(labels, found) == (None if expected is None else pytest.approx(expected))
    weighted = weighted_kappa(labels, found)
    if weighted is not None:
        chance = sum((a - b) ** 2 for a in labels for b in found) / len(labels) ** 2
        own = sum((a - b) ** 2 for a, b in pairs) / len(pairs)
        assert weighted == pytest.approx(1 - own / chance)


def test_kappa_of_two_answers_is_the_same_weighted_or_not() -> None:
    labels, found = [1, 1, 0, 0, 1, 0, 1], [1, 0, 0, 0, 1, 1, 1]
    assert weighted_kappa(labels, found) == pytest.approx(cohen_kappa(labels, found))


def test_nothing_has_no_kappa() -> None:
    assert cohen_kappa([], []) is None
    assert weighted_kappa([], []) is None
    assert kappa_estimate(cohen_kappa, [1, 1], [1, 1], [0, 1]) is None


def test_intervals_hold_the_estimate_and_shrink_with_more_labels() -> None:
    widths: list[float] = []
    for number in (40, 640):
        rng = random.Random(0)
        labels = [float(rng.random() < 0.5) for _ in range(number)]
        found = [one if rng.random() < 0.8 else 1 - one for one in labels]
        kappa = kappa_estimate(cohen_kappa, labels, found, range(number))
        share = share_estimate([float(a == b) for a, b in zip(labels, found, strict=True)], range(number))
        assert kappa is not None
        assert kappa.low < kappa.mean < kappa.high
        assert kappa.low < 0.6 < kappa.high
        assert share.low < 0.8 < share.high
        widths.append(kappa.high - kappa.low)
    assert widths[1] < widths[0] / 3
    assert share_estimate([1.0] * 20, range(20)).low == pytest.approx(0.025 ** (1 / 20))


def agreement_of(folder: Path, judge: Judge, rows: Sequence[Any]) -> Agreement:
    return judge_agreement(judge, read_labels(write(folder, rows), judge))


def test_answers_of_yes_or_no_are_compared(tmp_path: Path) -> None:
    judge = Judge(ScriptedJudge(lambda prompt: {"polite": "hello" in data_of(prompt)}), rubric=POLITE)
    words = [("hello", True), ("hello", True), ("good day", True), ("go away", False)]
    found = agreement_of(
        tmp_path, judge, [{"messages": output(text), "labels": {"polite": one}} for text, one in words]
    )
    [polite] = found.criteria
    assert (polite.name, polite.num, polite.accuracy.mean, polite.first_preferred) == ("polite", 4, 0.75, None)
    assert polite.kappa is not None
    assert polite.kappa.mean == pytest.approx(0.5)
    assert (found.num_items, found.calls, found.failures) == (4, 4, {})


def test_grades_are_compared_by_their_distance(tmp_path: Path) -> None:
    judge = Judge(ScriptedJudge(lambda prompt: {"clear": min(5, len(data_of(prompt)[-1]))}), rubric=CLEAR)
    rows = [{"messages": output("x" * n), "labels": {"clear": min(5, n + (n == 2))}} for n in range(1, 6)]
    [clear] = agreement_of(tmp_path, judge, rows).criteria
    assert clear.accuracy.mean == pytest.approx(0.8)
    assert clear.kappa is not None
    assert 0.8 < clear.kappa.mean < 1


def test_a_turn_is_labeled_by_its_index(tmp_path: Path) -> None:
    judge = Judge(ScriptedJudge(lambda prompt: {"polite": "hello" in data_of(prompt)[-1]}), rubric=POLITE, scope="turn")
    messages = [*output("hello"), *output("go away")]
    rows = [{"messages": messages, "turn": turn, "labels": {"polite": not turn}} for turn in (0, 1)]
    [polite] = agreement_of(tmp_path, judge, rows).criteria
    assert polite.accuracy.mean == 1.0


@pytest.mark.parametrize(("answer", "first", "right"), [(longest_first, 0.5, 1.0), (None, 1.0, 0.5)])
def test_a_ranking_is_compared_by_pairs_in_both_orders(tmp_path: Path, answer: Any, first: float, right: float) -> None:
    agent = ScriptedJudge(answer or (lambda _: {"best": [1, 2, 3]}))  # the second prefers what it sees first
    judge = Judge(agent, rubric={"best": "Which?"}, scope="group")
    rows = [
        {"candidates": [output("x" * (n + k)) for k in (5, 20, 1)], "labels": {"best": [2, 3, 1]}} for n in range(40)
    ]
    [best] = agreement_of(tmp_path, judge, rows).criteria
    assert best.num == 120
    assert best.first_preferred is not None
    assert best.consistent is not None
    assert best.first_preferred.mean == first
    assert best.consistent.mean == (1.0 if answer else 0.0)
    assert best.accuracy.mean == pytest.approx(right, abs=0.15)
    assert len(agent.prompts) == 80


def test_labels_that_are_equal_are_no_pair(tmp_path: Path) -> None:
    judge = Judge(ScriptedJudge(longest_first), rubric={"best": "Which?"}, scope="group")
    rows = [{"candidates": [output("x"), output("xx"), output("xxx")], "labels": {"best": [1, 1, 2]}}]
    [best] = agreement_of(tmp_path, judge, rows).criteria
    assert (best.num, best.accuracy.mean) == (2, 1.0)


def test_failed_items_are_listed_and_left_out(tmp_path: Path) -> None:
    def broken(prompt: str) -> Any:
        return "?" if "go away" in data_of(prompt) else {"polite": True}

    rows = [{"messages": output(text), "labels": {"polite": True}} for text in ("hello", "go away")]
    for failure in (None, 0.0):
        judge = Judge(ScriptedJudge(broken), rubric=POLITE, on_judge_failure=failure)
        found = agreement_of(tmp_path, judge, rows)
        assert [*found.failures] == [2]
        assert "cannot be read" in found.failures[2]
        assert found.calls == 3  # one for the first, two for the second
        assert found.criteria[0].num == 1


GOOD = {"messages": output("hello"), "labels": {"polite": True}}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (7, "a line must be a JSON object, got 7"),
        ({}, "'messages' must have messages, at least one of them by the assistant, got None"),
        ({"messages": [], "labels": {}}, "at least one of them by the assistant"),
        ({"messages": [{"role": "user"}]}, "must have dicts with 'role' and 'content'"),
        ({"messages": output("x")}, "'labels' must be a dict with a label for each criterion, got None"),
        ({**GOOD, "labels": {"rude": True}}, "'rude' is not a criterion of 'judge', which has polite"),
        ({**GOOD, "labels": {"polite": 1}}, "the label 'polite' must be true or false, got 1"),
        ({**GOOD, "turn": 0}, "'turn' is for judges of turns, and 'judge' judges each episode: omit it"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: Any, complaint: str) -> None:
    judge = Judge(ScriptedJudge(lambda _: ""), rubric=POLITE)
    with pytest.raises(ConfigError, match=rf"labels\.jsonl, line 2: .*{complaint}"):
        read_labels(write(tmp_path, [GOOD, row]), judge)


@pytest.mark.parametrize(
    ("scope", "row", "complaint"),
    [
        ("turn", GOOD, "'turn' must be the index of one of 1 turns, got None"),
        ("turn", {**GOOD, "turn": 1}, "'turn' must be the index of one of 1 turns, got 1"),
        ("group", GOOD, "'candidates' must be a list of at least 2 lists of messages, got None"),
        ("group", {"candidates": [output("x")]}, "at least 2 lists of messages"),
        (
            "group",
            {"candidates": [output("x"), output("y")], "labels": {"polite": [1]}},
            "the label 'polite' must be a list of 2 numbers",
        ),
    ],
)
def test_a_line_that_does_not_fit_the_scope_is_named(tmp_path: Path, scope: Any, row: Any, complaint: str) -> None:
    judge = Judge(ScriptedJudge(lambda _: ""), rubric=POLITE, scope=scope)
    with pytest.raises(ConfigError, match=complaint):
        read_labels(write(tmp_path, [row]), judge)


def test_a_file_that_is_missing_empty_or_no_json_is_refused(tmp_path: Path) -> None:
    judge = Judge(ScriptedJudge(lambda _: ""), rubric=CLEAR)
    with pytest.raises(ConfigError, match=r"cannot be read: .*No such file"):
        read_labels(tmp_path / "labels", judge)
    with pytest.raises(ConfigError, match="but is empty"):
        read_labels(write(tmp_path, []), judge)
    (tmp_path / "labels.jsonl").write_text("{")
    with pytest.raises(ConfigError, match="line 1 is not valid JSON: Expecting property name"):
        read_labels(tmp_path / "labels.jsonl", judge)
    with pytest.raises(ConfigError, match="must be a number from 1 to 5, got 9"):
        read_labels(write(tmp_path, [{**GOOD, "labels": {"clear": 9}}]), judge)


JUDGES = """
from agentsgym import DirectOutputAgent, Judge


def answer(messages):
    return '{"polite": %s}' % ("true" if "hello" in messages[-1]["content"] else "false")


manners = Judge(DirectOutputAgent(answer), rubric={"polite": "Polite?"}, name="manners")
"""
ROWS = [{"messages": output(text), "labels": {"polite": one}} for text, one in
        [("hello", True), ("good day", True), ("go away", False), ("hello!", True)]]  # fmt: skip


@pytest.mark.parametrize("suffix", ["", ":manners"])
def test_the_command_prints_a_table(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"my_judges{len(suffix)}.py"
    file.write_text(JUDGES)
    given = ["judge", str(write(tmp_path, ROWS)), "--judge", f"{file}{suffix}"]
    ran = CliRunner().invoke(app, given)
    assert ran.exit_code == 0, ran.output
    assert "75.0%" in ran.stdout
    assert "0.50" in ran.stdout
    assert "4 items, 0 failed; 4 calls, 0 cached" in ran.stdout
    ran = CliRunner().invoke(app, [*given, "--json", "--min-kappa", "0.4"])
    assert ran.exit_code == 0
    assert json.loads(ran.stdout)["criteria"][0]["kappa"]["mean"] == 0.5
    ran = CliRunner().invoke(app, [*given, "--min-kappa", "0.6"])
    assert ran.exit_code == 1
    assert "kappa of 'polite' is 0.50, below --min-kappa 0.6" in ran.stderr


@pytest.mark.parametrize(
    ("source", "name", "complaint"),
    [
        (JUDGES, "judges_a.py:other", "has no judge 'other'; it has manners"),
        ("x = 1", "judges_b.py", "has not exactly one judge, so name one with FILE.py:NAME; it has none"),
        (JUDGES, "judges_c", "--judge must be FILE.py:NAME, got"),
        ("raise OSError('gone')", "judges_d.py", "raised OSError: gone"),
        (JUDGES, "missing.py", "there is no file"),
    ],
)
def test_the_command_refuses_a_bad_judge_in_a_sentence(tmp_path: Path, source: str, name: str, complaint: str) -> None:
    if name != "missing.py":
        (tmp_path / f"{name.partition('.')[0]}.py").write_text(source)
    ran = CliRunner().invoke(app, ["judge", str(write(tmp_path, ROWS)), "--judge", str(tmp_path / name)])
    assert ran.exit_code == 2
    assert complaint in " ".join(ran.stderr.split())
