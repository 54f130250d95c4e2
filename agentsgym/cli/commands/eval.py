"""``agentsgym eval``: how well agents play."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentsgym.cli import options
from agentsgym.cli.console import FailureError, UsageError, cell, out, print_json, remark, reported, usage
from agentsgym.interruptions import raising_on_sigterm

if TYPE_CHECKING:
    from agentsgym.cli.games import Games, Plan
    from agentsgym.cli.naming import NamedEnv
    from agentsgym.cli.players import PlayerOptions

_BIAS = ": short ones end first, so these means are not those of all"


@reported
def evaluate(  # noqa: PLR0913, PLR0917  # options of a command
    environment: options.Environment,
    agent: options.AgentNames = None,
    num_tasks: Annotated[
        int, typer.Option("--num-tasks", "-n", metavar="N", min=1, help="Maximum number of tasks.")
    ] = 100,
    num_rollouts: Annotated[
        int, typer.Option("--num-rollouts", "-k", metavar="N", min=1, help="Episodes per task.")
    ] = 1,
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
            "--cluster-by", metavar="KEY", help="Cluster tasks with equal values of this key when computing intervals."
        ),
    ] = None,
    max_failed: Annotated[
        float,
        typer.Option(
            "--max-failed",
            metavar="SHARE",
            min=0.0,
            max=1.0,
            help="Stop when a larger fraction of the episodes has failed.",
        ),
    ] = 0.1,
    max_concurrent: Annotated[
        int | None,
        typer.Option(
            "--max-concurrent",
            metavar="N",
            min=1,
            help="Maximum number of episodes played at once.",
            show_default="256",
        ),
    ] = None,
    references: Annotated[
        bool, typer.Option("--references/--no-references", help="Also evaluate ENV's random and reference players.")
    ] = True,
    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="PATH", help="Folder of a rollout store in which every episode is kept."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Play only episodes that are missing or failed in the store.")
    ] = False,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
) -> None:
    """Play many episodes and report win rate, reward, turns, pass@k and pass^k with 95 % intervals over tasks.

    If the run ends early, the results so far are shown, and the exit code is 1 (143 after SIGTERM). With --store they
    are also kept, and the same command with --resume continues from there.
    """
    from agentsgym.cli.games import MAX_CONCURRENT, Plan  # noqa: PLC0415
    from agentsgym.cli.naming import find_env  # noqa: PLC0415
    from agentsgym.cli.players import PlayerOptions  # noqa: PLC0415
    from agentsgym.cli.stores import check_place  # noqa: PLC0415
    from agentsgym.cli.tasks import tasks_for  # noqa: PLC0415

    if not agent:
        raise UsageError("eval needs an agent, such as --agent random or --agent policy:PATH")
    check_place(store, resume=resume)
    named = find_env(environment, options.env_config(config, config_file))
    settings = PlayerOptions(
        seed=seed,
        base_url=base_url,
        api_key_variable=api_key_env,
        temperature=temperature,
        max_turn_tokens=max_turn_tokens,
    )
    dataset_options = {**named.dataset_options, **options.key_values(dataset, "--dataset")}
    with usage():
        env = named.build()
    found = tasks_for(env, path=tasks, split=split, options=dataset_options, most=num_tasks, seed=seed)
    _check_clusters(found, cluster_by)
    plan = Plan(
        tasks=found,
        num_rollouts=num_rollouts,
        seed=seed,
        cluster_by=cluster_by,
        max_failed_fraction=max_failed,
        max_concurrent=max_concurrent or MAX_CONCURRENT,
        store=store,
        resume=resume,
    )
    with raising_on_sigterm():
        games = _played(list(dict.fromkeys(agent)), named, settings, plan, references=references)
    _show(games, named, plan, as_json=as_json)


def _played(
    names: Sequence[str], named: NamedEnv, settings: PlayerOptions, plan: Plan, *, references: bool
) -> list[Games]:
    """Let one agent play after the other, until something ends one early."""
    from agentsgym.cli.games import play_games  # noqa: PLC0415
    from agentsgym.cli.players import make_player  # noqa: PLC0415

    players = [make_player(name, named, _going_on(name, settings, plan)) for name in names]
    games: list[Games] = []
    for player in players:
        games.append(play_games(player, plan))
        if games[-1].ended_by is not None:
            return games
    if references and games[0].anchors is None:
        games += _beside(names, named, settings, plan)
    return games


def _going_on(name: str, settings: PlayerOptions, plan: Plan) -> PlayerOptions:
    """Tell an agent that goes on how many games it has played."""
    from dataclasses import replace  # noqa: PLC0415

    from agentsgym.cli.players import kept_name  # noqa: PLC0415
    from agentsgym.cli.stores import num_kept  # noqa: PLC0415

    if plan.store is None or not plan.resume:
        return settings
    return replace(settings, num_before=num_kept(plan.store, kept_name(name, settings)))


def _beside(names: Sequence[str], named: NamedEnv, settings: PlayerOptions, plan: Plan) -> list[Games]:
    """Let the environment's own players play each task once, where it has them and they are not asked for already."""
    from dataclasses import replace  # noqa: PLC0415

    from agentsgym.cli.games import play_games  # noqa: PLC0415
    from agentsgym.cli.players import PlayerOptions, make_player  # noqa: PLC0415
    from agentsgym.envs.players import has_random_player  # noqa: PLC0415

    games: list[Games] = []
    for name in ("random", "reference"):
        if name in names or (name == "random" and not has_random_player(named.env_class)):
            continue
        try:
            player = make_player(name, named, _going_on(name, PlayerOptions(seed=settings.seed), plan))
        except UsageError:
            continue  # it has no such player
        games.append(play_games(player, replace(plan, num_rollouts=1)))
        if games[-1].ended_by is not None:
            break
    return games


def _show(games: Sequence[Games], named: NamedEnv, plan: Plan, *, as_json: bool) -> None:
    """Print everything that was played; end with a failure if something ended it early."""
    from agentsgym.cli.results import games_as_dict, show_games  # noqa: PLC0415

    clusters = _clusters(plan)
    if as_json:
        print_json({
            "environment": named.name,
            "env_config": named.env_config,
            "num_tasks": len(plan.tasks),
            "num_rollouts": plan.num_rollouts,
            "seed": plan.seed,
            "agents": [games_as_dict(one, plan.seed, clusters) for one in games],
        })  # fmt: skip
    else:
        num_tasks = len(plan.tasks)
        rollouts = "" if plan.num_rollouts == 1 else f", {plan.num_rollouts} games of each"
        out().print(cell(f"{named.name}: {num_tasks} task{'' if num_tasks == 1 else 's'}{rollouts}", "bold"))
        show_games(games, plan.seed, clusters)
    ended = next((one for one in games if one.ended_by is not None), None)
    if ended is not None:
        num_played = len(ended.evaluation.trajectories) if ended.evaluation else 0
        remark(f"{ended.label} finished {num_played} of {ended.planned} games{_BIAS if num_played else ''}")
        if plan.store is not None:
            remark("the same command with --resume goes on from there")
        raise FailureError(ended.ended_by, ended.exit_code)
    if any(one.evaluation is None or not one.evaluation.num_episodes for one in games):
        raise FailureError("every game failed")


def _check_clusters(tasks: Sequence[Any], key: str | None) -> None:
    from agentsgym.errors import did_you_mean  # noqa: PLC0415

    for index, task in enumerate(tasks):
        fields = task.get("task_data", task)
        if key is not None and key not in fields:
            raise UsageError(f"--cluster-by: task {index} has no {key!r}{did_you_mean(key, fields)}")


def _clusters(plan: Plan) -> dict[int, Any] | None:
    """The cluster of each task by its index; None where each is one of its own."""
    if plan.cluster_by is None:
        return None
    tasks = [task.get("task_data", task) for task in plan.tasks]
    return {index: repr(task[plan.cluster_by]) for index, task in enumerate(tasks)}
