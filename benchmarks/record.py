"""Record measured figures in ``benchmarks/results/NAME.json``, from which the manual quotes them.

A fingerprint of behavior changes when what was measured changes, not when code moves. Speed has none.
"""

import contextlib
import hashlib
import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import agentsgym
from agentsgym import MultistepEnv, ScoredRollout
from agentsgym.credit.bound import BoundEstimator
from agentsgym.envs.players import random_player, reference_player

Figure = Mapping[str, float]  # ``value``, and its interval of 95 % from ``low`` to ``high``


def median(values: Sequence[float]) -> Figure:
    """Return the median of independent repetitions, between order statistics (the range, for fewer than six)."""
    ordered, count = sorted(values), len(values)
    tails = [2 * sum(math.comb(count, i) for i in range(k + 1)) / 2**count for k in range(count // 2)]
    skipped = max(0, sum(tail <= 0.05 for tail in tails) - 1)
    return {"value": statistics.median(ordered), "low": ordered[skipped], "high": ordered[-1 - skipped]}


def record(
    folder: Path,
    name: str,
    figures: Mapping[str, Figure],
    seeds: Sequence[int],
    behavior: Mapping[str, str] | None,
    **more: Any,
) -> Path:
    """Write a result, whole or not at all, with its command, commit, date and machine, and ``more``; return the file.

    With reasons in ``more["left_out"]``, there may be no figures.
    """
    if not (figures or more.get("left_out")) or not seeds:
        raise ValueError(f"the result {name!r} needs a figure and a seed, got {[*figures]} and {[*seeds]}")
    for key, figure in figures.items():
        if not figure["low"] <= figure["value"] <= figure["high"]:
            raise ValueError(f"the figure {key!r} must lie in its interval, got {dict(figure)}")
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    commit = None
    with contextlib.suppress(OSError):  # git is not installed
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None
    machine: dict[str, Any] = {one: version(one) for one in ("torch", "transformers", "trl")}
    machine |= {"agentsgym": agentsgym.__version__}  # which a copy of the repository has without being installed
    machine |= {"cores": len(os.sched_getaffinity(0)), "python": sys.version.partition(" ")[0]}
    machine |= {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}
    result = {"figures": figures, "seeds": seeds, "command": shlex.join(["python", *sys.orig_argv[1:]])}
    result |= {"commit": commit, "date": f"{datetime.now(tz=UTC):%Y-%m-%d}", "machine": machine}
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{name}.json.unfinished"
    unfinished.write_text(json.dumps(result | {"fingerprint": behavior} | more, indent=2) + "\n", encoding="utf-8")
    return unfinished.replace(folder / f"{name}.json")


def fingerprint(env: MultistepEnv, rows: Sequence[Any], recipe: Any, estimator: BoundEstimator) -> dict[str, str]:
    """Digest 32 tasks as the environment's seeded players play them, the resolved settings, and advantages."""
    has_reference = type(env).spec.reference or hasattr(env, "reference_player")
    players = [random_player, reference_player] if has_reference else [random_player]
    played = [one for player in players for one in env.rollout(rows[:32], player(env))]
    prompts = [[one["content"] for one in rollout.messages if one["role"] != "assistant"] for rollout in played]
    ends = [(one.turn_rewards, one.final_reward, one.stop_reason) for one in played]
    draw, batch = random.Random(0), list[ScoredRollout]()
    for index in range(16):
        rewards = [draw.choice((0.0, 0.5, 1.0)) for _ in range(2 + index % 3)]
        turns: dict[str, Any] = {"turn_rewards": rewards, "state_keys": [draw.randrange(3) for _ in rewards]}
        turns |= {"token_counts": [2 for _ in rewards], "values": [[draw.random()] * 2 for _ in rewards]}
        batch.append(ScoredRollout(**turns, final_reward=sum(rewards), group=index // 4))
    advantages = estimator(batch, discount=0.9, scale="group")
    return {"play": _digest([prompts, ends]), "recipe": _digest(recipe), "advantages": _digest(advantages)}


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    rounded = json.loads(text, parse_float=lambda number: f"{float(number):.9g}")  # machines differ in the last digits
    return hashlib.sha256(json.dumps(rounded).encode()).hexdigest()[:16]
