"""``agentsgym serve``: offer environments to other trainers over OpenEnv's protocol, or a policy to programs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentsgym.cli import options
from agentsgym.cli.console import UsageError, cell, out, remark, reported, usage_errors
from agentsgym.interruptions import raising_on_sigterm

if TYPE_CHECKING:
    from agentsgym.envs.datasets.naming import NamedEnv
    from agentsgym.serving.served_env import ServedEnv


@reported
def serve(  # noqa: PLR0913, PLR0917  # options of a command
    environments: options.Environments = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="PATH-OR-NAME",
            help="Serve this policy, over the APIs of OpenAI and Anthropic, instead of environments.",
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="PATH", help="Folder of the rollout store for the sessions of --policy."),
    ] = None,
    idle: Annotated[
        float, typer.Option("--idle", metavar="S", min=1, help="Seconds without a call that end a session of --policy.")
    ] = 600.0,
    temperature: options.Temperature = None,
    max_turn_tokens: options.MaxTurnTokens = None,
    config: options.Config = None,
    config_file: options.ConfigFile = None,
    tasks: options.TaskFile = None,
    dataset: options.DatasetOptions = None,
    split: options.Split = "train",
    num_tasks: Annotated[
        int, typer.Option("--num-tasks", "-n", metavar="N", min=1, help="Maximum number of tasks of a split.")
    ] = 256,
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="ADDRESS", help="Address to listen on. The server has no authentication or encryption."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="P", min=0, max=65535, help="Port; 0 selects a free port.")
    ] = 8000,
    max_sessions: Annotated[
        int, typer.Option("--max-sessions", metavar="N", min=1, help="Maximum number of concurrent sessions.")
    ] = 256,
    threads: Annotated[
        int,
        typer.Option(
            "--threads",
            metavar="N",
            min=1,
            help="Number of steps that run concurrently; more than 1 is for thread-safe environments whose steps wait.",
        ),
    ] = 1,
) -> None:
    """Serve environments over OpenEnv's protocol until Ctrl-C, so that other trainers can play them.

    The seed of a reset selects a task of --split. A reset can also name a split and an index, or contain a whole task.

    With --policy, serve a policy to programs instead: each session of calls becomes a rollout. A program uses the
    printed URL and key; its header x-agentsgym-session names its session.
    """
    if policy is not None:
        if environments:
            raise UsageError("--policy serves a policy instead of environments: name either")
        sampling = {"temperature": temperature, "max_turn_tokens": max_turn_tokens}
        _serve_policy(policy, store, sampling, idle_s=idle, max_sessions=max_sessions, host=host, port=port)
        return
    if not environments:
        raise UsageError("name an environment to serve, or a policy with --policy")
    from agentsgym.serving.server import EpisodeServer  # noqa: PLC0415
    from agentsgym.serving.server import serve as serve_envs  # noqa: PLC0415

    named = [options.find_env(one, options.env_config(config, config_file)) for one in environments]
    envs = _served(named, path=tasks, dataset=dataset, split=split, most=num_tasks)

    def ready(url: str) -> None:
        for name in envs:
            out().print(cell(f"{name} at {url}" if len(envs) == 1 else f"{name} at {url}/{name}"), soft_wrap=True)
        out().file.flush()  # otherwise a pipe would delay the address
        remark("press Ctrl-C to stop")

    with usage_errors():
        server = EpisodeServer(envs, max_sessions=max_sessions, num_threads=threads)
        serve_envs(server, host=host, port=port, on_ready=ready)


def _served(
    named: Sequence[NamedEnv], *, path: Path | None, dataset: list[str] | None, split: str, most: int
) -> dict[str, ServedEnv]:
    """The environments with their tasks, by name."""
    from agentsgym.cli.stores import tasks_for  # noqa: PLC0415
    from agentsgym.envs.dataset_rows import class_path  # noqa: PLC0415
    from agentsgym.envs.datasets.naming import name_of_env  # noqa: PLC0415
    from agentsgym.serving.served_env import ServedEnv  # noqa: PLC0415

    envs: dict[str, ServedEnv] = {}
    for one in named:
        with usage_errors():
            env = one.build()
        found = {
            part: tasks_for(env, one, path=path, split=part, dataset=dataset, most=most) for part in ("train", "eval")
        }
        name = str(name_of_env(class_path(type(env)), env.env_config))
        if name in envs:
            raise UsageError(f"two environments are called {name}: start a server for each")
        with usage_errors():
            envs[name] = ServedEnv(env, found, split=split)
    return envs


def _serve_policy(
    source: str, folder: Path | None, sampling: dict[str, Any], *, host: str, port: int, **limits: Any
) -> None:
    from agentsgym.cli.players import policy_agent  # noqa: PLC0415
    from agentsgym.serving.policy import serve_policy  # noqa: PLC0415
    from agentsgym.store.reader import RolloutStore  # noqa: PLC0415

    if host != "127.0.0.1":
        raise UsageError("a policy is served on 127.0.0.1 only: leave out --host")
    with usage_errors(), contextlib.ExitStack() as closing:
        agent, tokenizer = policy_agent(source, **sampling)
        writer = None if folder is None else closing.enter_context(RolloutStore.writer(folder, run="served"))
        on_rollout = None if writer is None else writer.add
        server = closing.enter_context(serve_policy(agent, tokenizer, on_rollout=on_rollout, port=port, **limits))
        out().print(f"OPENAI_BASE_URL={server.url}\nOPENAI_API_KEY={server.key}", soft_wrap=True, highlight=False)
        out().file.flush()  # otherwise a pipe would delay the address
        remark("press Ctrl-C to stop")
        with raising_on_sigterm(), contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
