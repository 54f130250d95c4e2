from __future__ import annotations

import json
import math
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import multiprocessing
from vllm_engines import MEETINGS, NUM_RANKS, UNEVEN, Engine, ScriptedGeneration, meet, scripted, session, started

from agentsgym.errors import ConfigError
from agentsgym.rollouts.driver import drive
from agentsgym.types import Action, TurnRequest

END = 2


def request(prompt: list[int], room: int | None = None) -> TurnRequest:
    return TurnRequest(session_id="", messages=[], token_ids=prompt, max_new_tokens=room, agent_state="kept")


def answers(agent: Any, requests: list[TurnRequest]) -> list[Action]:
    given_back = agent.act(requests)
    assert all(isinstance(action, Action) for action in given_back)
    return given_back


@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(4, 14), max_size=6), st.none() | st.integers(1, 8)), min_size=1, max_size=5
    ),
    mode=st.sampled_from(["colocate", "server"]),
)
def test_each_row_gets_its_own_answer_up_to_its_own_budget(rows: list[Any], mode: str) -> None:
    said = {index: [*words, END] for index, (words, _) in enumerate(rows)}
    generation = ScriptedGeneration(Engine(lambda prompt: said[prompt[0]], logprob=-0.25), mode)
    requests = [request([index], room) for index, (_, room) in enumerate(rows)]

    actions = answers(generation.agent(max_turn_tokens=3), requests)

    rooms = [3 if room is None else room for _, room in rows]
    for action, (words, _), room in zip(actions, rows, rooms, strict=True):
        whole = [*words, END]
        assert action.token_ids == whole[:room]
        assert action.logprobs == [-0.25] * len(whole[:room])
        assert action.finish_reason == ("stop" if len(whole) <= room else "length")
        assert action.text == generation.tokenizer.decode(words[:room])
        assert action.agent_state == "kept"
    assert [asked["max_tokens"] for asked in generation.engine.asked] == [max(rooms)]


def test_a_turn_ends_at_what_ends_a_turn_anywhere() -> None:
    generation = ScriptedGeneration(
        Engine(), generation_kwargs={"stop": "here", "stop_token_ids": [7], "ignore_eos": True}
    )
    agent = generation.agent(stop=["stop"])
    assert agent.stop_token_ids == {END, 7}

    agent.act([request([5])])

    asked = generation.engine.asked[0]
    assert (asked["stop"], asked["stop_token_ids"], asked["ignore_eos"]) == (["stop", "here"], [END, 7], True)
    assert asked["n"] == 1


def test_a_stop_string_ends_the_text_and_stays_in_the_tokens() -> None:
    generation = ScriptedGeneration(Engine(lambda _: ids))
    ids = generation.tokenizer("one two stop three").input_ids  # the engine stops behind a whole token

    action = answers(generation.agent(stop=["four", " st"]), [request([5])])[0]

    assert (action.text, action.token_ids, action.finish_reason) == ("one two", ids, "stop")


def test_what_vllm_cannot_score_is_no_number() -> None:
    action = answers(ScriptedGeneration(Engine(logprob=math.nan)).agent(), [request([5])])[0]
    assert action.logprobs is not None
    assert [math.isnan(logprob) for logprob in action.logprobs] == [True] * len(scripted([5]))


def test_without_logprobs_the_actions_have_none() -> None:
    engine = Engine()
    generation = ScriptedGeneration(engine, "server")
    engine.generate = lambda prompts, **_: {"prompt_ids": prompts, "completion_ids": [[4, END]], "logprobs": None}
    action = answers(generation.agent(), [request([5])])[0]
    assert (action.token_ids, action.logprobs) == ([4, END], None)


@pytest.mark.parametrize("option", [{"n": 2}, {"max_tokens": 4}, {"logprobs": 1}, {"seed": 0}, {"temperature": 2.0}])
def test_options_that_would_go_silently_wrong_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"generation_kwargs\\['{next(iter(option))}'\\]"):
        ScriptedGeneration(Engine(), generation_kwargs=option).agent()


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_an_environment_without_tokenizer_is_refused(mode: str) -> None:
    agent = ScriptedGeneration(Engine(), mode).agent()
    with pytest.raises(ConfigError, match="needs an environment with a tokenizer"):
        drive([session_without_tokens()], agent)


def session_without_tokens() -> Any:
    yield TurnRequest(session_id="", messages=[{"role": "user", "content": "hello"}], token_ids=[])


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_the_engine_gets_all_weights_once_an_optimizer_step(mode: str) -> None:
    generation = ScriptedGeneration(Engine(), mode)
    agent, events = generation.agent(), generation.engine.events
    names = {name for name, _ in generation.model.named_parameters()}

    for step, is_new in [(0, True), (0, False), (1, True), (1, False), (4, True), (0, True)]:
        events.clear()
        agent.prepare(started(step))
        loaded = [name for event in events if event[0] == "load" for name in event[1:]]
        assert (set(loaded), len(loaded)) == ((names, len(names)) if is_new else (set(), 0))
        assert ("reset" in events) == is_new  # what the old weights left in the prefix cache
    drive([session(5, 3)], agent)
    agent.weights_changed()
    events.clear()
    agent.prepare(started(0))
    assert events[-1] == "reset"


def test_weights_that_could_not_be_handed_over_are_tried_again() -> None:
    generation = ScriptedGeneration(Engine())
    agent = generation.agent()
    agent.prepare(started(0))
    generation.sync_weights, sync = lambda: 1 / 0, generation.sync_weights
    with pytest.raises(ZeroDivisionError):
        agent.prepare(started(1))
    generation.sync_weights = sync
    generation.engine.events.clear()
    agent.prepare(started(0))
    assert "reset" in generation.engine.events


def test_an_engine_that_sleeps_is_awake_for_a_whole_rollout() -> None:
    generation = ScriptedGeneration(Engine(), enable_sleep_mode=True)
    agent, events = generation.agent(), generation.engine.events
    for _ in range(2):  # without an optimizer step between them: sleeping has dropped the weights
        events.clear()
        agent.prepare(started(0))
        drive([session(5, 3), session(6, 1)], agent)
        assert [event for event in events if event[0] != "load"] == [
            ("wake", "weights"),
            "reset",
            ("wake", "kv_cache"),
            *["generate"] * 3,
            ("sleep", 2),
        ]
        assert events[1][0] == "load"
        assert generation.enable_sleep_mode


def test_a_colocated_engine_fails_only_the_session_it_cannot_read() -> None:
    generation = ScriptedGeneration(Engine())
    generation.engine.cannot_read = 17
    played = drive([session(first, 2) for first in (15, 16, 17, 18)], generation.agent())
    assert [bool(result["fault"]) for result in played] == [False, False, True, False]
    assert all(result["said"] == result["wanted"] for result in played)


def test_a_colocated_engine_that_broke_is_not_called_again() -> None:
    generation = ScriptedGeneration(Engine())
    generation.engine.fails_at = {1}
    generation.llm.llm_engine = SimpleNamespace(has_unfinished_requests=lambda: True)
    played = drive([session(first, 3) for first in range(5, 13)], generation.agent())
    assert all(result["fault"] for result in played)
    assert len(generation.engine.calls) == 2


def test_a_server_that_is_gone_is_not_asked_again_for_every_half_of_the_batch() -> None:
    generation = ScriptedGeneration(Engine(), "server")
    generation.engine.fails_at = {1}
    played = drive([session(first, 3) for first in range(5, 13)], generation.agent())
    assert len(generation.engine.calls) == 2
    assert all("ConnectionError: the engine is gone" in result["fault"] for result in played)
    assert all(result["said"] == result["wanted"] and len(result["said"]) == 1 for result in played)


def test_an_agent_hears_of_errors_though_an_earlier_one_used_the_same_server() -> None:
    generation = ScriptedGeneration(Engine(), "server")
    generation.engine.fails_at = {1}
    assert drive([session(5, 1)], generation.agent())[0]["fault"] is None
    assert "ConnectionError" in drive([session(5, 1)], generation.agent())[0]["fault"]


@pytest.mark.parametrize("seen", [[[5]], [[6], [5]], [[5], [6, 7]]])
def test_an_engine_that_answers_other_prompts_is_found_out(seen: list[list[int]]) -> None:
    engine = Engine()
    generation = ScriptedGeneration(engine, "server")
    engine.generate = lambda **_: {"prompt_ids": seen, "completion_ids": [[END]] * len(seen), "logprobs": None}
    faults = generation.agent().act([request([5]), request([6])])
    assert all("must answer the 2 prompts it is given, in order" in str(fault) for fault in faults)


def test_a_server_whose_answer_makes_no_sense_fails_the_turn_once() -> None:
    engine, calls = Engine(), []
    generation = ScriptedGeneration(engine, "server")

    def generate(prompts: list[list[int]], **options: Any) -> dict[str, Any]:
        calls.append(prompts)
        return {"prompt_ids": prompts, "completion_ids": [[4, END]] * 2, "logprobs": [[[-1.0]]] * 2}

    engine.generate = generate
    played = drive([session(5, 2), session(6, 2)], generation.agent())
    assert all("one log-probability an id" in result["fault"] for result in played)
    assert len(calls) == 1


@pytest.fixture(scope="module")
def meetings(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes wrote down, one table a rank; a hang ends after two minutes."""
    folder = tmp_path_factory.mktemp("meetings")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes: Any = multiprocessing.start_processes(
        meet, args=(str(folder), port), nprocs=NUM_RANKS, join=False, start_method="spawn"
    )
    deadline = time.monotonic() + 120
    while not processes.join(timeout=5):
        if time.monotonic() > deadline:
            for process in processes.processes:
                process.kill()
            pytest.fail("the ranks lost step: they wait for each other")
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("mode", ["server", "tensor_parallel"])
@pytest.mark.parametrize("name", MEETINGS)
def test_every_session_of_every_rank_gets_the_answer_to_its_own_prompt(meetings: Any, mode: str, name: str) -> None:
    for rank, table in enumerate(meetings):
        for played in table[f"{mode}/{name}"]["played"]:
            assert len(played) == len(MEETINGS[name]["turns"][rank])
            assert all(result["said"] == result["wanted"] for result in played)


@pytest.mark.parametrize("mode", ["server", "tensor_parallel"])
@pytest.mark.parametrize("name", ["uneven", "first_has_none", "second_has_none", "own_budgets"])
def test_ranks_make_as_many_calls_as_the_longest_session_has_turns(meetings: Any, mode: str, name: str) -> None:
    turns = MEETINGS[name]["turns"]
    live = [max(sum(n > turn for n in rank) for rank in turns) for turn in range(max(map(max, filter(None, turns))))]
    rows = [NUM_RANKS * count for count in live] * 2  # played twice
    for rank, table in enumerate(meetings):
        result = table[f"{mode}/{name}"]
        asks = rank == 0 or mode == "tensor_parallel"  # the server is asked by the main rank alone
        assert result["rows"] == (rows if asks else [])
        faults = [played["fault"] for rollout in result["played"] for played in rollout]
        assert faults == [None] * (2 * len(turns[rank]))


def test_the_largest_budget_of_all_ranks_is_asked_for(meetings: Any) -> None:
    rooms = meetings[0]["server/own_budgets"]["rooms"]
    assert set(rooms) == {9}
    assert {len(said) for played in meetings[0]["server/own_budgets"]["played"][0] for said in played["said"]} == {1}


@pytest.mark.parametrize("mode", ["server", "tensor_parallel"])
def test_a_failing_engine_fails_the_turn_on_all_ranks_and_the_next_rollout_goes_well(meetings: Any, mode: str) -> None:
    for rank, table in enumerate(meetings):
        first, second = table[f"{mode}/engine_fails"]["played"]
        for result, num_turns in zip(first, UNEVEN[rank], strict=True):
            assert len(result["said"]) == 1
            assert ("ConnectionError: the engine is gone" in (result["fault"] or "")) == (num_turns > 1)
        assert [result["fault"] for result in second] == [None] * len(UNEVEN[rank])


@pytest.mark.parametrize("mode", ["server", "tensor_parallel"])
@pytest.mark.parametrize("name", ["first_rank_breaks", "second_rank_breaks", "second_rank_breaks_alone"])
def test_what_breaks_one_rank_is_told_to_all(meetings: Any, mode: str, name: str) -> None:
    for table in meetings:
        result = table[f"{mode}/{name}"]
        assert "MemoryError: no room for the weights" in result["refused"]
        faults = [played["fault"] for rollout in result["played"] for played in rollout]
        assert all("MemoryError: no room for the answers" in fault for fault in faults)
