"""The variants of Twenty Questions: settings that make scores comparable, and a digest of what else decides them."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

_GAME = {
    "hardcore": False,
    "properties": "all",
    "gamemaster": None,
    "style": "agentsgym",
    "final_guess": False,
    "spelling": False,
    "max_steps_per_episode": 20,
    "episodes_per_trial": 1,
    "error_allowance": 1,
    "system_prompt": None,
}
_EVALUATION = {"split": "eval", "seed": 0, "temperature": 1.0, "max_turn_tokens": 256, "tasks": None, "dataset": None}
_SMALL = ("apple", "bed", "bicycle", "book", "car", "cow", "dog", "fish", "hat", "knife", "snake", "tree")
#: The objects that 129 of the 158 words in LMRL-Gym's ``llm_rl_scripts/twenty_questions/env/data.py`` name.
_LMRL = (
    "airplane apple ball banana baseball_bat basketball battery bear bed belt blender boat bookshelf boot bowl "
    "broccoli bus bush cactus calculator calendar camera car carrot cat chair chopsticks coat computer corn couch cow "
    "cucumber cup desk dog doll dress drill drum earring elephant eraser flute fork frying_pan glove glue grape "
    "guitar hammer harp hat headphones helicopter helmet horse key keyboard kite knife lake lawn_mower lion mango "
    "microwave motorcycle mountain necklace onion orange paintbrush pants paper peach pen pencil phone piano pillow "
    "pineapple plate pliers pot potato printer puzzle rabbit rake refrigerator ring river rock saw saxophone scarf "
    "scissors scooter screwdriver sheep shirt shoe shovel sock spoon stapler statue strawberry table television "
    "tennis_racket tiger tomato toothbrush train tree truck trumpet violin watch watermelon whisk wrench"
)
_NOT_RULES = ("__init__", "players", "agent_gamemaster")

#: Facts about each variant, as :attr:`~agentsgym.envs.spec.EnvSpec.games` describes them.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "v1": {
        "note": "Benchmark: 150 secrets among all everyday objects, in 20 turns.",
        "env_config": {**_GAME, "objects": "all"},
        "dataset": {"split": "disjoint", "eval_fraction": 0.452},
        "evaluation": {**_EVALUATION, "num_tasks": 150, "num_rollouts": 4},
    },
    "v1-hard": {
        "note": "Benchmark: the rarer objects as secrets among all objects, in 20 turns.",
        "env_config": {**_GAME, "objects": "both", "hardcore": True},
        "dataset": {"split": "all"},
        "evaluation": {**_EVALUATION, "num_tasks": 151, "num_rollouts": 4},
    },
    "v1-small": {
        "note": "Benchmark for very small models: 12 objects that are also those of training, in 5 turns.",
        "env_config": {
            **_GAME,
            "objects": list(_SMALL),
            "max_steps_per_episode": 5,
            "error_allowance": 5,
            "system_prompt": f"Find out which of these I am thinking of: {', '.join(_SMALL)}. Each time, ask one short "
            "question, such as: Is it an animal? Can you eat it? Is it made of metal? Is it a car?",
        },
        "dataset": {"split": "all"},
        "evaluation": {**_EVALUATION, "num_tasks": 12, "num_rollouts": 32},
    },
    "lmrl": {
        "note": "The objects that 129 of the 158 words of LMRL-Gym's game (arXiv 2311.18232) name.",
        "env_config": {"objects": [name.replace("_", " ") for name in _LMRL.split()]},
    },
}


def fingerprint() -> str:
    """Digest the facts, the wordings and the code of the rules: scores with equal digests can be compared.

    Comments, docstrings and layout make no difference, nor does the version of Python.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.iterdir()):
        if path.suffix in {".csv", ".txt"}:
            digest.update(path.read_text(encoding="utf-8").encode())
        elif path.suffix == ".py" and path.stem not in _NOT_RULES:
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
