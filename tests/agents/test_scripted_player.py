"""Players written for one environment: streams by conversation, notes by episode, errors by session."""

from __future__ import annotations

import random
from typing import Any

from agentsgym.agents.scripted_player import Notes, ScriptedPlayer
from agentsgym.errors import AgentError
from agentsgym.seeding import derive_seed
from agentsgym.types import Action, TurnRequest


class Env:
    env_config = {"max_steps_per_episode": 3}  # noqa: RUF012  # as an environment has it


class Drawer(ScriptedPlayer[Notes]):
    """Answers the turn and a number that it draws."""

    def _is_new_episode(self, request: TurnRequest) -> bool:
        return request.messages[-1]["content"] == "again"

    def _begin(self, request: TurnRequest, generator: random.Random) -> Notes:
        return Notes(generator=generator)

    def _play(self, request: TurnRequest, notes: Notes) -> str:
        if request.messages[-1]["content"] == "fail":
            raise AgentError("nothing fits")
        return f"{notes.turn} {notes.generator.random()}"


def request(session: str, output: str = "go", state: Any = None) -> TurnRequest:
    return TurnRequest(
        session_id=session, messages=[{"role": "user", "content": output}], token_ids=(), agent_state=state
    )


def act(player: Drawer, *requests: TurnRequest) -> list[Action]:
    return [answer for answer in player.act(requests) if isinstance(answer, Action)]


def test_a_conversation_draws_the_same_however_it_is_interleaved() -> None:
    together, apart = Drawer(Env(), 3), Drawer(Env(), 3)
    a, b = act(together, request("a"), request("b"))
    [a_again], [b_again] = act(apart, request("x")), act(apart, request("y"))
    assert (a.text, b.text) == (a_again.text, b_again.text)
    assert a.text != b.text
    [b2] = act(together, request("b", state=b.agent_state))
    [a2] = act(apart, request("x", state=a_again.agent_state))
    assert (b2.text, a2.text) == (
        act(apart, request("y", state=b_again.agent_state))[0].text,
        act(together, request("a", state=a.agent_state))[0].text,
    )
    assert act(Drawer(Env(), 4), request("a"))[0].text != a.text


def test_the_next_episode_of_a_conversation_has_new_notes_and_the_same_stream() -> None:
    player = Drawer(Env(), 0)
    [first] = act(player, request("a"))
    [second] = act(player, request("a", state=first.agent_state))
    [again] = act(player, request("a", "again", second.agent_state))
    stream = random.Random(derive_seed("Drawer", 0, 0))
    drawn = [stream.random() for _ in range(3)]
    assert [one.text for one in (first, second, again)] == [f"{t} {x}" for t, x in zip((0, 1, 0), drawn, strict=True)]


def test_a_move_that_cannot_be_chosen_fails_its_session_alone() -> None:
    failed, played = Drawer(Env()).act([request("a", "fail"), request("b")])
    assert isinstance(failed, AgentError)
    assert isinstance(played, Action)
