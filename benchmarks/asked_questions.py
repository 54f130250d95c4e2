"""What a language model asks in Twenty Questions, and how much of it the built-in gamemaster understands.

::

    python benchmarks/asked_questions.py --model smollm2 --output asked.jsonl    # from the repository's root
    python benchmarks/asked_questions.py --labels asked.csv

The first command plays games with the model, prints how its turns were understood, and writes each question with the
property that it was understood as. A person or another model then labels a table of these (columns ``question``,
``understood`` and ``label``, where a label is a property, ``!`` before a negated one, ``several``, ``guess``, or
``none``), and the second command reports the fractions that are understood and wrong.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from trl import ModelConfig

from agentsgym import PolicyAgent
from agentsgym.agents.policy.loading import is_slow_in_bfloat16
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.envs.TwentyQuestions.gamemaster import load_language, load_reader
from agentsgym.envs.TwentyQuestions.knowledge import load_knowledge
from agentsgym.envs.TwentyQuestions.parsing import Fault, Guess
from agentsgym.recipes.scripts import load_policy, quiet_logging


def understood_as(text: str) -> str:
    """Return what an action is understood as: a property, ``!`` before a negated one, or why it is none."""
    move = load_reader().parse(text)
    if isinstance(move, Fault):
        return move.name.lower()
    if isinstance(move, Guess):
        return "guess"
    meaning = load_language().understand(move.text)
    return "unknown" if meaning is None else "!" * meaning.opposite + meaning.key


def asked(model: str, num_games: int, seed: int) -> list[dict[str, Any]]:
    """Play games with a model, and return every action with what it was understood as."""
    dtype = "float32" if is_slow_in_bfloat16() else "bfloat16"
    policy, tokenizer = load_policy(model, ModelConfig(dtype=dtype))
    env = TwentyQuestionsEnv(tokenizer, {"max_steps_per_episode": 10, "error_allowance": 10})
    rows: Any = env.get_train_dataset(env.env_config, size=num_games, seed=seed)
    agent = PolicyAgent(policy, tokenizer, max_turn_tokens=40)
    turns: list[dict[str, Any]] = []
    for game in env.rollout(rows["task_data"], agent, max_concurrent=16):
        for turn in game.turns:
            text = game.messages[turn.message_index]["content"]
            turns.append({"secret": game.task_data["solution"], "question": text, "understood": understood_as(text)})
    return turns


def report(labeled: Path) -> str:
    """Compare labels with what was understood."""
    with labeled.open(newline="", encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    properties = load_knowledge().properties
    keys = {*properties, *(f"!{key}" for key in properties)}
    known = [row for row in rows if row["label"] in keys]
    right = sum(understood_as(row["question"]) == row["label"] for row in known)
    wrong = [row for row in rows if (now := understood_as(row["question"])) in keys and now != row["label"]]
    lines = [f"{len(rows)} questions, {len(known)} about a property", f"understood: {right / max(len(known), 1):.1%}"]
    lines += [f"wrong: {len(wrong) / len(rows):.1%}", *(f"  {row['question']!r}: {row['label']}" for row in wrong)]
    return "\n".join(lines)


def main() -> None:
    """Play, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="name or path")
    parser.add_argument("--games", type=int, default=100, help="games of 10 turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/asked.jsonl"))
    parser.add_argument("--labels", type=Path, help="a labeled table: report on it, and play nothing")
    options = parser.parse_args()
    if options.labels:
        print(report(options.labels))
        return
    quiet_logging()
    torch.set_num_threads(2)
    turns = asked(options.model, options.games, options.seed)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("".join(json.dumps(turn) + "\n" for turn in turns), encoding="utf-8")
    special = ("unknown", "guess", *(fault.name.lower() for fault in Fault))
    counts = Counter(turn["understood"] if turn["understood"] in special else "a property" for turn in turns)
    print(
        f"{len(turns)} turns: " + ", ".join(f"{kind} {count / len(turns):.1%}" for kind, count in counts.most_common())
    )


if __name__ == "__main__":
    main()
