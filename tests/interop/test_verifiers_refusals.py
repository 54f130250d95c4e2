"""What `as_verifiers` refuses, without the package; `tests/with_verifiers` plays with it."""

from __future__ import annotations

import sys

import pytest

from agentsgym.envs import PriceListEnv, TwentyQuestionsEnv
from agentsgym.errors import ConfigError, MissingDependencyError
from agentsgym.interop import as_verifiers


def test_what_verifiers_cannot_play_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="env must be a MultistepEnv, got 3"):
        as_verifiers(3, [{}])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"without tools .* got PriceListEnv"):
        as_verifiers(PriceListEnv(), [{}])
    with pytest.raises(ConfigError, match="one episode per trial, got TwentyQuestionsEnv"):
        as_verifiers(TwentyQuestionsEnv(None, {"episodes_per_trial": 2}), [{}])


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(MissingDependencyError, match="'verifiers' is not installed; install it with: pip install"):
        as_verifiers(TwentyQuestionsEnv(), [{"seed": 1}])
