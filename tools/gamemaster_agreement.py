"""Measure how often a language model, as the gamemaster of Twenty Questions, agrees with the knowledge base.

    python -m tools.gamemaster_agreement --agent openai:MODEL --objects 20 --properties 20 --seed 0

Every drawn property is asked about every drawn object, in its canonical wording. The intervals are 95 % confidence
intervals over the objects, and those of the last row over the properties.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from agentsgym.cli import options
from agentsgym.cli.console import FailureError, UsageError, cell, new_table, out, reported, usage_errors
from agentsgym.cli.options import find_env
from agentsgym.cli.players import PlayerOptions, make_player
from agentsgym.envs.TwentyQuestions import AgentGamemaster
from agentsgym.envs.TwentyQuestions.gamemaster import NO, SOMETIMES, UNKNOWN, YES
from agentsgym.envs.TwentyQuestions.knowledge import load_knowledge
from agentsgym.errors import AgentError
from agentsgym.seeding import derive_seed
from agentsgym.statistics.intervals import share_estimate
from agentsgym.texts import sentence_of

REPLY_OF_VALUE = {"yes": YES, "no": NO, "sometimes": SOMETIMES}
KINDS = ("same", "opposite", "sometimes", "unknown")
WITH_INTERVAL = ("same", "opposite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One question about one object.

    Attributes:
        secret: The object's name.
        key: The property.
        fact: The reply of the knowledge base.
        reply: The reply of the agent; empty if it failed.
        error: The reason why it failed.
    """

    secret: str
    key: str
    fact: str
    reply: str = ""
    error: str = ""

    @property
    def kind(self) -> str:
        """How the replies compare: ``"sometimes"`` if only one of them is that; ``"failed"`` if there is no reply."""
        if self.error:
            return "failed"
        if self.reply in {UNKNOWN, self.fact}:
            return "same" if self.reply == self.fact else "unknown"
        return "sometimes" if SOMETIMES in {self.reply, self.fact} else "opposite"


def compare(
    answer: Callable[[str, str], str], objects: Sequence[str], properties: Sequence[str], *, max_concurrent: int = 32
) -> list[Comparison]:
    """Ask about every property of every object; an :class:`AgentError` is recorded."""
    knowledge = load_knowledge()

    def asked(pair: tuple[str, str]) -> Comparison:
        name, key = pair
        fact, question = REPLY_OF_VALUE[knowledge.objects[name].values[key]], knowledge.properties[key].question
        try:
            return Comparison(secret=name, key=key, fact=fact, reply=answer(name, question))
        except AgentError as error:
            return Comparison(secret=name, key=key, fact=fact, error=sentence_of(error))

    pairs = [(name, key) for key in properties for name in objects]
    with ThreadPoolExecutor(max_concurrent) as pool:
        return [*pool.map(asked, pairs)]


def drawn(names: Sequence[str], number: int, seed: int) -> list[str]:
    """Draw up to ``number`` names, in their own order."""
    rng = random.Random(derive_seed("gamemaster agreement", seed))
    chosen = set(rng.sample([*names], min(number, len(names))))
    return [name for name in names if name in chosen]


@reported
def main(  # noqa: PLR0913, PLR0917  # options of a command
    agent: options.AgentName = None,
    objects: Annotated[int, typer.Option(metavar="N", min=1, help="Number of objects.")] = 20,
    properties: Annotated[int, typer.Option(metavar="N", min=1, help="Number of properties.")] = 20,
    cache: Annotated[Path | None, typer.Option(metavar="PATH", help="Folder in which answers are kept.")] = None,
    worst: Annotated[int, typer.Option(metavar="N", min=0, help="Number of disagreements to list.")] = 20,
    base_url: options.BaseUrl = None,
    api_key_env: options.ApiKeyVariable = None,
    temperature: options.Temperature = None,
    max_turn_tokens: options.MaxTurnTokens = None,
    seed: options.Seed = 0,
) -> None:
    """Compare an agent's replies with the knowledge base of Twenty Questions."""
    if agent is None or agent in ("random", "reference"):
        raise UsageError("--agent must be openai:MODEL, policy:PATH-OR-NAME or scripted:FILE")
    settings = PlayerOptions(
        seed=seed,
        base_url=base_url,
        api_key_variable=api_key_env,
        temperature=temperature,
        max_turn_tokens=max_turn_tokens,
    )
    player = make_player(agent, find_env("TwentyQuestions"), settings)
    with usage_errors():
        gamemaster = AgentGamemaster(
            player.agent, knowledge_first=False, cache=cache, agent_name=player.stored_as or player.label
        )
    knowledge = load_knowledge()
    keys = drawn([*knowledge.properties], properties, seed)
    found = compare(gamemaster.answer, drawn([*knowledge.objects], objects, seed), keys)
    show(found, worst=worst, seed=seed)


def show(found: Sequence[Comparison], *, worst: int, seed: int) -> None:
    """Print a row for each property, with most disagreements first, the total, and the disagreements."""
    by_property: dict[str, list[Comparison]] = {}
    for one in found:
        by_property.setdefault(one.key, []).append(one)
    table = new_table()
    for name in ("property", "asked", *KINDS, "failed"):
        table.add_column(name, justify="left" if name == "property" else "right")
    ranked = sorted(by_property, key=lambda key: -_share(by_property[key], "opposite"))
    for key in ranked:
        table.add_row(*map(cell, _row(key, by_property[key], [one.secret for one in by_property[key]], seed)))
    table.add_row(*map(cell, _row("all", found, [one.key for one in found], seed)))
    out().print(table)
    differing = [
        one for kind in ("opposite", "sometimes") for key in ranked for one in by_property[key] if one.kind == kind
    ]
    for one in differing[:worst]:
        question = load_knowledge().properties[one.key].question
        out().print(cell(f"{one.secret}: {question} Agent: {one.reply} Knowledge base: {one.fact}"), soft_wrap=True)
    failed = [one for one in found if one.error]
    if failed:
        text = f"{len(failed)} of {len(found)} questions failed; {failed[0].secret}, {failed[0].key}: "
        raise FailureError(text + failed[0].error)


def _share(comparisons: Sequence[Comparison], kind: str) -> float:
    return sum(one.kind == kind for one in comparisons) / len(comparisons)


def _row(name: str, comparisons: Sequence[Comparison], clusters: Sequence[str], seed: int) -> list[str]:
    answered = [(one, cluster) for one, cluster in zip(comparisons, clusters, strict=True) if not one.error]
    row = [name, str(len(comparisons))]
    for kind in KINDS if answered else ():
        values = [float(one.kind == kind) for one, _ in answered]
        share = share_estimate(values, [cluster for _, cluster in answered], seed=seed)
        interval = f" [{share.low:.0%}, {share.high:.0%}]" if kind in WITH_INTERVAL else ""
        row.append(f"{share.mean:.0%}{interval}")
    row += [""] * (len(KINDS) + 2 - len(row))
    return [*row, str(len(comparisons) - len(answered))]


if __name__ == "__main__":
    typer.run(main)
