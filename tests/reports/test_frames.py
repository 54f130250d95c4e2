"""Rollouts, turns and tokens as tables."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.errors import ConfigError
from agentsgym.reports.frames import rollouts_frame
from agentsgym.statistics.metrics import Evaluation, summarize
from agentsgym.types import StopReason, Trajectory, Turn


def rollout(task: int = 0, **changes: object) -> Trajectory:
    fields: dict[str, object] = {
        "token_ids": [7, 8, 9, 7],
        "turns": [Turn(start=1, stop=3, reward=0.5, message_index=1), Turn(start=3, stop=4, reward=0.0, invalid=True)],
        "messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "left"}],
        "logprobs": [0.0, -0.5, -1.5, math.nan],
        "per_token_rewards": [0.0, 0.25, 0.25, 0.0],
        "final_reward": 0.5,
        "stop_reason": StopReason.DONE,
        "info": {"success": True},
        "task_index": task,
    }
    return Trajectory(**(fields | changes))  # pyright: ignore[reportArgumentType]


def evaluation() -> Evaluation:
    failed = rollout(1, stop_reason=StopReason.FAILED, error="turn 0 of Game\nEnvError: gone", final_reward=0.0)
    return summarize([rollout(), failed, rollout(2, final_rewards={"x": 0.5, 1: -0.5})])


def test_an_evaluation_has_a_row_a_rollout() -> None:
    frame = evaluation().to_pandas()
    assert frame["task"].tolist() == [0, 1, 2]
    assert frame["outcome"].tolist() == ["won", "failed", "won"]
    assert frame["turns"].tolist() == [2, 2, 2]
    assert frame["invalid_turns"].tolist() == [1, 1, 1]
    assert frame["agent_tokens"].tolist() == [3, 3, 3]
    assert frame.loc[1, "error"] == "turn 0 of Game"
    assert frame.loc[2, ["reward/x", "reward/1"]].tolist() == [0.5, -0.5]
    assert frame["reward/x"].isna().tolist() == [True, True, False]


def test_turns_and_tokens_have_rows_of_their_own() -> None:
    turns = rollout().to_pandas()
    assert turns["text"].tolist() == ["left", "go"]
    assert turns["logprob"].tolist()[:1] == [-2.0]
    assert math.isnan(turns["logprob"].tolist()[1])
    assert turns[["tokens", "prompt_tokens", "reward"]].to_numpy().tolist() == [[2, 1, 0.5], [1, 3, 0.0]]
    first, second = rollout().turns
    assert rollout(turns=[first, replace(second, parent=0)]).to_pandas()["parent"].tolist()[1:] == [0]
    tokens = rollout().to_pandas("token")
    assert tokens["mask"].tolist() == rollout().agent_token_mask
    assert tokens["reward"].tolist() == [0.0, 0.25, 0.25, 0.0]
    assert tokens["logprob"].isna().tolist() == [True, False, False, True]
    assert len(evaluation().to_pandas(by="turn")) == 6
    assert rollouts_frame([rollout(), rollout(4)], "token")["task"].tolist() == [0] * 4 + [4] * 4


def test_what_is_not_known_is_missing() -> None:
    bare = rollout(logprobs=None, per_token_rewards=[], messages=[])
    assert bare.to_pandas()["text"].isna().all()
    assert bare.to_pandas("token")[["reward", "logprob"]].isna().all(axis=None)
    assert len(rollouts_frame([])) == 0


def test_a_turn_without_tokens_has_no_logprob() -> None:
    env = TwentyQuestionsEnv(env_config={"max_steps_per_episode": 1})  # no tokenizer
    [played] = env.rollout([{"solution": "cat", "seed": 0}], ScriptedAgent(["Is it alive?"]))
    assert played.logprobs is not None
    assert played.to_pandas()["logprob"].isna().all()


def test_another_kind_of_row_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"by must be one of turn, token, got 'tokens'; did you mean 'token'\?"):
        rollout().to_pandas("tokens")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="by must be one of rollout, turn, token, got 'task'"):
        evaluation().to_pandas(by="task")  # pyright: ignore[reportArgumentType]


def test_the_sums_of_the_rows_are_those_of_the_evaluation() -> None:
    env = TwentyQuestionsEnv(env_config={"max_steps_per_episode": 3})
    tasks = [{"solution": name, "seed": 0} for name in list(env.candidates.objects)[:4]]
    result = summarize(env.rollout(tasks, ScriptedAgent(["Is it alive?"] * 3), 2))
    frame = result.to_pandas()
    assert result.reward is not None
    assert frame["reward"].mean() == pytest.approx(result.reward.mean)
    assert result.to_pandas("turn").groupby(["task", "rollout"]).size().tolist() == frame["turns"].tolist()
