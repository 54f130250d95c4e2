"""The first mistakes of someone who writes or builds an environment."""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import pickle
import re
from typing import Any

import pytest
from guess_game import Counting, GuessEnv, tasks

from agentsgym.errors import ConfigError, TaskError


@pytest.mark.parametrize(
    ("tokenizer", "sentence"),
    [
        (
            {"max_steps_per_episode": 3},
            "env_config is the second argument: write GuessEnv(tokenizer, env_config), or GuessEnv(env_config=...) for "
            "agents that do not need tokens; got {'max_steps_per_episode': 3} as the tokenizer",
        ),
        (
            "Qwen/Qwen3-0.6B",
            "the tokenizer must be a tokenizer object, not a name: write "
            "GuessEnv(transformers.AutoTokenizer.from_pretrained('Qwen/Qwen3-0.6B')), got 'Qwen/Qwen3-0.6B'",
        ),
        (
            7,
            "the tokenizer must be a transformers tokenizer or None, got int (if it is a processor, pass processor.tok",
        ),
    ],
)
def test_what_is_no_tokenizer_is_refused(tokenizer: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        GuessEnv(tokenizer)


def test_a_config_field_that_is_none_is_refused_with_the_class() -> None:
    with pytest.raises(ConfigError, match=r"Mine\.config_fields\['a'\] must be a Field .*, as in Field\(.*, got 3"):
        type("Mine", (GuessEnv,), {"config_fields": {"a": 3}})
    with pytest.raises(ConfigError, match=r"Mine\.config_fields must be a dict of Fields, got \['a'\]"):
        type("Mine", (GuessEnv,), {"config_fields": ["a"]})


async def waiting(self: Any, *arguments: Any) -> Any:
    return None


async def yielding(self: Any, *arguments: Any) -> Any:
    yield None


@functools.wraps(waiting)
async def wrapped(self: Any, *arguments: Any) -> Any:
    return await waiting(self, *arguments)


@pytest.mark.parametrize("hook", [waiting, wrapped, staticmethod(waiting), classmethod(waiting)])
def test_an_async_hook_that_is_not_awaited_is_refused_wherever_it_comes_from(hook: Any) -> None:
    mixin = type("Mixin", (), {"_check_task": hook})
    for bases, body in (((GuessEnv,), {"_check_task": hook}), ((mixin, GuessEnv), {})):
        with pytest.raises(
            ConfigError, match=r"^Mine\._check_task is async, but this hook is not awaited: write a plain"
        ):
            type("Mine", bases, body)


def test_an_async_generator_is_no_hook() -> None:
    with pytest.raises(ConfigError, match=r"^Mine\._step_episode is an async generator: return the value"):
        type("Mine", (GuessEnv,), {"_step_episode": yielding})


@pytest.mark.parametrize("hook", [waiting, wrapped, staticmethod(waiting), classmethod(waiting)])
def test_an_environment_knows_that_a_hook_is_async_wherever_it_comes_from(hook: Any) -> None:
    mixin = type("Mixin", (), {"_close_episode": hook})
    assert type("Mine", (GuessEnv,), {"_close_episode": hook}).has_coroutines
    assert type("Mine", (mixin, GuessEnv), {}).has_coroutines
    assert not type("Mine", (type("Mine", (mixin, GuessEnv), {}),), {"_close_episode": lambda *_: None}).has_coroutines


def test_a_hook_that_runs_a_coroutine_to_its_end_is_allowed() -> None:
    @functools.wraps(waiting)
    def running(self: Any, *arguments: Any) -> Any:
        return asyncio.run(waiting(self, *arguments))

    env = type("Mine", (GuessEnv,), {"_state_key": running})()
    assert env.rollout(tasks(3), Counting())[0].error is None


def test_a_single_name_as_task_fields_is_refused() -> None:
    sentence = "Mine.task_fields must be a tuple of keys, as in ('solution',), or None; got 'solution'"
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        type("Mine", (GuessEnv,), {"task_fields": "solution"})


def test_a_coroutine_of_the_users_own_is_allowed() -> None:
    async def _fetch(self: Any) -> None:
        """Called with asyncio.run by a hook."""

    assert type("Mine", (GuessEnv,), {"_fetch": _fetch})()


class Forgetful(GuessEnv):
    """Never calls the base's constructor."""

    def __init__(self) -> None:
        self.words = ["clock"]


@pytest.mark.parametrize("method", ["rollout", "run_trial", "generate"])
def test_a_constructor_that_leaves_out_supers_is_named(method: str) -> None:
    with pytest.raises(
        ConfigError, match=r"Forgetful\.__init__ must call super\(\)\.__init__\(tokenizer, env_config\)"
    ):
        getattr(Forgetful(), method)(tasks(1), Counting())


def test_whatever_needs_supers_constructor_names_it() -> None:
    sentence = r"^Forgetful\.__init__ must call super\(\)\.__init__\(tokenizer, env_config\)"
    env: Any = Forgetful()
    for name in ("tokenizer", "env_config", "given_config", "chat_format", "active_states"):
        with pytest.raises(ConfigError, match=rf"{sentence} before anything reads self\.{name}, but did not$"):
            getattr(env, name)
        assert not hasattr(env, name)
    calls = (
        lambda: env.rng("a"),
        lambda: env.get_train_dataset(),  # noqa: PLW0108  # the attribute is read in the call
        lambda: env.check_starts([]),
        lambda: copy.deepcopy(env),
        lambda: pickle.dumps(env),
    )
    for call in calls:
        with pytest.raises(ConfigError, match=sentence):
            call()
    with pytest.raises(AttributeError, match=r"^'Forgetful' object has no attribute 'rat'$"):
        _ = env.rat
    assert env.words == ["clock"]


def test_a_constructor_that_reads_too_early_is_reported() -> None:
    class Early(GuessEnv):
        """Reads what only the base sets."""

        def __init__(self, tokenizer: Any = None, env_config: Any = None) -> None:
            self.size = self.env_config["highest"]
            super().__init__(tokenizer, env_config)

    with pytest.raises(ConfigError, match=r"^Early\.__init__ must call .* before anything reads self\.env_config"):
        Early()


def test_states_of_a_classs_own_do_not_stand_for_supers_constructor() -> None:
    env = Forgetful()
    env.active_states = {}
    with pytest.raises(ConfigError, match=r"^Forgetful\.__init__ must call super"):
        env.rollout(tasks(1), Counting())


def test_the_error_of_a_property_is_its_own() -> None:
    def size(self: Any) -> Any:
        return self.words.size

    env = type("Mine", (GuessEnv,), {"size": property(size), "words": ["clock"]})()
    with pytest.raises(AttributeError, match=r"^'list' object has no attribute 'size'$"):
        _ = env.size


def test_a_check_of_the_configuration_may_read_the_tokenizer() -> None:
    seen: list[Any] = []
    type("Mine", (GuessEnv,), {"_check_config": lambda self, config: seen.append(self.tokenizer)})()
    assert seen == [None]


@pytest.mark.parametrize("method", ["rollout", "run_trial", "generate"])
def test_a_misspelled_option_names_the_nearest(method: str) -> None:
    with pytest.raises(TypeError, match=f"{method} has no argument 'max_concurent'; did you mean 'max_concurrent'"):
        getattr(GuessEnv(), method)(tasks(1), Counting(), max_concurent=2)


def test_an_option_of_the_function_that_was_called_is_suggested() -> None:
    with pytest.raises(TypeError, match="generate has no argument 'return_all_step'; did you mean 'return_all_steps'"):
        GuessEnv().generate(tasks(1), Counting(), return_all_step=True)
    with pytest.raises(TypeError, match="run_trial has no argument 'num_rollout'; did you mean 'num_rollouts'"):
        GuessEnv().run_trial(tasks(1), Counting(), num_rollout=2)


def test_an_option_of_another_method_names_that_method() -> None:
    env = GuessEnv()
    with pytest.raises(
        TypeError, match=r"^run_trial has no argument 'return_all_steps': it is an argument of generate$"
    ):
        env.run_trial(tasks(1), Counting(), return_all_steps=True)
    with pytest.raises(TypeError, match=r"^rollout has no argument 'return_all_steps': it is an argument of generate$"):
        env.rollout(tasks(1), Counting(), return_all_steps=True)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"^_run_complete_episode has no argument 'return_all_steps': it is an argument of generate$"
    ):
        env._run_complete_episode("s", Counting(), return_all_steps=True)
    with pytest.raises(
        TypeError, match=r"^_run_complete_episode has no argument 'nothing'; valid names: 'agent', 'session_id'"
    ):
        env._run_complete_episode("s", Counting(), nothing=1)


def test_an_unknown_option_is_named_before_the_argument_that_it_stands_for() -> None:
    with pytest.raises(TypeError, match=r"^run_trial has no argument 'inputs'; did you mean 'task_data_list'\?$"):
        GuessEnv().run_trial(inputs=tasks(1), agent=Counting())
    with pytest.raises(ConfigError, match="got nothing"):
        GuessEnv().run_trial(tasks(1))
    with pytest.raises(TaskError, match="got nothing"):
        GuessEnv().run_trial(agent=Counting())


def test_a_key_of_env_config_as_a_keyword_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError) as raised:
        GuessEnv(episodes_per_trial=2)  # type: ignore[call-arg]
    assert str(raised.value) == (
        "GuessEnv has no argument 'episodes_per_trial', which is a key of env_config: write "
        "GuessEnv(tokenizer, {'episodes_per_trial': 2})"
    )
    for word, remedy in {
        "seed": "task_data={'seed': 7}",
        "prompt": "env_config['system_prompt']",
        "env_id": "'env_class_path' names it",
        "train_dataset_size": "get_train_dataset(size=...)",
    }.items():
        with pytest.raises(TypeError, match=f"^GuessEnv has no argument '{word}': .*{re.escape(remedy)}"):
            GuessEnv(**{word: 3})
    with pytest.raises(TypeError, match="unexpected keyword argument 'episods'"):
        GuessEnv(episods=2)  # type: ignore[call-arg]


def test_a_rollout_that_hands_its_options_on_keeps_them_all() -> None:
    class Handing(GuessEnv):
        """Adds nothing to the options."""

        def rollout(self, *arguments: Any, **options: Any) -> Any:
            return super().rollout(*arguments, **options)

    assert len(Handing().generate(tasks(1, 2), Counting(), max_concurrent=1)["ids"]) == 2


def informing(**info: Any) -> GuessEnv:
    def step(self: Any, session_id: str, state: Any, action: str) -> Any:
        state, reward, done, _ = GuessEnv._step_episode(self, session_id, state, action)
        return state, reward, done, info

    return type("Informing", (GuessEnv,), {"_step_episode": step})()


def test_a_misspelled_key_of_info_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    env = informing(sucess=True, invaild=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            env.rollout(tasks(3, 2), Counting())
    assert [record.getMessage() for record in caplog.records] == [
        f"info['{key}'] of Informing is not used; did you mean info['{meant}']?"
        for key, meant in (("sucess", "success"), ("invaild", "invalid"))
    ]


def test_other_keys_of_info_are_nobodys_business(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        informing(valid=True, success=True, location="cave", **{"": 0}).rollout(tasks(3), Counting())
    assert caplog.records == []
