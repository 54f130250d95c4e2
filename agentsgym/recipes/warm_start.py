"""Demonstrations for a warm start: episodes of the environments' players, or stored rollouts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Final, cast

from agentsgym.envs.conversation import chat_format_of
from agentsgym.envs.players import imitation_player, random_player, reference_player
from agentsgym.errors import ConfigError, StoreError, TemplateError
from agentsgym.fields import has_str_keys, is_number
from agentsgym.recipes.sections import PlacedError
from agentsgym.seeding import derive_seed
from agentsgym.store.reader import RolloutStore
from agentsgym.texts import sentence_of, shown
from agentsgym.tokens.transcript import Transcript, record_conversation
from agentsgym.training.selection.imitate import misfit
from agentsgym.types import Action

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv
    from agentsgym.recipes.environments import World, Worlds
    from agentsgym.recipes.recipe import Recipe, WarmStart
    from agentsgym.recipes.run import TrainingRun
    from agentsgym.store.records import StoredRollout
    from agentsgym.tokens.chat_format import ChatFormat
    from agentsgym.types import Trajectory

logger = logging.getLogger(__name__)

_CHAT_DEFAULTS: Final[Mapping[str, Any]] = {  # the keys of env_config that affect the tokens of a conversation
    "history": "append",
    "guard_added_tokens": False,
    "unguarded_tokens": [],
    "chat_template_kwargs": {},
}
_PLAYERS: Mapping[str, Callable[[MultistepEnv, int], Any]] = {
    "random": random_player,
    "reference": reference_player,
    "imitation": imitation_player,
}


def player_of(world: World, name: str, seed: int, env: MultistepEnv | None = None) -> Any:
    """Build one of an environment's players.

    Args:
        world: The environment.
        name: ``"random"``, ``"reference"`` or ``"imitation"``.
        seed: Random seed of the player.
        env: The environment to play, with its tokenizer; None for that of ``world``.
    """
    try:
        return _PLAYERS[name](env or world.env, seed)
    except ConfigError as error:
        raise PlacedError(("warm_start", "player"), f"cannot be {name!r}: {sentence_of(error)}") from error


def open_store(recipe: Recipe) -> RolloutStore:
    """Open the rollout store that a recipe imitates, and apply its filters."""
    warm_start = cast("WarmStart", recipe.warm_start)
    path = recipe.folder / warm_start.player
    try:
        store = RolloutStore(path)
    except StoreError as error:
        known = ", ".join(_PLAYERS)
        raise PlacedError(
            ("warm_start", "player"), f"must be {known}, or the path to an existing rollout store: {sentence_of(error)}"
        ) from error
    try:
        kept = store.filter(**{name: _wanted(name, value) for name, value in warm_start.filters.items()})
    except PlacedError:
        raise
    except ConfigError as error:
        raise PlacedError(("warm_start", "filters"), f"cannot be used: {sentence_of(error)}") from error
    if not len(kept):
        raise PlacedError(
            ("warm_start",), f"has nothing to imitate: its filters match none of the {len(store)} rollouts in {path}"
        )
    return kept[: warm_start.num_episodes]


def play_demonstrations(run: TrainingRun, worlds: Worlds, warm_start: WarmStart) -> list[Trajectory]:
    """Play the demonstrations, divided by the environments' weights; the random player plays the ``noise`` fraction."""
    total = sum(world.weight for world in worlds)
    demonstrations: list[Trajectory] = []
    for world in worlds:
        num_episodes = max(1, round(warm_start.num_episodes * world.weight / total))
        num_random = round(warm_start.noise * num_episodes)
        env = world.named.build(run.tokenizer)
        tasks = list(islice(cycle(worlds.train[world.label]), num_episodes))
        label = "demonstrations" if len(worlds) == 1 else f"demonstrations ({world.label})"
        for name, own in (("random", tasks[:num_random]), (warm_start.player, tasks[num_random:])):
            if own:
                player = player_of(world, name, derive_seed("demonstrations", name, run.args.seed) % 2**31, env)
                demonstrations += run.play(label, env, own, player)
    return demonstrations


def stored_demonstrations(tokenizer: Any, store: RolloutStore) -> list[Trajectory]:
    """Read stored demonstrations; rollouts recorded with another tokenizer are re-encoded from their texts."""
    demonstrations: list[Trajectory] = []
    formats: dict[str, ChatFormat] = {}
    problems: list[str] = []
    for index, record in enumerate(store.records()):
        problem = misfit(tokenizer, record.trajectory)
        if problem is None:
            demonstrations.append(record.trajectory)
            continue
        problems.append(f"{problem} in rollout {index}")
        try:
            demonstrations.append(_reencoded(record, tokenizer, formats))
        except ConfigError as error:
            raise PlacedError(
                ("warm_start", "player"),
                f"has rollouts that were recorded with another tokenizer ({problems[-1]}) and cannot be re-encoded: "
                f"{sentence_of(error)}",
            ) from error
    if problems:
        logger.warning(
            "%d of %d rollouts to imitate were recorded with another tokenizer and are re-encoded: %s",
            len(problems),
            len(demonstrations),
            problems[0],
        )
    return demonstrations


def _reencoded(record: StoredRollout, tokenizer: Any, formats: dict[str, ChatFormat]) -> Trajectory:
    """Re-encode a rollout's messages with another tokenizer, as if an agent had answered in text.

    The turns of the result are not exact and have no log-probabilities. Observations after the last answer are omitted.

    Args:
        record: The rollout.
        tokenizer: The policy's tokenizer.
        formats: Chat formats by configuration, to build each only once.
    """
    own = record.trajectory
    if any(one.get("tool_calls") or one["role"] == "tool" for one in own.messages):
        raise ConfigError("rollouts with tool calls cannot be re-encoded")
    if any(turn.prompt_messages is not None for turn in own.turns):
        raise ConfigError("rollouts whose history was rewritten by a function, notes or 'last' cannot be re-encoded")
    known = record.env_config or {}
    config = {name: known.get(name, default) for name, default in _CHAT_DEFAULTS.items()}
    key = json.dumps(config, sort_keys=True, default=repr)
    answers = {
        turn.message_index: Action(
            text=own.messages[turn.message_index]["content"],
            reasoning=own.messages[turn.message_index].get("reasoning_content"),
        )
        for turn in own.turns
    }
    try:
        if key not in formats:
            formats[key] = cast("ChatFormat", chat_format_of(tokenizer, config))
        transcript = Transcript(formats[key], config["history"])
        places = record_conversation(transcript, own.messages, answers, formats[key])
    except TemplateError as error:
        raise ConfigError(sentence_of(error)) from error
    turns = [replace(turn, **place._asdict(), exact=False) for turn, place in zip(own.turns, places, strict=True)]
    return replace(own, token_ids=transcript.record(), turns=turns, logprobs=None, per_token_rewards=())


def _wanted(name: str, value: Any) -> Any:
    """Return a filter for a store: the value, or a function that checks the bounds."""
    if not has_str_keys(value):
        return value
    bounds: dict[str, Any] = value
    if not bounds or not {*bounds} <= {"min", "max"} or not all(map(is_number(), bounds.values())):
        raise PlacedError(
            ("warm_start", "filters", name),
            f"must be a value, or a mapping with numbers as min or max, got {shown(bounds)}",
        )
    low: float = bounds.get("min", float("-inf"))
    high: float = bounds.get("max", float("inf"))

    def is_within(found: float | None) -> bool:
        return found is not None and low <= found <= high

    return is_within
