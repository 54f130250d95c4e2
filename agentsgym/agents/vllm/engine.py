"""Call the methods of a vLLM engine in this process; vLLM itself is not imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from agentsgym.agents.answers import as_ids, sampled_action, with_calls_of_ids
from agentsgym.errors import AgentError, ConfigError, TemplateError
from agentsgym.texts import sentence_of, shown
from agentsgym.tokens.chat_format import ChatFormat
from agentsgym.types import Action, TurnRequest

T = TypeVar("T")


class FailFastEngine:
    """Calls a vLLM engine, except after a failure that leaves requests in it: the next call would then never return.

    An exception that leaves no requests behind (for a prompt that is too long, say) does not count as a failure.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._failure = ""

    def __call__(self, generate: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call the engine."""
        if self._failure:
            raise AgentError(f"the vLLM engine failed in an earlier call and is not called again: {self._failure}")
        try:
            return generate(*arguments, **options)
        except BaseException as error:
            has_requests: Any = getattr(getattr(self._llm, "llm_engine", None), "has_unfinished_requests", None)
            if callable(has_requests) and has_requests():
                self._failure = f"{type(error).__name__}: {error}"
            raise


class Engine:
    """Samples from a ``vllm.LLM``, with token ids as input and output.

    Attributes:
        tokenizer: The tokenizer passed to the constructor, or else the engine's.
    """

    # Options that the agent sets itself, or with which a prompt would not get exactly one answer.
    REFUSED_OPTIONS: ClassVar = frozenset({"n", "max_tokens", "logprobs", "detokenize", "output_kind"})

    def __init__(self, llm: Any, tokenizer: Any, options: Mapping[str, Any]) -> None:
        """Store the engine; nothing is sampled yet.

        Args:
            llm: A ``vllm.LLM``.
            tokenizer: The tokenizer; None for the engine's.
            options: Fields of vLLM's ``SamplingParams``; the defaults are those of the model's generation config.
        """
        self.tokenizer: Any = llm.get_tokenizer() if tokenizer is None else tokenizer
        self._llm = llm
        self._call = FailFastEngine(llm)
        defaults: Any = llm.get_default_sampling_params()
        self._params_type: Any = type(defaults)
        # vLLM computes the private fields from the others.
        known = {name: getattr(defaults, name) for name in defaults.__struct_fields__ if not name.startswith("_")}
        try:
            # vLLM itself adds the EOS ids that the model declares.
            ends = ChatFormat.of(self.tokenizer, append=False).stop_token_ids
        except TemplateError:  # the template cannot produce exact prompts, but it can be rendered
            ends = as_ids(self.tokenizer.eos_token_id)
        ends = as_ids(options.get("stop_token_ids", ends))
        self._fields = {**known, **options, "stop_token_ids": sorted(ends), "logprobs": 0}
        try:
            self._params(1)
        except Exception as error:  # vLLM has its own exception types for invalid options
            raise ConfigError(f"vLLM's SamplingParams rejects {shown(dict(options))}: {sentence_of(error)}") from error

    @staticmethod
    def accepts(source: object) -> bool:
        """Whether the source is a vLLM engine."""
        names = ("generate", "get_tokenizer", "get_default_sampling_params")
        return all(callable(getattr(source, name, None)) for name in names)

    def generate(
        self, requests: Sequence[TurnRequest], prompts: Sequence[list[int]], budgets: Sequence[int]
    ) -> list[Action | AgentError]:
        """Sample an answer to each request, within its token budget."""
        outputs: Sequence[Any] = self._call(
            self._llm.generate,
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [self._params(budget) for budget in budgets],
            use_tqdm=False,
        )
        actions: list[Action | AgentError] = []
        for request, output in zip(requests, outputs, strict=True):
            answer = output.outputs[0]
            reason = answer.finish_reason
            if reason not in ("stop", "length"):
                actions.append(
                    AgentError(f"the vLLM engine ended the answer with an unexpected finish reason: {shown(reason)}")
                )
                continue
            ids = list(answer.token_ids)
            logprobs = [step[token].logprob for step, token in zip(answer.logprobs, ids, strict=True)]
            action = sampled_action(request, ids, text=answer.text, finish_reason=reason, logprobs=logprobs)
            actions.append(with_calls_of_ids(action, request, ids, self.tokenizer))
        return actions

    def _params(self, budget: int) -> Any:
        return self._params_type(**{**self._fields, "max_tokens": budget})
