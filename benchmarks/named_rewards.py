"""Two rewards per turn in training: when it helps to normalize each of them first, and when it harms.

    python benchmarks/named_rewards.py --seeds 0 1 2 3 4    # three minutes; prints a table

Both games last four turns, and the embedded policy learns them from a warm start by imitation of random play.

* ``parcels``: bring a parcel north, south, east or west, and handle it gently if it is fragile. The right address
  brings 20 more as a tip, but tips vary by 100 without a reason; handling it right is rewarded with 1.
* ``routes``: the sure road arrives with a probability of 0.7, which is rewarded with 1, the short road with 0.5; taking
  the short road is rewarded with 0.02.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Hashable, Sequence
from statistics import fmean, stdev
from typing import Any, ClassVar, Final, cast

from datasets import Dataset
from transformers import PrinterCallback

from agentsgym import (
    GRPOEnvConfig,
    GRPOEnvTrainer,
    MultistepEnv,
    PolicyAgent,
    RandomAgent,
    evaluate,
    imitate,
    tiny_policy,
)
from agentsgym.training.imitate import tiny_imitation_config
from benchmarks.credit_report import markdown_table

PLACES: Final = ("north", "south", "east", "west")
AGGREGATIONS: Final = ("sum_then_normalize", "normalize_then_sum")
NUM_TURNS: Final = 4
T_QUANTILES: Final = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # 97.5 %, of 2 to 10 seeds

Answer = tuple[dict[str, Any], dict[str, float], bool, dict[str, Any]]


class Parcels(MultistepEnv):
    """Deliver parcels; ``info["address"]`` and ``info["handling"]`` are the fractions that were right."""

    default_config: ClassVar = {"max_steps_per_episode": NUM_TURNS, "system_prompt": ""}
    actions = tuple(f"{place} {manner}" for place in PLACES for manner in ("gently", "fast"))

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "step": 0, "address": 0, "handling": 0, **self._parcel(session_id)}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return f"{state['place']}, {'fragile' if state['fragile'] else 'sturdy'}"

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Answer:
        place, _, manner = action.partition(" ")
        is_address = place == state["place"]
        is_handled = manner == ("gently" if state["fragile"] else "fast")
        step = state["step"] + 1
        counts = {"address": state["address"] + is_address, "handling": state["handling"] + is_handled}
        rewards = {"tip": 100 * self.rng(session_id).random() + 20 * is_address, "handling": float(is_handled)}
        info = {name: count / step for name, count in counts.items()} | {"invalid": action not in self.actions}
        return {**state, "step": step, **counts, **self._parcel(session_id)}, rewards, step == NUM_TURNS, info

    def _state_key(self, state: dict[str, Any]) -> Hashable:
        return state["place"], state["fragile"]

    def vocabulary_texts(self) -> list[str]:
        """Every text of the game."""
        return [*(f"{place}, {kind}" for place in PLACES for kind in ("fragile", "sturdy")), *self.actions]

    def _parcel(self, session_id: str) -> dict[str, Any]:
        generator = self.rng(session_id)
        return {"place": generator.choice(PLACES), "fragile": generator.random() < 0.5}


class Routes(MultistepEnv):
    """Choose a road; ``info["sure"]`` is the fraction of sure roads, which is also what the sum rewards most."""

    default_config: ClassVar = {"max_steps_per_episode": NUM_TURNS, "system_prompt": ""}
    actions = ("sure", "short")

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "step": 0, "sure": 0}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return f"Crossing {step}"

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Answer:
        is_sure, step = action == "sure", state["step"] + 1
        arrives = self.rng(session_id).random() < (0.7 if is_sure else 0.5)
        rewards = {"arrived": float(arrives), "short": 0.02 * (action == "short")}
        sure = state["sure"] + is_sure
        info = {"sure": sure / step, "invalid": action not in self.actions}
        return {**state, "step": step, "sure": sure}, rewards, step == NUM_TURNS, info

    def vocabulary_texts(self) -> list[str]:
        """Every text of the game."""
        return [*(f"Crossing {step}" for step in range(NUM_TURNS)), *self.actions]


GAMES: Final = {"parcels": (Parcels, ("address", "handling")), "routes": (Routes, ("sure",))}


def learn(game: str, aggregation: str, seed: int, num_steps: int) -> dict[str, Any]:
    """Train from the warm start of a seed; return the scores of fresh episodes before and after."""
    env_class, scores = GAMES[game]
    model, tokenizer = tiny_policy(env_class(), hidden_size=32, seed=seed)
    env = env_class(tokenizer)
    started = time.process_time()
    shown = env.rollout([{"seed": 10_000 * seed + n} for n in range(256)], RandomAgent(env_class.actions, seed=seed))
    imitate(model, shown, tokenizer, tiny_imitation_config(100, seed=seed, disable_tqdm=True))
    agent = PolicyAgent(model, tokenizer, max_turn_tokens=4, seed=seed)
    fresh = [{"seed": 1_000_000 + n} for n in range(256)]
    before = evaluate(env, agent, fresh).metrics
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOEnvConfig(
            output_dir=folder,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            seed=seed,
            max_steps=num_steps,
            per_device_train_batch_size=32,
            num_generations=8,
            max_turn_tokens=4,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            discount=0.0,  # a turn does not affect the next
            scale_rewards="batch",  # in a group of equal arrivals, the group scale would make the short road large, too
            multi_objective_aggregation=aggregation,
        )
        rows = cast("Any", Dataset).from_list(
            [{"task_data": {"seed": 100_000 * (seed + 1) + n}} for n in range(4 * num_steps)]
        )
        trainer = GRPOEnvTrainer(model, env, args, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    after = evaluate(env, agent, fresh).metrics
    found = {name: (round(before[name].mean, 3), round(after[name].mean, 3)) for name in scores}
    cpu_s = round(time.process_time() - started, 1)
    return {"game": game, "aggregation": aggregation, "seed": seed, "cpu_s": cpu_s, "scores": found}


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Draw a table of the mean over seeds, before and after training, with 95 % intervals."""
    rows: list[list[str]] = []
    for game, (_, scores) in GAMES.items():
        for name in scores:
            row = [game, name]
            for aggregation in AGGREGATIONS:
                own = [run["scores"][name] for run in runs if (run["game"], run["aggregation"]) == (game, aggregation)]
                if own:
                    row.append(_with_interval([after for _, after in own]))
                    row[2:2] = [f"{fmean(before for before, _ in own):.0%}"] if len(row) == 3 else []
            rows.append(row)
    return markdown_table(["game", "right", "warm start", *(f"`{name}`" for name in AGGREGATIONS)], rows)


def _with_interval(values: Sequence[float]) -> str:
    mean, count = fmean(values), len(values)
    if not 1 < count <= len(T_QUANTILES) + 1:
        return f"{mean:.0%}"
    reach = T_QUANTILES[count - 2] * stdev(values) / math.sqrt(count)
    return f"{mean:.0%} [{max(0.0, mean - reach):.0%}, {min(1.0, mean + reach):.0%}]"


def main() -> None:
    """Train every game with both settings, print a line of JSON per run, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="default: 0 to 4")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps; default: 150")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in options.seeds:
        for game in GAMES:
            for aggregation in AGGREGATIONS:
                runs.append(learn(game, aggregation, seed, options.steps))
                print(json.dumps(runs[-1]), flush=True)
    print(table(runs))


if __name__ == "__main__":
    main()
