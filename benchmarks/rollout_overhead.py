"""Measure the loop itself: ``rollout`` with a scripted agent, beside a bare hand-written loop with the same record.

The agent answers in batches, the environment runs on the calling thread; then the same with an agent that answers with
coroutines, with the environment in a thread pool, and with it in a process pool (its processes' time included).

Both encode every observation once and come to the same record: ids, mask, log-probabilities and rewards. The bare loop
decodes every reply; the agent of ``rollout`` has its text. The bare loop has no environment, agent, faults, budgets or
messages, and knows the template's ids by heart. Times are CPU seconds, the two loops taking turns, medians over
repetitions.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentsgym import Action, Agent, MultistepEnv, Trajectory, TurnRequest
from agentsgym.agents.base import AsyncAgent
from agentsgym.rollouts.process_pool import EnvProcessPool
from agentsgym.rollouts.scheduler import Pool
from agentsgym.rollouts.thread_pool import EnvThreadPool

RESULTS = Path(__file__).parent / "results"
VOCABULARY_SIZE = 32_000
REPLY_TOKENS = 32
OBSERVATION_TOKENS = 2
NUM_WORKERS = 2
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Size(NamedTuple):
    """How much is played."""

    num_episodes: int
    num_turns: int


class Plan(NamedTuple):
    """What is measured: the loop, longer episodes, many episodes at once, a crowd of them, and memory."""

    num_repeats: int
    loop: Size
    long: Size
    concurrent: Size
    crowd: tuple[Size, Size]
    memory: tuple[Size, Size]


FULL = Plan(
    9, Size(256, 16), Size(32, 128), Size(1024, 16), (Size(256, 32), Size(4096, 32)), (Size(32, 16), Size(32, 128))
)
QUICK = Plan(1, Size(8, 4), Size(2, 16), Size(64, 2), (Size(8, 2), Size(128, 2)), (Size(4, 4), Size(4, 16)))


class Record(NamedTuple):
    """What the bare loop keeps of an episode, one entry a token each."""

    token_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    rewards: list[float]


class Reply(NamedTuple):
    """The answer of the scripted policy in one turn."""

    text: str
    token_ids: list[int]
    logprobs: list[float]


class Script(NamedTuple):
    """The tokenizer and the text of each turn: the same in every episode, different in every turn."""

    tokenizer: PreTrainedTokenizerFast
    observations: list[str]
    replies: list[Reply]


class Game(MultistepEnv):
    """Returns the script's observations, and reward 1 for each turn."""

    def __init__(self, script: Script, num_turns: int) -> None:
        super().__init__(script.tokenizer, {"max_steps_per_episode": num_turns})  # pyright: ignore[reportArgumentType]  # a subclass
        self.observations = script.observations

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return self.observations[step]

    def _step_episode(
        self, session_id: str, state: dict[str, Any], action: str
    ) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        return state, 1.0, False, {}


class Policy(Agent):
    """Answers at once with the script's texts and ids; its state is the number of the turn."""

    def __init__(self, script: Script) -> None:
        self.replies = script.replies
        self.num_live = 0

    def act(self, requests: Sequence[TurnRequest]) -> list[Action]:
        """Answer every request."""
        self.num_live = max(self.num_live, len(requests))
        return [self.answer(request.agent_state or 0) for request in requests]

    def answer(self, turn: int) -> Action:
        """Return the reply of one turn."""
        text, token_ids, logprobs = self.replies[turn]
        return Action(text=text, token_ids=token_ids, logprobs=logprobs, agent_state=turn + 1)


class AsyncPolicy(AsyncAgent):
    """The same, with a coroutine for each turn that gives way once, as one that waits for a server does."""

    def __init__(self, script: Script) -> None:
        self.policy = Policy(script)

    async def aact(self, request: TurnRequest) -> Action:
        """Answer one request."""
        await asyncio.sleep(0)
        return self.policy.answer(request.agent_state or 0)


def bare_loop(script: Script, size: Size) -> list[Record]:
    """Play without the library."""
    raw: Any = script.tokenizer.backend_tokenizer
    encode, decode, observations, replies = raw.encode, raw.decode, script.observations, script.replies
    [head, middle, behind] = (
        encode(text, add_special_tokens=False).ids
        for text in ("<|im_start|>user\n", "\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
    )
    records: list[Record] = []
    for _ in range(size.num_episodes):
        token_ids: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        rewards: list[float] = []
        for turn in range(size.num_turns):
            observed = (middle if turn else head) + encode(observations[turn], add_special_tokens=False).ids + behind
            token_ids += observed
            mask += [0] * len(observed)
            logprobs += [0.0] * len(observed)
            rewards += [0.0] * len(observed)
            _, reply_ids, reply_logprobs = replies[turn]
            decode(reply_ids)
            token_ids += reply_ids
            mask += [1] * len(reply_ids)
            logprobs += reply_logprobs
            rewards += [1.0 / len(reply_ids)] * len(reply_ids)
        records.append(Record(token_ids, mask, logprobs, rewards))
    return records


def rollouts(
    script: Script, size: Size, policy: Callable[[Script], Agent] = Policy, pool: Pool | None = None
) -> list[Trajectory]:
    """Play with the library, all episodes at once."""
    return Game(script, size.num_turns).rollout([{"seed": 0}], policy(script), size.num_episodes, pool=pool)


def make_script(num_turns: int) -> Script:
    """Train a byte-level BPE on made-up words, and write the turns."""
    draw = random.Random(0)
    syllables = [consonant + vowel for consonant in "bcdfghjklmnprstvz" for vowel in ("a", "e", "i", "o", "u", "ou")]
    words = ["".join(draw.choices(syllables, k=draw.randint(2, 5))) for _ in range(40_000)]
    raw: Any = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator((" " + word for word in words), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|pad|>", extra_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = CHATML
    end_of_turn: Any = tokenizer.eos_token_id
    replies: list[Reply] = []
    for _ in range(num_turns):
        token_ids = [*draw.choices(range(256, raw.get_vocab_size()), k=REPLY_TOKENS - 1), end_of_turn]
        replies.append(Reply(raw.decode(token_ids), token_ids, [-draw.random() for _ in range(REPLY_TOKENS)]))
    return Script(tokenizer, [make_observation(raw, words, draw) for _ in range(num_turns)], replies)


def make_observation(raw: Any, words: list[str], draw: random.Random) -> str:
    """Made-up words that take as many tokens as an observation is to have."""
    text = ""
    while len(raw.encode(text).ids) != OBSERVATION_TOKENS:
        text = " ".join(draw.choices(words, k=OBSERVATION_TOKENS // 2))
    return text


def is_same(record: Record, trajectory: Trajectory) -> bool:
    """Whether both loops kept the same of an episode."""
    kept = (trajectory.token_ids, trajectory.agent_token_mask, trajectory.logprobs, trajectory.per_token_rewards)
    return record == kept


def cpu_seconds(processes: EnvProcessPool | None) -> float:
    """CPU time so far, of this process and of a pool's."""
    pids = [worker.process.pid for worker in processes.workers()] if processes else []
    # The clock of another process, as clock_getcpuclockid(3) makes it.
    return time.process_time() + sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def cpu_microseconds(
    play: Callable[[Script, Size], object], script: Script, size: Size, processes: EnvProcessPool | None = None
) -> float:
    """CPU time of one turn, in microseconds; garbage of earlier runs is collected before."""
    gc.collect()
    start = cpu_seconds(processes)
    play(script, size)
    return 1e6 * (cpu_seconds(processes) - start) / (size.num_episodes * size.num_turns)


def measure_time(script: Script, plan: Plan) -> dict[str, Any]:
    """CPU time of both loops, taking turns; ratios are medians over neighboring runs, which noise hits alike."""
    works = [(play, size) for size in (plan.loop, plan.long) for play in (bare_loop, rollouts)]
    rounds = [[cpu_microseconds(play, script, size) for play, size in works] for _ in range(plan.num_repeats + 1)][1:]

    def row(bare: int, real: int) -> dict[str, Any]:
        return {
            "bare_us_a_turn": round(statistics.median(times[bare] for times in rounds), 2),
            "rollout_us_a_turn": round(statistics.median(times[real] for times in rounds), 2),
            "ratio": round(statistics.median(times[real] / times[bare] for times in rounds), 3),
            "ratios": [times[real] / times[bare] for times in rounds],
        }

    growth = statistics.median(times[3] / times[1] for times in rounds)
    return {
        "loop": {**plan.loop._asdict(), **row(0, 1)},
        "long": {**plan.long._asdict(), **row(2, 3), "growth": round(growth, 3)},
    }


def measure_modes(script: Script, plan: Plan) -> dict[str, Any]:
    """CPU time of the other ways to play, as ratios to the bare loop beside them."""
    size = plan.loop
    with EnvThreadPool(NUM_WORKERS) as threads, EnvProcessPool(NUM_WORKERS) as processes:
        modes: dict[str, Callable[[Script, Size], list[Trajectory]]] = {
            "async": partial(rollouts, policy=AsyncPolicy),
            "threads": partial(rollouts, pool=threads),
            "processes": partial(rollouts, pool=processes),
            "async_threads": partial(rollouts, policy=AsyncPolicy, pool=threads),
            "async_processes": partial(rollouts, policy=AsyncPolicy, pool=processes),
        }
        records = bare_loop(script, size)
        is_kept = {
            name: all(map(is_same, records, play(script, size)))  # also starts the workers
            for name, play in modes.items()
        }
        rounds = [
            [cpu_microseconds(play, script, size, processes) for play in (bare_loop, *modes.values())]
            for _ in range(plan.num_repeats)
        ]
    return {
        name: {
            "same_record": is_kept[name],
            "rollout_us_a_turn": round(statistics.median(times[place] for times in rounds), 2),
            "ratio": round(statistics.median(times[place] / times[0] for times in rounds), 3),
        }
        for place, name in enumerate(modes, start=1)
    }


def measure_concurrency(script: Script, size: Size) -> dict[str, Any]:
    """Play many episodes at once: how many actions one call of the agent returns, and how many episodes ended."""
    policy = Policy(script)
    start = time.process_time()
    played = Game(script, size.num_turns).rollout([{"seed": 0}], policy, size.num_episodes)
    microseconds = 1e6 * (time.process_time() - start) / (size.num_episodes * size.num_turns)
    return {
        **size._asdict(),
        "num_live": policy.num_live,
        "num_finished": sum(len(trajectory.turns) == size.num_turns for trajectory in played),
        "rollout_us_a_turn": round(microseconds, 2),
    }


def measure_crowd(script: Script, plan: Plan) -> dict[str, Any]:
    """A turn among some hundred live episodes, and among some thousand, garbage collection included."""
    few, many = plan.crowd
    rounds = [
        [cpu_microseconds(rollouts, script, size) for size in plan.crowd] for _ in range(min(3, plan.num_repeats))
    ]
    return {
        **many._asdict(),
        "few_episodes": few.num_episodes,
        "few_us_a_turn": round(statistics.median(times[0] for times in rounds), 2),
        "rollout_us_a_turn": round(statistics.median(times[1] for times in rounds), 2),
        "growth": round(statistics.median(times[1] / times[0] for times in rounds), 3),
    }


def measure_memory(script: Script, size: Size) -> dict[str, Any]:
    """The most memory that a rollout held, its result included."""
    gc.collect()
    tracemalloc.start()
    played = rollouts(script, size)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    num_tokens = sum(len(trajectory.token_ids) for trajectory in played)
    return {
        **size._asdict(),
        "num_tokens": num_tokens,
        "peak_bytes": peak,
        "bytes_a_token": round(peak / num_tokens, 1),
    }


def measure(plan: Plan) -> dict[str, Any]:
    """Everything, as one JSON object."""
    script = make_script(
        max(size.num_turns for size in (plan.loop, plan.long, plan.concurrent, *plan.crowd, *plan.memory))
    )
    pairs = zip(bare_loop(script, plan.loop), rollouts(script, plan.loop), strict=True)
    return {
        "vocabulary_size": len(script.tokenizer),
        "reply_tokens": REPLY_TOKENS,
        "observation_tokens": OBSERVATION_TOKENS,
        "num_repeats": plan.num_repeats,
        "same_record": all(is_same(record, trajectory) for record, trajectory in pairs),
        **measure_time(script, plan),
        "modes": {"num_workers": NUM_WORKERS, **plan.loop._asdict(), **measure_modes(script, plan)},
        "concurrent": measure_concurrency(script, plan.concurrent),
        "crowd": measure_crowd(script, plan),
        "memory": [measure_memory(script, size) for size in plan.memory],
    }


def table(result: dict[str, Any]) -> str:
    """What a person reads."""
    lines = ["episodes x turns   bare us/turn   rollout us/turn   ratio"]
    lines += [
        f"{row['num_episodes']:8} x {row['num_turns']:<5} {row['bare_us_a_turn']:14} {row['rollout_us_a_turn']:17}"
        f" {row['ratio']:7}"
        for row in (result["loop"], result["long"])
    ]
    modes = [
        f"{name:33} {row['rollout_us_a_turn']:17} {row['ratio']:7}"
        for name, row in result["modes"].items()
        if isinstance(row, dict)
    ]
    many, crowd = result["concurrent"], result["crowd"]
    bytes_a_token = " and ".join(
        f"{row['bytes_a_token']} ({row['num_episodes']} x {row['num_turns']})" for row in result["memory"]
    )
    return "\n".join(
        [
            *lines,
            *modes,
            f"a turn of the long episodes costs {result['long']['growth']} times one of the short ones",
            f"{many['num_finished']} of {many['num_episodes']} concurrent episodes finished, "
            f"{many['rollout_us_a_turn']} us/turn",
            f"a turn among {crowd['num_episodes']} live episodes costs {crowd['rollout_us_a_turn']} us, "
            f"{crowd['growth']} times one among {crowd['few_episodes']}",
            f"bytes a token at the peak: {bytes_a_token}",
        ]
    )


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--record", type=Path, nargs="?", const=RESULTS, help="write the ratios into this folder")
    parser.add_argument("--quick", action="store_true", help="a few short episodes, to see that it runs")
    options = parser.parse_args()
    result = measure(QUICK if options.quick else FULL)
    if options.record:
        from benchmarks.record import median, record  # noqa: PLC0415  # a script finds it only in the repository's root

        figures = {f"{name}_ratio": median(result[name]["ratios"]) for name in ("loop", "long")}
        record(options.record, "rollout_overhead", figures, seeds=[0], behavior=None)
    print(json.dumps(result) if options.json else table(result))


if __name__ == "__main__":
    main()
