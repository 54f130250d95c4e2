"""``check_env`` finds each fault in an environment that has exactly that one, and none where there is none."""

from __future__ import annotations

import itertools
import random
import signal
from typing import Any, ClassVar

import faulty_envs as envs
import numpy as np
import pytest
from chat_families import family
from packaged import add
from test_text_answers import TOKENIZERS
from tool_chat import tool_family
from tool_functions import Calls, call

from agentsgym import ConfigError, ContractError, ExploringAgent, check_env, tiny_policy
from agentsgym.envs import ToolEnv, TwentyQuestionsEnv
from agentsgym.envs.check.probe import EnvReport
from agentsgym.testing import chat_tokenizer
from agentsgym.tiny import tiny_tokenizer
from agentsgym.tokens.chat_format import ChatFormat

TASKS: list[dict[str, Any]] = [{"seed": seed} for seed in range(4)]


def found(env_class: Any, tasks: Any = TASKS, **options: Any) -> EnvReport:
    return check_env(env_class, tasks, raise_on=None, **options)


@pytest.mark.parametrize("tokenizer", [None, "chatml"])
@pytest.mark.parametrize("env_class", [envs.Sound, envs.PlaysTwice, envs.SaysWhoseTheRewardIs, TwentyQuestionsEnv])
def test_a_sound_environment_gives_no_findings(env_class: Any, tokenizer: Any) -> None:
    tasks = None if env_class is TwentyQuestionsEnv else TASKS
    report = check_env(env_class, tasks, tokenizer=tokenizer and chat_tokenizer(tokenizer), raise_on="warning")
    assert not report.findings
    assert report.num_episodes >= 24
    assert report.num_turns > report.num_episodes


def test_a_sound_environment_with_a_tool_gives_no_findings() -> None:
    assert not found(envs.HasATool).findings


@pytest.mark.parametrize(
    ("env_class", "check", "hook", "text"),
    [
        (envs.ReadsPythonsGenerator, "global-random", "_initialize_episode", "the global generator of random"),
        (envs.SeedsNumpysGenerator, "global-random", "_step_episode", "the global generator of numpy.random"),
        (envs.IsNeverTheSame, "deterministic", "", "gave a different episode: task 0, turn 0: the observation was"),
        (envs.CountsGames, "deterministic", "_initialize_episode", "self.num_games (in _initialize_episode)"),
        (envs.KeepsTheSecretOnItself, "state-isolation", "_initialize_episode", "when others are played concurrently"),
        (envs.SharesOneDict, "state-isolation", "_initialize_episode", "returns the same dict for two sessions"),
        (envs.PaysNan, "finite-rewards", "_step_episode", "_step_episode returned the reward nan"),
        (envs.PaysARoleThatNobodyHas, "roles", "_step_episode", "reward for the role 'Y', but the roles are"),
        (
            envs.DoesNotSayWhoseTheRewardIs,
            "roles",
            "_step_episode",
            "turns of the roles 'O' and 'X', but no rewards by role",
        ),
        (envs.LosesItsLuckInPickles, "pickling", "", "plays a different episode"),
        (envs.Breaks, "failed", "", "raised OSError: the board is gone"),
        (envs.HasAToolWithoutTypes, "tools", "_tools", "untyped"),
    ],
)
def test_an_error_is_found_and_its_hook_named(env_class: Any, check: str, hook: str, text: str) -> None:
    report = found(env_class)
    errors = [finding for finding in report.errors if finding.check == check]
    assert errors, str(report)
    assert text in errors[0].text
    if hook:
        definer = next(one for one in env_class.__mro__ if hook in vars(one))
        code = vars(definer)[hook].__code__
        assert errors[0].place == f"{code.co_filename}:{code.co_firstlineno}"
    assert {finding.check for finding in report.errors} <= {check, "failed"}  # and nothing else


@pytest.mark.parametrize(
    ("env_class", "check", "text"),
    [
        (envs.WritesIntoTheStateAsItReads, "state-isolation", "_format_prompt changes the state"),
        (
            envs.DrawsWhatNobodySees,
            "deterministic",
            "without effect on these episodes: state['table']['hidden'][0] was 0.",
        ),
        (envs.ComesAliveAgain, "done-sticks", "must stay over"),
        (envs.SaysItAllAgain, "prompt-purity", "repeats the entire first prompt"),
        (envs.BeginsEveryPromptWithItsRules, "prompt-purity", "repeats rules that are in every prompt, 'You guess my"),
        (envs.Accumulates, "prompt-purity", "repeats the entire conversation before it"),
        (envs.RepeatsTheSystemMessage, "prompt-purity", "a system message after the first turn"),
        (envs.CannotBePickled, "pickling", "cannot be sent to worker processes: TypeError"),
        (envs.HasAToolWithoutDescription, "tools", "'silent' has no description"),
    ],
)
def test_a_warning_is_found_alone(env_class: Any, check: str, text: str) -> None:
    report = found(env_class)
    [finding] = report.findings
    assert (finding.check, finding.severity) == (check, "warning"), str(report)
    assert text in finding.text


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ({"x": {1, 2}}, "task 0['x'] cannot be written as JSON"),
        ({"x": float("nan")}, "task 0['x'] cannot be written as JSON"),
        ({"x": (1, 2)}, "task 0['x'] changes when it is stored as JSON: (1, 2) comes back as [1, 2]"),
    ],
)
def test_tasks_that_a_row_cannot_hold_are_found(task: dict[str, Any], text: str) -> None:
    [finding] = found(envs.Sound, [task]).findings
    assert finding.check == "json-tasks"
    assert text in finding.text


def test_every_fault_of_the_tasks_is_found_once() -> None:
    tasks: list[dict[str, Any]] = [{"a": {1}, "b": (1,)}, {"c": float("inf")}, {"a": float("nan")}, {"d": {1: 2}}]
    findings = found(envs.Sound, [*tasks, {"a": {2}}]).findings
    assert {finding.check for finding in findings} == {"json-tasks"}
    reported = [finding.text.partition("]")[0] for finding in findings]
    assert reported == ["task 0['a'", "task 0['b'", "task 1['c'", "task 2['a'", "task 3['d'"]


def test_tools_without_a_description_are_all_named() -> None:
    class Silent(envs.HasATool):
        TOOLS: ClassVar[list[Any]] = [
            {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
            for name in ("one", "two")
        ]

        def _step_action(self, session_id: str, state: dict[str, Any], action: Any) -> Any:
            return state, 0.0, True, {}

    named = [finding.text for finding in found(Silent).findings if finding.check == "tools"]
    assert [text.partition(" has no description")[0] for text in named] == ["the tool 'one'", "the tool 'two'"]


def test_a_refused_task_is_found_and_the_others_are_played() -> None:
    report = found(TwentyQuestionsEnv, [{"solution": 3}, {"solution": "clock"}])
    [finding] = report.findings
    assert "task 0 is rejected" in finding.text
    assert report.num_episodes


def test_a_first_prompt_that_leaves_no_room_is_found() -> None:
    tokenizer = chat_tokenizer()
    report = found(envs.Sound, tokenizer=tokenizer, env_config={"max_trajectory_tokens": 20})
    assert {finding.check for finding in report.errors} == {"token-budget"}
    assert "env_config['max_trajectory_tokens'] is 20" in report.errors[0].text
    [played] = envs.Sound(tokenizer).rollout(TASKS[:1], ExploringAgent())
    tokenizer.model_max_length = played.turns[0].start + 1
    [finding] = found(envs.Sound, tokenizer=tokenizer).findings
    assert "more than half of tokenizer.model_max_length" in finding.text


def test_words_that_the_tokenizer_does_not_know_are_found() -> None:
    tokenizer = tiny_tokenizer([envs.RULES, "Higher.", "Lower.", "A number,", *map(str, range(10))])
    [finding] = found(envs.Sound, tokenizer=tokenizer).findings
    assert finding.check == "token-budget"
    assert "'please.'" in finding.text


def test_a_tool_that_is_never_the_same_is_named_and_not_the_library() -> None:
    count = itertools.count()

    def tick() -> int:
        """Count."""
        return next(count)

    report = found(ToolEnv(tools=tick), [{"question": "What?", "seed": seed} for seed in range(4)])
    [finding] = report.errors
    assert "the observation after the call of 'tick' was '0' and then" in finding.text
    assert finding.place == f"{tick.__code__.co_filename}:{tick.__code__.co_firstlineno}"
    assert "hooks change" not in finding.text


def test_a_tool_whose_every_call_raises_is_found_with_its_line() -> None:
    def broken(word: str) -> str:
        """Look it up.

        Args:
            word: The word.
        """
        return undefined  # type: ignore[name-defined]  # noqa: F821

    report = found(ToolEnv(tools=[broken, add]), [{"question": "What is 3 + 4?"}])
    [finding] = [one for one in report.findings if one.check == "tools"]
    assert finding.severity == "warning"
    assert "the tool 'broken' raised in all " in finding.text
    assert finding.text.endswith("at last NameError: name 'undefined' is not defined")
    assert finding.place == f"{broken.__code__.co_filename}:{broken.__code__.co_firstlineno}"


def test_the_environments_own_players_play_too() -> None:
    class Played(envs.Sound):
        def reference_player(self, seed: int) -> Any:
            return Calls("neither a number nor a call")

        def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            if "neither" in action:
                raise OSError("only a player finds this")
            return super()._step_episode(session_id, state, action)

    class Unmade(envs.Sound):
        def imitation_player(self, seed: int) -> Any:
            raise OSError("not made")

    assert "only a player finds this" in found(Played).errors[0].text
    assert not found(Played, agent=Calls("1")).errors
    assert [one.text for one in found(Unmade).errors] == ["imitation_player raised OSError: not made"]


@pytest.mark.parametrize("limit_s", [None, 5.0])
def test_a_tool_that_draws_from_the_global_generator_is_named_with_its_line(limit_s: float | None) -> None:
    def roll() -> int:
        """Roll a die."""
        return random.randint(1, 6)

    tasks = [{"question": "What?", "seed": seed} for seed in range(4)]
    [finding] = found(ToolEnv(tools=roll, env_config={"tool_timeout_s": limit_s}), tasks).errors
    assert finding.check == "global-random"
    assert finding.text.startswith("the tool 'roll' uses the global generator of random")
    assert finding.place == f"{roll.__code__.co_filename}:{roll.__code__.co_firstlineno}"


def test_a_hook_that_hangs_is_named_once_the_limit_is_over() -> None:
    handler, state = signal.getsignal(signal.SIGALRM), random.getstate()
    [finding] = found(envs.Hangs, limit_s=0.2).errors
    assert finding.check == "time-limit"
    assert "within 0.2 s" in finding.text
    assert finding.place == f"{envs.__file__}:{envs.Hangs._step_episode.__code__.co_firstlineno + 1}"
    assert (signal.getsignal(signal.SIGALRM), random.getstate()) == (handler, state)
    assert not found(envs.Sound, limit_s=60).findings
    with pytest.raises(ConfigError, match="limit_s must be a positive number"):
        found(envs.Sound, limit_s=0)


def test_tools_that_the_template_does_not_show_are_found() -> None:
    report = found(envs.HasATool, tokenizer=chat_tokenizer())  # its template prints no tools
    assert [finding.check for finding in report.errors] == ["tools"]
    assert "does not render the tool 'look_up'" in report.errors[0].text


def test_errors_raise_and_warnings_raise_if_requested() -> None:
    with pytest.raises(ContractError, match=r"\[global-random\] .*faulty_envs.py:\d+: _initialize_episode") as caught:
        check_env(envs.ReadsPythonsGenerator, TASKS)
    assert caught.value.report.errors
    assert check_env(envs.ComesAliveAgain, TASKS).findings
    with pytest.raises(ContractError, match="done-sticks"):
        check_env(envs.ComesAliveAgain, TASKS, raise_on="warning")


def test_the_check_leaves_the_environment_and_the_global_generators_as_they_were() -> None:
    env = envs.ReadsPythonsGenerator()
    before, states = dict(vars(env)), (random.getstate(), np.random.get_state()[1].tobytes())
    check_env(env, TASKS, raise_on=None)
    assert vars(env).keys() == before.keys()
    assert not env.active_states
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == states


def test_an_agent_of_ones_own_plays() -> None:
    class Nothing:
        def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
            return "0", None

    report = check_env(envs.Sound, TASKS, Nothing(), raise_on="warning")
    assert report.num_turns == report.num_episodes * 6  # no secret is 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("Sound", TASKS), "requires an environment or its class"),
        ((envs.Sound, None), "check_env needs tasks"),
        ((envs.Sound, "tasks"), "tasks must be a list"),
        ((envs.Sound, TASKS, "agent"), "an agent must define get_action"),
    ],
)
def test_bad_arguments_are_named(arguments: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_env(*arguments)
    with pytest.raises(ConfigError, match="can be passed only with a class"):
        check_env(envs.Sound(), TASKS, env_config={})


def test_exploring_calls_fit_their_schema() -> None:
    from agentsgym.agents.exploring import random_call  # noqa: PLC0415

    schema = {
        "type": "function",
        "function": {
            "name": "go",
            "parameters": {
                "type": "object",
                "properties": {
                    "where": {"enum": ["north", "south"]},
                    "steps": {"type": "integer", "minimum": 2, "maximum": 4},
                    "loads": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
                    "place": {
                        "prefixItems": [{"type": "integer"}, {"const": "up"}],
                        "minItems": 2,
                        "maxItems": 2,
                        "type": "array",
                    },
                    "fast": {"type": ["boolean", "null"]},
                    "how": {"anyOf": [{"const": "slowly"}, {"type": "object", "properties": {}}]},
                    "note": {"type": "string"},
                },
                "required": ["where", "steps", "loads", "fast", "how"],
            },
        },
    }
    for seed in range(50):
        call = random_call(schema, "a lamp and 3 doors", random.Random(seed))
        given = call.arguments
        assert call.name == "go"
        assert given["where"] in {"north", "south"}
        assert given["steps"] in {2, 3, 4}
        assert len(given["loads"]) == 2
        assert all(isinstance(one, float) for one in given["loads"])
        if "place" in given:
            column, level = given["place"]
            assert isinstance(column, int)
            assert level == "up"
        assert given["fast"] in {True, False, None}
        assert given["how"] in ("slowly", {})
        assert given.get("note", "lamp") in {"a", "lamp", "and", "3", "doors"}


def test_exploring_agents_with_equal_seeds_answer_the_same() -> None:
    plays = [envs.Sound().rollout(TASKS, ExploringAgent(seed=3)) for _ in range(2)]
    assert [one.messages for one in plays[0]] == [one.messages for one in plays[1]]
    other = envs.Sound().rollout(TASKS, ExploringAgent(seed=4))
    assert [one.messages for one in plays[0]] != [one.messages for one in other]


FINE = ("chatml", "inst", "none", "gptoss", "qwen3")
TEMPLATE_TASKS = [{"seed": seed} for seed in range(4)]


def found_in_template(tokenizer: Any, **options: Any) -> list[str]:
    report = check_env(envs.Sound, TEMPLATE_TASKS, tokenizer=tokenizer, raise_on=None, **options)
    return output(report)


def output(report: EnvReport) -> list[str]:
    assert report.num_episodes
    assert not report.errors
    return [finding.text for finding in report.findings if finding.check == "chat-template"]


@pytest.mark.parametrize("tokenizer", [*TOKENIZERS.values(), *map(family, FINE)])
def test_text_answers_that_are_recorded_as_the_template_prints_them_are_fine(tokenizer: Any) -> None:
    assert found_in_template(tokenizer) == []


def test_the_embedded_policy_has_a_template_of_its_own_that_is_fine() -> None:
    assert found_in_template(tiny_policy(envs.Sound(), tasks=TEMPLATE_TASKS)[1]) == []


def test_an_answer_that_is_recorded_inside_a_thought_is_found() -> None:
    [text] = found_in_template(family("deepseek_r1_distill"))
    assert "are recorded with '<think>\\n" in text
    assert "Action.reasoning" in text
    assert found_in_template(family("deepseek_r1_distill"), env_config={"history": "rerender"}) == []


def test_an_end_of_turn_that_is_recorded_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    end = ChatFormat.of(family("chatml")).end_of_turn_id
    written = ChatFormat.answer

    def answer(self: ChatFormat, message: Any, text: str | None = None) -> Any:
        ids, closed = written(self, message, text)
        return ids, [*closed, end]

    monkeypatch.setattr(ChatFormat, "answer", answer)
    [text] = found_in_template(family("chatml"))
    assert "are recorded with '<|im_end|>" in text


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "lfm2_v2"])
def test_calls_and_results_are_compared_too(name: str) -> None:
    env = ToolEnv(tool_family(name), tools=[add])
    tasks = [{"question": f"What is 3 + 4, {seed}?", "answer": 7, "seed": seed} for seed in range(4)]
    report = check_env(env, tasks, Calls([call("add", a=3, b=4)], "7"), raise_on=None)
    assert output(report) == []
    assert report.num_calls == 4
    assert "look_up" in report.call
    assert "4 calls parsed in the form" in str(report)
