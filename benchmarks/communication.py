"""Measure what the ranks of a run send each other: calls, bytes and seconds, in training and in evaluation, by reason.

Two ranks (``accelerate launch``, gloo) play 32 turns of a game with a scripted agent, train a tiny policy on them, and
evaluate it: with two lengths of an answer and two numbers of rollouts, so that what grows with tokens, with rollouts
and with neither can be distinguished. Every collective call of ``torch.distributed`` is counted; the gradients that
``DistributedDataParallel`` reduces, four bytes a trained weight, are not.

Beyond two ranks: the summaries of as many rollouts as all ranks would play are unpacked, given to the estimator and to
the metrics in one process, as every rank does with them. That is measured. How long the bytes take on the way is
computed, from a bandwidth.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch, accelerate and datasets leave parts of their signatures untyped.

from __future__ import annotations

import argparse
import inspect
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from accelerate import PartialState
from datasets import Dataset

from agentsgym import Action, Agent, GRPOEnvConfig, GRPOEnvTrainer, MultistepEnv, TurnRequest
from agentsgym.credit.assignment import AdvantageAssigner
from agentsgym.tiny import tiny_policy
from agentsgym.training.generation.batch import Phase
from agentsgym.training.lifecycle.restartable import end_process_group
from agentsgym.training.metrics.rollouts import RolloutSummary, rollout_metrics

NUM_TURNS = 32
NUM_ROLLOUTS = 4  # of a task
BYTES_A_SECOND = 1e9  # what one rank is taken to receive: 10 Gbit/s, less what protocols cost
WORDS = ["see", "a", "lamp", "door", "and", "long", "dark", "corridor", "with", "key", "take", "open", "go", "north"]
TENSORS = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "reduce_scatter")
OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list")
OURS = ("agentsgym", "trl")
BETWEEN = ("ranks.py", "_trl.py")  # their callers are the reason


WAYS: dict[str, dict[str, Any]] = {
    "": {},
    "_table": {"log_completions": True},
    "_values": {"advantage_estimator": "turn_gae", "value_head": "separate"},
}


class Size(NamedTuple):
    """What a rank plays in a batch."""

    num_rollouts: int
    turn_tokens: int


class Plan(NamedTuple):
    """What is measured: batches on two ranks, and the ranks that are computed for."""

    small: Size
    more_rollouts: Size
    more_tokens: Size
    num_steps: int
    num_ranks: tuple[int, ...]
    rollouts_a_rank: int


FULL = Plan(Size(8, 8), Size(24, 8), Size(8, 32), 1, (2, 8, 64, 512), 64)
QUICK = Plan(Size(4, 4), Size(8, 4), Size(4, 16), 1, (2, 8), 8)


class LongGame(MultistepEnv):
    """Plays 32 turns, each with a different reward, whose states are identified by a line of text."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, {"max_steps_per_episode": NUM_TURNS})

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "text": self._line(session_id)}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return state["text"]

    def _state_key(self, state: dict[str, Any]) -> str:
        return state["text"]

    def _step_episode(
        self, session_id: str, state: dict[str, Any], action: str
    ) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        return {**state, "text": self._line(session_id)}, len(action) / 97, False, {}

    def _line(self, session_id: str) -> str:
        return " ".join(self.rng(session_id).choices(WORDS, k=24))


class Talker(Agent):
    """Answers at once with random tokens, a turn's number of them."""

    def __init__(self, tokenizer: Any, turn_tokens: int) -> None:
        self._tokenizer, self._num_tokens = tokenizer, turn_tokens
        self._draw = random.Random(PartialState().process_index)
        self._ids = tokenizer(" ".join(WORDS), add_special_tokens=False)["input_ids"]

    def act(self, requests: Sequence[TurnRequest]) -> list[Action]:
        """Answer every request."""
        return [self._random_turn() for _ in requests]

    def _random_turn(self) -> Action:
        ids = [*self._draw.choices(self._ids, k=self._num_tokens - 1), self._tokenizer.eos_token_id]
        return Action(text=self._tokenizer.decode(ids), token_ids=ids, logprobs=[-self._draw.random() for _ in ids])


class Traffic:
    """Counts collective calls, the bytes that this rank sends and the seconds they take, by caller."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.seconds = defaultdict[str, float](float)

    @contextmanager
    def counting(self) -> Generator[None]:
        """Count what is called inside."""
        names = [name for name in (*TENSORS, *OBJECTS, "barrier") if hasattr(dist, name)]
        originals = {name: getattr(dist, name) for name in names}
        for name, original in originals.items():
            setattr(dist, name, self._counted(name, original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            label = f"{'object' if name in OBJECTS else 'tensor'}: {reason()}"
            size = sent_bytes(name, args, kwargs)
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.calls[label] += 1
                self.bytes[label] += size
                self.seconds[label] += time.perf_counter() - start

        return counted

    def rows(self, num_batches: int) -> list[dict[str, Any]]:
        """A row a reason, for one generation batch, the most bytes first."""
        return [
            {
                "reason": label,
                "calls": round(self.calls[label] / num_batches, 1),
                "bytes": round(size / num_batches),
                "ms": round(1e3 * self.seconds[label] / num_batches, 2),
            }
            for label, size in self.bytes.most_common()
        ]


def reason() -> str:
    """The function of this library, or of TRL, that wants the call: the innermost on the stack."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        package, _, rest = str(frame.f_globals.get("__name__", "")).partition(".")
        if package in OURS and not frame.f_code.co_filename.endswith(BETWEEN):
            return f"{package}.{rest.rpartition('.')[2]} {frame.f_code.co_name}"
        frame = frame.f_back
    return "transformers and accelerate"


def sent_bytes(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """What this rank puts on the wire of one call: the tensor, or the pickled object and its length."""
    own = {"all_gather": 1, "all_gather_into_tensor": 1, "reduce_scatter": 1, "all_gather_object": 1}
    values = [*args, *kwargs.values()]
    if name == "barrier":
        return 0
    value = values[own.get(name, 0)]
    if name in OBJECTS:
        return len(pickle.dumps(value)) + 8
    tensors = value if isinstance(value, list) else [value]
    return sum(tensor.numel() * tensor.element_size() for tensor in cast("list[torch.Tensor]", tensors))


def make_trainer(folder: str, size: Size, **changes: Any) -> GRPOEnvTrainer:
    """A trainer of the long game."""
    model, tokenizer = tiny_policy([" ".join(WORDS)], hidden_size=16, num_heads=2, num_layers=1)
    env = LongGame(tokenizer)
    rows = [{"task_data": {"seed": seed}} for seed in range(256)]
    args = GRPOEnvConfig(
        output_dir=folder,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        per_device_train_batch_size=size.num_rollouts,
        per_device_eval_batch_size=size.num_rollouts,
        num_generations=NUM_ROLLOUTS,
        max_turn_tokens=size.turn_tokens,
        max_completion_length=100_000,
        **changes,
    )
    data = Dataset.from_list(rows)
    evaluated = data.select(range(size.num_rollouts * PartialState().num_processes // NUM_ROLLOUTS))
    agent = Talker(tokenizer, size.turn_tokens)
    return GRPOEnvTrainer(model, env, args, train_dataset=data, eval_dataset=evaluated, agent=agent)


def train(folder: Path, size: Size, num_steps: int) -> dict[str, Any]:
    """Train and evaluate on this rank; returns the traffic of a generation batch of each."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, changes in WAYS.items():
        trainer = make_trainer(str(folder / "run"), size, max_steps=num_steps, **changes)
        traffic = Traffic()
        with traffic.counting():
            trainer.train()
        found[f"train{name}"] = traffic.rows(num_steps)
        traffic = Traffic()
        with traffic.counting():
            trainer.evaluate()
        found[f"eval{name}"] = traffic.rows(1)
    end_process_group()  # which closing the first trainer would have done
    return found


def launch(folder: Path, size: Size, num_steps: int, num_ranks: int = 2) -> dict[str, Any]:
    """Run this file under ``accelerate launch``; returns what the first rank counted."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1"]
    command += ["--num_processes", str(num_ranks), "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--num_cpu_threads_per_process", "1", "--main_process_port", "0", __file__]
    command += ["--rank_folder", str(folder), "--size", str(size.num_rollouts), str(size.turn_tokens)]
    subprocess.run([*command, "--num_steps", str(num_steps)], check=True, stdout=sys.stderr, timeout=900)
    return json.loads((folder / "0.json").read_text())


def growth(runs: dict[str, Any], plan: Plan, kind: str) -> dict[str, Any]:
    """What a generation batch costs: bytes whatever it holds, bytes a rollout, and what a token adds."""

    def total(name: str) -> int:
        return sum(row["bytes"] for row in runs[name][kind])

    added = plan.more_rollouts.num_rollouts - plan.small.num_rollouts
    a_rollout = (total("more_rollouts") - total("small")) / added
    tokens = plan.more_tokens.turn_tokens - plan.small.turn_tokens
    a_token = (total("more_tokens") - total("small")) / (plan.small.num_rollouts * NUM_TURNS * tokens)
    rows = runs["more_rollouts"][kind]
    return {
        "calls": round(sum(row["calls"] for row in rows)),
        "object_calls": round(sum(row["calls"] for row in rows if row["reason"].startswith("object"))),
        "bytes_a_batch": round(total("small") - a_rollout * plan.small.num_rollouts),
        "bytes_a_rollout": round(a_rollout, 1),
        "bytes_a_token": round(a_token, 3),
        "ms": round(sum(row["ms"] for row in rows), 1),
    }


def beyond(plan: Plan) -> list[dict[str, Any]]:
    """What each rank does with the summaries of all, for more ranks than two."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, Size(plan.rollouts_a_rank, 4), max_steps=1)
        rows: Any = [{"task_data": {"seed": index // NUM_ROLLOUTS}} for index in range(plan.rollouts_a_rank)]
        batch = trainer.generator.generate(rows, Phase(kind="train", index=1, step=0, num_rollouts=NUM_ROLLOUTS))
        args = trainer.args
    data = pickle.dumps(list(batch.rollouts))
    return [_at(num, data, args, len(batch.rollouts)) for num in plan.num_ranks]


def _at(num_ranks: int, data: bytes, args: GRPOEnvConfig, rollouts_a_rank: int) -> dict[str, Any]:
    assigner = AdvantageAssigner(args)
    start = time.process_time()
    summaries: list[RolloutSummary] = [item for _ in range(num_ranks) for item in pickle.loads(data)]
    unpacked = time.process_time()
    assigner.turn_advantages([one.scored for one in summaries], is_training=True)
    estimated = time.process_time()
    rollout_metrics(summaries)
    end = time.process_time()
    received = len(data) * num_ranks
    return {
        "num_ranks": num_ranks,
        "rollouts": num_ranks * rollouts_a_rank,
        "received_mb": round(received / 1e6, 3),
        "wire_s": round(received / BYTES_A_SECOND, 4),
        "unpack_s": round(unpacked - start, 4),
        "estimator_s": round(estimated - unpacked, 4),
        "metrics_s": round(end - estimated, 4),
    }


def measure(plan: Plan) -> dict[str, Any]:
    """Everything, as one JSON object."""
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for label in ("small", "more_rollouts", "more_tokens"):
            runs[label] = launch(Path(name), getattr(plan, label), plan.num_steps)
    kinds = list(runs["small"])
    return {
        "num_turns": NUM_TURNS,
        "rollouts_a_rank": plan.more_rollouts.num_rollouts,
        "growth": {kind: growth(runs, plan, kind) for kind in kinds},
        "reasons": {kind: runs["more_rollouts"][kind] for kind in kinds},
        "beyond": beyond(plan),
    }


def table(result: dict[str, Any]) -> str:
    """What a person reads."""
    lines = ["                calls  of objects  bytes a batch  bytes a rollout  bytes a token      ms"]
    lines += [
        f"{kind:14} {row['calls']:6} {row['object_calls']:11} {row['bytes_a_batch']:14} {row['bytes_a_rollout']:16}"
        f" {row['bytes_a_token']:14} {row['ms']:7}"
        for kind, row in result["growth"].items()
    ]
    for kind, rows in result["reasons"].items():
        lines.append(f"{kind}, {result['rollouts_a_rank']} rollouts a rank:")
        lines += [f"  {row['reason']:60} {row['calls']:6} calls {row['bytes']:8} B {row['ms']:8} ms" for row in rows]
    lines.append("ranks  rollouts  received MB  on the wire s  unpacking s  estimator s  metrics s")
    lines += [
        f"{row['num_ranks']:5} {row['rollouts']:9} {row['received_mb']:12} {row['wire_s']:14} {row['unpack_s']:12}"
        f" {row['estimator_s']:12} {row['metrics_s']:10}"
        for row in result["beyond"]
    ]
    return "\n".join(lines)


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="small batches, to see that it runs")
    parser.add_argument("--rank_folder", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--num_steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_folder:
        found = train(Path(options.rank_folder), Size(*options.size), options.num_steps)
        Path(options.rank_folder, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
        return
    result = measure(QUICK if options.quick else FULL)
    print(json.dumps(result) if options.json else table(result))


if __name__ == "__main__":
    main()
