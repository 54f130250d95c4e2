"""``agentsgym serve``: offer environments to other trainers over OpenEnv's protocol."""

from __future__ import annotations

from typing import Annotated

import typer

from agentsgym.cli import options
from agentsgym.cli.console import UsageError, cell, out, remark, reported, usage_errors


@reported
def serve(  # noqa: PLR0913, PLR0917  # options of a command
    environments: options.Environments,
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
    """
    from agentsgym.cli.naming import find_env  # noqa: PLC0415
    from agentsgym.cli.tasks import tasks_for  # noqa: PLC0415
    from agentsgym.envs.dataset_rows import class_path  # noqa: PLC0415
    from agentsgym.envs.datasets.naming import name_of_env  # noqa: PLC0415
    from agentsgym.serving.served_env import ServedEnv  # noqa: PLC0415
    from agentsgym.serving.server import EpisodeServer  # noqa: PLC0415
    from agentsgym.serving.server import serve as serve_envs  # noqa: PLC0415

    envs: dict[str, ServedEnv] = {}
    for named in [find_env(one, options.env_config(config, config_file)) for one in environments]:
        with usage_errors():
            env = named.build()
        chosen = {**named.dataset_options, **options.key_values(dataset, "--dataset")}
        found = {
            one: tasks_for(env, path=tasks, split=one, options=chosen, most=num_tasks) for one in ("train", "eval")
        }
        name = str(name_of_env(class_path(type(env)), env.env_config))
        if name in envs:
            raise UsageError(f"two environments are called {name}: start a server for each")
        with usage_errors():
            envs[name] = ServedEnv(env, found, split=split)

    def ready(url: str) -> None:
        for name in envs:
            out().print(cell(f"{name} at {url}" if len(envs) == 1 else f"{name} at {url}/{name}"), soft_wrap=True)
        out().file.flush()  # otherwise a pipe would delay the address
        remark("press Ctrl-C to stop")

    with usage_errors():
        server = EpisodeServer(envs, max_sessions=max_sessions, num_threads=threads)
        serve_envs(server, host=host, port=port, on_ready=ready)
