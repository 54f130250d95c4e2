"""``agentsgym play``: play in the terminal, or watch an agent."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentsgym.cli import options
from agentsgym.cli.console import FailureError, out, remark, reported, usage_errors

if TYPE_CHECKING:
    from agentsgym.cli.players import PlayerOptions
    from agentsgym.envs.base import MultistepEnv
    from agentsgym.envs.datasets.naming import NamedEnv

_MAX_TASKS = 64  # one of them is drawn


@reported
def play(  # noqa: PLR0913, PLR0917  # options of a command
    environment: options.Environment,
    agent: options.AgentName = None,
    config: options.Config = None,
    config_file: options.ConfigFile = None,
    tasks: options.TaskFile = None,
    dataset: options.DatasetOptions = None,
    split: options.Split = "eval",
    base_url: options.BaseUrl = None,
    api_key_env: options.ApiKeyVariable = None,
    temperature: options.Temperature = None,
    max_turn_tokens: options.MaxTurnTokens = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", metavar="N", min=0, help="Random seed that selects the task (default: a new one each time)."
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="PATH", help="Folder of the rollout store to write the finished episode to."),
    ] = None,
) -> None:
    """Play an environment in the terminal, or watch an agent (--agent) play it.

    Type your reply and press Enter; end a line with a backslash to continue on the next line. Call tools as
    name(argument=value) or as JSON. Ctrl-D or Ctrl-C quits.
    """
    from agentsgym.agents.human import PlayerLeft  # noqa: PLC0415
    from agentsgym.cli.display import show_summary  # noqa: PLC0415
    from agentsgym.cli.players import PlayerOptions, stored_name  # noqa: PLC0415
    from agentsgym.cli.stores import check_store_path, tasks_for  # noqa: PLC0415
    from agentsgym.envs.datasets.environments import stored_columns  # noqa: PLC0415
    from agentsgym.store.reader import RolloutStore  # noqa: PLC0415

    check_store_path(store)
    draw = random.Random(seed)
    named = options.find_env(environment, options.env_config(config, config_file))
    settings = PlayerOptions(
        seed=draw.getrandbits(31) if seed is None else seed,
        base_url=base_url,
        api_key_variable=api_key_env,
        temperature=temperature,
        max_turn_tokens=max_turn_tokens,
    )
    env, player = _player(agent, named, settings)
    found = tasks_for(env, named, path=tasks, split=split, dataset=dataset, most=_MAX_TASKS, seed=settings.seed)
    if agent is None:
        remark("Type your reply after the >; Ctrl-D quits.", "dim")
    try:
        [trajectory] = env.rollout([draw.choice(found)], player)
    except (KeyboardInterrupt, PlayerLeft):
        out().print("\nYou left before the episode ended." if agent is None else "\nStopped before the episode ended.")
        if store is not None:
            out().print("The episode was not stored: unfinished episodes have no reward.")
        return
    show_summary(trajectory)
    if store is not None:
        name = "person" if agent is None else stored_name(agent, settings)
        with RolloutStore.writer(store, source="play", agent=name) as writer:
            writer.add(trajectory, **stored_columns(env, trajectory), tokenizer=writer.keep_tokenizer(env.tokenizer))
    if trajectory.failed:
        raise FailureError("the episode failed")


def _player(agent: str | None, named: NamedEnv, settings: PlayerOptions) -> tuple[MultistepEnv, Any]:
    """Build the environment and its player: a person, or a watched agent."""
    from agentsgym.agents.human import HumanAgent  # noqa: PLC0415
    from agentsgym.cli.display import WatchedAgent, show_message  # noqa: PLC0415
    from agentsgym.cli.players import make_player  # noqa: PLC0415

    if agent is not None:
        player = make_player(agent, named, settings)
        return player.env, WatchedAgent(player.agent)
    reconfigure = getattr(sys.stdin, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")  # otherwise, typed text in another encoding would fail the episode
    with usage_errors():
        return named.build(), HumanAgent(show=show_message)
