"""Short training runs in processes of their own, which the scenarios kill, signal and resume.

They are forked from one process that has imported everything, so that a run costs what it trains and not its imports.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "training"))

from number_games import NUMBERS, GuessNumber

from agentsgym.tiny import tiny_policy
from agentsgym.training.config import GRPOEnvConfig
from agentsgym.training.trainer import GRPOEnvTrainer

NUM_STEPS = 9  # of three passes: six tasks, two a step
NEWEST = "auto"


def policy_of_game() -> tuple[Any, Any]:
    """The model that trainings begin with, and its tokenizer."""
    words = f"Guess a number from one to six. Higher. Lower. A number, please. {' '.join(NUMBERS)}"
    return tiny_policy([words], hidden_size=32, num_heads=2)


def trainer_of(folder: Path, agent_of: Callable[[Any, Any], Any] | None = None, **changes: Any) -> GRPOEnvTrainer:
    """A trainer of a small game that saves a checkpoint at each step; ``agent_of`` a model and tokenizer may sample."""
    model, tokenizer = policy_of_game()
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 3,
        "logging_steps": 1,
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 8 // int(os.environ.get("WORLD_SIZE", "1")),
        "num_generations": 4,
        "max_turn_tokens": 4,
        "max_completion_length": 100,
        "learning_rate": 1e-2,
    }
    rows = Dataset.from_list([{"task_data": {"seed": seed, "secret": seed}} for seed in range(6)])
    args = GRPOEnvConfig(**{**settings, **changes})
    agent = agent_of(model, tokenizer) if agent_of else None
    return GRPOEnvTrainer(model, GuessNumber(tokenizer), args, train_dataset=rows, agent=agent)


def held_weights(trainer: GRPOEnvTrainer) -> list[torch.Tensor]:
    """The weights that this rank holds."""
    return [*trainer.accelerator.unwrap_model(trainer.model).state_dict().values()]


def train(folder: Path, **changes: Any) -> None:
    """Train to the end, from the newest whole checkpoint, and leave a digest of the weights in the folder."""
    trainer = trainer_of(folder, **changes)
    trainer.train(resume_from_checkpoint=NEWEST)
    tell(folder, {"weights": digest(held_weights(trainer)), "step": trainer.state.global_step})


def digest(weights: Sequence[torch.Tensor]) -> str:
    """Return a digest of weights."""
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in weights)).hexdigest()


def tell(folder: Path, result: Any) -> None:
    """Leave what this rank came to, as JSON, in the folder."""
    folder.joinpath(f"result-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))


class Run:
    """One start of a training, on one rank or several.

    Attributes:
        pids: The processes of the ranks.
        statuses: Their exit statuses as far as they have ended; the negative of the signal for one that was killed.
    """

    def __init__(self, folder: Path, num_ranks: int = 1, function: Callable[[Path], None] = train) -> None:
        self.folder = folder
        logs = self.logs = folder.with_name(f"{folder.name}-logs")  # not where the disk may be full
        folder.mkdir(parents=True, exist_ok=True)
        logs.mkdir(exist_ok=True)
        for old in folder.glob("result-*.json"):
            old.unlink()
        port = _free_port()
        self.pids = [_fork(folder, logs, _places(rank, num_ranks, port), function) for rank in range(num_ranks)]
        self.statuses: dict[int, int] = {}

    @property
    def is_over(self) -> bool:
        """Whether every rank has ended."""
        for pid in set(self.pids) - self.statuses.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.statuses[pid] = os.waitstatus_to_exitcode(status)
        return len(self.statuses) == len(self.pids)

    def signal(self, number: int, rank: int = 0) -> None:
        """Send a signal to one rank, if it still runs."""
        if not self.is_over and self.pids[rank] not in self.statuses:
            os.kill(self.pids[rank], number)

    def wait(self, timeout_s: float = 120.0) -> bool:
        """Wait for the end of all ranks, and kill what takes longer; returns whether that was not needed."""
        until = time.monotonic() + timeout_s
        while not self.is_over and time.monotonic() < until:
            time.sleep(0.005)
        in_time = self.is_over
        for rank in range(len(self.pids)):
            self.signal(signal.SIGKILL, rank)
        while not self.is_over:
            time.sleep(0.005)
        return in_time

    def result(self) -> Any:
        """What the ranks left, equal on all of them, or else what went wrong."""
        found = [json.loads(path.read_text()) for path in sorted(self.folder.glob("result-*.json"))]
        if len(found) == len(self.pids) and all(one == found[0] for one in found) and not any(self.statuses.values()):
            return found[0]
        errors = [path.read_text()[-600:] for path in sorted(self.logs.glob("error-*.txt"))]
        return {"statuses": [*self.statuses.values()], "results": found, "errors": errors}


def _places(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    if num_ranks == 1:
        return {}
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    return {name: str(value) for name, value in {**places, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items()}


def _fork(folder: Path, logs: Path, places: dict[str, str], function: Callable[[Path], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status, error = 1, logs / f"error-{places.get('RANK', 0)}.txt"
    try:
        torch.set_num_threads(1)
        os.environ.update(places)
        output = os.open(error.with_name(error.name.replace("error", "output")), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        error.unlink(missing_ok=True)
        function(folder)
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:  # noqa: BLE001  # for whoever reads the table
        error.write_text(traceback.format_exc())
    finally:
        os._exit(status)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
