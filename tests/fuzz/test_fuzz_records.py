"""Rewards, tokens, messages and calls that nobody means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hostile import JSON, SCALARS, VALUES, check_played, drawn, mappings, only_sentences
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import MultistepEnv, ScriptedAgent, audit
from agentsgym.credit.assignment import AdvantageAssigner
from agentsgym.credit.registry import ESTIMATORS
from agentsgym.credit.scored import ScoredRollout
from agentsgym.envs import ToolEnv
from agentsgym.recorded.messages import trajectory_from_messages
from agentsgym.testing import chat_tokenizer
from agentsgym.training.config import GRPOEnvConfig
from agentsgym.types import Action, StopReason, Trajectory, Turn

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default")]


class Paying(MultistepEnv):
    """Gives the rewards of its task."""

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "rewards": list(task_data["rewards"])}

    def _format_prompt(self, state: dict[str, Any], step: int) -> Any:
        return "Go."

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        reward, *rest = state["rewards"]
        return {**state, "rewards": rest}, reward, not rest, {}


REWARDS = st.one_of(SCALARS, st.floats(), st.sampled_from([1e200, -1e200, 1e39, -3e38, 3.4e38, 1e-320]))


@drawn(150)
@given(st.lists(REWARDS, min_size=1, max_size=3))
def test_rewards_of_steps(rewards: list[Any]) -> None:
    with only_sentences():
        for one in Paying().rollout([{"rewards": rewards}], ScriptedAgent(["go"], repeat_last=True)):
            check_played(one)
            assert one.failed or all(map(math.isfinite, [*one.turn_rewards, one.final_reward]))


LARGE = st.one_of(st.floats(-3.4e38, 3.4e38), st.sampled_from([3.4e38, -3.4e38, 0.0, 1e-320, 1.0]))


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_estimators_of_any_rewards(name: str) -> None:
    @drawn(40)
    @given(
        st.lists(st.lists(LARGE, min_size=1, max_size=3), min_size=2, max_size=4),
        st.sampled_from(["none", "group", "batch"]),
        st.sampled_from([0.0, 0.9, 1.0]),
    )
    def assign(rewards: list[list[float]], scale: str, discount: float) -> None:
        rollouts: list[ScoredRollout] = [
            ScoredRollout(
                turn_rewards=own,
                final_reward=sum(own),
                group=0,
                state_keys=[None] * len(own),
                token_counts=[1] * len(own),
                values=[[0.0]] * len(own),
            )
            for own in rewards
        ]
        with only_sentences():
            args = GRPOEnvConfig(
                "unused",
                use_cpu=True,
                advantage_estimator=name,
                scale_rewards=scale,
                discount=discount,
                value_head="linear" if name == "gae" else None,
            )
            entries = AdvantageAssigner(args).estimate(rollouts, is_training=True).entries
            for own in entries:
                for entry in own:
                    assert all(map(math.isfinite, entry if isinstance(entry, Sequence) else [entry]))

    assign()


NUMBERS = st.one_of(st.integers(0, 300), SCALARS)
ACTIONS = st.builds(
    lambda **fields: fields,
    text=st.one_of(st.text(max_size=8), SCALARS),
    token_ids=st.one_of(st.none(), st.lists(NUMBERS, max_size=4), SCALARS),
    agent_state=VALUES,
    finish_reason=st.one_of(st.just("stop"), SCALARS),
    reasoning=st.one_of(st.none(), SCALARS),
    policy_version=st.one_of(st.none(), SCALARS),
)


@pytest.mark.parametrize("family", ["llama3", "inst", "chatml"])
def test_tokens(family: str) -> None:
    tokenizer = chat_tokenizer(family)
    env = Paying(tokenizer)

    @drawn(80)
    @given(ACTIONS)
    def play(fields: dict[str, Any]) -> None:
        with only_sentences():
            for one in env.rollout([{"rewards": [1.0, 2.0]}], ScriptedAgent([Action(**fields)], repeat_last=True)):
                check_played(one)
                assert one.failed or audit(one, tokenizer).ok

    play()


@drawn(100)
@given(
    st.lists(
        st.one_of(
            st.fixed_dictionaries(
                {
                    "role": st.sampled_from(["user", "assistant", "tool", "system"]),
                    "content": st.one_of(st.text(max_size=5), VALUES),
                },
                optional={"tool_calls": VALUES, "reasoning_content": VALUES, "tool_call_id": SCALARS},
            ),
            mappings(["role", "content", "tool_calls"]),
        ),
        max_size=4,
    ),
    st.one_of(st.floats(), st.lists(st.one_of(st.floats(), SCALARS), max_size=3), VALUES),
    mappings(["stop_reason", "session_id", "task_data", "info", "task_index"]),
)
def test_recorded_messages(messages: list[Any], rewards: Any, metadata: dict[Any, Any]) -> None:
    with only_sentences():
        own = {str(name): value for name, value in metadata.items() if isinstance(name, str) and name.isidentifier()}
        trajectory_from_messages(TOKENIZER, messages, rewards, **own)


TOKENIZER = chat_tokenizer("chatml")
SCHEMAS = st.one_of(
    VALUES,
    st.fixed_dictionaries(
        {"type": st.just("function")},
        optional={
            "function": st.one_of(
                VALUES,
                st.fixed_dictionaries(
                    {
                        "name": st.one_of(st.just("add"), SCALARS),
                        "parameters": st.one_of(
                            JSON,
                            st.fixed_dictionaries(
                                {
                                    "type": st.just("object"),
                                    "properties": st.one_of(
                                        JSON, st.dictionaries(st.text(max_size=3), JSON, max_size=2)
                                    ),
                                }
                            ),
                        ),
                    }
                ),
            )
        },
    ),
)
TEXTS = st.one_of(
    st.text(max_size=30),
    st.builds(
        "<tool_call>{}</tool_call>".format,
        st.one_of(
            st.text(max_size=20),
            JSON.map(str),
            st.sampled_from(
                [
                    '{"name": "add", "arguments": {"a": 1e999}}',
                    '{"name": "add", "arguments": ' + "[" * 5000,
                    '{"name": "add", "arguments": {"a": 1}}',
                ]
            ),
        ),
    ),
)


def add(a: int, b: float = 1.0) -> str:
    """Add two numbers.

    Args:
        a: One.
        b: Another.
    """
    return str(a + b)


@drawn(80)
@given(SCHEMAS)
def test_schemas_of_tools(schema: Any) -> None:
    with only_sentences():
        env = ToolEnv(None, tools=[schema])
        for one in env.rollout([{"question": "?"}], ScriptedAgent(["5"], repeat_last=True)):
            check_played(one)


@pytest.mark.parametrize("with_tokens", [False, True])
def test_texts_of_calls(with_tokens: bool) -> None:
    env = ToolEnv(TOKENIZER if with_tokens else None, tools=[add])

    @drawn(100)
    @given(st.lists(TEXTS, min_size=1, max_size=2))
    def play(texts: list[str]) -> None:
        with only_sentences():
            for one in env.rollout([{"question": "?", "answer": "2"}], ScriptedAgent(texts, repeat_last=True)):
                check_played(one)

    play()


@drawn(100)
@given(
    mappings(
        [
            "token_ids",
            "turns",
            "messages",
            "logprobs",
            "per_token_rewards",
            "final_reward",
            "info",
            "stop_reason",
            "task_data",
            "error",
            "final_rewards",
        ]
    ),
    st.lists(
        mappings(["start", "stop", "reward", "invalid", "message_index", "role", "prompt_start"], NUMBERS), max_size=2
    ),
)
def test_audits_of_anything(changes: dict[Any, Any], turns: list[dict[Any, Any]]) -> None:
    good: dict[str, Any] = {
        "token_ids": [1, 2, 3],
        "turns": [Turn(start=1, stop=3, reward=1.0, message_index=1)],
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "logprobs": [0.0, -1.0, -1.0],
        "final_reward": 1.0,
        "stop_reason": StopReason.DONE,
    }
    try:
        fields: dict[str, Any] = {**good, **{str(key): value for key, value in changes.items()}}
        if turns:
            fields["turns"] = [Turn(**{"start": 0, "stop": 1, "reward": 0.0, **one}) for one in turns]
        trajectory = Trajectory(**fields)
    except (TypeError, ValueError, AttributeError):
        return  # plain dataclasses are built by the library itself
    with only_sentences():
        str(audit(trajectory, TOKENIZER))
