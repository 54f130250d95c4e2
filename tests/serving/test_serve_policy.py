"""A policy that is served to programs elsewhere: sessions by key and by name, and their ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from program_client import Client, RecordingAgent, user

from agentsgym import Action, AgentsGymError, ConfigError, EnvError, RolloutStore, TurnRequest, serve_policy
from agentsgym.testing import chat_tokenizer

TOKENIZER = chat_tokenizer()


def served(**options: Any) -> Any:
    return serve_policy(RecordingAgent(TOKENIZER), TOKENIZER, **options)


def test_each_session_becomes_a_rollout_with_exact_tokens() -> None:
    agent = RecordingAgent(TOKENIZER)
    with serve_policy(agent, TOKENIZER) as server:
        first, second = server.open({"question": "a"}), server.open()
        assert first.api_key != second.api_key
        answer = Client(first).speak(user("hello"))
        Client(second).speak(user("other"))
        Client(first).speak(user("hello"), answer, user("on"))
        one = first.finish({"right": 1.0}, success=True)
        other = second.finish()
    assert (one.final_reward, one.success, one.info["num_conversations"]) == (1.0, True, 1)
    assert one.turns[-1].components == {"right": 1.0}
    assert one.task_data is not None
    assert one.task_data.keys() == {"question", "seed"}
    assert (other.final_reward, other.success) == (0.0, None)
    own = [ids for session, _, ids, _ in agent.answers if session == one.session_id]
    assert [one.token_ids[turn.start : turn.stop] for turn in one.turns] == own


def test_a_finished_session_accepts_no_more_calls() -> None:
    with served() as server:
        session = server.open()
        Client(session).speak(user("hello"))
        session.finish()
        assert Client(session).post("/v1/chat/completions", {"model": "x", "messages": [user("go")]})[0] == 401


def test_programs_open_sessions_by_name_with_the_shared_key() -> None:
    rollouts: list[Any] = []
    stored = threading.Semaphore(0)

    def keep(rollout: Any) -> None:
        rollouts.append(rollout)
        stored.release()

    with served(on_rollout=keep) as server:
        client = Client(SimpleNamespace(base_url=server.url, api_key=server.key))
        for name in ("a", "b", "a"):
            client.chat([user("go")], {"x_agentsgym_session": name})
        assert client.post("/v1/reward", {"reward": 2, "final": True}, x_agentsgym_session="a")[0] == 200
        assert stored.acquire(timeout=30)
        assert (len(rollouts[0].turns), rollouts[0].final_reward) == (2, 2.0)
        client.chat([user("go")], {"x_agentsgym_session": "a"})  # a new session of that name
    assert sorted(len(one.turns) for one in rollouts) == [1, 1, 2]  # none is lost when the server is closed


def test_an_idle_session_ends() -> None:
    ended = threading.Event()
    with served(idle_s=0.3, on_rollout=lambda _: ended.set()) as server:
        Client(server.open()).speak(user("hello"))
        assert ended.wait(30)


def test_rollouts_go_into_a_store(tmp_path: Path) -> None:
    with RolloutStore.writer(tmp_path / "store") as writer, served(on_rollout=writer.add) as server:
        session = server.open({"name": "x"})
        Client(session).speak(user("hello"))
        session.finish(0.5)
    [one] = RolloutStore(tmp_path / "store")
    assert one.final_reward == 0.5


def test_a_full_server_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(max_sessions=1) as server:
        server.open()
        monkeypatch.setattr("agentsgym.serving.policy._OPENING_S", 0.3)
        with pytest.raises(EnvError, match="full or closed"):
            server.open()


class Misconfigured(RecordingAgent):
    """An agent whose error affects every call."""

    def act(self, requests: Sequence[TurnRequest]) -> list[Action]:
        raise ConfigError("the model is missing")


def test_a_server_that_an_error_ended_raises_it_in_every_session() -> None:
    with serve_policy(Misconfigured(TOKENIZER), TOKENIZER) as server:
        first, second = server.open(), server.open()
        assert Client(first).post("/v1/chat/completions", {"model": "x", "messages": [user("go")]})[0] in {401, 403}
        for session in (first, second):
            with pytest.raises(AgentsGymError, match="the model is missing"):
                session.finish()


@pytest.mark.parametrize("options", [{"max_sessions": 0}, {"idle_s": 0}, {"on_rollout": 3}])
def test_bad_options_are_named(options: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        served(**options)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="max_sesions"):
        served(max_sesions=3)


def test_an_opening_that_was_given_up_takes_no_slot_later(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts: list[Any] = []
    with served(max_sessions=1, on_rollout=rollouts.append) as server:
        first = server.open()
        Client(first).speak(user("hello"))
        monkeypatch.setattr("agentsgym.serving.policy._OPENING_S", 0.3)
        with pytest.raises(EnvError, match="full or closed"):
            server.open()
        monkeypatch.setattr("agentsgym.serving.policy._OPENING_S", 30.0)
        first.finish(1.0)
        second = server.open()
        Client(second).speak(user("hello"))
        second.finish(2.0)
    assert [one.final_reward for one in rollouts] == [1.0, 2.0]


@pytest.mark.parametrize("is_named", [False, True])
def test_a_session_without_calls_left_keeps_its_reward(is_named: bool, caplog: pytest.LogCaptureFixture) -> None:
    rollouts: list[Any] = []
    with served(env_config={"max_steps_per_episode": 3}, on_rollout=rollouts.append) as server:
        session: Any = SimpleNamespace(base_url=server.url, api_key=server.key) if is_named else server.open()
        client, headers = Client(session), {"x_agentsgym_session": "a"} if is_named else {}
        body = {"model": "x", "messages": [user("go")]}
        answers = [client.post("/v1/chat/completions", body, **headers) for _ in range(6)]
        assert [status for status, _ in answers] == [200] * 3 + [403] * 3
        assert "env_config['max_steps_per_episode'] = 3" in answers[-1][1]["error"]["message"]
        if is_named:
            assert client.post("/v1/reward", {"reward": 1.0, "final": True}, **headers)[0] == 200
        else:
            client.post("/v1/reward", {"reward": 0.25})
            session.finish(0.75, success=True)
            assert "was cut after 3 calls (max_turns)" in caplog.text
    [one] = rollouts
    assert (one.final_reward, len(one.turns), one.stop_reason) == (1.0, 3, "max_turns")
    assert one.success is (None if is_named else True)
