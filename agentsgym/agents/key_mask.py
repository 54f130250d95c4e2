"""Mask keys and passwords in messages from servers and client libraries."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from urllib.parse import quote, quote_plus, unquote, unquote_plus, urlsplit

_RUN = 8  # minimum number of consecutive characters in common with a secret that are masked
_MASK = "***"
_SHORTEST = 4  # anything shorter is a placeholder, such as "x", for a server that needs no key
_WORDS = re.compile(r"([\s'\"]+)")
_PART_MASKED = re.compile(r"\*{2,}|\.{3}|…|•{2,}|#{3,}|-{3,}|_{3,}|x{4,}|[\[<(](?:redacted|masked|hidden)[\])>]")
_BEFORE, _AFTER = re.compile(r"[=:,;(\[{<]"), re.compile(r"[=:,;)\]}>]")  # punctuation around it within a word
_REVEALING = 6  # minimum length of an end without digits that is masked even if nothing announces it
_ANNOUNCED = (
    r"(?:\b(?:end|start|begin)\w*\s+(?:in|with|by|on)|\b(?:prefix|suffix)(?:\s+is)?"
    r"|\b(?:first|last|final)(?:\s+\w+)?\s+(?:characters|letters|digits)(?:\s+are)?)\W{1,3}"
)
_KEY_NAME = re.compile("key|token|secret|sig|pass|pwd|auth|cred|code", re.IGNORECASE)  # parameter names in URLs
_PUNCTUATION = ".,:;()[]{}<>"


class KeyMask:
    """A mask for every run of characters that a text has in common with a secret.

    A run has at least eight characters (or is a complete shorter secret); case is ignored, and percent-encoded,
    JSON- and HTML-escaped, base64 and hexadecimal forms count too. A word that is already partly masked, as in
    ``sk-ab***yz``, is masked completely if its ends match those of a secret. A standalone end of four to seven
    characters is masked if it has a digit, or has six characters and does not look like a word, and always if the text
    announces it: "ends with", "starting with", "the last four characters are".

    Args:
        secrets: Keys and passwords; those shorter than four characters are ignored.

    >>> mask = KeyMask(["sk-abcdefghijklmnop"])
    >>> mask.masked("not sk-abcdefghijklmnop, nor efghijkl, nor what ends in mnop, nor sk-ab**op")
    'not ***, nor ***, nor what ends in ***, nor ***'
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = [secret for secret in dict.fromkeys(secrets) if len(secret) >= _SHORTEST]
        self._runs: set[str] = set()
        for form in (form.lower() for secret in self._secrets for form in _forms(secret)):
            length = min(_RUN, len(form))
            self._runs.update(form[start : start + length] for start in range(len(form) - length + 1))
        self._lengths = {len(run) for run in self._runs}
        self._ends = [pattern for secret in self._secrets for pattern in _patterns_of_ends(secret)]

    def masked(self, text: str) -> str:
        """Return the text without the secrets."""
        if not self._runs:
            return text
        text = "".join(map(self._masked_word, _WORDS.split(text)))
        lowered = text.lower()
        if len(lowered) != len(text):  # a few letters become two in lower case
            lowered = text
        hidden = bytearray(len(text))
        for length in self._lengths:
            for start in range(len(text) - length + 1):
                if lowered[start : start + length] in self._runs:
                    hidden[start : start + length] = b"\1" * length
        stretches = groupby(zip(text, hidden, strict=True), key=lambda pair: pair[1])
        text = "".join(_MASK if is_hidden else "".join(one for one, _ in pairs) for is_hidden, pairs in stretches)
        for pattern in self._ends:  # after the runs: masking an end first could leave a rest too short to be a run
            text = pattern.sub(rf"\1{_MASK}", text)
        return text

    def _masked_word(self, word: str) -> str:
        """Return the mask for a partly masked word that shows an end of a secret, otherwise the word."""
        head, *others = _PART_MASKED.split(word.lower())
        if not others:
            return word
        head, tail = head.strip(_PUNCTUATION), others[-1].strip(_PUNCTUATION)
        heads = [one for one in (head, _BEFORE.split(head)[-1]) if len(one) > 1]
        tails = [one for one in (tail, _AFTER.split(tail)[0]) if len(one) > 1]
        for secret in map(str.lower, self._secrets):
            if any(map(secret.startswith, heads)) or any(map(secret.endswith, tails)):
                return _MASK
        return word


def url_secrets(url: str) -> Iterator[str]:
    """Yield the user name, the password and the keys in a URL's query, raw and decoded."""
    try:
        parts = urlsplit(url)
        authority, query = parts.netloc, parts.query
    except ValueError:
        authority, query = url, url.partition("?")[2]
    for name, _, value in (parameter.partition("=") for parameter in query.split("&")):
        if _KEY_NAME.search(unquote(name)):
            yield value
            yield unquote_plus(value)
    for part in authority.rpartition("@")[0].split(":"):
        yield part
        yield unquote(part)


def without_credentials(url: str) -> str:
    """Return a URL, valid or not, without a user name, a password or a query."""
    return re.sub(r"^([^/?#]*//)?[^/?#]*@", r"\1", url.partition("?")[0].partition("#")[0])


def _forms(secret: str) -> Iterator[str]:
    """Yield a secret in the encodings in which servers repeat it."""
    data = secret.encode(errors="replace")
    yield from (secret, quote(secret, safe=""), quote_plus(secret), html.escape(secret), json.dumps(secret)[1:-1])
    if len(secret) >= _RUN:
        yield from (data.hex(), "".join(f"%{byte:02x}" for byte in data))
        for shift in range(3):  # the base64 form depends on the secret's position, modulo 3
            for encode in (base64.b64encode, base64.urlsafe_b64encode):
                yield encode(b"\0" * shift + data).decode()[(shift * 8 + 5) // 6 : (shift + len(data)) * 8 // 6]


def _patterns_of_ends(secret: str) -> Iterator[re.Pattern[str]]:
    """Yield patterns that match a secret's short beginnings and ends where they stand alone."""
    lengths = range(min(_RUN, len(secret)) - 1, _SHORTEST - 1, -1)  # the longest first
    ends = [end for length in lengths for end in (secret[:length], secret[-length:])]
    revealing: list[str] = []  # unlikely to occur by chance: with a digit, or neither a word nor words with hyphens
    for end in ends:
        parts = [part for part in re.split(r"[\W_]+", end) if part]
        is_wordy = all(part.islower() or part.isupper() or part.istitle() for part in parts)
        if any(map(str.isdigit, end)) or (len("".join(parts)) >= _REVEALING and not is_wordy):
            revealing.append(end)
    for introduction, some in ((r"(?<![^\W_])", revealing), (_ANNOUNCED, ends)):
        if choice := "|".join(map(re.escape, some)):
            yield re.compile(rf"({introduction})(?:{choice})(?![^\W_])", re.IGNORECASE)
