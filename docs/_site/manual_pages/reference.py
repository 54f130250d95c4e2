"""Generation of the reference pages for public names, one page per subpackage.

Public are the names in ``agentsgym.__all__`` and in the ``__all__`` of its packages, the built-in estimators, and all
names in the manual: those that its snippets import, and those that its text mentions by their full path.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import agentsgym
from agentsgym.credit.registry import ESTIMATORS
from manual_pages.links import ROOT
from manual_pages.texts import as_markdown, page, table

FOLDER = "reference/api"
_MANUAL = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def api_pages() -> dict[str, str]:
    """Return a page for each part of the package, by its path in the site."""
    parts: dict[str, list[str]] = defaultdict(list)
    for path in sorted(public_paths(), key=lambda path: (_is_constant(path), path.count("."), path)):
        parts[path.split(".")[1]].append(path)
    return {f"{FOLDER}/{part}.md": _page(part, paths) for part, paths in sorted(parts.items())}


def _page(part: str, paths: list[str]) -> str:
    module = importlib.import_module(f"agentsgym.{part}")
    times = Counter(path.rpartition(".")[2] for path in paths)
    blocks: list[str] = []
    for path in paths:
        name = path.rpartition(".")[2]
        title = name if times[name] == 1 else f"{_folder(path)}.{name}"
        options = {"heading": title, "toc_label": title}
        if hooks := _hooks(path):
            options["filters"] = f'["!^_(?!({"|".join(hooks)})$)"]'
        blocks.append("\n".join([f"::: {path}", "    options:", *(f"      {key}: {options[key]}" for key in options)]))
    summary = table(["name", "import from", "description"], map(_summary, paths))
    return page(f"# agentsgym.{part}", _first_paragraph(module), summary, *blocks)


def _summary(path: str) -> list[str]:
    home, _, name = path.rpartition(".")
    is_exported = name in agentsgym.__all__ and _path_of(getattr(agentsgym, name)) == path
    what = "" if _is_constant(path) else _first_paragraph(_value(path))
    return [f"[`{name}`][{path}]", f"`{'agentsgym' if is_exported else home}`", what]


def _first_paragraph(documented: Any) -> str:
    return as_markdown((inspect.getdoc(documented) or "").partition("\n\n")[0])


def _value(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _is_constant(path: str) -> bool:
    return not callable(_value(path))


def _folder(path: str) -> str:
    """Return the environment of a class whose name is not unique."""
    return path.split(".")[2]


def _hooks(path: str) -> list[str]:
    """Return the methods with an underscore that subclasses override, as named in the manual."""
    if path not in ("agentsgym.envs.base.MultistepEnv", "agentsgym.envs.Tools.env.ToolEnv"):
        return []
    text = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("environments.md", "tools.md"))
    return sorted({name.removeprefix("_") for name in re.findall(r"`(_\w+)\(", text)})


def public_paths() -> set[str]:
    """Return the full path of every public class, function and constant."""
    found = {_path_of(getattr(agentsgym, name)) for name in agentsgym.__all__ if name != "__version__"}
    found |= {_path_of(function) for function in ESTIMATORS.values()}
    for module in _packages():
        found |= set(_exports(module))
    for text in (file.read_text(encoding="utf-8") for file in _MANUAL):
        found |= set(_imported(text)) | set(_named(text))
    return {path for path in found if path}


def _packages() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(agentsgym.__path__, "agentsgym."):
        if found.ispkg and "._" not in found.name:
            module = importlib.import_module(found.name)
            if hasattr(module, "__all__"):
                yield module


def _exports(module: ModuleType) -> Iterator[str]:
    """Yield the paths of a module's exports: the names in ``__all__``, or its public functions and classes."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]
    yield from (_path_of(getattr(module, name), f"{module.__name__}.{name}") for name in names)


def _imported(text: str) -> Iterator[str]:
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("agentsgym."):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    value = getattr(module, alias.name)
                    yield _path_of(value, f"{node.module}.{alias.name}")


def _named(text: str) -> Iterator[str]:
    for path in re.findall(r"`(agentsgym\.[\w.]+)", text):
        module, _, name = path.rpartition(".")
        try:
            value: Any = getattr(importlib.import_module(module), name, None) or importlib.import_module(path)
        except ImportError:  # a name in a user's package, or not a path
            continue
        if isinstance(value, ModuleType):
            yield from _exports(value)
        else:
            yield _path_of(value, path)


def _path_of(value: Any, otherwise: str = "") -> str:
    """Return the path at which a class or a function is defined; for a constant, ``otherwise``."""
    if isinstance(value, ModuleType):
        return ""
    function = inspect.unwrap(value) if callable(value) else value
    if not (inspect.isclass(function) or inspect.isfunction(function)):
        return otherwise
    return f"{function.__module__}.{function.__qualname__}"
