"""Keep imitating demonstrations while learning from rewards, so that the policy does not forget them.

The loss of every micro-batch becomes::

    loss + weight · mean(-log p)      over the labeled tokens of ``batch_size`` demonstrations, drawn at random

as InstructGPT mixes its pretraining loss into PPO (2203.02155), and DAPG its demonstrations into policy gradients
(1709.10087).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final

import torch

from agentsgym.fields import is_bool, is_int, is_positive_number, require
from agentsgym.ranks import process_state
from agentsgym.seeding import derive_seed
from agentsgym.training.objectives.objective import Objective, Terms
from agentsgym.training.selection.imitate import IGNORED, check_ids, imitation_rows
from agentsgym.training.tensors.scoring import padded_columns
from agentsgym.types import Trajectory

if TYPE_CHECKING:
    from agentsgym.training._trl import TRLInterface

_PADDING: Final = (0, 0, IGNORED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """Trajectories that the policy keeps imitating during reinforcement learning.

    Args:
        trajectories: The demonstrations, recorded with the policy's tokenizer; failed ones are skipped.
        weight: The weight of their loss, relative to that of the policy.
        batch_size: Number of demonstrations per micro-batch and rank.
        observation_loss: Whether the policy also learns to predict their observations.

    Raises:
        ConfigError: A value is invalid.
    """

    trajectories: Sequence[Trajectory]
    weight: float = 0.1
    batch_size: int = 4
    observation_loss: bool = False

    def __post_init__(self) -> None:
        require("Demonstrations(weight)", self.weight, is_positive_number, "a positive number")
        require("Demonstrations(batch_size)", self.batch_size, is_int(1), "a positive int")
        require("Demonstrations(observation_loss)", self.observation_loss, is_bool, "True or False")


class DemonstrationLoss(Objective):
    """The loss on demonstrations that are drawn for each micro-batch, the same ones in a resumed run."""

    metric = "demonstration_loss"
    has_own_pass = True

    def __init__(self, demonstrations: Demonstrations, trl: TRLInterface, seed: int) -> None:
        """Convert the trajectories to rows.

        Args:
            demonstrations: The trajectories and the settings.
            trl: The interface to TRL's trainer.
            seed: Equal seeds draw equal demonstrations, but different ones on each rank.

        Raises:
            ConfigError: There is nothing to imitate, or a trajectory has ids that the policy does not have.
        """
        self._weight = demonstrations.weight
        self._size = demonstrations.batch_size
        self._rows = imitation_rows(demonstrations.trajectories, observation_loss=demonstrations.observation_loss)
        check_ids(self._rows, trl.policy())
        self._trl = trl
        self._seed = seed
        self._step = -1
        self._num_drawn = 0  # micro-batches in this step

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget what was drawn, since a run may begin in the middle of a step that an earlier one did not complete."""
        self._step = -1

    def own_terms(self, model: Any) -> Terms:
        """Return -log p of the labeled tokens in the demonstrations of the next micro-batch."""
        ids, attention_mask, labeled = self._draw()
        total = -self._trl.logprobs(model, ids, attention_mask, labeled).masked_fill(labeled == 0, 0.0).sum()
        return Terms(weighted=self._weight * total, total=total, count=labeled.sum())

    def _draw(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw ids, attention mask, and 1 for the labeled tokens, (B, L) each."""
        trl = self._trl
        self._num_drawn = self._num_drawn + 1 if trl.global_step == self._step else 0
        self._step = trl.global_step
        parts = (self._seed, process_state().process_index, self._step, self._num_drawn)
        generator = Random(derive_seed("demonstrations", *parts))
        rows = generator.choices(self._rows, k=self._size)
        columns = [(row["input_ids"], [1] * len(row["input_ids"]), row["labels"]) for row in rows]
        ids, attention_mask, labels = padded_columns(columns, _PADDING, trl.device)
        labels[:, 0] = IGNORED  # has no context
        return ids, attention_mask, (labels != IGNORED).long()
