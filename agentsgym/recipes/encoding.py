"""Stored rollouts in the tokens of a policy that did not play them: their texts, encoded anew, to be imitated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from agentsgym.envs.conversation import chat_format_of
from agentsgym.errors import ConfigError, TemplateError
from agentsgym.recorded.replay import replay
from agentsgym.store.records import StoredRollout
from agentsgym.texts import sentence_of
from agentsgym.tokens.chat_format import ChatFormat
from agentsgym.tokens.transcript import Transcript
from agentsgym.types import Action, Trajectory, Turn

_DEFAULTS: Final[Mapping[str, Any]] = {
    "history": "append",
    "guard_added_tokens": False,
    "unguarded_tokens": [],
    "chat_template_kwargs": {},
}


class Encoder:
    """Encodes rollouts with a tokenizer, as an environment would record an agent that answers in text."""

    def __init__(self, tokenizer: Any) -> None:
        """Set up.

        Args:
            tokenizer: The policy's.
        """
        self._tokenizer = tokenizer
        self._formats: dict[str, ChatFormat] = {}

    def encode(self, record: StoredRollout) -> Trajectory:
        """Give a rollout with the tokens of its messages; no turn of it is exact, and it has no log-probabilities.

        What the environment said behind the last answer is left out.

        Raises:
            ConfigError: It cannot be encoded: calls of tools are in it, its history was rewritten by a function, or the
                tokenizer does not know a word of an answer.
        """
        own = record.trajectory
        if any(one.get("tool_calls") or one["role"] == "tool" for one in own.messages):
            raise ConfigError("there are calls of tools, which are not encoded anew")
        if any(turn.prompt_messages is not None for turn in own.turns):
            raise ConfigError("a function rewrote its history")
        config = {**_DEFAULTS, **{name: one for name, one in (record.env_config or {}).items() if name in _DEFAULTS}}
        try:
            chat_format = self._format(config)
            transcript = Transcript(chat_format, config["history"])
            turns = self._replayed(own, transcript, chat_format)
        except TemplateError as error:
            raise ConfigError(sentence_of(error)) from error
        return replace(own, token_ids=transcript.record(), turns=turns, logprobs=None, per_token_rewards=())

    def _replayed(self, own: Trajectory, transcript: Transcript, chat_format: ChatFormat) -> list[Turn]:
        """Hold the conversation again, and find where its answers lie."""
        answers = {
            turn.message_index: Action(
                text=own.messages[turn.message_index]["content"],
                reasoning=own.messages[turn.message_index].get("reasoning_content"),
            )
            for turn in own.turns
        }
        places = replay(transcript, own.messages, answers, chat_format)
        return [replace(turn, **place._asdict(), exact=False) for turn, place in zip(own.turns, places, strict=True)]

    def _format(self, config: Mapping[str, Any]) -> ChatFormat:
        key = json.dumps(config, sort_keys=True, default=repr)
        if key not in self._formats:
            found = chat_format_of(self._tokenizer, config)
            assert found is not None
            self._formats[key] = found
        return self._formats[key]
