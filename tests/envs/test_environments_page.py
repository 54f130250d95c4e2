"""The output that the page on environments shows is real."""

import contextlib
import io
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")


def test_what_run_trial_and_generate_give_is_as_the_page_shows_it() -> None:
    code, _, after = PAGE.partition("One rollout of two turns, both ways:\n\n```python\n")[2].partition(
        "```\n\n```text\n"
    )
    shown = after.partition("```")[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "page"})
    assert printed.getvalue() == shown
