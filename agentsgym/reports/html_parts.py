"""Parts of a page: escaped text of bounded length, tables, the style. Nothing of it is ever executed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final, TypeVar

from agentsgym.reports.colors import CSS
from agentsgym.texts import shortened, visible

Item = TypeVar("Item")

_LAYOUT: Final = """
.agentsgym{background:var(--paper);color:var(--ink);border:1px solid var(--line);border-radius:6px;padding:10px 12px;
font:13px/1.45 system-ui,sans-serif;max-width:960px;overflow-x:auto}
.agentsgym p{margin:0 0 8px}
.agentsgym table{border-collapse:collapse;margin:0 0 8px;font-size:12px;color:inherit;background:none}
.agentsgym tr{background:none}
.agentsgym th,.agentsgym td{text-align:right;padding:2px 10px 2px 0;border:0;border-bottom:1px solid var(--line);
color:inherit;font-variant-numeric:tabular-nums;white-space:nowrap}
.agentsgym th{color:var(--faint);font-weight:500}
.agentsgym th:first-child,.agentsgym td:first-child{text-align:left}
.agentsgym .faint{color:var(--faint)}
.agentsgym .message{border-left:3px solid var(--line);padding:0 0 0 8px;margin:0 0 6px}
.agentsgym .assistant{border-color:var(--faint)}
.agentsgym .text{white-space:pre-wrap;overflow-wrap:anywhere;font-family:ui-monospace,monospace;font-size:12px}
.agentsgym .call{font-family:ui-monospace,monospace;font-size:12px;background:var(--given);color:inherit;
padding:1px 4px;border-radius:3px;overflow-wrap:anywhere}
.agentsgym .tokens{line-height:1.9;font-family:ui-monospace,monospace;font-size:11px;margin:8px 0 4px}
.agentsgym .tokens i,.agentsgym .legend i{font-style:normal;display:inline-block;min-width:9px;min-height:14px;
line-height:14px;margin:0 1px 1px 0;padding:0 2px;border-radius:2px;vertical-align:middle;white-space:pre;
background:var(--given);border-bottom:2px solid transparent}
.agentsgym i.a{background:var(--agent);border-bottom-color:var(--ink)}
.agentsgym i.p{background:rgb(var(--positive)/var(--s,1))}
.agentsgym i.n{background:rgb(var(--negative)/var(--s,1))}
.agentsgym .tokens b{font-weight:500;color:var(--faint);padding:0 3px 0 6px}
.agentsgym .legend{font-size:11px;color:var(--faint)}
.agentsgym .legend i{width:12px}
.agentsgym details{margin:4px 0 0}
.agentsgym summary{color:var(--faint);cursor:pointer}
""".replace("\n", "")


def page(*parts: str) -> str:
    """Put parts into one box with its style, in light and dark as the reader's system asks."""
    return f'<div class="agentsgym"><style>{_STYLE}</style>{"".join(parts)}</div>'


def text(value: str, most: int = 1200) -> str:
    """Escape a text, of which the middle is left out where it is longer than ``most`` bytes."""
    return escape(visible(shortened(value, most)))


def tag(name: str, content: str, kind: str = "") -> str:
    """Put what is escaped already into an element of a class."""
    return f'<{name} class="{kind}">{content}</{name}>' if kind else f"<{name}>{content}</{name}>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Make a table; cells are escaped here."""
    head = "".join(f"<th>{text(cell, 200)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{text(cell, 200)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def ends(items: Sequence[Item], most: int) -> tuple[Sequence[Item], int, Sequence[Item]]:
    """Split what is too long to be shown whole: its beginning, how many are left out, and its end.

    >>> ends("abcdefg", 4)
    ('abc', 3, 'g')
    """
    if len(items) <= most:
        return items, 0, items[:0]
    tail = most // 4
    return items[: most - tail], len(items) - most, items[len(items) - tail :]


def left_out(count: int, what: str) -> str:
    """Say how many of something are not shown; nothing if none."""
    return tag("p", f"… {count:,} {text(what)} are left out …", "faint") if count else ""


def _variables(theme: Mapping[str, str]) -> str:
    return ".agentsgym{" + "".join(f"--{name}:{value};" for name, value in theme.items()) + "}"


_STYLE: Final = (
    f"{_variables(CSS['light'])}@media(prefers-color-scheme:dark){{{_variables(CSS['dark'])}}}"
    f".agentsgym{{color-scheme:light dark}}{_LAYOUT}"
)
