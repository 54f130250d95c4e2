"""The parts of a training script around the trainer: progress bars, clocks, Ctrl-C, models from disk, transcripts.

:class:`~agentsgym.recipes.run.TrainingRun` is made of them, and a script of another shape can use them one by one.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import get_quantization_config

from agentsgym.agents.policy.loading import load_model
from agentsgym.errors import MissingDependencyError
from agentsgym.evaluation.transcripts import render_transcript

if TYPE_CHECKING:
    from trl import ModelConfig

    from agentsgym.types import Trajectory


class Phases:
    """The parts of a run: how long each took, and whether one was stopped by Ctrl-C or SIGTERM.

    Attributes:
        seconds: By name, as a clock on the wall measures them; those of a part that is measured again add up.
        cpu_seconds: By name, of this process, all its threads together.
        interrupted: Whether a phase was stopped.
        status: What the process is to exit with: 0, or 143 after SIGTERM (129 after SIGHUP in training).
    """

    def __init__(self, *, is_quiet: bool = False) -> None:
        """Start with no phase.

        Args:
            is_quiet: Whether nothing is said of a phase that was stopped, as on all ranks but the first.
        """
        self._is_quiet = is_quiet
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}
        self.interrupted = False
        self.status = 0
        self._measured: dict[str, tuple[float, float]] = {}

    @contextmanager
    def measure(self, name: str) -> Generator[None]:
        """Measure what is inside, also if it raises."""
        start, cpu_start = time.monotonic(), time.process_time()
        try:
            yield
        finally:
            wall, cpu = self._measured.get(name, (0.0, 0.0))
            wall, cpu = wall + time.monotonic() - start, cpu + time.process_time() - cpu_start
            self._measured[name] = (wall, cpu)
            self.seconds[name], self.cpu_seconds[name] = round(wall, 1), round(cpu, 1)

    @property
    def total_seconds(self) -> float:
        """What all parts took together."""
        return sum(self.seconds.values())

    @contextmanager
    def interruptible(self, *, handle_sigterm: bool = True) -> Generator[None]:
        """Go on behind what is inside when Ctrl-C or SIGTERM ends it, so that a policy trained so far is kept.

        To be used in the main thread.

        Args:
            handle_sigterm: Whether SIGTERM ends what is inside at once. False around a ``GRPOEnvTrainer``: it handles
                SIGTERM and SIGHUP itself, and saves a checkpoint first, unless somebody else already does.
        """
        terminable = _sigterm_ends() if handle_sigterm else nullcontext()
        try:
            with terminable:
                yield
        except (KeyboardInterrupt, SystemExit) as stopped:
            self.interrupted = True
            signum = getattr(stopped, "signum", signal.SIGTERM)
            self.status = 0 if isinstance(stopped, KeyboardInterrupt) else 128 + signum
            if not self._is_quiet:
                print("\nstopped here; keeping the policy as it is now (Ctrl-C again to quit)", flush=True)


@contextmanager
def _sigterm_ends() -> Generator[None]:
    """Raise SystemExit where SIGTERM comes inside."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class LossBar(TrainerCallback):
    """A progress bar over optimizer steps with the loss beside it; a context manager.

    Args:
        label: Stands before the bar.
        num_steps: How many there will be.
        is_shown: Whether there is a bar at all.
    """

    def __init__(self, label: str, num_steps: int, *, is_shown: bool = True) -> None:
        self._bar = tqdm(total=num_steps, desc=label, unit="step", disable=not is_shown)

    def __enter__(self) -> LossBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the bar."""
        self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the loss."""
        if "loss" in (logs or {}):
            self._bar.set_postfix_str(f"loss {float(logs['loss']):.2f}")


@contextmanager
def episodes_bar(
    label: str, num_episodes: int, unit: str = "episode", *, is_shown: bool = True
) -> Generator[Callable[[Trajectory], None]]:
    """Show a progress bar over episodes, and give what ``on_finish`` of a rollout takes."""
    with tqdm(total=num_episodes, desc=label, unit=unit, disable=not is_shown) as bar:

        def on_finish(_: Trajectory) -> None:
            bar.update()

        yield on_finish


def load_policy(name_or_path: str, config: ModelConfig, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Load a model and its tokenizer, whose padding token is the end-of-sequence token if it has none.

    Args:
        name_or_path: As ``from_pretrained`` takes it.
        config: TRL's settings; its revision, dtype, attention and quantization are used.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        MissingDependencyError: The weights are to be quantized, and bitsandbytes is not installed.
    """
    quantization = get_quantization_config(config)
    if quantization is not None and find_spec("bitsandbytes") is None:
        raise MissingDependencyError("bitsandbytes", "qlora")
    quantized = {} if quantization is None else {"quantization_config": quantization}
    model, tokenizer = load_model(
        name_or_path,
        revision=config.model_revision,
        trust_remote_code=trust_remote_code,
        dtype=config.dtype,
        attn_implementation=config.attn_implementation,
        **quantized,
    )
    if quantization is not None:
        # On some CPUs bitsandbytes packs weights anew once they are sampled, and then passes no gradient through them.
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
    return model, tokenizer


def quiet_logging() -> None:
    """Let a script show warnings of libraries, and of transformers errors alone."""
    logging.basicConfig(level=logging.WARNING)
    transformers_logging.set_verbosity_error()


def write_transcripts(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write trajectories as text, one behind the other."""
    path.write_text("\n".join(map(render_transcript, trajectories)), encoding="utf-8")
