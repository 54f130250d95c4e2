"""Show a few complete conversations whenever metrics are logged, in the terminal and in trackers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from accelerate import PartialState

from agentsgym.observers.conversations import (
    COLUMNS,
    Conversation,
    choose_by_rank,
    message_text,
    shown_indices,
    trace_of,
)
from agentsgym.texts import sentence_of, shortened
from agentsgym.training.observing import BatchObserver, ObservedBatch

if TYPE_CHECKING:
    from rich.console import Console

    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.types import Trajectory

logger = logging.getLogger(__name__)

_KINDS: Final = {"train": "training", "eval": "evaluation"}
_STEP: Final = "train/global_step"  # the x axis of the trackers' own curves
_MAX_MESSAGE: Final = 1_000  # bytes of a message in a terminal
_MAX_MESSAGES: Final = 24
_COLORS: Final = {"system": "cyan", "tool": "magenta", "assistant": "green"}
_OUTCOMES: Final = {"won": "green", "lost": "yellow", "failed": "red"}


class ShownConversations(BatchObserver):
    """An observer that shows some of the main rank's rollouts when metrics are logged."""

    def __init__(self, args: GRPOEnvConfig) -> None:
        """Start without rollouts, with the settings of a run."""
        self._args = args
        self._newest: dict[str, list[tuple[Trajectory, Sequence[float] | None, str]]] = {}
        self._failed: set[str] = set()

    def on_batch(self, observed: ObservedBatch) -> None:
        """Choose the rollouts that the next log shows."""
        if not PartialState().is_main_process:
            return
        batch, phase = observed.batch, observed.phase
        self._newest[phase.kind] = [
            (
                batch.trajectories[index],
                observed.advantages.advantages[index] if phase.is_training else None,
                batch.rollouts[batch.first + index].environment,
            )
            for index in choose_by_rank([one.final_reward for one in batch.trajectories], self._args.log_conversations)
        ]

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the rollouts since the last log; failures are logged once per place, and training continues."""
        newest, self._newest = self._newest, {}
        for kind, rollouts in newest.items():
            conversations = [Conversation.of(*rollout) for rollout in rollouts]
            self._attempt("terminal", print_conversations, conversations, f"{_KINDS[kind]}, step {state.global_step}:")
            for name in args.report_to:
                self._attempt(name, send_conversations, name, conversations, kind=kind, step=state.global_step)

    def _attempt(self, place: str, function: Any, /, *args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # a tracker or a closed terminal must not end training
            if place not in self._failed:
                self._failed.add(place)
                logger.warning("conversations cannot be shown in %s: %s; training continues", place, sentence_of(error))


def print_conversations(conversations: Sequence[Conversation], title: str, console: Console | None = None) -> None:
    """Print each conversation in a frame; the middle of long ones is omitted, and control characters are escaped."""
    from rich.console import Console, Group  # noqa: PLC0415  # slow to import
    from rich.panel import Panel  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(markup=False, highlight=False, emoji=False) if console is None else console
    console.print(Text(title, style="bold"))
    for one in conversations:
        lines: list[Text] = []
        for index in shown_indices(len(one.messages), _MAX_MESSAGES):
            if index is None:
                lines.append(Text(f"… {len(one.messages) - _MAX_MESSAGES} messages are left out …", style="dim"))
                continue
            message, note = one.messages[index], one.notes.get(index)
            heading = f"[{message['role']}{'' if note is None else f', {note}'}]"
            lines.append(Text(heading, style=f"bold {_COLORS.get(message['role'], 'blue')}"))
            lines.append(Text(shortened(message_text(message), _MAX_MESSAGE).expandtabs(8)))
        if "error" in one.facts:
            lines.append(Text(shortened(one.facts["error"], _MAX_MESSAGE, tail=0.9), style="red"))
        color = _OUTCOMES.get(one.facts["outcome"], "cyan")
        console.print(Panel(Group(*lines), title=Text(one.headline), title_align="left", border_style=color))


def send_conversations(name: str, conversations: Sequence[Conversation], *, kind: str, step: int) -> None:
    """Send conversations to wandb or trackio; other trackers have no tables and receive nothing.

    Args:
        name: Name of the tracker, as in ``report_to``.
        conversations: Conversations to send.
        kind: ``"train"`` or ``"eval"``, the prefix of the keys.
        step: Number of completed optimizer steps.

    Raises:
        Exception: Any error of the tracker, for example because it has no run.
    """
    columns, rows = list(COLUMNS), [one.row(step) for one in conversations]
    if name == "wandb":
        import wandb  # noqa: PLC0415  # an extra  # pyright: ignore[reportMissingImports]

        wandb.log({f"{kind}/conversations": wandb.Table(columns=columns, data=rows), _STEP: step})
    elif name == "trackio":
        import trackio  # noqa: PLC0415  # an extra

        traces = [trackio.Trace(*trace_of(one, {"step": step})) for one in conversations]
        trackio.log(
            {
                f"{kind}/conversations": trackio.Table(columns=columns, data=rows),
                f"{kind}/rollouts": traces,
                _STEP: step,
            }
        )
