from __future__ import annotations

import json
import math
import socket
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bare_trials import drive
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import multiprocessing
from vllm_engines import MEETINGS, NUM_RANKS, UNEVEN, Engine, ScriptedGeneration, meet, scripted, session, started

from agentsgym import Action, AgentError, AgentsGymError, ConfigError, TurnRequest
from agentsgym.agents.build import build_policy
from agentsgym.agents.vllm import policy as vllm_policy
from agentsgym.agents.vllm.lockstep import LockstepVLLMPolicyAgent
from agentsgym.agents.vllm.policy import VLLMPolicyAgent
from agentsgym.event_loop import run_coroutine

END = 2
OF_SERVERS: dict[str, Any] = {"vllm_server_urls": (), "max_staleness": 0}


def request(prompt: list[int], room: int | None = None) -> TurnRequest:
    return TurnRequest(session_id="", messages=[], token_ids=prompt, max_new_tokens=room, agent_state="kept")


def answers(agent: Any, requests: list[TurnRequest]) -> list[Action]:
    given_back = agent.act(requests)
    assert all(isinstance(action, Action) for action in given_back)
    return given_back


@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(4, 14), max_size=6), st.none() | st.integers(1, 8)), min_size=1, max_size=5
    )
)
@settings(max_examples=30)
def test_each_row_gets_its_own_answer_up_to_its_own_budget(rows: list[Any]) -> None:
    output = {index: [*words, END] for index, (words, _) in enumerate(rows)}
    generation = ScriptedGeneration(Engine(lambda prompt: output[prompt[0]], logprob=-0.25))
    requests = [request([index], room) for index, (_, room) in enumerate(rows)]
    agent = generation.agent(max_turn_tokens=3)

    actions = answers(agent, requests)
    agent.finish()

    rooms = [3 if room is None else room for _, room in rows]
    for action, (words, _), room in zip(actions, rows, rooms, strict=True):
        whole = [*words, END]
        assert action.token_ids == whole[:room]
        assert action.logprobs == [-0.25] * len(whole[:room])
        assert action.finish_reason == ("stop" if len(whole) <= room else "length")
        assert action.text == generation.tokenizer.decode(words[:room])
        assert action.agent_state == "kept"
    assert sorted(requested["max_tokens"] for requested in generation.engine.requested) == sorted(rooms)


def test_requests_join_between_two_steps_and_no_answer_waits_for_a_longer_one() -> None:
    lengths = {5: 2, 6: 40, 7: 2}
    engine = Engine(lambda prompt: [*[9] * (lengths[prompt[0]] - 1), END])
    engine.hangs_for = 0.002
    agent = ScriptedGeneration(engine).agent(max_turn_tokens=50)

    def conversation(first: int, num_turns: int) -> Any:
        for _ in range(num_turns):
            yield TurnRequest(session_id=str(first), messages=[], token_ids=[first])

    drive([conversation(5, 4), conversation(6, 1), conversation(7, 4)], agent)

    assert engine.answered[-1] == [6]  # every turn of the others was over before
    assert engine.num_steps <= 42  # the long answer's own steps: the others' ran beside it
    assert max(engine.widths) == 3


def test_an_answer_reports_which_weights_sampled_it() -> None:
    generation = ScriptedGeneration(Engine())
    agent = generation.agent()
    agent.prepare(started(7))
    sampled = run_coroutine(agent._engine.sample("a", [5], 9))
    agent.finish()
    assert (sampled.step, sampled.token_ids, sampled.logprobs) == (7, scripted([5]), [-0.5] * len(scripted([5])))


def test_the_context_bounds_an_answer_and_a_prompt_that_fills_it_fails_alone() -> None:
    engine = Engine(lambda _: [9] * 50, context=20)
    agent = ScriptedGeneration(engine).agent(max_turn_tokens=12)
    cut, whole, none_left = agent.act([request([5] * 15), request([5]), request([5] * 20)])
    agent.finish()
    assert (len(cut.token_ids), len(whole.token_ids)) == (5, 12)
    assert isinstance(none_left, AgentError)
    assert str(none_left) == (
        "a prompt of 20 tokens leaves no room for an answer within the maximum context length of the vLLM engine "
        "(20 tokens): raise vllm_max_model_length, or set env_config['max_trajectory_tokens'] to at most 20, so that "
        "episodes end earlier"
    )


def test_a_rollout_that_is_interrupted_takes_its_requests_out_of_the_engine() -> None:
    engine = Engine(lambda _: [9] * 10_000)
    engine.hangs_for = 0.002
    agent = ScriptedGeneration(engine).agent(max_turn_tokens=10_000)

    def interrupt() -> None:
        if len(engine.running) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drive([session(5, 1), session(6, 1)], agent, interrupt=interrupt)
    assert len(engine.aborted) == 2
    assert not engine.running
    assert drive([session(5, 1)], ScriptedGeneration(Engine()).agent())[0]["fault"] is None


def test_a_step_that_hangs_gives_the_engine_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_policy, "STEP_LIMIT_S", 0.1)
    engine = Engine()
    engine.hangs_for = 1.0
    agent = ScriptedGeneration(engine).agent()
    played = drive([OneTurn(5)], agent, turn_timeout_s=0.2)
    assert "the agent took longer than turn_timeout_s = 0.2" in played[0]
    assert "did not end within 0.1 s" in str(agent.act([request([5])])[0])
    with pytest.raises(AgentsGymError, match=r"is not called again: one of its steps did not end.*checkpoint"):
        agent.prepare(started(0))


class OneTurn:
    """A session of one turn as a trial, which time limits need."""

    env, may_wait = None, False

    def __init__(self, first: int) -> None:
        self.first, self.session_id = first, "a"

    def play(self) -> Any:
        try:
            yield request([self.first])
        except AgentError as error:
            return str(error)
        return "answered"

    def abandon(self, error: Any) -> str:
        return str(error)


def test_a_turn_ends_at_what_ends_a_turn_anywhere() -> None:
    generation = ScriptedGeneration(
        Engine(), generation_kwargs={"stop": "here", "stop_token_ids": [7], "ignore_eos": True}
    )
    agent = generation.agent(stop=["stop"])
    assert agent.stop_token_ids == {END, 7}

    agent.act([request([5])])
    agent.finish()

    requested = generation.engine.requested[0]
    assert (requested["stop"], requested["stop_token_ids"], requested["ignore_eos"]) == (
        ["stop", "here"],
        [END, 7],
        True,
    )
    assert requested["n"] == 1


def test_a_stop_string_ends_the_text_and_stays_in_the_tokens() -> None:
    generation = ScriptedGeneration(Engine(lambda _: ids))
    ids = generation.tokenizer("one two stop three").input_ids  # the engine stops behind a whole token

    action = answers(generation.agent(stop=["four", " st"]), [request([5])])[0]

    assert (action.text, action.token_ids, action.finish_reason) == ("one two", ids, "stop")


def test_what_vllm_cannot_score_is_no_number() -> None:
    action = answers(ScriptedGeneration(Engine(logprob=math.nan)).agent(), [request([5])])[0]
    assert action.logprobs is not None
    assert [math.isnan(logprob) for logprob in action.logprobs] == [True] * len(scripted([5]))


@pytest.mark.parametrize("option", [{"n": 2}, {"max_tokens": 4}, {"logprobs": 1}, {"seed": 0}, {"temperature": 2.0}])
def test_options_that_would_go_silently_wrong_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"generation_kwargs\\['{next(iter(option))}'\\]"):
        ScriptedGeneration(Engine(), generation_kwargs=option).agent()


def test_an_environment_without_tokenizer_is_refused() -> None:
    agent = ScriptedGeneration(Engine()).agent()
    with pytest.raises(ConfigError, match="requires an environment with a tokenizer"):
        drive([session_without_tokens()], agent)


def session_without_tokens() -> Any:
    yield TurnRequest(session_id="", messages=[{"role": "user", "content": "hello"}], token_ids=[])


def test_the_engine_gets_all_weights_once_an_optimizer_step() -> None:
    generation = ScriptedGeneration(Engine())
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
            ("sleep", 2),
        ]
        assert events[1][0] == "load"
        assert generation.enable_sleep_mode


def test_a_colocated_engine_fails_only_the_session_it_cannot_read() -> None:
    generation = ScriptedGeneration(Engine())
    generation.engine.cannot_read = 17
    played = drive([session(first, 2) for first in (15, 16, 17, 18)], generation.agent())
    assert [bool(result["fault"]) for result in played] == [False, False, True, False]
    assert all(result["output"] == result["wanted"] for result in played)


def test_a_request_that_the_engine_refuses_fails_its_own_session() -> None:
    generation = ScriptedGeneration(Engine())
    generation.engine.fails_at = {1}
    played = drive([session(first, 2) for first in range(5, 9)], generation.agent())
    faults = [result["fault"] for result in played if result["fault"]]
    assert len(faults) == 1
    assert "ConnectionError: the engine is gone" in faults[0]


def test_a_colocated_engine_that_broke_is_not_called_again() -> None:
    generation = ScriptedGeneration(Engine())
    generation.engine.breaks_at = 3
    agent = generation.agent()
    played = drive([session(first, 30) for first in range(5, 13)], agent)
    assert all(" failed" in result["fault"] and "RuntimeError: out of memory" in result["fault"] for result in played)
    num_requested = len(generation.engine.requested)
    again = drive([session(5, 1)], agent)
    assert "failed in an earlier call and is not called again: RuntimeError: out of memory" in again[0]["fault"]
    assert len(generation.engine.requested) == num_requested
    with pytest.raises(AgentsGymError, match="the vLLM engine failed and is not called again"):
        agent.prepare(started(1))


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_an_engine_over_several_ranks_is_for_the_policy_in_lockstep(mode: str) -> None:
    generation = ScriptedGeneration(Engine())
    generation.mode, generation.tensor_parallel_size = mode, 2
    args: Any = SimpleNamespace(use_vllm=True, ds3_gather_for_generation=True, **OF_SERVERS)
    build = partial(build_policy, generation.model, generation.tokenizer, args, generation.accelerator, generation)
    generation.server_base_url = "http://here:8000"
    kind = VLLMPolicyAgent if mode == "server" else LockstepVLLMPolicyAgent
    assert type(build(max_turn_tokens=4)) is kind
    generation.mode = "colocate"
    with pytest.raises(ConfigError, match="use LockstepVLLMPolicyAgent"):
        VLLMPolicyAgent(generation, generation.tokenizer)


@pytest.mark.parametrize("missing", OF_SERVERS)
def test_a_setting_of_servers_that_is_not_there_is_an_error(missing: str) -> None:
    generation = ScriptedGeneration(Engine())
    generation.mode, generation.server_base_url = "server", "http://here:8000"
    given = {name: value for name, value in OF_SERVERS.items() if name != missing}
    args: Any = SimpleNamespace(use_vllm=True, ds3_gather_for_generation=True, **given)
    with pytest.raises(AttributeError, match=missing):
        build_policy(
            generation.model, generation.tokenizer, args, generation.accelerator, generation, max_turn_tokens=4
        )


def test_a_prompt_that_fills_the_context_fails_alone_in_lockstep_too() -> None:
    generation = ScriptedGeneration(Engine(context=20))
    agent = LockstepVLLMPolicyAgent(generation, generation.tokenizer)
    agent.prepare(started(0))
    first, none_left, last = agent.act([request([5]), request([5] * 20), request([6])])
    assert [list(one.token_ids) for one in (first, last)] == [scripted([5]), scripted([6])]
    assert "20 tokens leaves no room" in str(none_left)
    [alone] = agent.act([request([5] * 21)])
    assert isinstance(alone, AgentError)
    assert generation.engine.calls == [[[5], [6]]]


@pytest.mark.parametrize("seen", [[[5]], [[6], [5]], [[5], [6, 7]]])
def test_an_engine_in_lockstep_that_answers_other_prompts_is_found_out(seen: list[list[int]]) -> None:
    generation = ScriptedGeneration(Engine())
    agent = LockstepVLLMPolicyAgent(generation, generation.tokenizer)
    generation.generate = lambda **_: (seen, [[END]] * len(seen), None, None)
    faults = agent.act([request([5]), request([6])])
    assert all("one completion for each of the 2 prompts, in order" in str(fault) for fault in faults)


def test_an_engine_that_answers_another_prompt_is_found_out() -> None:
    generation = ScriptedGeneration(Engine())
    output = generation.engine._output
    generation.engine._output = lambda prompt, *rest: output([*prompt, 4], *rest)
    agent = generation.agent()
    assert "must answer the prompt that was sent" in str(agent.act([request([5])])[0])
    agent.finish()


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


@pytest.mark.parametrize("mode", ["tensor_parallel"])
@pytest.mark.parametrize("name", MEETINGS)
def test_every_session_of_every_rank_gets_the_answer_to_its_own_prompt(meetings: Any, mode: str, name: str) -> None:
    for rank, table in enumerate(meetings):
        for played in table[f"{mode}/{name}"]["played"]:
            assert len(played) == len(MEETINGS[name]["turns"][rank])
            assert all(result["output"] == result["wanted"] for result in played)


@pytest.mark.parametrize("mode", ["tensor_parallel"])
@pytest.mark.parametrize("name", ["uneven", "first_has_none", "second_has_none", "own_budgets"])
def test_ranks_make_as_many_calls_as_the_longest_session_has_turns(meetings: Any, mode: str, name: str) -> None:
    turns = MEETINGS[name]["turns"]
    live = [max(sum(n > turn for n in rank) for rank in turns) for turn in range(max(map(max, filter(None, turns))))]
    rows = [NUM_RANKS * count for count in live] * 2  # played twice
    for rank, table in enumerate(meetings):
        result = table[f"{mode}/{name}"]
        assert result["rows"] == rows, rank
        faults = [played["fault"] for rollout in result["played"] for played in rollout]
        assert faults == [None] * (2 * len(turns[rank]))


def test_the_largest_budget_of_all_ranks_is_used(meetings: Any) -> None:
    rooms = meetings[0]["tensor_parallel/own_budgets"]["rooms"]
    assert set(rooms) == {9}
    assert {
        len(output) for played in meetings[0]["tensor_parallel/own_budgets"]["played"][0] for output in played["output"]
    } == {1}


@pytest.mark.parametrize("mode", ["tensor_parallel"])
def test_a_failing_engine_fails_the_turn_on_all_ranks_and_the_next_rollout_goes_well(meetings: Any, mode: str) -> None:
    for rank, table in enumerate(meetings):
        first, second = table[f"{mode}/engine_fails"]["played"]
        for result, num_turns in zip(first, UNEVEN[rank], strict=True):
            assert len(result["output"]) == 1
            assert ("ConnectionError: the engine is gone" in (result["fault"] or "")) == (num_turns > 1)
        assert [result["fault"] for result in second] == [None] * len(UNEVEN[rank])


@pytest.mark.parametrize("mode", ["tensor_parallel"])
@pytest.mark.parametrize("name", ["first_rank_breaks", "second_rank_breaks", "second_rank_breaks_alone"])
def test_what_breaks_one_rank_is_reported_to_all(meetings: Any, mode: str, name: str) -> None:
    for table in meetings:
        result = table[f"{mode}/{name}"]
        assert "MemoryError: no room for the weights" in result["refused"]
        faults = [played["fault"] for rollout in result["played"] for played in rollout]
        assert all("MemoryError: no room for the answers" in fault for fault in faults)
