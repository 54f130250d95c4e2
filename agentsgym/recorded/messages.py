"""Build trajectories from chat conversations: a single one, or many from a JSON Lines file or a dataset."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, Unpack, cast

from agentsgym.credit.rewards import per_token_rewards
from agentsgym.errors import ConfigError, TemplateError, did_you_mean
from agentsgym.fields import Check, is_dict, is_int, is_list, is_number, is_str, one_of, or_none, require
from agentsgym.texts import as_json, sentence_of, shown
from agentsgym.tokens.calls.values import MalformedCallError, tool_call
from agentsgym.tokens.chat_format import ChatFormat
from agentsgym.tokens.transcript import Transcript, record_conversation
from agentsgym.types import Action, Message, StopReason, ToolCall, Trajectory, Turn

ROLES: Final = ("system", "user", "assistant", "tool")
_SAME_ROLE: Final = {"developer": "system"}  # the name in OpenAI's reasoning models
_UNSUPPORTED_FIELDS: Final = ("function_call", "refusal", "audio")  # of OpenAI's, rendered by no chat template
_CALLS: Final = "tool_calls"

Rewards = float | Sequence[float]
"""A single number, which becomes the reward of the last turn, or one number per turn, (K,)."""

_OPTIONS: Final = ("tools", "chat_template_kwargs", "stop_reason", "session_id", "task_data", "info")
_Row = Mapping[str, Any]
_REASONS: Final = [reason for reason in StopReason if reason is not StopReason.FAILED]
_VALID: Final[Mapping[str, tuple[Check, str]]] = {
    "stop_reason": (one_of(*_REASONS), f"one of {', '.join(_REASONS)}"),
    "session_id": (is_str, "a string"),
    "task_index": (is_int(0), "an int of at least 0"),
    "rollout_index": (is_int(0), "an int of at least 0"),
    "task_data": (is_dict, "a dict"),
    "info": (is_dict, "a dict"),
}


class RecordingMetadata(TypedDict, total=False):
    """The metadata of a recorded rollout; defaults are as in :class:`~agentsgym.types.Trajectory`.

    Attributes:
        stop_reason: The reason why the rollout ended: a :class:`~agentsgym.types.StopReason` or its value; ``"done"``
            by default.
        session_id: The name of the session.
        task_index: The index of the task; rollouts with the same index are compared with each other.
        rollout_index: The index of the rollout among those of its task.
        task_data: The task's data.
        info: The environment's final info; ``info["success"]`` is whether the task was solved.
    """

    stop_reason: StopReason | str
    session_id: str
    task_index: int
    rollout_index: int
    task_data: Mapping[str, Any]
    info: Mapping[str, Any]


def trajectory_from_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    rewards: Rewards,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
    history: Literal["append", "rerender"] = "append",
    **metadata: Unpack[RecordingMetadata],
) -> Trajectory:
    """Convert a conversation recorded elsewhere, as an environment would record an agent that responds in text.

    Each assistant message is a turn. Its text is tokenized once and ended by the template's end-of-turn token, so no
    turn is exact and there are no log-probabilities. Messages after the last assistant message are included in
    ``messages`` but not in ``token_ids``.

    Args:
        tokenizer: The tokenizer, whose chat template formats the conversation. Without a chat template, texts are
            concatenated; with None instead of a tokenizer, the trajectory has no tokens.
        messages: Dicts with ``role`` and ``content``. The roles are system (or developer), user, assistant and tool;
            the content is a string, None, or a list of text parts. Assistant messages may have ``tool_calls``
            (arguments as an object, or as JSON text as in OpenAI's format) and ``reasoning_content``.
        rewards: A single number, which becomes the reward of the last turn, or one number per turn, (K,).
        tools: The JSON schemas of the tools in the prompt.
        chat_template_kwargs: Additional variables for the chat template (``enable_thinking``, …).
        history: The construction of each turn's prompt: ``"append"``, all tokens recorded before it, or
            ``"rerender"``, the entire conversation rendered again, as servers do; if the template then drops earlier
            reasoning, a new segment begins.
        **metadata: The rollout's metadata: ``stop_reason``, ``session_id``, ``task_index``, ``rollout_index``,
            ``task_data`` and ``info``, see :class:`~agentsgym.recorded.messages.RecordingMetadata`.

    Raises:
        ConfigError: A message is invalid, there is no assistant message, no message precedes an assistant message, the
            number of rewards differs from the number of turns, a reward is not finite, or an assistant message contains
            a word that is unknown to the tokenizer.
        TemplateError: The chat template rejects the messages.
    """
    require("history", history, one_of("append", "rerender"), "'append' or 'rerender'")
    checked_metadata = _checked(cast("Mapping[str, Any]", metadata))
    parsed, actions = parse_messages(messages)
    if not actions:
        raise ConfigError(f"messages must contain an assistant message, got {shown(messages)}")
    reward_of_turn = _turn_rewards(rewards, len(actions))
    require("tools", tools, lambda value: is_list(value) and all(map(is_dict, value)), "a list of JSON schemas")
    require("chat_template_kwargs", chat_template_kwargs, or_none(is_dict), "a dict or None")
    require(
        "tokenizer", tokenizer, lambda one: one is None or hasattr(one, "decode"), "a transformers tokenizer or None"
    )
    chat_format = None
    if tokenizer is not None:
        chat_format = ChatFormat.of(
            tokenizer, append=history != "rerender", tools=tools, template_options=chat_template_kwargs
        )
    transcript = Transcript(chat_format, history)
    spans = record_conversation(transcript, parsed, actions, chat_format)
    turns = [
        Turn(**span._asdict(), reward=reward, exact=False, message_index=index)
        for span, reward, index in zip(spans, reward_of_turn, actions, strict=True)
    ]
    if checked_metadata["stop_reason"] is StopReason.INVALID:  # the invalid action that exceeded ``error_allowance``
        turns[-1] = replace(turns[-1], invalid=True)
    trajectory = Trajectory(
        token_ids=transcript.record(),
        turns=turns,
        messages=[*transcript.messages, *parsed[len(transcript.messages) :]],
        final_reward=math.fsum(turn.reward for turn in turns),
        **checked_metadata,
    )
    return replace(trajectory, per_token_rewards=per_token_rewards(trajectory))


def _checked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Check the metadata of a recording, and return it with a stop reason."""
    for name, value in metadata.items():
        if name not in _VALID:
            raise ConfigError(f"{name!r} is not a metadata field of a recorded rollout{did_you_mean(name, _VALID)}")
        valid, expected = _VALID[name]
        if not valid(value):
            raise ConfigError(f"{name} must be {expected}, got {shown(value)}")
    return {**metadata, "stop_reason": StopReason(metadata.get("stop_reason", StopReason.DONE))}


def _turn_rewards(rewards: Any, num_turns: int) -> list[float]:
    """Return the reward of each turn, (K,).

    >>> _turn_rewards(1, 3), _turn_rewards([0.5, 1], 2)
    ([0.0, 0.0, 1.0], [0.5, 1.0])
    """
    given = rewards.tolist() if callable(getattr(rewards, "tolist", None)) else rewards  # an array, or its scalar
    if isinstance(given, Sequence) and not isinstance(given, str):
        values = [*cast("Sequence[Any]", given)]
        if len(values) != num_turns:
            raise ConfigError(
                f"rewards must be a single number or one number per assistant message ({num_turns}), "
                f"got {len(values)}: {shown(values)}"
            )
    else:
        values = [*[0.0] * (num_turns - 1), given]
    for index, value in enumerate(values):
        if not is_number()(value):
            raise ConfigError(f"rewards must be finite numbers, got {shown(value)} for assistant message {index}")
    return [float(value) for value in values]


def trajectories_from_messages(
    tokenizer: Any,
    rows: str | Path | Iterable[_Row],
    *,
    rewards: Rewards | None = None,
    history: Literal["append", "rerender"] = "append",
) -> list[Trajectory]:
    """Convert conversations recorded elsewhere, and group them by task.

    A row has ``messages``, and ``rewards`` or ``reward``: one number, or one per assistant message. It may also have
    ``success`` and other arguments of :func:`trajectory_from_messages`: ``tools`` (as a list or JSON text),
    ``chat_template_kwargs``, ``stop_reason``, ``session_id``, ``task_data`` and ``info``. Other keys are ignored, and
    nulls count as missing. Rows belong to the same task if they have the same ``task``; without it, the same
    ``task_data``; without either, the same messages before the first assistant message. Tasks are numbered in order of
    appearance (``task_index``), and so are the rollouts of each task (``rollout_index``).

    Args:
        tokenizer: The tokenizer, whose chat template formats the conversations; None for trajectories without tokens.
        rows: The path to a file with one JSON object per line, a ``datasets.Dataset``, or any iterable of dicts.
        rewards: The rewards for rows that have none; None rejects such rows.
        history: The construction of prompts, as in :func:`trajectory_from_messages`.

    Returns:
        The trajectories, in the order of the rows.

    Raises:
        ConfigError: The file or a row is invalid; the error names the row.
        TemplateError: The chat template rejects the messages of a row; the error names the row.
    """
    tasks: dict[str, int] = {}
    counts: dict[int, int] = {}
    trajectories: list[Trajectory] = []
    for where, row in _numbered(rows):
        try:
            arguments = _arguments(row, rewards)
            index = tasks.setdefault(_task_of(row), len(tasks))
            arguments |= {"task_index": index, "rollout_index": counts.get(index, 0)}
            trajectory = trajectory_from_messages(tokenizer, history=history, **arguments)
        except (ConfigError, TemplateError) as error:
            raise type(error)(f"{where}: {sentence_of(error)}") from error
        except RecursionError as error:
            raise ConfigError(f"{where} is nested too deeply") from error
        counts[index] = counts.get(index, 0) + 1
        trajectories.append(trajectory)
    return trajectories


def _numbered(rows: Any) -> Iterator[tuple[str, _Row]]:
    """Yield each row without its nulls, together with a name for it in errors."""
    if isinstance(rows, str | Path):
        named_rows = ((f"{rows}, line {number}", row) for number, row in json_lines(Path(rows)))
    elif isinstance(rows, Iterable) and getattr(cast("Any", rows), "shape", None) != ():  # NumPy's scalars are iterable
        named_rows = ((f"row {index}", row) for index, row in enumerate(cast("Iterable[Any]", rows)))
    else:
        raise ConfigError(
            f"rows must be the path to a JSON Lines file, or a list of rows, got {shown(cast('object', rows))}"
        )
    for where, row in named_rows:
        if not isinstance(row, Mapping):
            raise ConfigError(f"{where} must be an object with 'messages' and 'reward' or 'rewards', got {shown(row)}")
        yield where, {name: value for name, value in cast("_Row", row).items() if value is not None}


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Read a JSON Lines file: the number of each line that is not blank, from 1, and its value.

    Raises:
        ConfigError: The file cannot be read, or a line is not valid JSON.
    """
    try:
        file = path.open("rb")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {sentence_of(error)}") from error
    with file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _value_of(line, f"{path}, line {number}")


def _value_of(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {sentence_of(error)}") from error


def _arguments(row: _Row, rewards: Rewards | None) -> dict[str, Any]:
    """Return a row's arguments for :func:`trajectory_from_messages`."""
    arguments = {name: row[name] for name in _OPTIONS if name in row}
    if isinstance(arguments.get("tools"), str):
        arguments["tools"] = _value_of(arguments["tools"].encode(errors="replace"), "tools")
    if "success" in row:
        if not isinstance(row["success"], bool):
            raise ConfigError(f"success must be true or false, got {shown(row['success'])}")
        info = arguments.setdefault("info", {})
        if isinstance(info, Mapping):  # any other value is rejected later
            arguments["info"] = {**cast("_Row", info), "success": row["success"]}
    given = [row[name] for name in ("rewards", "reward") if name in row]
    if len(given) > 1:
        raise ConfigError("only one of 'rewards' and 'reward' is allowed, got both")
    if not given and rewards is None:
        raise ConfigError("'rewards' or 'reward' is missing: add one, or pass the argument rewards")
    return {**arguments, "messages": row.get("messages", ()), "rewards": given[0] if given else rewards}


def _task_of(row: _Row) -> str:
    """Return a string that is equal for all rows of the same task."""
    for name in ("task", "task_data"):
        if name in row:
            return json.dumps(as_json([name, row[name]]), sort_keys=True)
    messages: Any = row.get("messages", ())
    prompt: list[Any] = []
    for message in cast("Iterable[Any]", messages) if isinstance(messages, list | tuple) else ():
        role = cast("_Row", message).get("role") if isinstance(message, Mapping) else None
        if isinstance(role, str) and role == "assistant":
            break
        prompt.append(message)
    return json.dumps(as_json(["prompt", prompt]), sort_keys=True)


def parse_messages(messages: Any) -> tuple[list[Message], dict[int, Action]]:
    """Parse a conversation.

    Args:
        messages: Dicts with ``role`` and ``content``, which is a string, None, or a list of text parts. An assistant
            message may have ``tool_calls`` (arguments as an object or as JSON text) and ``reasoning_content`` (or
            ``reasoning``).

    Returns:
        The messages, without tool calls, and a dict from the index of each assistant message to its action.
    """
    if not _is_sequence(messages) or not messages:
        raise ConfigError(f"messages must be a list of at least one chat message, got {shown(messages)}")
    parsed: list[Message] = []
    actions: dict[int, Action] = {}
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        plain = _plain(message, where)
        parsed.append(plain)
        calls = [_call(call, f"{where}['{_CALLS}'][{n}]") for n, call in enumerate(_calls_of(message, where))]
        if plain["role"] == "assistant":
            actions[index] = Action(text=plain["content"], reasoning=plain.get("reasoning_content"), tool_calls=calls)
    return parsed, actions


def _plain(message: Any, where: str) -> Message:
    """Convert a message to this library's format, without its tool calls."""
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where} must be a dict with 'role' and 'content', got {shown(message)}")
    given = cast("Mapping[str, Any]", message)
    role = given.get("role")
    if not isinstance(role, str) or (role := _SAME_ROLE.get(role, role)) not in ROLES:
        raise ConfigError(f"{where} must have one of the roles {', '.join(ROLES)}, got {shown(role)}")
    for name in _UNSUPPORTED_FIELDS:
        if not _is_empty(given.get(name)):
            raise ConfigError(
                f"{where} has the field {name!r}, which chat templates ignore: move its value to content or tool_calls"
            )
    plain: dict[str, Any] = {"role": role, "content": _text(given.get("content"), f"{where}['content']")}
    if role == "assistant":
        thought = next(
            (given[name] for name in ("reasoning_content", "reasoning") if given.get(name) is not None), None
        )
        if thought is not None:
            plain["reasoning_content"] = _text(thought, f"{where}['reasoning_content']")
    if role == "tool":
        plain |= {
            name: _text(given[name], f"{where}[{name!r}]")
            for name in ("tool_call_id", "name")
            if given.get(name) is not None
        }
    return cast("Message", plain)


def _text(content: Any, where: str) -> str:
    """Convert message content to a string: None to an empty one, and a list of text parts to their concatenation."""
    if content is None:
        return ""
    if _is_sequence(content):
        texts: list[str] = []
        for index, part in enumerate(cast("Sequence[Any]", content)):
            text = _get(part, "text") if isinstance(part, Mapping) else part
            if not isinstance(text, str):
                given = shown(cast("object", part))
                raise ConfigError(
                    f"{where}[{index}] must be a text part such as {{'type': 'text', 'text': …}}, got {given}"
                )
            texts.append(_text(text, f"{where}[{index}]"))
        return "".join(texts)
    if not isinstance(content, str):
        raise ConfigError(f"{where} must be a string, a list of text parts, or None, got {shown(content)}")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} must be valid Unicode, got {shown(content)}") from error
    return content


def _get(value: Any, name: str) -> Any:
    """Return a dict's field; None if the value is not a dict or lacks the field."""
    return cast("Mapping[str, Any]", value).get(name) if isinstance(value, Mapping) else None


def _calls_of(message: Mapping[str, Any], where: str) -> Sequence[Any]:
    calls = message.get(_CALLS)
    if _is_empty(calls):
        return ()
    if not _is_sequence(calls) or message["role"] != "assistant":
        raise ConfigError(
            f"{where}['{_CALLS}'] must be a list, and only assistant messages may have it, got {shown(calls)}"
        )
    return cast("Sequence[Any]", calls)


def _call(call: Any, where: str) -> ToolCall:
    """Parse a tool call, with or without OpenAI's ``function`` wrapper; arguments are an object or JSON text."""
    function = _get(call, "function") or call
    arguments = _get(function, "arguments")
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        return tool_call(_get(function, "name"), {} if arguments is None else arguments, _get(call, "id"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{where} must have arguments that are valid JSON, got {shown(arguments)}: {error}"
        ) from error
    except MalformedCallError as error:
        raise ConfigError(f"{where} {error}, got {shown(call)}") from error


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, bool | str | Sequence | Mapping) and not value)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
