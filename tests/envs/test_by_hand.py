"""``reset`` and ``step``: one episode played by hand is the episode that a rollout plays."""

import pickle
from typing import Any

import pytest
from guess_game import INVALID, MISS, WIN, GuessEnv, tasks
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import Action, ConfigError, EnvError, Message, ScriptedAgent, StopReason, TaskError
from agentsgym.testing import chat_tokenizer

TOKENIZER = chat_tokenizer("chatml")


class Telling(GuessEnv):
    """Answers at the end how it ended."""

    def _system_prompt(self) -> str:
        return "Play."

    def _last_message(self, state: dict[str, Any]) -> str:
        return "Right." if state["done"] else "Over."


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def test_an_episode_is_played_to_its_end() -> None:
    env = Telling()
    assert env.reset({"solution": 3, "seed": 0}) == [
        {"role": "system", "content": "Play."},
        user("Guess a number from 1 to 9."),
    ]
    [hint], reward, done, info = env.step("1")
    assert hint["content"].startswith("Higher. ")
    assert (reward, done, info) == (MISS, False, {"success": False})
    assert env.step("3") == ([user("Right.")], WIN, True, {"success": True, "stop_reason": StopReason.DONE})
    assert env.active_states == {}


@given(answers=st.lists(st.sampled_from(["1", "2", "3", "x"]), min_size=1, max_size=6), allowance=st.integers(0, 2))
def test_it_is_the_episode_that_a_rollout_plays(answers: list[str], allowance: int) -> None:
    config = {"max_steps_per_episode": 4, "error_allowance": allowance}
    [whole] = GuessEnv(env_config=config).rollout(tasks(3), ScriptedAgent(answers, repeat_last=True))
    env = GuessEnv(env_config=config)
    messages, rewards, done, info = env.reset(tasks(3)[0]), [], False, {}
    while not done:
        answer = answers[min(len(rewards), len(answers) - 1)]
        observation, reward, done, info = env.step(answer)
        messages += [{"role": "assistant", "content": answer}, *observation]
        rewards.append(reward)
    assert messages == whole.messages
    assert rewards == whole.turn_rewards
    assert info == {**whole.info, "stop_reason": whole.stop_reason}


def test_the_limits_of_an_episode_end_it() -> None:
    env = GuessEnv(env_config={"max_steps_per_episode": 5, "error_allowance": 0})
    env.reset({"solution": 3})
    assert env.step("x") == ([], INVALID, True, {"invalid": True, "success": False, "stop_reason": "invalid"})
    env = GuessEnv(TOKENIZER, {"max_trajectory_tokens": 50})
    env.reset({"solution": 3})
    ends = [env.step("1")[2:] for _ in range(1)]
    while not ends[-1][0]:
        ends.append(env.step("1")[2:])
    assert ends[-1][1]["stop_reason"] is StopReason.MAX_TOKENS


def test_what_is_done_out_of_turn_is_refused_in_a_sentence() -> None:
    env = GuessEnv()
    with pytest.raises(ConfigError, match=r"step needs an episode: call reset\(task_data\) first"):
        env.step("1")
    env.reset({"solution": 1})
    with pytest.raises(ConfigError, match="step requires the agent's text or an Action, got 1"):
        env.step(1)  # type: ignore[arg-type]
    assert env.step(Action(text="1"))[2]
    with pytest.raises(ConfigError, match=r"the episode is over \(done\): call reset\(task_data\) first"):
        env.step("1")
    with pytest.raises(TaskError):
        env.reset({"solution": "one"})
    with pytest.raises(ConfigError, match="step needs an episode"):
        env.step("1")
    with pytest.raises(ConfigError, match=r"the first prompt uses up all tokens"):
        GuessEnv(TOKENIZER, {"max_trajectory_tokens": 3}).reset()


def test_what_the_environment_raises_is_raised_with_its_place() -> None:
    class Broken(GuessEnv):
        """Breaks at the second guess."""

        def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            return 1 // len("" if state["guesses"] else "x"), 0.0, False, {}

    class BrokenStart(GuessEnv):
        """Never begins."""

        def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> Any:
            raise RuntimeError("no start")

    env = Broken()
    env.reset({"solution": 1})
    with pytest.raises(EnvError, match=r"turn 0 of Broken"):
        env.step("1")
    with pytest.raises(ConfigError, match="the episode is over"):
        env.step("1")
    with pytest.raises(EnvError, match="no start"):
        BrokenStart().reset()


def test_a_new_episode_ends_the_one_before_and_a_pickled_environment_has_none() -> None:
    closed: list[int] = []

    class Closing(GuessEnv):
        """Notes what is closed."""

        def _close_episode(self, session_id: str, state: dict[str, Any]) -> None:
            closed.append(state["solution"])

    env = Closing()
    env.reset({"solution": 1})
    env.reset({"solution": 2})
    assert closed == [1]
    assert len(env.active_states) == 1
    plain = GuessEnv()
    plain.reset({"solution": 2})
    with pytest.raises(ConfigError, match="step needs an episode"):
        pickle.loads(pickle.dumps(plain)).step("1")
    assert plain.step("2")[2]


def test_equal_seeds_give_equal_episodes() -> None:
    env = GuessEnv()
    first = [env.reset({"seed": 5}), env.step("1")]
    assert [env.reset({"seed": 5}), env.step("1")] == first
