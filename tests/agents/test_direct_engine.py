"""DirectOutputAgent over what has the methods of a ``vllm.LLM``; over a real one it is tested in tests/with_vllm."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from guess_game import GuessEnv, tasks
from http_server import ToyModel

from agentsgym import Action, AgentError, ConfigError, DirectOutputAgent, TurnRequest
from agentsgym.testing import chat_tokenizer

TOKENIZER: Any = chat_tokenizer("llama3")
END: int = TOKENIZER.convert_tokens_to_ids("<|eot_id|>")
MODEL = ToyModel([*range(40, 60)], END)


class Params:
    """Keyword arguments that are checked, and private fields that are none, as in vLLM's ``SamplingParams``."""

    __struct_fields__: ClassVar = ("temperature", "top_k", "seed", "stop_token_ids", "max_tokens", "logprobs", "_all")

    def __init__(self, **fields: Any) -> None:
        if unknown := fields.keys() - {name for name in self.__struct_fields__ if name[0] != "_"}:
            raise TypeError(f"Unexpected keyword argument {min(unknown)!r}")
        defaults = {"temperature": 1.0, "top_k": 0, "seed": None, "stop_token_ids": [], "max_tokens": 16}
        self.__dict__ |= {"logprobs": None, "_all": None, **defaults, **fields}


@dataclass
class Logprob:
    logprob: float


class ToyLLM:
    """Its answers follow from the ids it is given; its requests are kept."""

    def __init__(self, finish_reason: str | None = None) -> None:
        self.finish_reason = finish_reason
        self.requested: list[tuple[list[int], Params]] = []

    def get_tokenizer(self) -> Any:
        return TOKENIZER

    def get_default_sampling_params(self) -> Params:
        return Params(temperature=0.6, top_k=20)  # those of the generation config

    def generate(self, prompts: Sequence[Any], sampling_params: Sequence[Params], *, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        requested = [
            (prompt["prompt_token_ids"], params) for prompt, params in zip(prompts, sampling_params, strict=True)
        ]
        self.requested += requested
        return [self.output(prompt, params) for prompt, params in requested]

    def output(self, prompt: list[int], params: Any) -> Any:
        ids, logprobs = MODEL.sample(prompt, params.max_tokens, set(params.stop_token_ids))
        stopped = ids[-1] in params.stop_token_ids
        answer = SimpleNamespace(
            text=TOKENIZER.decode(ids[:-1] if stopped else ids, skip_special_tokens=True),
            token_ids=ids,
            logprobs=[{token: Logprob(logprob), 1: Logprob(0.0)} for token, logprob in zip(ids, logprobs, strict=True)],
            finish_reason=self.finish_reason or ("stop" if stopped else "length"),
        )
        return SimpleNamespace(outputs=[answer])


def request(ids: list[int], **fields: Any) -> TurnRequest:
    return TurnRequest(session_id="a", messages=[{"role": "user", "content": "hi"}], token_ids=ids, **fields)


def test_a_rollout_is_exact_ids_and_logprobs_alike() -> None:
    llm = ToyLLM()
    agent = DirectOutputAgent(llm, max_new_tokens=6)
    env = GuessEnv(TOKENIZER, {"max_steps_per_episode": 3, "error_allowance": 3})
    trajectories = env.rollout(tasks(3, 7), agent, num_rollouts=2)
    recorded: list[list[int]] = []
    endings: set[bool] = set()
    for trajectory in trajectories:
        assert trajectory.exact
        assert trajectory.logprobs is not None
        ids = list(trajectory.token_ids)
        for turn in trajectory.turns:
            recorded.append(ids[: turn.start])
            endings.add(ids[turn.stop - 1] == END)
            output = (ids[turn.start : turn.stop], list(trajectory.logprobs[turn.start : turn.stop]))
            assert output == MODEL.sample(ids[: turn.start], 6, {END})
    assert sorted(prompt for prompt, _ in llm.requested) == sorted(recorded)
    assert endings == {True, False}


def test_each_request_has_its_budget_and_the_options_go_over_the_generation_config() -> None:
    llm = ToyLLM()
    agent = DirectOutputAgent(llm, max_new_tokens=9, top_k=5, seed=1)
    agent.act([request([5], max_new_tokens=budget) for budget in (2, 50, None)])
    requested: list[Any] = [params for _, params in llm.requested]
    assert [params.max_tokens for params in requested] == [2, 9, 9]
    fields = [
        (params.temperature, params.top_k, params.seed, params.stop_token_ids, params.logprobs) for params in requested
    ]
    assert fields == [(0.6, 5, 1, [END], 0)] * 3


def test_the_template_is_rendered_where_no_exact_prompt_is_known() -> None:
    llm = ToyLLM()
    agent = DirectOutputAgent(llm, max_new_tokens=4)
    rendered = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    exact, from_text = agent.act([request(rendered), request([], agent_state="kept")])
    assert isinstance(exact, Action)
    assert from_text == Action(text=exact.text, agent_state="kept", finish_reason=exact.finish_reason)
    assert agent.get_action([{"role": "user", "content": "hi"}], "kept") == (exact.text, "kept")


def test_an_answer_that_was_broken_off_is_a_fault() -> None:
    agent = DirectOutputAgent(ToyLLM(finish_reason="abort"))
    (fault,) = agent.act([request([5])])
    assert isinstance(fault, AgentError)
    assert "the vLLM engine ended the answer with an unexpected finish reason: 'abort'" in str(fault)
    with pytest.raises(AgentError, match="an unexpected finish reason"):
        agent.get_action([{"role": "user", "content": "hi"}], None)


def test_another_tokenizer_and_other_stops_may_be_given() -> None:
    other: Any = chat_tokenizer("chatml")
    llm = ToyLLM()
    DirectOutputAgent(llm, other).act([request([5])])
    DirectOutputAgent(llm, stop_token_ids=[41, 40]).act([request([5])])
    stops: list[Any] = [params for _, params in llm.requested]
    assert [params.stop_token_ids for params in stops] == [[other.eos_token_id], [40, 41]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1}, "vLLM's SamplingParams rejects {'temprature': 1}: Unexpected keyword"),
        ({"logprobs": 3, "n": 2}, "rejects|needs exactly one answer per prompt"),
        ({"logprobs": 3}, r"does not accept the generation options \['logprobs'\]"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an int of at least 1, got 0"),
        ({"max_new_tokens": None}, "max_new_tokens must be an int of at least 1, got None"),
    ],
)
def test_what_cannot_work_is_refused_at_once(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DirectOutputAgent(ToyLLM(), **options)


class FailingLLM(ToyLLM):
    """Runs out of memory in its first call, and may still hold requests then."""

    def __init__(self, **has_requests: Any) -> None:
        super().__init__()
        self.llm_engine = SimpleNamespace(**has_requests)
        self.num_calls = 0

    def generate(self, *args: Any, **kwargs: Any) -> list[Any]:
        self.num_calls += 1
        if self.num_calls == 1:
            raise RuntimeError("out of memory")
        return super().generate(*args, **kwargs)


def test_an_engine_that_broke_at_its_work_is_not_called_again() -> None:
    llm = FailingLLM(has_unfinished_requests=lambda: True)
    agent = DirectOutputAgent(llm)
    with pytest.raises(RuntimeError, match="out of memory"):
        agent.act([request([5])])
    with pytest.raises(AgentError, match="failed in an earlier call and is not called again: RuntimeError: out of mem"):
        agent.act([request([5])])
    assert llm.num_calls == 1


@pytest.mark.parametrize("has_requests", [{"has_unfinished_requests": lambda: False}, {}])
def test_an_engine_that_refused_a_request_is_called_again(has_requests: dict[str, Any]) -> None:
    agent = DirectOutputAgent(FailingLLM(**has_requests))
    with pytest.raises(RuntimeError, match="out of memory"):
        agent.act([request([5])])
    (answer,) = agent.act([request([5])])
    assert isinstance(answer, Action)
