"""The exact token stream of one conversation.

A token that the agent sampled is never decoded and encoded again, and the prompt of every turn is exactly the ids
recorded so far::

    observe          act         observe                    act
    first prompt  ▏  sampled ids  ▏ end of turn*, text     ▏ sampled ids
    mask 0        ▏  mask 1       ▏ mask 0                 ▏ mask 1

(* unless the agent sampled it.) A history that is rewritten on purpose (dropped reasoning, a window, a summary) starts
a new segment, which begins with the complete new prompt; inside a segment the invariant still holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Literal, NamedTuple

from agentsgym.errors import ConfigError
from agentsgym.texts import shown
from agentsgym.tokens.calls.reader import read_answer
from agentsgym.tokens.chat_format import ENDED_BY_TEXT, ChatFormat
from agentsgym.tokens.tool_messages import structured_calls, with_call_ids, with_text_calls
from agentsgym.types import Action, Message, ToolCall

__all__ = ["ChatFormat", "History", "Transcript"]

_role_of = itemgetter("role")

History = Literal["append", "rerender"] | Callable[[list[Message]], list[Message]]


Mark = tuple[int, list[Message], int, int, list[int], int]
"""The state before an observation: the number of messages, those of the prompt, and their number; then of tokens."""


class Transcript:
    """One live conversation: messages and, with a tokenizer, their tokens.

    Observations and actions alternate, optionally followed by a last observation: ``observe``, ``act``, …, ``close``.

    Attributes:
        messages: The conversation so far.
        prompt_messages: The conversation as the agent sees it; ``messages`` itself unless ``history`` changed it.
        chat_format: The chat format of the tokenizer; None without one.
        token_ids: The exact tokens since the history was last rewritten, (T,): after ``observe``, the prompt of the
            next action. Empty without a tokenizer.
        prompt_length: Number of tokens of the first prompt.
        was_cut: Whether the last action was text that was truncated at the limit; its tool calls are then ignored.
    """

    def __init__(self, chat_format: ChatFormat | None, history: History = "append") -> None:
        """Begin an empty conversation.

        Args:
            chat_format: The chat format of the tokenizer; None to record messages only.
            history: The agent's view of earlier messages. ``"append"``: all of them, as recorded.
                ``"rerender"``: all of them, rendered again by the chat template. A function receives a copy of the
                messages of the last prompt, followed by the agent's answer and the new messages, and returns the
                messages to show in this turn. If it returns them unchanged, the new tokens are appended to the current
                segment. Messages that it drops are not offered again.
        """
        self.messages: list[Message] = []
        self.prompt_messages = [] if callable(history) else self.messages
        self.token_ids: list[int] = []
        self.prompt_length = 0
        self._earlier: list[int] = []  # tokens of the earlier segments
        self.chat_format = chat_format
        self._history = history
        self._ended_by: int | None = None
        self._end_of_thought: list[int] = []  # of a last answer that was cut inside reasoning
        self._mark: Mark | None = None  # while an observation waits for its action
        self._calls: Sequence[ToolCall] = ()  # of the last action
        self._num_calls = 0  # of the whole conversation
        self.was_cut = False

    def record(self) -> list[int]:
        """Every token of every segment, in order, (T,)."""
        return [*self._earlier, *self.token_ids] if self._earlier else self.token_ids

    @property
    def segment_start(self) -> int:
        """The index in :meth:`record` at which the newest segment begins."""
        return len(self._earlier)

    def observe(self, messages: Sequence[Message]) -> None:
        """Append an observation and the generation prompt, tokenizing only the new text.

        Messages of role ``tool`` answer the calls of the last action in order, including calls that could not be
        parsed; the name and id of the call are added if they are missing.

        Args:
            messages: The new messages; in the first call, the complete first prompt, including a system message.

        Raises:
            TemplateError: The chat template does not allow messages of these roles at this point.
            RuntimeError: The last observation is still waiting for its action.
        """
        mark, known = self._new_mark(), self.messages
        messages = self._with_call_ids(messages)
        chat_format, history, prompt_messages = self.chat_format, self._history, self.prompt_messages
        rendered: list[Message] | None = None  # the conversation to render again; None to append the new messages
        if callable(history):
            whole = [*prompt_messages, *messages]
            shown = history([message.copy() for message in whole])
            rendered = None if shown == whole else shown
            prompt_messages = [message.copy() for message in shown]  # the function may keep and modify its messages
        elif history == "rerender":
            rendered = [*known, *messages]
        if chat_format is not None:
            if rendered is None:
                new = chat_format.observation(messages, self._ended_by, is_first=not known)
                self.token_ids += self._end_of_thought
                self.token_ids += new
            else:
                self._extend(chat_format.render(rendered))
        if not known:
            self.prompt_length = len(self.token_ids)
        self.prompt_messages = prompt_messages
        known += messages
        self._mark = mark

    def _extend(self, prompt: list[int]) -> None:
        """Record a prompt that was rendered again, as a new segment unless it only extends the current one."""
        current = self.token_ids
        if prompt[: len(current)] == current:
            current += prompt[len(current) :]
        else:
            self._earlier += current
            self.token_ids = prompt

    def _new_mark(self) -> Mark:
        """Return the state to which :meth:`retract` returns; raise if the last observation still waits."""
        if self._mark is not None:
            raise RuntimeError("observe() was called before the last observation was answered: call act() first")
        shown = self.prompt_messages
        return len(self.messages), shown, len(shown), len(self._earlier), self.token_ids, len(self.token_ids)

    def _with_call_ids(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Add to tool results the names and ids of the calls that they respond to."""
        if not (self._calls or "tool" in map(_role_of, messages)):
            return messages
        return with_call_ids(messages, self._calls, self.messages[-1].get("tool_calls", ()) if self._calls else ())

    def retract(self) -> None:
        """Remove the last observation, both messages and tokens.

        Raises:
            RuntimeError: No observation waits for an action.
        """
        if self._mark is None:
            raise RuntimeError("retract() needs an observation without an action, but there is none")
        num_messages, self.prompt_messages, num_shown, num_earlier, self.token_ids, num_tokens = self._mark
        del self.messages[num_messages:]
        del self.prompt_messages[num_shown:]
        del self._earlier[num_earlier:]
        del self.token_ids[num_tokens:]
        self._mark = None

    def close(self, messages: Sequence[Message], limit: int | None = None) -> None:
        """Append the environment's last message, without a generation prompt, since no answer follows.

        The messages are always recorded. Their tokens are too, unless they exceed the limit, the template would render
        the conversation before them differently, or its generation prompt cannot be separated from them.

        Args:
            messages: The new messages, as for :meth:`observe`.
            limit: The maximum number of tokens of the messages; None for no limit.

        Raises:
            TemplateError: The chat template does not allow messages of these roles at this point.
            RuntimeError: The last observation is still waiting for its action, or there is none.
        """
        if self._mark is not None or not self.messages:
            raise RuntimeError("close() needs a conversation whose last observation is answered: call act() first")
        messages = self._with_call_ids(messages)
        token_ids: list[int] | None = None
        if self.chat_format is not None and self._history == "rerender":
            whole, size = self.chat_format.render([*self.messages, *messages], add_prompt=False), len(self.token_ids)
            token_ids = whole[size:] if whole[:size] == self.token_ids else None
        elif self.chat_format is not None:
            token_ids = self.chat_format.closing(messages, self._ended_by)
            token_ids = token_ids and self._end_of_thought + token_ids
        if token_ids is not None and (limit is None or len(token_ids) <= limit):
            self.token_ids += token_ids
        self.messages += messages
        if self.prompt_messages is not self.messages:
            self.prompt_messages += messages

    def act(self, action: Action, limit: int | None = None) -> tuple[int, int]:
        """Append the agent's answer.

        Sampled ids are recorded unchanged. Text without ids is encoded once and closed with the template's end of turn;
        its tool calls and reasoning are rendered by the template, or written as text if the template does not support
        them. If the agent did not end its turn, the template's end-of-turn tokens are added before the next
        observation, outside the span, after those that close reasoning in which it was cut.

        In the recorded message, well-formed calls are separate from the text; an answer without any well-formed call
        keeps its full text.

        Args:
            action: The answer to the last observation.
            limit: The maximum number of tokens for text without ids; longer text and its message are truncated, and
                the turn is not closed. None for no limit.

        Returns:
            The span ``[start, stop)`` of the agent's tokens in :meth:`record`; empty without a tokenizer.

        Raises:
            TemplateError: The action has no ids, and the template rejects its calls.
            RuntimeError: No observation waits for an action.
        """
        if self._mark is None:
            raise RuntimeError("act() was called without an observation to answer: call observe() first")
        answer: Message = self._message(action)
        chat_format, token_ids = self.chat_format, action.token_ids
        start = len(self._earlier) + len(self.token_ids)
        self.was_cut, self._end_of_thought = False, []
        if chat_format is not None and token_ids is not None:
            self.token_ids += token_ids
            self._ended_by = chat_format.ended_by(token_ids, action.finish_reason)
            if self._ended_by is None and action.reasoning is not None:
                self._end_of_thought = chat_format.end_of_thought(token_ids)
        elif chat_format is not None:
            written = self._written(answer, action, limit, chat_format)
            if self.was_cut:
                text = chat_format.truncated_text(written)
                cut = read_answer(Action(text=text, token_ids=written, finish_reason="length"), chat_format)
                answer = self._message(cut)
                self._end_of_thought = chat_format.end_of_thought(written) if cut.reasoning is not None else []
            self.token_ids += written
        if self._end_of_thought and chat_format is not None and "written" in answer:
            answer["written"] += chat_format.decode(self._end_of_thought)  # later prompts have no open tag
        self._mark = None
        self._calls = calls = () if self.was_cut else action.tool_calls
        self._num_calls += len(calls)
        messages, shown = self.messages, self.prompt_messages
        messages.append(answer)
        if shown is not messages:
            shown.append(answer)
        return start, len(self._earlier) + len(self.token_ids)

    def _written(self, answer: Message, action: Action, limit: int | None, chat_format: ChatFormat) -> list[int]:
        """Encode an answer that was given as text, up to the limit."""
        open_ids, closed = chat_format.answer(answer, action.written)
        is_closed = limit is None or len(closed) <= limit
        written = closed if is_closed else open_ids[:limit]
        self.was_cut = not is_closed and len(written) < len(open_ids)
        self._ended_by = None
        if is_closed and closed != open_ids:
            self._ended_by = ENDED_BY_TEXT if chat_format.end_of_turn_id is None else closed[-1]
        return written

    def _message(self, action: Action) -> Message:
        answer: Message = {"role": "assistant", "content": action.text}
        chat_format = self.chat_format
        if action.reasoning is not None:
            answer["reasoning_content"] = action.reasoning
            is_tagged = action.written != action.text
            written = chat_format.written(action) if chat_format is not None and is_tagged else None
            if written is not None:
                answer["written"] = written
        if not action.tool_calls:
            return answer
        calls = structured_calls(action.tool_calls, self._num_calls)
        if calls and (chat_format is None or chat_format.separates_calls):
            answer["tool_calls"] = calls
        elif chat_format is not None and action.token_ids is not None and action.reasoning is None:
            answer["content"] = chat_format.decode(action.token_ids)
        elif calls:
            answer = with_text_calls({**answer, "tool_calls": calls})
        return answer


class AnswerSpan(NamedTuple):
    """The location of an assistant message in the tokens, as in :class:`~agentsgym.types.Turn`."""

    start: int
    stop: int
    prompt_start: int


def record_conversation(
    transcript: Transcript, messages: Sequence[Message], actions: Mapping[int, Action], chat_format: ChatFormat | None
) -> list[AnswerSpan]:
    """Record a conversation in a transcript, as an environment does with an agent that responds in text.

    Messages after the last assistant message are not recorded. ``actions`` has the action of each assistant message by
    the message's index, in order.

    Returns:
        The location of each assistant message.

    Raises:
        ConfigError: An assistant message follows no other message, or contains a word unknown to the tokenizer.
        TemplateError: The chat template rejects the messages.
    """
    spans: list[AnswerSpan] = []
    next_index = 0
    for turn, (index, action) in enumerate(actions.items()):
        if index == next_index:
            problem = (
                f"directly follows another one, messages[{index - 1}]: merge the two, or add a message between them"
                if index
                else "is the first message: add a message before it"
            )
            raise ConfigError(f"the assistant message messages[{index}] {problem}")
        transcript.observe(messages[next_index:index])
        prompt_start = transcript.segment_start
        start, stop = transcript.act(action)
        if chat_format is not None:
            ids = transcript.record()[start:stop]
            # Some tokenizers use one token for end of turn and unknown words.
            if ids and ids[-1] in chat_format.stop_token_ids:
                ids = ids[:-1]
            unknown = getattr(chat_format.tokenizer, "unk_token_id", None)
            if unknown is not None and unknown in ids:
                raise ConfigError(f"the tokenizer cannot encode part of {shown(action.text, 60)} (turn {turn})")
        spans.append(AnswerSpan(start, stop, prompt_start))
        next_index = index + 1
    return spans
