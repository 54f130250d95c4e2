"""Many conversations at once, and what is done with them: audit, store, credit, padding, examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from agentsgym import (
    ConfigError,
    RolloutStore,
    ScoredRollout,
    TemplateError,
    Trajectory,
    audit,
    trajectories_from_messages,
)
from agentsgym.batch.layouts import trajectory_rows
from agentsgym.batch.views import pad_task_groups
from agentsgym.credit.advantages import token_advantages
from agentsgym.credit.registry import get_estimator
from agentsgym.export import dpo_examples, sft_examples
from agentsgym.testing import chat_tokenizer

TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}]


def chat(question: str, *answers: str) -> list[dict[str, str]]:
    turns = [[{"role": "assistant", "content": answer}, {"role": "user", "content": "No."}] for answer in answers]
    return [{"role": "user", "content": question}, *[message for turn in turns for message in turn][:-1]]


ROWS: list[dict[str, Any]] = [
    {"messages": chat("Guess.", "1", "2"), "reward": 1.0, "success": True, "source": "elsewhere"},
    {"messages": chat("Choose.", "left"), "rewards": [0.5], "session_id": "b", "stop_reason": "max_turns"},
    {"messages": chat("Guess.", "3", "4"), "rewards": [-0.25, 0.25], "success": False, "tools": None},
]


def test_rows_of_one_task_are_numbered() -> None:
    made = trajectories_from_messages(chat_tokenizer(), ROWS)
    assert [(one.task_index, one.rollout_index) for one in made] == [(0, 0), (1, 0), (0, 1)]
    assert [one.turn_rewards for one in made] == [[0.0, 1.0], [0.5], [-0.25, 0.25]]
    assert [one.success for one in made] == [True, None, False]
    assert (made[1].session_id, made[1].stop_reason) == ("b", "max_turns")
    named = [{**row, "task": "all"} for row in ROWS]
    assert [one.task_index for one in trajectories_from_messages(None, named)] == [0, 0, 0]
    odd = [{**row, "task_data": {1: "a", "b": 2}} for row in ROWS]  # keys of two kinds
    assert [one.rollout_index for one in trajectories_from_messages(None, odd)] == [0, 1, 2]
    seeded = [{**row, "task_data": {"seed": index}} for index, row in enumerate(ROWS)]
    assert [(one.task_index, one.seed) for one in trajectories_from_messages(None, seeded)] == [(0, 0), (1, 1), (2, 2)]


def test_a_file_and_a_dataset_give_the_same(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n\n" for row in ROWS))
    tokenizer = chat_tokenizer()
    expected = trajectories_from_messages(tokenizer, ROWS)
    assert trajectories_from_messages(tokenizer, file) == expected
    assert trajectories_from_messages(tokenizer, str(file)) == expected
    columns = {name: [row.get(name) for row in ROWS] for name in {name for row in ROWS for name in row}}
    assert trajectories_from_messages(tokenizer, Dataset.from_dict(columns)) == expected  # nulls for what is missing


def test_what_our_own_export_wrote_is_read_again(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    row = {"messages": chat("Look.", "look"), "reward": 1.0, "success": True, "tools": json.dumps(TOOLS)}
    (made,) = trajectories_from_messages(tokenizer, [row])
    with RolloutStore.writer(tmp_path, source="elsewhere") as writer:
        writer.add(made, tools=TOOLS)
    exported = [*sft_examples(RolloutStore(tmp_path).records())]
    (again,) = trajectories_from_messages(tokenizer, exported, rewards=1.0)
    assert again.token_ids == made.token_ids
    assert json.loads(exported[0]["tools"]) == TOOLS


def test_everything_that_is_done_with_rollouts_is_done_with_them(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    made = trajectories_from_messages(tokenizer, ROWS)
    report = audit(made, vocabulary_size=len(tokenizer))
    assert report.ok
    assert report.num_inexact_turns == report.num_turns == 5

    with RolloutStore.writer(tmp_path, source="elsewhere") as writer:
        for one in made:
            writer.add(one, tokenizer=writer.keep_tokenizer(tokenizer))
    store = RolloutStore(tmp_path)
    assert [*store] == made
    assert [one.task_index for one in store.filter(success=True)] == [0]
    (pair,) = dpo_examples(store.records())
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("1", "3")
    (example,) = sft_examples(store.records())
    assert example["messages"] == made[0].messages

    scored = [ScoredRollout.from_trajectory(one, group=one.task_index) for one in made]
    estimator = get_estimator("grpo")
    advantages = estimator(scored, discount=1.0, scale="none")
    assert advantages == [[0.5, 0.5], [0.0], [-0.5, -0.5]]
    on_tokens = token_advantages(made[0], advantages[0], estimator=estimator)
    assert [one != 0 for one in on_tokens] == [one == 1 for one in made[0].agent_token_mask]

    padded = pad_task_groups(made, pad_token_id=0)
    assert [len(row) for row in padded["padded_full_token_ids"]].count(len(padded["padded_full_token_ids"][0])) >= 2
    assert [sum(row) for row in padded["padded_agent_token_mask"]] == [sum(one.agent_token_mask) for one in made]
    assert len(trajectory_rows(0, made[0])) == 1


@pytest.mark.filterwarnings("default")  # TRL's own
def test_they_are_imitated() -> None:
    from agentsgym.tiny import tiny_policy  # noqa: PLC0415  # torch
    from agentsgym.training.selection.imitate import imitate, imitation_rows, tiny_imitation_config  # noqa: PLC0415

    words = [message["content"] for row in ROWS for message in row["messages"]]
    model, tokenizer = tiny_policy(words)
    made = trajectories_from_messages(tokenizer, ROWS)
    rows = imitation_rows(made)
    assert [[one != -100 for one in row["labels"]] for row in rows] == [
        [mask == 1 for mask in one.agent_token_mask] for one in made
    ]
    state = imitate(model, made, tokenizer, tiny_imitation_config(8, logging_steps=1))
    losses = [one["loss"] for one in state.log_history if "loss" in one]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("x", "row 1 must be an object with 'messages' and 'reward' or 'rewards', got 'x'"),
        ({"reward": 1.0}, r"row 1: messages must be a list of at least one chat message, got \(\)"),
        ({"messages": chat("a", "b")}, "row 1: 'rewards' or 'reward' is missing"),
        ({"messages": chat("a", "b"), "reward": 1, "rewards": [1]}, "row 1: only one of .* got both"),
        (
            {"messages": chat("a", "b"), "reward": 1, "success": "yes"},
            "row 1: success must be true or false, got 'yes'",
        ),
        (
            {"messages": chat("a", "b"), "rewards": [1, 2]},
            r"row 1: rewards must be a single number or one number per assistant message \(1\),",
        ),
        (
            {"messages": chat("a", "b"), "reward": 1, "info": "won", "success": True},
            "row 1: info must be a dict, got 'won'",
        ),
        ({"messages": chat("a", "b"), "reward": 1, "tools": "[" * 100_000}, "row 1: tools is not valid JSON"),
        ({"messages": chat("a", "b"), "reward": 1, "tools": "{"}, "row 1: tools is not valid JSON"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(row: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        trajectories_from_messages(chat_tokenizer(), [ROWS[0], row])


def test_a_line_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(f"{json.dumps(ROWS[0])}\n{{\n")
    with pytest.raises(ConfigError, match=r"chats.jsonl, line 2 is not valid JSON: "):
        trajectories_from_messages(chat_tokenizer(), file)
    with pytest.raises(ConfigError, match="rows must be the path to a JSON Lines file, or a list of rows, got None"):
        trajectories_from_messages(chat_tokenizer(), None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"none.jsonl cannot be read: .*No such file"):
        trajectories_from_messages(chat_tokenizer(), tmp_path / "none.jsonl")
    refused = chat_tokenizer()
    refused.chat_template = "{% for m in messages %}{{ loop.index }}{% endfor %}"
    with pytest.raises(TemplateError, match=r"^row 0: "):
        trajectories_from_messages(refused, ROWS)


def test_a_trajectory_of_text_alone_is_stored_too(tmp_path: Path) -> None:
    made = Trajectory.from_messages(None, chat("Guess.", "1"), 1.0)
    with RolloutStore.writer(tmp_path) as writer:
        writer.add(made)
    assert [*RolloutStore(tmp_path)] == [made]
    assert audit([made]).ok
