"""A process of engines: each request names a slot, whose engine responds."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

from agentsgym.envs.shared.child_process import serve
from agentsgym.envs.shared.engines.engine import Engine
from agentsgym.texts import sentence_of


class _Slots:
    """The engines of this process, by slot."""

    def __init__(self) -> None:
        self._make: Any = None
        self._engines: dict[int, Engine] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Respond to a request; an engine that raised is not reused."""
        try:
            if "load" in request:
                module, _, name = request["load"].partition(":")
                self._make = getattr(importlib.import_module(module), name)
                return {"answer": {}}
            return {"answer": self._of_engine(request)}
        except (Exception, SystemExit) as error:  # noqa: BLE001  # foreign code; reported to the owner
            engine = self._engines.pop(request.get("slot", -1), None)
            with suppress(Exception):
                if engine is not None:
                    engine.close()
            return {"error": type(error).__name__, "sentence": sentence_of(error)}

    def _of_engine(self, request: dict[str, Any]) -> dict[str, Any]:
        slot = request["slot"]
        if "command" in request:
            return self._engines[slot].step(request["command"])
        if slot not in self._engines:
            self._engines[slot] = self._make()
        return self._engines[slot].start(request["game"])

    def close(self) -> None:
        """Close all engines."""
        for engine in self._engines.values():
            with suppress(Exception):
                engine.close()


def main() -> None:
    """Serve requests until the input ends, then close the engines."""
    slots = _Slots()
    try:
        serve(slots.answer)
    finally:
        slots.close()


if __name__ == "__main__":
    main()
