"""Options that several commands share, and the parsing of their values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from agentsgym.cli.console import UsageError


def _environments(incomplete: str) -> list[str]:
    from agentsgym.cli.naming import completions  # noqa: PLC0415

    return completions(incomplete)


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Return a completion function for a few values."""

    def offered(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return offered


_agents = one_of("random", "reference", "scripted:", "policy:", "openai:")
Environment = Annotated[
    str,
    typer.Argument(
        metavar="ENV",
        help="Environment: a name from `agentsgym envs`, GROUP:GAME, a class's dotted path, or FILE.py:CLASS.",
        autocompletion=_environments,
        show_default=False,
    ),
]
Config = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        "-c",
        metavar="KEY=VALUE",
        help="Key of env_config; the value is parsed as JSON if possible, otherwise taken as a string. Repeatable.",
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config-file", metavar="FILE", help="YAML or JSON file with keys of env_config.")
]
TaskFile = Annotated[
    Path | None,
    typer.Option(
        "--tasks",
        metavar="FILE",
        help="JSON or JSONL file of tasks or dataset rows, used instead of ENV's own tasks.",
    ),
]
DatasetOptions = Annotated[
    list[str] | None,
    typer.Option("--dataset", metavar="KEY=VALUE", help="Option of ENV's own dataset of tasks. Repeatable."),
]
Split = Annotated[
    str,
    typer.Option(
        "--split", metavar="train|eval", help="Split of ENV's own tasks.", autocompletion=one_of("train", "eval")
    ),
]
AgentName = Annotated[
    str | None,
    typer.Option(
        "--agent",
        "-a",
        metavar="AGENT",
        help="Agent: random, reference, scripted:FILE, policy:PATH-OR-NAME, policy:tiny or openai:MODEL.",
        autocompletion=_agents,
    ),
]
AgentNames = Annotated[
    list[str] | None,
    typer.Option(
        "--agent",
        "-a",
        metavar="AGENT",
        help="Agent: random, reference, scripted:FILE, policy:PATH-OR-NAME, policy:tiny or openai:MODEL. Repeatable.",
        autocompletion=_agents,
    ),
]
BaseUrl = Annotated[
    str | None,
    typer.Option("--base-url", metavar="URL", help="Base URL of an OpenAI-compatible server, for openai:MODEL."),
]
ApiKeyVariable = Annotated[
    str | None,
    typer.Option("--api-key-env", metavar="NAME", help="Environment variable that holds the server's API key."),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", metavar="T", min=0.0, help="Sampling temperature of a policy or a server's model."),
]
MaxTurnTokens = Annotated[
    int | None, typer.Option("--max-turn-tokens", metavar="N", min=1, help="Token budget of one turn.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Random seed for tasks, agents and intervals.")]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="COLUMN=VALUE",
        help="Use only rollouts whose COLUMN has this VALUE; !=, <, <=, > and >= also work. Repeatable.",
    ),
]
StorePath = Annotated[Path, typer.Argument(metavar="PATH", help="Folder of a rollout store.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def key_values(given: list[str] | None, option: str) -> dict[str, Any]:
    """Parse ``KEY=VALUE`` texts; a value that is not JSON is taken as a string.

    >>> key_values(["size=3", "game=Wordle-v0", 'objects=["clock"]'], "--config")
    {'size': 3, 'game': 'Wordle-v0', 'objects': ['clock']}
    """
    values: dict[str, Any] = {}
    for one in given or []:
        key, equals, text = one.partition("=")
        if not equals or not key:
            raise UsageError(f"{option} must be KEY=VALUE, got {one!r}")
        if key in values:
            raise UsageError(f"{option} sets {key!r} twice")
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    return values


def env_config(given: list[str] | None, path: Path | None) -> dict[str, Any]:
    """Merge ``--config-file``, a YAML or JSON mapping, and ``--config``; the latter takes precedence."""
    if path is None:
        return key_values(given, "--config")
    import yaml  # noqa: PLC0415

    from agentsgym.recipes.yaml_text import values_of_yaml  # noqa: PLC0415

    try:
        value = values_of_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config-file: {path} cannot be read: {error}") from error
    fields = cast("dict[Any, Any]", value) if isinstance(value, dict) else None
    if fields is None or not all(isinstance(key, str) for key in fields):
        raise UsageError(f"--config-file: {path} must contain a mapping with string keys")
    return {**fields, **key_values(given, "--config")}
