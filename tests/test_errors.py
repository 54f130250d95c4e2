import inspect
import re

import pytest

from agentsgym import errors
from agentsgym.errors import MissingDependency, did_you_mean


def tree_of(docstring: str) -> dict[str, str]:
    """Each name in the drawn tree and the name that it hangs under."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in docstring.splitlines():
        found = re.match(r"( +)(?:[│ ]   )*(?:[├└]── )?([A-Z]\w+)", line)
        if found is None:
            continue
        depth = (found.start(2) - len("    ")) // 4
        path[depth:] = [found[2]]
        parents[found[2]] = path[depth - 1] if depth else "Exception"
    return parents


def test_the_drawn_tree_is_the_tree() -> None:
    classes = [found for _, found in inspect.getmembers(errors, inspect.isclass)]
    assert tree_of(errors.__doc__ or "") == {found.__name__: found.__bases__[0].__name__ for found in classes}


@pytest.mark.parametrize("name", ["ConfigError", "TaskError"])
def test_a_bad_value_is_also_a_value_error(name: str) -> None:
    assert issubclass(getattr(errors, name), ValueError)


def test_a_missing_package_says_how_to_install_it() -> None:
    error = MissingDependency("textarena", "textarena")
    assert isinstance(error, ImportError)
    assert str(error) == "'textarena' is not installed; it comes with: pip install 'agentsgym[textarena]'"


def test_the_nearest_word_is_named_or_all_of_them() -> None:
    assert did_you_mean("free_shot", ["free_shots", "history"]) == "; did you mean 'free_shots'?"
    assert did_you_mean("", ["b", "a"]) == "; known are 'a', 'b'"
