"""What a policy imitates first: games of the environments' own players, or stored rollouts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, cast

from agentsgym.envs.players import imitation_player, random_player, reference_player
from agentsgym.errors import ConfigError, StoreError
from agentsgym.fields import is_number
from agentsgym.recipes.encoding import Encoder
from agentsgym.recipes.sections import PlacedError, is_mapping
from agentsgym.seeding import derive_seed
from agentsgym.store.reader import RolloutStore
from agentsgym.texts import sentence_of, shown

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv
    from agentsgym.recipes.environments import World, Worlds
    from agentsgym.recipes.recipe import Recipe, WarmStart
    from agentsgym.recipes.run import TrainingRun
    from agentsgym.types import Trajectory

logger = logging.getLogger(__name__)

_PLAYERS: Mapping[str, Callable[[MultistepEnv, int], Any]] = {
    "random": random_player,
    "reference": reference_player,
    "imitation": imitation_player,
}


def player_of(world: World, name: str, seed: int, env: MultistepEnv | None = None) -> Any:
    """Make one of an environment's own players.

    Args:
        world: The environment.
        name: ``"random"``, ``"reference"`` or ``"imitation"``.
        seed: Of what the player draws.
        env: The environment that is played, with its tokenizer; None for that of ``world``.

    Raises:
        PlacedError: It has no such player.
    """
    try:
        return _PLAYERS[name](env or world.env, seed)
    except ConfigError as error:
        raise PlacedError(("warm_start", "player"), f"is {name!r}: {sentence_of(error)}") from error


def open_store(recipe: Recipe) -> RolloutStore:
    """Open the store of rollouts that a recipe imitates, and keep those that pass its filters.

    Raises:
        PlacedError: There is no store, a column is unknown, or no rollout is left.
    """
    warm_start = cast("WarmStart", recipe.warm_start)
    path = recipe.folder / warm_start.player
    try:
        store = RolloutStore(path)
    except StoreError as error:
        known = ", ".join(_PLAYERS)
        raise PlacedError(
            ("warm_start", "player"), f"must be one of {known} or the folder of a rollout store: {sentence_of(error)}"
        ) from error
    try:
        kept = store.filter(**{name: _wanted(name, value) for name, value in warm_start.filters.items()})
    except PlacedError:
        raise
    except ConfigError as error:
        raise PlacedError(("warm_start", "filters"), f"cannot be used: {sentence_of(error)}") from error
    if not len(kept):
        raise PlacedError(
            ("warm_start",),
            f"has nothing to imitate: of the {len(store)} rollouts in {path} none is left by its filters",
        )
    return kept[: warm_start.num_episodes]


def played_lessons(run: TrainingRun, worlds: Worlds, warm_start: WarmStart) -> list[Trajectory]:
    """Play what the policy is to imitate, each environment by its weight."""
    total = sum(world.weight for world in worlds)
    lessons: list[Trajectory] = []
    for world in worlds:
        num_episodes = max(1, round(warm_start.num_episodes * world.weight / total))
        lessons += _played(run, world, worlds, warm_start, num_episodes)
    return lessons


def _played(
    run: TrainingRun, world: World, worlds: Worlds, warm_start: WarmStart, num_episodes: int
) -> list[Trajectory]:
    """Let the player, and for some of the episodes the random player, play."""
    seed = run.args.seed
    env = world.named.build(run.tokenizer)
    tasks = list(islice(cycle(worlds.train[world.label]), num_episodes))
    num_random = round(warm_start.noise * num_episodes)
    label = "demonstrations" if len(worlds) == 1 else f"demonstrations ({world.label})"
    lessons: list[Trajectory] = []
    for name, own in (("random", tasks[:num_random]), (warm_start.player, tasks[num_random:])):
        if own:
            player = player_of(world, name, derive_seed("demonstrations", name, seed) % 2**31, env)
            lessons += run.play(label, env, own, player)
    return lessons


def stored_lessons(tokenizer: Any, store: RolloutStore) -> list[Trajectory]:
    """Read what the policy is to imitate: the tokens, where they are of its tokenizer, else the texts, encoded anew.

    Raises:
        PlacedError: The texts of some rollout cannot be encoded.
    """
    lessons: list[Trajectory] = []
    encoder = Encoder(tokenizer)
    problems: list[str] = []
    for index, record in enumerate(store.records()):
        problem = _misfit(tokenizer, record.trajectory)
        if problem is None:
            lessons.append(record.trajectory)
            continue
        problems.append(f"{problem} in rollout {index}")
        try:
            lessons.append(encoder.encode(record))
        except ConfigError as error:
            raise PlacedError(
                ("warm_start", "player"),
                f"has rollouts that were not recorded with the tokenizer of this policy ({problems[-1]}), and whose "
                f"texts cannot be encoded with it: {sentence_of(error)}",
            ) from error
    if problems:
        logger.warning(
            "%d of %d rollouts to imitate were not recorded with the tokenizer of this policy, and their texts are "
            "encoded anew: %s",
            len(problems),
            len(lessons),
            problems[0],
        )
    return lessons


def _misfit(tokenizer: Any, trajectory: Trajectory) -> str | None:
    """Say in what the tokens of a rollout are none of a tokenizer; None if they are."""
    if trajectory.failed or not trajectory.turns:
        return None
    if not trajectory.token_ids:
        return "there are no tokens"
    if max(trajectory.token_ids) >= len(tokenizer):
        return f"there is the token {max(trajectory.token_ids)}, of {len(tokenizer)}"
    first = next(one for one in trajectory.messages if one["role"] != "system")["content"]
    decoded: str = tokenizer.decode(trajectory.token_ids[: trajectory.turns[0].start])
    if not first or "".join(first.split()) in "".join(decoded.split()):
        return None
    return f"the prompt {shown(first, 60)} reads {shown(decoded, 60)}"


def _wanted(name: str, value: Any) -> Any:
    """What a filter of a store takes: a value, or a function that checks bounds."""
    if not is_mapping(value):
        return value
    bounds: dict[str, Any] = value
    if not bounds or not {*bounds} <= {"min", "max"} or not all(map(is_number(), bounds.values())):
        raise PlacedError(
            ("warm_start", "filters", name), f"must be a value, or numbers as min and max, got {shown(bounds)}"
        )
    low: float = bounds.get("min", float("-inf"))
    high: float = bounds.get("max", float("inf"))

    def is_within(found: float | None) -> bool:
        return found is not None and low <= found <= high

    return is_within
