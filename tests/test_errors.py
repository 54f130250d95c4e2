import inspect
import re
from typing import Any

import pytest

from agentsgym import errors
from agentsgym.errors import MissingDependencyError, check_options, did_you_mean, misspelled


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


def test_a_missing_package_shows_how_to_install_it() -> None:
    error = MissingDependencyError("textarena", "textarena")
    assert isinstance(error, ImportError)
    assert str(error) == "'textarena' is not installed; install it with: pip install 'agentsgym[textarena]'"
    assert str(MissingDependencyError("Box2D", command="pip install box")).endswith("install it with: pip install box")


def test_the_nearest_word_is_named_or_all_of_them() -> None:
    assert did_you_mean("free_shot", ["free_shots", "history"]) == "; did you mean 'free_shots'?"
    assert did_you_mean("", ["b", "a"]) == "; valid names: 'a', 'b'"
    nested: Any = 0
    for _ in range(5000):
        nested = [nested]
    assert did_you_mean(nested, ["a"]) == "; valid names: 'a'"
    assert did_you_mean(12, ["10", "123"]) == "; did you mean '123'?"


def test_an_argument_that_no_function_has_is_refused() -> None:
    def outer(first: int, **options: int) -> None: ...
    def inner(first: int, given: int, second: int = 0) -> None: ...

    check_options(["first", "second"], outer, inner)
    with pytest.raises(TypeError, match="outer has no argument 'secnd'; did you mean 'second'"):
        check_options(["second", "secnd"], outer, inner)
    with pytest.raises(TypeError, match="outer has no argument 'options'; valid names: 'first', 'second'"):
        check_options(["options"], outer, inner)
    with pytest.raises(TypeError, match="outer has no argument 'given'; valid names: 'first', 'second'"):
        check_options(["given"], outer, inner)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        *[(word, "success") for word in ("sucess", "succcess", "Success", "succses", "succesS", "uccess", "success_")],
        *[(word, None) for word in ("success", "sucsesss", "succ", "", "valid", "won")],
    ],
)
def test_one_wrong_letter_is_a_misspelling(word: str, meant: str | None) -> None:
    assert misspelled(word, ["invalid", "success"]) == meant
