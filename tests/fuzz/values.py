"""Values that nobody should pass, for every kind of argument."""

from __future__ import annotations

import datetime
import decimal
import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

HUGE = 10**400
LONG = "x" * 100_000

#: Texts that break what reads them: surrogates, control tokens, escape sequences, numbers, markup.
texts = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(exclude_categories=()), max_size=8),  # with lone surrogates
    st.sampled_from(
        [
            "",
            " ",
            "\x00",
            "\ud800",
            "<|im_end|>",
            "<|endoftext|>",
            "</s>",
            "<tool_call>",
            "\x1b[2J",
            "\u202e",
            "0",
            "-1",
            "1e999",
            "nan",
            "null",
            "true",
            "[]",
            "{}",
            "{{",
            "%s",
            "../..",
            "/",
            "a.b:c",
            "\n",
            "é",
            "🦀" * 50,
            LONG,
            "[" * 5000,
            "9" * 5000,
            "$tuple",
            "0x",
            "None",
        ]
    ),
)
ints = st.one_of(st.integers(-3, 10), st.sampled_from([2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, HUGE, -HUGE]))
floats = st.one_of(
    st.floats(-1e3, 1e3), st.sampled_from([0.5, -0.0, 1e200, -1e200, 1e308, 5e-324, math.inf, -math.inf, math.nan])
)
numbers = st.one_of(ints, floats)
#: What YAML and JSON can express.
plain_scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
plain = st.recursive(
    plain_scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)


class Hostile:
    """An object whose every method raises."""

    def __repr__(self) -> str:
        raise ZeroDivisionError("repr")

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError("eq")

    def __hash__(self) -> int:
        raise ZeroDivisionError("hash")

    def __bool__(self) -> bool:
        raise ZeroDivisionError("bool")

    def __len__(self) -> int:
        raise ZeroDivisionError("len")

    def __iter__(self) -> Any:
        raise ZeroDivisionError("iter")


def _loop() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


def _deep(depth: int) -> Any:
    value: Any = 0
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


#: Python objects that no configuration should contain.
objects = st.one_of(
    st.builds(Hostile),
    st.builds(_loop),
    st.builds(_deep, st.sampled_from([3, 50, 2000])),
    st.builds(lambda: [*range(3)]),
    st.sampled_from(
        [
            b"\xff",
            object,
            len,
            1j,
            (),
            (1,),
            frozenset({1}),
            range(3),
            np.int64(3),
            np.float32("nan"),
            np.bool_(True),
            np.array([1, 2]),
            np.array(5),
            np.array([], dtype=float),
            decimal.Decimal("NaN"),
            datetime.date(2020, 1, 1),
            {1: 2},
            {None: 1},
            {(): ()},
            Ellipsis,
            NotImplemented,
            lambda: 0,
            print,
            Exception("x"),
        ]
    ),
)
anything = st.one_of(plain, objects)
