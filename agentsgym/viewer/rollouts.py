"""The page's data for a rollout with its conversation, turns and tokens and their texts, and for a task group."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from agentsgym.credit.settings import CreditSettings
from agentsgym.errors import StoreError
from agentsgym.fields import is_int
from agentsgym.judging.scores import INFO_KEY
from agentsgym.store.stored_tokenizers import read_stored_tokenizer, read_tokenizer
from agentsgym.texts import as_json
from agentsgym.viewer.plain import mean_of, number, numbers, text_of, truncate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from agentsgym.store.records import StoredRollout
    from agentsgym.types import Trajectory, Turn

_REPLACEMENT: Final = "\ufffd"
_MAX_PIECES: Final = 8  # no character is encoded by more tokens
_MAX_CACHED: Final = 200_000


_MAX_MESSAGE_CHARS: Final = 200_000
_MAX_VALUE_CHARS: Final = 100_000
_MAX_FACT_CHARS: Final = 2000
_MAX_NAME_CHARS: Final = 60  # of a named reward
_MAX_ACTION_CHARS: Final = 4000  # in the group view
_MAX_OBSERVATION_CHARS: Final = 1000  # before an action in the group view; the conversation shows everything

DecodeTokens = Callable[["str | None", Sequence[int]], "list[str] | None"]
"""(the name of a tokenizer, token ids) → their texts, or None if the tokenizer is unknown."""


def rollout_data(row: int, record: StoredRollout, decode: DecodeTokens) -> dict[str, Any]:
    """Return the page's data for a rollout."""
    trajectory = record.trajectory
    given = trajectory.info.get("note_turns")
    note_turns = [*filter(is_int(0), cast("list[Any]", given))] if isinstance(given, list) else []
    turn_of = {turn.message_index: index for index, turn in enumerate(trajectory.turns)}
    turns = [
        {
            "start": turn.start,
            "stop": turn.stop,
            "reward": number(turn.reward),
            "components": _components(turn.components),
            "invalid": turn.invalid,
            "note": index in note_turns,
            "exact": turn.exact,
            "episode": turn.episode,
            "role": None if turn.role is None else text_of(turn.role),
            "message": turn.message_index,
            "prompt_start": turn.prompt_start,
            "rewritten": None if turn.prompt_messages is None else len(turn.prompt_messages),
            **_call_of(trajectory, turn),
        }
        for index, turn in enumerate(trajectory.turns)
    ]
    return {
        "row": row,
        "headline": trajectory.headline,
        "outcome": trajectory.outcome,
        "facts": _facts(record),
        "env_config": _value(record.env_config),
        "task_data": _value(trajectory.task_data),
        "info": _value({key: value for key, value in trajectory.info.items() if key != INFO_KEY}),
        "judgments": _judgments(trajectory.info.get(INFO_KEY)),
        "error": trajectory.error,
        "stop_reason": trajectory.stop_reason.value,
        "final_reward": number(trajectory.final_reward),
        "messages": [_message(one, turn_of.get(index)) for index, one in enumerate(trajectory.messages)],
        "turns": turns,
        "tokens": _tokens(record, decode) if len(trajectory.token_ids) else None,
    }


def group_data(key: int, label: str, rows: Sequence[int], records: Sequence[StoredRollout]) -> dict[str, Any]:
    """Return the page's data for a task group of rollouts, (G,), with their indices in the folder, (G,)."""
    first = records[0].trajectory
    diverges_at = [None, *(first_difference(first, one.trajectory) for one in records[1:])]
    members = [
        {
            "row": row,
            "headline": record.trajectory.headline,
            "outcome": record.trajectory.outcome,
            "final_reward": number(record.trajectory.final_reward),
            "stop_reason": record.trajectory.stop_reason.value,
            "is_trained": _is_trained(record),
            "turns": _actions(record),
        }
        for row, record in zip(rows, records, strict=True)
    ]
    return {
        "key": key,
        "label": label,
        "settings": settings_text(records[0]),
        "members": members,
        "common_turns": min((turn for turn in diverges_at if turn is not None), default=len(first.turns)),
        "diverges_at": diverges_at,
    }


def settings_text(record: StoredRollout) -> str | None:
    """Return the settings of a rollout's stored advantages in one line; None if unknown."""
    credit: Any = record.extra.get("credit")
    if not isinstance(credit, Mapping) or not credit:
        return None
    values = CreditSettings.from_dict(cast("Mapping[str, Any]", credit)).as_dict()
    texts = [text_of(values.pop("advantage_estimator"))]
    if isinstance(values.get("options"), Mapping):
        values = {**values.pop("options"), **values}
    values["turn_credit"] = (record.env_config or {}).get("turn_credit", "step")
    for name, value in values.items():
        words = text_of(name).removesuffix("_rewards").replace("_", " ")
        texts.append(f"{words} {value:zg}" if isinstance(value, float) else f"{words} {text_of(value)}")
    return _shortened(" · ".join(texts), _MAX_FACT_CHARS)


def first_difference(a: Trajectory, b: Trajectory) -> int | None:
    """Return the first turn in which the observations or actions of two rollouts differ; None if there is none.

    If one rollout is a prefix of the other, this is the first additional turn of the longer one.
    """
    start_a = start_b = 0
    for k, (turn_a, turn_b) in enumerate(zip(a.turns, b.turns, strict=False)):
        stop_a, stop_b = turn_a.message_index + 1, turn_b.message_index + 1
        # A rewritten history may differ, too.
        prompts = [None if turn.prompt_messages is None else [*turn.prompt_messages] for turn in (turn_a, turn_b)]
        if a.messages[start_a:stop_a] != b.messages[start_b:stop_b] or prompts[0] != prompts[1]:
            return k
        start_a, start_b = stop_a, stop_b
    shorter, longer = sorted((len(a.turns), len(b.turns)))
    return None if shorter == longer else shorter


def _call_of(trajectory: Trajectory, turn: Turn) -> dict[str, Any]:
    """Return a turn's parent, and whether the turn continues the parent's conversation; empty without a parent."""
    if turn.parent is None:
        return {}
    parent, prompt = (
        [*(trajectory.messages[: one.message_index] if one.prompt_messages is None else one.prompt_messages)]
        for one in (trajectory.turns[turn.parent], turn)
    )
    answers = [message["role"] for message in prompt[len(parent) :]]
    return {"parent": turn.parent, "continues": prompt[: len(parent)] == parent and answers[:1] == ["assistant"]}


def _facts(record: StoredRollout) -> list[list[str]]:
    """Return the metadata of a rollout, as pairs of a name and a text."""
    trajectory = record.trajectory
    facts: dict[str, Any] = {
        "environment": record.env_class_path,
        "agent": record.agent,
        "run": record.run,
        "source": record.source,
        "step": record.step,
        "generation": record.generation,
        "task group": record.group,
        "policy version": record.policy_version,
        "task": trajectory.task_index,
        "rollout": trajectory.rollout_index,
        "seed": trajectory.seed,
        "final reward": trajectory.final_reward,
        **{f"reward of role {text_of(role)}": reward for role, reward in trajectory.final_rewards.items()},
        **{f"reward {text_of(name)}": amount for name, amount in (trajectory.final_components or {}).items()},
        "turns": len(trajectory.turns),
        "tokens": len(trajectory.token_ids) or None,
        "agent tokens": sum(trajectory.agent_token_mask) if len(trajectory.token_ids) else None,
        "retries": trajectory.num_retries or None,
        "errors while closing": trajectory.num_close_errors or None,
        "trained on": {True: "yes", False: "no"}.get(cast("Any", _is_trained(record))),
        "session": trajectory.session_id,
        "created": record.created_at.isoformat(timespec="seconds"),
        "tokenizer": record.tokenizer,
        "stored inexactly": "; ".join(record.inexact) or None,
    }
    return [
        [name, f"{value:zg}" if isinstance(value, float) else _shortened(text_of(value), _MAX_FACT_CHARS)]
        for name, value in facts.items()
        if value is not None
    ]


def _judgments(given: Any) -> list[dict[str, Any]]:
    """Return the judgments of a rollout, whose fields may be anything in a store that another program wrote."""
    found: list[dict[str, Any]] = []
    for one in cast("Sequence[Any]", given) if isinstance(given, list | tuple) else ():
        judgment = cast("Mapping[str, Any]", one) if isinstance(one, Mapping) else dict[str, Any]()
        scores, answers, turn = (judgment.get(name) for name in ("scores", "answers", "turn"))
        texts = cast("Sequence[Any]", answers) if isinstance(answers, list | tuple) else ()
        found.append(
            {
                "judge": truncate(text_of(judgment.get("judge")), _MAX_NAME_CHARS)[0],
                "turn": turn if type(turn) is int else None,
                "scores": _components(cast("Mapping[str, float]", scores) if isinstance(scores, Mapping) else None),
                "reason": _shortened(text_of(judgment.get("reason")), _MAX_FACT_CHARS),
                "answers": [_shortened(text_of(text), _MAX_MESSAGE_CHARS) for text in texts],
                "error": None if judgment.get("error") is None else text_of(judgment["error"]),
            }
        )
    return found


def _components(components: Mapping[str, float] | None) -> dict[str, Any]:
    """Return the named rewards of a turn; empty for a plain number."""
    return {truncate(text_of(name), _MAX_NAME_CHARS)[0]: number(value) for name, value in (components or {}).items()}


def _is_trained(record: StoredRollout) -> bool | None:
    """Whether training used a rollout; None if unknown."""
    flag: Any = record.extra.get("is_trained")
    return flag if isinstance(flag, bool) else None


def _actions(record: StoredRollout) -> list[dict[str, Any]]:
    """Return a group member's turns: the agent's text with tool calls, and the observations since its last action."""
    messages = record.trajectory.messages
    actions: list[dict[str, Any]] = []
    begin = 0
    for turn in record.trajectory.turns:
        observation = "\n".join(text_of(message.get("content")) for message in messages[begin : turn.message_index])
        begin = turn.message_index + 1
        message = messages[turn.message_index] if 0 <= turn.message_index < len(messages) else dict[str, Any]()
        calls = [f"{call['name']}({call['arguments']})" for call in _calls(message)]
        parts = filter(None, [text_of(message.get("content")), *calls])
        text, num_omitted = truncate("\n".join(parts), _MAX_ACTION_CHARS)
        advantages = record.advantages[turn.start : turn.stop] if record.advantages is not None else ()
        actions.append(
            {
                "observation": truncate(observation, _MAX_OBSERVATION_CHARS)[0],
                "text": text,
                "num_omitted": num_omitted,
                "reward": number(turn.reward),
                "advantage": number(mean_of(advantages)),
                "invalid": turn.invalid,
            }
        )
    return actions


def _value(value: Any) -> str:
    return _shortened(json.dumps(as_json(value), ensure_ascii=False, indent=1), _MAX_VALUE_CHARS)


def _shortened(text: str, limit: int) -> str:
    """Return the text, or its beginning and a note on the number of characters omitted."""
    shown, num_omitted = truncate(text, limit)
    return f"{shown} … {num_omitted:,} characters omitted" if num_omitted else shown


def _message(message: Mapping[str, Any], turn: int | None) -> dict[str, Any]:
    content, num_omitted = truncate(text_of(message.get("content")), _MAX_MESSAGE_CHARS)
    reasoning, num_omitted_reasoning = truncate(text_of(message.get("reasoning_content")), _MAX_MESSAGE_CHARS)
    return {
        "role": text_of(message.get("role")),
        "content": content,
        "reasoning": reasoning or None,
        "calls": _calls(message),
        "turn": turn,
        "name": None if message.get("name") is None else text_of(message.get("name")),
        "num_omitted": num_omitted + num_omitted_reasoning,
    }


def _calls(message: Mapping[str, Any]) -> list[dict[str, str]]:
    given: Any = message.get("tool_calls") or ()
    calls: list[dict[str, str]] = []
    for call in cast("Sequence[Any]", given) if isinstance(given, Sequence) else ():
        function: Any = cast("Mapping[str, Any]", call).get("function") if isinstance(call, Mapping) else None
        is_function_call = isinstance(function, Mapping)
        name, arguments = (
            (text_of(function.get(field)) for field in ("name", "arguments"))
            if is_function_call
            else ("", text_of(call))
        )
        calls.append({"name": name, "arguments": _shortened(arguments, _MAX_MESSAGE_CHARS)})
    return calls


def _tokens(record: StoredRollout, decode: DecodeTokens) -> dict[str, Any]:
    trajectory = record.trajectory
    ids = [*map(int, trajectory.token_ids)]
    return {
        "ids": ids,
        "texts": decode(record.tokenizer, ids),
        "trained": trajectory.agent_token_mask,
        "is_trained": _is_trained(record),
        "rewards": numbers(trajectory.per_token_rewards) or None,
        "advantages": numbers(record.advantages),
        "logprobs": numbers(trajectory.logprobs),
        "trainer_logprobs": numbers(record.trainer_logprobs),
        "entropies": numbers(record.entropies),
    }


class TokenTexts:
    """Decodes tokens with the tokenizers of a store; thread-safe."""

    def __init__(self, folder: Path, path: Path | None = None) -> None:
        """Set up the decoder; a tokenizer in the store is read only when it is first used.

        Args:
            folder: The store.
            path: A ``tokenizer.json``, or its folder, for all rollouts; None for the tokenizer that each rollout names.

        Raises:
            StoreError: ``path`` is not a tokenizer.
        """
        self._folder = folder
        self._lock = threading.Lock()
        self._decoder = functools.cache(self._read)
        self._shared: TokenDecoder | None = None
        if path is not None:
            self._shared = TokenDecoder(read_tokenizer(path / "tokenizer.json" if path.is_dir() else path))

    def texts(self, name: str | None, ids: Sequence[int]) -> list[str] | None:
        """Decode the tokens of a rollout, (T,), as :meth:`TokenDecoder.texts` does, with the tokenizer of its name.

        Returns None if the tokenizer is unknown or damaged.
        """
        with self._lock:
            decoder = self._shared or self._decoder(name)
            return None if decoder is None else decoder.texts(ids)

    def _read(self, name: str | None) -> TokenDecoder | None:
        tokenizer = None
        with contextlib.suppress(StoreError):  # if it is damaged, ids are shown
            tokenizer = None if name is None else read_stored_tokenizer(self._folder, name)
        return None if tokenizer is None else TokenDecoder(tokenizer)


class TokenDecoder:
    """Decodes tokens with one tokenizer, and caches the results."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer: Any = tokenizer
        self._cache: dict[tuple[int, ...], str] = {}

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Decode each token to the text that it adds to the preceding text, (T,).

        If several tokens encode a character, it is the text of the last of them, and the texts of the others are empty.
        Tokens that never form a character are decoded to the replacement character.
        """
        texts: list[str] = []
        begin = 0  # the first of the tokens that do not form a character yet
        for end in range(1, len(ids) + 1):
            before, new = (*ids[max(0, begin - 1) : begin],), (*ids[begin:end],)
            prefix, both = self._decoded(before), self._decoded((*before, *new))
            text = both[len(prefix) :] if both.startswith(prefix) else self._decoded(new)
            if text.endswith(_REPLACEMENT) and end - begin < _MAX_PIECES and end < len(ids):
                texts.append("")
            else:
                texts.append(text)
                begin = end
        return texts

    def _decoded(self, ids: tuple[int, ...]) -> str:
        text = self._cache.get(ids)
        if text is None:
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            known = (
                [one for one in ids if self._tokenizer.id_to_token(one) is not None] if min(ids, default=0) >= 0 else []
            )
            text = self._cache[ids] = self._tokenizer.decode(known, skip_special_tokens=False)
        return text
