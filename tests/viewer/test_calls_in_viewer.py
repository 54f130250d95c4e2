"""A rollout whose turns are calls that form a tree: what the page is reported, and what it shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browsing import opened
from playwright.sync_api import Browser, expect

from agentsgym.errors import ConfigError
from agentsgym.store.reader import RolloutStore
from agentsgym.store.records import StoredRollout
from agentsgym.types import Message, StopReason, Trajectory, Turn
from agentsgym.viewer.answers import Answers
from agentsgym.viewer.rollouts import rollout_data

CALLS: list[tuple[list[str], int | None, float]] = [  # what is answered before an answer, parent, reward
    (["lead", "which is longer?"], None, 0.0),
    (["lead", "which is longer?", "answer 0", "what next?"], 0, 0.0),  # continues 0
    (["search", "find the first"], 1, 0.0),
    (["search", "find the first", "answer 2", "820"], 2, 1.0),  # continues 2
    (["search", "find the second"], 1, -1.5),
    (["search", "find the second", "look again"], 4, 4.0),  # not an answer to 4, but once more
    (["check", "is it right?"], None, 4.0),  # another root
]
DEPTHS = [0, 0, 1, 1, 1, 2, 0]


def message(text: str) -> Message:
    return {"role": "assistant" if text.startswith("answer") else "user", "content": text}


def tree_of_calls() -> Trajectory:
    messages: list[Message] = []
    turns: list[Turn] = []
    for k, (prompt, parent, reward) in enumerate(CALLS):
        reported = {one["content"] for one in messages}
        messages += [message(text) for text in prompt if text not in reported]
        turns.append(
            Turn(
                start=0,
                stop=0,
                reward=reward,
                message_index=len(messages),
                parent=parent,
                prompt_messages=[message(text) for text in prompt] if k > 1 else None,
            )
        )
        messages.append(message(f"answer {k}"))
    return Trajectory(token_ids=[], turns=turns, messages=messages, final_reward=7.5, stop_reason=StopReason.DONE)


def sequence() -> Trajectory:
    tree = tree_of_calls()
    return replace(tree, turns=[replace(turn, parent=None) for turn in tree.turns], task_index=1)


def store_of(folder: Path, *trajectories: Trajectory) -> RolloutStore:
    with RolloutStore.writer(folder) as writer:
        for one in trajectories:
            writer.add(one)
    return RolloutStore(folder)


def answers_of(store: RolloutStore) -> Answers:
    return Answers(store, limit=10, mode="served")


def reported(trajectory: Trajectory) -> list[dict[str, Any]]:
    return rollout_data(0, StoredRollout(trajectory=trajectory), lambda _name, _ids: None)["turns"]


def test_calls_are_reported_with_what_they_continue_or_come_from() -> None:
    assert [
        (turn["parent"], turn["continues"]) if "parent" in turn else None for turn in reported(tree_of_calls())
    ] == [None, (0, True), (1, False), (2, True), (1, False), (4, False), None]
    assert not any({"parent", "continues"} & turn.keys() for turn in reported(sequence()))


def test_a_what_if_can_follow_calls_where_there_are_some(tmp_path: Path) -> None:
    def offered(store: RolloutStore) -> set[str]:
        choices = answers_of(store).list()["what_if"]["estimators"]
        return {*next(one["options"] for one in choices if one["name"] == "return_to_go")}

    assert offered(store_of(tmp_path / "plain", sequence())) == {"baseline"}
    both = store_of(tmp_path / "both", tree_of_calls(), sequence())
    assert offered(both) == {"baseline", "follow"}
    requested = {"estimator": "return_to_go", "options": '{"baseline": "none", "follow": "calls"}', "scale": "none"}
    answers = answers_of(both)
    tree, plain = answers.index.columns["group"]
    assert answers.what_if(tree, requested)["advantages"] == [[1.75, 1.75, 1.0, 1.0, 2.5, 4.0, 4.0]]
    with pytest.raises(ConfigError, match="no turn of these rollouts has a parent"):
        answers.what_if(plain, requested)


@pytest.mark.parametrize("mode", ["served", "written"])
def test_calls_are_shown_as_a_tree_and_sequences_as_ever(browser: Browser, tmp_path: Path, mode: str) -> None:
    tree = tree_of_calls()
    with opened(browser, store_of(tmp_path / "store", tree, sequence()), mode, tmp_path) as shown:
        page = shown.go(view="conversation", row=0)
        lefts = [page.locator(f"#turn-{k}").bounding_box()["x"] for k in range(len(CALLS))]  # type: ignore[index]
        assert [(left - lefts[0]) / 24 for left in lefts] == DEPTHS
        for k, output in {1: "continues turn 0", 2: "child of turn 1", 5: "child of turn 4"}.items():
            expect(page.locator(f"#turn-{k} .who")).to_contain_text(f"turn {k}{output}reward")
        expect(page.locator("#turn-6 .who")).not_to_contain_text("of turn")
        expect(page.locator("#turn-2 .who")).to_contain_text("prompt: 2 messages")
        requested = page.locator(".message", has_text="find the first")
        assert requested.bounding_box()["x"] == lefts[2]  # type: ignore[index]
        page = shown.go(view="conversation", row=1)
        assert page.locator(".message").evaluate_all("nodes => nodes.every(node => !node.hasAttribute('style'))")
        expect(page.locator("#turn-2 .who")).to_contain_text("turn 2reward")
        expect(page.locator("#turn-2 .who")).to_contain_text("prompt: a rewritten history of 2 messages")
