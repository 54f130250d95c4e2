"""Build the policy in training according to the trainer's settings and how its weights are distributed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from agentsgym.agents.policy.merged import MergedPolicyAgent
from agentsgym.agents.policy.sampling import SamplingParams
from agentsgym.agents.policy.sharded import policy_agent_type
from agentsgym.agents.vllm.lockstep import LockstepVLLMPolicyAgent
from agentsgym.agents.vllm.policy import VLLMPolicyAgent
from agentsgym.errors import ConfigError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

    from agentsgym.agents.policy.agent import PolicyAgent


def build_policy(  # noqa: PLR0913  # some settings are not of TRL's
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    args: Any,
    accelerator: Accelerator,
    vllm_generation: Any,
    *,
    max_turn_tokens: int,
    stop: Sequence[str] = (),
    merges_adapters: bool = False,
) -> PolicyAgent | VLLMPolicyAgent | LockstepVLLMPolicyAgent:
    """Build the policy in training as an agent on the backend that the settings select.

    Args:
        model: The model in training, unwrapped.
        tokenizer: The model's tokenizer.
        args: The trainer's settings, a ``GRPOEnvConfig``.
        accelerator: The trainer's accelerator.
        vllm_generation: TRL's engine if the settings use vLLM, otherwise None.
        max_turn_tokens: Token budget per turn.
        stop: Strings that also end a turn.
        merges_adapters: Whether to sample with merged adapters, which requires weights that are not sharded.

    Raises:
        ConfigError: The way in which the weights are distributed over the ranks is not supported.
    """
    agent_type = policy_agent_type(accelerator, gathers=args.ds3_gather_for_generation)
    if args.use_vllm:
        if vllm_generation.mode != "server" and vllm_generation.tensor_parallel_size > 1:
            return LockstepVLLMPolicyAgent(vllm_generation, tokenizer, max_turn_tokens=max_turn_tokens, stop=stop)
        return VLLMPolicyAgent(
            vllm_generation,
            tokenizer,
            max_turn_tokens=max_turn_tokens,
            stop=stop,
            server_urls=args.vllm_server_urls,
            pauses=args.max_staleness > 0,
        )
    return (MergedPolicyAgent if merges_adapters else agent_type)(
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
        max_turn_tokens=max_turn_tokens,
        context=accelerator.autocast,  # pyright: ignore[reportArgumentType]  # its default is None, untyped
    )


def refuse_prompt_learning(adapters: Iterable[Any]) -> None:
    """Raise :class:`ConfigError` for an adapter configuration that adds virtual tokens to rows."""
    for adapter in adapters:
        if adapter.is_prompt_learning:
            raise ConfigError(
                f"a {type(adapter).__name__} prepends virtual tokens to every prompt, so no recorded tokens would be "
                "exact: use LoRA or another adapter inside the layers"
            )
