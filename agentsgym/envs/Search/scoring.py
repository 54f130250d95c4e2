"""Compare a short answer with the reference answers, as SQuAD does: exact match and word F1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(answer: str) -> str:
    """Lowercase, and remove punctuation, articles and extra whitespace, as SQuAD's evaluation does (arXiv:1606.05250).

    >>> normalized(" The  River Tarn. ")
    'river tarn'
    """
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(answer: str, references: Iterable[str]) -> float:
    """Return 1.0 if the answer equals a reference after normalization, and 0.0 otherwise.

    Texts that normalization would empty are compared without removing punctuation and articles.
    """
    own = _compared(answer)
    return float(any(own == _compared(reference) for reference in references))


def f1(answer: str, references: Iterable[str]) -> float:
    """Return the harmonic mean of the precision and recall of words, in [0, 1], for the best reference.

    A repeated word counts as often as it occurs in both texts (arXiv:1606.05250, section 6.1).

    >>> f1("the long river Tarn", ["Tarn"])
    0.5
    """
    words, best = Counter(_compared(answer).split()), 0.0
    for reference in references:
        expected = Counter(_compared(reference).split())
        common = (words & expected).total()
        best = max(best, 2 * common / (words.total() + expected.total()) if common else 0.0)
    return best


def _compared(answer: str) -> str:
    return normalized(answer) or " ".join(answer.lower().split())
