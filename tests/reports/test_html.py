"""The pieces of a page: well formed, escaped, bounded, and reporting what happened."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import ConfigError, StopReason, Trajectory, Turn
from agentsgym.reports.html import rollouts_html, trajectory_html
from agentsgym.statistics.metrics import summarize
from agentsgym.tiny import tiny_tokenizer

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x1b[2J\u202e</style></div>{}"
ALLOWED = {"div", "style", "p", "b", "i", "code", "span", "details", "summary"}
ALLOWED |= {"table", "thead", "tbody", "tr", "th", "td"}


class Checker(HTMLParser):
    """Reads a piece of a page, and keeps what it holds."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.cells: list[dict[str, str | None]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED
        assert {name for name, _ in attrs} <= {"class", "title", "style"}
        assert all(re.fullmatch(r"--s:[01]\.\d\d", value or "") for name, value in attrs if name == "style")
        self.open.append(tag)
        if tag == "i" and "div" in self.open:
            self.cells.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    @property
    def tokens(self) -> list[dict[str, str | None]]:
        """The cells of tokens; those of the legend have no title."""
        return [cell for cell in self.cells if "title" in cell]


def rollout(**changes: Any) -> Trajectory:
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 3, "b": "x"}}}
    fields: dict[str, Any] = {
        "token_ids": [5, 6, 7, 8, 9],
        "turns": [
            Turn(start=1, stop=3, reward=1.5, role="north", message_index=1),
            Turn(start=4, stop=5, reward=-0.5, invalid=True, message_index=3, parent=0),
        ],
        "messages": [
            {"role": "user", "content": "add up"},
            {"role": "assistant", "content": "calling", "tool_calls": [call]},
            {"role": "tool", "content": "3x"},
            {"role": "assistant", "content": "done"},
        ],
        "logprobs": [0.0, -0.25, -0.5, 0.0, -1.0],
        "per_token_rewards": [0.0, 0.75, 0.75, 0.0, -0.5],
        "final_reward": 1.0,
        "stop_reason": StopReason.DONE,
        "info": {"success": True},
    }
    return Trajectory(**(fields | changes))


def test_a_rollout_reports_its_outcome_turns_calls_and_tokens() -> None:
    page = Checker(rollout()._repr_html_())
    assert "won · task 0, rollout 0: won after 2 turns (done), reward 1" in page.text.replace("  ", " ")
    assert "assistant · turn 0 · reward +1.5 · as north" in page.text
    assert "assistant · turn 1 · reward -0.5 · follows turn 0 · invalid" in page.text
    assert "add(a=3, b='x')" in page.text
    assert "stop reason: done" in page.text
    assert [cell.get("class") for cell in page.tokens] == [None, "a p", "a p", None, "a n"]
    assert [cell.get("style") for cell in page.tokens] == [None, "--s:1.00", "--s:1.00", None, "--s:0.67"]
    assert page.tokens[1]["title"] == "token 1, id 6, turn 0, reward 0.75, log-probability -0.25"
    assert page.tokens[0]["title"] == "token 0, id 5, environment token"
    assert "reward up to +0.75" in page.text


def test_tokens_can_be_read_and_colored_by_advantage() -> None:
    tokenizer = tiny_tokenizer(["one two <b>", "three\n"])
    ids = tokenizer("one two <b>three\n").input_ids
    record = rollout(
        token_ids=ids, turns=[Turn(start=0, stop=len(ids), reward=1.0)], logprobs=None, per_token_rewards=[]
    )
    advantages = [0.0, 2.0, -1.0, *[0.0] * (len(ids) - 3)]
    page = Checker(trajectory_html(record, tokenizer=tokenizer, advantages=advantages))
    assert [cell.get("class") for cell in page.tokens][:3] == ["a", "a p", "a n"]
    assert "advantage 2" in (page.tokens[1]["title"] or "")
    assert "one" in page.texts
    assert "⏎" in page.text
    with pytest.raises(ConfigError, match="advantages must have one value per token, got 1 for 5 tokens"):
        trajectory_html(rollout(), advantages=[1.0])


def hostile(text: str) -> Trajectory:
    call: Any = {"function": {"name": text, "arguments": {text: text}}}
    messages: Any = [
        {"role": text, "content": text, "reasoning_content": text, "tool_calls": [call, text, {"function": text}]},
        {"role": "assistant", "content": None},
    ]
    return rollout(
        messages=messages,
        turns=[Turn(start=1, stop=3, reward=float("nan"), role=text, message_index=0)],
        info={text: text, "success": None},
        error=text,
        stop_reason=StopReason.FAILED,
        final_rewards={text: 1.0},
        per_token_rewards=[0.0, float("nan"), float("inf"), 0.0, 0.0],
    )


@given(st.text() | st.just(HOSTILE))
def test_what_others_wrote_is_data(text: str) -> None:
    record = hostile(text)
    for html in (record._repr_html_(), rollouts_html([record])):
        page = Checker(html)
        assert "\x1b" not in html
        assert "\u202e" not in html
        assert "http" not in html.replace(text, "")
        assert "alert(1)" not in page.text or "<script>" in page.text  # as text, never as an element


def test_names_of_environments_and_roles_are_data_too() -> None:
    turns = [Turn(start=1, stop=3, reward=0.0, role=HOSTILE), Turn(start=3, stop=3, reward=0.0, role=1)]
    played = rollout(turns=turns, final_rewards={HOSTILE: 1.0, 1: 0.0})
    text = Checker(
        summarize([hostile(HOSTILE), played, rollout()], environments=[HOSTILE, "b", "b"])._repr_html_()
    ).text
    assert text.count("<script>alert(1)</script>") == 2


def test_long_things_are_shown_by_their_ends_with_how_much_is_left_out() -> None:
    words = "&" * 1_000_000
    turns = [Turn(start=k, stop=k + 1, reward=1.0, message_index=k) for k in range(10_000)]
    call: Any = {"function": {"name": words, "arguments": {str(k): words for k in range(100)}}}
    messages: Any = [{"role": words, "content": words, "tool_calls": [call] * 100}] * 10_000
    record = rollout(
        token_ids=[*range(10_000)], turns=turns, messages=messages, logprobs=None, per_token_rewards=[1.0] * 10_000
    )
    html = record._repr_html_()
    page = Checker(html)
    assert len(html) < 1_000_000
    assert "… 9,976 messages omitted …" in page.text
    assert "… 9,520 tokens omitted …" in page.text
    assert "… 92 tool calls omitted …" in page.text
    assert "characters are omitted" in page.text
    assert "token 9999," in (page.tokens[-1]["title"] or "")
    many = rollouts_html([record] * 5000)
    assert len(many) < 50_000
    assert "… 4,980 rollouts omitted …" in Checker(many).text


def test_an_ordinary_page_is_small() -> None:
    assert len(rollout()._repr_html_()) < 8_000
    assert len(summarize([rollout()] * 200)._repr_html_()) < 20_000


def test_an_evaluation_reports_estimates_parts_and_rollouts() -> None:
    rows = [rollout(task_index=index, info={"success": index < 2}) for index in range(4)]
    page = Checker(summarize(rows, environments=["maze", "maze", "guess", "guess"])._repr_html_())
    for words in ("4 episodes, 0 failed · stop reasons: done (4)", "50.0% [0.0, 100.0%]", "maze", "guess"):
        assert words in page.text
    assert "4 rollouts" in page.text
    both = rollout(turns=[Turn(start=0, stop=1, reward=1.0, role="north"), Turn(start=1, stop=1, reward=0.0, role=2)])
    earned = dataclasses.replace(both, final_rewards={"north": 1.0, 2: 0.0})
    text = Checker(summarize([earned])._repr_html_()).text
    assert "as north" in text
    assert "as 2" in text
    assert "1.5 -0.5" in page.text


@pytest.mark.parametrize(
    "rows", [[], [rollout(token_ids=[], turns=[], messages=[], logprobs=None, per_token_rewards=[], info={})]]
)
def test_nothing_at_all_is_shown_too(rows: list[Trajectory]) -> None:
    assert f"{len(rows)} rollouts" in Checker(rollouts_html(rows)).text
    assert all(Checker(row._repr_html_()) for row in rows)


def test_both_themes_are_there_and_nothing_leaks_out_of_the_box() -> None:
    style = re.findall(r"<style>(.*?)</style>", rollout()._repr_html_())[0]
    assert "prefers-color-scheme:dark" in style
    selectors = re.findall(r"([^{}]+)\{", re.sub(r"@media\([^)]*\)\{", "", style))
    assert all(one.strip().startswith(".agentsgym") for whole in selectors for one in whole.split(","))
