"""Reject datasets, models, optimizers and launchers that do not fit the settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, str_to_bool  # pyright: ignore[reportUnknownVariableType]
from datasets import IterableDataset
from torch import nn

from agentsgym.agents.build import refuse_prompt_learning
from agentsgym.agents.policy.loading import warn_of_slow_bfloat16
from agentsgym.agents.policy.merged import adapted_weights
from agentsgym.agents.policy.model import (
    fixed_rope_length,
    num_positions,
    random_draws,
    shared_vocabulary_size,
    warn_of_context,
)
from agentsgym.agents.policy.saving import source_of
from agentsgym.agents.policy.sharded import is_sharded, policy_agent_type, zero_stage
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.dataset_rows import ROW_COLUMNS
from agentsgym.envs.datasets.environments import Environments
from agentsgym.envs.datasets.mix import LABEL_COLUMN
from agentsgym.errors import ConfigError, MissingDependencyError
from agentsgym.texts import sentence_of, shown
from agentsgym.training._trl import check_experts, check_logits
from agentsgym.training.memory import free_memory
from agentsgym.training.selection.league import League
from agentsgym.training.validation import check_environment
from agentsgym.training.zero import check_config

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from agentsgym.training.config import GRPOEnvConfig


logger = logging.getLogger(__name__)


def check_objects(**given: Any) -> None:
    """Raise :class:`ConfigError` if an argument of the trainer has the wrong type."""
    for name, (attribute, wanted) in _OBJECTS.items():
        value = given[name]
        if value is not None and (isinstance(value, type) or not hasattr(value, attribute)):
            raise ConfigError(f"{name} must be {wanted} or None, got {shown(value)}")


_OBJECTS = {
    "curriculum": ("bind", "a Curriculum"),
    "distillation": ("teacher", "a Distillation"),
    "demonstrations": ("trajectories", "Demonstrations(trajectories)"),
    "callbacks": ("append", "a list of callbacks"),
}


def check_model(model: Any, args: GRPOEnvConfig, peft_config: PeftConfig | None) -> None:
    """Raise :class:`ConfigError` for a model or an adapter that cannot be used, or a missing reference model."""
    if isinstance(model, tuple):
        raise ConfigError("model must be a model or a path, got a tuple: write model, tokenizer = tiny_policy(…) first")
    place = source_of(model)
    if place and Path(args.output_dir or "").resolve() == Path(place).resolve():
        raise ConfigError(f"output_dir is the folder of the model, {place}, which would be written over: set another")
    if isinstance(peft_config, Mapping):
        raise ConfigError("peft_config must be a configuration of PEFT, got a dict: pass LoraConfig(**peft_config)")
    adapters = [*getattr(model, "peft_config", {}).values(), *([] if peft_config is None else [peft_config])]
    refuse_prompt_learning(adapters)
    if peft_config is None and not isinstance(model, str) and not any(one.requires_grad for one in model.parameters()):
        raise ConfigError("no parameter of the model requires a gradient, so nothing would be trained")
    if args.beta != 0.0 and not adapters and not place:
        raise ConfigError(
            "beta requires a reference model, which TRL loads from the model's path, but this model has no path: save "
            "it with save_pretrained and load it with from_pretrained first"
        )


@contextmanager
def naming_causes(args: GRPOEnvConfig) -> Generator[None]:
    """Raise this package's error for a missing vLLM, of which TRL's extra has other versions."""
    try:
        yield
    except ImportError:
        check_vllm(args)
        raise


def check_vllm(args: GRPOEnvConfig) -> None:
    """Raise :class:`MissingDependencyError` if the settings use vLLM but it is not installed."""
    if args.use_vllm and find_spec("vllm") is None:
        raise MissingDependencyError("vllm", "vllm")


def check_sharding(args: GRPOEnvConfig) -> None:
    """Raise :class:`ConfigError` if accelerate would silently train without the requested FSDP.

    Call this before the accelerator is created, which sets the launcher's variable whenever ``args.fsdp`` is set.
    """
    is_launched = bool(str_to_bool(os.environ.get("ACCELERATE_USE_FSDP", "false")))
    state: Any = PartialState()
    if (args.fsdp or is_launched) and state.distributed_type in {DistributedType.NO, DistributedType.MULTI_CPU}:
        raise ConfigError(
            f"{f'fsdp={args.fsdp!r}' if args.fsdp else 'FSDP (enabled by the launcher)'} has no effect here "
            f"(processes: {state.num_processes}, device: {state.device.type}): weights can be sharded only between "
            "processes with one accelerator each; run with `accelerate launch` on accelerators, or disable FSDP"
        )


def check_parts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    args: GRPOEnvConfig,
    accelerator: Accelerator,
    *,
    has_aux_loss: bool,
    has_own_scheduler: bool,
) -> None:
    """Raise :class:`ConfigError` for a model or an optimizer that does not fit the settings.

    Args:
        model: The model in training.
        tokenizer: Its tokenizer.
        args: The settings.
        accelerator: Knows how the ranks hold the weights, which must be a supported way for any agent.
        has_aux_loss: Whether a mixture of experts' auxiliary loss is added to the loss.
        has_own_scheduler: Whether a learning rate scheduler was given.
    """
    policy_agent_type(accelerator)
    for name in ("value_head", "sync_ref_model"):
        if is_sharded(accelerator) and getattr(args, name):  # sharded by the launcher; `args.fsdp` is refused earlier
            raise ConfigError(
                f"{name} is untested with sharded weights: leave it out, or train without FSDP and ZeRO-3"
            )
    if zero_stage(accelerator):
        if args.value_head is not None:
            raise ConfigError(
                "value_head adds weights to the optimizer, but DeepSpeed's optimizer updates only the policy's: "
                "choose another advantage_estimator, or train without DeepSpeed"
            )
        check_config(args, accelerator.state.deepspeed_plugin)  # pyright: ignore[reportUnknownMemberType]
    shared_vocabulary_size(model, tokenizer)
    check_experts(model, args)
    _check_precision(model, is_autocast=bool(args.bf16))
    if args.layout != "trajectory" and has_aux_loss:
        raise ConfigError(
            "layout='turn' makes the number of rows vary, so micro-batches are split, and the router's auxiliary loss "
            "(mixture of experts) would be added once per part instead of once: set router_aux_loss_coef to 0"
        )
    if args.value_head is not None and has_own_scheduler:
        raise ConfigError(
            "value_head adds a group of parameters to the optimizer, which a scheduler given in `optimizers` does not "
            "know: pass (optimizer, None) and set lr_scheduler_type"
        )


def merges_adapters(model: PreTrainedModel, args: GRPOEnvConfig, accelerator: Accelerator, *, has_agent: bool) -> bool:
    """Return whether to sample with merged adapters: whether it is set, and memory has room for the merged weights.

    Raises:
        ConfigError: It is set, but there is nothing to merge, or it cannot be done.
    """
    if not args.merge_adapters_for_sampling:
        return False
    try:
        weights = adapted_weights(model)
    except ConfigError as error:
        raise ConfigError(f"merge_adapters_for_sampling=True is not possible: {sentence_of(error)}") from error
    reasons = {
        "an agent was given, which samples by itself": has_agent,
        "the model has no adapters inside its layers": not weights,
        "the weights are sharded": is_sharded(accelerator),
    }
    if reason := next((reason for reason, is_true in reasons.items() if is_true), None):
        raise ConfigError(f"merge_adapters_for_sampling=True is not possible: {reason}; leave it out")
    needed = sum(weight.nbytes for weight in weights)
    free = torch.cuda.mem_get_info(model.device)[0] if model.device.type == "cuda" else free_memory()
    if needed < free:
        return True
    text = "adapters are not merged for sampling: the merged weights need %.1f GB, and %.1f GB of memory are free"
    logger.warning(text, needed / 1e9, free / 1e9)
    return False


def check_exactness(model: PreTrainedModel, agent: Any, args: GRPOEnvConfig, accelerator: Any) -> None:
    """Raise :class:`ConfigError` for a model that the loss would compute in another way than the sampler.

    If the model's RoPE changes beyond some length, the context of any agent ends there.
    """
    _settle_draws(model, is_disabled=args.disable_dropout)
    check_logits(model, args.temperature, is_sharded=is_sharded(accelerator))
    if fixed_rope_length(model) is None:
        warn_of_context(type(model).__name__, getattr(agent, "context_length", None), args.max_completion_length)
        return
    length = cast("int", num_positions(model))
    length -= length % int(args.pad_to_multiple_of or 1)
    agent.context_length = min(length, getattr(agent, "context_length", None) or length)
    engine = args.vllm_max_model_length
    if args.use_vllm and args.vllm_mode == "colocate" and (engine is None or engine > length):
        raise ConfigError(
            f"vllm_max_model_length must be at most {length}, got {engine}: beyond, the frequencies of the model's "
            "RoPE change, in vLLM also those of shorter conversations"
        )


def _settle_draws(model: nn.Module, *, is_disabled: bool) -> None:
    """Warn about dropout and jitter, or turn off what TRL leaves on: probabilities of modules except ``nn.Dropout``."""
    found = random_draws(model)
    if found and not is_disabled:
        logger.warning(
            "the policy has dropout or jitter, which is off while rollouts are sampled and scored but on in the loss, "
            "so the importance ratios and the KL term are noisy: set disable_dropout=True to turn it off"
        )
    for part, name in found if is_disabled else ():
        setattr(part, name, 0.0)


def _check_precision(model: PreTrainedModel, *, is_autocast: bool) -> None:
    """Refuse float16 on a CPU, and warn of slow bfloat16 and of updates that would be rounded away."""
    if model.dtype == torch.float16 and model.device.type == "cpu":
        raise ConfigError(
            "the model's weights are float16, in which CPUs compute slowly and gradients overflow: load it with "
            "dtype='bfloat16' (fast with AVX512-BF16 or AMX) and train adapters, or with dtype='float32'"
        )
    warn_of_slow_bfloat16(model, is_autocast=is_autocast)
    trained = {weight.dtype for weight in model.parameters() if weight.requires_grad}
    for dtype in trained & {torch.float16, torch.bfloat16}:
        logger.warning(
            "the trained weights are %s, so updates below about %.2g %% of a weight are rounded away: load the model "
            "with dtype='float32' and set bf16=True, or train adapters, which are float32",
            str(dtype).removeprefix("torch."),
            50 * torch.finfo(dtype).eps,
        )


def build_environments(
    env: MultistepEnv | None, tokenizer: PreTrainedTokenizerBase, args: GRPOEnvConfig, train: Any, evaluation: Any
) -> Environments:
    """Build the environments of all rows that can be read in advance, and check the rows."""
    options = cast("Mapping[str, Any] | None", args.chat_template_kwargs)  # checked with the settings
    check = partial(check_environment, args=args, unread=set())
    environments = Environments(env, tokenizer, check=check, template_options=options)
    for name, dataset in finite_datasets(train_dataset=train, eval_dataset=evaluation):
        environments.check(dataset, name)
    check_size(train, args)
    return environments


def check_env(env: Any) -> None:
    """Raise :class:`ConfigError` for a value that cannot be the environment of a run."""
    if not (env is None or isinstance(env, MultistepEnv)):
        remedy = f": build it with {env.__name__}(tokenizer, env_config)" if isinstance(env, type) else ""
        raise ConfigError(f"env must be a MultistepEnv or None, got {shown(env)}{remedy}")
    if env is not None and env.tokenizer is None:
        raise ConfigError("env has no tokenizer: build it with the policy's, as in Env(tokenizer, env_config)")


def check_leagues(env: MultistepEnv | None, callbacks: Sequence[Any]) -> None:
    """Warn about a league that is the opponent but not a callback, or a callback but not the opponent."""
    players = [] if env is None or env.opponents is None else env.opponents.players
    for league in (one for one in (*players, *callbacks) if isinstance(one, League)):
        if env is not None and all(one is not league for one in players):
            logger.warning("the League in callbacks plays no role: pass it to the environment as opponent, too")
        if all(one is not league for one in callbacks):
            logger.warning("the League that is the opponent gets neither copies nor results: pass it in callbacks, too")


def check_sampling(agent: Any, model: Any, args: GRPOEnvConfig) -> None:
    """Warn about an agent that samples from the model with other settings than the run's."""
    sampling = getattr(agent, "sampling", args) if getattr(agent, "model", None) is model else args
    for name in ("temperature", "top_p", "top_k"):
        if getattr(sampling, name) != getattr(args, name):
            text = "the agent samples with %s=%s, but the loss assumes the value in GRPOEnvConfig, %s"
            logger.warning(text, name, getattr(sampling, name), getattr(args, name))


def check_datasets(train: Any, evaluation: Any, args: Any, curriculum: Any) -> None:
    """Raise :class:`ConfigError` for a dataset that is missing or a list; warn about columns that nothing reads."""
    if evaluation is not None and args.eval_strategy == "no":
        logger.warning("eval_dataset is played only when trainer.evaluate() is called: see eval_strategy")
    if train is None:
        raise ConfigError("train_dataset is missing: pass rows with 'task_data', e.g. Env.get_train_dataset()")
    for name, dataset in finite_datasets(train_dataset=train, eval_dataset=evaluation):
        if isinstance(dataset, list | tuple):
            raise ConfigError(
                f"{name} must be a Dataset of the package datasets, got a {type(dataset).__name__}: pass "
                "Dataset.from_list(rows)"
            )
        unread = {*getattr(dataset, "column_names", ())} - {*ROW_COLUMNS, LABEL_COLUMN, "env_type"}
        if unread and curriculum is None:
            text = "%s has columns that nothing reads, %s: an environment receives only task_data"
            logger.warning(text, name, shown(sorted(unread)))


def check_size(train_dataset: Any, args: GRPOEnvConfig) -> None:
    """Raise :class:`ConfigError` for a dataset that does not fill one generation batch, which all ranks share."""
    batch_size, num_rollouts = cast("int", args.generation_batch_size), cast("int", args.num_generations)  # set by TRL
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
