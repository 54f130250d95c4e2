"""How much memory a process holds."""

from __future__ import annotations

import os
from pathlib import Path

from agentsgym.errors import ConfigError

MEGABYTE = 1_000_000


def resident_mb(pid: int) -> float | None:
    """Megabytes (10^6 bytes) of a process's resident set, pages that it shares with others included; None if it ended.

    Raises:
        ConfigError: It cannot be measured on this system.
    """
    if Path("/proc/self/statm").exists():
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
        except (OSError, IndexError):
            return None
        return pages * os.sysconf("SC_PAGE_SIZE") / MEGABYTE
    try:
        import psutil  # noqa: PLC0415  # needed elsewhere than on Linux alone
    except ImportError as error:
        raise ConfigError(
            "the memory of processes is measured with psutil on this system: pip install psutil"
        ) from error
    try:
        return psutil.Process(pid).memory_info().rss / MEGABYTE
    except psutil.Error:
        return None
