"""Episodes of `OpenEnvEnv` on a stub of the protocol: what is sent, what is shown, how many games live at once."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from openenv_stub import CountUp, Stub, error, observation, schema_of

from agentsgym import (
    Action,
    ConfigError,
    EnvProcessPool,
    EnvThreadPool,
    ScriptedAgent,
    StopReason,
    ToolCall,
    Trajectory,
    check_env,
    make,
)
from agentsgym.envs import OpenEnvEnv, OpenEnvServer, register_server
from agentsgym.envs.OpenEnv import connections
from agentsgym.envs.play import prepare_play


@pytest.fixture(autouse=True)
def quick_and_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports come again: what is remembered of a server is another one's."""
    monkeypatch.setattr(connections, "_checked", [])
    monkeypatch.setattr(connections, "_FULL_GRACE_S", 0.05)


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub().running() as server:
        yield server


def played(stub: Stub, *texts: str | Action, config: dict[str, Any] | None = None, **options: Any) -> list[Trajectory]:
    env = OpenEnvEnv(None, config, server=stub.url)
    return env.rollout([{"seed": 1}], ScriptedAgent([*texts], repeat_last=True), **options)


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def test_an_episode_is_one_connection_that_is_closed(stub: Stub) -> None:
    [one] = played(stub, "a", "<think>b?</think> c", config={"success": "reward"})
    assert [message["content"] for message in one.messages[1::2]] == ["a", "c", "c"]
    assert [message["content"] for message in one.messages[2::2]] == ["1: a", "2: c"]
    assert one.turn_rewards == [0.25, 0.5, 0.75]
    assert one.final_reward == 1.5
    assert one.stop_reason is StopReason.DONE
    assert one.success is True
    numbers = {number for number, _ in stub.of_type("step")}
    assert len(numbers) == 1
    assert [data for _, data in stub.of_type("step")] == [{"message": "a"}, {"message": "c"}, {"message": "c"}]
    assert stub.num_live == 0
    assert len(stub.of_type("close")) == stub.num_connections


def test_rollouts_of_a_task_are_reset_with_one_seed_and_what_the_task_states(stub: Stub) -> None:
    env = OpenEnvEnv(None, {"check_seed": False, "check_capacity": False, "reset": {"level": 2}}, server=stub.url)
    env.rollout([{"seed": 1, "index": 7}, {"seed": 2, "index": None}], ScriptedAgent(["a"] * 3), 3)
    resets = [data for _, data in stub.of_type("reset")]
    assert [data["seed"] for data in resets] == [resets[0]["seed"]] * 3 + [resets[3]["seed"]] * 3
    assert resets[0]["seed"] != resets[3]["seed"]
    assert [{**data, "seed": 0} for data in resets[::3]] == [
        {"level": 2, "index": 7, "seed": 0},
        {"level": 2, "seed": 0},
    ]


def test_check_env_passes(stub: Stub) -> None:
    check_env(OpenEnvEnv(None, server=stub.url))


@pytest.mark.parametrize("pool", [None, EnvThreadPool(3), EnvProcessPool(2)], ids=["here", "threads", "processes"])
def test_all_pools_play_the_same(stub: Stub, pool: Any) -> None:
    try:
        rollouts = played(stub, "a", "b", num_rollouts=4, pool=pool)
    finally:
        if pool is not None:
            pool.close()
    assert [one.error for one in rollouts] == [None] * 4
    assert {tuple(message["content"] for message in one.messages) for one in rollouts} == {
        tuple(message["content"] for message in rollouts[0].messages)
    }
    assert stub.num_live == 0


def test_an_environment_that_was_pickled_plays_on(stub: Stub) -> None:
    env = OpenEnvEnv(None, server=stub.url)
    env.rollout([{"seed": 1}], ScriptedAgent(["a"] * 3))
    other = pickle.loads(pickle.dumps(env))
    assert other.rollout([{"seed": 1}], ScriptedAgent(["a"] * 3))[0].final_reward == 1.5


def test_trials_of_several_episodes_begin_anew(stub: Stub) -> None:
    [one] = played(stub, "a", config={"episodes_per_trial": 2, "keep_history": True})
    assert [message["content"] for message in one.messages].count("3: a") == 0
    assert len(one.turns) == 6
    assert one.final_reward == 3.0
    assert stub.num_live == 0


# Capacity


def test_a_server_that_is_too_small_is_a_sentence_before_play() -> None:
    with Stub(max_sessions=1).running() as stub:
        problem = (
            r"^8 episodes are to run concurrently, but the OpenEnv server at http.* has room for 1 \(its total limit "
            r"is 1\): start it with max_concurrent_envs=8 or more, or run 1 concurrently, with max_concurrent=1, or "
            r"in training with a smaller generation batch$"
        )
        with pytest.raises(ConfigError, match=problem):
            played(stub, "a", num_rollouts=8, config={"check_seed": False})
        assert not stub.of_type("reset")
        assert stub.num_live == 0


def test_check_env_reports_that_a_server_is_too_small() -> None:
    with Stub(max_sessions=3).running() as stub, pytest.raises(ConfigError, match=r"^6 episodes .* has room for 3 "):
        check_env(OpenEnvEnv(None, server=stub.url))


def test_an_agent_is_notified_that_nothing_is_played() -> None:
    class Waiting(ScriptedAgent):
        num_finished = 0

        def finish(self) -> None:
            self.num_finished += 1

    agent = Waiting(["a"])
    with Stub(max_sessions=1).running() as stub, pytest.raises(ConfigError, match="has room for 1"):
        OpenEnvEnv(None, {"check_seed": False}, server=stub.url).rollout([{"seed": 1}], agent, 2)
    assert agent.num_finished == 1


def test_only_those_that_live_at_once_count() -> None:
    with Stub(max_sessions=2).running() as stub:
        rollouts = played(stub, "a", num_rollouts=6, max_concurrent=2)
        assert [one.error for one in rollouts] == [None] * 6
        assert stub.most_live == 2


def test_room_is_requested_once(stub: Stub) -> None:
    env = OpenEnvEnv(None, {"check_seed": False}, server=stub.url)
    for _ in range(3):
        env.rollout([{"seed": 1}], ScriptedAgent(["a"] * 3), 2)
    assert stub.num_connections == 2 + 3 * 2


def test_a_pool_bounds_how_many_are_live() -> None:
    class Counting(OpenEnvEnv):
        requested: ClassVar[list[int]] = []

        def _prepare_play(self, tasks: Any, num_live: int) -> None:
            self.requested.append(num_live)

    env = Counting(None, {"format": "text", "action": "message", "observation": "text"}, server="http://localhost:1")
    trials = env.trials([{"seed": 1}, {"seed": 2}], 4)
    with EnvProcessPool(2, max_sessions_per_worker=3) as pool, EnvThreadPool(2) as threads:
        for options in (
            {},
            {"max_concurrent": 5},
            {"pool": pool},
            {"pool": threads},
            {"pool": pool, "max_concurrent": 1},
        ):
            prepare_play(trials, **options)
    assert env.requested == [8, 5, 6, 8, 1]


def test_a_server_that_fills_up_in_play_fails_the_episodes_it_has_no_room_for() -> None:
    with Stub(max_sessions=2).running() as stub:
        rollouts = played(stub, "a", num_rollouts=3, config={"check_capacity": False, "check_seed": False})
        assert [one.failed for one in rollouts] == [False, False, True]
        assert "is full: 2 of its 2 sessions are taken" in str(rollouts[2].error)


# Seeds


class Unseeded(CountUp):
    count = 0

    def __call__(self, message: dict[str, Any]) -> Any:
        if message["type"] != "reset":
            return super().__call__(message)
        Unseeded.count += 1
        return observation({"text": f"game {Unseeded.count}"})


def test_a_server_that_ignores_seeds_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with Stub(Unseeded).running() as stub, caplog.at_level(logging.WARNING, logger=connections.logger.name):
        for _ in range(2):
            played(stub, "a")
    [record] = [one for one in caplog.records if one.name == connections.logger.name]
    assert "does not respect the seed passed to reset" in record.getMessage()
    assert re.search(r"'game \d+' and 'game \d+'", record.getMessage())


def test_programs_whose_long_commands_differ_at_the_end_are_each_checked(caplog: pytest.LogCaptureFixture) -> None:
    with Stub(Unseeded).running() as stub, caplog.at_level(logging.WARNING, logger=connections.logger.name):
        for name in ("one", "two", "one"):
            server = OpenEnvServer(command=["serve", "x" * 200], env={"GAME": name})
            connections.ServerConnections(server, stub.url).check_seed("games:Env", {}, str)
            server = OpenEnvServer(command=["serve", "x" * 200, name])
            connections.ServerConnections(server, stub.url).check_seed("games:Env", {}, str)
    assert len(caplog.records) == 4


def test_a_server_that_goes_by_its_seeds_is_not_warned_of(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    played(stub, "a")
    assert not caplog.records
    assert len({data["seed"] for number, data in stub.of_type("reset") if number == stub.of_type("reset")[0][0]}) == 1


# How actions and observations are mapped


@pytest.mark.parametrize(
    ("config", "expected", "sent"),
    [
        ({"action": {"message": "I say: {text}!", "n": 1}}, "hi", {"message": "I say: hi!", "n": 1}),
        ({"action": "message"}, "hi", {"message": "hi"}),
        ({"action": lambda text: {"message": text.upper()}}, "hi", {"message": "HI"}),
        ({"format": "json"}, '```json\n{"message": "{}"}\n```', {"message": "{}"}),
    ],
)
def test_an_answer_becomes_an_action_as_configured(
    stub: Stub, config: dict[str, Any], expected: str, sent: dict[str, Any]
) -> None:
    played(stub, expected, config=config)
    assert stub.of_type("step")[0][1] == sent


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({}, '{"board": "x", "left": 3}'),
        ({"observation": "board"}, "x"),
        ({"observation": "left"}, "3"),
        ({"observation": "the rest"}, "y"),
        ({"observation": "{board}, {left} left, {hint}; {x} }{"}, None),
        ({"observation": "{board}, {left} left, {hint} }{"}, "x, 3 left, look up }{"),
        ({"observation": lambda seen: seen["board"] * 2}, "xx"),
        ({"max_result_length": 4}, '{"bo\n[cut: the first 4 of 25 characters]'),
    ],
)
def test_an_observation_becomes_text_as_configured(config: dict[str, Any], shown: str | None) -> None:
    fields = {"board": "x", "left": 3, "none": None, "metadata": {"hint": "look up", "the rest": "y"}}

    def game(message: dict[str, Any]) -> Any:
        return {"type": "state", "data": {}} if message["type"] == "state" else observation(fields, 1, True)

    def begun(message: dict[str, Any]) -> Any:
        return observation(fields) if message["type"] == "reset" else game(message)

    schemas = {"action": schema_of("message"), "observation": schema_of("board", left="integer")}
    with Stub(lambda: begun, schemas).running() as stub:
        [one] = played(stub, "a", config={"check_seed": False, **config})
    if shown is None:
        assert "env_config['observation'] must be a field of the observation, got 'x'" in str(one.error)
    else:
        assert one.messages[-2]["content"] == shown


def test_numbers_are_sent_as_numbers() -> None:
    schemas = {"action": schema_of(move="integer"), "observation": schema_of("text")}
    with Stub(schemas=schemas).running() as stub:
        [one] = played(stub, "3", "three", config={"max_steps_per_episode": 2})
        assert [data for _, data in stub.of_type("step")] == [{"move": 3}, {"move": "three"}]
    assert one.messages[0]["content"] == "Answer each time with one value alone: (integer)"


def test_several_fields_are_a_json_object_or_a_call() -> None:
    schemas = {"action": schema_of("piece", steps="integer"), "observation": schema_of("text")}
    with Stub(schemas=schemas).running() as stub:
        [one] = played(stub, "up", '{"piece": "king", "steps": 1}', config={"max_steps_per_episode": 2})
        assert [data for _, data in stub.of_type("step")] == [{"piece": "king", "steps": 1}]
        assert one.messages[0]["content"].startswith("Answer each time with one JSON object")
        assert one.messages[3]["content"] == "Invalid action. Answer with one JSON object with the fields piece, steps."
        calls = Action(text="", tool_calls=(call("act", piece="rook", steps=2), call("act", piece="rook")))
        [other] = played(stub, calls, config={"format": "tools", "max_steps_per_episode": 1})
        assert stub.of_type("step")[-1][1] == {"piece": "rook", "steps": 2}
    assert one.turns[0].invalid
    assert not one.turns[1].invalid
    assert other.info["num_calls"] == 1
    assert other.info["num_failed_calls"] == 1


# Tools of MCP-style games


MCP_ACTION = schema_of("tool_name", arguments="object")
ADD = {
    "name": "add",
    "description": "Add.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}


class Adder:
    """Adds up; done above 9."""

    tools: ClassVar[list[Any]] = [ADD]

    def __init__(self) -> None:
        self.sum = 0

    def __call__(self, message: dict[str, Any]) -> Any:
        data = message.get("data", {})
        if message["type"] == "state":
            return error("EXECUTION_ERROR", "no state before a reset")
        if message["type"] == "reset":
            return observation({"metadata": {"task": "add"}})
        if data["type"] == "list_tools":
            return observation({"tools": self.tools, "metadata": {}})
        return self.added(data["arguments"]["a"])

    def added(self, a: int) -> Any:
        if a == -1:
            return observation({"result": None, "error": {"error_type": "execution_error", "message": "no negatives"}})
        if a == -2:
            return observation({"result": None, "error": {"error_type": "transport_error", "message": "gone"}})
        self.sum += a
        content = [{"type": "text", "text": str(self.sum)}, {"type": "image"}]
        return observation({"result": {"content": content, "is_error": a == 0}}, a / 10, self.sum > 9)


def adding(*numbers: int) -> Action:
    return Action(text="", tool_calls=tuple(call("add", a=number) for number in numbers))


def test_tools_of_a_game_are_the_agents_tools() -> None:
    with Stub(Adder, {"action": MCP_ACTION, "observation": schema_of()}).running() as stub:
        env = OpenEnvEnv(None, {"success": "reward", "error_allowance": 2}, server=stub.url)
        assert [one["function"]["name"] for one in env.tool_schemas] == ["add"]
        script = [Action(text="hm"), adding(4, -1, 0), Action(text="", tool_calls=(call("sub"),)), adding(6, 1)]
        [one] = env.rollout([{"seed": 1}], ScriptedAgent(script))
        steps = [data for _, data in stub.of_type("step") if data["type"] == "call_tool"]
    assert one.error is None
    contents = [message["content"] for message in one.messages if message["role"] != "assistant"]
    assert contents == [
        '{"task": "add"}',
        "Call a tool.",
        "4\n[image]",
        "Error: no negatives",
        "Error: 4\n[image]",
        "Error: there is no tool 'sub'; valid names: 'add'",
    ]
    assert [data["arguments"]["a"] for data in steps] == [4, -1, 0, 6]  # nothing behind the end
    assert one.turn_rewards == [0.0, 0.4, 0.0, 0.6]
    assert [turn.invalid for turn in one.turns] == [True, False, True, False]
    assert one.success is True


def test_a_tool_that_the_server_cannot_reach_fails_the_episode() -> None:
    with Stub(Adder, {"action": MCP_ACTION, "observation": schema_of()}).running() as stub:
        [one] = played(stub, adding(-2))
    assert "could not reach its tool: gone" in str(one.error)


def test_an_answer_without_a_call_may_end_the_episode() -> None:
    with Stub(Adder, {"action": MCP_ACTION, "observation": schema_of()}).running() as stub:
        [one] = played(stub, "done", config={"answer": "end"})
    assert one.stop_reason is StopReason.DONE
    assert one.final_reward == 0.0


# Rows


def test_rows_name_a_server_that_the_code_has_registered(stub: Stub) -> None:
    name = f"stub {stub.url}"
    register_server(name, stub.url)
    rows = OpenEnvEnv.get_train_dataset({"server": name}, size=3)
    env = make(rows[0])
    [one, *_] = env.rollout(rows, ScriptedAgent(["a"], repeat_last=True))
    assert one.final_reward == 1.5
    with pytest.raises(ConfigError, match="another server is already registered as"):
        register_server(name, "http://localhost:2")


def test_datasets_share_tasks_out() -> None:
    tasks = [{"index": number} for number in range(10)]
    parts = [get(tasks=tasks) for get in (OpenEnvEnv.get_train_dataset, OpenEnvEnv.get_eval_dataset)]
    indices = [sorted(row["task_data"]["index"] for row in part) for part in parts]
    assert sorted(indices[0] + indices[1]) == [*range(10)]
    assert len(indices[1]) == 2
    seeds_of = [
        {row["task_data"]["seed"] for row in get(size=50)}
        for get in (OpenEnvEnv.get_train_dataset, OpenEnvEnv.get_eval_dataset)
    ]
    assert not seeds_of[0] & seeds_of[1]
    assert len(seeds_of[0]) == 50
