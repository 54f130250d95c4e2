"""`OpenEnvEnv` with servers of the real OpenEnv package, which runs in an interpreter of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from agentsgym import (
    Action,
    ConfigError,
    EnvProcessPool,
    EnvThreadPool,
    GRPOEnvConfig,
    GRPOEnvTrainer,
    ScriptedAgent,
    ToolCall,
    check_env,
)
from agentsgym.envs import OpenEnvEnv, OpenEnvServer
from agentsgym.envs.OpenEnv import connections
from agentsgym.envs.OpenEnv.wire import Connection, get_json
from agentsgym.tiny import tiny_policy

PYTHON = os.environ.get("AGENTSGYM_OPENENV_PYTHON")
GAMES = Path(__file__).parent / "openenv_games.py"
pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="AGENTSGYM_OPENENV_PYTHON names no Python that has OpenEnv: run `make test-worlds`"
)


def server(game: str, sessions: int = 8, **options: Any) -> OpenEnvServer:
    # Beginning with OpenEnv takes seconds of importing, on a busy machine many.
    command = [str(PYTHON), str(GAMES), game, "--port", "{port}", "--sessions", str(sessions)]
    return OpenEnvServer(command=command, start_timeout_s=120.0, connect_timeout_s=30.0, **options)


@pytest.fixture(scope="module")
def guess() -> Iterator[OpenEnvEnv]:
    env = OpenEnvEnv(None, {"success": "won"}, server=server("guess"))
    yield env
    env.close()


@pytest.fixture(scope="module")
def board() -> Iterator[OpenEnvEnv]:
    env = OpenEnvEnv(None, {"success": "reward"}, server=server("board"))
    yield env
    env.close()


def url_of(env: OpenEnvEnv) -> str:
    return env._connections.url()


def calls(*made: tuple[str, dict[str, Any]]) -> Action:
    return Action(text="", tool_calls=tuple(ToolCall(name=name, arguments=arguments) for name, arguments in made))


def test_a_game_is_played_by_its_schema_and_its_seed(guess: OpenEnvEnv) -> None:
    rollouts = guess.rollout([{"seed": 1}, {"seed": 2, "most": 99}], ScriptedAgent(map(str, range(20))), 3)
    assert not any(one.failed for one in rollouts)
    first = [one.messages[1]["content"] for one in rollouts]
    assert len({*first[:3]}) == len({*first[3:]}) == 1
    number = int(first[0].rpartition(" ")[2].rstrip("."))
    assert rollouts[0].messages[-1]["content"] == str(number)
    assert rollouts[0].success is True
    assert rollouts[0].final_reward == 1.0
    assert rollouts[3].messages[1]["content"].startswith("A number from 0 to 99;")


def test_check_env_passes(guess: OpenEnvEnv) -> None:
    check_env(guess)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_pools_play_the_same(guess: OpenEnvEnv, kind: str) -> None:
    tasks, agent = [{"seed": seed} for seed in range(3)], ScriptedAgent(["5", "x", "2"], repeat_last=True)
    expected = [one.messages for one in guess.rollout(tasks, agent, 2)]
    with EnvThreadPool(4) if kind == "threads" else EnvProcessPool(2, max_sessions_per_worker=3) as pool:
        assert [one.messages for one in guess.rollout(tasks, agent, 2, pool=pool)] == expected


def test_a_game_that_raises_fails_its_episode_and_the_server_plays_on(guess: OpenEnvEnv) -> None:
    [one] = guess.rollout([{"seed": 1}], ScriptedAgent(["raise"]))
    assert "raised: the game broke (EXECUTION_ERROR)" in str(one.error)
    lenient = OpenEnvEnv(None, {"execution_error": "invalid"}, server=url_of(guess))
    [other] = lenient.rollout([{"seed": 1}], ScriptedAgent(["raise", "x"], repeat_last=True))
    assert other.messages[3]["content"] == "That action was rejected. the game broke"
    assert other.turn_rewards[:2] == [0.0, -0.5]


def test_a_step_that_takes_too_long_fails_and_opens_nothing_anew(guess: OpenEnvEnv) -> None:
    env = OpenEnvEnv(None, server=OpenEnvServer(url=url_of(guess), step_timeout_s=0.3))
    [one] = env.rollout([{"seed": 1}], ScriptedAgent(["sleep"]))
    assert "did not respond to 'step' within 0.3 s; the connection was closed" in str(one.error)


def test_refused_fields_are_named_and_several_fields_are_json(board: OpenEnvEnv) -> None:
    moves = ['{"piece": "king", "steps": 9}', 'So: {"piece": "rook", "steps": 5}']
    [one] = board.rollout([{"seed": 1}], ScriptedAgent(moves))
    assert one.messages[0]["content"].splitlines()[1:] == [
        "- piece: which piece one of king, rook",
        "- steps: how far (integer)",
        "- note: may be left out",
    ]
    assert one.messages[1]["content"] == '{"board": "king 0, rook 0", "moves_left": 3}'
    assert one.messages[3]["content"].endswith("steps: Input should be less than or equal to 8")
    assert one.turns[0].invalid
    assert one.success is True


def test_several_fields_are_the_arguments_of_a_call_where_tools_are_wanted(board: OpenEnvEnv) -> None:
    env = OpenEnvEnv(None, {"format": "tools", "success": "reward"}, server=url_of(board))
    [one] = env.rollout([{"seed": 1}], ScriptedAgent([calls(("act", {"piece": "rook", "steps": 5}))]))
    assert one.success is True
    assert one.info["num_calls"] == 1


def test_the_tools_of_an_mcp_game_are_native() -> None:
    env = OpenEnvEnv(None, {"success": "reward"}, server=server("shop"))
    try:
        assert [one["function"]["name"] for one in env.tool_schemas] == ["price", "buy"]
        script = [
            calls(("price", {"good": "pear"}), ("price", {"good": "apple"}), ("price", {})),
            calls(("buy", {"good": "pear"}), ("buy", {"good": "plum"})),
        ]
        [one] = env.rollout([{"seed": 1}], ScriptedAgent(script))
    finally:
        env.close()
    assert one.error is None
    assert [message["content"] for message in one.messages if message["role"] != "assistant"] == [
        '{"task": "Buy a pear."}',
        "3",
        "Error: Error calling tool 'price': 'apple'",
        "Error: the argument 'good' of 'price' is missing",
    ]
    assert one.turn_rewards == [0.0, 1.0]
    assert one.success is True


def test_capacity_is_a_sentence_before_play_and_free_again_behind_it(board: OpenEnvEnv) -> None:
    agent = ScriptedAgent(['{"piece": "king", "steps": 1}'], repeat_last=True)
    with pytest.raises(
        ConfigError, match=r"^12 episodes are to run concurrently, .* has room for 8 \(its total limit is 8"
    ):
        board.rollout([{"seed": 1}], agent, 12)
    rollouts = board.rollout([{"seed": 1}], agent, 12, max_concurrent=8)
    assert [one.error for one in rollouts] == [None] * 12


def test_a_server_that_ignores_seeds_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    env = OpenEnvEnv(None, server=server("seedless"))
    with caplog.at_level(logging.WARNING, logger=connections.logger.name):
        env.rollout([{"seed": 1, "most": 10**9}], ScriptedAgent(["5"], repeat_last=True))
    env.close()
    assert "does not respect the seed passed to reset" in caplog.text


def test_what_the_server_serves_is_what_is_read(guess: OpenEnvEnv) -> None:
    url = url_of(guess)
    at = OpenEnvServer(url=url)
    assert get_json(at, url, "health", limit_s=10) == {"status": "healthy"}
    assert {"action", "observation", "state"} <= get_json(at, url, "schema", limit_s=10).keys()
    game = Connection(at, url)
    answer = game.reset({"seed": 3})
    game.close()
    assert answer.keys() == {"observation", "reward", "done"}


def test_a_policy_is_trained_on_it_the_same_wherever_the_games_are_waited_for(
    guess: OpenEnvEnv, tmp_path: Path
) -> None:
    def trained(pool: str | None) -> tuple[list[float], list[torch.Tensor], bool]:
        model, tokenizer = tiny_policy([*map(str, range(10)), "no number lower higher Right"], hidden_size=32)
        before = [one.clone() for one in model.parameters()]
        config = {"max_steps_per_episode": 4, "success": "won"}
        env = OpenEnvEnv(tokenizer, config, server=url_of(guess))
        trainer = GRPOEnvTrainer(
            model,
            env,
            GRPOEnvConfig(
                output_dir=str(tmp_path),
                report_to="none",
                use_cpu=True,
                save_strategy="no",
                logging_steps=1,
                max_steps=3,
                per_device_train_batch_size=8,
                num_generations=4,
                max_turn_tokens=2,
                max_completion_length=400,
                learning_rate=1e-2,
                env_pool=pool,
            ),
            train_dataset=Dataset.from_list([{"task_data": {"seed": seed}} for seed in range(8)]),
        )
        trainer.train()
        env.close()
        logs = trainer.state.log_history
        assert [one["failed"] for one in logs if "failed" in one] == [0] * 3
        after = [*trainer.model.parameters()]
        moved = any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
        return [one["reward"] for one in logs if "reward" in one], after, moved

    rewards, weights, moved = trained(None)
    rewards_there, weights_there, _ = trained("threads")
    assert moved
    assert rewards == rewards_there
    for one, other in zip(weights, weights_there, strict=True):
        torch.testing.assert_close(one, other)
