"""Print conversations in a terminal. Whatever they hold, a terminal obeys none of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from agentsgym.observers.conversations import shown_indices, speech
from agentsgym.texts import shortened

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from agentsgym.observers.conversations import Conversation

_MAX_MESSAGE: Final = 1_000  # bytes of a message
_MAX_MESSAGES: Final = 24
_COLORS: Final = {"system": "cyan", "tool": "magenta", "assistant": "green"}
_OUTCOMES: Final = {"won": "green", "lost": "yellow", "failed": "red"}


def print_conversations(conversations: Sequence[Conversation], title: str, console: Console | None = None) -> None:
    """Print each conversation in a frame, long ones without their middle.

    Args:
        conversations: What to print.
        title: What they are, a line above them.
        console: Where to; None for standard output.
    """
    from rich.console import Console  # noqa: PLC0415  # only if it is used
    from rich.panel import Panel  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(markup=False, highlight=False, emoji=False) if console is None else console
    console.print(Text(title, style="bold"))
    for one in conversations:
        panel = Panel(
            _body(one),
            title=Text(one.headline),
            title_align="left",
            border_style=_OUTCOMES.get(one.facts["outcome"], "cyan"),
        )
        console.print(panel)


def _body(conversation: Conversation) -> RenderableType:
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    lines: list[Text] = []
    for index in shown_indices(len(conversation.messages), _MAX_MESSAGES):
        if index is None:
            lines.append(Text(f"… {len(conversation.messages) - _MAX_MESSAGES} messages are left out …", style="dim"))
            continue
        message, note = conversation.messages[index], conversation.notes.get(index)
        heading = f"[{message['role']}{'' if note is None else f', {note}'}]"
        lines.append(Text(heading, style=f"bold {_COLORS.get(message['role'], 'blue')}"))
        lines.append(Text(shortened(speech(message), _MAX_MESSAGE).expandtabs(8)))
    if "error" in conversation.facts:
        lines.append(Text(shortened(conversation.facts["error"], _MAX_MESSAGE, tail=0.9), style="red"))
    return Group(*lines)
