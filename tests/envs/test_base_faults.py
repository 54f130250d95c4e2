import logging
import math
import re
from typing import Any

import faulty_game
import numpy as np
import pytest
import torch
from guess_game import MISS, WIN, Counting, GuessEnv, tasks

from agentsgym.agents.base import Agent, as_agent
from agentsgym.agents.policy.agent import PolicyAgent
from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.errors import AgentError, ConfigError
from agentsgym.interruptions import Interruption
from agentsgym.testing import chat_tokenizer
from agentsgym.tiny import tiny_policy
from agentsgym.types import Action, StopReason, Trajectory

TOKENIZER = chat_tokenizer("chatml")
HOOKS = [name for name in faulty_game.HOOKS if name != "history"]


def env_with(hook: str, replacement: Any) -> GuessEnv:
    return type("Broken", (GuessEnv,), {hook: replacement})(TOKENIZER)


def assert_failed(env: GuessEnv, trajectory: Trajectory, message: str) -> None:
    assert trajectory.stop_reason is StopReason.FAILED
    assert trajectory.error is not None
    assert message in trajectory.error
    assert trajectory.final_reward == 0.0
    assert list(trajectory.per_token_rewards) == [0.0] * len(trajectory.token_ids)
    assert env.active_states == env._generators == {}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_game_that_raises_fails_its_episode_and_the_traceback_is_kept(hook: str) -> None:
    def broken(self: Any, *arguments: Any) -> Any:
        raise OSError("the lights went out")

    env = env_with(hook, broken)
    for trajectory in env.rollout(tasks(1, 2), Counting()):
        assert_failed(env, trajectory, "raised OSError: the lights went out")
        assert 'raise OSError("the lights went out")' in (trajectory.error or "")


class Unclear:
    """Neither true nor false."""

    def __bool__(self) -> bool:
        raise RuntimeError("who knows")


STEP = "_step_episode must return (state, reward, done, info), got "
NONSENSE = [
    *[("_initialize_episode", value, "must return a dict whose 'done' is False") for value in (None, [], {"done": 1})],
    *[
        ("_format_prompt", value, f"_format_prompt must return a str or a list of at least one message, got {value!r}")
        for value in (None, 3, [], ["a"], [{"role": "user"}], [{"role": "user", "content": None}], {"role": "user"})
    ],
    (
        "_format_prompt",
        [{"role": "user", "content": [{"type": "text", "text": "Where?"}]}],
        "_format_prompt must return a str or a list of at least one message whose content is a str (lists of content "
        "parts are not supported: only text is recorded), got [{'role': 'user', "
        "'content': [{'type': 'text', 'text': 'Where?'}]}]",
    ),
    ("_system_prompt", 3, "_system_prompt must return a str or None, got 3"),
    ("_state_key", [1], "_state_key must return something hashable, got [1]"),
    ("_role", {}, "_role must return something hashable, got {}"),
    *[
        ("_potential", value, f"_potential must be a finite number, got {value!r}")
        for value in (math.nan, math.inf, "1", [1.0])
    ],
    *[("_step_episode", value, STEP + repr(value)) for value in (None, ({}, 0.0, False), [{}, 0.0, False, {}])],
    *[("_step_episode", value, STEP + repr(value)) for value in (([], 0.0, False, {}), ({}, 0.0, False, None))],
    *[
        ("_step_episode", ({}, reward, False, {}), f"_step_episode's reward must be a finite number, got {reward!r:.9}")
        for reward in (math.nan, math.inf, None, "1", [1.0], 10**400)
    ],
    *[
        (
            "_step_episode",
            ({}, reward, False, {}),
            f"_step_episode's reward must lie within ±3.4e+38, the range of single precision, got {reward!r}",
        )
        for reward in (1e200, -1e39)
    ],
    *[
        ("_step_episode", ({}, 0.0, False, {"success": value}), "info['success'] must be True or False")
        for value in ("no", math.nan)
    ],
    *[
        ("_step_episode", ({}, 0.0, False, {name: value}), f"info[{name!r}] must be a finite number, got {value!r}")
        for name, value in (("random_reward", "x"), ("optimal_reward", [1.0]))
    ],
    ("_step_episode", ({}, 0.0, "False", {}), "_step_episode's done must be True or False, got 'False'"),
    ("_step_episode", ({}, 0.0, Unclear(), {}), "_step_episode's done must be True or False, got "),
    ("_step_episode", ({}, 0.0, False, {"invalid": Unclear()}), "info['invalid'] must be True or False"),
    *[("_final_reward", value, f"_final_reward must be a finite number, got {value!r}") for value in (math.nan, None)],
]


@pytest.mark.parametrize(("hook", "value", "message"), NONSENSE)
def test_a_game_that_answers_nonsense_fails_its_episode(hook: str, value: Any, message: str) -> None:
    env = env_with(hook, lambda self, *arguments: value)
    [trajectory] = env.rollout(tasks(1), Counting())
    assert_failed(env, trajectory, message)


def test_the_largest_reward_of_single_precision_fails_nothing() -> None:
    env = env_with("_step_episode", lambda self, *arguments: ({}, -3.4e38, True, {}))
    [trajectory] = env.rollout(tasks(1), Counting())
    assert (trajectory.stop_reason, trajectory.final_reward) == (StopReason.DONE, -3.4e38)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (lambda length: None, "rewards, one per token, got None"),
        (lambda length: [], "rewards, one per token, got 0"),
        (lambda length: [0.0] * (length + 1), "rewards, one per token, got "),
        (lambda length: (0.0,) * length, "must return a list of "),
        (lambda length: [0.0] * (length - 1) + [math.nan], "the sum of _calculate_rewards must be a finite number"),
        (lambda length: [None] * length, "raised TypeError"),
    ],
)
def test_token_rewards_that_are_not_one_number_a_token_fail_the_episode(rewards: Any, message: str) -> None:
    env = env_with("_calculate_rewards", lambda self, trajectory: rewards(len(trajectory.token_ids)))
    [trajectory] = env.rollout(tasks(1), Counting())
    assert_failed(env, trajectory, message)
    assert trajectory.turn_rewards == [WIN]


def test_only_the_broken_episode_fails_and_its_turns_stay_on_record(caplog: pytest.LogCaptureFixture) -> None:
    def step(self: Any, session_id: str, state: Any, action: str) -> Any:
        if state["solution"] == 7 and action == "3":
            raise OSError("gone")
        return GuessEnv._step_episode(self, session_id, state, action)

    env = env_with("_step_episode", step)
    seen: list[Trajectory] = []
    with caplog.at_level(logging.WARNING):
        result = env.run_trial(tasks(2, 7, 4), Counting(), on_finish=seen.append)
    assert result["stop_reasons"] == ["done", "failed", "done"]
    assert result["final_rewards"] == [MISS + WIN, 0.0, 3 * MISS + WIN]
    [failed] = [trajectory for trajectory in seen if trajectory.failed]
    assert_failed(env, failed, "OSError: gone")
    assert [turn.stop > turn.start for turn in failed.turns] == [True] * 3
    assert failed.turn_rewards == [MISS, MISS, 0.0]
    assert any(failed.agent_token_mask)
    assert set(result["padded_agent_token_mask"][1]) == {0}
    nested = env.generate(tasks(7), Counting(), return_all_steps=True)
    assert nested["rewards"] == [[0.0] * 3]
    assert {value for mask in nested["mask"][0] for value in mask} == {0}
    [record] = [record for record in caplog.records if failed.session_id in record.getMessage()]
    assert "turn 2 of Broken, at " in record.getMessage()


def shown(answer: Any) -> Any:
    class Saying:
        """Any object with a get_action."""

        def get_action(self, messages: Any, agent_state: Any) -> Any:
            return answer

    return Saying()


def answers(answer: Any) -> Agent:
    class Acting(Agent):
        """Gives this for each request."""

        def act(self, requests: Any) -> Any:
            return [answer for _ in requests]

    return Acting()


def answers_in_turn(*actions: Action) -> Agent:
    class Acting(Agent):
        """Gives these, one a session."""

        def act(self, requests: Any) -> Any:
            return actions

    return Acting()


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        *[
            (shown(value), "Saying.get_action must return (text, agent_state), got")
            for value in (None, "a", ("a",), (1, None), ["a", 1])
        ],
        *[(answers(value), "an agent must return an Action, got") for value in (None, "a", ("a", None))],
        (answers(Action(text=None)), "an agent must return an Action"),  # type: ignore[arg-type]
        (answers(Action(text="\ud83d")), "an Action's text must be valid Unicode, got '\\ud83d'"),
        (answers(AgentError("not today")), "AgentError: not today"),
        (answers(Action(text="1", token_ids=[1] * 9)), "the action has 9 tokens, more than this turn's limit of 8"),
        (Agent(), "Agent must define get_action or act"),
    ],
)
def test_an_agent_that_answers_nonsense_fails_its_episodes(agent: Any, message: str) -> None:
    env = GuessEnv(TOKENIZER)
    trajectories = env.rollout(tasks(1, 2), agent, max_turn_tokens=8)
    assert len(trajectories) == 2
    for trajectory in trajectories:
        assert_failed(env, trajectory, message)
        assert len(trajectory.turns) == 0


VOCABULARY = f"must be an int in [0, {len(TOKENIZER)}), the tokenizer's vocabulary, got "


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([[1, 2]], f"token_ids[0] {VOCABULARY}[1, 2] (list)"),
        ([1, "a"], f"token_ids[1] {VOCABULARY}'a' (str)"),
        ("ab", f"token_ids[0] {VOCABULARY}'a' (str)"),
        ([1.5], f"token_ids[0] {VOCABULARY}1.5 (float)"),
        ([1, 2, None], f"token_ids[2] {VOCABULARY}None (NoneType)"),
        ([True], f"token_ids[0] {VOCABULARY}True (bool)"),
        ([np.int64(5)], f"token_ids[0] {VOCABULARY}"),
        ([-1], f"token_ids[0] {VOCABULARY}-1 (int)"),
        ([5, len(TOKENIZER)], f"token_ids[1] {VOCABULARY}{len(TOKENIZER)} (int)"),
        ([10**9], f"token_ids[0] {VOCABULARY}1000000000 (int)"),
        (3, "token_ids must be a list of ints (use tolist() for a tensor), got 3 (int)"),
        ({1, 2}, "token_ids must be a list of ints (use tolist() for a tensor), got {1, 2} (set)"),
        (np.array([1, 2]), "token_ids must be a list of ints (use tolist() for a tensor), got array([1, 2]) (ndarray)"),
        (
            torch.tensor([[1, 2]]),
            "token_ids must be a list of ints (use tolist() for a tensor), got tensor([[1, 2]]) (Tensor)",
        ),
    ],
)
def test_ids_that_are_no_tokens_fail_their_episode_alone(token_ids: Any, message: str) -> None:
    env = GuessEnv(TOKENIZER)
    won, broken = env.rollout(tasks(1, 2), answers_in_turn(Action(text="1"), Action(text="1", token_ids=token_ids)))
    assert (won.stop_reason, won.final_reward) == (StopReason.DONE, WIN)
    assert_failed(env, broken, message)
    assert list(broken.turns) == []


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, None, "a", [0.0], 10**400, 1j])
@pytest.mark.parametrize("others", [[], [-1.0, math.inf]])
def test_log_probabilities_that_are_no_finite_numbers_fail_their_episode_alone(wrong: Any, others: list[float]) -> None:
    logprobs = [*others, wrong]
    broken_action = Action(text="1", token_ids=[5] * len(logprobs), logprobs=logprobs)
    env = GuessEnv(TOKENIZER)
    won, broken = env.rollout(tasks(1, 2), answers_in_turn(Action(text="1"), broken_action))
    assert (won.stop_reason, won.final_reward) == (StopReason.DONE, WIN)
    assert_failed(env, broken, "an Action's logprobs")
    assert list(broken.turns) == []


def test_log_probabilities_may_be_unknown() -> None:
    action = Action(text="1", token_ids=[5, 6], logprobs=[-1.0, math.nan])
    [trajectory] = GuessEnv(TOKENIZER).rollout(tasks(1), answers(action))
    assert trajectory.stop_reason is StopReason.DONE
    assert [math.isnan(value) for value in (trajectory.logprobs or ())[-2:]] == [False, True]


def test_log_probabilities_in_an_array_fail_their_episode() -> None:
    env = GuessEnv(TOKENIZER)
    [trajectory] = env.rollout(tasks(1), answers(Action(text="1", token_ids=[5], logprobs=np.array([-1.0]))))  # type: ignore[arg-type]
    assert_failed(env, trajectory, "(use tolist() for a tensor), got array([-1.]) (ndarray)")


@pytest.mark.parametrize("token_ids", [[0], [len(TOKENIZER) - 1], (5, 6), []])
@pytest.mark.parametrize("tokenizer", [TOKENIZER, None])
def test_every_id_of_the_vocabulary_is_taken(token_ids: Any, tokenizer: Any) -> None:
    action = Action(text="1", token_ids=token_ids, logprobs=[-0.5] * len(token_ids))
    [trajectory] = GuessEnv(tokenizer).rollout(tasks(1), answers(action))
    assert trajectory.stop_reason is StopReason.DONE
    [turn] = trajectory.turns
    assert tuple(trajectory.token_ids[turn.start : turn.stop]) == (tuple(token_ids) if tokenizer else ())


def test_an_agent_that_raises_for_one_session_fails_that_one() -> None:
    class Squeamish(Counting):
        """Cannot answer 3."""

        def get_action(self, messages: Any, agent_state: Any) -> Any:
            if agent_state == 2 and "9" in messages[0]["content"]:
                raise OSError("not three")
            return super().get_action(messages, agent_state)

    env = GuessEnv(TOKENIZER)
    trajectories = env.rollout(tasks(2, 3, 1), Squeamish())
    assert [one.stop_reason for one in trajectories] == ["done", "failed", "done"]
    assert_failed(env, trajectories[1], "OSError: not three")
    assert trajectories[1].turn_rewards == [MISS, MISS]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, Interruption])
def test_an_interrupt_drops_every_session_and_loses_no_finished_episode(interrupt: Any) -> None:
    class Interrupted(Counting):
        """Someone presses Ctrl-C while it thinks about its third turn."""

        finished = 0

        def act(self, requests: Any) -> Any:
            if any(request.agent_state == 2 for request in requests):
                raise interrupt
            return super().act(requests)

        def finish(self) -> None:
            self.finished += 1

    env, agent, seen = GuessEnv(TOKENIZER), Interrupted(), []
    with pytest.raises(interrupt):
        env.rollout(tasks(1, 9, 2, 8), agent, on_finish=seen.append)
    assert [one.task_index for one in seen] == [0, 2]
    assert [one.stop_reason for one in seen] == [StopReason.DONE] * 2
    assert env.active_states == env._generators == {}
    assert agent.finished == 1


def test_an_interrupt_inside_the_game_drops_every_session() -> None:
    def step(self: Any, session_id: str, state: Any, action: str) -> Any:
        if state["solution"] == 7:
            raise KeyboardInterrupt
        return GuessEnv._step_episode(self, session_id, state, action)

    env = env_with("_step_episode", step)
    with pytest.raises(KeyboardInterrupt):
        env.rollout(tasks(5, 7, 5), Counting())
    assert env.active_states == {}


def test_a_message_that_the_template_refuses_is_no_episodes_fault() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        + str(tokenizer.chat_template)
    )
    env = GuessEnv(tokenizer, {"system_prompt": "Play."})
    with pytest.raises(Exception, match="no system message") as caught:
        env.rollout(tasks(1), Counting())
    assert type(caught.value).__name__ == "TemplateError"
    assert env.active_states == {}


@pytest.mark.parametrize("keep_history", [False, True])
def test_a_message_that_the_template_refuses_later_fails_its_episode_alone(keep_history: bool) -> None:
    class Tooling(GuessEnv):
        """Answers "Higher" as a system message, which this template does not take."""

        def _format_prompt(self, state: dict[str, Any], step: int) -> Any:
            prompt = super()._format_prompt(state, step)
            return [{"role": "system", "content": prompt}] if "Higher" in prompt else prompt

    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages[1:] %}{% if m.role == 'system' %}{{ raise_exception('not now') }}{% endif %}{% endfor %}"
        + str(tokenizer.chat_template)
    )
    env = Tooling(tokenizer, {"keep_history": keep_history})
    won, failed = env.rollout(tasks(1, 3), Counting())
    assert won.stop_reason is StopReason.DONE
    assert_failed(env, failed, "EnvError: the observation before turn 1 cannot be recorded: ")
    assert "not now" in (failed.error or "")
    assert failed.turn_rewards == [MISS]
    assert failed.turns[-1].stop == len(failed.token_ids)


def test_an_observation_that_is_no_text_fails_its_episode_alone() -> None:
    class Bytes(GuessEnv):
        """Answers half a surrogate pair, as text that was read with surrogateescape does."""

        def _format_prompt(self, state: dict[str, Any], step: int) -> Any:
            prompt = super()._format_prompt(state, step)
            return "\udc80" if "Higher" in prompt else prompt

    env = Bytes(chat_tokenizer("chatml"))
    won, failed = env.rollout(tasks(1, 3), Counting())
    assert won.stop_reason is StopReason.DONE
    assert_failed(env, failed, "EnvError: the observation before turn 1 must be valid Unicode")


def test_an_agent_that_cannot_play_here_at_all_reports_it() -> None:
    model, tokenizer = tiny_policy(["Guess"])
    env = GuessEnv()
    with pytest.raises(ConfigError, match="requires an environment with a tokenizer"):
        env.rollout(tasks(1, 2), PolicyAgent(model, tokenizer))
    assert env.active_states == {}


def test_anything_with_get_action_is_an_agent() -> None:
    [trajectory] = GuessEnv().rollout(tasks(1), shown(("1", None)))
    assert trajectory.stop_reason is StopReason.DONE
    agent = ScriptedAgent(["1"])
    assert as_agent(agent) is agent


@pytest.mark.parametrize("thing", [None, "agent", object(), Counting, print])
def test_what_is_no_agent_is_refused(thing: Any) -> None:
    env = GuessEnv()
    with pytest.raises(ConfigError, match=re.escape("an agent must define get_action(messages, agent_state)")):
        env.rollout(tasks(1), thing)
    assert env.num_initialized == 0
