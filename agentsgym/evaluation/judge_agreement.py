"""Compare a judge with labels, before its scores are used for training.

A file of labels has one JSON object per line: what is judged, and for each criterion its label::

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}], "labels": {"polite": true}}
    {"messages": […], "turn": 1, "labels": {"warm": 4}}                                        for judges of turns
    {"candidates": [[…messages…], [… messages …]], "labels": {"best": [2, 1]}}   for judges of groups: higher is better
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, cast

from agentsgym.agents.calls import Cost
from agentsgym.errors import ConfigError, JudgeError
from agentsgym.event_loop import gathered, run_coroutine
from agentsgym.fields import Check, is_dict, is_number, require
from agentsgym.judging.judge import Judge
from agentsgym.judging.prompts import Verdict
from agentsgym.judging.rubric import Criterion
from agentsgym.recorded.messages import json_lines
from agentsgym.statistics.intervals import Estimate, cohen_kappa, kappa_estimate, share_estimate, weighted_kappa
from agentsgym.texts import sentence_of, shown
from agentsgym.types import Message, StopReason, Trajectory, Turn

Label = float | Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabeledItem:
    """One line of a file of labels.

    Attributes:
        line: Its number, from 1.
        trajectories: What is judged: one conversation, or the candidates of a group.
        labels: By criterion, the label: 0 or 1 for a yes-or-no question, a grade, or a number for each candidate.
        turn: The turn that is judged; None for a whole conversation or a group.
    """

    line: int
    trajectories: Sequence[Trajectory]
    labels: Mapping[str, Label]
    turn: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CriterionAgreement:
    """How well a judge agrees with the labels of one criterion.

    Attributes:
        name: The criterion.
        num: Number of labels; for groups, of pairs of candidates with different labels.
        accuracy: Share of equal answers, where grades count as equal if they round to the same number; for groups, of
            pairs in the right order, with a tie as half.
        kappa: Cohen's kappa, weighted for grades; None if it is undefined, because the answers do not differ.
        first_preferred: For groups, the share of pairs in which the candidate that was shown first was preferred, when
            every pair is shown in both orders: 0.5 without a position bias.
        consistent: For groups, the share of pairs with the same order of preference in both orders.
    """

    name: str
    num: int
    accuracy: Estimate
    kappa: Estimate | None
    first_preferred: Estimate | None = None
    consistent: Estimate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How well a judge agrees with labels.

    Attributes:
        criteria: The agreement by criterion; criteria without labels are left out.
        num_items: Number of items, including failed ones.
        failures: The line of each item without a judgment, and why.
        calls: Number of calls of the agent.
        cached: Number of answers from the cache.
        tokens: Number of tokens; None if unknown.
        seconds: Duration of the calls, together.
    """

    criteria: Sequence[CriterionAgreement]
    num_items: int
    failures: Mapping[int, str]
    calls: int
    cached: int
    tokens: int | None
    seconds: float


def read_labels(path: str | Path, judge: Judge) -> list[LabeledItem]:
    """Read a file of labels."""
    items: list[LabeledItem] = []
    for number, row in json_lines(Path(path)):
        try:
            items.append(_item(row, judge, number))
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {sentence_of(error)}") from error
    if not items:
        raise ConfigError(f"{path} must have one JSON object per line, but is empty")
    return items


def judge_agreement(judge: Judge, items: Sequence[LabeledItem], *, seed: int = 0) -> Agreement:
    """Judge labeled items, and compare.

    Groups are judged in the judge's own orders and in the reverse of each, which shows a position bias.

    Raises:
        ConfigError: The agent cannot be used at all.
    """
    work = _judged_group if judge.scope == "group" else _judged_item
    outcomes = run_coroutine(gathered(work(judge, item) for item in items))
    judge.close()
    found = [_compare(judge, one, outcomes, seed) for one in judge.rubric]
    tokens = [one.cost.tokens for one in outcomes if one.cost.tokens is not None]
    return Agreement(
        criteria=[one for one in found if one is not None],
        num_items=len(items),
        failures={one.item.line: one.error for one in outcomes if one.error is not None},
        calls=sum(one.cost.calls for one in outcomes),
        cached=sum(one.cost.cached for one in outcomes),
        tokens=round(sum(tokens)) if tokens else None,
        seconds=sum(one.cost.seconds for one in outcomes),
    )


@dataclass(slots=True, kw_only=True)
class _Outcome:
    """What a judge gave for an item.

    Attributes:
        values: By criterion, the answers in [0, 1]: for groups, the rank of each candidate.
        swapped: For groups, each order and the reverse of each, with the ranks by criterion.
    """

    item: LabeledItem
    cost: Cost
    values: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    swapped: Sequence[tuple[Sequence[int], Mapping[str, Sequence[float]]]] = ()
    error: str | None = None


async def _judged_item(judge: Judge, item: LabeledItem) -> _Outcome:
    [trajectory], cost = item.trajectories, Cost()
    try:
        judgment = await judge.ajudge(trajectory, item.turn, cost)
    except JudgeError as error:
        return _Outcome(item=item, cost=cost, error=sentence_of(error))
    values = {name: [value] for name, value in judgment.values.items()}
    return _Outcome(item=item, cost=cost, values=values, error=judgment.error)


async def _judged_group(judge: Judge, item: LabeledItem) -> _Outcome:
    cost, orders = Cost(), judge.orders(item.trajectories)
    rankings: dict[tuple[int, ...], Verdict] = {}
    try:
        for order in [*orders, *(order[::-1] for order in orders)]:
            if tuple(order) not in rankings:
                rankings[tuple(order)], _ = await judge.arank(item.trajectories, order, cost)
    except JudgeError as error:
        return _Outcome(item=item, cost=cost, error=sentence_of(error))
    means: dict[str, list[float]] = {}
    for one in judge.rubric:
        own = [rankings[tuple(order)].values[one.name] for order in orders]
        means[one.name] = [sum(values) / len(values) for values in zip(*own, strict=True)]
    swapped = [(order, one.values) for order, one in rankings.items()]
    return _Outcome(item=item, cost=cost, values=means, swapped=swapped)


def _compare(judge: Judge, criterion: Criterion, outcomes: Sequence[_Outcome], seed: int) -> CriterionAgreement | None:
    own = [one for one in outcomes if one.error is None and criterion.name in one.item.labels]
    if judge.scope == "group":
        return _compare_pairs(criterion.name, own, seed)
    if not own:
        return None
    labels = [float(cast("float", one.item.labels[criterion.name])) for one in own]
    low, high = criterion.scale or (0, 1)
    given = [low + (high - low) * one.values[criterion.name][0] for one in own]
    clusters = range(len(own))
    right = [float(_rounded(a) == _rounded(b)) for a, b in zip(labels, given, strict=True)]
    kappa = cohen_kappa if criterion.scale is None else weighted_kappa
    return CriterionAgreement(
        name=criterion.name,
        num=len(own),
        accuracy=share_estimate(right, clusters, seed=seed),
        kappa=kappa_estimate(kappa, labels, given, clusters, seed=seed),
    )


def _compare_pairs(name: str, outcomes: Sequence[_Outcome], seed: int) -> CriterionAgreement | None:
    labels, given, right, clusters = list[float](), list[float](), list[float](), list[int]()
    firsts, consistent, shown_in = list[float](), list[float](), list[int]()
    for outcome in outcomes:
        label, ranks = cast("Sequence[float]", outcome.item.labels[name]), outcome.values[name]
        for i, j in combinations(range(len(label)), 2):
            if label[i] != label[j]:
                wanted, found = _sign(label[i] - label[j]), _sign(ranks[i] - ranks[j])
                labels.append(wanted)
                given.append(found)
                right.append(0.5 if not found else float(wanted == found))
                clusters.append(outcome.item.line)
            signs = [_sign(values[name][i] - values[name][j]) for _, values in outcome.swapped]
            is_first = [order.index(i) < order.index(j) for order, _ in outcome.swapped]
            prefer = [sign if first else -sign for sign, first in zip(signs, is_first, strict=True)]
            firsts.append(sum(0.5 + sign / 2 for sign in prefer) / len(prefer))
            consistent.append(float(len(set(signs)) == 1))
            shown_in.append(outcome.item.line)
    if not labels:
        return None
    return CriterionAgreement(
        name=name,
        num=len(labels),
        accuracy=share_estimate(right, clusters, seed=seed),
        kappa=kappa_estimate(cohen_kappa, labels, given, clusters, seed=seed),
        first_preferred=share_estimate(firsts, shown_in, seed=seed),
        consistent=share_estimate(consistent, shown_in, seed=seed),
    )


def _sign(difference: float) -> float:
    return math.copysign(1.0, difference) if abs(difference) > 1e-9 else 0.0


def _rounded(grade: float) -> int:
    return math.floor(grade + 0.5)


def _item(given: Any, judge: Judge, line: int) -> LabeledItem:
    if not isinstance(given, Mapping):
        raise ConfigError(f"a line must be a JSON object, got {shown(cast('object', given))}")
    row = cast("Mapping[str, Any]", given)
    is_group = judge.scope == "group"
    key = "candidates" if is_group else "messages"
    conversations: Any = row.get(key) if is_group else [row.get(key)]
    are_enough: Check = lambda value: isinstance(value, list) and len(cast("Any", value)) >= 1 + is_group  # noqa: E731
    require("'candidates'", conversations, are_enough, "a list of at least 2 lists of messages")
    task = {} if judge.reference is None or "reference" not in row else {judge.reference: row["reference"]}
    played = [_conversation(one, key, task) for one in cast("list[Any]", conversations)]
    turn: Any = row.get("turn")
    if judge.scope == "turn":
        if type(turn) is not int or not 0 <= turn < len(played[0].turns):
            raise ConfigError(f"'turn' must be the index of one of {len(played[0].turns)} turns, got {shown(turn)}")
    elif turn is not None:
        raise ConfigError(f"'turn' is for judges of turns, and {judge.name!r} judges each {judge.scope}: omit it")
    return LabeledItem(line=line, trajectories=played, labels=_labels(row.get("labels"), judge, len(played)), turn=turn)


def _conversation(given: Any, key: str, task: Mapping[str, Any]) -> Trajectory:
    messages: list[Message] = []
    for one in cast("list[Any]", given) if isinstance(given, list) else ():
        message = cast("Mapping[str, Any]", one) if isinstance(one, Mapping) else dict[str, Any]()
        if not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise ConfigError(
                f"{key!r} must have dicts with 'role' and 'content' (str), got {shown(cast('object', one))}"
            )
        messages.append(cast("Message", dict(message)))
    turns = [
        Turn(start=0, stop=0, reward=0.0, message_index=at)
        for at, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    if not turns:
        text = shown(cast("object", given))
        raise ConfigError(f"{key!r} must have messages, at least one of them by the assistant, got {text}")
    return Trajectory(
        token_ids=[], turns=turns, messages=messages, final_reward=0.0, stop_reason=StopReason.DONE, task_data=task
    )


def _labels(given: Any, judge: Judge, num_candidates: int) -> dict[str, Label]:
    require("'labels'", given, lambda one: is_dict(one) and bool(one), "a dict with a label for each criterion")
    labels = cast("Mapping[str, Any]", given)
    criteria = {one.name: one for one in judge.rubric}
    found: dict[str, Label] = {}
    for name, value in labels.items():
        if name not in criteria:
            raise ConfigError(f"{name!r} is not a criterion of {judge.name!r}, which has {', '.join(criteria)}")
        if judge.scope == "group":
            ranks = cast("list[Any]", value) if isinstance(value, list) else []
            if len(ranks) != num_candidates or not all(map(is_number(), ranks)):
                given_label = shown(cast("object", value))
                raise ConfigError(f"the label {name!r} must be a list of {num_candidates} numbers, got {given_label}")
            found[name] = ranks
            continue
        scale, text = criteria[name].scale, shown(cast("object", value))
        if scale is None and not isinstance(value, bool):
            raise ConfigError(f"the label {name!r} must be true or false, got {text}")
        if scale is not None and not (is_number(scale[0])(value) and value <= scale[1]):
            raise ConfigError(f"the label {name!r} must be a number from {scale[0]:g} to {scale[1]:g}, got {text}")
        found[name] = value
    return found
