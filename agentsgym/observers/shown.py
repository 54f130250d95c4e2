"""Show a few whole conversations at every log, in the terminal and in trackers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from accelerate import PartialState

from agentsgym.observers.console import print_conversations
from agentsgym.observers.conversations import COLUMNS, Conversation, chosen, trace_of
from agentsgym.texts import sentence_of
from agentsgym.training.observing import BatchObserver, ObservedBatch

if TYPE_CHECKING:
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.types import Trajectory

logger = logging.getLogger(__name__)

_KINDS: Final = {"train": "training", "eval": "evaluation"}
_STEP: Final = "train/global_step"  # by which the trackers' own curves are drawn


class ShownConversations(BatchObserver):
    """Shows some of the main rank's own rollouts when metrics are logged."""

    def __init__(self, args: GRPOEnvConfig) -> None:
        """Begin without any rollout, with the settings of a run."""
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
            for index in chosen([one.final_reward for one in batch.trajectories], self._args.log_conversations)
        ]

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show what was played since the last log; that it cannot be shown is logged once, and costs nothing else."""
        newest, self._newest = self._newest, {}
        for kind, rollouts in newest.items():
            conversations = [Conversation.of(*rollout) for rollout in rollouts]
            self._attempt("terminal", print_conversations, conversations, f"{_KINDS[kind]}, step {state.global_step}:")
            for name in args.report_to:
                self._attempt(name, send_conversations, name, conversations, kind=kind, step=state.global_step)

    def _attempt(self, place: str, function: Any, /, *args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # trackers are foreign code, and a closed terminal is no reason to end
            if place not in self._failed:
                self._failed.add(place)
                logger.warning("conversations cannot be shown in %s; training continues: %s", place, sentence_of(error))


def send_conversations(name: str, conversations: Sequence[Conversation], *, kind: str, step: int) -> None:
    """Send conversations to a tracker that has tables: wandb or trackio. To another nothing is sent.

    Args:
        name: The tracker, as ``report_to`` names it.
        conversations: What to send.
        kind: ``"train"`` or ``"eval"``: the first part of the keys.
        step: Optimizer steps that are done.

    Raises:
        Exception: Whatever the tracker raises, such as when it has no run.
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
