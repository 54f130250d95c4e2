"""Show what a generation batch was like: TRL's completions table, and whole conversations at every log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from transformers import TrainerCallback

from agentsgym.ranks import gather_to_main
from agentsgym.texts import sentence_of
from agentsgym.training.metrics.rollouts import CompletionRow
from agentsgym.training.reporting.console import print_conversations
from agentsgym.training.reporting.conversations import Conversation, chosen
from agentsgym.training.reporting.trackers import send_conversations, set_up_reports

if TYPE_CHECKING:
    from agentsgym.credit.assignment import TokenAdvantages
    from agentsgym.training._trl import TRLSeam
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.training.generation.batch import GenerationBatch, Phase
    from agentsgym.types import Trajectory

logger = logging.getLogger(__name__)

_KINDS = {"train": "training", "eval": "evaluation"}


class Reports(TrainerCallback):
    """Hands rollouts on to TRL's table, and shows some of the main rank's own when metrics are logged."""

    def __init__(self, args: GRPOEnvConfig, callbacks: Sequence[TrainerCallback]) -> None:
        """Read the settings, and set up the callbacks that show metrics.

        Args:
            args: The settings.
            callbacks: Those of the trainer.
        """
        self._args = args
        self._newest: dict[str, list[tuple[Trajectory, Sequence[float] | None, str]]] = {}
        self._failed: set[str] = set()
        set_up_reports(callbacks, args.tracked_groups, args.printed_groups)

    def add(self, seam: TRLSeam, batch: GenerationBatch, advantages: TokenAdvantages, phase: Phase) -> None:
        """Collective with ``args.log_completions``: take a batch that was played.

        Args:
            seam: The trainer, whose table is filled.
            batch: The rollouts.
            advantages: One number a token of each.
            phase: What they were played for.
        """
        shown = list(map(CompletionRow.of, batch.trajectories, advantages.advantages))
        seam.record_completions(gather_to_main(shown) if self._args.log_completions else shown)
        if self._args.log_conversations and PartialState().is_main_process:
            self._newest[phase.kind] = [
                (
                    batch.trajectories[index],
                    advantages.advantages[index] if phase.is_training else None,
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
        except Exception as error:  # noqa: BLE001  # trackers are foreign code, and a closed terminal must not end training
            if place not in self._failed:
                self._failed.add(place)
                logger.warning("conversations cannot be shown in %s; training continues: %s", place, sentence_of(error))
