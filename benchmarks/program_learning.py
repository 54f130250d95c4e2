"""Learn Twenty Questions through a program that calls an endpoint, beside the environment itself.

::

    python -m benchmarks.program_learning --games environment program     # from the repository's root
    python -m benchmarks.program_learning --games rounds_program
    python -m benchmarks.program_learning --ratios [runs.jsonl]

The program is an HTTP client in a loop. It plays the same tasks with the same prompts, token for token, and posts the
reward of each turn. As in :mod:`benchmarks.credit`, every arm of a seed learns from the same warm start. The arm
``return_to_go`` credits each call with the rewards from it on; ``grpo`` gives all calls of a session one number, their
sum.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from agentsgym.envs.AgentProgram import AgentProgramEnv, Endpoint
from agentsgym.envs.play import EpisodeByHand
from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS
from benchmarks.credit import GAMES as CREDIT_GAMES
from benchmarks.credit import Arm, Game, main
from benchmarks.credit_report import FRACTION, Run, read_runs
from benchmarks.credit_watched import Watched

OUT: Final = "outputs/program_learning"


class Program:
    """A client that plays the episodes of an environment, which shows it only messages."""

    def __init__(self, game: Watched) -> None:
        self._game = game

    def __call__(self, task: dict[str, Any], endpoint: Endpoint) -> tuple[float, dict[str, Any]]:
        """Play one episode, and post the reward of each turn."""
        connection = http.client.HTTPConnection(endpoint.base_url.split("/")[2])
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        [trial] = self._game.trials([task])
        episode = EpisodeByHand(trial)
        messages: list[Any] = [*episode.observation()]
        while True:
            connection.request(
                "POST", "/v1/chat/completions", json.dumps({"model": "policy", "messages": messages}), headers
            )
            answer = json.loads(connection.getresponse().read())
            text = answer["choices"][0]["message"]["content"]
            shown, reward, done, info = episode.step(text)
            endpoint.reward(reward, answer["id"])
            if done:
                connection.close()
                return 0.0, {name: info[name] for name in ("success", "score") if name in info}
            messages += [{"role": "assistant", "content": text}, *shown]


class WatchedProgram(Watched, AgentProgramEnv):
    """The program as an environment, scored as the game that it plays."""

    game: Watched

    def anchors(self) -> dict[str, float]:
        """Those of the game."""
        return self.game.anchors()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Programs(Game):
    """A game that is learned through a program, from the warm start of the game itself."""

    def make(self, tokenizer: Any = None, *, paid: str = "turns") -> Watched:
        """The environment that runs the program."""
        played = Game.make(self, paid=paid)
        env = WatchedProgram(tokenizer, {"system_prompt": ""}, program=Program(played))
        env.game, env.last_info = played, played.last_info
        return env


_TWENTY_QUESTIONS: Final = CREDIT_GAMES["twenty_questions"]
_OBJECTS: Final = DEMO_OBJECTS[:8]  # a small game, since each call takes milliseconds
_GAME: Final = replace(
    _TWENTY_QUESTIONS,
    env_config={**_TWENTY_QUESTIONS.env_config, "objects": [*_OBJECTS], "max_steps_per_episode": 5},
    secrets=_OBJECTS,
    num_demonstrations=4000,
    warm_start_steps=600,
    num_episodes=5120,
    num_updates=2,
    learning_rate=1e-3,
)
_ROUNDS: Final = replace(CREDIT_GAMES["rounds"], num_episodes=2560)


def _through_a_program(name: str, game: Game) -> Programs:
    """The same game through a program, from the warm start of the game itself."""
    given: dict[str, Any] = {one.name: getattr(game, one.name) for one in fields(game)}
    given["variant_of"] = name
    return Programs(**given)


GAMES: Final[Mapping[str, Game]] = {
    "environment": _GAME,
    "program": _through_a_program("environment", _GAME),
    "rounds": _ROUNDS,
    "rounds_program": _through_a_program("rounds", _ROUNDS),
}
_TURNS: Final = {"layout": "turn"}
ARMS: Final[Mapping[str, Arm]] = {
    "return_to_go": Arm(estimator="return_to_go", settings=_TURNS),
    "grpo": Arm(estimator="grpo", settings=_TURNS),
}


def ratios(path: Path, base: str = "grpo") -> str:
    """The episodes to 80 % of each arm over those of ``base``, medians over seeds with 95 % bootstrap intervals.

    A run that does not reach 80 % counts with all its episodes, which are fewer than it needs.
    """
    runs: defaultdict[str, dict[str, dict[int, Run]]] = defaultdict(lambda: defaultdict(dict))
    for run in read_runs(path):
        runs[run.game][run.arm][run.seed] = run
    lines = [
        f"| world | arm | seeds | reached | episodes to 80 % | ratio to `{base}` | mean of the curve | final |",
        "| --- " * 8 + "|",
    ]
    for (game, arms), arm in ((one, arm) for one in runs.items() for arm in one[1]):
        pairs = [(arms[arm][seed], arms[base][seed]) for seed in sorted(arms[arm].keys() & arms[base].keys())]
        needed = [(_episodes(one), _episodes(other)) for one, other in pairs]
        generator = random.Random(0)
        draws = sorted(_ratio(generator.choices(needed, k=len(needed))) for _ in range(4000))
        reached = sum(math.isfinite(one.episodes_to(FRACTION)) for one, _ in pairs)
        curve = fmean(fmean(one.scores) for one, _ in pairs)
        final = median(one.final_fraction for one, _ in pairs)
        lines.append(
            f"| {game} | `{arm}` | {len(pairs)} | {reached} | {median(mine for mine, _ in needed):,.0f} "
            f"| {_ratio(needed):.2f} [{draws[100]:.2f}, {draws[-101]:.2f}] | {curve:.0%} | {final:.0%} |"
        )
    return "\n".join(lines)


def _episodes(run: Run) -> float:
    return min(run.episodes_to(FRACTION), run.num_episodes)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    mine, theirs = (median(column) for column in zip(*pairs, strict=True))
    return mine / theirs


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ratios"]:
        print(ratios(Path(sys.argv[2] if len(sys.argv) > 2 else f"{OUT}/runs.jsonl")))
    else:
        main(GAMES, [*ARMS], OUT, ARMS)
