"""Build the sampling policy and the value model, and refuse models that do not fit the settings."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import nn

from agentsgym.agents.policy.sampling import SamplingParams
from agentsgym.agents.policy.vocabulary import shared_vocabulary_size
from agentsgym.errors import ConfigError
from agentsgym.training.policy.sharded import ShardedPolicyAgent, policy_agent_type
from agentsgym.training.policy.value_head import ValueModel
from agentsgym.training.policy.vllm import VLLMPolicyAgent

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from agentsgym.agents.policy.agent import PolicyAgent
    from agentsgym.training.config import GRPOEnvConfig

logger = logging.getLogger(__name__)


def build_policy(
    model: Any, tokenizer: PreTrainedTokenizerBase, args: GRPOEnvConfig, accelerator: Accelerator, vllm_generation: Any
) -> PolicyAgent | VLLMPolicyAgent:
    """Build the policy in training as an agent, through whichever backend the settings name.

    Args:
        model: The model in training, unwrapped.
        tokenizer: Its tokenizer.
        args: The settings.
        accelerator: Knows how the weights are distributed over the ranks, and the autocast of forward passes.
        vllm_generation: TRL's engine where the settings ask for vLLM, else None.

    Raises:
        ConfigError: The weights are distributed in a way that cannot be sampled from.
    """
    agent_type = policy_agent_type(accelerator)
    stop = tuple(args.stop_strings or ())
    if args.use_vllm:
        return VLLMPolicyAgent(vllm_generation, tokenizer, max_turn_tokens=args.max_turn_tokens, stop=stop)
    return agent_type(
        model,
        tokenizer,
        sampling=SamplingParams(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            stop=stop,
        ),
        max_turn_tokens=args.max_turn_tokens,
        context=accelerator.autocast,  # pyright: ignore[reportArgumentType]  # its default is None, untyped
    )


def build_value_model(model: Any, args: GRPOEnvConfig, accelerator: Accelerator) -> ValueModel | None:
    """Build the value head that the settings ask for; None for none.

    Args:
        model: The model in training, unwrapped.
        args: The settings.
        accelerator: Knows the autocast of forward passes.
    """
    if args.value_head is None:
        return None
    return ValueModel(
        model,
        args.value_head,
        learning_rate=args.value_learning_rate or args.learning_rate,
        loss_weight=args.value_loss_weight,
        context=accelerator.autocast,  # pyright: ignore[reportArgumentType]  # likewise
    )


def check_model(model: Any, args: GRPOEnvConfig, peft_config: PeftConfig | None) -> None:
    """Raise :class:`ConfigError` for an adapter that is not supported, or a reference model that is missing."""
    adapters = [*getattr(model, "peft_config", {}).values(), *([] if peft_config is None else [peft_config])]
    for adapter in adapters:
        if adapter.is_prompt_learning:
            raise ConfigError(
                f"a {type(adapter).__name__} puts tokens of its own in front of every prompt, so that no record would "
                "be exact: use LoRA or another adapter inside the layers"
            )
    if args.beta != 0.0 and not adapters and not isinstance(model, str) and not model.config.name_or_path:
        raise ConfigError(
            "beta needs a reference model, which TRL loads from the model's path, and this model has none: "
            "save it with save_pretrained and load it with from_pretrained first"
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
        tokenizer: Its tokenizer, all of whose ids the model must have.
        args: The settings.
        accelerator: Knows how the ranks hold the weights; whoever plays, they must be held in a way that is trained.
        has_aux_loss: Whether a mixture of experts' auxiliary loss is added to the loss.
        has_own_scheduler: Whether a learning rate scheduler was given.
    """
    is_sharded = policy_agent_type(accelerator) is ShardedPolicyAgent
    for name in ("value_head", "sync_ref_model"):
        if is_sharded and getattr(args, name):  # by the launcher's word: the settings' own is refused before
            raise ConfigError(f"{name} has not been proven with sharded weights: leave it out, or train without FSDP")
    shared_vocabulary_size(model, tokenizer)
    if not args.disable_dropout and any(isinstance(part, nn.Dropout) and part.p > 0 for part in model.modules()):
        logger.warning(
            "the policy has dropout: rollouts are sampled and scored without it, the loss runs with it, so that "
            "importance ratios and the KL term are noisy; disable_dropout=True takes it out of all of them"
        )
    if args.layout != "trajectory" and has_aux_loss:
        raise ConfigError(
            "layout='turn' makes the number of rows vary, and a mixture of experts' auxiliary loss is counted once for "
            "each part of a micro-batch: set router_aux_loss_coef to 0"
        )
    if args.value_head is not None and has_own_scheduler:
        raise ConfigError(
            "value_head adds a group of parameters to the optimizer, which a scheduler given in `optimizers` does not "
            "know: pass (optimizer, None) and set lr_scheduler_type"
        )
