"""``agentsgym check``: check an environment's contract by playing it, or check stored rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from agentsgym.cli import options
from agentsgym.cli.console import UsageError, cell, out, print_json, print_text, remark, reported, usage_errors
from agentsgym.envs import PACKAGED

if TYPE_CHECKING:
    from agentsgym.envs.check.probe import EnvReport
    from agentsgym.record_audit import AuditReport
    from agentsgym.store.reader import RolloutStore

_OF_STORES: Final = frozenset({"target", "where", "tokenizer", "as_json"})
_CHUNK: Final = 512  # rollouts in memory at once
_UNKNOWN: Final[dict[str, Any]] = {"turn_credit": None, "token_credit": None, "final_reward_is_sum": False}


@reported
def check(  # noqa: PLR0913, PLR0917  # options of a command
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="ENV-OR-STORE",
            help="Environment: a name from `agentsgym envs`, the dotted path of a class, or FILE.py:CLASS. Or the "
            "folder of a rollout store.",
            autocompletion=options.environment_names,
            show_default=False,
        ),
    ],
    config: options.Config = None,
    config_file: options.ConfigFile = None,
    tasks: options.TaskFile = None,
    dataset: options.DatasetOptions = None,
    agent: options.AgentName = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="PATH-OR-NAME",
            help="Model or tokenizer; if given, its tokenization and chat template are checked too, or, for a store, "
            "that its vocabulary contains every token id.",
        ),
    ] = None,
    max_tasks: Annotated[
        int, typer.Option("--max-tasks", metavar="N", min=1, help="Maximum number of tasks to play.")
    ] = 6,
    limit_s: Annotated[
        float | None,
        typer.Option("--limit-s", metavar="SECONDS", min=0.001, help="Time limit for playing all tasks, in seconds."),
    ] = 300.0,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")] = False,
    seed: options.Seed = 0,
    where: options.Where = None,
    as_json: options.AsJson = False,
) -> None:
    """Check an environment, or stored rollouts, for problems that would affect training.

    An environment plays a few tasks one by one, concurrently, and in a pickled copy. Without --agent, a built-in agent
    takes exploratory random actions (not ENV's own random agent). In a store, token spans, masks, log-probabilities,
    rewards and messages are checked; --where, --tokenizer and --json apply.

    The exit code is 1 if an error is found, with --strict if a warning is found, or if a file of the store cannot be
    read.
    """
    is_store = Path(target).is_dir() and target not in PACKAGED
    for name in {*context.params} - _OF_STORES if is_store else {"where"}:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            kinds = ("environments", "a store") if is_store else ("stores", "no folder")
            raise UsageError(f"--{name.replace('_', '-')} applies to {kinds[0]}, but {target} is {kinds[1]}")
    if is_store:
        _check_store(Path(target), where, tokenizer, as_json=as_json)
        return
    from agentsgym.cli.players import PlayerOptions, make_player, tokenizer_of  # noqa: PLC0415
    from agentsgym.cli.stores import tasks_for  # noqa: PLC0415
    from agentsgym.envs.check.run import check_env  # noqa: PLC0415

    try:
        named = options.find_env(target, options.env_config(config, config_file))
    except UsageError as error:
        if "/" in target and ".py" not in target and ":" not in target:
            raise UsageError(f"there is no rollout store at {target}, nor an environment of that name") from error
        raise
    with usage_errors():
        player = None if agent is None else make_player(agent, named, PlayerOptions(seed=seed))
        env: Any = named.build(tokenizer_of(tokenizer)) if player is None or tokenizer else player.env
    found = tasks_for(env, named, path=tasks, split="train", dataset=dataset, most=max_tasks, seed=seed)
    report = check_env(
        env,
        found,
        None if player is None else player.agent,
        seed=seed,
        max_tasks=max_tasks,
        raise_on=None,
        limit_s=limit_s,
    )
    failed = bool(report.findings if strict else report.errors)
    if as_json:
        print_json({
            "environment": target,
            "ok": not failed,
            "num_episodes": report.num_episodes,
            "num_turns": report.num_turns,
            "num_calls": report.num_calls,
            "findings": [asdict(one) for one in report.findings],
        })  # fmt: skip
    else:
        _print_findings(report, target)
    if failed:
        raise typer.Exit(1)


def _print_findings(report: EnvReport, environment: str) -> None:
    for finding in report.findings:
        color = "red" if finding.severity == "error" else "yellow"
        out().print(cell(f"{finding.severity} [{finding.check}] {finding.place}", f"bold {color}"))
        print_text(f"  {finding.text}")
    num_errors = len(report.errors)
    num_warnings = len(report.findings) - num_errors
    counts = "no problems" if not report.findings else f"{num_errors} errors and {num_warnings} warnings"
    out().print(cell(f"{environment}: {counts} in {report.played}", "red" if num_errors else "green"))


def _check_store(path: Path, where: list[str] | None, tokenizer: str | None, *, as_json: bool) -> None:
    """Audit the rollouts in a store against their environments and configurations, and print the report."""
    from agentsgym.cli.players import tokenizer_of  # noqa: PLC0415
    from agentsgym.cli.stores import open_store  # noqa: PLC0415

    store = open_store(path, where)
    loaded = tokenizer_of(tokenizer)
    report, unknown = _audit_store(store, None if loaded is None else len(loaded))
    for name in unknown:
        text = f"{name} is not a known environment, so it is not checked which turns and tokens its rewards belong to"
        remark(text, "yellow")
    if as_json:
        problems = [asdict(one) for one in report.problems]
        skipped: dict[str, Any] = {file.name: why for file, why in store.skipped.items()}
        print_json(asdict(report) | {"ok": report.ok and not skipped, "problems": problems, "skipped": skipped})
    else:
        print_text(str(report))
    if not report.ok or store.skipped:
        raise typer.Exit(1)


def _audit_store(store: RolloutStore, vocabulary_size: int | None) -> tuple[AuditReport, list[str]]:
    """Audit all rollouts in a store; returns the report, and the unknown environments, whose rewards are not checked.

    Args:
        store: The rollouts; problems are reported by their index in the store.
        vocabulary_size: Exclusive upper bound of token ids; None for no limit.

    Raises:
        StoreError: A file is missing or damaged.
    """
    from agentsgym.record_audit import AuditReport, audit  # noqa: PLC0415

    table = store.table(["env_class_path", "env_config"])
    columns = [cast("list[str | None]", table.column(name).to_pylist()) for name in table.column_names]
    rows: dict[tuple[str | None, ...], list[int]] = {}
    for row, key in enumerate(zip(*columns, strict=True)):
        rows.setdefault(key, []).append(row)
    reports: list[AuditReport] = []
    unknown: list[str] = []
    for (path, config), env_rows in rows.items():
        expected = _expected_rewards(path, config)
        if expected is _UNKNOWN:
            unknown.append(path or "an unnamed environment")
        for start in range(0, len(env_rows), _CHUNK):
            part = env_rows[start : start + _CHUNK]
            report = audit([store[row] for row in part], vocabulary_size=vocabulary_size, **expected)
            problems = tuple(replace(one, trajectory=part[one.trajectory]) for one in report.problems)
            reports.append(replace(report, problems=problems))
    counts = {one.name: sum(getattr(report, one.name) for report in reports) for one in fields(AuditReport)[:-1]}
    problems = sorted((one for report in reports for one in report.problems), key=lambda one: one.trajectory)
    return AuditReport(**counts, problems=tuple(problems)), list(dict.fromkeys(unknown))


def _expected_rewards(path: str | None, config: str | None) -> dict[str, Any]:
    """Return where an environment's configuration places rewards, and whether the final reward is their sum."""
    from agentsgym.envs.base import MultistepEnv  # noqa: PLC0415
    from agentsgym.envs.datasets.environments import find  # noqa: PLC0415
    from agentsgym.errors import AgentsGymError  # noqa: PLC0415
    from agentsgym.store.values import from_json  # noqa: PLC0415

    if path is None or config is None:
        return _UNKNOWN
    try:
        env_class = find(path)
    except AgentsGymError:
        return _UNKNOWN  # a user's class is not imported just because a file names it
    known = from_json(config)
    if not isinstance(known, Mapping):
        return _UNKNOWN
    settings = cast("Mapping[str, Any]", known)
    subclasses = env_class.__mro__[: env_class.__mro__.index(MultistepEnv)]
    is_custom = any("_calculate_rewards" in vars(one) for one in subclasses)
    return {
        "turn_credit": None if is_custom else settings.get("turn_credit"),
        "token_credit": None if is_custom else settings.get("token_credit"),
        "final_reward_is_sum": not env_class.overrides_final_reward,
    }
