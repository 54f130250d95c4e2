"""The list of rollouts in a browser: filters, order, scrolling, keys, and an address that keeps all of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from browsing import HOSTILE_GROUP, Opened, opened, record_of, settled
from playwright.sync_api import Browser, Page, expect
from stored import rollout

from agentsgym import RolloutStore, StopReason, Turn


def shown_rows(page: Page) -> list[int]:
    """The rows in the document, from top to bottom."""
    names = page.evaluate(  # in one step, since a list that is drawn again between two has no offsets
        "[...document.querySelectorAll('.row')].map(one => [one.offsetTop, +one.querySelector('a.open').textContent])"
    )
    return [row for _, row in sorted(names)]


def count_of(page: Page) -> int:
    return int(page.locator(".count b").inner_text().replace(",", ""))


def test_filters_leave_what_python_counts(either: Opened) -> None:
    page = either.go()
    outcome, env = either.column("outcome"), either.column("env")
    reward, turns = either.column("final_reward"), either.column("num_turns")
    assert count_of(page) == len(outcome)
    page.get_by_label("lost").check()
    expect(page.locator(".count b")).to_have_text(str(outcome.count("lost")))
    page.get_by_label("Boards").check()
    settled(page, "env=Boards")
    both = sum(one == "lost" and other == "Boards" for one, other in zip(outcome, env, strict=True))
    expect(page.locator(".count b")).to_have_text(str(both))
    # A choice is counted among what the other filters leave.
    choices = page.locator("fieldset", has_text="Outcome").locator(".choice")
    sizes = dict(
        zip(choices.locator(".outcome").all_inner_texts(), choices.locator(".size").all_inner_texts(), strict=True)
    )
    sizes = {name.strip("✓✗•! "): int(size) for name, size in sizes.items()}
    assert sizes == {
        one: sum(a == one and b == "Boards" for a, b in zip(outcome, env, strict=True)) for one in set(outcome)
    }
    page.get_by_role("button", name="clear").click()
    page.get_by_label("Reward: at most").fill("-0.5")
    page.get_by_label("Reward: at most").press("Enter")
    expect(page.locator(".count b")).to_have_text(str(sum(value <= -0.5 for value in reward)))
    page.get_by_label("Turns: at least").fill("4")
    page.get_by_label("Turns: at least").press("Enter")
    wanted = sum(a <= -0.5 and b >= 4 for a, b in zip(reward, turns, strict=True))
    expect(page.locator(".count b")).to_have_text(str(wanted))


def test_columns_sort_both_ways(served: Opened) -> None:
    page = served.go()
    rewards = served.column("final_reward")
    page.get_by_role("button", name="reward", exact=True).click()
    expect(page.get_by_role("columnheader", name="reward", exact=True)).to_have_attribute("aria-sort", "descending")
    best = sorted(range(len(rewards)), key=lambda row: -rewards[row])
    assert shown_rows(settled(page, "sort=-final_reward"))[:20] == best[:20]
    page.get_by_role("button", name="reward", exact=True).click()
    settled(page, "sort=final_reward")
    worst = sorted(range(len(rewards)), key=lambda row: rewards[row])
    assert shown_rows(page)[:20] == worst[:20]


def test_ten_thousand_rows_scroll_with_few_in_the_document(browser: Browser, tmp_path: Path) -> None:
    one, _ = record_of(0)
    with RolloutStore.writer(tmp_path / "many", flush_every=5000) as writer:
        for index in range(10_000):
            writer.add(replace(one, task_index=index))
    with opened(browser, RolloutStore(tmp_path / "many"), "served", tmp_path) as shown:
        page = shown.go(sort="row")
        assert count_of(page) == 10_000
        for place in (0.2, 0.5, 0.9, 1.0):
            page.evaluate(
                f"const one = document.querySelector('.scroller'); one.scrollTop = one.scrollHeight * {place}"
            )
            page.locator(f".row[data-place='{min(9999, int(10_000 * place))}']").wait_for()
            assert page.locator(".row").count() < 60
        last = page.locator(".row[data-place='9999']")
        box, frame = last.bounding_box(), page.locator(".scroller").bounding_box()
        assert box is not None
        assert frame is not None
        assert box["y"] + box["height"] <= frame["y"] + frame["height"] + 1
        assert page.locator("*").count() < 4000


def test_the_address_keeps_view_and_filters(either: Opened) -> None:
    page = either.go()
    page.get_by_label("won").check()
    settled(page, "outcome=won")
    page.get_by_role("button", name="turns", exact=True).click()
    settled(page, "outcome=won", "sort=-num_turns")
    rows, count = shown_rows(page), count_of(page)
    page.reload()
    settled(page)
    assert (shown_rows(page), count_of(page)) == (rows, count)
    assert page.get_by_label("won").is_checked()
    page.locator(".row").nth(0).get_by_role("link").click()
    settled(page, "view=conversation")
    page.keyboard.press("t")
    settled(page, "view=tokens")
    page.reload()
    settled(page, "view=tokens")
    assert page.locator("section.tokens").is_visible()
    page.go_back()
    settled(page, "view=conversation")
    assert page.locator("section.conversation").is_visible()
    page.go_back()
    settled(page, without=["view="])
    assert (shown_rows(page), count_of(page)) == (rows, count)


def test_texts_are_searched_in_any_case(either: Opened) -> None:
    page = either.go()
    page.keyboard.press("/")
    page.keyboard.type("REDacted")
    settled(page, "text=REDacted")
    expect(page.locator(".empty")).to_be_visible()
    page.get_by_label("Search the messages of rollouts").fill("ONERROR")
    settled(page, "text=ONERROR")
    expect(page.locator(".count b")).to_have_text("4")
    assert shown_rows(page) == [4 * HOSTILE_GROUP + member for member in reversed(range(4))]
    assert either.answers.search("ONERROR")["rows"] == shown_rows(page)[::-1]


def test_keys_move_open_and_go_back(served: Opened) -> None:
    page = served.go()  # the newest first
    selected = page.locator(".row.selected a.open")
    expect(selected).to_have_text("239")
    page.keyboard.press("j")
    page.keyboard.press("ArrowDown")
    expect(selected).to_have_text("237")
    page.keyboard.press("k")
    expect(selected).to_have_text("238")
    page.keyboard.press("Enter")
    expect(page.locator(".rollout-head h2")).to_contain_text("#238")
    page.keyboard.press("j")
    expect(page.locator(".rollout-head h2")).to_contain_text("#237")
    for key, view in {"t": "tokens", "g": "group-view", "b": "pair", "c": "conversation"}.items():
        page.keyboard.press(key)
        page.wait_for_selector(f"section.{view}")
        settled(page)
    page.keyboard.press("n")
    expect(page.locator("#turn-0")).to_have_class("message agent here")
    page.keyboard.press("v")
    page.wait_for_selector("section.curves")
    settled(page, "view=curves")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("Escape")
    settled(page, without=["view="])
    for _ in range(60):
        page.keyboard.press("j")
    expect(page.locator(".row.selected")).to_be_in_viewport()


def test_letters_typed_into_a_field_are_no_keys(served: Opened) -> None:
    page = served.go()
    page.get_by_label("Search the messages of rollouts").click()
    page.keyboard.type("clock")
    settled(page, "text=clock")
    assert page.locator("section.list").is_visible()


def test_the_share_that_was_won_is_that_of_what_passes_the_filters(either: Opened) -> None:
    page = either.go(env="Boards")
    outcomes = [one for one, env in zip(either.column("outcome"), either.column("env"), strict=True) if env == "Boards"]
    won, reported = outcomes.count("won"), outcomes.count("won") + outcomes.count("lost")
    assert len(outcomes) > reported > won > 0  # some failed
    expect(page.locator(".count .won")).to_have_text(f"{100 * won / reported:.1f}% won ({won} of {reported})")


def test_the_share_that_each_role_won_is_shown_where_there_are_several(browser: Browser, tmp_path: Path) -> None:
    both = [Turn(start=0, stop=0, reward=0.0, role=role) for role in ("O", "X")]
    with RolloutStore.writer(tmp_path / "kept") as writer:
        for index, winner in enumerate([*"XXO", None, "X"]):
            rewards = {role: 0.0 if winner is None else float(role == winner) for role in "XO"}
            turns = both if index < 4 else both[1:]  # in the last one, an opponent played O
            info = {"success": True} if winner == "X" else {}
            played = rollout(index, 0, turns=turns, logprobs=None, final_rewards=rewards, info=info)
            writer.add(replace(played, stop_reason=StopReason.DONE if index else StopReason.FAILED))
    for mode in ("served", "written"):
        with opened(browser, RolloutStore(tmp_path / "kept"), mode, tmp_path) as shown:
            page = shown.go()
            roles = page.locator(".count .role")
            expect(roles).to_have_text(["role O: 33.3% won (1 of 3)", "role X: 50.0% won (2 of 4)"])
            page.get_by_label("won").click()
            expect(page.locator(".count b")).to_have_text("2")
            expect(roles).to_have_text(["role O: 0.0% won (0 of 1)", "role X: 100.0% won (2 of 2)"])
            page.get_by_label("Turns: at most").fill("1")
            page.get_by_label("Turns: at most").press("Enter")
            expect(page.locator(".count b")).to_have_text("1")
            expect(roles).to_have_count(0)


def test_the_list_shows_each_task_with_its_answer_and_its_group(browser: Browser, tmp_path: Path) -> None:
    with RolloutStore.writer(tmp_path / "kept", source="training", generation=1) as writer:
        for index, answer in enumerate(("clock", "board")):
            task = {"question": "What is it?", "solution": answer, "seed": index}
            writer.add(replace(record_of(index)[0], task_data=task), group=index + 5)
    wide = {"width": 1700, "height": 600}
    for mode in ("served", "written"):
        with opened(browser, RolloutStore(tmp_path / "kept"), mode, tmp_path, viewport=wide) as shown:
            row = shown.go().locator(".row").first
            expect(row.get_by_title("question: What is it? · solution: board")).to_be_visible()
            heads = shown.page.get_by_role("columnheader").all_inner_texts()
            assert row.locator(".cell").nth(heads.index("group")).inner_text() == "6"


def test_seeds_are_exact_and_no_turn_of_a_narrow_strip_is_cut_off(browser: Browser, tmp_path: Path) -> None:
    seeds = [6_471_234_567_890_123_456, 7]
    with RolloutStore.writer(tmp_path / "kept") as writer:
        for index, seed in enumerate(seeds):
            own, _ = record_of(index)
            turns = [replace(own.turns[0], start=0, stop=0, reward=float(turn == 39)) for turn in range(40)]
            bare = replace(
                own, turns=turns, token_ids=[], logprobs=None, per_token_rewards=[], task_data={"seed": seed}
            )
            writer.add(bare, created_at=datetime(2026, 1, 1 + index, tzinfo=UTC), run=f"run-{index}")
    with opened(
        browser, RolloutStore(tmp_path / "kept"), "served", tmp_path, viewport={"width": 1000, "height": 600}
    ) as shown:
        page = shown.go()
        strip = page.locator(".row svg.strip").first
        expect(strip.locator(".up")).to_have_count(1)
        own, cell = strip.bounding_box(), page.locator(".row .cell.strip").first.bounding_box()
        assert own
        assert cell
        assert own["x"] + own["width"] <= cell["x"] + cell["width"] + 1
        expect(page.locator(".row").last.get_by_title(str(seeds[0]))).to_have_text(str(seeds[0]))


def test_numbers_of_the_environments_are_columns_and_filters(browser: Browser, tmp_path: Path) -> None:
    with RolloutStore.writer(tmp_path / "kept") as writer:
        for index in range(6):
            own, _ = record_of(index)
            info = {"num_calls": index, "was_polite": index > 2, "tool": "search", "success": True}
            writer.add(replace(own, info=info if index < 5 else {}), created_at=datetime(2026, 1, 1, tzinfo=UTC))
    wide = {"width": 1700, "height": 800}
    for mode in ("served", "written"):
        with opened(browser, RolloutStore(tmp_path / "kept"), mode, tmp_path, viewport=wide) as shown:
            page = shown.go()
            assert shown.column("info/num_calls") == [0, 1, 2, 3, 4, None]
            assert shown.column("info/was_polite") == [0, 0, 0, 1, 1, None]
            page.get_by_role("button", name="num_calls").click()
            assert shown_rows(page) == [4, 3, 2, 1, 0, 5]  # what is not known comes last
            page.get_by_label("num_calls: at least").fill("2")
            page.get_by_label("num_calls: at least").press("Enter")
            page.get_by_label("was_polite: at most").fill("0")
            page.get_by_label("was_polite: at most").press("Enter")
            expect(page.locator(".count b")).to_have_text("1")
            assert shown_rows(page) == [2]
            page.get_by_role("button", name="clear").click()
            expect(page.locator(".count b")).to_have_text("6")


def test_training_has_a_learning_curve_by_step(browser: Browser, tmp_path: Path) -> None:
    with RolloutStore.writer(tmp_path / "kept", source="training", generation=1) as writer:
        for index in range(8):
            own, _ = record_of(index)
            won = index >= 4 or index == 0
            writer.add(
                replace(own, info={"success": won}, final_reward=float(index), stop_reason=StopReason.DONE),
                group=index,
                step=10 * (1 + index // 4),
            )
    with opened(browser, RolloutStore(tmp_path / "kept"), "served", tmp_path) as shown:
        page = shown.go(view="curves")
        rate, reward = (page.locator("figure.curve", has_text=name) for name in ("Win rate", "Reward per episode"))
        for figure, wanted in ((rate, [["10", "0.25"], ["20", "1"]]), (reward, [["10", "1.5"], ["20", "5.5"]])):
            figure.locator("summary").click()
            rows = [row.locator("td").all_inner_texts()[:2] for row in figure.locator("tbody tr").all()]
            assert rows == wanted
