"""Measure many turns with a transformers model: the policy agent, beside ``generate`` on the whole history each turn.

The second is the loop that is written today: pad the histories on the left, generate, decode, append the observations.
Both answer greedily on a randomly initialized model in float32, and their tokens are compared. Observations differ in
length from episode to episode; answers are as long as the budget, since nothing ends them early. Times are CPU
seconds, the loops taking turns, medians over repetitions; one run of many turns also shows the cost of fewer.
Long episodes are played by the agent alone, and set beside the bare model: the same tokens run in one chunk and then
one by one on a static cache that holds as much, all rows of equal length, with neither loop nor sampling around it.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM, StaticCache

from agentsgym import Action, PolicyAgent, TurnRequest
from agentsgym.agents.policy.sampling import SamplingParams
from agentsgym.testing import chat_tokenizer

ANSWER_TOKENS = 8
OBSERVATION_TOKENS = (24, 38)  # fewest and most
MARKS = (1, 16, 32, 64)  # turns at which the bare model is timed


class Shape(NamedTuple):
    """The size of a model."""

    hidden_size: int
    num_layers: int


class Size(NamedTuple):
    """What is measured: a model, how much is played, and how often."""

    shape: Shape
    num_episodes: int
    num_turns: int
    num_repeats: int


class Plan(NamedTuple):
    """The comparisons, and the long episodes that the agent plays alone."""

    compared: tuple[Size, ...]
    long: tuple[Size, ...]


SMALL, LARGE = Shape(128, 2), Shape(512, 8)
FULL = Plan((Size(SMALL, 32, 32, 3), Size(LARGE, 16, 16, 2)), (Size(SMALL, 32, 64, 3), Size(SMALL, 4, 64, 3)))
QUICK = Plan((Size(Shape(32, 1), 3, 4, 1),), (Size(Shape(32, 1), 2, 16, 1),))


class Policy(NamedTuple):
    """A model and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


class Run(NamedTuple):
    """What one loop did: the histories of all episodes, and the CPU seconds that each turn took."""

    histories: list[list[int]]
    seconds: list[float]


Loop = Callable[[Policy, list[list[list[int]]]], Run]


def make_policy(shape: Shape) -> Policy:
    """A random model whose wide initialization makes answers depend on the context, and that never ends a turn."""
    tokenizer = chat_tokenizer("chatml")
    torch.random.default_generator.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=shape.hidden_size,
            intermediate_size=2 * shape.hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.hidden_size // 32,
            num_key_value_heads=shape.hidden_size // 64 or 1,
            head_dim=32,
            max_position_embeddings=8192,
            initializer_range=0.1,
        )
    )
    config: Any = model.generation_config
    config.eos_token_id, config.pad_token_id = None, tokenizer.pad_token_id
    return Policy(model.eval(), tokenizer)


def make_observations(size: Size) -> list[list[list[int]]]:
    """The ids that each turn adds to each episode."""
    draw = random.Random(0)
    low, high = OBSERVATION_TOKENS
    return [
        [[draw.randrange(16, 256) for _ in range(draw.randint(low, high))] for _ in range(size.num_episodes)]
        for _ in range(size.num_turns)
    ]


def timed(turns: list[list[list[int]]], answer: Callable[[list[list[int]]], list[list[int]]]) -> Run:
    """Play all turns, ``answer`` giving the ids that follow each history."""
    histories: list[list[int]] = [[] for _ in turns[0]]
    seconds: list[float] = []
    gc.collect()
    for observations in turns:
        start = time.process_time()
        for history, observation in zip(histories, observations, strict=True):
            history.extend(observation)
        for history, ids in zip(histories, answer(histories), strict=True):
            history.extend(ids)
        seconds.append(time.process_time() - start)
    return Run(histories, seconds)


def generate_each_turn(policy: Policy, turns: list[list[list[int]]]) -> Run:
    """The loop of today."""
    model: Any = policy.model
    tokenizer: Any = policy.tokenizer
    pad: int = tokenizer.pad_token_id

    def answer(histories: list[list[int]]) -> list[list[int]]:
        width = max(map(len, histories))
        ids = torch.tensor([[pad] * (width - len(history)) + history for history in histories])
        mask = torch.tensor([[0] * (width - len(history)) + [1] * len(history) for history in histories])
        output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=ANSWER_TOKENS)
        answers = output[:, width:].tolist()
        tokenizer.batch_decode(answers, skip_special_tokens=True)  # for the game to read
        return answers

    return timed(turns, answer)


def act_each_turn(policy: Policy, turns: list[list[list[int]]]) -> Run:
    """The agent."""
    agent = PolicyAgent(*policy, sampling=SamplingParams(temperature=0), max_turn_tokens=ANSWER_TOKENS)
    agent.stop_token_ids = frozenset()
    states: list[Any] = [None] * len(turns[0])

    def answer(histories: list[list[int]]) -> list[list[int]]:
        requests = [
            TurnRequest(session_id=str(number), messages=[], token_ids=history, agent_state=state)
            for number, (history, state) in enumerate(zip(histories, states, strict=True))
        ]
        actions = cast("list[Action]", agent.act(requests))  # no history is too long here
        states[:] = [action.agent_state for action in actions]
        return [list(action.token_ids or ()) for action in actions]

    return timed(turns, answer)


def compare(size: Size) -> dict[str, Any]:
    """Both loops, in turn; ratios are medians over neighboring runs, which noise hits alike."""
    policy, turns = make_policy(size.shape), make_observations(size)
    for loop in (generate_each_turn, act_each_turn):
        loop(policy, turns[:2])  # what is set up once
    rounds = [(generate_each_turn(policy, turns), act_each_turn(policy, turns)) for _ in range(size.num_repeats)]
    counts = [count for count in (4, 8, 16, 32) if count < size.num_turns] + [size.num_turns]
    return {
        **size.shape._asdict(),
        "num_episodes": size.num_episodes,
        "num_turns": size.num_turns,
        "num_repeats": size.num_repeats,
        "greedy_identical": all(today.histories == own.histories for today, own in rounds),
        "generate_s": round(statistics.median(sum(today.seconds) for today, _ in rounds), 3),
        "agent_s": round(statistics.median(sum(own.seconds) for _, own in rounds), 3),
        "ratio": ratio(rounds, size.num_turns),
        "ratio_by_turns": {str(count): ratio(rounds, count) for count in counts},
    }


def ratio(rounds: list[tuple[Run, Run]], num_turns: int) -> float:
    """How many times the agent's CPU time ``generate`` takes for that many turns."""
    ratios = [sum(today.seconds[:num_turns]) / sum(own.seconds[:num_turns]) for today, own in rounds]
    return round(statistics.median(ratios), 2)


def measure_long(size: Size) -> dict[str, Any]:
    """Measure tokens per second of the agent in each turn of long episodes, and of the bare model in some."""
    policy, turns = make_policy(size.shape), make_observations(size)
    act_each_turn(policy, turns[:2])
    runs = [act_each_turn(policy, turns).seconds for _ in range(size.num_repeats)]
    seconds = [statistics.median(times) for times in zip(*runs, strict=True)]
    num_tokens = size.num_episodes * ANSWER_TOKENS
    return {
        **size.shape._asdict(),
        "num_episodes": size.num_episodes,
        "num_turns": size.num_turns,
        "num_repeats": size.num_repeats,
        "tokens_a_second": [round(num_tokens / turn) for turn in seconds],
        "bare_by_turn": {
            str(turn): bare_row(policy, size, turn, num_tokens / seconds[turn - 1])
            for turn in MARKS
            if turn <= size.num_turns
        },
    }


def bare_row(policy: Policy, size: Size, turn: int, tokens_a_second: float) -> dict[str, Any]:
    """How fast the bare model is at the context of a turn, and the agent's rate as a share of that."""
    width = sum(OBSERVATION_TOKENS) // 2
    context = (turn - 1) * (width + ANSWER_TOKENS)
    runs = [bare_turn(policy.model, size.num_episodes, context, width) for _ in range(size.num_repeats + 1)]
    chunk, decoding = (statistics.median(times) for times in zip(*runs[1:], strict=True))
    bare = size.num_episodes * ANSWER_TOKENS / (chunk + decoding)
    return {
        "context_tokens": context,
        "chunk_ms": round(1000 * chunk, 2),
        "token_ms": round(1000 * decoding / (ANSWER_TOKENS - 1), 2),
        "tokens_a_second": round(bare),
        "share_of_bare": round(tokens_a_second / bare, 2),
    }


@torch.no_grad()
def bare_turn(model: Any, num_rows: int, context: int, width: int) -> tuple[float, float]:
    """CPU seconds of the passes of one turn: that over ``width`` new tokens, and those over one token each, together.

    What the cache holds of the context is made up: it costs the same.
    """
    config = model.config
    cache: Any = StaticCache(config, max_cache_len=context + width + ANSWER_TOKENS - 1)
    for layer in range(config.num_hidden_layers if context else 0):
        keys, values = torch.randn(2, num_rows, config.num_key_value_heads, context, config.head_dim)
        cache.update(keys, values, layer)
    seconds: list[float] = []
    for count in [width] + [1] * (ANSWER_TOKENS - 1):
        ids = torch.full((num_rows, count), 65)
        start = time.process_time()
        model(ids, past_key_values=cache, logits_to_keep=1)
        seconds.append(time.process_time() - start)
    return seconds[0], sum(seconds[1:])


def measure(plan: Plan) -> dict[str, Any]:
    """Everything, as one JSON object."""
    compared = [compare(size) for size in plan.compared]
    return {
        "answer_tokens": ANSWER_TOKENS,
        "observation_tokens": OBSERVATION_TOKENS,
        "num_threads": torch.get_num_threads(),
        "greedy_identical": all(row["greedy_identical"] for row in compared),
        "compared": compared,
        "long": [measure_long(size) for size in plan.long],
    }


def table(result: dict[str, Any]) -> str:
    """What a person reads."""
    lines = ["hidden x layers   episodes x turns   generate s   agent s   ratio   ratio by turns"]
    for row in result["compared"]:
        by_turns = ", ".join(f"{turns}: {value}" for turns, value in row["ratio_by_turns"].items())
        lines.append(
            f"{row['hidden_size']:6} x {row['num_layers']:<6} {row['num_episodes']:10} x {row['num_turns']:<5}"
            f" {row['generate_s']:12} {row['agent_s']:9} {row['ratio']:7}   {by_turns}"
        )
    lines.append("episodes   turn   the agent's tokens/s   the bare model's   share")
    for row in result["long"]:
        for turn, bare in row["bare_by_turn"].items():
            rate = row["tokens_a_second"][int(turn) - 1]
            lines.append(
                f"{row['num_episodes']:8} {turn:>6} {rate:22} {bare['tokens_a_second']:18} {bare['share_of_bare']:7}"
            )
    lines.append(f"greedy tokens are {'identical' if result['greedy_identical'] else 'NOT identical'}")
    return "\n".join(lines)


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a tiny model and a few turns, to see that it runs")
    options = parser.parse_args()
    result = measure(QUICK if options.quick else FULL)
    print(json.dumps(result) if options.json else table(result))


if __name__ == "__main__":
    main()
