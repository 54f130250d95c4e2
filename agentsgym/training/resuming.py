"""What it takes to go on in the middle of a dataset as if nothing had happened."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from agentsgym.training.checks import check_passes


class ResumedOrder(TrainerCallback):
    """Shuffles a resumed run's tasks as the run that it resumes would have, or refuses what could not be resumed.

    The sampler draws a new order at each pass over the dataset, and a resumed run begins at the first: its draws are
    taken up to the pass at which the checkpoint stands.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        """Draw the orders of the passes that are over."""
        if train_dataloader is not None and not isinstance(train_dataloader.dataset, IterableDataset):
            check_passes(args, len(train_dataloader), state.max_steps)
        sampler: Any = getattr(train_dataloader, "get_sampler", lambda: None)()
        if isinstance(getattr(sampler, "generator", None), torch.Generator):  # a stream has none
            for _ in range(int(state.epoch + 1e-6)):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
