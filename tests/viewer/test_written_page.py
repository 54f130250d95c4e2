"""The page as a file, executed nowhere and whole or absent; and rollouts whose turns are calls that form a tree."""

from __future__ import annotations

import base64
import errno
import hashlib
import html
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browsing import opened
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser, expect
from stored import rollout
from test_round_trip import RECORDS

from agentsgym import Message, RolloutStore, StopReason, Trajectory, Turn
from agentsgym.store.records import StoredRollout
from agentsgym.viewer import write_page
from agentsgym.viewer.answers import Answers
from agentsgym.viewer.rollouts import rollout_data
from agentsgym.viewer.server import Assets, begin, end

HOSTILE = "</script><script>window.hacked=1</script><!--<script>\x1b[2J\u202e\x00 ]]> &lt; \ud800 \u2028"


def store_of(folder: Path, number: int = 100) -> RolloutStore:
    with RolloutStore.writer(folder, source="training", run="r", generation=1) as writer:
        for index in range(number):
            messages = [{"role": "user", "content": f"{HOSTILE} {index}"}]
            width = [0.5] * 4
            writer.add(rollout(index, messages=messages), group=index // 4, advantages=width)
    return RolloutStore(folder)


def element(page: str, name: str) -> str:
    [found] = re.findall(rf'<script type="[a-z/]+" id="{name}">([^<]*)</script>', page)
    return found


def chunk(page: str, name: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(element(page, name))))


def test_a_page_holds_the_answers(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store")
    page = write_page(store, tmp_path / "page.html", limit=90).read_text()
    answers = Answers(store, limit=90, mode="written")
    reported = json.loads(element(page, "list"))
    chunks = reported["columns"].pop("chunk")
    assert reported == json.loads(json.dumps(answers.list()))
    assert (reported["shown"], reported["note"]) == (
        90,
        "only the newest 90 of 100 rollouts; a larger --limit shows more",
    )
    assert chunk(page, "chunk-turns") == json.loads(json.dumps(answers.turns()))
    for place, row in enumerate(reported["columns"]["row"]):
        own = chunk(page, f"chunk-{chunks[place]}")
        assert own["rollouts"][str(row)] == json.loads(json.dumps(answers.rollout(row)))
        key = reported["columns"]["group"][place]
        assert own["groups"][str(key)] == json.loads(json.dumps(answers.group(key)))
    sizes = [chunks.count(index) for index in range(max(chunks) + 1)]
    assert max(sizes) <= 32
    assert min(sizes[:-1]) > 16


def test_a_page_does_not_name_where_its_store_lies(tmp_path: Path) -> None:
    folder = tmp_path / "at home" / "of somebody" / "rollouts"
    page = write_page(store_of(folder, 3), tmp_path / "page.html").read_text()
    reported = json.loads(element(page, "list"))
    assert (reported["title"], reported["path"]) == ("rollouts", None)
    everything = [page, *(json.dumps(chunk(page, f"chunk-{name}")) for name in ("0", "turns"))]
    assert not any("at home" in text or "of somebody" in text for text in everything)


@settings(max_examples=25)
@given(st.lists(RECORDS, min_size=1, max_size=3))
def test_whatever_a_store_holds_can_be_written(
    tmp_path_factory: pytest.TempPathFactory, records: list[StoredRollout]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    with RolloutStore.writer(folder / "store") as writer:
        for record in records:
            writer.add_record(record)
    page = write_page(RolloutStore(folder / "store"), folder / "page.html").read_text()
    assert len(json.loads(element(page, "list"))["columns"]["row"]) == len(records)


def test_a_large_group_stays_in_one_chunk(tmp_path: Path) -> None:
    with RolloutStore.writer(tmp_path / "store", source="training", run="r", generation=1, group=0) as writer:
        for index in range(50):
            writer.add(rollout(index))
    page = write_page(RolloutStore(tmp_path / "store"), tmp_path / "page.html").read_text()
    assert set(json.loads(element(page, "list"))["columns"]["chunk"]) == {0}


def test_hostile_text_stays_in_its_element(tmp_path: Path) -> None:
    folder = tmp_path / "a<script>alert(1)"
    page = write_page(store_of(folder, 5), tmp_path / "page.html").read_text()
    assert "window.hacked" not in page
    assert "<script>alert" not in page
    kinds = re.findall(r"<script([^>]*)>", page)
    assert kinds == [
        ' type="application/json" id="list"',
        *(f' type="text/plain" id="chunk-{name}"' for name in ("0", "turns")),
        "",
    ]
    assert page.count("</script>") == len(kinds)
    assert "<!--" not in page
    assert chunk(page, "chunk-0")["rollouts"]["3"]["messages"][0]["content"] == f"{HOSTILE} 3"


@pytest.mark.parametrize("mode", ["served", "written"])
def test_the_policy_lets_our_own_style_and_script_run_and_nothing_else(mode: Any) -> None:
    assets = Assets.read()
    page = begin(assets, "t", mode) + end(assets)
    [policy] = [
        html.unescape(one) for one in re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    ]
    assert policy == assets.policy(mode)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    [script] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    [style] = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for name, text in {"script-src": script, "style-src": style}.items():
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules.pop(name) == f"'sha256-{digest}'"
    assert rules == {
        "default-src": "'none'",
        "connect-src": "'self'" if mode == "served" else "'none'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
    }


def test_the_page_names_no_address_and_makes_no_html_of_text() -> None:
    assets = Assets.read()
    page = begin(assets, "t", "written") + end(assets)
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, which nothing is fetched from
    assert not re.search(r"\son\w+=", page.partition("<script>")[0])
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", assets.script)


def test_scripts_are_put_together_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, text in {"20-b.js": "second", "10-a.js": "first", "viewer.css": "i{}"}.items():
        (tmp_path / name).write_text(text)
    assets = Assets.read(tmp_path)
    assert assets.script == '(() => {\n"use strict";\nfirst\nsecond\n})();\n'
    assert assets.style.startswith(":root{--paper:")
    assert assets.style.endswith("i{}")


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(tmp_path / "store", 5)
    (tmp_path / "page.html").write_text("before")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_page(store, tmp_path / "page.html")
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["page.html"]
    assert (tmp_path / "page.html").read_text() == "before"


def test_a_page_that_is_ended_in_its_midst_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(tmp_path / "store", 5)

    def ended(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Answers, "turns", ended)
    with pytest.raises(KeyboardInterrupt):
        write_page(store, tmp_path / "page.html")
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == []


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


def store_of_calls(folder: Path, *trajectories: Trajectory) -> RolloutStore:
    with RolloutStore.writer(folder) as writer:
        for one in trajectories:
            writer.add(one)
    return RolloutStore(folder)


def reported(trajectory: Trajectory) -> list[dict[str, Any]]:
    return rollout_data(0, StoredRollout(trajectory=trajectory), lambda _name, _ids: None)["turns"]


def test_calls_are_reported_with_what_they_continue_or_come_from() -> None:
    assert [
        (turn["parent"], turn["continues"]) if "parent" in turn else None for turn in reported(tree_of_calls())
    ] == [None, (0, True), (1, False), (2, True), (1, False), (4, False), None]
    assert not any({"parent", "continues"} & turn.keys() for turn in reported(sequence()))


@pytest.mark.parametrize("mode", ["served", "written"])
def test_calls_are_shown_as_a_tree_and_sequences_as_ever(browser: Browser, tmp_path: Path, mode: str) -> None:
    tree = tree_of_calls()
    with opened(browser, store_of_calls(tmp_path / "store", tree, sequence()), mode, tmp_path) as shown:
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
