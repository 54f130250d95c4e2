"""Build the agent named on the command line, and its environment."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agentsgym.agents.openai_server import without_credentials
from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.cli.console import UsageError, usage_errors
from agentsgym.envs.datasets.naming import NamedEnv
from agentsgym.envs.players import random_player, reference_player
from agentsgym.errors import did_you_mean
from agentsgym.seeding import derive_seed
from agentsgym.texts import shown

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv

# The argument after each agent's name and a colon; empty for none.
_AGENTS = {"random": "", "reference": "", "scripted": "FILE", "policy": "PATH-OR-NAME", "openai": "MODEL"}
_OPTION_AGENTS = {
    "--base-url": ("openai",),
    "--api-key-env": ("openai",),
    "--temperature": ("policy", "openai"),
    "--max-turn-tokens": ("policy", "openai"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerOptions:
    """Options for agents.

    Attributes:
        seed: Random seed.
        base_url: Base URL of the server.
        api_key_variable: Environment variable that contains the server's API key.
        temperature: Sampling temperature of a policy or a server's model; None for the default.
        max_turn_tokens: Token budget per turn; None for the default.
        num_before: Number of episodes finished before the evaluation was resumed; it changes the seed, so that the
            agent draws new random numbers.
    """

    seed: int = 0
    base_url: str | None = None
    api_key_variable: str | None = None
    temperature: float | None = None
    max_turn_tokens: int | None = None
    num_before: int = 0

    @property
    def agent_seed(self) -> int:
        """The agent's random seed, which changes each time an evaluation is resumed."""
        return derive_seed("command line", self.seed, self.num_before) if self.num_before else self.seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """An agent and its environment.

    Attributes:
        label: The agent's name on the command line.
        env: The environment, with the policy's tokenizer if there is one.
        agent: The agent.
        stored_as: The agent's name in a store; the label if empty.
    """

    label: str
    env: MultistepEnv
    agent: Any
    stored_as: str = ""


def make_player(name: str, named: NamedEnv, options: PlayerOptions) -> Player:
    """Build an agent and its environment."""
    kind, _, rest = name.partition(":")
    if kind not in _AGENTS:
        raise UsageError(f"unknown agent {shown(name)}{did_you_mean(kind, _AGENTS)}")
    argument = _AGENTS[kind]
    if bool(rest) != bool(argument):
        form = f"must be {kind}:{argument}" if argument else f"{kind} does not accept an argument"
        raise UsageError(f"the agent {form}, got {shown(name)}")
    for option, value in _settings(options).items():
        if value is not None and kind not in _OPTION_AGENTS[option]:
            supported = " and ".join(f"{one}:{_AGENTS[one]}" for one in _OPTION_AGENTS[option])
            raise UsageError(f"{option} is only valid with {supported}, got the agent {shown(name)}")
    with usage_errors():
        if kind == "policy":
            env, agent = _policy(rest, named, _decoding(named, options))
        elif kind == "openai":
            env, agent = _openai(rest, named, _decoding(named, options))
        elif kind == "scripted":
            env, agent = named.build(), ScriptedAgent(read_script(Path(rest)))
        else:
            env = named.build()
            agent = (random_player if kind == "random" else reference_player)(env, options.agent_seed)
    return Player(label=name, env=env, agent=agent, stored_as=stored_name(name, options))


def _decoding(named: NamedEnv, options: PlayerOptions) -> PlayerOptions:
    """Return the options with the sampling that a variant of the environment fixes."""
    given = {"temperature": options.temperature, "max_turn_tokens": options.max_turn_tokens}
    settings = named.settings("evaluation", {key: value for key, value in given.items() if value is not None})
    return replace(options, **{key: settings.get(key) for key in given})


def stored_name(name: str, options: PlayerOptions) -> str:
    """Return an agent's name for a store: the typed name and the options that affect its play, without credentials.

    >>> stored_name("random", PlayerOptions()), stored_name("policy:tiny", PlayerOptions(seed=3, temperature=0.5))
    ('random', 'policy:tiny --temperature 0.5 --seed 3')
    >>> stored_name("openai:gpt", PlayerOptions(base_url="https://me:PW@host/v1?api-key=S"))
    'openai:gpt --base-url https://host/v1'
    """
    kind = name.partition(":")[0]
    settings = _settings(options)
    del settings["--api-key-env"]
    settings["--seed"] = options.seed or None if kind in {"policy", "random", "reference"} else None
    return " ".join([name, *(f"{option} {value}" for option, value in settings.items() if value is not None)])


def _settings(options: PlayerOptions) -> dict[str, Any]:
    """Return the options that apply only to some agents; the base URL is without its user, password and query."""
    return {
        "--base-url": None if options.base_url is None else without_credentials(options.base_url),
        "--api-key-env": options.api_key_variable,
        "--temperature": options.temperature,
        "--max-turn-tokens": options.max_turn_tokens,
    }


def read_script(path: Path) -> list[str]:
    """Read the actions of a script: a JSON list of strings, or one action per line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the script {path} cannot be read: {error}") from error
    try:
        actions: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text.splitlines()
    if not isinstance(actions, list):  # "7" is an action, not a list
        return text.splitlines()
    if not all(isinstance(action, str) for action in cast("list[Any]", actions)):
        raise UsageError(f"the script {path} must be a JSON list of strings, or have one action per line")
    return cast("list[str]", actions)


def _policy(source: str, named: NamedEnv, options: PlayerOptions) -> tuple[MultistepEnv, Any]:
    loaded = None
    if source == "tiny":
        from agentsgym.tiny import tiny_policy  # noqa: PLC0415

        loaded = tiny_policy(named.build(), seed=options.seed)
    agent, tokenizer = policy_agent(
        source, options.temperature, options.max_turn_tokens, seed=options.agent_seed, loaded=loaded
    )
    return named.build(tokenizer), agent


def policy_agent(
    source: str, temperature: float | None, max_turn_tokens: int | None, *, seed: int = 0, loaded: Any = None
) -> tuple[Any, Any]:
    """Load a policy, unless it is given as ``loaded``, and return an agent that samples from it, and the tokenizer."""
    from agentsgym.agents.policy.agent import PolicyAgent  # noqa: PLC0415
    from agentsgym.agents.policy.loading import limit_threads, load_policy  # noqa: PLC0415
    from agentsgym.agents.policy.sampling import SamplingParams  # noqa: PLC0415
    from agentsgym.agents.trained import DEFAULT_TURN_TOKENS  # noqa: PLC0415

    quiet_transformers()
    model, tokenizer = load_policy(source) if loaded is None else loaded
    limit_threads(model)
    agent = PolicyAgent(
        model,
        tokenizer,
        sampling=SamplingParams(temperature=1.0 if temperature is None else temperature),
        seed=seed,
        max_turn_tokens=max_turn_tokens or DEFAULT_TURN_TOKENS,
    )
    return agent, tokenizer


def _openai(model: str, named: NamedEnv, options: PlayerOptions) -> tuple[MultistepEnv, Any]:
    from agentsgym.agents.openai import OpenAIAgent  # noqa: PLC0415

    settings: dict[str, Any] = {"base_url": options.base_url, "token_ids": False}
    if options.api_key_variable is not None:
        if options.api_key_variable not in os.environ:
            raise UsageError(f"--api-key-env: the environment variable {shown(options.api_key_variable)} is not set")
        settings["api_key"] = os.environ[options.api_key_variable]
    if options.temperature is not None:
        settings["temperature"] = options.temperature
    if options.max_turn_tokens is not None:
        settings["max_tokens"] = options.max_turn_tokens
    return named.build(), OpenAIAgent(model, **settings)


def tokenizer_of(source: str | None) -> Any:
    """Load the tokenizer of ``--tokenizer``; None without that option."""
    if source is None:
        return None
    from agentsgym.agents.policy.loading import load_tokenizer  # noqa: PLC0415

    return load_tokenizer(source)


def quiet_transformers() -> None:
    """Silence transformers' progress bars and warnings while a model is loaded."""
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity(logging.ERROR)
