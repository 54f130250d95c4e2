"""The main module of an engine process, in which each request is handled by the engine in the slot that it names."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

from agentsgym.envs.shared.child_process import serve
from agentsgym.texts import sentence_of


def main() -> None:
    """Serve requests until the input ends, then close the engines."""
    engine_class: Any = None
    engines: dict[int, Any] = {}  # by slot

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        """Respond to a request; an engine that raises an exception is discarded."""
        nonlocal engine_class
        slot: int = request.get("slot", -1)
        try:
            if "load" in request:
                module, _, name = request["load"].partition(":")
                engine_class = getattr(importlib.import_module(module), name)
                return {"response": {}}
            if "command" in request:
                return {"response": engines[slot].step(request["command"])}
            if slot not in engines:
                engines[slot] = engine_class()
            return {"response": engines[slot].start(request["game"])}
        except (Exception, SystemExit) as error:  # noqa: BLE001  # engine code; reported to the parent process
            engine = engines.pop(slot, None)
            with suppress(Exception):
                if engine is not None:
                    engine.close()
            return {"error": type(error).__name__, "sentence": sentence_of(error)}

    try:
        serve(handle)
    finally:
        for engine in engines.values():
            with suppress(Exception):
                engine.close()


if __name__ == "__main__":
    main()
