"""Notes that are trained: a waiter takes orders, hears small talk until the history is replaced by a note, and serves.

    python benchmarks/notes.py --seeds 0 1 2 3 4    # some minutes; prints a table

The warm start imitates a waiter who serves what the note contains, and writes each order down correctly seven times in
ten. The embedded policy is then trained with a reward for each guest who is served right: with credit for notes, and
with notes that are not trained on.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Hashable, Sequence
from itertools import product
from statistics import fmean
from typing import Any, ClassVar, Final, cast

from datasets import Dataset
from transformers import PrinterCallback

from agentsgym import GRPOEnvConfig, GRPOEnvTrainer, MultistepEnv, PolicyAgent, evaluate, imitate, tiny_policy
from agentsgym.agents.scripted_player import Notes, ScriptedPlayer
from agentsgym.credit.advantages import Scale, return_to_go
from agentsgym.credit.scored import ScoredRollout
from agentsgym.training.imitate import tiny_imitation_config
from agentsgym.types import TurnRequest
from benchmarks.credit_report import markdown_table
from benchmarks.named_rewards import with_interval

GUESTS: Final = ("Anna", "Ben", "Clara")
DRINKS: Final = ("tea", "coffee", "juice", "water")
TALK: Final = ("It rains.", "What a day!", "The music is nice.", "Is it late?")
PROMPT: Final = "Note the orders."


class Waiter(MultistepEnv):
    """Take the orders of all guests, hear four remarks, and serve each guest; a right drink is rewarded with 1/3."""

    default_config: ClassVar = {
        "max_steps_per_episode": 10,
        "system_prompt": "",
        "history": "summarize",
        "summarize_over_tokens": 30,
        "summary_prompt": PROMPT,
    }

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        generator = self.rng(session_id)
        orders = {guest: generator.choice(DRINKS) for guest in GUESTS}
        served = generator.sample(GUESTS, len(GUESTS))
        talk = [generator.choice(TALK) for _ in range(4)]
        lines = [*(f"{guest} orders {drink}." for guest, drink in orders.items()), *talk]
        return {
            "done": False,
            "step": 0,
            "orders": orders,
            "right": 0,
            "lines": [*lines, *(f"{one}?" for one in served)],
        }

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return state["lines"][step]

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        guest = state["lines"][state["step"]].removesuffix("?")
        is_right = action.strip() == state["orders"].get(guest)
        step, right = state["step"] + 1, state["right"] + is_right
        done = step == len(state["lines"])
        info = {"right": right / len(GUESTS), "success": right == len(GUESTS)}
        return {**state, "step": step, "right": right}, is_right / len(GUESTS), done, info

    def _state_key(self, state: dict[str, Any]) -> Hashable:
        return state["step"]  # a note is recognized by it

    def vocabulary_texts(self) -> list[str]:
        """Every text of the game."""
        orders = [f"{guest} orders {drink}." for guest in GUESTS for drink in DRINKS]
        notes = [f"Anna tea {guest} {drink}" for guest in GUESTS for drink in DRINKS]
        return [*orders, *notes, *DRINKS, *(f"{guest}?" for guest in GUESTS), *TALK, "ok", PROMPT]


class ForgetfulWaiter(ScriptedPlayer[Notes]):
    """Notes each order correctly in a fraction of cases, and serves what the note contains."""

    def __init__(self, env: Waiter, seed: int = 0, *, care: float = 0.7) -> None:
        super().__init__(env, seed)
        self._care = care

    def _begin(self, request: TurnRequest, generator: random.Random) -> Notes:
        return Notes(generator=generator)

    def _play(self, request: TurnRequest, notes: Notes) -> str:
        texts, last = [message["content"] for message in request.messages], request.messages[-1]["content"]
        orders = dict(text.removesuffix(".").split(" orders ") for text in texts if " orders " in text)
        for words in (text.split() for text in texts if len(text.split()) == 2 * len(GUESTS)):
            orders |= dict(zip(words[::2], words[1::2], strict=True))  # a note
        if last == PROMPT:
            heard = [orders.get(guest) or notes.generator.choice(DRINKS) for guest in GUESTS]
            drinks = [one if notes.generator.random() < self._care else notes.generator.choice(DRINKS) for one in heard]
            return " ".join(f"{guest} {drink}" for guest, drink in zip(GUESTS, drinks, strict=True))
        return orders.get(last.removesuffix("?"), "ok")


def learn(seed: int, num_steps: int, *, trains_notes: bool) -> dict[str, Any]:
    """Train from the warm start of a seed; return the fractions of guests served right before and after."""
    model, tokenizer = tiny_policy(Waiter(), seed=seed)
    env = Waiter(tokenizer)
    started = time.process_time()
    shown = env.rollout([{"seed": 10_000 * seed + n} for n in range(1024)], ForgetfulWaiter(env, seed))
    imitate(model, shown, tokenizer, tiny_imitation_config(800, seed=seed, disable_tqdm=True, report_to="none"))
    agent = PolicyAgent(model, tokenizer, max_turn_tokens=8, seed=seed)
    fresh = [{"seed": 1_000_000 + n} for n in range(256)]
    before = evaluate(env, agent, fresh).metrics["right"].mean
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOEnvConfig(
            output_dir=folder,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            seed=seed,
            layout="turn",
            max_steps=num_steps,
            per_device_train_batch_size=64,
            num_generations=8,
            max_turn_tokens=8,
            learning_rate=5e-4,
            lr_scheduler_type="constant",
            advantage_estimator=cast("Any", "return_to_go" if trains_notes else without_notes),
        )
        rows = cast("Any", Dataset).from_list(
            [{"task_data": {"seed": 100_000 * (seed + 1) + n}} for n in range(8 * num_steps)]
        )
        trainer = GRPOEnvTrainer(model, env, args, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    after = evaluate(env, agent, fresh)
    right = after.metrics["right"].mean
    return {
        "seed": seed,
        "trains_notes": trains_notes,
        "before": round(before, 3),
        "after": round(right, 3),
        "notes": round(after.metrics["num_notes"].mean, 2),
        "cpu_s": round(time.process_time() - started, 1),
    }


def without_notes(rollouts: Sequence[ScoredRollout], *, discount: float, scale: Scale) -> list[list[float]]:
    """Credit by returns, but none for notes."""
    advantages = return_to_go(rollouts, discount=discount, scale=scale)
    return [
        [
            0.0 if isinstance(key, tuple) and isinstance(key[1], tuple) else one
            for key, one in zip(keys, own, strict=True)
        ]
        for keys, own in zip((rollout.state_keys for rollout in rollouts), advantages, strict=True)
    ]


def main() -> None:
    """Train with and without credit for notes, print a line of JSON per run, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="default: 0 to 4")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps; default: 150")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed, trains in product(options.seeds, (True, False)):
        runs.append(learn(seed, options.steps, trains_notes=trains))
        print(json.dumps(runs[-1]), flush=True)
    rows = [
        [name, f"{fmean(run['before'] for run in own):.0%}", with_interval([run["after"] for run in own])]
        for name, trains in (("trained", True), ("not trained", False))
        for own in [[run for run in runs if run["trains_notes"] == trains]]
    ]
    print(markdown_table(["notes", "served right, warm start", "after training"], rows))


if __name__ == "__main__":
    main()
