"""Re-encode the texts of stored rollouts with another policy's tokenizer, for imitation."""

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
    """Encodes rollouts with a tokenizer, as an environment records an agent that answers in text."""

    def __init__(self, tokenizer: Any) -> None:
        """Store the tokenizer.

        Args:
            tokenizer: The policy's tokenizer.
        """
        self._tokenizer = tokenizer
        self._formats: dict[str, ChatFormat] = {}

    def encode(self, record: StoredRollout) -> Trajectory:
        """Return a rollout with the tokens of its messages; its turns are not exact and have no log-probabilities.

        Observations after the last answer are left out.

        Raises:
            ConfigError: The rollout has tool calls, a function rewrote its history, or an answer has a word that the
                tokenizer does not know.
        """
        own = record.trajectory
        if any(one.get("tool_calls") or one["role"] == "tool" for one in own.messages):
            raise ConfigError("rollouts with tool calls cannot be re-encoded")
        if any(turn.prompt_messages is not None for turn in own.turns):
            raise ConfigError("rollouts whose history was rewritten by a function cannot be re-encoded")
        config = {**_DEFAULTS, **{name: one for name, one in (record.env_config or {}).items() if name in _DEFAULTS}}
        try:
            chat_format = self._format(config)
            transcript = Transcript(chat_format, config["history"])
            turns = self._replayed(own, transcript, chat_format)
        except TemplateError as error:
            raise ConfigError(sentence_of(error)) from error
        return replace(own, token_ids=transcript.record(), turns=turns, logprobs=None, per_token_rewards=())

    def _replayed(self, own: Trajectory, transcript: Transcript, chat_format: ChatFormat) -> list[Turn]:
        """Replay the conversation, and locate its answers."""
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
