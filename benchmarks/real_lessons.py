"""What SmolLM2-135M-Instruct is taught in ``real_learning.py``: the environments, and whom it imitates first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentsgym import RandomAgent
from agentsgym.envs.Gymnasium import GymnasiumEnv, RandomPlayer
from agentsgym.envs.PriceList import ImitationPlayer as ShoppingPlayer
from agentsgym.envs.PriceList import PriceListEnv
from agentsgym.envs.TextArena import LegalAgent, TextArenaEnv
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.envs.TwentyQuestions.protocols import variants
from benchmarks.real_asker import FreeAsker
from benchmarks.real_games import CarelessGuesser, NumberGuessing
from benchmarks.real_shop import SHOP_PROMPT, Shop
from examples.customer_service import Clerk

if TYPE_CHECKING:
    from agentsgym import MultistepEnv


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What one environment needs to be learned.

    Attributes:
        env_class: The environment.
        env_config: Its configuration.
        rows: The dataset's options.
        player: Builds the player whose episodes are imitated first.
        num_demonstrations: Number of episodes that it plays.
        imitation_steps: Number of optimizer steps of the warm start, of 16 episodes each.
        training_steps: Number of optimizer steps from rewards, of 32 episodes each.
        learning_rate: The learning rate of those.
        training: Fields of ``GRPOEnvConfig`` that differ from the common ones.
        outcome: Fields of ``env_config`` that differ if a reward is not credited by turn.
    """

    env_class: type[MultistepEnv]
    env_config: Mapping[str, Any]
    player: Callable[[Any, int], Any]
    num_demonstrations: int
    imitation_steps: int
    training_steps: int
    learning_rate: float
    rows: Mapping[str, Any] = field(default_factory=dict[str, Any])
    training: Mapping[str, Any] = field(default_factory=dict[str, Any])
    outcome: Mapping[str, Any] = field(default_factory=dict[str, Any])


# The model's chat template has no place for tools: the prompt describes them and the format of a call.
TOOLS_PROMPT = (
    "You answer questions about prices. Your tools are price(good), add(a, b) and multiply(a, b). Call a tool "
    'like this: <tool_call>{"name": "price", "arguments": {"good": "egg"}}</tool_call>. '
    "Give the answer as a number alone."
)
OBJECTS = ("bed", "car", "cow", "dog", "fish", "hat", "knife", "snake")
PROPERTIES = ("animal", "electric", "fur", "sharp", "soft", "swim", "vehicle", "wheels")


def asker(env: Any, seed: int) -> RandomAgent:
    """Return a player that draws a question about a property or an object, regardless of the answers."""
    questions = [env.knowledge.properties[key].question for key in PROPERTIES]
    return RandomAgent(questions + [env.knowledge.objects[name].guess for name in OBJECTS], seed=seed)


LESSONS = {
    "customers": Lesson(
        env_class=Shop,
        env_config={"max_steps_per_episode": 6, "system_prompt": SHOP_PROMPT},
        player=lambda env, seed: Clerk(env, noise=0.2, seed=seed),
        num_demonstrations=640,
        imitation_steps=40,
        training_steps=24,
        learning_rate=1.5e-4,
        training={"max_turn_tokens": 48},
    ),
    "free_english": Lesson(  # any question about any of the 158 properties, in any words
        env_class=TwentyQuestionsEnv,
        env_config=variants()["v1-small"]["env_config"],
        rows=variants()["v1-small"]["dataset"],
        player=lambda env, seed: FreeAsker(env, seed=seed),
        num_demonstrations=320,
        imitation_steps=20,
        training_steps=20,
        learning_rate=3e-4,
        # A question is worth what its own reply reveals; 8 of the 12 objects are in each batch.
        training={"discount": 0.0, "num_generations": 4, "lr_scheduler_type": "linear"},
        outcome={"reward_scheme": "win", "invalid_penalty": 0.1, "repeat_penalty": 0.05},
    ),
    "guessing": Lesson(
        env_class=NumberGuessing,
        env_config={
            "highest": 100,
            "information_reward": True,
            "max_steps_per_episode": 8,
            "system_prompt": "You are playing a game.",
        },
        player=lambda env, seed: CarelessGuesser(env, seed=seed),
        num_demonstrations=160,
        imitation_steps=10,
        training_steps=30,
        learning_rate=5e-4,
        training={"discount": 0.0},  # a guess is worth what its own reply reveals
    ),
    "lake": Lesson(
        env_class=GymnasiumEnv,
        env_config={"id": "FrozenLake-v1", "make_kwargs": {"is_slippery": False}, "max_steps_per_episode": 8},
        rows={"random_maps": True, "map_size": 3},
        player=lambda env, seed: RandomPlayer(env, seed=seed),
        num_demonstrations=160,
        imitation_steps=20,
        training_steps=20,
        learning_rate=3e-4,
    ),
    "nim": Lesson(
        env_class=TextArenaEnv,
        env_config={"game": "Nim-v0", "opponent": "random", "seat": 0, "system_prompt": "You are playing a game."},
        player=lambda env, seed: LegalAgent(env, seed=seed),
        num_demonstrations=96,
        imitation_steps=12,
        training_steps=16,
        learning_rate=5e-4,
        training={"max_turn_tokens": 8},
    ),
    "prices": Lesson(
        env_class=PriceListEnv,
        env_config={"max_steps_per_episode": 4, "kinds": ["price", "sum"], "system_prompt": TOOLS_PROMPT},
        player=lambda env, seed: ShoppingPlayer(env, noise=0.3, seed=seed),
        num_demonstrations=320,
        imitation_steps=30,
        training_steps=24,
        learning_rate=3e-4,
        training={"max_turn_tokens": 64},
    ),
    "twenty_questions": Lesson(
        env_class=TwentyQuestionsEnv,
        env_config={
            "objects": list(OBJECTS),
            "properties": list(PROPERTIES),
            "max_steps_per_episode": 5,
            "reward_scheme": "win",
            "repeat_penalty": 0.05,
            "system_prompt": f"Find out which of these I am thinking of: {', '.join(OBJECTS)}.",
        },
        rows={"split": "all"},
        player=asker,
        num_demonstrations=160,
        imitation_steps=15,
        training_steps=16,
        learning_rate=3e-4,
    ),
}
