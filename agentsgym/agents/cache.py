"""Keep the answers of judges and gamemasters on disk, one file for each request, so that no request is sent twice."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from agentsgym.errors import ConfigError
from agentsgym.texts import sentence_of

logger = logging.getLogger(__name__)

_FORMAT: Final = 1


def request_key(*parts: Any) -> str:
    """Hash the parts of a request (JSON values) to the name of its file, the same in every process."""
    text = json.dumps([_FORMAT, *parts], sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=20).hexdigest()


def name_in_cache(agent: Any, name: str | None, cache: str | Path | None) -> str | None:
    """Return the name that identifies an agent in a cache: ``name``, or what the agent says itself; None if unknown.

    Raises:
        ConfigError: There is a cache, and the name is unknown.
    """
    describe = getattr(agent, "cache_name", None)
    found = name or (cast("str", describe()) if callable(describe) else None)
    if cache is not None and found is None:
        raise ConfigError(
            f"cache requires agent_name, a name for {type(agent).__name__} and its settings: otherwise another agent's "
            "cached answers would be reused"
        )
    return found


class AnswerCache:
    """Answers by key, in a folder that several processes may use at the same time.

    Only answers that could be read are kept. A damaged file counts as missing. If the disk is full, answers are not
    kept, and the run continues.
    """

    def __init__(self, folder: str | Path) -> None:
        """Create the folder.

        Raises:
            ConfigError: It cannot be created.
        """
        self.folder = Path(folder).expanduser()
        self._is_warned = False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cache={str(folder)!r} cannot be used as a folder: {sentence_of(error)}") from error

    def get(self, key: str) -> str | None:
        """Return the answer kept under a key; None if there is none."""
        try:
            found: Any = json.loads(self._file(key).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        answer = cast("Mapping[str, Any]", found).get("answer") if isinstance(found, Mapping) else None
        return answer if isinstance(answer, str) else None

    def put(self, key: str, messages: Sequence[Mapping[str, Any]], answer: str) -> None:
        """Write an answer with the messages that it answers, for people who look at the file."""
        file = self._file(key)
        try:
            file.parent.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False) as written:
                json.dump({"messages": [*messages], "answer": answer}, written)
            os.replace(written.name, file)  # noqa: PTH105  # atomic, also if the file exists
        except OSError as error:
            if not self._is_warned:
                self._is_warned = True
                logger.warning("answers are not kept in %s: %s", self.folder, sentence_of(error))

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"
