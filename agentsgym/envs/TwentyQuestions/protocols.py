"""The variants of Twenty Questions: settings that make scores comparable, and a digest of what else decides them."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast


def variants() -> Mapping[str, Mapping[str, Any]]:
    """Read the facts about each variant, as :attr:`~agentsgym.envs.spec.EnvSpec.games` describes them."""
    return json.loads(Path(__file__).with_name("protocols.json").read_text(encoding="utf-8"))


def fingerprint() -> str:
    """Digest the facts, the wordings and the code of the rules: scores with equal digests can be compared.

    Comments, docstrings and layout make no difference, nor does the version of Python.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.iterdir()):
        if path.suffix in {".csv", ".txt", ".json"}:
            digest.update(path.read_text(encoding="utf-8").encode())
        elif path.suffix == ".py" and path.stem not in {"__init__", "players", "agent_gamemaster"}:
            digest.update(repr(_code(ast.parse(path.read_text(encoding="utf-8")))).encode())
    return digest.hexdigest()[:12]


def _code(node: Any) -> Any:
    """Return a syntax tree without docstrings and empty fields, which differ between versions of Python, as lists."""
    if isinstance(node, ast.AST):
        fields = [(name, _code(value)) for name, value in ast.iter_fields(node) if value not in (None, [])]
        return [type(node).__name__, *fields]
    if not isinstance(node, list):
        return repr(node)
    parts = cast("list[Any]", node)
    return [_code(one) for one in parts if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
