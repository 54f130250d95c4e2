"""Where the context of a policy ends, and that its record is exact up to there."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_sessions import COMMON, GROUPED, TOKENIZER, Session, logprobs_of
from transformers import AutoConfig, AutoModelForCausalLM

from agentsgym import AgentError, ConfigError, MultistepEnv, PolicyAgent, StopReason, TurnRequest
from agentsgym.agents.policy import model as model_module
from agentsgym.agents.policy.loading import load_policy
from agentsgym.testing import chat_tokenizer

FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **FACTORS}
ROPES: dict[str, dict[str, Any]] = {
    "longrope": {"max_position_embeddings": 512, "rope_parameters": LONGROPE},
    "dynamic": {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    },
}


def model_with(model_type: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options)).eval()


class Waiting(MultistepEnv):
    """Six turns of many tokens."""

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"first": "go " * task_data.get("length", 1)}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return "wait a moment" if step else state["first"]

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        return state, 0.0, False, {}


@pytest.mark.parametrize("kind", ROPES)
def test_records_are_exact_beside_conversations_that_are_full(kind: str) -> None:
    model = model_with("llama", GROUPED | ROPES[kind])
    agent = PolicyAgent(model, TOKENIZER, max_turn_tokens=20)
    agent.stop_token_ids = frozenset()
    sessions = [Session(n) for n in range(5)]
    sessions[0].token_ids += [70] * 45  # full in its first turn, in which the others go on
    while sessions:
        answers = agent.act([session.request() for session in sessions])
        open_ = []
        for session, answer in zip(sessions, answers, strict=True):
            if isinstance(answer, AgentError):
                assert len(session.token_ids) >= 64
                continue
            expected = logprobs_of(model, session.token_ids, list(answer.token_ids or ()))
            torch.testing.assert_close(torch.tensor(list(answer.logprobs or ())), expected, atol=5e-5, rtol=1e-5)
            session.record(answer)
            open_.append(session)
        sessions = open_


@pytest.mark.parametrize("model_type", ["gpt2", "opt"])
def test_a_conversation_that_fills_all_positions_does_not_end_the_others(model_type: str) -> None:
    model = model_with(model_type, COMMON | {"max_position_embeddings": 32})
    agent = PolicyAgent(model, TOKENIZER, max_turn_tokens=15)
    agent.stop_token_ids = frozenset()
    requests = [TurnRequest(session_id=str(n), messages=[], token_ids=[70] * n) for n in (28, 10, 9)]
    assert [len(action.token_ids or ()) for action in agent.act(requests)] == [4, 15, 15]  # type: ignore[union-attr]


def test_an_episode_ends_where_the_context_does_and_a_first_prompt_that_fills_it_fails() -> None:
    env = Waiting(chat_tokenizer("chatml"), {"max_steps_per_episode": 20})
    agent = PolicyAgent(model_with("llama", GROUPED | ROPES["longrope"]), env.tokenizer, max_turn_tokens=5)
    ended, failed = env.rollout([{}, {"length": 100}], agent)
    assert ended.stop_reason is StopReason.MAX_TOKENS
    assert 64 - 30 < len(ended.token_ids) <= 64
    assert ended.turns[-1].stop == len(ended.token_ids)
    assert failed.stop_reason is StopReason.FAILED
    assert "leaves no room for an answer within the agent's context (64 tokens)" in str(failed.error)


def test_frequencies_that_are_fixed_by_hand_leave_the_whole_context(caplog: pytest.LogCaptureFixture) -> None:
    model_module._warn_once.cache_clear()
    fixed = {"rope_parameters": LONGROPE | {"short_factor": LONGROPE["long_factor"]}}
    for options, length, warns in ((ROPES["longrope"], 64, 1), (ROPES["longrope"] | fixed, 512, 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            agents = [PolicyAgent(model_with("llama", GROUPED | options), TOKENIZER) for _ in range(2)]
        assert [agent.context_length for agent in agents] == [length] * 2
        said = [text for text in caplog.messages if "conversations with LlamaForCausalLM end at 64 tokens" in text]
        assert len(said) == warns


def test_a_scaling_of_unknown_type_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    model_with("llama", GROUPED).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"rope_parameters": None, "rope_scaling": {"type": "stretched", "factor": 2}}))
    with pytest.raises(ConfigError, match=r"has the type 'stretched', which is unknown .*: it must be one of default"):
        load_policy(str(tmp_path))
