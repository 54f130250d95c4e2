"""Tell what an agent says from what it thinks, where its thoughts stand in the text."""

from __future__ import annotations


def without_thoughts(text: str) -> str:
    """Give what the agent says behind its thoughts; nothing while it is still thinking.

    >>> without_thoughts("<think>Is it 3?</think>4"), without_thoughts("<think>Is it 3?"), without_thoughts("4")
    ('4', '', '4')
    """
    _, closed, said = text.rpartition("</think>")
    return said if closed or "<think>" not in text else ""
