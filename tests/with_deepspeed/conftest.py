"""Tests on a real DeepSpeed, on CPUs, left out where it is not installed.

The folder is not called ``deepspeed``, which transformers would take for DeepSpeed, since pytest puts the folder above
on the path.
"""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("deepspeed") else ["*.py"]
