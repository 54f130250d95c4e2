"""Check whether a server's environments respect the seed of a reset."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from agentsgym.envs.OpenEnv.connections import ServerConnections
from agentsgym.envs.OpenEnv.server import OpenEnvServer
from agentsgym.errors import EnvError
from agentsgym.texts import sentence_of, shown

logger = logging.getLogger(__name__)

_SEED = 20_251_021  # any
_checked: list[tuple[OpenEnvServer, str]] = []  # servers, which cannot be hashed, and classes
_lock = threading.Lock()


def check_seed(
    link: ServerConnections,
    server: OpenEnvServer,
    env_class: str,
    arguments: Mapping[str, Any],
    write: Callable[[Mapping[str, Any]], str],
) -> None:
    """Warn, once per server and class, if two resets with one seed have different observations.

    Args:
        link: Opens the connection.
        server: The server of the link.
        env_class: The environment's class.
        arguments: Arguments of a reset, without the seed.
        write: Converts an observation to text.

    Raises:
        EnvError: The server cannot be reached, is full, or creates no environment.
    """
    with _lock:
        if (server, env_class) in _checked:
            return
        _checked.append((server, env_class))
    try:
        game = link.connect()
    except BaseException:
        _checked.remove((server, env_class))
        raise
    try:
        texts = [write(game.reset({**arguments, "seed": _SEED})["observation"]) for _ in range(2)]
    except EnvError as error:  # a task that cannot be reset is its own episodes' failure
        logger.warning("cannot determine whether %s respects seeds: %s", server.label, sentence_of(error))
        return
    finally:
        game.close()
    if texts[0] != texts[1]:
        logger.warning(
            "%s does not respect the seed of a reset: two resets with the seed %d showed %s and %s. The rollouts of a "
            "task start differently, so that baselines over a task group compare different starts, and runs are not "
            "reproducible",
            server.label,
            _SEED,
            shown(texts[0], 100),
            shown(texts[1], 100),
        )
