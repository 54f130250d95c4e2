"""Search and reasoning with a tokenizer: every record is exact, and rewards lie on the agent's own tokens."""

from __future__ import annotations

from typing import Any

import pytest

from agentsgym import Action, Agent, ScriptedAgent, audit
from agentsgym.envs import ReasoningEvalsEnv, SearchEnv
from agentsgym.envs.Search import ReferencePlayer
from agentsgym.testing import ChatKind, chat_tokenizer
from agentsgym.tiny import tiny_tokenizer


class Sampler(Agent):
    """Gives the ids of what the reference player writes, as a policy would."""

    def __init__(self, env: SearchEnv, tokenizer: Any) -> None:
        self.player, self.tokenizer = ReferencePlayer(env), tokenizer

    def act(self, requests: Any) -> Any:
        end: int = self.tokenizer.eos_token_id
        return [self._sampled(action, end) for action in self.player.act(requests)]

    def _sampled(self, action: Action, end: int) -> Action:
        ids = [*self.tokenizer(action.text, add_special_tokens=False)["input_ids"], end]
        return Action(text=action.text, token_ids=ids, logprobs=[-1.0] * len(ids), agent_state=action.agent_state)


@pytest.mark.parametrize("kind", ["chatml", "llama3", "trimming"])
def test_searches_in_tags_are_recorded_exactly(kind: ChatKind) -> None:
    tokenizer = chat_tokenizer(kind)
    env = SearchEnv(tokenizer, {"format": "tags", "evidence_reward": 0.5})
    trajectories = env.rollout(SearchEnv.get_eval_dataset(env.given_config, size=5), Sampler(env, tokenizer))
    assert audit(trajectories).ok
    for one in trajectories:
        assert one.exact
        assert one.success
        assert one.final_reward == pytest.approx(1.5)
        assert sum(one.per_token_rewards) == pytest.approx(1.5)
        assert one.token_ids == tokenizer.apply_chat_template(one.messages)["input_ids"][: len(one.token_ids)]


def test_attempts_are_recorded_exactly() -> None:
    tokenizer = chat_tokenizer()
    env = ReasoningEvalsEnv(tokenizer, {"max_attempts": 2})
    [one] = env.rollout([{"question": "1 + 1?", "answer": "2"}], ScriptedAgent(["3", "<answer>2</answer>"]))
    assert audit([one]).ok
    assert one.turn_rewards == [0.0, 1.0]
    output = [tokenizer.decode(one.token_ids[turn.start : turn.stop]) for turn in one.turns]
    assert output == ["3<|im_end|>", "<answer>2</answer><|im_end|>"]


@pytest.mark.parametrize("format_", ["tags", "tools"])
def test_a_tokenizer_of_its_words_writes_whole_episodes(format_: str) -> None:
    config = {"format": format_, "world": {"num_people": 20}}
    tokenizer = tiny_tokenizer(SearchEnv(None, config).vocabulary_texts())
    env = SearchEnv(tokenizer, config)
    trajectories = env.rollout(SearchEnv.get_train_dataset(config, size=20), ReferencePlayer(env))
    assert not any(tokenizer.unk_token_id in one.token_ids for one in trajectories)
    assert all(one.success for one in trajectories)
