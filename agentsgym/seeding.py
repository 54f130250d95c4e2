"""Private random generators, derived by hash: nothing here reads or changes global state."""

from __future__ import annotations

import hashlib
import json
import random
import secrets


def derive_seed(*parts: object) -> int:
    """Hash the parts (JSON values) to a seed in [0, 2**63), equal on every machine and in every process.

    Similar parts give unrelated seeds, so that a policy seeded with ``7`` shares no draw with an environment
    seeded with ``7``.

    >>> derive_seed("episode", 7, 0) == derive_seed("episode", 7, 0)
    True
    >>> derive_seed("episode", 7, 0) == derive_seed("episode", 7, 1)
    False
    """
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def episode_generator(task_seed: int, episode: int) -> random.Random:
    """Make the generator of one episode: equal for all rollouts of a task group, whatever is played beside it."""
    return random.Random(derive_seed("episode", task_seed, episode))


def fresh_seed() -> int:
    """Draw a random seed for a task without one."""
    return secrets.randbits(62)
