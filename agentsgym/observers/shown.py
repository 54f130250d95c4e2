"""Show a few complete conversations whenever metrics are logged, in the terminal and in trackers.

Conversations are prepared for reading: bounded, with rewards and advantages, and with escaped control characters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from accelerate import PartialState

from agentsgym.texts import as_json, sentence_of, shortened, visible
from agentsgym.training.observing import BatchObserver, ObservedBatch
from agentsgym.types import Message, Trajectory

if TYPE_CHECKING:
    from rich.console import Console

    from agentsgym.training.config import GRPOEnvConfig

logger = logging.getLogger(__name__)

COLUMNS: Final = (
    *("step", "task", "rollout", "environment", "outcome", "stop_reason", "reward", "num_turns", "turn_rewards"),
    *("turn_advantages", "conversation"),
)
"""The columns of a table of conversations."""
_MAX_CELL: Final = 20_000  # bytes of a conversation in a table
_MAX_MESSAGE: Final = 20_000  # bytes of one message
_MAX_MESSAGES: Final = 400
_MAX_NAME: Final = 200
_KINDS: Final = {"train": "training", "eval": "evaluation"}
_STEP: Final = "train/global_step"  # the x axis of the trackers' own curves
_MAX_PRINTED: Final = 1_000  # bytes of a message in a terminal
_NUM_PRINTED: Final = 24
_COLORS: Final = {"system": "cyan", "tool": "magenta", "assistant": "green"}
_OUTCOMES: Final = {"won": "green", "lost": "yellow", "failed": "red"}


class ShownConversations(BatchObserver):
    """An observer that shows some of the main rank's rollouts when metrics are logged."""

    def __init__(self, args: GRPOEnvConfig) -> None:
        """Start without rollouts, with the settings of a run."""
        self._args = args
        self._newest: dict[str, list[tuple[Trajectory, Sequence[float] | None, str]]] = {}
        self._failed: set[str] = set()

    def on_batch(self, observed: ObservedBatch) -> None:
        """Choose the rollouts that the next log shows."""
        if not PartialState().is_main_process:
            return
        batch, phase = observed.batch, observed.phase
        self._newest[phase.kind] = [
            (
                batch.trajectories[index],
                observed.advantages.advantages[index] if phase.is_training else None,
                batch.rollouts[batch.first + index].environment,
            )
            for index in choose_by_rank([one.final_reward for one in batch.trajectories], self._args.log_conversations)
        ]

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the rollouts since the last log; failures are logged once per place, and training continues."""
        newest, self._newest = self._newest, {}
        for kind, rollouts in newest.items():
            conversations = [Conversation.of(*rollout) for rollout in rollouts]
            self._attempt("terminal", print_conversations, conversations, f"{_KINDS[kind]}, step {state.global_step}:")
            for name in args.report_to:
                self._attempt(name, send_conversations, name, conversations, kind=kind, step=state.global_step)

    def _attempt(self, place: str, function: Any, /, *args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # a tracker or a closed terminal must not end training
            if place not in self._failed:
                self._failed.add(place)
                logger.warning("conversations cannot be shown in %s: %s; training continues", place, sentence_of(error))


def print_conversations(conversations: Sequence[Conversation], title: str, console: Console | None = None) -> None:
    """Print each conversation in a frame; the middle of long ones is omitted, and control characters are escaped."""
    from rich.console import Console, Group  # noqa: PLC0415  # slow to import
    from rich.panel import Panel  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(markup=False, highlight=False, emoji=False) if console is None else console
    console.print(Text(title, style="bold"))
    for one in conversations:
        lines: list[Text] = []
        for index in shown_indices(len(one.messages), _NUM_PRINTED):
            if index is None:
                lines.append(Text(f"… {len(one.messages) - _NUM_PRINTED} messages are left out …", style="dim"))
                continue
            message, note = one.messages[index], one.notes.get(index)
            heading = f"[{message['role']}{'' if note is None else f', {note}'}]"
            lines.append(Text(heading, style=f"bold {_COLORS.get(message['role'], 'blue')}"))
            lines.append(Text(shortened(message_text(message), _MAX_PRINTED).expandtabs(8)))
        if "error" in one.facts:
            lines.append(Text(shortened(one.facts["error"], _MAX_PRINTED, tail=0.9), style="red"))
        color = _OUTCOMES.get(one.facts["outcome"], "cyan")
        console.print(Panel(Group(*lines), title=Text(one.headline), title_align="left", border_style=color))


def send_conversations(name: str, conversations: Sequence[Conversation], *, kind: str, step: int) -> None:
    """Send conversations to wandb or trackio; other trackers have no tables and receive nothing.

    Args:
        name: Name of the tracker, as in ``report_to``.
        conversations: Conversations to send.
        kind: ``"train"`` or ``"eval"``, the prefix of the keys.
        step: Number of completed optimizer steps.

    Raises:
        Exception: Any error of the tracker, for example because it has no run.
    """
    columns, rows = list(COLUMNS), [one.row(step) for one in conversations]
    if name == "wandb":
        import wandb  # noqa: PLC0415  # an extra  # pyright: ignore[reportMissingImports]

        wandb.log({f"{kind}/conversations": wandb.Table(columns=columns, data=rows), _STEP: step})  # pyright: ignore[reportUnknownMemberType]
    elif name == "trackio":
        import trackio  # noqa: PLC0415  # an extra

        traces = [trackio.Trace(*trace_of(one, {"step": step})) for one in conversations]
        trackio.log(  # pyright: ignore[reportUnknownMemberType]
            {
                f"{kind}/conversations": trackio.Table(columns=columns, data=rows),
                f"{kind}/rollouts": traces,
                _STEP: step,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A rollout as it is shown, with the control characters of all texts escaped.

    Attributes:
        headline: The rollout and its outcome, in one line.
        messages: The messages with their roles; the middle of a very long conversation is omitted.
        notes: The reward and advantage of each turn, in one line, by the index of its answer in ``messages``.
        facts: Further information, as JSON values: ``reward``, ``turn_rewards``, ``turn_advantages`` (None if
            unknown), ``outcome``, ``stop_reason``, ``task_index``, ``rollout_index``, ``seed``, ``task_data``,
            ``environment``, ``session_id``, ``num_turns``, ``num_tokens``, ``invalid_turns``, and ``error`` if any.
    """

    headline: str
    messages: Sequence[Message]
    notes: Mapping[int, str]
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, trajectory: Trajectory, advantages: Sequence[float] | None = None, environment: str = "") -> Self:
        """Build the view of a rollout.

        Args:
            trajectory: The rollout.
            advantages: One number per token, (T,); None if unknown.
            environment: Name of its environment.
        """
        by_turn = None if advantages is None else turn_advantages(trajectory, advantages)
        facts = {
            "reward": trajectory.final_reward,
            "turn_rewards": trajectory.turn_rewards,
            "turn_advantages": by_turn,
            "outcome": trajectory.outcome,
            "stop_reason": trajectory.stop_reason.value,
            "task_index": trajectory.task_index,
            "rollout_index": trajectory.rollout_index,
            "seed": trajectory.seed,
            "task_data": trajectory.task_data,
            "environment": environment,
            "session_id": trajectory.session_id,
            "num_turns": trajectory.num_turns,
            "num_tokens": len(trajectory.token_ids),
            "invalid_turns": [k for k, turn in enumerate(trajectory.turns) if turn.invalid],
        }
        if trajectory.final_components is not None:
            facts["final_components"] = dict(trajectory.final_components)
        if trajectory.error is not None:
            facts["error"] = trajectory.error.strip()
        indices = shown_indices(len(trajectory.messages), _MAX_MESSAGES)
        left_out = len(trajectory.messages) - _MAX_MESSAGES
        gap: Message = {"role": "system", "content": f"… {left_out} messages are left out …"}
        return cls(
            headline=visible(trajectory.headline),
            messages=[gap if index is None else _escaped_message(trajectory.messages[index]) for index in indices],
            notes=_notes(trajectory, by_turn, {index: place for place, index in enumerate(indices)}),
            facts=escape_json(facts),
        )

    @property
    def text(self) -> str:
        """The conversation as one text, cut to about 20,000 bytes."""
        notes = {index: f", {note}" for index, note in self.notes.items()}
        parts = [
            f"[{one['role']}{notes.get(index, '')}] {message_text(one)}" for index, one in enumerate(self.messages)
        ]
        if "error" in self.facts:
            parts.append(f"[error] {self.facts['error']}")
        return shortened("\n".join(parts), _MAX_CELL)

    def row(self, step: int) -> list[Any]:
        """Return the cells of a table row, in the order of :data:`COLUMNS`: numbers and texts."""
        facts = self.facts
        return [
            *(step, facts["task_index"], facts["rollout_index"], facts["environment"], facts["outcome"]),
            *(facts["stop_reason"], facts["reward"], facts["num_turns"], _listed(facts["turn_rewards"])),
            *("" if facts["turn_advantages"] is None else _listed(facts["turn_advantages"]), self.text),
        ]


def trace_of(conversation: Conversation, facts: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages of a trace and its metadata: the conversation's facts, updated with ``facts``."""
    known = conversation.facts
    status = "error" if known["outcome"] == "failed" else "ok"
    return [{**message} for message in conversation.messages], {"status": status, **known, **facts}


def turn_advantages(trajectory: Trajectory, advantages: Sequence[float]) -> list[float | None]:
    """Average the advantages (T,) over the tokens of each turn, (K,); None for a turn without tokens."""
    spans = [advantages[turn.start : turn.stop] for turn in trajectory.turns]
    return [sum(span) / len(span) if len(span) else None for span in spans]  # fmean refuses inf and -inf together


def choose_by_rank(rewards: Sequence[float], number: int) -> list[int]:
    """Choose ``number`` rollouts from the best to the worst, evenly by rank; the best if it is 1.

    >>> choose_by_rank([0.0, 3.0, 1.0, 2.0, 4.0], 3)
    [4, 3, 0]
    """
    ranked = sorted(range(len(rewards)), key=lambda index: -rewards[index])
    if number >= len(ranked):
        return ranked
    if number < 2:
        return ranked[:number]
    return [ranked[round(place * (len(ranked) - 1) / (number - 1))] for place in range(number)]


def shown_indices(num_messages: int, limit: int) -> list[int | None]:
    """Select the messages of a conversation to show; None stands for the omitted middle.

    >>> shown_indices(3, 4), shown_indices(9, 4)
    ([0, 1, 2], [0, 1, None, 7, 8])
    """
    if num_messages <= limit:
        return [*range(num_messages)]
    return [*range(limit // 2), None, *range(num_messages - limit // 2, num_messages)]


def message_text(message: Message) -> str:
    """Format a message's text, followed by its tool calls."""
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls", ())]
    return "\n".join([*([message["content"]] if message["content"] or not calls else ()), *calls])


def _escaped_message(message: Message) -> Message:
    """Return a message with bounded texts and tool calls, and with escaped control characters."""
    content = visible(shortened(str(message["content"]), _MAX_MESSAGE))
    plain: Message = {"role": visible(message["role"][:_MAX_NAME]), "content": content}
    if "tool_calls" in message:
        plain["tool_calls"] = escape_json(message["tool_calls"])
    if "tool_call_id" in message:
        plain["tool_call_id"] = visible(message["tool_call_id"][:_MAX_NAME])
    return plain


def _notes(
    trajectory: Trajectory, advantages: Sequence[float | None] | None, places: Mapping[int | None, int]
) -> dict[int, str]:
    notes: dict[int, str] = {}
    for k, turn in enumerate(trajectory.turns):
        if turn.message_index in places:
            own = None if advantages is None else advantages[k]
            notes[places[turn.message_index]] = (
                f"turn {k}, reward {turn.reward:+zg}"
                + "".join(f", {name} {amount:+zg}" for name, amount in (turn.components or {}).items())
                + ("" if own is None else f", advantage {own:+z.3g}")
                + (", invalid" if turn.invalid else "")
            )
    return notes


def escape_json(value: Any) -> Any:
    """Convert a value to JSON with bounded texts and keys, and escape their control characters."""
    return _each_text(as_json(value))


def _each_text(value: Any) -> Any:
    if isinstance(value, str):
        return visible(shortened(value, _MAX_MESSAGE))
    if isinstance(value, list):
        return [_each_text(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        return {visible(key[:_MAX_NAME]): _each_text(item) for key, item in value.items()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return value


def _listed(numbers: Sequence[float | str | None]) -> str:
    """Format numbers as one string; JSON values hold infinities as strings."""
    return shortened(" ".join("-" if one is None else f"{float(one):z.3g}" for one in numbers), 1000)
