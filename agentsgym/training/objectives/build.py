"""Build the objectives of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentsgym.training.objectives.demonstrations import DemonstrationLoss
from agentsgym.training.objectives.distillation import TeacherAdvantages
from agentsgym.training.objectives.observations import ObservationLoss
from agentsgym.training.objectives.value_head import ValueLoss

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agentsgym.training._trl import TRLInterface
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.training.objectives.demonstrations import Demonstrations
    from agentsgym.training.objectives.distillation import Distillation
    from agentsgym.training.objectives.objective import Objective
    from agentsgym.training.objectives.value_head import ValueModel


def build_objectives(
    args: GRPOEnvConfig,
    trl: TRLInterface,
    tokenizer: PreTrainedTokenizerBase,
    value_model: ValueModel | None,
    distillation: Distillation | None,
    demonstrations: Demonstrations | None,
) -> list[Objective]:
    """Build the objective of each part that a run has.

    Raises:
        ConfigError: The teacher or the demonstrations do not fit the policy.
    """
    objectives = [
        None if args.observation_loss is None else ObservationLoss(args, trl),
        value_model and ValueLoss(value_model, trl),
        distillation and TeacherAdvantages(distillation, args, trl, tokenizer),
        demonstrations and DemonstrationLoss(demonstrations, trl, args.seed),
    ]
    return [one for one in objectives if one is not None]
