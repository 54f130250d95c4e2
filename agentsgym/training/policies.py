"""What a trainer makes of its model beside training it: the agent that plays, and the head that foretells returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from agentsgym.agents.policy import PolicyAgent
from agentsgym.agents.sampling import Sampling
from agentsgym.training.value_head import ValueModel
from agentsgym.training.vllm_policy import VLLMPolicyAgent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agentsgym.training.trainer import GRPOEnvTrainer


def agent_of(trainer: GRPOEnvTrainer, agent_type: type[PolicyAgent]) -> PolicyAgent | VLLMPolicyAgent:
    """The policy in training, through whichever backend the settings name.

    Args:
        trainer: Whose policy and settings it is.
        agent_type: What suits how the ranks hold the weights.
    """
    args, tokenizer = trainer.args, cast("PreTrainedTokenizerBase", trainer.processing_class)
    stop = tuple(args.stop_strings or ())
    if args.use_vllm:
        return VLLMPolicyAgent(trainer.vllm_generation, tokenizer, max_turn_tokens=args.max_turn_tokens, stop=stop)
    return agent_type(
        _policy(trainer),
        tokenizer,
        sampling=Sampling(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            stop=stop,
        ),
        max_turn_tokens=args.max_turn_tokens,
        context=trainer.accelerator.autocast,  # pyright: ignore[reportArgumentType]  # its default is None, untold
    )


def value_model_of(trainer: GRPOEnvTrainer) -> ValueModel | None:
    """The value head that the settings ask for; None for none."""
    args = trainer.args
    if args.value_head is None:
        return None
    return ValueModel(
        _policy(trainer),
        args.value_head,
        learning_rate=args.value_learning_rate or args.learning_rate,
        loss_weight=args.value_loss_weight,
        context=trainer.accelerator.autocast,  # pyright: ignore[reportArgumentType]  # likewise
    )


def _policy(trainer: GRPOEnvTrainer) -> Any:
    return trainer.accelerator.unwrap_model(trainer.model)
