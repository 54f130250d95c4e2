"""No part of a key or a password is left in what servers state, however they write it."""

import base64
import html
import json
from collections.abc import Callable
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.agents.openai_server import KeyMask, url_secrets, without_credentials

KEY = "sk-proj-Zq8&x/Wm3+T7vR2k"


@pytest.mark.parametrize(
    "write",
    [
        str,
        str.upper,
        lambda key: key[3:12],
        lambda key: key + key,
        lambda key: quote(key, safe=""),
        lambda key: "".join(f"%{byte:02X}" for byte in key.encode()),
        html.escape,
        lambda key: json.dumps({"Authorization": f"Bearer {key}"}),
        lambda key: base64.b64encode(f"Bearer {key}".encode()).decode(),
        lambda key: base64.b64encode(f"user:{key}".encode()).decode(),
        lambda key: base64.urlsafe_b64encode(f"x:{key}".encode()).decode(),
        lambda key: key.encode().hex(),
        lambda key: f"{key[:6]}***{key[-4:]}",
        lambda key: f"Incorrect API key provided: {key[:8]}**********{key[-4:]}.",
        lambda key: f"{key[:10]}...",
    ],
)  # fmt: skip
def test_no_run_of_the_key_is_left(write: Callable[[str], str]) -> None:
    masked = KeyMask([KEY]).masked(f"no luck with '{write(KEY)}', sorry")
    assert masked.startswith("no luck with '")
    assert masked.endswith("', sorry")
    for form in (KEY, quote(KEY, safe=""), html.escape(KEY), KEY.encode().hex()):
        runs = {form[i : i + 8].lower() for i in range(len(form) - 7)}
        assert not [run for run in runs if run in masked.lower()]
    assert KEY[:6] not in masked
    assert KEY[-4:] not in masked


@given(st.text(), st.text(), st.text("abcdefgh0123-", min_size=8, max_size=60))
def test_whatever_stands_around_it_the_key_goes(before: str, after: str, key: str) -> None:
    masked = KeyMask([key]).masked(before + key + after)
    assert key not in masked
    assert "***" in masked


@pytest.mark.parametrize(
    ("message", "left"),
    [
        ("the key that ends in T7vR2k is revoked", "the key that ends in *** is revoked"),
        ("ending with 'vR2k', starting with sk-p.", "ending with '***', starting with ***."),
        ("its last four characters are: vR2k", "its last four characters are: ***"),
        ("key (T7vR2k): no; prefix sk-pro", "key (***): no; prefix ***"),
        ("no key=sk-p***, token:sk-p…R2k, or sk-pr[redacted]2k)", "no *** *** or ***"),
        ("sk-pro----2k sk-proxxxxxxR2k sk-p###2k", "*** *** ***"),
    ],
)
def test_an_end_of_the_key_is_masked_where_it_is_named(message: str, left: str) -> None:
    assert KeyMask([KEY]).masked(message) == left


def test_an_end_that_looks_like_a_word_stays_unless_it_is_called_one() -> None:
    mask = KeyMask(["secret-of-our-server"])
    text = "the server is no secret, its observer starts in a server-room; xvR2k and vR2kx are other words"
    assert mask.masked(text) == text
    assert mask.masked("it ends with server") == "it ends with ***"
    assert KeyMask([KEY]).masked(text) == text


def test_other_words_stay() -> None:
    text = "the model's context is 8192 tokens... and ** of them are free; token-short is no key"
    assert KeyMask([KEY]).masked(text) == text
    assert KeyMask(["", "x", "abc"]).masked("x abc") == "x abc"


def test_the_password_of_an_address_is_a_secret_too() -> None:
    url = "https://somebody:hunter%402hunter@gateway.example/v1?api-version=3"
    mask = KeyMask(url_secrets(url))
    assert mask.masked("wrong: somebody, hunter@2hunter or hunter%402hunter") == "wrong: ***, *** or ***"
    assert without_credentials(url) == "https://gateway.example/v1"
    mask = KeyMask(url_secrets("https://host/v1?api-version=2024-02-01&api-key=abc%2Bdefgh&sig=klmn+opqr"))
    assert mask.masked("2024-02-01: abc%2Bdefgh, abc+defgh, klmn opqr") == "2024-02-01: ***, ***, ***"
    assert without_credentials("somebody:hunter2@gateway.example") == "gateway.example"
