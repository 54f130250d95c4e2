"""Make a trajectory from a conversation of chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack, cast

from agentsgym.errors import ConfigError
from agentsgym.fields import one_of, require
from agentsgym.recorded.chat_shapes import read_messages
from agentsgym.recorded.metadata import About, Rewards, check_tokenizer, checked_about, finished, turn_rewards
from agentsgym.recorded.replay import replay
from agentsgym.texts import shown
from agentsgym.tokens.chat_format import ChatFormat
from agentsgym.tokens.transcript import Transcript
from agentsgym.types import Trajectory, Turn


def trajectory_from_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    rewards: Rewards,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
    history: Literal["append", "rerender"] = "append",
    **about: Unpack[About],
) -> Trajectory:
    """Record an external conversation, as an environment records an agent that answers in text.

    Each message of the assistant is a turn. Its text is encoded once and closed by the template's end of turn, so no
    turn is exact and there are no log-probabilities. Messages after the last answer are kept as messages but not as
    tokens.

    Args:
        tokenizer: The tokenizer, whose chat template formats the conversation; without a template texts are
            concatenated, and None gives a trajectory without tokens.
        messages: Dicts with ``role`` and ``content``, of roles system (or developer), user, assistant and tool.
            Contents are texts, null, or parts of text. Answers may have ``tool_calls`` (arguments as an object, or as
            JSON text as in OpenAI's format) and ``reasoning_content``.
        rewards: One number in total, for the last turn, or one per turn, (K,).
        tools: The JSON schemas of the tools in the prompt.
        chat_template_kwargs: Further variables of the chat template (``enable_thinking``, …).
        history: The form of an answer's prompt: ``"append"``, everything recorded before it, or ``"rerender"``, the
            whole conversation rendered again, as servers do: if the template drops old thinking, a new segment begins.
        **about: The rollout's metadata: ``stop_reason``, ``session_id``, ``task_index``, ``rollout_index``,
            ``task_data`` and ``info``, see :class:`~agentsgym.recorded.metadata.About`.

    Raises:
        ConfigError: A message is invalid, none is the assistant's, an answer has nothing before it, the rewards do not
            match the answers or are not finite, or an answer contains a word that is unknown to the tokenizer.
        TemplateError: The chat template rejects the messages.
    """
    require("history", history, one_of("append", "rerender"), "'append' or 'rerender'")
    facts = checked_about(cast("Mapping[str, Any]", about))
    read, answers = read_messages(messages)
    if not answers:
        raise ConfigError(f"messages must contain an assistant message, got {shown(messages)}")
    paid = turn_rewards(rewards, len(answers), "answer")
    chat_format = _format_of(tokenizer, tools, chat_template_kwargs, history)
    transcript = Transcript(chat_format, history)
    places = replay(transcript, read, answers, chat_format)
    turns = [
        Turn(**place._asdict(), reward=reward, exact=False, message_index=index)
        for place, reward, index in zip(places, paid, answers, strict=True)
    ]
    return finished(transcript.record(), turns, [*transcript.messages, *read[len(transcript.messages) :]], None, facts)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, Mapping) for one in cast("Sequence[Any]", value))


def _format_of(tokenizer: Any, tools: Any, options: Any, history: str) -> ChatFormat | None:
    require("tools", tools, _are_schemas, "a list of JSON schemas")
    require("chat_template_kwargs", options, lambda value: isinstance(value, Mapping | None), "a dict or None")
    check_tokenizer(tokenizer)
    if tokenizer is None:
        return None
    return ChatFormat.of(
        tokenizer,
        append=history != "rerender",
        tools=tools,
        template_options=options,
    )
