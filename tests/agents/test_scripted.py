"""The players without a model, and players written for one environment, under any interleaving."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import Action, Agent, AgentError, ConfigError, RandomAgent, ScriptedAgent, TurnRequest
from agentsgym.agents.scripted_player import Notes, ScriptedPlayer
from agentsgym.seeding import derive_seed


def request(session_id: str, agent_state: Any = None) -> TurnRequest:
    return TurnRequest(session_id=session_id, messages=[], token_ids=[], agent_state=agent_state)


def play(agent: Agent, num_sessions: int, num_turns: int, seed: int | None) -> dict[str, list[str]]:
    """Play sessions that start in order and then advance in random batches (``seed``), or one after the other."""
    sessions = [f"session {index}" for index in range(num_sessions)]
    output: dict[str, list[str]] = {session: [] for session in sessions}
    states: dict[str, Any] = {}

    def advance(batch: list[str]) -> None:
        actions = agent.act([request(session, states.get(session)) for session in batch])
        for session, action in zip(batch, actions, strict=True):
            assert isinstance(action, Action)
            output[session].append(action.text)
            states[session] = action.agent_state

    if seed is None:
        for session in sessions:
            for _ in range(num_turns):
                advance([session])
        return output
    shuffle = random.Random(seed)
    advance(sessions)
    while waiting := [session for session in sessions if len(output[session]) < num_turns]:
        advance(shuffle.sample(waiting, shuffle.randint(1, len(waiting))))
    return output


@given(st.lists(st.text(), min_size=1, max_size=6), st.integers(1, 5), st.none() | st.integers())
def test_every_session_hears_the_script_whatever_the_interleaving(
    script: list[str], num_sessions: int, seed: int | None
) -> None:
    output = play(ScriptedAgent(script), num_sessions, len(script), seed)
    assert list(output.values()) == [script] * num_sessions


def test_an_action_keeps_its_ids_and_log_probabilities() -> None:
    given_action = Action(text="left", token_ids=[3, 1], logprobs=[-0.5, -1.0], agent_state=7, finish_reason="length")
    (played,) = ScriptedAgent(["up", given_action]).act([request("a", 1)])
    assert played == Action(text="left", token_ids=[3, 1], logprobs=[-0.5, -1.0], agent_state=2, finish_reason="length")


def test_a_script_that_runs_out_fails_only_the_session_it_runs_out_for() -> None:
    agent = ScriptedAgent(["up", "down"])
    over, going_on = agent.act([request("a", 2), request("b", 1)])
    assert isinstance(over, AgentError)
    assert "the script has only 2 actions" in str(over)
    assert isinstance(going_on, Action)
    assert going_on.text == "down"


def test_the_last_action_can_be_repeated_for_ever() -> None:
    (output,) = play(ScriptedAgent(["up", "down"], repeat_last=True), 1, 5, None).values()
    assert output == ["up", "down", "down", "down", "down"]


@pytest.mark.parametrize(
    ("kind", "given", "problem"),
    [
        *((ScriptedAgent, one, "a script must be a list of at least one action, got") for one in ("look", [], None)),
        (ScriptedAgent, ["up", 5], "action 1 of a script must be a str or an Action, got 5"),
        *(
            (RandomAgent, one, "choices must be a list of at least one string, got")
            for one in ("yes", [], ["yes", 1], None)
        ),
    ],
)
def test_scripts_and_choices_must_be_lists_of_what_is_said(kind: Any, given: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        kind(given)


@given(st.integers(), st.integers(1, 5), st.integers(0, 2**32))
def test_equal_seeds_play_equal_games_whatever_the_interleaving(seed: int, num_sessions: int, order: int) -> None:
    one_by_one = play(RandomAgent(["a", "b", "c"], seed=seed), num_sessions, 6, None)
    assert play(RandomAgent(["a", "b", "c"], seed=seed), num_sessions, 6, order) == one_by_one


def test_sessions_and_seeds_have_unrelated_draws() -> None:
    games = {
        tuple(output)
        for seed in range(3)
        for output in play(RandomAgent(["a", "b", "c"], seed=seed), 3, 40, None).values()
    }
    assert len(games) == 9


def test_every_choice_is_equally_likely() -> None:
    output = play(RandomAgent(["a", "b", "c", "d"], seed=1), 400, 10, None)
    counts = Counter(text for texts in output.values() for text in texts)
    assert set(counts) == set("abcd")
    # Four standard deviations of a binomial count with n = 4000 and p = 1/4.
    assert all(abs(count - 1000) < 4 * 750**0.5 for count in counts.values())


def test_a_seed_that_comes_with_a_request_decides_the_draws_of_its_conversation() -> None:
    def output(agent: RandomAgent, seed: int | None, session_id: str) -> list[str]:
        texts, agent_state = list[str](), None
        for _ in range(20):
            request = TurnRequest(session_id=session_id, messages=(), token_ids=(), agent_state=agent_state, seed=seed)
            [action] = agent.act([request])
            texts, agent_state = [*texts, action.text], action.agent_state
        return texts

    agent = RandomAgent(["a", "b", "c"], seed=1)
    first = output(agent, 7, "x")
    assert output(agent, 7, "y") == first
    assert output(agent, 8, "z") != first
    assert output(RandomAgent(["a", "b", "c"], seed=2), 7, "x") != first
    assert output(agent, None, "s") == output(RandomAgent(["a", "b", "c"], seed=1), None, "s")  # and takes no number


def test_the_global_generator_is_left_alone() -> None:
    state = random.getstate()
    play(RandomAgent(["a", "b"]), 2, 3, None)
    assert random.getstate() == state


def test_finish_forgets_sessions_and_the_next_rollout_draws_afresh() -> None:
    agent = RandomAgent([str(number) for number in range(1000)], seed=3)
    first = play(agent, 2, 10, None)
    agent.finish()
    second = play(agent, 2, 10, None)
    both = play(RandomAgent([str(number) for number in range(1000)], seed=3), 4, 10, None)
    assert [*first.values(), *second.values()] == list(both.values())


class Env:
    env_config = {"max_steps_per_episode": 3}  # noqa: RUF012  # as an environment has it


class Drawer(ScriptedPlayer[Notes]):
    """Answers the turn and a number that it draws."""

    def _is_new_episode(self, request_of: TurnRequest) -> bool:
        return request_of.messages[-1]["content"] == "again"

    def _begin(self, request_of: TurnRequest, generator: random.Random) -> Notes:
        return Notes(generator=generator)

    def _play(self, request_of: TurnRequest, notes: Notes) -> str:
        if request_of.messages[-1]["content"] == "fail":
            raise AgentError("nothing fits")
        return f"{notes.turn} {notes.generator.random()}"


def request_of(session: str, output: str = "go", state: Any = None) -> TurnRequest:
    return TurnRequest(
        session_id=session, messages=[{"role": "user", "content": output}], token_ids=(), agent_state=state
    )


def act(player: Drawer, *requests: TurnRequest) -> list[Action]:
    return [answer for answer in player.act(requests) if isinstance(answer, Action)]


def test_a_conversation_draws_the_same_however_it_is_interleaved() -> None:
    together, apart = Drawer(Env(), 3), Drawer(Env(), 3)
    a, b = act(together, request_of("a"), request_of("b"))
    [a_again], [b_again] = act(apart, request_of("x")), act(apart, request_of("y"))
    assert (a.text, b.text) == (a_again.text, b_again.text)
    assert a.text != b.text
    [b2] = act(together, request_of("b", state=b.agent_state))
    [a2] = act(apart, request_of("x", state=a_again.agent_state))
    assert (b2.text, a2.text) == (
        act(apart, request_of("y", state=b_again.agent_state))[0].text,
        act(together, request_of("a", state=a.agent_state))[0].text,
    )
    assert act(Drawer(Env(), 4), request_of("a"))[0].text != a.text


def test_the_next_episode_of_a_conversation_has_new_notes_and_the_same_stream() -> None:
    player = Drawer(Env(), 0)
    [first] = act(player, request_of("a"))
    [second] = act(player, request_of("a", state=first.agent_state))
    [again] = act(player, request_of("a", "again", second.agent_state))
    stream = random.Random(derive_seed("Drawer", 0, 0))
    drawn = [stream.random() for _ in range(3)]
    assert [one.text for one in (first, second, again)] == [f"{t} {x}" for t, x in zip((0, 1, 0), drawn, strict=True)]


def test_a_move_that_cannot_be_chosen_fails_its_session_alone() -> None:
    failed, played = Drawer(Env()).act([request_of("a", "fail"), request_of("b")])
    assert isinstance(failed, AgentError)
    assert isinstance(played, Action)
