"""Two rewards per turn in training: when it helps to normalize each of them first, and when it harms.

    python benchmarks/named_rewards.py --seeds 0 1 2 3 4 --plot curves.png    # three minutes; prints a table
    python benchmarks/named_rewards.py --cost                                  # what names cost, compared with a number

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
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, ClassVar, Final, cast

from datasets import Dataset
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
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
from agentsgym.training import tiny_imitation_config
from benchmarks.credit_report import markdown_table

# pyright: reportUnknownMemberType=false
# Matplotlib has incomplete types.

PLACES: Final = ("north", "south", "east", "west")
AGGREGATIONS: Final = ("sum_then_normalize", "normalize_then_sum")
NUM_TURNS: Final = 4
LONG: Final = ("steps", "curves")  # not printed
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
    """Train from the warm start of a seed; return the scores of fresh episodes before and after, and in training."""
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
    logged = [entry for entry in trainer.state.log_history if f"info/{scores[0]}" in entry]
    return {
        "game": game,
        "aggregation": aggregation,
        "seed": seed,
        "cpu_s": round(time.process_time() - started, 1),
        "scores": found,
        "steps": [entry["step"] for entry in logged],
        "curves": {name: [round(entry[f"info/{name}"], 3) for entry in logged] for name in scores},
    }


class PlainRoutes(Routes):
    """The same rewards as plain numbers."""

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        state, rewards, done, info = super()._step_episode(session_id, state, action)
        return state, sum(rewards.values()), done, info


def cost(num_repeats: int = 30) -> dict[str, tuple[float, float]]:
    """Measure 256 episodes with plain and with named rewards, which take turns.

    Returns:
        For an agent that answers at once, and for the embedded policy: the median CPU time of a turn with plain
        rewards in µs, and the median ratio of named to plain.
    """
    model, tokenizer = tiny_policy(Routes())
    agents = {
        "instant": RandomAgent(Routes.actions, seed=0),
        "embedded policy": PolicyAgent(model, tokenizer, max_turn_tokens=2),
    }
    found: dict[str, tuple[float, float]] = {}
    for name, agent in agents.items():
        pairs: list[list[float]] = []
        for _ in range(num_repeats):
            times: list[float] = []
            for env in (PlainRoutes(tokenizer), Routes(tokenizer)):
                started = time.process_time()
                played = env.rollout([{"seed": n} for n in range(256)], agent)
                times.append((time.process_time() - started) / sum(len(one.turns) for one in played))
            pairs.append(times)
        ratio = median(named / plain for plain, named in pairs)
        found[name] = round(1e6 * median(plain for plain, _ in pairs), 1), round(ratio, 3)
    return found


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Draw a table of the mean over seeds, before and after training, with 95 % intervals."""
    rows: list[list[str]] = []
    for game, (_, scores) in GAMES.items():
        for name in scores:
            row = [game, name]
            for aggregation in AGGREGATIONS:
                own = [run["scores"][name] for run in runs if (run["game"], run["aggregation"]) == (game, aggregation)]
                if own:
                    row.append(with_interval([after for _, after in own]))
                    row[2:2] = [f"{fmean(before for before, _ in own):.0%}"] if len(row) == 3 else []
            rows.append(row)
    return markdown_table(["game", "right", "warm start", *(f"`{name}`" for name in AGGREGATIONS)], rows)


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a panel per score: the fraction of right actions in training, mean over seeds with 95 % intervals."""
    panels = [(game, name) for game, (_, scores) in GAMES.items() for name in scores]
    figure = Figure(figsize=(10, 3), layout="constrained", dpi=110)
    for axes, (game, name) in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
        for aggregation in AGGREGATIONS:
            own = [run for run in runs if (run["game"], run["aggregation"]) == (game, aggregation)]
            bands = [_interval(values) for values in zip(*(run["curves"][name] for run in own), strict=True)]
            low, mean, high = zip(*bands, strict=True)
            axes.plot(own[0]["steps"], mean, label=aggregation)
            axes.fill_between(own[0]["steps"], low, high, alpha=0.2)
        axes.set(title=f"{game}: {name}", xlabel="optimizer steps", ylim=(0, 1.02))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.grid(alpha=0.3)
    figure.axes[0].legend(loc="lower right", fontsize="small")
    figure.savefig(path, format="png")


def _interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of a fraction over seeds, between the bounds of its 95 % interval."""
    mean, count = fmean(values), len(values)
    if not 1 < count <= len(T_QUANTILES) + 1:
        return mean, mean, mean
    reach = T_QUANTILES[count - 2] * stdev(values) / math.sqrt(count)
    return max(0.0, mean - reach), mean, min(1.0, mean + reach)


def with_interval(values: Sequence[float]) -> str:
    """Write the mean of a fraction over seeds with its 95 % interval."""
    low, mean, high = _interval(values)
    return f"{mean:.0%} [{low:.0%}, {high:.0%}]" if len(values) > 1 else f"{mean:.0%}"


def main() -> None:
    """Train every game with both settings, print a line of JSON per run, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="default: 0 to 4")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps; default: 150")
    parser.add_argument("--plot", type=Path, help="draw the curves into this file")
    parser.add_argument("--cost", action="store_true", help="only measure what names cost")
    options = parser.parse_args()
    if options.cost:
        print(json.dumps(cost()))
        return
    runs: list[dict[str, Any]] = []
    for seed in options.seeds:
        for game in GAMES:
            for aggregation in AGGREGATIONS:
                runs.append(learn(game, aggregation, seed, options.steps))
                print(json.dumps({key: value for key, value in runs[-1].items() if key not in LONG}), flush=True)
    print(table(runs))
    if options.plot:
        draw(runs, options.plot)


if __name__ == "__main__":
    main()
