"""Rollouts and evaluations as pieces of a page, for notebooks: no scripts, nothing from elsewhere, all text escaped.

What environments, agents and models wrote is data here: it is escaped, control characters are written out, and long
texts, conversations and token lists are shown by their beginning and end, with how much is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from agentsgym.errors import ConfigError
from agentsgym.reports.colors import CSS, largest, strength
from agentsgym.statistics.metrics import Estimate, Evaluation
from agentsgym.texts import shortened, shown, visible
from agentsgym.types import Trajectory, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    """Put parts into one box with its style, light or dark according to the reader's system."""
    return f'<div class="agentsgym"><style>{_STYLE}</style>{"".join(parts)}</div>'


def text(value: str, most: int = 1200) -> str:
    """Escape a text, omitting the middle if it is longer than ``most`` bytes."""
    return escape(visible(shortened(value, most)))


def tag(name: str, content: str, kind: str = "") -> str:
    """Wrap escaped content in an element with a class."""
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
    """Describe how many items are not shown; empty if none."""
    return tag("p", f"… {count:,} {text(what)} are left out …", "faint") if count else ""


def _variables(theme: Mapping[str, str]) -> str:
    return ".agentsgym{" + "".join(f"--{name}:{value};" for name, value in theme.items()) + "}"


_STYLE: Final = (
    f"{_variables(CSS['light'])}@media(prefers-color-scheme:dark){{{_variables(CSS['dark'])}}}"
    f".agentsgym{{color-scheme:light dark}}{_LAYOUT}"
)


_MOST_MESSAGES = 24
_MOST_TOKENS = 480
_MOST_ROLLOUTS = 20
_MOST_CALLS = 8  # of a message
_MOST_PARTS = 12  # environments or roles of an evaluation


def trajectory_html(
    trajectory: Trajectory,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    advantages: Sequence[float] | None = None,
) -> str:
    """Draw a rollout: how it went, its conversation, and its tokens colored by reward or advantage.

    Hovering over a token shows its position, id, turn, reward, log-probability and advantage.

    Args:
        trajectory: The rollout.
        tokenizer: The tokenizer that decodes tokens; without one they are boxes.
        advantages: The advantages that color the agent's tokens, (T,); None for ``per_token_rewards``.

    Returns:
        One HTML element with its own style, of bounded size.

    Raises:
        ConfigError: The numbers of advantages and tokens differ.
    """
    if advantages is not None and len(advantages) != len(trajectory.token_ids):
        raise ConfigError(
            f"advantages must have one value per token, got {len(advantages)} for {len(trajectory.token_ids)} tokens"
        )
    paid = {"reward of " + str(role): f"{amount:zg}" for role, amount in trajectory.final_rewards.items()}
    return page(
        tag("p", tag("b", text(trajectory.outcome)) + " · " + text(trajectory.headline, 400)),
        table([*paid], [[*paid.values()]]) if paid else "",
        _conversation(trajectory),
        _tokens(trajectory, tokenizer, advantages),
        _error(trajectory),
        _folded("info", shown(dict(trajectory.info), 1000)) if trajectory.info else "",
    )


def evaluation_html(evaluation: Evaluation) -> str:
    """Draw an evaluation: its estimates with intervals, by environment and role too, why rollouts ended, the rollouts.

    Returns:
        One HTML element with its own style, of bounded size.
    """
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in evaluation.stop_reasons.items())
    counts = f"{evaluation.num_episodes:,} episodes, {evaluation.num_failed:,} failed"
    counts += f", {evaluation.num_left_out:,} left out" if evaluation.num_left_out else ""
    return page(
        tag("p", tag("b", "Evaluation") + text(f" · {counts} · ended by {reasons}", 400)),
        _estimates_table(evaluation),
        _folded_rollouts(evaluation.trajectories),
    )


def rollouts_html(trajectories: Sequence[Trajectory]) -> str:
    """Draw a table of rollouts, one row each with its turn rewards; of many, those at both ends.

    Only the rollouts that are shown are looked at, so a store of any size may be given.

    Returns:
        One HTML element with its own style, of bounded size.
    """
    return page(tag("p", tag("b", f"{len(trajectories):,} rollouts")), _rollout_table(trajectories))


def _conversation(trajectory: Trajectory) -> str:
    turns = {turn.message_index: (index, turn) for index, turn in enumerate(trajectory.turns)}
    drawn = [*enumerate(cast("Sequence[Mapping[str, Any]]", trajectory.messages))]
    begin, count, end = ends(drawn, _MOST_MESSAGES)
    first, last = ("".join(_message(one, turns.get(index)) for index, one in part) for part in (begin, end))
    return first + left_out(count, "messages") + last


def _message(message: Mapping[str, Any], played: tuple[int, Turn] | None) -> str:
    who = [str(message.get("role"))]
    if played is not None:
        who += _notes(*played)
    calls = cast("Sequence[Any]", message.get("tool_calls") or ())
    begin, count, end = ends(calls, _MOST_CALLS)
    thought = message.get("reasoning_content")
    lines = [
        tag("div", text(" · ".join(who), 200), "faint"),
        _folded("thought", str(thought)) if thought else "",
        tag("div", text(str(message.get("content") or "")), "text"),
        *(tag("div", tag("code", _call(call), "call")) for call in [*begin, *end]),
        left_out(count, "calls"),
    ]
    return tag("div", "".join(lines), "message assistant" if played is not None else "message")


def _notes(index: int, turn: Turn) -> list[str]:
    """The annotations of a turn besides its role."""
    notes = [f"turn {index}", f"reward {turn.reward:+zg}"]
    if turn.role is not None:
        notes.append(_role(turn.role))
    if turn.invalid:
        notes.append("invalid")
    if turn.prompt_messages is not None:
        notes.append(f"saw a rewritten history of {len(turn.prompt_messages)} messages")
    return notes


def _role(role: object) -> str:
    return f"as {role[:40] if isinstance(role, str) else shown(role, 40)}"


def _call(call: Any) -> str:
    """Format a tool call as ``name(key=value)``; anything else is written as it is."""
    inner: Any = cast("Mapping[str, Any]", call).get("function") if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping):
        return text(shown(cast("object", call), 400))
    named = cast("Mapping[str, Any]", inner)
    arguments: Any = named.get("arguments")
    if isinstance(arguments, Mapping):
        given = ", ".join(f"{key}={shown(value, 120)}" for key, value in cast("Mapping[Any, Any]", arguments).items())
    else:
        given = str(arguments or "")
    return text(f"{named.get('name')}({given})", 400)


def _tokens(
    trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase | None, advantages: Sequence[float] | None
) -> str:
    num_tokens = len(trajectory.token_ids)
    if not num_tokens:
        return ""
    turn_of: list[int | None] = [None] * num_tokens
    for index, turn in enumerate(trajectory.turns):
        turn_of[turn.start : turn.stop] = [index] * (turn.stop - turn.start)
    name, values = ("reward", trajectory.per_token_rewards) if advantages is None else ("advantage", advantages)
    limit = largest(value for value, turn in zip(values, turn_of, strict=False) if turn is not None)
    write = _writer(tokenizer)
    begin, count, end = ends(range(num_tokens), _MOST_TOKENS)

    def cell(place: int) -> str:
        turn = turn_of[place]
        label = f"<b>turn {turn}</b>" if turn is not None and trajectory.turns[turn].start == place else ""
        strong = strength(values[place], limit) if values and turn is not None else 0.0
        kind = "" if turn is None else f' class="a{" p" if strong > 0 else " n" if strong < 0 else ""}"'
        style = f' style="--s:{abs(strong):.2f}"' if strong else ""
        hint = text(_hint(trajectory, place, turn, advantages), 300)
        return f'{label}<i{kind}{style} title="{hint}">{write(trajectory.token_ids[place])}</i>'

    first, last = ("".join(map(cell, part)) for part in (begin, end))
    between = f' <span class="faint">… {count:,} tokens are left out …</span> ' if count else ""
    return tag("div", first + between + last, "tokens") + _legend(name, limit)


def _writer(tokenizer: PreTrainedTokenizerBase | None) -> Callable[[int], str]:
    if tokenizer is None:
        return lambda _: ""
    decode = cast("Any", tokenizer).decode
    return lambda token_id: text(str(decode([token_id])).replace("\n", "⏎"), 64)


def _hint(trajectory: Trajectory, place: int, turn: int | None, advantages: Sequence[float] | None) -> str:
    parts = [f"token {place}", f"id {trajectory.token_ids[place]}", "given" if turn is None else f"turn {turn}"]
    if turn is not None:
        named = (
            ("reward", trajectory.per_token_rewards),
            ("log-probability", trajectory.logprobs),
            ("advantage", advantages),
        )
        parts += [f"{name} {values[place]:z.4g}" for name, values in named if values is not None and len(values)]
    return ", ".join(parts)


def _legend(name: str, limit: float) -> str:
    keys = [("", "given by the environment"), ("a", f"the agent's, {name} 0")]
    if limit:
        keys += [("a p", f"{name} up to +{limit:.3g}"), ("a n", f"{name} down to -{limit:.3g}")]
    return tag("div", " ".join(f'<i class="{kind}"></i> {text(word)} ' for kind, word in keys), "legend")


def _error(trajectory: Trajectory) -> str:
    if trajectory.error is None:
        return tag("p", text(f"ended: {trajectory.stop_reason}"), "faint")
    return tag("p", text(f"ended: {trajectory.stop_reason}"), "faint") + tag(
        "div", text(trajectory.error, 4000), "text"
    )


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{text(title)}</summary>{tag('div', text(content), 'text')}</details>"


def _estimates_table(evaluation: Evaluation) -> str:
    parts: list[tuple[str, Evaluation]] = [("all", evaluation)]
    parts += [(name, one) for name, one in evaluation.by_environment.items()]
    parts += [(_role(role), one) for role, one in evaluation.by_role.items()]
    header = ["", "win rate", "reward", "turns", "of optimal", "episodes", "failed"]
    rows = [
        [
            name,
            _estimate(one.win_rate, "{:z.1%}"),
            _estimate(one.reward, "{:z.3g}"),
            _estimate(one.turns, "{:z.1f}"),
            _estimate(one.fraction_of_optimal, "{:z.1%}"),
            f"{one.num_episodes:,}",
            f"{one.num_failed:,}",
        ]
        for name, one in parts[: _MOST_PARTS + 1]
    ]
    note = tag("p", f"mean [{evaluation.confidence:.0%} interval over tasks]", "faint")
    return table(header, rows) + left_out(len(parts) - len(rows), "environments and roles") + note


def _estimate(estimate: Estimate | None, form: str) -> str:
    if estimate is None:
        return "-"
    low, high = form.format(estimate.low).removesuffix("%"), form.format(estimate.high)
    return f"{form.format(estimate.mean)} [{low}, {high}]"


def _folded_rollouts(trajectories: Sequence[Trajectory]) -> str:
    if not trajectories:
        return ""
    return f"<details><summary>{len(trajectories):,} rollouts</summary>{_rollout_table(trajectories)}</details>"


def _rollout_table(trajectories: Sequence[Trajectory]) -> str:
    header = ["task, rollout", "outcome", "reward", "turns", "ended by", "tokens", "turn rewards"]
    begin, count, end = ends(trajectories, _MOST_ROLLOUTS)
    return (
        table(header, map(_rollout_cells, begin))
        + left_out(count, "rollouts")
        + (table(header, map(_rollout_cells, end)) if count else "")
    )


def _rollout_cells(trajectory: Trajectory) -> list[str]:
    rewards, count, last = ends(trajectory.turn_rewards, 12)
    between = [f"… {count} more …"] if count else []
    return [
        f"{trajectory.task_index}, {trajectory.rollout_index}",
        trajectory.outcome,
        f"{trajectory.final_reward:zg}",
        str(trajectory.num_turns),
        trajectory.stop_reason.value,
        str(len(trajectory.token_ids)),
        " ".join([*(f"{one:zg}" for one in rewards), *between, *(f"{one:zg}" for one in last)]),
    ]
