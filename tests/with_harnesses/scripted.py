"""An agent that answers the calls of a harness by a script, and the check that its tokens are recorded exactly."""

from __future__ import annotations

from typing import Any

from chat_families import TRL_TEMPLATES, tokenizer_for
from program_client import RecordingAgent

from agentsgym import Action, StopReason, TurnRequest
from agentsgym.envs.AgentProgram import AgentProgramEnv
from agentsgym.tiny import call_text

TOKENIZER = tokenizer_for(TRL_TEMPLATES["qwen2_5"])


class ScriptedModel(RecordingAgent):
    """Gives the answers of a script in order, each sampled letter by letter, which no tokenizer would do."""

    def _answer(self, request: TurnRequest) -> Action:
        text = self.texts[len(self.answers)]
        letters = [one for letter in text for one in self.tokenizer(letter, add_special_tokens=False)["input_ids"]]
        ids = [*letters, self.tokenizer.convert_tokens_to_ids("<|im_end|>")]
        logprobs = [-self.generator.random() for _ in ids]
        self.answers.append((request.session_id, [*request.token_ids], ids, logprobs))
        return Action(text=text, token_ids=ids, logprobs=logprobs)


def play(
    program: Any,
    task: dict[str, Any],
    *answers: str,
    is_cut: bool = False,
    env_class: type[AgentProgramEnv] = AgentProgramEnv,
) -> Any:
    """Play a program with scripted answers, and return its rollout; its turns must be exactly those answers.

    Args:
        program: The program, whose last call must receive the last answer.
        task: Its task.
        *answers: The answers in order.
        is_cut: Whether the program's stop texts end each answer early.
        env_class: The environment's class, which may prepare folders and grade outcomes.
    """
    agent = ScriptedModel(TOKENIZER, texts=answers)
    [one] = env_class(TOKENIZER, program=program).rollout([task], agent)
    assert not one.failed, one.error
    assert one.stop_reason is StopReason.DONE
    assert one.info["num_calls"] == len(answers)
    for turn, (_, prompt, ids, logprobs) in zip(one.turns, agent.answers, strict=True):
        assert one.token_ids[turn.prompt_start : turn.start] == prompt
        kept = one.token_ids[turn.start : turn.stop]
        assert kept == (ids[: len(kept)] if is_cut else ids)
        assert one.logprobs[turn.start : turn.stop] == logprobs[: len(kept)]
    return one


def calls(name: str, **arguments: Any) -> str:
    """Return an answer that calls a tool."""
    return call_text(name, arguments)
