"""``agentsgym replay``: check that stored rollouts replay identically."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import tee
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentsgym.cli import options
from agentsgym.cli.console import FailureError, cell, out, plain, print_json, remark, reported

if TYPE_CHECKING:
    from agentsgym.evaluation.replay import Difference, Replay
    from agentsgym.store.records import StoredRollout

_MAX_SHOWN, _MAX_CONTEXT = 50, 15  # characters shown of a text that differs; how many may precede the difference


@reported
def replay(
    path: options.StorePath,
    where: options.Where = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", metavar="N", min=1, help="Maximum number of rollouts to replay.")
    ] = None,
    environment: Annotated[
        str | None,
        typer.Option(
            "--env",
            metavar="ENV",
            help="Environment to replay in, with the configuration stored with each rollout (default: the environment "
            "stored with the rollout, if it is built in or registered).",
        ),
    ] = None,
    config: options.Config = None,
    as_json: options.AsJson = False,
) -> None:
    """Replay the actions of stored rollouts and report where the environment now responds differently.

    The exit code is 1 if any rollout differs or none can be replayed.
    """
    from agentsgym.cli.stores import open_store  # noqa: PLC0415
    from agentsgym.evaluation.replay import RecordEnvironments, replay_all  # noqa: PLC0415

    env_of = RecordEnvironments(env_config=options.key_values(config, "--config"))
    if environment is not None:
        named = options.find_env(environment, options.key_values(config, "--config"))
        env_of = RecordEnvironments(named.env_class, named.env_config)
    store = open_store(path, where)[:limit]
    records, played = tee(store.records())  # one at a time: a store may be larger than memory
    counts, results = _report(zip(records, replay_all(played, env_of), strict=True), as_json=as_json)
    if as_json:
        print_json({"counts": counts, "rollouts": results})
    else:
        summary = f"{counts['same']} same, {counts['differs']} different, {counts['impossible']} not replayed"
        out().print(cell(f"{len(store)} rollout{'' if len(store) == 1 else 's'}: {summary}", "bold"))
    if counts["impossible"] and environment is None:
        remark("if the stored rollouts do not name their environment, pass it with --env ENV", "dim")
    if counts["differs"]:
        raise FailureError(f"{counts['differs']} of {len(store)} rollouts differ")
    if not counts["same"]:
        raise FailureError("none of the rollouts can be replayed")


def _report(
    results: Iterable[tuple[StoredRollout, Replay]], *, as_json: bool
) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Count the outcomes; print the differences and why rollouts cannot be replayed, or return all results for JSON."""
    counts, found, reasons = Counter[str](same=0, differs=0, impossible=0), list[dict[str, Any]](), Counter[str]()
    for record, result in results:
        counts[result.outcome] += 1
        if as_json:
            names = {"run": record.run, "agent": record.agent, "env_class_path": record.env_class_path}
            found.append({**names, **result.as_dict()})
        elif result.difference is not None:
            who = f"{record.agent}, " if record.agent else ""
            place = f"{who}task {result.recorded.task_index}, rollout {result.recorded.rollout_index}"
            out().print(cell(f"{place}, {_abbreviate(result.difference)}"), soft_wrap=True)
        elif result.impossible is not None:
            reasons[result.impossible] += 1
    for reason, number in reasons.most_common():
        out().print(plain(f"{number} cannot be replayed: {reason}", style="yellow"), soft_wrap=True)
    return counts, found


def _abbreviate(difference: Difference) -> str:
    """Format a difference; long texts are cut to start shortly before it."""
    pairs = zip(difference.recorded, difference.played, strict=False)
    num_equal = next((index for index, (one, other) in enumerate(pairs) if one != other), _MAX_SHOWN)
    skipped = num_equal - _MAX_CONTEXT if num_equal >= _MAX_SHOWN else 0
    texts = [text[skipped : skipped + _MAX_SHOWN] for text in (difference.recorded, difference.played)]
    before, after = (f"{'…' if skipped else ''}{text}" for text in texts)
    return str(difference._replace(recorded=before, played=after))
