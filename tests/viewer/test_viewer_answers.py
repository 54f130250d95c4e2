"""What the page is reported is what the store holds, whatever it holds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import rollout
from test_round_trip import RECORDS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agentsgym import ConfigError, RolloutStore, StopReason, StoreError, Trajectory, Turn, tiny_policy
from agentsgym.statistics.breakdown import seat_outcomes
from agentsgym.store.columns import record_from_row, rollouts_to_table
from agentsgym.store.records import StoredRollout
from agentsgym.viewer.answers import Answers, turn_summaries
from agentsgym.viewer.index import environment_label
from agentsgym.viewer.plain import dumped, number
from agentsgym.viewer.rollouts import TokenDecoder, first_difference, group_data, rollout_data


def answers_of(folder: Path, limit: int = 1000, **options: Any) -> Answers:
    return Answers(RolloutStore(folder), limit=limit, mode="served", **options)


def write(folder: Path, records: Sequence[StoredRollout], per_part: int = 3) -> RolloutStore:
    with RolloutStore.writer(folder) as writer:
        for index, record in enumerate(records):
            writer.add_record(record)
            if index % per_part == per_part - 1:
                writer.flush()
    return RolloutStore(folder)


def known(value: Any) -> Any:
    """A stored number as the page has it."""
    return None if value is None or math.isnan(value) else {math.inf: "inf", -math.inf: "-inf"}.get(value, value)


def as_json(text: str | None) -> str | None:
    """A text after JSON, in which two halves of a surrogate pair are one character, as in any browser."""
    return None if text is None else text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


@settings(max_examples=40)
@given(RECORDS)
def test_a_rollout_of_any_values_is_reported_as_strict_json(record: StoredRollout) -> None:
    reported = dumped(rollout_data(7, record, lambda _name, _ids: None))
    assert reported.isascii()
    assert "<" not in reported
    read = json.loads(reported, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [one["content"] for one in read["messages"]] == [
        as_json(one["content"]) for one in record.trajectory.messages
    ]
    assert read["tokens"]["advantages"] == (None if record.advantages is None else [*map(known, record.advantages)])
    assert read["tokens"]["trained"] == record.trajectory.agent_token_mask
    assert [turn["reward"] for turn in read["turns"]] == [known(turn.reward) for turn in record.trajectory.turns]
    assert read["error"] == as_json(record.trajectory.error)
    json.loads(dumped(group_data(1, "", [7, 8], [record, record])))


@settings(max_examples=40)
@given(st.lists(RECORDS, min_size=1, max_size=3))
def test_turns_are_summed_up_as_one_would_by_hand(records: list[StoredRollout]) -> None:
    table = rollouts_to_table(records)
    store: Any = _Table(table)
    reported = turn_summaries(store)
    json.loads(dumped(reported))
    for i in range(len(records)):
        own = record_from_row(table, i)
        turns = own.trajectory.turns
        assert reported["rewards"][i] == [known(turn.reward) for turn in turns]
        assert reported["invalid"][i] == [int(turn.invalid) for turn in turns]
        seats = [] if own.trajectory.failed else seat_outcomes(own.trajectory)
        assert [*reported["won"][i].values()] == [seat.success for seat in seats]
        for name, values, sign in (
            ("advantages", own.advantages, 1),
            ("surprisals", own.trajectory.logprobs, -1),
            ("entropies", own.entropies, 1),
        ):
            if values is None:
                assert reported[name][i] is None
                continue
            for turn, mean in zip(turns, reported[name][i], strict=True):
                span = [sign * one for one in values[turn.start : turn.stop] if not math.isnan(one)]
                if not span:
                    assert mean is None
                elif all(math.isfinite(one) and abs(one) < 1e300 for one in span):
                    assert mean == pytest.approx(fmean(span), rel=1e-9, abs=1e-9 * max(map(abs, span)))


class _Table:
    """A store in memory, as far as the curves read one."""

    path = Path()

    def __init__(self, table: Any) -> None:
        self._table = table
        self.rows = range(len(table))

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, rows: slice) -> _Table:
        return _Table(self._table[rows])

    def table(self, columns: Sequence[str] | None = None) -> Any:
        return self._table if columns is None else self._table.select(columns)


def test_the_list_has_the_newest_rollouts_and_their_columns(tmp_path: Path) -> None:
    outcomes = [StopReason.DONE, StopReason.MAX_TURNS, StopReason.FAILED]
    records = [
        StoredRollout(
            trajectory=rollout(i, stop_reason=outcomes[i % 3], info={"success": bool(i % 2)} if i % 4 else {}),
            source="evaluation" if i < 5 else "play",
            env_class_path="agentsgym.envs.TextArena.TextArenaEnv" if i % 2 else None,
            env_config={"game": "Wordle-v0"},
            step=None if i == 3 else i,
        )
        for i in range(12)
    ]
    write(tmp_path, [*records, StoredRollout(trajectory=rollout(12, task_data={"seed": 2**62}))])
    reported = answers_of(tmp_path, limit=10).list()
    json.loads(dumped(reported))
    assert (reported["total"], reported["shown"], reported["mode"]) == (13, 10, "served")
    assert reported["note"] == "only the newest 10 of 13 rollouts; a larger --limit shows more"
    columns, words = reported["columns"], reported["words"]
    assert columns["row"] == [*range(3, 13)]
    assert {len(values) for values in columns.values()} == {10}
    for place, i in enumerate(range(3, 12)):
        text = {name: words[name][columns[name][place]] for name in ("source", "outcome", "stop_reason")}
        assert text["source"] == records[i].source
        assert text["outcome"] == records[i].trajectory.outcome
        assert text["stop_reason"] == records[i].trajectory.stop_reason
        env = columns["env"][place]
        assert (env is None) == (i % 2 == 0)
        assert columns["step"][place] == records[i].step
        assert columns["final_reward"][place] == float(i)
        assert columns["created_at"][place] == pytest.approx(records[i].created_at.timestamp(), abs=1e-3)
    assert words["env"] == ["TextArena:Wordle-v0"]
    assert columns["seed"][-1] == str(2**62)  # JavaScript would round it
    assert answers_of(tmp_path).list()["note"] is None


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("agentsgym.envs.TwentyQuestions.TwentyQuestionsEnv", "TwentyQuestions"),
        ("/home/me/games.py:Chess", "Chess"),
        ("agentsgym.envs.Gymnasium.GymnasiumEnv", "Gymnasium"),
        (None, None),
    ],
)
def test_an_environment_is_called_as_the_command_line_does(path: str | None, label: str | None) -> None:
    assert environment_label(path, "{}") == environment_label(path, None) == label
    assert environment_label(path, "no JSON") == label


def test_groups_are_task_groups_of_training_and_tasks_of_everything_else(tmp_path: Path) -> None:
    def record(index: int, seed: int, **columns: Any) -> StoredRollout:
        return StoredRollout(trajectory=rollout(index, task_data={"seed": seed}), env_class_path="a.B", **columns)

    training = {"source": "training", "run": "t"}
    store = write(
        tmp_path,
        [
            record(0, 1, **training, generation=1, group=0),
            record(1, 1, **training, generation=1, group=0),
            record(2, 1, **training, generation=1, group=1),
            record(3, 1, **training, generation=2, group=0),
            record(4, 1, source="evaluation", agent="x"),
            record(5, 1, source="evaluation", agent="x"),
            record(6, 1, source="evaluation", agent="y"),
            record(7, 2, source="evaluation", agent="x"),
            record(8, 1, source="evaluation", run="t", step=4),
            record(9, 1, source="evaluation", run="t", step=8),
        ],
    )
    answers = Answers(store, limit=100, mode="served")
    assert answers.index.columns["group"] == [0, 0, 1, 2, 3, 3, 4, 5, 6, 7]
    assert answers.index.columns["task"] == [0, 0, 0, 0, 0, 0, 0, 1, 0, 0]
    assert answers.group(3)["settings"] is None
    assert [one["row"] for one in answers.group(3)["members"]] == [4, 5]


@pytest.mark.parametrize(
    ("credit", "env_config", "text"),
    [
        (
            {"advantage_estimator": "grpo", "discount": 1.0, "scale_rewards": "group", "num_rollouts": 8},
            None,
            "grpo · discount 1 · scale group · turn credit step",
        ),
        (
            {"advantage_estimator": "gigpo", "options": {"step_weight": 0.5}, "discount": 0.9, "truncation": "mask"},
            {"turn_credit": "final"},
            "gigpo · step weight 0.5 · discount 0.9 · scale group · truncation mask · turn credit final",
        ),
        (
            {"discount": math.nan, "scale_rewards": [1], "options": 3},
            {"turn_credit": None},
            "return_to_go · options 3 · discount nan · scale [\n 1\n] · turn credit ",
        ),
        ({}, None, None),
        ("grpo", None, None),
        (None, None, None),
    ],
)
def test_a_group_reports_the_settings_of_its_advantages(
    credit: Any, env_config: dict[str, Any] | None, text: str | None
) -> None:
    record = StoredRollout(trajectory=rollout(0), env_config=env_config, extra={"credit": credit})
    assert group_data(0, "x", [0], [record])["settings"] == text


def played(*answers: str, first: str = "Begin.", **fields: Any) -> Trajectory:
    messages, turns = [{"role": "user", "content": first}], list[Turn]()
    for answer in answers:
        turns.append(Turn(start=0, stop=0, reward=0.0, message_index=len(messages)))
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"You said {answer}."}]
    values: dict[str, Any] = {"token_ids": [], "turns": turns, "messages": messages}
    return Trajectory(**values | {"final_reward": 0.0, "stop_reason": StopReason.DONE} | fields)


@pytest.mark.parametrize(
    ("one", "other", "turn"),
    [
        (played("a", "b"), played("a", "b"), None),
        (played("a", "b"), played("a", "c"), 1),
        (played("a", "b"), played("a"), 1),
        (played("a"), played("a", "b", "c"), 1),
        (played("a"), played("a", first="Begin!"), 0),
        (played(), played("a"), 0),
        (played(), played(), None),
    ],
)
def test_rollouts_part_where_they_first_saw_or_did_something_else(
    one: Trajectory, other: Trajectory, turn: int | None
) -> None:
    assert first_difference(one, other) == first_difference(other, one) == turn


def test_a_history_that_was_rewritten_otherwise_is_a_difference() -> None:
    one = played("a", "b")
    rewritten = replace(one.turns[1], prompt_messages=[{"role": "user", "content": "short"}])
    other = replace(one, turns=[one.turns[0], rewritten])
    assert first_difference(one, other) == 1
    assert first_difference(other, other) is None


def test_a_group_reports_common_turns_calls_and_means(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "tree"}}}
    third = played("a", "b", "d")
    third.messages[-2]["tool_calls"] = [call]  # type: ignore[index]
    reported = group_data(
        0, "x", [1, 2, 3], [StoredRollout(trajectory=one) for one in (played("a", "b", "c"), played("a", "b"), third)]
    )
    assert reported["diverges_at"] == [None, 2, 2]
    assert reported["common_turns"] == 2
    assert reported["members"][2]["turns"][2]["text"] == 'd\nlook({\n "at": "tree"\n})'
    assert reported["members"][0]["turns"][0]["advantage"] is None
    long = group_data(0, "x", [1], [StoredRollout(trajectory=played("a" * 10_000))])
    assert long["members"][0]["turns"][0]["num_omitted"] == 6000


def test_a_search_finds_words_in_any_case_and_nothing_else(tmp_path: Path) -> None:
    output = ['He said "no"', "a\nline", "GROẞ und klein", "\ud800 half", "back\\slash", "user content role"]
    write(tmp_path, [StoredRollout(trajectory=played(one)) for one in output], per_part=2)
    answers = answers_of(tmp_path)

    def found(text: str) -> list[int]:
        reported = answers.search(text)
        assert reported["complete"]
        return reported["rows"]

    assert found('SAID "NO"') == [0]
    assert found("a\nl") == [1]
    assert found("groß UND") == [2]
    assert found("\ud800 HALF") == [3]
    assert found("k\\s") == [4]
    assert found("assistant") == []  # a role is not answered
    assert found("content") == [5]
    assert found("begin.") == [*range(6)]
    assert found("") == []


def test_a_search_that_takes_too_long_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [StoredRollout(trajectory=played("x"))])
    monkeypatch.setattr("agentsgym.viewer.answers._SEARCH_S", -1.0)
    assert answers_of(tmp_path).search("x") == {"rows": [], "complete": False}


def test_long_messages_are_cut_and_state_by_how_much(tmp_path: Path) -> None:
    write(tmp_path, [StoredRollout(trajectory=played("x" * 1_000_000))])
    message = answers_of(tmp_path).rollout(0)["messages"][1]
    assert message["num_omitted"] + len(message["content"]) == 1_000_000
    assert message["num_omitted"] > 0


def test_long_thoughts_and_values_are_cut_and_state_by_how_much(tmp_path: Path) -> None:
    output = {"role": "assistant", "content": "a", "reasoning_content": "x" * 1_000_000}
    own = replace(
        played("a", info={"notes": "y" * 1_000_000}), messages=[{"role": "user", "content": "Begin."}, output]
    )
    write(tmp_path, [StoredRollout(trajectory=own)])
    reported = answers_of(tmp_path).rollout(0)
    assert reported["messages"][1]["num_omitted"] == 800_000
    assert re.search(r"… 900,0\d\d characters omitted$", reported["info"])


def test_token_ids_in_an_array_are_shown_like_a_list(tmp_path: Path) -> None:
    given = replace(rollout(0), token_ids=np.array(rollout(0).token_ids))
    write(tmp_path, [StoredRollout(trajectory=one) for one in (given, rollout(0))])
    array, plain = (answers_of(tmp_path).rollout(row) for row in (0, 1))
    assert array["tokens"] == plain["tokens"]
    assert ["agent tokens", "3"] in array["facts"]
    assert ["agent tokens", "3"] in plain["facts"]


def test_what_the_list_does_not_have_is_a_sentence(tmp_path: Path) -> None:
    write(tmp_path, [StoredRollout(trajectory=rollout(i)) for i in range(3)])
    answers = answers_of(tmp_path, limit=2)
    with pytest.raises(ConfigError, match="rollout 0 is not among the rollouts shown"):
        answers.rollout(0)
    with pytest.raises(ConfigError, match="task group 9 is not among"):
        answers.group(9)
    with pytest.raises(ConfigError, match="limit must be a positive int"):
        answers_of(tmp_path, limit=0)


def test_a_part_that_vanishes_is_a_sentence_and_the_others_stay(tmp_path: Path) -> None:
    store = write(tmp_path, [StoredRollout(trajectory=rollout(i)) for i in range(300)], per_part=100)
    answers = Answers(store, limit=300, mode="served")
    sorted(tmp_path.glob("*.parquet"))[0].unlink()
    with pytest.raises(StoreError, match="can no longer be read"):
        answers.rollout(0)
    assert answers.rollout(299)["row"] == 299


# Tokens as text


def test_tokens_are_the_texts_they_add_and_the_store_knows_their_tokenizer(tmp_path: Path) -> None:
    _, tokenizer = tiny_policy(["Is it an animal? yes no"])
    ids = tokenizer("Is it an animal? yes", add_special_tokens=False)["input_ids"]
    with RolloutStore.writer(tmp_path) as writer:
        name = writer.keep_tokenizer(tokenizer)
        writer.add(rollout(0, num_tokens=len(ids), token_ids=ids), tokenizer=name)
        writer.add(rollout(1, num_tokens=len(ids), token_ids=ids))
        writer.add(rollout(2, num_tokens=len(ids), token_ids=ids), tokenizer="0123456789abcdef")
    answers = answers_of(tmp_path)
    assert "".join(answers.rollout(0)["tokens"]["texts"]) == "Is it an animal? yes"
    assert answers.rollout(1)["tokens"]["texts"] is None
    assert answers.rollout(2)["tokens"]["texts"] is None  # its file is not there
    [kept] = tmp_path.glob("__tokenizers/*.json")
    given = answers_of(tmp_path, tokenizer=kept)
    assert "".join(given.rollout(1)["tokens"]["texts"]) == "Is it an animal? yes"
    kept.write_text("{")
    assert answers_of(tmp_path).rollout(0)["tokens"]["texts"] is None
    with pytest.raises(StoreError, match="cannot load a tokenizer from"):
        answers_of(tmp_path, tokenizer=kept)


def byte_level() -> Any:
    """A tokenizer whose tokens are single bytes, and one word."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@given(st.text(max_size=12))
def test_the_texts_of_tokens_add_up_to_the_text(text: str) -> None:
    text = text.encode(errors="ignore").decode()
    tokenizer = byte_level()
    ids = tokenizer.encode(text).ids
    texts = TokenDecoder(tokenizer).texts(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_pieces_of_a_character_stand_at_the_last_of_them() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a€b").ids
    assert TokenDecoder(tokenizer).texts(ids) == ["a", "", "", "€", "b"]


@given(st.lists(st.integers(-2, 300), max_size=40))
def test_any_ids_have_a_text_each(ids: list[int]) -> None:
    assert len(TokenDecoder(byte_level()).texts(ids)) == len(ids)


@given(st.floats() | st.integers() | st.none())
def test_numbers_are_json_and_exact_where_javascript_is(value: float | None) -> None:
    reported = json.loads(dumped(number(value)))
    if value is not None and math.isfinite(value) and abs(value) <= 2**53:
        assert reported == value


def test_named_rewards_are_columns_of_the_list_and_numbers_of_turns(tmp_path: Path) -> None:
    turns = [
        Turn(start=1, stop=2, reward=1.5, components={"correct": 1.0, "format": 0.5}),
        Turn(start=2, stop=4, reward=0.0),
    ]
    named = rollout(0, turns=turns, final_reward=1.5, final_components={"correct": 1.0, "format": 0.5})
    write(tmp_path, [StoredRollout(trajectory=one) for one in (named, rollout(1))])
    answers = answers_of(tmp_path)
    columns = answers.index.columns
    assert columns["rewards/correct"] == [1.0, None]
    assert columns["rewards/format"] == [0.5, None]
    shown = rollout_data(0, answers.store.record(0), lambda _name, _ids: None)
    assert [turn["components"] for turn in shown["turns"]] == [{"correct": 1.0, "format": 0.5}, {}]
    assert ["reward correct", "1"] in shown["facts"]


def test_judgments_are_shown_apart_from_info_whatever_they_hold(tmp_path: Path) -> None:
    given = {"judge": "manners", "turn": 1, "scores": {"polite": 0.5}, "reason": "Short.", "answers": ["{}"]}
    judged = rollout(0, info={"judgments": [given, 7, {"turn": "x", "scores": [1], "answers": 3}], "length": 2})
    write(tmp_path, [StoredRollout(trajectory=judged)])
    shown = rollout_data(0, answers_of(tmp_path).store.record(0), lambda _name, _ids: None)
    empty = {"judge": "", "turn": None, "scores": {}, "reason": "", "answers": [], "error": None}
    assert shown["judgments"] == [{**given, "error": None}, empty, empty]
    assert "judgments" not in shown["info"]
    assert '"length": 2' in shown["info"]
