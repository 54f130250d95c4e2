"""The parts of a training script around the trainer: progress bars, timing, Ctrl-C, models from disk, transcripts.

:class:`~agentsgym.recipes.run.TrainingRun` is built from them, and other scripts can use them one by one.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import get_quantization_config

from agentsgym.agents.policy.loading import load_model
from agentsgym.errors import MissingDependencyError
from agentsgym.evaluation.run import episodes_bar as episodes_bar  # noqa: PLC0414  # for scripts, too
from agentsgym.evaluation.transcripts import render_transcript

if TYPE_CHECKING:
    from trl import ModelConfig

    from agentsgym.types import Trajectory


class Phases:
    """The phases of a run: their durations, and whether one was interrupted by Ctrl-C or SIGTERM.

    Attributes:
        seconds: Wall-clock seconds by name; repeated phases add up.
        interrupted: Whether a phase was interrupted.
        status: Exit status for the process: 0, or 143 after SIGTERM (129 after SIGHUP in training).
    """

    def __init__(self, *, is_quiet: bool = False) -> None:
        """Start without phases.

        Args:
            is_quiet: Whether to print nothing when a phase is interrupted, as on all ranks but the first.
        """
        self._is_quiet = is_quiet
        self.seconds: dict[str, float] = {}
        self.interrupted = False
        self.status = 0
        self._exact: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Generator[None]:
        """Measure the duration of the block, also if it raises."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._exact[name] = self._exact.get(name, 0.0) + time.monotonic() - start
            self.seconds[name] = round(self._exact[name], 1)

    @property
    def total_seconds(self) -> float:
        """Wall-clock seconds of all phases."""
        return sum(self.seconds.values())

    @contextmanager
    def interruptible(self, *, handle_sigterm: bool = True) -> Generator[None]:
        """Continue after the block when Ctrl-C or SIGTERM ends it, so that a policy trained so far is kept.

        Only for the main thread.

        Args:
            handle_sigterm: Whether SIGTERM ends the block at once. False around a ``GRPOEnvTrainer``, which handles
                SIGTERM and SIGHUP itself and saves a checkpoint first, unless other handlers are installed.
        """
        before = signal.getsignal(signal.SIGTERM)
        try:
            if handle_sigterm:
                signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
            yield
        except (KeyboardInterrupt, SystemExit) as stopped:
            self.interrupted = True
            signum = getattr(stopped, "signum", signal.SIGTERM)
            self.status = 0 if isinstance(stopped, KeyboardInterrupt) else 128 + signum
            if not self._is_quiet:
                print("\nstopped here; keeping the policy as it is now (Ctrl-C again to quit)", flush=True)
        finally:
            if handle_sigterm:
                signal.signal(signal.SIGTERM, before)


class LossBar(TrainerCallback, AbstractContextManager["LossBar"]):
    """Progress bar over optimizer steps that shows the loss; a context manager."""

    def __init__(self, label: str, num_steps: int, *, is_shown: bool = True) -> None:
        self._bar = tqdm(total=num_steps, desc=label, unit="step", disable=not is_shown)

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the bar."""
        self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the loss."""
        if "loss" in (logs or {}):
            self._bar.set_postfix_str(f"loss {float(logs['loss']):.2f}")


def load_policy(name_or_path: str, config: ModelConfig, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Load a model and its tokenizer; without a padding token, the end-of-sequence token is used.

    Args:
        name_or_path: Name or path for ``from_pretrained``.
        config: TRL's settings, of which revision, dtype, attention and quantization are used.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        MissingDependencyError: Quantization is set, but bitsandbytes is not installed.
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
        # On some CPUs bitsandbytes repacks weights once they are sampled, and then passes no gradient through them.
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
    return model, tokenizer


def quiet_logging() -> None:
    """Show warnings of libraries, only errors of transformers, and progress where no bar can be shown."""
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("agentsgym.observers.learning_curve").setLevel(logging.INFO)
    transformers_logging.set_verbosity_error()


def write_transcripts(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write trajectories as text, one after another."""
    path.write_text("\n".join(map(render_transcript, trajectories)), encoding="utf-8")
