"""Build the sampling policy for a trainer's settings and distribution of weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from agentsgym.agents.policy.sampling import SamplingParams
from agentsgym.agents.policy.sharded import policy_agent_type
from agentsgym.agents.vllm.lockstep import LockstepVLLMPolicyAgent
from agentsgym.agents.vllm.policy import VLLMPolicyAgent
from agentsgym.errors import ConfigError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

    from agentsgym.agents.policy.agent import PolicyAgent


class SamplingSettings(Protocol):
    """The settings of sampling: fields of ``GRPOEnvConfig``, most of them TRL's."""

    use_vllm: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float | None
    repetition_penalty: float
    ds3_gather_for_generation: bool
    max_staleness: int  # this and the next are not in TRL's GRPOConfig

    @property
    def vllm_server_urls(self) -> Sequence[str]:
        """Base URLs of vLLM servers; empty where TRL's host and port are used."""
        ...


def build_policy(  # noqa: PLR0913  # two settings are not of TRL's
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    args: SamplingSettings,
    accelerator: Accelerator,
    vllm_generation: Any,
    *,
    max_turn_tokens: int,
    stop: Sequence[str] = (),
) -> PolicyAgent | VLLMPolicyAgent | LockstepVLLMPolicyAgent:
    """Build the policy in training as an agent, on the backend of the settings.

    Args:
        model: The model in training, unwrapped.
        tokenizer: Its tokenizer.
        args: The settings.
        accelerator: The trainer's.
        vllm_generation: TRL's engine if the settings use vLLM, else None.
        max_turn_tokens: The budget of one turn.
        stop: Texts that also end a turn.

    Raises:
        ConfigError: The distribution of the weights over the ranks is not supported.
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
        max_turn_tokens=max_turn_tokens,
        context=accelerator.autocast,  # pyright: ignore[reportArgumentType]  # its default is None, untyped
    )


def refuse_prompt_learning(adapters: Iterable[Any]) -> None:
    """Raise :class:`ConfigError` for the configuration of an adapter that adds its own tokens to rows."""
    for adapter in adapters:
        if adapter.is_prompt_learning:
            raise ConfigError(
                f"a {type(adapter).__name__} prepends its own tokens to every prompt, so no record would be exact: "
                "use LoRA or another adapter inside the layers"
            )
