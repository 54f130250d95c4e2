"""check_env compares a game of text answers with what the chat template prints."""

from typing import Any

import faulty_envs as envs
import pytest
from chat_families import family
from packaged import add
from test_text_answers import TOKENIZERS
from tool_chat import tool_family
from tool_functions import Calls, call

from agentsgym.envs.check.report import EnvReport
from agentsgym.envs.check.run import check_env
from agentsgym.envs.Tools import ToolEnv
from agentsgym.tiny import tiny_policy
from agentsgym.tokens.chat_format import ChatFormat

FINE = ("chatml", "inst", "none", "gptoss", "qwen3")
TASKS = [{"seed": seed} for seed in range(4)]


def found(tokenizer: Any, **options: Any) -> list[str]:
    report = check_env(envs.Sound, TASKS, tokenizer=tokenizer, raise_on=None, **options)
    return output(report)


def output(report: EnvReport) -> list[str]:
    assert report.num_episodes
    assert not report.errors
    return [finding.text for finding in report.findings if finding.check == "chat-template"]


@pytest.mark.parametrize("tokenizer", [*TOKENIZERS.values(), *map(family, FINE)])
def test_text_answers_that_are_recorded_as_the_template_prints_them_are_fine(tokenizer: Any) -> None:
    assert found(tokenizer) == []


def test_the_embedded_policy_has_a_template_of_its_own_that_is_fine() -> None:
    assert found(tiny_policy(envs.Sound(), tasks=TASKS)[1]) == []


def test_an_answer_that_is_recorded_inside_a_thought_is_found() -> None:
    [text] = found(family("deepseek_r1_distill"))
    assert "are recorded with '<think>\\n" in text
    assert "Action.reasoning" in text
    assert found(family("deepseek_r1_distill"), env_config={"history": "rerender"}) == []


def test_an_end_of_turn_that_is_recorded_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    end = ChatFormat.of(family("chatml")).end_of_turn_id
    written = ChatFormat.answer

    def answer(self: ChatFormat, message: Any) -> Any:
        ids, closed = written(self, message)
        return ids, [*closed, end]

    monkeypatch.setattr(ChatFormat, "answer", answer)
    [text] = found(family("chatml"))
    assert "are recorded with '<|im_end|>" in text


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "lfm2_v2"])
def test_calls_and_results_are_compared_too(name: str) -> None:
    env = ToolEnv(tool_family(name), tools=[add])
    tasks = [{"question": f"What is 3 + 4, {seed}?", "answer": 7, "seed": seed} for seed in range(4)]
    assert output(check_env(env, tasks, Calls([call("add", a=3, b=4)], "7"), raise_on=None)) == []
