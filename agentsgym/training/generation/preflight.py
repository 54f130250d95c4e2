"""Build the environments of a run from its datasets, and reject rows that cannot be played."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from datasets import IterableDataset

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.datasets.environments import Environments
from agentsgym.errors import ConfigError
from agentsgym.texts import shown
from agentsgym.training.validation import check_environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agentsgym.training.config import GRPOEnvConfig


def build_environments(
    env: MultistepEnv | None, tokenizer: PreTrainedTokenizerBase, args: GRPOEnvConfig, train: Any, evaluation: Any
) -> Environments:
    """Build the environments of all rows that can be read in advance, and check the rows."""
    options = cast("Mapping[str, Any] | None", args.chat_template_kwargs)  # checked with the settings
    check = partial(check_environment, args=args, unread=set())
    environments = Environments(env, tokenizer, check=check, template_options=options)
    for name, dataset in finite_datasets(train_dataset=train, eval_dataset=evaluation):
        environments.check(dataset, name)
    check_size(
        train,
        num_rollouts=cast("int", args.num_generations),  # both set by TRL
        batch_size=cast("int", args.generation_batch_size),
    )
    return environments


def check_env(env: Any) -> None:
    """Raise :class:`ConfigError` for a value that cannot be the environment of a run."""
    if not (env is None or isinstance(env, MultistepEnv)):
        remedy = f": build it with {env.__name__}(tokenizer, env_config)" if isinstance(env, type) else ""
        raise ConfigError(f"env must be a MultistepEnv or None, got {shown(env)}{remedy}")
    if env is not None and env.tokenizer is None:
        raise ConfigError("env has no tokenizer: build it with the policy's, as in Env(tokenizer, env_config)")


def check_datasets(train: Any, evaluation: Any) -> None:
    """Raise :class:`ConfigError` if the training dataset is missing, or if a dataset is a list or tuple of rows."""
    if train is None:
        raise ConfigError("train_dataset is missing: pass rows with 'task_data', e.g. Env.get_train_dataset()")
    for name, dataset in finite_datasets(train_dataset=train, eval_dataset=evaluation):
        if isinstance(dataset, list | tuple):
            raise ConfigError(
                f"{name} must be a Dataset of the package datasets, got a {type(dataset).__name__}: pass "
                "Dataset.from_list(rows)"
            )


def check_size(train_dataset: Any, *, num_rollouts: int, batch_size: int) -> None:
    """Raise :class:`ConfigError` for a dataset that does not fill one generation batch.

    Args:
        train_dataset: The rows.
        num_rollouts: Number of rollouts per task.
        batch_size: Number of rollouts per generation batch, over all ranks.
    """
    num_groups = batch_size // num_rollouts
    if not isinstance(train_dataset, IterableDataset) and len(train_dataset) < num_groups:
        raise ConfigError(
            f"train_dataset must have at least {num_groups} rows, one for each task group of a generation batch "
            f"({batch_size} rollouts, {num_rollouts} per group), got {len(train_dataset)}: with too few rows, no batch "
            "would be complete and nothing would be trained"
        )


def finite_datasets(**datasets: Any) -> Iterator[tuple[str, Any]]:
    """Yield the datasets that can be read in advance, each with its name for error messages."""
    for name, dataset in datasets.items():
        if isinstance(dataset, dict):
            yield from finite_datasets(**{f"{name}[{key!r}]": part for key, part in dataset.items()})
        elif dataset is not None and not isinstance(dataset, IterableDataset):
            yield name, dataset
