"""Derive seeds and private random generators by hashing, without reading or changing global random state."""

from __future__ import annotations

import hashlib
import json
import random
import secrets


def derive_seed(*parts: object) -> int:
    """Hash the parts (JSON values) to a seed in [0, 2**63), the same on every machine and in every process.

    Similar parts give unrelated seeds, so a policy seeded with ``7`` and an environment seeded with ``7`` draw
    unrelated random numbers.

    >>> derive_seed("episode", 7, 0) == derive_seed("episode", 7, 0)
    True
    >>> derive_seed("episode", 7, 0) == derive_seed("episode", 7, 1)
    False
    """
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def episode_generator(task_seed: int, episode: int) -> random.Random:
    """Make the generator of one episode: the same for all rollouts of a task group, whatever runs concurrently."""
    return random.Random(derive_seed("episode", task_seed, episode))


def fresh_seed() -> int:
    """Draw a random seed for a task that has none."""
    return secrets.randbits(62)
