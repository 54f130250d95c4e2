"""Learn once how a tokenizer writes a conversation: afterwards no template runs and only new text is encoded."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from agentsgym.errors import ConfigError, TemplateError
from agentsgym.texts import shown
from agentsgym.tokens.chat_template import Template
from agentsgym.tokens.control_tokens import SECOND_PRIVATE_USE, Piece, Scaffold, Vocabulary
from agentsgym.tokens.sentinels import Roles, slot
from agentsgym.tokens.template_warnings import warn_if_no_template, warn_if_tools_are_hidden
from agentsgym.tokens.tool_format import ToolFormat
from agentsgym.tokens.tool_messages import TEXT_FORM, strings_in, with_strings
from agentsgym.tokens.turn_ends import ENDED_BY_TEXT, TurnEnd, common_prefix, find_turn_end, without_end
from agentsgym.tokens.unmarked_controls import is_mark, unmarked_controls
from agentsgym.types import FinishReason, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ENDED_BY_TEXT", "ChatFormat"]


class _Vocabularies:
    """State shared by all formats of one tokenizer: reading the vocabulary is most of a format's cost.

    Attributes:
        tokenizer: A copy.
        own: The vocabulary that encodes the agent's own text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = copy.copy(tokenizer)  # shallow: the cache in `of` must not keep its own key alive
        self.fits = _fingerprint(tokenizer)
        plain = Template(self.tokenizer) if self.tokenizer.chat_template else None  # tools print what agents write
        self.own = Vocabulary(self.tokenizer, unmarked_controls(self.tokenizer, plain) if plain else frozenset[str]())
        self._guarded: dict[frozenset[str], Vocabulary] = {}

    def guarded(self, unguarded: Sequence[str]) -> Vocabulary:
        """Return a vocabulary that encodes no added tokens except words, white space and the named ones.

        Raises:
            ConfigError: A name is not an added token, or a message could forge turns, calls or thoughts with it.
        """
        spared = frozenset(unguarded)
        if spared not in self._guarded:
            added = self.tokenizer.get_added_vocab()
            self._check_unguarded(spared, added)
            names = {name for name in added if is_mark(name)} - spared
            self._guarded[spared] = Vocabulary(self.tokenizer, names) if names - {*self.own.controls} else self.own
        return self._guarded[spared]

    def _check_unguarded(self, names: Collection[str], added: Collection[str]) -> None:
        printed = f"{self.tokenizer.chat_template}{TEXT_FORM}"
        for name in sorted(names):
            if name not in added:
                raise ConfigError(f"unguarded_tokens must be added tokens of the tokenizer, got {shown(name)}")
            if name in self.own.controls or name in printed:
                raise ConfigError(
                    f"unguarded_tokens must be tokens that carry no role, turn, call or thought, got {shown(name)}, "
                    "which is marked special or stands in the chat template"
                )


class ChatFormat:
    """The format in which one tokenizer writes a conversation; get it with :meth:`of`.

    Attributes:
        tokenizer: A copy of the tokenizer, to be left as it is.
        tools: JSON schemas that the template shows the agent.
        template_options: Further variables of the template.
        end_of_turn_id: The control token that closes an agent turn; None if the template closes turns by plain text
            or not at all, and without a template.
        end_of_turn_ids: Ids that close an agent's turn given as text; empty if nothing closes a turn, and
            without a template.
        stop_token_ids: Every id that ends a turn when it is sampled, the one after a call of tools included.
        rewrites_history: Whether the template, run over the whole conversation again, would change earlier answers
            (drops thinking, trims): the record then differs from its full render, and is what the agent saw.
        vocabulary_size: Every id of the tokenizer is smaller.
        text_before_end: Plain text before the end-of-turn token, part of a text turn (``" "`` for ``" </s>"``).
    """

    __slots__ = (
        "_answer",
        "_closed_answer",
        "_end",
        "_first",
        "_later",
        "_lead",
        "_observed",
        "_refusal",
        "_template",
        "_tool_format",
        "_trusted",
        "_vocabulary",
        "end_of_turn_id",
        "end_of_turn_ids",
        "rewrites_history",
        "stop_token_ids",
        "template_options",
        "text_before_end",
        "tokenizer",
        "tools",
        "vocabulary_size",
    )

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
        # What tools return must not spell a token of calls or results. The system message is the environment's own.
        self._trusted = {"assistant"} if guard_added_tokens or not tools else {"assistant", "system"}
        observed = vocabularies.guarded(unguarded_tokens) if guard_added_tokens or tools else vocabularies.own
        shown, hidden = _hidden_in(self.tools, observed)
        self._vocabulary = vocabularies.own.revealing(hidden)
        self._observed = self._vocabulary if observed is vocabularies.own else observed.revealing(hidden)
        self._template = (
            Template(self.tokenizer, shown, self.template_options) if self.tokenizer.chat_template else None
        )
        self.vocabulary_size = self._vocabulary.size
        self._first: dict[Roles, tuple[str, Scaffold]] = {}
        self._later: dict[tuple[Roles, int | None], Scaffold] = {}
        self._end = TurnEnd()
        self._tool_format: ToolFormat | None = None
        self._refusal: str | None = None
        self.rewrites_history = False
        self._lead = ""  # what the template prints between its prompt and an answer, control tokens left out
        self._answer = self._closed_answer = self._bare(("assistant",), self._vocabulary)
        if self._template is not None:
            self._learn(self._template)
        self.end_of_turn_ids, self.text_before_end = self._end.ids, self._end.before
        self.end_of_turn_id = self._end.token_id
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
        """Get the format of a tokenizer, found at the first call and again when its template or vocabulary was changed.

        Args:
            tokenizer: Its chat template, if it has one, decides.
            append: Whether new messages are to be appended to what is recorded; False if each prompt is rendered
                anew, which allows templates that print a later turn differently from the first.
            guard_added_tokens: Whether the spelling of any added token stays text in what the agent is shown, also of
                one that only agents write (``<think>``, ``<tool_call>``). Words and white space are exempt; what the
                agent itself writes keeps its tokens. With tools this holds anyway, except in the system message.
            unguarded_tokens: Added tokens that stay tokens there all the same, such as the HTML tags of Gemma.
            tools: JSON schemas that the template shows the agent.
            template_options: Further variables of the template (``enable_thinking``, …).

        Raises:
            ConfigError: A token of ``unguarded_tokens`` is not an added token, or carries a role, a turn, a call or a
                thought.
            TemplateError: The chat template does not print the messages of a plain conversation once and unchanged.
        """
        found = _FORMATS.get(tokenizer)
        if found is None or found[0].fits != _fingerprint(tokenizer):
            if found is None:
                warn_if_no_template(tokenizer)
            found = _FORMATS[tokenizer] = _Vocabularies(tokenizer), {}
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
            warn_if_tools_are_hidden(known.tokenizer, known.tools, known.template_options)
        if append and known._refusal is not None:
            raise TemplateError(known._refusal)
        return known

    def encode(self, text: str) -> list[int]:
        """Encode plain text as it stands inside a conversation; what looks like a control token stays text."""
        vocabulary = self._vocabulary
        return vocabulary.encode_first(text) if self._template is None else vocabulary.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, control tokens left out."""
        return self._vocabulary.decode(ids, True)

    def ended_by(self, ids: Sequence[int], finish_reason: FinishReason) -> int | None:
        """Find the id that ended the agent's turn; :data:`ENDED_BY_TEXT` if text did, None if nothing did.

        Args:
            ids: The sampled ids.
            finish_reason: Where it is ``"stop"``, any token at the end that the tokenizer marks special is one that the
                agent stops at: a model may declare more of them than template and tokenizer know.
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
        """Write the exact ids of a whole conversation, rendered anew by the template with its real contents.

        Rules that look at contents apply: a template that drops old thinking drops it here. What looks like a control
        token inside a content is plain text, as everywhere; for all other text these are the ids of
        ``tokenizer.apply_chat_template``. Without a template the contents are encoded one by one.

        Args:
            messages: The conversation, answers of the agent included.
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
        conversation, hidden = self._hide(self.for_template(messages))
        return self._observed.encode_printed(self._template.whole(conversation, add_prompt=add_prompt), hidden)

    def printed(self, messages: Sequence[Message]) -> str:
        """Print a whole conversation and the generation prompt as ``tokenizer.apply_chat_template`` does.

        Raises:
            TemplateError: The tokenizer has no template, or it cannot print the conversation.
        """
        if self._template is None:
            raise TemplateError("the tokenizer has no chat template, which is needed to render messages")
        return self._template.whole(self.for_template(messages), add_prompt=True)

    def for_template(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        """Put a conversation into the form that the template takes: of a conversation without tools, it is the same.

        Calls and results for which the template has no form become text, arguments and ids are written as it expects
        them. What is recorded is ``tokenizer.apply_chat_template(chat_format.for_template(messages), tools=…)``.

        Args:
            messages: The conversation, answers of the agent included.
        """
        if self._tool_format is None or not any("tool_calls" in m or m["role"] == "tool" for m in messages):
            return messages
        return self._tool_format.conversation(messages)

    def _hide(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Any], dict[int, str]]:
        """Hide, in every string of messages, what looks like a control token and what else is guarded there."""
        try:
            texts = [strings_in(message) for message in messages]
        except RecursionError as error:
            raise TemplateError("the arguments of a call are nested too deeply to be printed") from error
        trusted = [
            message["role"] in self._trusted for message, some in zip(messages, texts, strict=True) for _ in some
        ]
        masked, hidden = self._hide_texts([text for some in texts for text in some], trusted)
        masks = iter(masked)
        found = [dict(zip(some, masks, strict=False)) for some in texts]
        return [with_strings(message, some) for message, some in zip(messages, found, strict=True)], hidden

    def _hide_texts(self, texts: Sequence[str], trusted: Sequence[bool]) -> tuple[list[str], dict[int, str]]:
        """Hide what looks like a control token, and in texts that are not trusted what else is guarded."""
        masked, hidden = [*texts], dict[int, str]()
        if self._observed is not self._vocabulary:
            guarded, hidden = self._observed.hide(
                ["" if own else text for own, text in zip(trusted, texts, strict=True)]
            )
            masked = [text if own else mask for own, text, mask in zip(trusted, texts, guarded, strict=True)]
        masked, rest = self._vocabulary.hide(masked)
        return masked, hidden | rest

    def first(self, roles: Roles) -> Scaffold:
        """The scaffold of a conversation's first prompt; found again when the template prints another date.

        Raises:
            TemplateError: The template does not take these roles, changes their contents, or does not leave them as
                and where they are in later turns.
        """
        template = self._template
        today = "" if template is None else template.today(roles)
        known = self._first.get(roles)
        if known is None or known[0] != today:
            scaffold = (
                self._bare(roles, self._observed)
                if template is None
                else self._scaffold(template, roles, None, first=True)
            )
            known = self._first[roles] = today, scaffold
        return known[1]

    def later(self, roles: Roles, ended_by: int | None) -> Scaffold:
        """The scaffold of an observation after a turn of the agent that ended so.

        Raises:
            TemplateError: The template does not take these roles here, changes their contents, or prints something
                else in a later turn.
        """
        scaffold = self._later.get((roles, ended_by))
        if scaffold is None:
            template = self._template
            scaffold = (
                self._bare(roles, self._observed)
                if template is None
                else self._scaffold(template, roles, ended_by, first=False)
            )
            self._later[roles, ended_by] = scaffold
        return scaffold

    def _bare(self, roles: Roles, vocabulary: Vocabulary) -> Scaffold:
        """Without a template: one piece a message, nothing around it."""
        encode = vocabulary.encode_first
        return Scaffold([], tuple(Piece("", ((n, ""),), None, encode, []) for n in range(len(roles))), None, None, None)

    def observation(self, messages: Sequence[Message], ended_by: int | None) -> tuple[Scaffold, list[str]]:
        """The scaffold of an observation after a turn of the agent, and the contents to write into it.

        Args:
            messages: The observation; a result of a tool names the call that it answers, if that could be read.
            ended_by: Id that ended the agent's turn.

        Raises:
            TemplateError: See :meth:`later`; or the template prints results of tools in no way that can be appended.
        """
        if self._tool_format is not None and messages[0]["role"] == "tool":
            return self._tool_format.results(messages, ended_by)
        roles = tuple([message["role"] for message in messages])
        return self.later(roles, ended_by), [message["content"] for message in messages]

    def check_results(self) -> None:
        """Check that results of tools can be recorded, one message per call.

        Raises:
            TemplateError: The template prints them in no way that can be appended.
        """
        if self._tool_format is not None:
            self._tool_format.way(("tool",))

    def closing(self, messages: Sequence[Message], ended_by: int | None) -> list[int] | None:
        """The ids of an observation that nobody answers: those of :meth:`observation` without the generation prompt.

        Args:
            messages: The observation, as :meth:`observation` takes it.
            ended_by: Id that ended the agent's turn.

        Returns:
            The ids; None where the generation prompt cannot be separated from the observation.

        Raises:
            TemplateError: See :meth:`observation` and :meth:`Scaffold.write`.
        """
        scaffold, contents = self.observation(messages, ended_by)
        token_ids: list[int] = []
        scaffold.write(contents, token_ids)
        text = "" if self._template is None else self._template.generation_prompt()
        if text is None:
            return None
        prompt = self._observed.encode_printed(text, {}, first=False)
        start = len(token_ids) - len(prompt)
        return token_ids[:start] if token_ids[max(0, start) :] == prompt else None

    def answer(self, message: Message) -> tuple[list[int], list[int]]:
        """The ids of an answer given as text, without and with its end of turn.

        Raises:
            TemplateError: The template does not take the calls of the answer.
        """
        if self._tool_format is not None and ("tool_calls" in message or "reasoning_content" in message):
            return self._tool_format.write(message)
        token_ids = _written(self._answer, message)
        if self._end.text:  # which may merge with the answer
            return token_ids, _written(self._closed_answer, message)
        return token_ids, [*token_ids, *self.end_of_turn_ids]

    def cut_text(self, ids: Sequence[int]) -> str:
        """The text of the first ids of an answer that was given as text, without what the template puts in front."""
        text = self.decode(ids)
        return text[len(common_prefix(text, self._lead)) :]

    @property
    def prints_calls(self) -> bool:
        """Whether the template prints structured calls; where it does not, calls are part of an answer's text."""
        return self._tool_format is not None and self._tool_format.prints_calls

    def _scaffold(self, template: Template, roles: Roles, ended_by: int | None, *, first: bool) -> Scaffold:
        def unended(text: str) -> str:
            if ended_by is None or self._is_left_open(ended_by):
                return text
            return without_end(text, ended_by, self._end, self._vocabulary)

        def rerender(contents: list[str]) -> list[int]:
            contents, hidden = self._hide_texts(contents, [role in self._trusted for role in roles])
            text = template.rerender(roles, contents, first=first)
            return self._observed.encode_printed(unended(text), hidden, first=first)

        text, changes = template.opening(roles) if first else template.suffix(roles)
        head, pieces = self._observed.pieces(unended(text), first=first)
        pieces = tuple(self._as_trusted(piece, roles) for piece in pieces)
        return Scaffold(head, pieces, changes if any(changes) else None, template.acts_on, rerender)

    def _is_left_open(self, ended_by: int) -> bool:
        """Whether the agent called a tool by a token that opens its results, and the turn has no end yet."""
        tools = self._tool_format
        return tools is not None and self._end.closes and tools.opens_results and ended_by == tools.call_end_id

    def _as_trusted(self, piece: Piece, roles: Roles) -> Piece:
        """Let the messages of a piece spell added tokens, if all of them may."""
        if not all(roles[index] in self._trusted for index, _ in piece.fills):
            return piece
        guarded = self._observed
        return piece._replace(
            encode=self._vocabulary.encode_first if piece.encode is guarded.encode_first else self._vocabulary.encode
        )

    def _learn(self, template: Template) -> None:
        """Find what the template does to history, how it ends turns, and whether new messages cannot be appended."""
        try:
            self.rewrites_history = template.rewrites_history()
        except TemplateError as error:
            self.rewrites_history, self._refusal = True, str(error)
        try:
            self._end = find_turn_end(template, self._vocabulary)
            self._learn_answer(template)
            self._tool_format = ToolFormat(template, self._vocabulary, self._observed, self._end, self.later)
        except TemplateError as error:
            raise TemplateError(self._refusal or str(error)) from error

    def _learn_answer(self, template: Template) -> None:
        """Find what the template prints around an answer: it is given as text what a model would have sampled."""
        try:
            asked, lead = template.answer_lead()
        except TemplateError:  # of a conversation that is rendered anew each turn, until it is as long as these
            asked, lead = "", ""
        self._lead = self._vocabulary.pattern.sub("", lead)
        # A control token at the end of the prompt may swallow the white space that the answer begins with.
        last = next((match for match in self._vocabulary.pattern.finditer(asked) if match.end() == len(asked)), None)
        trim = template.answer_trim()

        def answer(behind: str) -> Scaffold:
            before = last[0] if last else ""
            head, pieces = self._vocabulary.pieces(f"{before}{lead}{slot(0)}{behind}", first=False)
            return Scaffold(head[1:] if last else head, pieces, None if trim is None else (trim,), None, None)

        self._answer, self._closed_answer = answer(self._end.before), answer(self._end.text)


def _written(scaffold: Scaffold, message: Message) -> list[int]:
    token_ids: list[int] = []
    scaffold.write([message["content"]], token_ids)
    return token_ids


def _hidden_in(tools: Sequence[Mapping[str, Any]], observed: Vocabulary) -> tuple[Any, dict[int, str]]:
    """Hide what looks like a control token in the schemas of tools, which may come from a server."""
    texts = strings_in(tools)
    masked, hidden = observed.hide(texts, SECOND_PRIVATE_USE)
    return with_strings(tools, dict(zip(texts, masked, strict=True))), hidden


def _fingerprint(tokenizer: Any) -> tuple[Any, ...]:
    calls = repr(getattr(tokenizer, "response_template", None))
    return tokenizer.chat_template, calls, len(tokenizer), tokenizer.eos_token_id


# By tokenizer; its formats by whether added tokens are guarded, tools, and options, as JSON.
_FORMATS: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[_Vocabularies, dict[str, ChatFormat]]] = WeakKeyDictionary()
