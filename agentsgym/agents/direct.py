"""An agent that answers with the output of a function, a transformers model, or a vLLM engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from agentsgym.agents.answers import action_from_ids, as_ids, sampled_action, stop_token_ids, with_calls_of_ids
from agentsgym.agents.base import Agent
from agentsgym.errors import AgentError, ConfigError, TemplateError
from agentsgym.fields import is_int, require
from agentsgym.texts import sentence_of, shown
from agentsgym.tokens.chat_format import ChatFormat
from agentsgym.types import Action, Message, TurnRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# With any of these, `generate` no longer returns one answer per prompt that ends at its end-of-turn token.
_REFUSED_OPTIONS = frozenset({"num_return_sequences", "return_dict_in_generate", "stop_strings", "max_length"})


class DirectOutputAgent(Agent):
    """An agent that answers with the output of a function, a transformers model with its tokenizer, or a vLLM ``LLM``.

    A function is called once per turn with the messages. A model generates for all sessions of an :meth:`act` in one
    left-padded batch, without gradients and in evaluation mode; a vLLM engine schedules them itself. If the environment
    recorded the exact prompt (``request.token_ids``, from the same tokenizer), the model or engine continues those ids
    and the action has the sampled ids. A vLLM engine adds their log-probabilities: those of the distribution that was
    sampled from if it was created with ``logprobs_mode="processed_logprobs"``, otherwise those before temperature is
    applied. Without an exact prompt, the tokenizer's chat template renders the messages, with the environment's tools,
    and tool calls are parsed from the sampled ids.

    >>> agent = DirectOutputAgent(lambda messages: messages[-1]["content"].upper())
    >>> agent.get_action([{"role": "user", "content": "ready?"}], None)
    ('READY?', None)
    """

    def __init__(
        self,
        source: Callable[[list[Message]], str] | PreTrainedModel | Any,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        max_new_tokens: int = 256,
        **generation_options: Any,
    ) -> None:
        """Check the arguments; nothing is generated.

        Args:
            source: A function from messages to text; a model with ``generate``, which requires ``tokenizer``; or a
                ``vllm.LLM``.
            tokenizer: The model's tokenizer; None for a function, or to use the tokenizer of a vLLM engine.
            max_new_tokens: Maximum tokens of an answer; the request's own budget applies if it is smaller.
            **generation_options: Options for ``model.generate`` (``do_sample``, ``temperature``, …) or for vLLM's
                ``SamplingParams`` (``temperature``, ``top_p``, ``seed``, …); the model's generation config has their
                defaults. A transformers model draws from torch's global generator.

        Raises:
            ConfigError: A model has no tokenizer, there is a tokenizer but no model, the source cannot be called, vLLM
                does not have an option, or an option would make it impossible to find the tokens of an answer.
        """
        self._source: Any = source
        self._generates = callable(getattr(source, "generate", None))
        self._engine = Engine(source, tokenizer, generation_options) if Engine.accepts(source) else None
        self._tokenizer: Any = tokenizer if self._engine is None else self._engine.tokenizer
        self._max_new_tokens = max_new_tokens
        self._options = generation_options
        name = type(source).__name__
        if self._generates and self._tokenizer is None:
            raise ConfigError(f"a model requires its tokenizer: DirectOutputAgent(model, tokenizer), got only {name}")
        if not self._generates and self._tokenizer is not None:
            raise ConfigError(f"a tokenizer is only valid with a model, but the source is of type {name}")
        is_source = callable(source) or self._engine is not None
        require("a source", source, lambda _: is_source, "a function of the messages, a model or a vLLM engine")
        if generation_options and not self._generates:
            raise ConfigError(
                f"generation options are only valid with a model, but the source is of type {name}: remove "
                f"{sorted(generation_options)}"
            )
        refused = _REFUSED_OPTIONS if self._engine is None else Engine.REFUSED_OPTIONS
        if given := sorted(refused & generation_options.keys()):
            raise ConfigError(
                f"DirectOutputAgent does not accept the generation options {given}: it needs exactly one answer per "
                "prompt, including its end-of-turn token"
            )
        require("max_new_tokens", max_new_tokens, is_int(1), "an int of at least 1")

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        """Answer one turn as text."""
        if self._generates:
            request = TurnRequest(session_id="", messages=messages, token_ids=(), agent_state=agent_state)
            (answer,) = self._generate([request])
            if isinstance(answer, AgentError):
                raise answer
            return answer.text, agent_state
        text = self._source(list(messages))
        if not isinstance(text, str):
            raise TypeError(f"the source of a DirectOutputAgent must return a str, got {shown(text)}")
        return text, agent_state

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        """Answer the sessions: a function one by one, a model or an engine in one batch."""
        return self._generate(requests) if self._generates and requests else super().act(requests)

    def _generate(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        prompts = [list(request.token_ids) or self._render(request) for request in requests]
        most = self._max_new_tokens
        budgets = [most if one.max_new_tokens is None else min(one.max_new_tokens, most) for one in requests]
        if self._engine is not None:
            return self._engine.generate(requests, prompts, budgets)
        import torch  # noqa: PLC0415  # not needed for functions

        from agentsgym.agents.policy.model import evaluation_mode  # noqa: PLC0415  # loads torch

        end_ids = self._end_ids()
        pad_id: int | None = self._options.get("pad_token_id", self._tokenizer.pad_token_id)
        pad_id = min(end_ids, default=0) if pad_id is None else pad_id
        width = max(map(len, prompts))
        padded = [[pad_id] * (width - len(prompt)) + prompt for prompt in prompts]
        real = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        options = {"eos_token_id": sorted(end_ids) or None, "pad_token_id": pad_id, **self._options}
        device = self._source.device
        with torch.no_grad(), evaluation_mode(self._source):
            rows = self._source.generate(
                input_ids=torch.tensor(padded, device=device),  # (B, T)
                attention_mask=torch.tensor(real, device=device),  # (B, T)
                max_new_tokens=max(budgets),
                **options,
            )
        answers: list[list[int]] = rows[:, width:].tolist()
        actions: list[Action] = []
        for request, answer, budget in zip(requests, answers, budgets, strict=True):
            stop = next((place + 1 for place, token in enumerate(answer[:budget]) if token in end_ids), budget)
            # Only padding follows the end token.
            actions.append(action_from_ids(request, answer[:stop], self._tokenizer, end_ids))
        return actions

    def _render(self, request: TurnRequest) -> list[int]:
        if self._tokenizer.chat_template is None:
            text = "".join(message["content"] for message in request.messages)
            return self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._tokenizer.apply_chat_template(
            list(request.messages), tools=list(request.tools) or None, add_generation_prompt=True, return_dict=False
        )

    def _end_ids(self) -> frozenset[int]:
        """Return every id that ends an answer: the ids in the options, or those of template, tokenizer and model."""
        if "eos_token_id" in self._options:
            return as_ids(self._options["eos_token_id"])
        try:
            return stop_token_ids(self._source, self._tokenizer)
        except TemplateError:  # such a template does not allow exact prompts, but can be rendered
            return as_ids(self._source.generation_config.eos_token_id) | as_ids(self._tokenizer.eos_token_id)


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
        self._failure = ""
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
        """Sample an answer to each request, within its token budget.

        After a failure that leaves requests in the engine, it is not called again: the next call would never return.
        """
        if self._failure:
            raise AgentError(f"the vLLM engine failed in an earlier call and is not called again: {self._failure}")
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        try:
            outputs: Sequence[Any] = self._llm.generate(given, list(map(self._params, budgets)), use_tqdm=False)
        except BaseException as error:
            has_requests: Any = getattr(getattr(self._llm, "llm_engine", None), "has_unfinished_requests", None)
            if callable(has_requests) and has_requests():
                self._failure = f"{type(error).__name__}: {error}"
            raise
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
