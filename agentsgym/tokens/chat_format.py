"""Determine once how a tokenizer's chat template formats a conversation; after that, encode only new text."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from agentsgym.errors import ConfigError, TemplateError
from agentsgym.texts import shown
from agentsgym.tokens.calls.reader import reader_of
from agentsgym.tokens.chat_template import Template
from agentsgym.tokens.control_tokens import SECOND_PRIVATE_USE, Piece, Scaffold, Vocabulary, is_mark, unmarked_controls
from agentsgym.tokens.sentinels import QUESTION, Roles, slot
from agentsgym.tokens.tool_format import ToolFormat
from agentsgym.tokens.tool_messages import TEXT_TAGS, native_form, strings_in, with_strings
from agentsgym.tokens.turn_ends import ENDED_BY_TEXT, TurnEnd, common_prefix, find_turn_end, without_end
from agentsgym.types import Action, FinishReason, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ENDED_BY_TEXT", "ChatFormat"]

logger = logging.getLogger(__name__)

_role_of, _content_of = itemgetter("role"), itemgetter("content")


class _Vocabularies:
    """State shared by all formats of one tokenizer, since reading the vocabulary is most of a format's cost.

    Attributes:
        tokenizer: A shallow copy of the tokenizer.
        fingerprint: Identifies the tokenizer's template and vocabulary, which may be changed later.
        own: The vocabulary that encodes the agent's text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = copy.copy(tokenizer)  # shallow: the cache in `of` must not keep its own key alive
        self.fingerprint = _fingerprint(tokenizer)
        plain = Template(self.tokenizer) if self.tokenizer.chat_template else None  # tools add tokens that agents write
        self.own = Vocabulary(self.tokenizer, unmarked_controls(self.tokenizer, plain) if plain else frozenset[str]())
        self._guarded: dict[frozenset[str], Vocabulary] = {}

    def guarded(self, unguarded: Sequence[str]) -> Vocabulary:
        """Return a vocabulary that encodes no added tokens except words, white space and the named ones."""
        exempt = frozenset(unguarded)
        if exempt not in self._guarded:
            added, printed = self.tokenizer.get_added_vocab(), f"{self.tokenizer.chat_template}{TEXT_TAGS}"
            for name in sorted(exempt):
                if name not in added:
                    raise ConfigError(f"unguarded_tokens must list added tokens of the tokenizer, got {shown(name)}")
                if name in self.own.controls or name in printed:
                    raise ConfigError(
                        "unguarded_tokens must not contain tokens that mark roles, turns, tool calls or reasoning, got "
                        f"{shown(name)}, which is marked special or is rendered by the chat template"
                    )
            names = {name for name in added if is_mark(name)} - exempt
            self._guarded[exempt] = Vocabulary(self.tokenizer, names) if names - {*self.own.controls} else self.own
        return self._guarded[exempt]


class ChatFormat:
    """The format of a conversation with one tokenizer and its chat template; get it with :meth:`of`.

    Attributes:
        tokenizer: A copy of the tokenizer, which must not be changed.
        tools: JSON schemas that the template shows the agent.
        template_options: Additional template variables.
        end_of_turn_id: The control token that ends an agent's turn; None if the template ends turns with plain text
            or not at all, or if there is no template.
        end_of_turn_ids: Ids appended to end an agent turn that was given as text; empty if the template does not end
            turns, or if there is none.
        stop_token_ids: Every id that ends a turn when sampled, including the one that ends a tool call.
        rewrites_history: Whether rendering the full conversation again would change earlier answers (by dropping
            reasoning or trimming). If so, the record differs from a fresh render, but is what the agent actually saw.
        vocabulary_size: An exclusive upper bound on the tokenizer's ids.
        text_before_end: Plain text before the end-of-turn token, appended to turns given as text (``" "`` for
            ``" </s>"``).
    """

    def __init__(
        self,
        vocabularies: _Vocabularies,
        *,
        guard_added_tokens: bool = False,
        unguarded_tokens: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer: Any = vocabularies.tokenizer
        self.tools = tuple(tools)
        self.template_options: Mapping[str, Any] = {**(template_options or {})}
        # Tool results must not be able to produce call or result tokens. The environment's system message is trusted.
        self._trusted = {"assistant"} if guard_added_tokens or not tools else {"assistant", "system"}
        observed = vocabularies.guarded(unguarded_tokens) if guard_added_tokens or tools else vocabularies.own
        # Tool schemas may come from a server, so control tokens in them are encoded as plain text.
        texts = strings_in(self.tools)
        masked, hidden = observed.hide(texts, SECOND_PRIVATE_USE)
        safe_tools = with_strings(self.tools, dict(zip(texts, masked, strict=True)))
        self._vocabulary = vocabularies.own.revealing(hidden)
        self._observed = self._vocabulary if observed is vocabularies.own else observed.revealing(hidden)
        self._template = (
            Template(self.tokenizer, safe_tools, self.template_options) if self.tokenizer.chat_template else None
        )
        self.vocabulary_size = self._vocabulary.size
        self._first: dict[Roles, tuple[str, Scaffold]] = {}
        self._later: dict[tuple[Roles, int | None], Scaffold] = {}
        self._end = TurnEnd()
        self._tool_format: ToolFormat | None = None
        self._refusal: str | None = None
        self.rewrites_history = False
        self._lead = ""  # text that the template adds between its prompt and an answer, without control tokens
        self._answer = self._closed_answer = self._bare(("assistant",), self._vocabulary)
        if self._template is not None:
            self._learn(self._template)
        self.end_of_turn_ids, self.text_before_end = self._end.ids, self._end.before
        self.end_of_turn_id = self._end.ids[-1] if self._end.ids and not self._end.text else None
        call_end = None if self._tool_format is None else self._tool_format.call_end_id
        stops = {self.tokenizer.eos_token_id, self.end_of_turn_id, self._end.opens_result, call_end}
        self.stop_token_ids = frozenset(token_id for token_id in stops if token_id is not None)

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        *,
        append: bool = True,
        guard_added_tokens: bool = False,
        unguarded_tokens: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
    ) -> ChatFormat:
        """Get a tokenizer's format, computed on the first call and again whenever its template or vocabulary changes.

        Args:
            tokenizer: A tokenizer, with or without a chat template.
            append: Whether new messages are appended to the record; False if each prompt is rendered from scratch,
                which allows templates that render a later turn differently from the first.
            guard_added_tokens: Whether every added token that appears in an observation is encoded as plain text, even
                one that only agents write (``<think>``, ``<tool_call>``). Words and white space are exempt; the agent's
                own text keeps its tokens. With tools this is always the case, except in the system message.
            unguarded_tokens: Added tokens that are exempt from this, such as Gemma's HTML tags.
            tools: JSON schemas that the template shows the agent.
            template_options: Additional template variables (``enable_thinking``, …).

        Raises:
            ConfigError: A token of ``unguarded_tokens`` is not an added token, or marks a role, a turn, a tool call or
                reasoning.
            TemplateError: The chat template does not render the messages of a plain conversation once and unchanged.
        """
        found = _FORMATS.get(tokenizer)
        if found is None or found[0].fingerprint != _fingerprint(tokenizer):
            is_new = found is None
            found = _FORMATS[tokenizer] = _Vocabularies(tokenizer), {}
            if is_new and not found[0].tokenizer.chat_template:
                logger.warning(
                    "the tokenizer %r has no chat template, so message contents are concatenated without roles or "
                    "end-of-turn tokens: set tokenizer.chat_template if the model has one",
                    found[0].tokenizer.name_or_path or type(tokenizer).__name__,
                )
        shared, formats = found
        key = json.dumps(
            [guard_added_tokens, [*unguarded_tokens], [*tools], {**(template_options or {})}], default=repr
        )
        known = formats.get(key)
        if known is None:
            known = formats[key] = cls(
                shared,
                guard_added_tokens=guard_added_tokens,
                unguarded_tokens=unguarded_tokens,
                tools=tools,
                template_options=template_options,
            )
            if tools and known.tokenizer.chat_template:
                _warn_if_tools_are_hidden(known)
        if append and known._refusal is not None:
            raise TemplateError(known._refusal)
        return known

    def encode(self, text: str) -> list[int]:
        """Encode text as it would be encoded inside a conversation; control tokens in it are encoded as plain text."""
        vocabulary = self._vocabulary
        return vocabulary.encode_first(text) if self._template is None else vocabulary.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, without control tokens."""
        return self._vocabulary.decode(ids, True)

    def ended_by(self, ids: Sequence[int], finish_reason: FinishReason) -> int | None:
        """Find the id that ended the agent's turn; :data:`ENDED_BY_TEXT` if text did, None if nothing did.

        Args:
            ids: The sampled ids.
            finish_reason: If it is ``"stop"``, any special token at the end counts as the end: a model may stop at
                special tokens that neither the template nor the tokenizer declares.
        """
        if not ids:
            return None
        ends = self._vocabulary.special_ids if finish_reason == "stop" else self.stop_token_ids
        if ids[-1] in ends or ids[-1] in self.stop_token_ids:
            return ids[-1]
        if self._end.text:
            tail = ids[-len(self._end.text.encode()) :]  # no token is shorter than a byte
            if self._vocabulary.decode(tail, False).endswith(self._end.text):
                return ENDED_BY_TEXT
        return None

    def render(self, messages: Sequence[Message], *, add_prompt: bool = True) -> list[int]:
        """Return the exact ids of a complete conversation, rendered by the template with its real contents.

        Content-dependent rules apply: a template that drops earlier reasoning drops it here. Control tokens inside
        message contents are encoded as plain text; otherwise the ids equal those of ``tokenizer.apply_chat_template``.
        Without a template, the contents are encoded one by one.

        Args:
            messages: The conversation, including the agent's answers.
            add_prompt: Whether to add the generation prompt.

        Raises:
            TemplateError: The template cannot render the conversation.
        """
        if self._template is None:
            encode = {True: self._vocabulary.encode_first, False: self._observed.encode_first}
            return [
                token_id
                for message in messages
                for token_id in encode[message["role"] == "assistant"](message["content"])
            ]
        conversation = self._structured(messages)
        try:
            texts = [strings_in(message) for message in conversation]
        except RecursionError as error:
            raise TemplateError("the arguments of a call are nested too deeply to be printed") from error
        trusted = [
            message["role"] in self._trusted for message, parts in zip(conversation, texts, strict=True) for _ in parts
        ]
        masked, hidden = self._hide_texts([text for parts in texts for text in parts], trusted)
        masks = iter(masked)
        mask_of = [dict(zip(parts, masks, strict=False)) for parts in texts]
        conversation = [with_strings(message, table) for message, table in zip(conversation, mask_of, strict=True)]
        if self._tool_format is not None:  # the markers of calls are control tokens, unlike those in arguments
            conversation = self._tool_format.with_native_calls(conversation)
        return self._observed.encode_printed(self._template.whole(conversation, add_prompt=add_prompt), hidden)

    def printed(self, messages: Sequence[Message]) -> str:
        """Render a complete conversation and the generation prompt as ``tokenizer.apply_chat_template`` does.

        Raises:
            TemplateError: The tokenizer has no template, or the template cannot render the conversation.
        """
        if self._template is None:
            raise TemplateError("the tokenizer has no chat template, which is needed to render messages")
        return self._template.whole(self.for_template(messages), add_prompt=True)

    def for_template(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        """Convert a conversation to the form that the template accepts.

        If the template has no form for reasoning, it becomes part of the text: as it was written, or between
        ``<think>`` tags. Without tools, everything else stays unchanged.
        Tool calls and results that the template does not support become plain text; arguments and ids are converted to
        the types that it expects. The recorded ids equal those of
        ``tokenizer.apply_chat_template(chat_format.for_template(messages), tools=…)``.

        Args:
            messages: The conversation, including the agent's answers.
        """
        conversation = self._structured(messages)
        if self._tool_format is not None:
            conversation = self._tool_format.with_native_calls(conversation)
        return conversation if self._template is None else self._template.with_thinking(conversation)

    def _structured(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        thoughts = [message.get("reasoning_content") is not None for message in messages]
        if any(thoughts) and not (reader := reader_of(self)).has_thoughts:
            pairs = zip(messages, thoughts, strict=True)
            messages = [reader.with_thought(one) if has_thought else one for one, has_thought in pairs]
        if self._tool_format is None or not any("tool_calls" in m or m["role"] == "tool" for m in messages):
            return messages
        return self._tool_format.conversation(messages)

    def _hide_texts(self, texts: Sequence[str], trusted: Sequence[bool]) -> tuple[list[str], dict[int, str]]:
        """Replace control tokens by masks, and in untrusted text also other guarded tokens."""
        masked, hidden = [*texts], dict[int, str]()
        if self._observed is not self._vocabulary:
            guarded, hidden = self._observed.hide(
                ["" if own else text for own, text in zip(trusted, texts, strict=True)]
            )
            masked = [text if own else mask for own, text, mask in zip(trusted, texts, guarded, strict=True)]
        masked, rest = self._vocabulary.hide(masked)
        return masked, hidden | rest

    def first(self, roles: Roles) -> Scaffold:
        """The scaffold of a conversation's first prompt; recomputed when the date that the template renders changes.

        Raises:
            TemplateError: The template rejects these roles, changes their contents, or renders them differently or
                elsewhere in later turns.
        """
        today = "" if self._template is None else self._template.today(roles)
        known = self._first.get(roles)
        if known is None or known[0] != today:
            known = self._first[roles] = today, self._scaffold(roles, None, first=True)
        return known[1]

    def later(self, roles: Roles, ended_by: int | None) -> Scaffold:
        """The scaffold of an observation after a turn of the agent that ended with this id.

        Raises:
            TemplateError: The template rejects these roles at this point, changes their contents, or renders different
                text in a later turn.
        """
        scaffold = self._later.get((roles, ended_by))
        if scaffold is None:
            scaffold = self._later[roles, ended_by] = self._scaffold(roles, ended_by, first=False)
        return scaffold

    def _bare(self, roles: Roles, vocabulary: Vocabulary) -> Scaffold:
        """The scaffold without a template: one piece per message, with nothing around it."""
        encode = vocabulary.encode_first
        return Scaffold([], tuple(Piece("", ((n, ""),), None, encode, []) for n in range(len(roles))), None, None, None)

    def observation(self, messages: Sequence[Message], ended_by: int | None, *, is_first: bool = False) -> list[int]:
        """The ids of an observation and the generation prompt.

        Args:
            messages: The observation; a tool's result names the call that it answers, if the call could be parsed.
            ended_by: Id that ended the agent's turn.
            is_first: Whether it is the first prompt of a conversation.

        Raises:
            TemplateError: See :meth:`first`, :meth:`later` and :meth:`Scaffold.write`; or tool results cannot be
                appended as the template renders them.
        """
        if self._tool_format is not None and not is_first and messages[0]["role"] == "tool":
            scaffold, contents = self._tool_format.results(messages, ended_by)
        else:
            roles, contents = tuple(map(_role_of, messages)), [*map(_content_of, messages)]
            scaffold = self.first(roles) if is_first else self.later(roles, ended_by)
        return scaffold.write(contents)

    def check_calls(self) -> None:
        """Check that calls can be parsed in the format of the template, if it does not reject calls.

        Raises:
            ConfigError: They cannot, or the template fails to render them or their results.
        """
        failure = None if self._tool_format is None else self._tool_format.failure
        if failure is not None:
            raise ConfigError(
                f"{str(failure).rstrip('.')}; to fix it: set tokenizer.chat_template to one that renders it"
            )
        if self.prints_calls:
            reader_of(self).check_reads_calls()

    def check_results(self) -> None:
        """Check that tool results can be recorded, one message per call.

        Raises:
            TemplateError: They cannot be appended as the template renders them.
        """
        if self._tool_format is not None:
            self._tool_format.result_form(("tool",))

    def closing(self, messages: Sequence[Message], ended_by: int | None) -> list[int] | None:
        """The ids of an observation without an answer: those of :meth:`observation` without the generation prompt.

        Args:
            messages: The observation, as for :meth:`observation`.
            ended_by: Id that ended the agent's turn.

        Returns:
            The ids; None if the generation prompt cannot be separated from the observation.

        Raises:
            TemplateError: See :meth:`observation`.
        """
        token_ids = self.observation(messages, ended_by)
        text = "" if self._template is None else self._template.generation_prompt()
        if text is None:
            return None
        prompt = self._observed.encode_printed(text, {}, first=False)
        start = len(token_ids) - len(prompt)
        return token_ids[:start] if token_ids[max(0, start) :] == prompt else None

    def end_of_thought(self, ids: Sequence[int]) -> list[int]:
        """The ids that close an answer that was cut inside reasoning; empty for any other answer."""
        text = "" if self._template is None else reader_of(self).end_of_thought(ids, has_tools=bool(self.tools))
        return self._vocabulary.encode_printed(text, {}, first=False) if text else []

    def answer(self, message: Message, written: str | None = None) -> tuple[list[int], list[int]]:
        """The ids of an answer given as text, without and with its end of turn.

        Args:
            message: The answer.
            written: The answer with its tags, which is encoded if the template does not print its reasoning.

        Raises:
            TemplateError: The template rejects the calls of the answer.
        """
        if message.get("reasoning_content") is not None and not (reader := reader_of(self)).prints_thoughts:
            if "tool_calls" not in message and written not in {None, message["content"]}:
                message = {"role": "assistant", "content": written or ""}
            elif "tool_calls" in message and reader.has_thoughts and self._tool_format is not None:
                is_printed = reader.prints_thoughts_beside_calls
                return self._tool_format.write(message, ("", "") if is_printed else reader.around_thought)
            else:
                message = reader.with_thought(message)
        if self._tool_format is not None and ("tool_calls" in message or "reasoning_content" in message):
            return self._tool_format.write(message)
        token_ids = self._answer.write([message["content"]])
        if self._end.text:  # its tokens may merge with the answer's
            return token_ids, self._closed_answer.write([message["content"]])
        return token_ids, [*token_ids, *self.end_of_turn_ids]

    def written(self, action: Action) -> str | None:
        """The text of an answer with the tags of its reasoning, but without separate calls, to be rendered later.

        Returns:
            The text; None if the template has a form for reasoning, or reasoning with calls is not closed.
        """
        reader = reader_of(self)
        if reader.has_thoughts:
            return None
        if not (action.tool_calls and self.separates_calls):
            return action.written
        thought, ends, rest = action.written.partition(reader.end_mark)
        gap = rest[: len(rest) - len(rest.lstrip())]
        if self.prints_calls and not action.text:  # the template adds a line break before a call
            gap = gap.removesuffix("\n")
        return f"{thought}{ends}{gap}{action.text}" if ends else None

    def truncated_text(self, ids: Sequence[int]) -> str:
        """Decode a truncated text answer, without the text that the template renders before it."""
        text = self.decode(ids)
        return text[len(common_prefix(text, self._lead)) :]

    @property
    def prints_calls(self) -> bool:
        """Whether the template renders structured calls; otherwise calls are part of an answer's text."""
        return self._tool_format is not None and self._tool_format.prints_calls

    @property
    def separates_calls(self) -> bool:
        """Whether calls are separate from an answer's text: the template renders them, or the model has a form."""
        return self.prints_calls or (self._tool_format is not None and self._tool_format.native is not None)

    def _scaffold(self, roles: Roles, ended_by: int | None, *, first: bool) -> Scaffold:
        template, tools = self._template, self._tool_format
        if template is None:
            return self._bare(roles, self._observed)
        # Whether the agent's call ended with a token that also opens the tool's result, so the turn is not closed yet.
        is_open = tools is not None and self._end.closes and tools.opens_results and ended_by == tools.call_end_id

        def unended(text: str) -> str:
            if ended_by is None or is_open:
                return text
            return without_end(text, ended_by, self._end, self._vocabulary)

        def rerender(contents: list[str]) -> list[int]:
            contents, hidden = self._hide_texts(contents, [role in self._trusted for role in roles])
            text = template.rerender(roles, contents, first=first)
            return self._observed.encode_printed(unended(text), hidden, first=first)

        text, changes = template.opening(roles) if first else template.suffix(roles)
        head, pieces = self._observed.pieces(unended(text), first=first)
        trusting = list(pieces)
        for k, piece in enumerate(pieces):
            if all(roles[index] in self._trusted for index, _ in piece.fills):  # trusted text may contain added tokens
                is_first = piece.encode is self._observed.encode_first
                encode = self._vocabulary.encode_first if is_first else self._vocabulary.encode
                trusting[k] = piece._replace(encode=encode)
        return Scaffold(head, tuple(trusting), changes if any(changes) else None, template.acts_on, rerender)

    def _learn(self, template: Template) -> None:
        """Find out if the template rewrites history, how it ends turns, and why new messages cannot be appended."""
        try:
            self.rewrites_history = template.rewrites_history()
        except TemplateError as error:
            self.rewrites_history, self._refusal = True, str(error)
        try:
            self._end = find_turn_end(template, self._vocabulary)
            self._learn_answer(template)
            native = native_form(self.tokenizer)
            self._tool_format = ToolFormat(template, self._vocabulary, self._observed, self._end, self.later, native)
        except TemplateError as error:
            raise TemplateError(self._refusal or str(error)) from error

    def _learn_answer(self, template: Template) -> None:
        """Find what the template renders around an answer, so that text gets the ids that a model would sample."""
        try:
            prompt, lead = template.answer_lead()
        except TemplateError:
            prompt, lead = "", ""  # a template that rejects conversations of this length may be re-rendered each turn
        self._lead = self._vocabulary.pattern.sub("", lead)
        # A control token at the end of the prompt may absorb the white space at the beginning of the answer.
        last = next((match for match in self._vocabulary.pattern.finditer(prompt) if match.end() == len(prompt)), None)
        trim = template.answer_trim()

        def answer(behind: str) -> Scaffold:
            before = last[0] if last else ""
            head, pieces = self._vocabulary.pieces(f"{before}{lead}{slot(0)}{behind}", first=False)
            return Scaffold(head[1:] if last else head, pieces, None if trim is None else (trim,), None, None)

        self._answer, self._closed_answer = answer(self._end.before), answer(self._end.text)


def _warn_if_tools_are_hidden(known: ChatFormat) -> None:
    """Warn if the chat template renders the same text with tools as without."""
    tokenizer, options = known.tokenizer, known.template_options
    try:
        with_tools, without = (Template(tokenizer, tools, options).render([QUESTION]) for tools in (known.tools, ()))
    except TemplateError:
        return  # the error is reported when the template is used
    if with_tools == without:
        logger.warning(
            "the chat template of %r does not show tools: describe them in the system prompt, and request calls in the "
            "form <tool_call>{json}</tool_call>",
            tokenizer.name_or_path or type(tokenizer).__name__,
        )


def _fingerprint(tokenizer: Any) -> tuple[Any, ...]:
    calls = repr(getattr(tokenizer, "response_template", None))
    return tokenizer.chat_template, calls, len(tokenizer), tokenizer.eos_token_id


# By tokenizer: its shared state, and its formats by the arguments of ChatFormat.of as JSON.
_FORMATS: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[_Vocabularies, dict[str, ChatFormat]]] = WeakKeyDictionary()
