"""Conversations of text, and their record: what the tests of the transcript share."""

from functools import cache
from typing import Any

from agentsgym.testing import chat_tokenizer
from agentsgym.tokens.transcript import ChatFormat, Transcript
from agentsgym.types import Action, Message

tokenizer_of = cache(chat_tokenizer)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def opening(system: str | None, question: str) -> list[Message]:
    return [user(question)] if system is None else [{"role": "system", "content": system}, user(question)]


def record(tokenizer: Any, conversation: Any) -> Transcript:
    """Play a system message or None, the first question, and (answer, observation) pairs."""
    system, question, turns = conversation
    transcript = Transcript(ChatFormat.of(tokenizer))
    transcript.observe(opening(system, question))
    for answer, observation in turns:
        transcript.act(Action(text=answer))
        transcript.observe([user(observation)])
    return transcript
