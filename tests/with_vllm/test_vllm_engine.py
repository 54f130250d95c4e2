"""DirectOutputAgent over a real vLLM engine in this process: token ids in and out, with log-probabilities."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from guess_game import GuessEnv, tasks
from on_cpu import ENGINE_OPTIONS
from transformers import AutoModelForCausalLM

from agentsgym.agents.direct import DirectOutputAgent
from agentsgym.errors import ConfigError
from agentsgym.testing import chat_tokenizer
from agentsgym.types import Action, Trajectory, TurnRequest

TOKENIZER: Any = chat_tokenizer("llama3")
END: int = TOKENIZER.convert_tokens_to_ids("<|eot_id|>")
STOPS = (END, TOKENIZER.pad_token_id)  # the template's and the model's
GAME = {"max_steps_per_episode": 4, "error_allowance": 4}
EXACT = 1e-4
Gap = Callable[[Sequence[Trajectory], float], float]


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[Any]:
    """The engine; its scheduler runs in a process of its own, as it does by default."""
    from vllm import LLM  # noqa: PLC0415  # some twenty seconds

    llm = LLM(str(model_dir), **ENGINE_OPTIONS)
    yield llm
    llm.llm_engine.engine_core.shutdown()


def request(ids: list[int], text: str = "hello", **fields: Any) -> TurnRequest:
    return TurnRequest(session_id="a", messages=[{"role": "user", "content": text}], token_ids=ids, **fields)


def actions_of(agent: DirectOutputAgent, *requests: TurnRequest) -> list[Action]:
    actions = agent.act(requests)
    assert all(isinstance(action, Action) for action in actions)
    return list(actions)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_rollout_over_the_engine_is_exact(llm: Any, largest_gap: Gap, temperature: float) -> None:
    agent = DirectOutputAgent(llm, max_new_tokens=24, temperature=temperature)
    trajectories = GuessEnv(TOKENIZER, GAME).rollout(tasks(3, 7, 8), agent, num_rollouts=8)
    endings: set[bool] = set()
    for trajectory in trajectories:
        assert trajectory.exact
        ids = list(trajectory.token_ids)
        endings |= {ids[turn.stop - 1] == END for turn in trajectory.turns}
        assert all(turn.stop - turn.start == 24 or ids[turn.stop - 1] in STOPS for turn in trajectory.turns)
        for turn, following in pairwise(trajectory.turns):
            between = ids[turn.stop : following.start]
            assert (ids[turn.stop - 1] in STOPS) != (END in between[:1])
    assert endings == {True, False}
    assert largest_gap(trajectories, temperature) < EXACT


def test_greedy_answers_are_those_of_transformers_each_within_its_budget(llm: Any, model_dir: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    prompts = [TOKENIZER.encode(text, add_special_tokens=False) for text in ("one", "two words", "and three", "more")]
    budgets = [4, 20, None, 1]
    agent = DirectOutputAgent(llm, max_new_tokens=12, temperature=0)
    actions = actions_of(
        agent, *[request(prompt, max_new_tokens=budget) for prompt, budget in zip(prompts, budgets, strict=True)]
    )
    for action, prompt, budget in zip(actions, prompts, [4, 12, 12, 1], strict=True):
        wanted = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=budget,
            eos_token_id=list(STOPS),
            pad_token_id=TOKENIZER.pad_token_id,
        )[0, len(prompt) :].tolist()
        assert action.token_ids == wanted
        assert action.finish_reason == ("stop" if wanted[-1] in STOPS else "length")
        output = wanted[:-1] if action.finish_reason == "stop" else wanted
        whole = TOKENIZER.decode(output, skip_special_tokens=True)
        assert action.text == whole.rstrip("\ufffd")  # vLLM holds back what may become a character


def test_messages_are_rendered_where_no_exact_prompt_is_known(llm: Any) -> None:
    agent = DirectOutputAgent(llm, max_new_tokens=6, temperature=0)
    messages = [{"role": "user", "content": "hello"}]
    rendered = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    exact, from_text = actions_of(agent, request(rendered), request([]))
    assert from_text == Action(text=exact.text, finish_reason=exact.finish_reason)
    assert agent.get_action([{"role": "user", "content": "hello"}], "kept") == (exact.text, "kept")


def test_a_prompt_that_is_too_long_fails_its_own_episode(llm: Any) -> None:
    class Talkative(GuessEnv):
        """Fills the context where the solution is 9."""

        def _format_prompt(self, state: Any, step: int) -> Any:
            return "guess " * (2000 if state["solution"] == 9 else 1)

    agent = DirectOutputAgent(llm, max_new_tokens=4)
    fine, failed, also_fine = Talkative(TOKENIZER, {"max_steps_per_episode": 1}).rollout(tasks(3, 9, 4), agent)
    assert [fine.failed, failed.failed, also_fine.failed] == [False, True, False]
    assert "maximum context length is 1024" in str(failed.error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1}, "vLLM's SamplingParams rejects {'temprature': 1}"),
        ({"temperature": -1.0}, "temperature must be non-negative"),
        ({"n": 2, "logprobs": 3}, r"does not accept the generation options \['logprobs', 'n'\]"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an int of at least 1, got 0"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_at_once(llm: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DirectOutputAgent(llm, **options)
