"""Make ALFWorld's text engine faster and smaller without changing its output; applied in worker processes.

The original engine parses the same templates again for every admissible command, copies read-only data, computes the
planning task four times per game, and loads a copy of the planner's library with 32 MB of debug symbols for each game.
``tests/with_worlds`` verifies that the patched engine's output is byte-for-byte the same.
"""

from __future__ import annotations

import ast
import copy
import importlib
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentsgym.errors import EnvError

_MAX_GAMES = 8  # games whose parsed grammar and planning task are cached; a group of rollouts shares one game
_FIXED_PREDICATES = "agentsgym_fixed_predicates"
_COMMANDS = "agentsgym_commands"
_LOADED = 1  # PT_LOAD, the type of a loaded segment in an ELF program header


def patch_engine() -> None:
    """Patch the engine's modules in this process; a second call does nothing.

    Raises:
        ImportError: The engine is not installed.
    """
    textgen: Any = importlib.import_module("textworld.envs.pddl.textgen")
    if textgen.deepcopy is _own_copy:
        return
    textgen.deepcopy = _own_copy
    parse = lru_cache(maxsize=4096)(textgen._parse_and_convert)

    def parse_once(text: str, rule_name: str, **_: Any) -> Any:
        return _own_copy(parse(text, rule_name=rule_name))

    def derive(symbol: Any, context: Any = None) -> Any:
        variables: Mapping[str, Any] = (context or symbol.context)["variables"]
        # The original uses locals().update and eval, which finds no names from Python 3.13 on.
        return [textgen.TerminalSymbol(evaluate(symbol.expression, variables))]

    textgen._parse_and_convert = parse_once
    textgen.EvalSymbol.derive = derive
    rule: Any = textgen.Rule
    textgen.Rule = SimpleNamespace(parse_conjunctive_query=lru_cache(maxsize=4096)(rule.parse_conjunctive_query))
    grammar: Any = textgen.ContextSensitiveGrammar
    grammar.derive = _cached_commands(grammar.derive, textgen)
    logic: Any = importlib.import_module("textworld.envs.pddl.logic")
    logic._parse_and_convert = lru_cache(maxsize=_MAX_GAMES)(logic._parse_and_convert)  # the result is read-only
    planner: Any = importlib.import_module("fast_downward")
    planner.pddl2sas = _cached_translation(planner.pddl2sas)
    interface: Any = importlib.import_module("fast_downward.interface")
    interface.shutil = SimpleNamespace(copyfile=copy_loaded_part)


def cache_commands(game: Any) -> None:
    """Make a loaded game cache the text of each command, if it depends only on facts that cannot change."""
    task: Any = game._pddl_state.task
    changing = {effect.literal.predicate for action in task.actions for effect in action.effects}
    grammar: Any = game._logic.grammar
    setattr(grammar, _FIXED_PREDICATES, {predicate.name for predicate in task.predicates} - changing)
    setattr(grammar, _COMMANDS, {})


def _own_copy(value: Any) -> Any:
    """Copy only the parts that the grammar modifies: symbols, and the dicts and lists that contain them."""
    if isinstance(value, list):
        return [_own_copy(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        return dict(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if not hasattr(value, "context"):
        return value
    copied = copy.copy(value)
    for name in ("symbol", "expression"):
        inner = getattr(copied, name, None)
        if hasattr(inner, "context"):
            setattr(copied, name, _own_copy(inner))
    return copied


@lru_cache(maxsize=4096)
def _parse(expression: str) -> ast.expr:
    try:
        return ast.parse(expression.strip(), mode="eval").body
    except SyntaxError as error:
        raise EnvError(f"the game's grammar has an expression that cannot be parsed: {expression!r}") from error


def evaluate(expression: str, variables: Mapping[str, Any]) -> Any:
    """Evaluate an expression of a grammar, which may only read names and attributes, and use ``+`` and ``or``.

    A game file is data, but the original engine executes any Python in its grammar. The exception must not be a
    ValueError, which the engine interprets as an unknown command.

    Raises:
        EnvError: The text is not an expression, or uses any other operation.
    """

    def value_of(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in variables:
                return variables[name]
            case ast.Attribute(value=inner, attr=name) if not name.startswith("_"):
                return getattr(value_of(inner), name)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value_of(left) + value_of(right)
            case ast.BoolOp(op=ast.Or(), values=values):
                return reduce(lambda before, node: before or value_of(node), values[1:], value_of(values[0]))
            case _:
                raise EnvError(
                    f"the game's grammar has an expression that is not allowed: {expression!r} (only constants, names, "
                    "attributes, + and or are)"
                )

    return value_of(_parse(expression))


def _cached_commands(derive: Callable[..., str], textgen: Any) -> Callable[..., str]:
    """Cache the text of a template for one action's objects, in games prepared by :func:`cache_commands`."""

    def derive_once(grammar: Any, start: str, context: Any = None) -> str:
        fixed = getattr(grammar, _FIXED_PREDICATES, None)
        if not context or fixed is None or "#" in start:
            return derive(grammar, start, context or {})
        commands: dict[Any, str | None] = getattr(grammar, _COMMANDS)
        if start not in commands:
            symbols = textgen._parse_and_convert(start, rule_name="symbols")
            commands[start] = "" if _depends_on(symbols, textgen) <= fixed else None
        if commands[start] is None:
            return derive(grammar, start, context)
        key = (start, *(variable.name for variable in context["mapping"].values()))
        command = commands.get(key)
        if command is None:
            command = commands[key] = derive(grammar, start, context)
        return command

    return derive_once


def _depends_on(symbols: Sequence[Any], textgen: Any) -> set[str]:
    """Return the predicates that the text of these symbols depends on."""
    found: set[str] = set()
    for symbol in symbols:
        inner = (getattr(symbol, "symbol", None), getattr(symbol, "expression", None))
        found |= _depends_on([part for part in inner if hasattr(part, "context")], textgen)
        condition = getattr(symbol, "given", None)
        if condition:
            preconditions = textgen.Rule.parse_conjunctive_query(condition).preconditions
            found |= {precondition.name for precondition in preconditions}
    return found


def _cached_translation(translate: Callable[..., Any]) -> Callable[..., Any]:
    """Cache the translation of a game's planning task, which the original repeats for a planner that is never run."""
    tasks: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def translate_once(domain: str, problem: str, **_: Any) -> Any:
        key = (domain, problem)
        if key in tasks:
            tasks.move_to_end(key)
            return tasks[key]
        arguments = sys.argv
        try:
            tasks[key] = translate(domain, problem)
        finally:
            sys.argv = arguments  # the translator replaces them
        while len(tasks) > _MAX_GAMES:
            tasks.popitem(last=False)
        return tasks[key]

    return translate_once


def copy_loaded_part(source: str, target: str) -> None:
    """Copy the part of a shared library that is loaded into memory, without the debug symbols after it.

    A file that is not a 64-bit little-endian ELF file is copied completely.
    """
    Path(target).write_bytes(_loaded_part(source))


@lru_cache(maxsize=1)
def _loaded_part(path: str) -> bytes:
    with Path(path).open("rb") as file:
        header = file.read(64)
        if header[:6] != b"\x7fELF\x02\x01":
            return header + file.read()
        (table,), (size, count) = struct.unpack_from("<Q", header, 32), struct.unpack_from("<HH", header, 54)
        file.seek(table)
        segments = [struct.unpack_from("<IIQQQQ", file.read(size)) for _ in range(count)]
        end = max(offset + length for kind, _, offset, _, _, length in segments if kind == _LOADED)
        file.seek(0)
        content = file.read(end)
    # The section header table lies after the loaded segments and is not needed at load time, so the fields of the
    # header that refer to it are cleared.
    return content[:40] + bytes(8) + content[48:60] + bytes(4) + content[64:]
