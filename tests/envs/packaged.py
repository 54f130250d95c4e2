"""Every packaged environment in the configurations that people use, for tests that hold for all of them.

Worker processes import it by this name.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from tool_game import add

from agentsgym.agents.base import Agent
from agentsgym.agents.exploring import random_call, random_phrase
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.Gymnasium import GymnasiumEnv
from agentsgym.envs.PriceList import PriceListEnv
from agentsgym.envs.ReasoningEvals import ReasoningEvalsEnv
from agentsgym.envs.Search import SearchEnv
from agentsgym.envs.Terminal import TerminalEnv
from agentsgym.envs.TextArena import TextArenaEnv
from agentsgym.envs.Tools import ToolEnv, register_tools
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.seeding import derive_seed
from agentsgym.types import Action, TurnRequest

Tasks = list[dict[str, Any]]


def spell(word: str) -> list[str]:
    """Spell a word.

    Args:
        word: The word.
    """
    if not word.isascii():
        raise ValueError("only ASCII letters are spelled")
    return [letter.upper() for letter in word]


register_tools("packaged tests", [add, spell])

QUESTIONS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(1, 11)]
_WORLD = {"num_people": 12, "num_firms": 4, "num_towns": 4, "num_rivers": 3, "num_seas": 2}
_GAMES = ("FrozenLake-v1", "Taxi-v4", "CliffWalking-v1", "Blackjack-v1")


def _rows(env_class: type[MultistepEnv], config: dict[str, Any], **options: Any) -> Tasks:
    return [dict(row["task_data"]) for row in env_class.get_train_dataset(config, **{"size": 6, **options})]


def _seeds() -> Tasks:
    return [{"seed": seed} for seed in range(6)]


def _search(form: str) -> Any:
    config = {"format": form, "world": _WORLD}
    return SearchEnv, config, lambda: _rows(SearchEnv, config)


def _text_arena(**config: Any) -> Any:
    return TextArenaEnv, {"max_steps_per_episode": 8, **config}, _seeds


# name: class, configuration, tasks
PACKAGED: dict[str, tuple[type[MultistepEnv], dict[str, Any], Callable[[], Tasks]]] = {
    "TwentyQuestions": (TwentyQuestionsEnv, {}, lambda: _rows(TwentyQuestionsEnv, {})),
    "ToolEnv": (ToolEnv, {"tools": "packaged tests", "submit_tool": "submit"}, lambda: [*QUESTIONS[:6]]),
    "PriceList": (PriceListEnv, {}, lambda: _rows(PriceListEnv, {})),
    "Search, tools": _search("tools"),
    "Search, tags": _search("tags"),
    "ReasoningEvals, rows": (
        ReasoningEvalsEnv,
        {"max_attempts": 3, "extractor": "number"},
        lambda: _rows(ReasoningEvalsEnv, {}, data=QUESTIONS),
    ),
    "ReasoningEvals, reasoning-gym": (
        ReasoningEvalsEnv,
        {"max_attempts": 2},
        lambda: _rows(ReasoningEvalsEnv, {}, task=["chain_sum", "leg_counting"]),
    ),
    **{game: (GymnasiumEnv, {"id": game, "max_steps_per_episode": 8}, _seeds) for game in _GAMES},
    "Terminal": (
        TerminalEnv,
        {"max_steps_per_episode": 4},
        lambda: _rows(TerminalEnv, {}, families=["rename", "find", "archive", "totals", "top", "fix"], level=1),
    ),
    "TextArena, one player": _text_arena(game="GuessTheNumber-v0"),
    "TextArena, words": _text_arena(game="Wordle-v0"),
    "TextArena, two players": _text_arena(game="TicTacToe-v0", opponent="random"),
    "TextArena, self-play": _text_arena(game="TicTacToe-v0", opponent="self"),
    "TextArena, self-play with hidden cards": _text_arena(game="KuhnPoker-v0", opponent="self"),
}

# Those whose engines are not at hand here: tests/with_worlds checks the same of them.
OF_ENGINES = {
    "agentsgym.envs.ALFWorld.ALFWorldEnv",
    "agentsgym.envs.ScienceWorld.ScienceWorldEnv",
    "agentsgym.envs.TextWorld.TextWorldEnv",
}
OF_SERVERS = {
    "agentsgym.envs.OpenEnv.OpenEnvEnv",  # needs one; tests/envs/openenv
    "agentsgym.envs.AgentProgram.AgentProgramEnv",  # needs a program; tests/envs/test_agent_program.py
}


def packaged(name: str, tokenizer: Any = None) -> MultistepEnv:
    """The environment of one configuration."""
    env_class, config, _ = PACKAGED[name]
    return env_class(tokenizer, config)


def packaged_tasks(name: str) -> Tasks:
    """Six of its tasks, each with a seed."""
    return [{"seed": index, **task} for index, task in enumerate(PACKAGED[name][2]())]


class Listener(Agent):
    """Calls tools and answers words as ``ExploringAgent`` does, but each answer follows from its conversation alone."""

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        """Answer each session."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: TurnRequest) -> Action:
        output = [message["content"] for message in request.messages]
        stream = random.Random(derive_seed("listener", *output))
        if request.tools and stream.random() < 0.8:
            call = random_call(stream.choice(list(request.tools)), output[-1], stream)
            return Action(text="", tool_calls=(call,))
        if "Twenty Questions" in output[0]:
            return Action(text=stream.choice(["Is it alive?", "Is it a clock?", "Hm."]))
        return Action(text=random_phrase(output[-1], stream))
