"""pyarrow ships no types: everything that it exports is typed here, once, as ``Any``."""

from typing import Any

def __getattr__(name: str) -> Any: ...
