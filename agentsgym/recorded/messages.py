"""Make trajectories from conversations of chat messages: one, or many from lines of a file or rows of a dataset."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Unpack, cast

from agentsgym.errors import ConfigError, TemplateError
from agentsgym.fields import one_of, require
from agentsgym.recorded.chat_shapes import read_messages
from agentsgym.recorded.metadata import About, Rewards, check_tokenizer, checked_about, finished, turn_rewards
from agentsgym.recorded.replay import replay
from agentsgym.texts import as_json, sentence_of, shown
from agentsgym.tokens.chat_format import ChatFormat
from agentsgym.tokens.transcript import Transcript
from agentsgym.types import Trajectory, Turn

_OPTIONS: Final = ("tools", "chat_template_kwargs", "stop_reason", "session_id", "task_data", "info")
_Row = Mapping[str, Any]


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
    reward_of_turn = turn_rewards(rewards, len(answers), "answer")
    require("tools", tools, _are_schemas, "a list of JSON schemas")
    options = chat_template_kwargs
    require("chat_template_kwargs", options, lambda value: isinstance(value, Mapping | None), "a dict or None")
    check_tokenizer(tokenizer)
    chat_format = None
    if tokenizer is not None:
        chat_format = ChatFormat.of(tokenizer, append=history != "rerender", tools=tools, template_options=options)
    transcript = Transcript(chat_format, history)
    places = replay(transcript, read, answers, chat_format)
    turns = [
        Turn(**place._asdict(), reward=reward, exact=False, message_index=index)
        for place, reward, index in zip(places, reward_of_turn, answers, strict=True)
    ]
    return finished(transcript.record(), turns, [*transcript.messages, *read[len(transcript.messages) :]], None, facts)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, Mapping) for one in cast("Sequence[Any]", value))


def trajectories_from_messages(
    tokenizer: Any,
    rows: str | Path | Iterable[_Row],
    *,
    rewards: Rewards | None = None,
    history: Literal["append", "rerender"] = "append",
) -> list[Trajectory]:
    """Record external conversations, and group them by task.

    A row has ``messages``, and ``rewards`` or ``reward``: one number, or one per answer. It may have further arguments
    of :func:`trajectory_from_messages`: ``tools`` (also as JSON text), ``chat_template_kwargs``, ``stop_reason``,
    ``session_id``, ``task_data`` and ``info``; and ``success``. Other keys are ignored, and nulls count as missing.
    Rows belong to one task if they have the same ``task``, or, without it, the same ``task_data``, or, without both,
    the same messages up to the first answer. Tasks are numbered in order of appearance (``task_index``), and so are the
    rollouts of each (``rollout_index``).

    Args:
        tokenizer: The tokenizer, whose chat template formats the conversations; None for trajectories without tokens.
        rows: A file of one JSON object per line, a ``datasets.Dataset``, or any rows.
        rewards: The rewards of rows that have none; None rejects such rows.
        history: The form of prompts, as in :func:`trajectory_from_messages`.

    Returns:
        The trajectories, in the order of the rows.

    Raises:
        ConfigError: The file or a row is invalid; the message names the row.
        TemplateError: The chat template rejects the messages of a row, which the message names.
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
            raise ConfigError(f"{where}: it is nested too deeply") from error
        counts[index] = counts.get(index, 0) + 1
        trajectories.append(trajectory)
    return trajectories


def _numbered(rows: Any) -> Iterator[tuple[str, _Row]]:
    """Yield the rows without nulls, with their names for errors."""
    if isinstance(rows, str | Path):
        found = _lines(Path(rows))
    elif isinstance(rows, Iterable):
        found = ((f"row {index}", row) for index, row in enumerate(cast("Iterable[Any]", rows)))
    else:
        raise ConfigError(f"rows must be the path of a JSON Lines file, or a list of rows, got {shown(rows)}")
    for where, row in found:
        if not isinstance(row, Mapping):
            raise ConfigError(f"{where}: it must be an object with 'messages' and 'rewards', got {shown(row)}")
        yield where, {name: value for name, value in cast("_Row", row).items() if value is not None}


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}, line {number}"
                if line.strip():
                    yield where, _value_of(line, where)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {sentence_of(error)}") from error


def _value_of(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: it must be a JSON object: {sentence_of(error)}") from error


def _arguments(row: _Row, rewards: Rewards | None) -> dict[str, Any]:
    """The arguments of :func:`trajectory_from_messages` in a row."""
    arguments = {name: row[name] for name in _OPTIONS if name in row}
    if isinstance(arguments.get("tools"), str):
        arguments["tools"] = _value_of(arguments["tools"].encode(errors="replace"), "its tools")
    if "success" in row:
        if not isinstance(row["success"], bool):
            raise ConfigError(f"success must be true or false, got {shown(row['success'])}")
        info = arguments.setdefault("info", {})
        if isinstance(info, Mapping):  # otherwise it is rejected by the usual check
            arguments["info"] = {**cast("_Row", info), "success": row["success"]}
    given = [row[name] for name in ("rewards", "reward") if name in row]
    if len(given) > 1:
        raise ConfigError("it must have 'rewards' or 'reward', got both")
    if not given and rewards is None:
        raise ConfigError("it must have 'rewards' or 'reward', got neither (pass the argument rewards for such rows)")
    return {**arguments, "messages": row.get("messages", ()), "rewards": given[0] if given else rewards}


def _task_of(row: _Row) -> str:
    """The key that rows of one task share, as text."""
    for name in ("task", "task_data"):
        if name in row:
            return json.dumps(as_json([name, row[name]]), sort_keys=True)
    messages: Any = row.get("messages", ())
    prompt: list[Any] = []
    for message in cast("Iterable[Any]", messages) if isinstance(messages, list | tuple) else ():
        if isinstance(message, Mapping) and cast("_Row", message).get("role") == "assistant":
            break
        prompt.append(message)
    return json.dumps(as_json(["prompt", prompt]), sort_keys=True)
