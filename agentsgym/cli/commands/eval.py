"""``agentsgym eval``: evaluate agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentsgym.cli import options
from agentsgym.cli.console import FailureError, UsageError, cell, out, print_json, remark, reported, usage_errors
from agentsgym.errors import did_you_mean
from agentsgym.interruptions import raising_on_sigterm

if TYPE_CHECKING:
    from agentsgym.cli.agent_runs import AgentRun, Plan
    from agentsgym.cli.players import PlayerOptions
    from agentsgym.envs.datasets.naming import NamedEnv

_BIAS = "; the shortest episodes finish first, so these means are biased"


@reported
def evaluate(  # noqa: PLR0913, PLR0917  # options of a command
    environment: options.Environment,
    agent: options.AgentNames = None,
    num_tasks: Annotated[
        int | None, typer.Option("--num-tasks", "-n", metavar="N", min=1, help="Maximum number of tasks (default 100).")
    ] = None,
    num_rollouts: Annotated[
        int | None, typer.Option("--num-rollouts", "-k", metavar="N", min=1, help="Episodes per task (default 1).")
    ] = None,
    config: options.Config = None,
    config_file: options.ConfigFile = None,
    tasks: options.TaskFile = None,
    dataset: options.DatasetOptions = None,
    split: options.Split = "eval",
    base_url: options.BaseUrl = None,
    api_key_env: options.ApiKeyVariable = None,
    temperature: options.Temperature = None,
    max_turn_tokens: options.MaxTurnTokens = None,
    cluster_by: Annotated[
        str | None,
        typer.Option(
            "--cluster-by",
            metavar="KEY",
            help="For the confidence intervals, cluster tasks that have the same value of this task_data key.",
        ),
    ] = None,
    max_failed: Annotated[
        float,
        typer.Option(
            "--max-failed",
            metavar="FRACTION",
            min=0.0,
            max=1.0,
            help="Stop once more than this fraction of the episodes has failed.",
        ),
    ] = 0.1,
    max_concurrent: Annotated[
        int, typer.Option("--max-concurrent", metavar="N", min=1, help="Maximum number of concurrent episodes.")
    ] = 256,
    references: Annotated[
        bool,
        typer.Option(
            "--references/--no-references",
            help="Also evaluate ENV's random and reference agents, once per task, unless the rewards of random and "
            "optimal play are known exactly.",
        ),
    ] = True,
    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="PATH", help="Folder of the rollout store to write every episode to."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Play only episodes that are missing from the --store, or that failed there."),
    ] = False,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
) -> None:
    """Play many episodes and report win rate, reward, turns, pass@k and pass^k, with 95% confidence intervals.

    The intervals come from resampling tasks. If the run ends early, the results so far are shown, and the exit code is
    1 (143 after SIGTERM). With --store, the finished episodes are also stored, and the same command with --resume
    continues from there.
    """
    from agentsgym.cli.agent_runs import Plan  # noqa: PLC0415
    from agentsgym.cli.players import PlayerOptions  # noqa: PLC0415
    from agentsgym.cli.stores import check_store_path, tasks_for  # noqa: PLC0415

    if not agent:
        raise UsageError("eval requires an agent, such as --agent random or --agent policy:PATH")
    check_store_path(store, resume=resume)
    named = options.find_env(environment, options.env_config(config, config_file))
    settings = PlayerOptions(
        seed=seed,
        base_url=base_url,
        api_key_variable=api_key_env,
        temperature=temperature,
        max_turn_tokens=max_turn_tokens,
    )
    given = {"num_tasks": num_tasks, "num_rollouts": num_rollouts, "tasks": tasks, "dataset": dataset}
    given |= {"split": split, "seed": seed}
    with usage_errors():
        chosen = named.settings("evaluation", {key: value for key, value in given.items() if value is not None})
        env = named.build()
    limit = chosen.get("num_tasks", 100)
    found = tasks_for(env, named, path=tasks, split=split, dataset=dataset, most=limit, seed=seed)
    for index, task in enumerate(found if cluster_by is not None else ()):
        if cluster_by not in (fields := task.get("task_data", task)):
            raise UsageError(f"--cluster-by: task {index} has no key {cluster_by!r}{did_you_mean(cluster_by, fields)}")
    plan = Plan(
        tasks=found,
        num_rollouts=chosen.get("num_rollouts", 1),
        seed=seed,
        cluster_by=cluster_by,
        max_failed_fraction=max_failed,
        max_concurrent=max_concurrent,
        store=store,
        resume=resume,
    )
    with raising_on_sigterm():
        runs = _played(list(dict.fromkeys(agent)), named, settings, plan, references=references)
    _show(runs, named, plan, as_json=as_json)


def _played(
    names: Sequence[str], named: NamedEnv, settings: PlayerOptions, plan: Plan, *, references: bool
) -> list[AgentRun]:
    """Evaluate the agents one after another until one is interrupted, then the environment's reference agents.

    The environment's random and reference agents play each task once, and only if the anchors are not known exactly.
    """
    from agentsgym.cli.agent_runs import run_agent  # noqa: PLC0415
    from agentsgym.cli.players import PlayerOptions, make_player  # noqa: PLC0415
    from agentsgym.envs.players import has_random_player  # noqa: PLC0415

    players = [make_player(name, named, _resumed_options(name, settings, plan)) for name in names]
    runs: list[AgentRun] = []
    for player in players:
        runs.append(run_agent(player, plan))
        if runs[-1].ended_by is not None:
            return runs
    random_agent = ["random"] if has_random_player(named.env_class) else []
    for name in [*random_agent, "reference"] if references and not (runs[0].anchors and runs[0].anchors.exact) else []:
        if name in names:
            continue
        try:
            player = make_player(name, named, _resumed_options(name, PlayerOptions(seed=settings.seed), plan))
        except UsageError:
            continue  # the environment has no such agent
        runs.append(run_agent(player, replace(plan, num_rollouts=1)))
        if runs[-1].ended_by is not None:
            break
    return runs


def _resumed_options(name: str, settings: PlayerOptions, plan: Plan) -> PlayerOptions:
    """Add the number of stored episodes when a run is resumed, so that the agent draws new random numbers."""
    from agentsgym.cli.players import stored_name  # noqa: PLC0415
    from agentsgym.store.reader import RolloutStore  # noqa: PLC0415

    if plan.store is None or not plan.resume:
        return settings
    stored = RolloutStore(plan.store).filter(agent=stored_name(name, settings))
    return replace(settings, num_before=len(stored))


def _show(runs: Sequence[AgentRun], named: NamedEnv, plan: Plan, *, as_json: bool) -> None:
    """Print all results; fail if a run was interrupted or has no finished episode."""
    from agentsgym.cli.agent_runs import run_as_dict, show_runs  # noqa: PLC0415
    from agentsgym.envs.spec import imported  # noqa: PLC0415

    name = named.env_class.spec.fingerprint
    digest = imported(name)() if name else None
    if as_json:
        print_json({
            "environment": named.name,
            "env_config": named.env_config,
            "fingerprint": digest,
            "num_tasks": len(plan.tasks),
            "num_rollouts": plan.num_rollouts,
            "seed": plan.seed,
            "agents": [run_as_dict(one, plan.seed) for one in runs],
        })  # fmt: skip
    else:
        num_tasks = len(plan.tasks)
        rollouts = "" if plan.num_rollouts == 1 else f", {plan.num_rollouts} episodes each"
        out().print(cell(f"{named.name}: {num_tasks} task{'' if num_tasks == 1 else 's'}{rollouts}", "bold"))
        if digest is not None:
            out().print(cell(f"fingerprint: {digest} (compare scores only if it is equal)", "dim"))
        show_runs(runs, plan.seed)
    ended = next((one for one in runs if one.ended_by is not None), None)
    if ended is not None:
        num_played = len(ended.evaluation.trajectories) if ended.evaluation else 0
        remark(f"{ended.label} finished {num_played} of {ended.planned} episodes{_BIAS if num_played else ''}")
        if plan.store is not None:
            remark("run the same command with --resume to continue")
        raise FailureError(ended.ended_by, ended.exit_code)
    if any(one.evaluation is None or not one.evaluation.num_episodes for one in runs):
        raise FailureError("every episode failed")
