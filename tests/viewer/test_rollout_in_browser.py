"""One rollout in a browser: its conversation, its tokens with their exact values, what is hostile in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browsing import HOSTILE, HOSTILE_GROUP, LONG, WORDS, Opened, opened, record_of, settled, write_store
from playwright.sync_api import Browser, expect

from agentsgym import RolloutStore, StopReason, Trajectory, Turn

ROW = 14


def test_a_conversation_shows_boards_thoughts_calls_and_why_it_stopped(either: Opened) -> None:
    page = either.go(view="conversation", row=ROW)
    trajectory, columns = record_of(ROW)
    assert trajectory.num_turns > 2
    page.wait_for_selector("section.conversation")
    expect(page.locator(".message")).to_have_count(len(trajectory.messages))
    board = page.locator(".board").first
    assert board.inner_text().strip("\n").split("\n") == ["| X |   | O |", "|   | X |   |", "| O |   |   |"]
    assert board.evaluate("node => getComputedStyle(node).whiteSpace") == "pre"
    thought = page.locator("#turn-1 .thought")
    expect(thought).not_to_have_attribute("open", "")
    expect(page.locator("#turn-2 .call")).to_have_text('look_up({"word": "clock"})', use_inner_text=True)
    for index, turn in enumerate(trajectory.turns):
        mean = columns["advantages"][turn.start]
        notes = page.locator(f"#turn-{index} .value")
        assert float(notes.nth(0).get_attribute("title") or "") == turn.reward
        assert float(notes.nth(1).get_attribute("title") or "") == pytest.approx(mean, rel=1e-12)
    expect(page.locator(".ending")).to_contain_text(f"stop reason: {trajectory.stop_reason.value}")


def test_every_value_of_a_token_is_the_stores(either: Opened) -> None:
    page = either.go(view="tokens", row=ROW)
    record = list(either.store.records())[ROW]
    trajectory = record.trajectory
    tokens = page.locator(".stream .token")
    expect(tokens).to_have_count(len(trajectory.token_ids))
    assert trajectory.logprobs is not None
    assert record.advantages is not None
    assert record.entropies is not None
    assert record.trainer_logprobs is not None
    for at in (trajectory.turns[0].start, trajectory.turns[1].stop - 1):
        tokens.nth(at).hover()
        expect(page.locator(".hint dd[data-name='token']")).to_have_text(str(at))
        values = dict(
            page.eval_on_selector_all(".hint dd", "nodes => nodes.map(node => [node.dataset.name, node.textContent])")
        )
        assert int(values["id"]) == trajectory.token_ids[at]
        assert float(values["reward"]) == trajectory.per_token_rewards[at]
        assert float(values["advantage"]) == record.advantages[at]
        assert float(values["log-probability"]) == trajectory.logprobs[at]
        assert float(values["entropy"]) == record.entropies[at]
        gap = record.trainer_logprobs[at] - trajectory.logprobs[at]
        assert float(values["sampler/trainer gap"]) == pytest.approx(gap, rel=1e-12)
    tokens.nth(0).hover()
    expect(page.locator(".hint dd[data-name='turn']")).to_have_text("none: an environment token")
    text = WORDS[trajectory.token_ids[trajectory.turns[0].start]]
    assert text in tokens.nth(trajectory.turns[0].start).inner_text()


def test_tokens_are_walked_by_keys(served: Opened) -> None:
    page = served.go(view="tokens", row=ROW)
    trajectory, _ = record_of(ROW)
    page.locator(".stream .token[tabindex='0']").focus()
    start, next_start = trajectory.turns[0].start, trajectory.turns[1].start
    token = page.locator(".hint dd[data-name='token']")
    for key, at in (
        *(("ArrowRight", start + 1), ("ArrowDown", next_start)),
        *(("ArrowLeft", next_start - 1), ("ArrowUp", start)),
    ):
        page.keyboard.press(key)
        expect(token).to_have_text(str(at))
    expect(page.get_by_role("tooltip")).to_be_visible()


def test_colors_follow_the_chosen_quantity_and_the_legend_has_their_scale(served: Opened) -> None:
    page = served.go(view="tokens", row=ROW)
    trajectory, columns = record_of(ROW)
    names = page.get_by_role("radio").all_inner_texts()
    assert names == ["trained on", "reward", "advantage", "log-probability", "entropy", "sampler/trainer gap"]
    own = [at for turn in trajectory.turns for at in range(turn.start, turn.stop)]
    classes = page.eval_on_selector_all(".stream .token", "nodes => nodes.map(node => node.className)")
    for at in own:
        sign = "p" if columns["advantages"][at] > 0 else "n"
        assert re.search(rf" {sign}[1-8]$", classes[at])
    assert all(name == "token" for at, name in enumerate(classes) if at not in own)
    limit = max(abs(value) for value in columns["advantages"])
    assert f"{limit:.3g}" in page.locator(".legend").inner_text()
    page.get_by_role("radio", name="log-probability").click()
    settled(page, "by=logprob")
    classes = page.eval_on_selector_all(".stream .token", "nodes => nodes.map(node => node.className)")
    assert all(re.search(r" n[1-8]$", classes[at]) for at in own)
    page.get_by_role("radio", name="trained on").click()
    expect(page.locator(".stream .token.trained")).to_have_count(len(own))
    page.reload()
    settled(page)
    expect(page.get_by_role("radio", name="trained on")).to_have_attribute("aria-checked", "true")


def test_a_rollout_that_training_left_out_reports_it(served: Opened) -> None:
    page = served.go(view="tokens", row=5)
    expect(page.locator(".notice")).to_contain_text("This rollout was excluded from training")


def test_tokens_of_an_evaluation_are_not_shown_as_trained_on(browser: Browser, tmp_path: Path) -> None:
    with RolloutStore.writer(tmp_path / "kept", source="evaluation") as writer:
        writer.add(record_of(0)[0])
    with opened(browser, RolloutStore(tmp_path / "kept"), "served", tmp_path) as shown:
        page = shown.go(view="tokens", row=0, by="mask")
        expect(page.locator(".legend")).to_contain_text("agent tokens that training would use")
        page.locator(".stream .token.agent").first.hover()
        expect(page.locator(".hint [data-name='trained on']")).to_have_text("no, but training would use it")


def test_hostile_text_is_shown_and_nothing_of_it_runs(either: Opened) -> None:
    row = 4 * HOSTILE_GROUP + 3  # one that failed: its error is hostile too
    seen = HOSTILE.replace("\x1b", "␛").replace("\x00", "␀").replace("\u202e", "⟪U+202E⟫").replace("\u202c", "⟪U+202C⟫")
    drawn = {"conversation": ".message", "tokens": ".token", "group": "table.group", "pair": ".side"}
    for view, ready in drawn.items():
        page = either.go(view=view, row=row)
        page.wait_for_selector(ready)
        assert page.evaluate("window.hacked") is None
        assert page.locator("main script, main img, main svg[onload]").count() == 0
        if view in {"conversation", "group", "pair"}:
            assert seen in page.locator("main").inner_text()
    page = either.go(view="conversation", row=row)
    expect(page.locator(".error")).to_contain_text(seen)
    assert "\u202e" not in page.locator("main").inner_text()


def test_policy_stops_what_is_not_ours(served: Opened) -> None:
    page = served.go()
    blocked = page.evaluate(
        """() => new Promise((done) => {
            document.addEventListener("securitypolicyviolation", (event) => done(event.effectiveDirective));
            const script = document.createElement("script");
            try { script.textContent = "window.hacked = 1"; } catch { done("require-trusted-types-for"); }
            document.body.append(script);
        })"""
    )
    assert blocked
    assert page.evaluate("window.hacked") is None
    served.complaints.clear()  # the browser reported what it stopped


def test_a_line_of_a_megabyte_and_many_tokens_stay_fluid(browser: Browser, tmp_path: Path) -> None:
    number = 40_000
    long = Trajectory(
        token_ids=[5] * number,
        turns=[Turn(start=10, stop=number - 10, reward=1.0, message_index=1)],
        messages=[{"role": "user", "content": LONG * 4}, {"role": "assistant", "content": "x" * 100_000 + "\ud800"}],
        final_reward=1.0,
        stop_reason=StopReason.DONE,
        per_token_rewards=[0.0] * 10 + [0.5] * (number - 20) + [0.0] * 10,
    )
    with RolloutStore.writer(tmp_path / "long") as writer:
        writer.add(long)
    with opened(browser, RolloutStore(tmp_path / "long"), "served", tmp_path) as shown:
        page = shown.go(view="tokens", row=0)
        page.wait_for_selector(".token")
        assert page.locator(".stream .token").count() < number / 2
        page.evaluate("document.querySelector('.content').scrollTop = 1e9")
        page.wait_for_selector(f".token[data-at='{number - 1}']")
        page = shown.go(view="conversation", row=0)
        assert len(page.locator(".message").nth(0).inner_text()) < 30_000
        page.get_by_role("button", name=re.compile("more characters")).nth(1).click()
        expect(page.locator(".message").nth(1)).to_contain_text("⟪U+D800⟫")


def test_a_server_that_is_gone_and_a_part_that_vanished_are_reported_in_a_sentence(
    browser: Browser, tmp_path: Path
) -> None:
    store = write_store(tmp_path / "going", 8)
    with opened(browser, store, "served", tmp_path) as shown:
        page = shown.go()
        for part in store.path.glob("*.parquet"):
            part.unlink()
        page.locator(".row").nth(2).get_by_role("link").click()
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text(re.compile(r"\w+ .*(gone|vanished|no longer|cannot be read|missing)"))
        settled(page, "view=conversation")
        page.route("**/data/**", lambda route: route.abort())
        page.keyboard.press("j")
        expect(alert).to_contain_text("The server does not respond. Start `agentsgym view` again")
        expect(alert.get_by_role("button", name="Try again")).to_be_visible()
        shown.complaints.clear()  # the browser's own lines on failed requests


def test_a_page_that_was_cut_reports_it(browser: Browser, kept: RolloutStore, tmp_path: Path) -> None:
    with opened(browser, kept, "written", kept.path.parent) as shown:
        shown.go()
        document = (kept.path.parent / "page.html").read_text()
        cut = tmp_path / "cut.html"
        cut.write_text(re.sub(r'<script type="text/plain" id="chunk-0">.*?</script>', "", document, flags=re.DOTALL))
        shown.page.goto(f"{cut.as_uri()}#view=conversation&row=0")
        expect(shown.page.get_by_role("alert")).to_contain_text("Part chunk-0 of this page is missing")


def test_a_rollout_without_tokens_keeps_its_conversation(browser: Browser, tmp_path: Path) -> None:
    bare = Trajectory(
        token_ids=[],
        turns=[Turn(start=0, stop=0, reward=float("inf"), message_index=1)],
        messages=[{"role": "user", "content": "go"}, {"role": "assistant", "content": "gone"}],
        final_reward=float("inf"),
        stop_reason=StopReason.DONE,
    )
    with RolloutStore.writer(tmp_path / "bare") as writer:
        writer.add(bare)
    for mode in ("served", "written"):
        with opened(browser, RolloutStore(tmp_path / "bare"), mode, tmp_path) as shown:
            page = shown.go(view="tokens", row=0)
            expect(page.locator(".content .empty")).to_contain_text("recorded without a tokenizer")
            page = shown.go(view="conversation", row=0)
            expect(page.locator("#turn-0")).to_contain_text("∞")
            for view in ("group", "pair", "curves"):  # an infinite reward has no advantages
                shown.go(view=view, row=0).wait_for_selector(".content > *")
            assert json.loads(shown.page.evaluate("JSON.stringify([location.hash.length > 0])")) == [True]


def test_each_named_reward_has_a_column_a_bar_and_a_color(browser: Browser, tmp_path: Path) -> None:
    turns = [
        Turn(start=k, stop=k + 1, reward=one + 0.5, components={"correct": one, "format": 0.5})
        for k, one in enumerate((0.0, -2.0, 1.0))
    ]
    total = {"correct": -1.0, "format": 1.5}
    with RolloutStore.writer(tmp_path / "named") as writer:
        for number in range(2):
            writer.add(
                Trajectory(
                    token_ids=[1, 2, 3],
                    turns=turns,
                    messages=[{"role": "assistant", "content": "a"}] * 3,
                    per_token_rewards=[turn.reward for turn in turns],
                    final_reward=0.5 + number,
                    final_components={**total, "format": 1.5 + number},
                    stop_reason=StopReason.DONE,
                    rollout_index=number,
                )
            )
    with opened(browser, RolloutStore(tmp_path / "named"), "served", tmp_path) as shown:
        page = shown.go(view="list")
        expect(page.locator(".head")).to_contain_text("reward: format")
        page = shown.go(view="conversation", row=0)
        expect(page.locator(".turn-bar .names span")).to_have_text(["reward", "correct", "format"])
        expect(page.locator(".turn-bar .turn").nth(1).locator(".bars")).to_have_count(3)
        expect(page.locator(".turn-bar .turn").nth(1).locator(".half").nth(1)).to_have_class(re.compile("down"))
        page = shown.go(view="tokens", row=0)
        expect(page.locator("section.tokens")).to_contain_text("reward: correct")
        settled(page)


def test_the_words_of_judges_stand_with_what_they_judged(browser: Browser, tmp_path: Path) -> None:
    words = [
        {"judge": "warmth", "turn": 1, "scores": {"warm": -1.5}, "reason": "<b>Cold.</b>", "answers": ['{"warm": 0}']},
        {"judge": "manners", "turn": None, "scores": {"polite": 0.5}, "reason": "Short.", "error": "JudgeError: gone"},
    ]
    with RolloutStore.writer(tmp_path / "judged") as writer:
        writer.add(
            Trajectory(
                token_ids=[],
                turns=[Turn(start=0, stop=0, reward=0.0, message_index=k) for k in range(2)],
                messages=[{"role": "assistant", "content": "a"}] * 2,
                final_reward=0.5,
                stop_reason=StopReason.DONE,
                info={"judgments": words},
            )
        )
    with opened(browser, RolloutStore(tmp_path / "judged"), "served", tmp_path) as shown:
        page = shown.go(view="conversation", row=0)
        expect(page.locator("#turn-0 .judgment")).to_have_count(0)
        expect(page.locator("#turn-1 .judgment")).to_contain_text("<b>Cold.</b>")
        expect(page.locator("#turn-1 .judgment .down")).to_have_count(1)
        expect(page.locator(".ending .judgment")).to_contain_text("JudgeError: gone")
        page.locator("#turn-1 .judgment summary").click()
        expect(page.locator("#turn-1 .judgment details")).to_contain_text('{"warm": 0}')
        settled(page)
