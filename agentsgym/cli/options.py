"""Options that several commands share, and the parsing of their values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from agentsgym.cli.console import UsageError, usage_errors

if TYPE_CHECKING:
    from agentsgym.envs.datasets.naming import NamedEnv


def environment_names(incomplete: str) -> list[str]:
    """Complete the name of an environment."""
    from agentsgym.envs.datasets.naming import completions  # noqa: PLC0415

    return completions(incomplete)


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Return a completion function for a few values."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


_agents = one_of("random", "reference", "scripted:", "policy:", "openai:")
_AGENT = (
    "Agent: random or reference (both provided by ENV), scripted:FILE (a JSON list of actions, or one action per "
    "line), policy:PATH-OR-NAME (a language model), policy:tiny (a small untrained one), or openai:MODEL (a model on "
    "an OpenAI-compatible server)."
)
Environment = Annotated[
    str,
    typer.Argument(
        metavar="ENV",
        help="Environment: a name from `agentsgym envs`, the dotted path of a class, or FILE.py:CLASS.",
        autocompletion=environment_names,
        show_default=False,
    ),
]
Environments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ENV...",
        help="Environments, named as in other commands. One is at the server's root; several are at /NAME each.",
        autocompletion=environment_names,
        show_default=False,
    ),
]
Config = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        "-c",
        metavar="KEY=VALUE",
        help="Set a key of env_config, the environment's configuration. VALUE is parsed as JSON if possible, and is "
        "otherwise a string. Repeatable.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config-file", metavar="FILE", help="YAML or JSON file with env_config; --config takes precedence."),
]
TaskFile = Annotated[
    Path | None,
    typer.Option(
        "--tasks",
        metavar="FILE",
        help="JSON or JSONL file with tasks or dataset rows to use instead of ENV's built-in tasks.",
    ),
]
DatasetOptions = Annotated[
    list[str] | None,
    typer.Option("--dataset", metavar="KEY=VALUE", help="Set an option of ENV's built-in task dataset. Repeatable."),
]
Split = Annotated[
    str,
    typer.Option(
        "--split", metavar="train|eval", help="Split of ENV's built-in tasks.", autocompletion=one_of("train", "eval")
    ),
]
AgentName = Annotated[str | None, typer.Option("--agent", "-a", metavar="AGENT", help=_AGENT, autocompletion=_agents)]
AgentNames = Annotated[
    list[str] | None,
    typer.Option("--agent", "-a", metavar="AGENT", help=f"{_AGENT} Required; repeatable.", autocompletion=_agents),
]
BaseUrl = Annotated[
    str | None,
    typer.Option("--base-url", metavar="URL", help="Base URL of an OpenAI-compatible server, for openai:MODEL."),
]
ApiKeyVariable = Annotated[
    str | None,
    typer.Option("--api-key-env", metavar="NAME", help="Environment variable that contains the server's API key."),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", metavar="T", min=0.0, help="Sampling temperature of policy: and openai: agents."),
]
MaxTurnTokens = Annotated[
    int | None,
    typer.Option(
        "--max-turn-tokens",
        metavar="N",
        min=1,
        help="Maximum number of tokens per turn for policy: and openai: agents.",
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", min=0, help="Random seed for tasks, agents and confidence intervals.")
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="COLUMN=VALUE",
        help="Use only rollouts whose COLUMN equals VALUE; !=, <, <=, > and >= also work. Repeatable.",
    ),
]
StorePath = Annotated[Path, typer.Argument(metavar="PATH", help="Folder of a rollout store.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def find_env(name: str, env_config: dict[str, Any] | None = None) -> NamedEnv:
    """Find an environment with :func:`agentsgym.envs.datasets.naming.find_env`.

    Raises:
        UsageError: The name is unknown; the message suggests the nearest names.
    """
    from agentsgym.envs.datasets import naming  # noqa: PLC0415

    with usage_errors():
        return naming.find_env(name, env_config)


def key_values(texts: list[str] | None, option: str) -> dict[str, Any]:
    """Parse ``KEY=VALUE`` texts; a value that is not JSON is a string.

    >>> key_values(["size=3", "game=Wordle-v0", 'objects=["clock"]'], "--config")
    {'size': 3, 'game': 'Wordle-v0', 'objects': ['clock']}
    """
    values: dict[str, Any] = {}
    for item in texts or []:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise UsageError(f"{option} must be KEY=VALUE, got {item!r}")
        if key in values:
            raise UsageError(f"{option} sets {key!r} more than once")
        try:
            values[key] = json.loads(text)
        except (ValueError, RecursionError):
            values[key] = text
    return values


def env_config(texts: list[str] | None, path: Path | None) -> dict[str, Any]:
    """Merge ``--config-file``, a YAML or JSON mapping, and ``--config``; the latter takes precedence."""
    if path is None:
        return key_values(texts, "--config")
    import yaml  # noqa: PLC0415

    from agentsgym.recipes.sections import values_of_yaml  # noqa: PLC0415

    try:
        value = values_of_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config-file: {path} cannot be read: {error}") from error
    fields = cast("dict[Any, Any]", value) if isinstance(value, dict) else None
    if fields is None or not all(isinstance(key, str) for key in fields):
        raise UsageError(f"--config-file: {path} must contain a mapping with string keys")
    return {**fields, **key_values(texts, "--config")}
