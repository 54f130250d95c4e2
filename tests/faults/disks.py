"""A disk that is full, for the tests of what becomes of it."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Generator


@contextlib.contextmanager
def no_room(num_bytes: int) -> Generator[None]:
    """Let no file grow beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
