"""Rollouts and evaluations as HTML for notebooks, without scripts or external resources.

All text from environments, agents and models is escaped, including control characters. For long texts, conversations
and token lists, only the beginning and the end are shown, with the number of omitted items in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from agentsgym.errors import ConfigError
from agentsgym.fields import check_rollout
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

_LIGHT, _DARK = (
    ".agentsgym{" + "".join(f"--{name}:{value};" for name, value in CSS[theme].items()) + "}"
    for theme in ("light", "dark")
)
_STYLE: Final = f"{_LIGHT}@media(prefers-color-scheme:dark){{{_DARK}}}.agentsgym{{color-scheme:light dark}}{_LAYOUT}"
_MAX_MESSAGES = 24
_MAX_TOKENS = 480
_MAX_ROLLOUTS = 20
_MAX_CALLS = 8  # per message
_MAX_PARTS = 12  # environments and roles of an evaluation


def page(*parts: str) -> str:
    """Wrap parts in a box whose style follows the system's light or dark theme."""
    return f'<div class="agentsgym"><style>{_STYLE}</style>{"".join(parts)}</div>'


def text(value: str, limit: int = 1200) -> str:
    """Escape a text, and omit its middle if it is longer than ``limit`` bytes."""
    return escape(visible(shortened(value, limit)))


def tag(name: str, content: str, kind: str = "") -> str:
    """Wrap content that is already escaped in an element, with a class if ``kind`` is not empty."""
    return f'<{name} class="{kind}">{content}</{name}>' if kind else f"<{name}>{content}</{name}>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; this function escapes the cells."""
    head = "".join(f"<th>{text(cell, 200)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{text(cell, 200)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def head_and_tail(items: Sequence[Item], limit: int) -> tuple[Sequence[Item], int, Sequence[Item]]:
    """Return a sequence's head, the number of items omitted so that at most ``limit`` remain, and its tail.

    >>> head_and_tail("abcdefg", 4)
    ('abc', 3, 'g')
    """
    if len(items) <= limit:
        return items, 0, items[:0]
    tail = limit // 4
    return items[: limit - tail], len(items) - limit, items[len(items) - tail :]


def omission_note(count: int, what: str) -> str:
    """Return a note on the number of omitted items; empty if none are."""
    return tag("p", f"… {count:,} {text(what)} omitted …", "faint") if count else ""


def trajectory_html(
    trajectory: Trajectory,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    advantages: Sequence[float] | None = None,
) -> str:
    """Render a rollout: its outcome, its conversation, and its tokens colored by reward or advantage.

    Hovering over a token shows its position, id, turn, reward, log-probability and advantage.

    Args:
        trajectory: The rollout.
        tokenizer: The tokenizer that decodes tokens; without one, tokens are shown as empty boxes.
        advantages: The advantages by which the agent's tokens are colored, (T,); None for ``per_token_rewards``.

    Returns:
        One HTML element with its own style, of bounded size.

    Raises:
        ConfigError: The number of advantages is not the number of tokens.
    """
    check_rollout("trajectory_html(trajectory)", trajectory)
    if advantages is not None and len(advantages) != len(trajectory.token_ids):
        raise ConfigError(
            f"advantages must have one value per token, got {len(advantages)} for {len(trajectory.token_ids)} tokens"
        )
    rewards = {f"reward of {role}": f"{reward:zg}" for role, reward in trajectory.final_rewards.items()}
    rewards |= {name: f"{reward:zg}" for name, reward in (trajectory.final_components or {}).items()}
    turns = {turn.message_index: (index, turn) for index, turn in enumerate(trajectory.turns)}
    messages = [*enumerate(cast("Sequence[Mapping[str, Any]]", trajectory.messages))]
    begin, num_omitted, end = head_and_tail(messages, _MAX_MESSAGES)
    first, last = ("".join(_message(one, turns.get(index)) for index, one in part) for part in (begin, end))
    return page(
        tag("p", tag("b", text(trajectory.outcome)) + " · " + text(trajectory.headline, 400)),
        table([*rewards], [[*rewards.values()]]) if rewards else "",
        first + omission_note(num_omitted, "messages") + last,
        _tokens(trajectory, tokenizer, advantages),
        tag("p", text(f"stop reason: {trajectory.stop_reason}"), "faint"),
        "" if trajectory.error is None else tag("div", text(trajectory.error, 4000), "text"),
        _folded("info", shown(dict(trajectory.info), 1000)) if trajectory.info else "",
    )


def evaluation_html(evaluation: Evaluation) -> str:
    """Render an evaluation: its estimates, overall and by environment and role, its stop reasons, and its rollouts.

    Returns:
        One HTML element with its own style, of bounded size.
    """
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in evaluation.stop_reasons.items())
    counts = f"{evaluation.num_episodes:,} episodes, {evaluation.num_failed:,} failed"
    counts += f", {evaluation.num_left_out:,} excluded (task group too small)" if evaluation.num_left_out else ""
    parts: list[tuple[str, Evaluation]] = [("all", evaluation), *evaluation.by_environment.items()]
    parts += [(_role(role), one) for role, one in evaluation.by_role.items()]
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
        for name, one in parts[: _MAX_PARTS + 1]
    ]
    rollouts = evaluation.trajectories
    return page(
        tag("p", tag("b", "Evaluation") + text(f" · {counts} · stop reasons: {reasons}", 400)),
        table(["", "win rate", "reward", "turns", "% of optimal", "episodes", "failed"], rows),
        omission_note(len(parts) - len(rows), "environments and roles"),
        tag("p", f"mean [{evaluation.confidence:.0%} confidence interval over tasks]", "faint"),
        tag("details", f"<summary>{len(rollouts):,} rollouts</summary>{_rollout_table(rollouts)}") if rollouts else "",
    )


def rollouts_html(trajectories: Sequence[Trajectory]) -> str:
    """Render a table of rollouts with their turn rewards; if there are many, only the first and last are shown.

    Only these are read, so a store of any size may be passed.

    Returns:
        One HTML element with its own style, of bounded size.
    """
    return page(tag("p", tag("b", f"{len(trajectories):,} rollouts")), _rollout_table(trajectories))


def _message(message: Mapping[str, Any], turn_at: tuple[int, Turn] | None) -> str:
    """Render a message; for a message of the agent, ``turn_at`` is its turn with the turn's index."""
    notes = [str(message.get("role"))]
    if turn_at is not None:
        index, turn = turn_at
        notes += [f"turn {index}", f"reward {turn.reward:+zg}"]
        notes += [f"{name} {amount:+zg}" for name, amount in (turn.components or {}).items()]
        if turn.role is not None:
            notes.append(_role(turn.role))
        if turn.parent is not None:
            notes.append(f"follows turn {turn.parent}")
        if turn.invalid:
            notes.append("invalid")
        if turn.prompt_messages is not None:
            notes.append(f"prompt: a rewritten history of {len(turn.prompt_messages)} messages")
    begin, num_omitted, end = head_and_tail(cast("Sequence[Any]", message.get("tool_calls") or ()), _MAX_CALLS)
    reasoning = message.get("reasoning_content")
    lines = [
        tag("div", text(" · ".join(notes), 200), "faint"),
        _folded("reasoning", str(reasoning)) if reasoning else "",
        tag("div", text(str(message.get("content") or "")), "text"),
        *(tag("div", tag("code", _call(call), "call")) for call in [*begin, *end]),
        omission_note(num_omitted, "tool calls"),
    ]
    return tag("div", "".join(lines), "message assistant" if turn_at is not None else "message")


def _role(role: object) -> str:
    return f"as {role[:40] if isinstance(role, str) else shown(role, 40)}"


def _call(call: Any) -> str:
    """Render a tool call as ``name(key=value)``, or any other value as its repr."""
    inner: Any = cast("Mapping[str, Any]", call).get("function") if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping):
        return text(shown(cast("object", call), 400))
    function = cast("Mapping[str, Any]", inner)
    arguments: Any = function.get("arguments")
    if isinstance(arguments, Mapping):
        given = ", ".join(f"{key}={shown(value, 120)}" for key, value in cast("Mapping[Any, Any]", arguments).items())
    else:
        given = str(arguments or "")
    return text(f"{function.get('name')}({given})", 400)


def _tokens(
    trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase | None, advantages: Sequence[float] | None
) -> str:
    """Render the tokens, and the legend for their colors."""
    num_tokens = len(trajectory.token_ids)
    if not num_tokens:
        return ""
    turn_of: list[int | None] = [None] * num_tokens
    for index, turn in enumerate(trajectory.turns):
        turn_of[turn.start : turn.stop] = [index] * (turn.stop - turn.start)
    name, values = ("reward", trajectory.per_token_rewards) if advantages is None else ("advantage", advantages)
    limit = largest(value for value, turn in zip(values, turn_of, strict=False) if turn is not None)
    begin, num_omitted, end = head_and_tail(range(num_tokens), _MAX_TOKENS)

    def cell(position: int) -> str:
        turn, token_id = turn_of[position], trajectory.token_ids[position]
        label = f"<b>turn {turn}</b>" if turn is not None and trajectory.turns[turn].start == position else ""
        intensity = strength(values[position], limit) if values and turn is not None else 0.0
        kind = "" if turn is None else f' class="a{" p" if intensity > 0 else " n" if intensity < 0 else ""}"'
        style = f' style="--s:{abs(intensity):.2f}"' if intensity else ""
        hint = text(_hint(trajectory, position, turn, advantages), 300)
        decoded = "" if tokenizer is None else str(cast("Any", tokenizer).decode([token_id])).replace("\n", "⏎")
        return f'{label}<i{kind}{style} title="{hint}">{text(decoded, 64)}</i>'

    first, last = ("".join(map(cell, part)) for part in (begin, end))
    between = f' <span class="faint">… {num_omitted:,} tokens omitted …</span> ' if num_omitted else ""
    keys = [("", "environment tokens"), ("a", f"agent tokens, {name} 0")]
    if limit:
        keys += [("a p", f"{name} up to +{limit:.3g}"), ("a n", f"{name} down to -{limit:.3g}")]
    legend = " ".join(f'<i class="{kind}"></i> {text(word)} ' for kind, word in keys)
    return tag("div", first + between + last, "tokens") + tag("div", legend, "legend")


def _hint(trajectory: Trajectory, position: int, turn: int | None, advantages: Sequence[float] | None) -> str:
    """Return the text of a token's tooltip."""
    source = "environment token" if turn is None else f"turn {turn}"
    parts = [f"token {position}", f"id {trajectory.token_ids[position]}", source]
    if turn is not None:
        quantities = (
            ("reward", trajectory.per_token_rewards),
            ("log-probability", trajectory.logprobs),
            ("advantage", advantages),
        )
        parts += [
            f"{name} {values[position]:z.4g}" for name, values in quantities if values is not None and len(values)
        ]
    return ", ".join(parts)


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{text(title)}</summary>{tag('div', text(content), 'text')}</details>"


def _estimate(estimate: Estimate | None, form: str) -> str:
    if estimate is None:
        return "-"
    low, high = form.format(estimate.low).removesuffix("%"), form.format(estimate.high)
    return f"{form.format(estimate.mean)} [{low}, {high}]"


def _rollout_table(trajectories: Sequence[Trajectory]) -> str:
    header = ["task, rollout", "outcome", "reward", "turns", "stop reason", "tokens", "turn rewards"]
    begin, num_omitted, end = head_and_tail(trajectories, _MAX_ROLLOUTS)
    return (
        table(header, map(_rollout_cells, begin))
        + omission_note(num_omitted, "rollouts")
        + (table(header, map(_rollout_cells, end)) if num_omitted else "")
    )


def _rollout_cells(trajectory: Trajectory) -> list[str]:
    first, num_omitted, last = head_and_tail(trajectory.turn_rewards, 12)
    between = [f"… {num_omitted} omitted …"] if num_omitted else []
    return [
        f"{trajectory.task_index}, {trajectory.rollout_index}",
        trajectory.outcome,
        f"{trajectory.final_reward:zg}",
        str(trajectory.num_turns),
        trajectory.stop_reason.value,
        str(len(trajectory.token_ids)),
        " ".join([*(f"{reward:zg}" for reward in first), *between, *(f"{reward:zg}" for reward in last)]),
    ]
