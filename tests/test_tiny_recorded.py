"""A tiny policy's words come from recorded episodes of any environment, its tools included."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "envs"))
from mixed_envs import Guess, LookUp, SayTheColor

from agentsgym import Action, Agent, ConfigError, ExploringAgent, PolicyAgent, ToolCall, mix, tiny_policy
from agentsgym.envs import TwentyQuestionsEnv
from agentsgym.tiny import call_text

TASKS = [{"word": "one"}, {"word": "two"}]
SMALL: dict[str, Any] = {"hidden_size": 16, "num_heads": 2, "num_layers": 1}


class Caller(Agent):
    """Looks the word up, and names what it gave."""

    def act(self, requests: Any) -> list[Action]:
        return [self.answer([message["content"] for message in request.messages]) for request in requests]

    def answer(self, output: list[str]) -> Action:
        if len(output) > 1:
            return Action(text=output[-1])
        call = ToolCall(name="look_up", arguments={"word": output[0].removeprefix("What is ")})
        return Action(text="", tool_calls=(call,))


def test_a_conversation_with_tools_goes_through_the_tokens_and_back() -> None:
    _, tokenizer = tiny_policy(LookUp(), tasks=TASKS, agent=Caller(), num_episodes=4, **SMALL)
    env = LookUp(tokenizer)
    for played in env.rollout(TASKS, Caller()):
        assert played.success
        assert tokenizer.unk_token_id not in played.token_ids
        rendered = tokenizer.apply_chat_template(played.messages, tools=list(env.tool_schemas), tokenize=False)
        assert tokenizer.decode(played.token_ids) == rendered
        assert call_text("look_up", {"word": played.messages[0]["content"][8:]}) in rendered


def test_without_a_player_the_exploring_agent_is_recorded() -> None:
    _, tokenizer = tiny_policy(LookUp(), tasks=TASKS, num_episodes=16, **SMALL)
    env = LookUp(tokenizer)
    for played in env.rollout(TASKS * 4, ExploringAgent(seed=0)):
        prompt = played.token_ids[: played.turns[0].start]
        assert tokenizer.unk_token_id not in prompt
    assert "look_up" in tokenizer.get_vocab()


def test_a_policy_with_random_weights_plays_at_once() -> None:
    model, tokenizer = tiny_policy(Guess(), tasks=[{"seed": seed} for seed in range(4)], **SMALL)
    played = Guess(tokenizer).rollout([{"seed": 9}], PolicyAgent(model, tokenizer, max_turn_tokens=3), 4)
    assert not any(trajectory.failed for trajectory in played)


def test_equal_seeds_give_equal_vocabularies() -> None:
    one, other = (tiny_policy(Guess(), tasks=[{"seed": 1}], num_episodes=8, **SMALL)[1] for _ in range(2))
    assert one.get_vocab() == other.get_vocab()


def test_an_environment_that_knows_its_words_is_not_played() -> None:
    class Unplayable(TwentyQuestionsEnv):
        def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
            raise RuntimeError("nobody may play this")

    config = {"objects": ["cat", "rose"], "properties": ["animal", "plant"]}
    _, tokenizer = tiny_policy(Unplayable(env_config=config), **SMALL)
    assert any("cat" in piece for piece in tokenizer.get_vocab())


class Repeats:
    def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
        return messages[-1]["content"].removeprefix("Say "), None


def test_mixed_rows_give_the_words_of_all_their_environments() -> None:
    sources = {"color": SayTheColor, "tool": (LookUp, {}, TASKS), "guess": (Guess, {"highest": 2}, [{"seed": 1}])}
    _, tokenizer = tiny_policy(mix(sources), agent={"tool": Caller(), "color": Repeats()}, num_episodes=8, **SMALL)
    vocabulary = tokenizer.get_vocab()
    assert {"red", "blue", " red", "look_up", "deux", "No."} <= vocabulary.keys()
    assert "look_up" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is one"}], tools=list(LookUp().tool_schemas), tokenize=False
    )


class NeverBegins(Guess):
    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        raise OSError("no board")


@pytest.mark.parametrize(
    ("source", "options", "text"),
    [
        (Guess, {}, r"not a class: pass Guess\(None, config\)"),
        (Guess(), {}, "there are no tasks to play"),
        (Guess(), {"tasks": [{}], "num_episodes": 0}, "num_episodes must be a positive int"),
        (NeverBegins(), {"tasks": [{}]}, "every episode failed: .*no board"),
        (Guess(), {"tasks": [{}], "agent": 3}, "an agent must define get_action"),
        ([], {}, "at least one word"),
        ("text", {}, "from several texts"),
        ([{"task_data": {}}], {}, "a row must be a dict with an 'env_class_path'"),
    ],
)
def test_what_gives_no_words_is_named(source: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        tiny_policy(source, **options, **SMALL)
