import threading
from typing import Any, ClassVar

import pytest
from guess_game import Quiet

from agentsgym import ConfigError, Field
from agentsgym.envs.config import COMMON_FIELDS
from agentsgym.envs.conversation import DEFAULT_PROMPT
from agentsgym.fields import choice_field, is_bool, is_int, is_number, or_none
from agentsgym.testing import chat_tokenizer


class Configured(Quiet):
    """A game with keys and defaults of its own."""

    config_fields: ClassVar = {
        "judge": Field(default=None, expected="a callable or None", valid=or_none(callable)),
        "words": Field(default=["yes"], expected="a list", valid=lambda value: isinstance(value, list)),
        "penalty": Field(default=0.5, expected="a number from 0 on", valid=is_number(0)),
        "mode": choice_field("easy", "hard"),
    }
    default_config: ClassVar = {"max_steps_per_episode": 7, "mode": "hard"}


def test_the_documented_defaults() -> None:
    assert Quiet().env_config == {
        "max_steps_per_episode": 20,
        "episodes_per_trial": 1,
        "free_shots": 0,
        "error_allowance": 1,
        "system_prompt": None,
        "max_trajectory_tokens": None,
        "turn_credit": "step",
        "token_credit": "spread",
        "state_scores": "change",
        "score_discount": 1.0,
        "keep_history": False,
        "chat_template_kwargs": {},
        "guard_added_tokens": False,
        "unguarded_tokens": [],
        "history": "append",
        "history_turns": None,
        "summarize_over_tokens": None,
        "summary_prompt": DEFAULT_PROMPT,
        "tool_calls": "tolerant",
        "opponent": None,
    }


BAD_VALUES = [
    *[("max_steps_per_episode", value, "a positive int") for value in (0, -1, 2.0, True, "3", None)],
    *[("episodes_per_trial", value, "a positive int") for value in (0, 1.5, False)],
    *[("free_shots", value, "a non-negative int") for value in (-1, True, None)],
    *[("error_allowance", value, "a non-negative int") for value in (-1, 0.0, "1")],
    *[("system_prompt", value, "a str ('' for none) or None") for value in (3, False, ["a"])],
    *[("max_trajectory_tokens", value, "a positive int or None") for value in (0, "100", 1e3)],
    *[("state_scores", value, "one of 'change', 'potential'") for value in ("Change", None, [])],
    *[("score_discount", value, "a number in [0, 1]") for value in (-0.1, 1.5, "1", None, float("nan"))],
    *[("turn_credit", value, "one of 'step', 'final', 'repeat_final', 'spread_final'") for value in ("Step", None, [])],
    *[("token_credit", value, "one of 'spread', 'last', 'each'") for value in ("first", 1)],
    *[("keep_history", value, "True or False") for value in (0, "yes", None)],
    *[
        ("chat_template_kwargs", value, "a dict of options of the chat template")
        for value in (None, [], "enable_thinking", {1: True}, {"tools": []}, {"tokenize": True}, {"messages": 1})
    ],
    *[("guard_added_tokens", value, "True or False") for value in (0, "yes", None)],
    *[("unguarded_tokens", value, "a list of added tokens of the tokenizer") for value in ("<b>", None, [1])],
    *[
        ("history", value, "'append', 'rerender', 'last', 'summarize' or a function from messages to messages")
        for value in ("keep", None, 3)
    ],
    *[("history_turns", value, "a positive int or None") for value in (0, -1, "9", 1.5, True)],
    *[("summarize_over_tokens", value, "a positive int or None") for value in (0, "100", 1.5)],
    *[("summary_prompt", value, "a non-empty str") for value in ("", None, 3)],
    *[("tool_calls", value, "one of 'tolerant', 'strict'") for value in ("lenient", None, True)],
    *[("opponent", value, "a registered name, 'self', names by role, or None") for value in (3, ["self"], {"X": 1})],
]


@pytest.mark.parametrize(("key", "value", "wanted"), BAD_VALUES)
def test_a_bad_value_names_its_key_what_is_wanted_and_what_was_given(key: str, value: Any, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Quiet(env_config={key: value})
    assert str(caught.value) == f"env_config[{key!r}] must be {wanted}, got {value!r}"


def test_every_common_key_is_tested_with_bad_values() -> None:
    assert {key for key, _, _ in BAD_VALUES} == {*COMMON_FIELDS}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"max_step_per_episode": 1},
            r"env_config\['max_step_per_episode'\] is unknown; did you mean 'max_steps_per_episode'\?",
        ),
        ({"seed": 1}, r"env_config\['seed'\] is unknown; valid names"),
        ({5: 1}, r"env_config\[5\] is unknown; valid names"),
        *((given, "env_config must be a dict or None, got") for given in ([], "a", 3)),
        ({"free_shots": 1, "episodes_per_trial": 1}, "'free_shots'.* smaller than .*got 1 of 1"),
        ({"free_shots": 3, "episodes_per_trial": 2}, "'free_shots'.* smaller than .*got 3 of 2"),
        *(
            (
                {"turn_credit": "spread_final", "token_credit": one},
                f"'spread_final' requires token_credit 'spread', got '{one}'",
            )
            for one in ("last", "each")
        ),
    ],
)
def test_what_is_no_configuration_is_refused(given: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Quiet(env_config=given)


def test_a_tokenizer_without_pad_token_is_refused() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.pad_token = None
    with pytest.raises(ConfigError, match="no pad token"):
        Quiet(tokenizer)


def test_a_games_own_keys_and_defaults() -> None:
    config = Configured(env_config={"penalty": 1}).env_config
    assert (config["max_steps_per_episode"], config["mode"], config["penalty"], config["judge"]) == (7, "hard", 1, None)
    assert Configured(env_config={"mode": "easy", "max_steps_per_episode": 2}).env_config["mode"] == "easy"
    with pytest.raises(ConfigError, match=r"env_config\['penalty'\] must be a number from 0 on, got -1"):
        Configured(env_config={"penalty": -1})
    with pytest.raises(ConfigError, match=r"env_config\['penalti'\] is unknown; did you mean 'penalty'\?"):
        Configured(env_config={"penalti": 1})
    assert "mode" not in Quiet().env_config


def test_plain_values_are_copied_and_callables_are_shared() -> None:
    class Judge:
        """A callable that cannot be copied."""

        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self) -> str:
            return "fine"

    words, judge = ["a"], Judge()
    given = {"words": words, "judge": judge}
    env = Configured(env_config=given)
    assert env.env_config["judge"] is judge
    env.env_config["words"].append("b")
    assert words == ["a"]
    assert given.keys() == {"words", "judge"}
    Configured().env_config["words"].append("c")
    assert Configured().env_config["words"] == ["yes"]


@pytest.mark.parametrize(("defaults", "message"), [({"modes": "hard"}, "is unknown"), ({"mode": "soft"}, "must be")])
def test_a_games_own_defaults_are_checked_too(defaults: dict[str, Any], message: str) -> None:
    class Mistaken(Configured):
        """A game whose author mistyped a default."""

        default_config = defaults

    with pytest.raises(ConfigError, match=rf"default_config\['modes?'\] {message}"):
        Mistaken()


def test_values_that_do_not_go_together_can_be_refused_by_the_game() -> None:
    class Picky(Configured):
        """A game that looks at its whole configuration."""

        def _check_config(self, config: dict[str, Any]) -> None:
            if config["mode"] == "hard" and config["penalty"] == 0:
                raise ConfigError("a hard game needs a penalty")

    assert Picky(env_config={"mode": "easy", "penalty": 0})
    with pytest.raises(ConfigError, match="a hard game needs a penalty"):
        Picky(env_config={"penalty": 0})


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (is_int(2), [2, 30], [1, 2.0, True, "2"]),
        (is_number(), [0, -1.5], [float("nan"), float("inf"), 10**400, True, "1"]),
        (is_number(0), [0, 0.5], [-0.1]),
        (is_bool, [True, False], [0, 1, None]),
        (or_none(is_bool), [None, True], [0]),
    ],
)
def test_checks(check: Any, good: list[Any], bad: list[Any]) -> None:
    assert [check(value) for value in [*good, *bad]] == [True] * len(good) + [False] * len(bad)
