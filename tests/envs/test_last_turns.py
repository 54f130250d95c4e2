"""The history "last": the first observation and the last turns, under every chat template."""

from typing import Any

import pytest
from chat_families import NAMES, family, full_render
from guess_game import Quiet
from hypothesis import given
from hypothesis import strategies as st
from test_tool_conversations import EXACT, THINKING
from tool_chat import GO, TOOLS, one_round, tool_family, tool_render

from agentsgym import Action, Agent, AgentsGymError, Message, MultistepEnv, ScriptedAgent, Trajectory
from agentsgym.envs.conversation import LastTurns
from agentsgym.tokens.transcript import ChatFormat, Transcript

NOT_APPENDED = {"time of each message", "numbered turns", "none"}  # refused as the environment is built


class Facts(Quiet):
    """States a fact per turn, and at the end of an episode that it is over."""

    opening = ("user",)

    def _format_prompt(self, state: dict[str, Any], step: int) -> str | list[Message]:
        return f"Fact {step}." if step else [{"role": role, "content": f"Task {role}."} for role in self.opening]

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        return state, 1.0, False, {}

    def _last_message(self, state: dict[str, Any]) -> str:
        return "Over."


class Listener(Agent):
    """Answers "Ok0", "Ok1", …, and keeps what it was shown."""

    def __init__(self) -> None:
        self.seen: list[list[Message]] = []

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        self.seen.append([*messages])
        return f"Ok{len(self.seen) - 1}", None


def play(env: MultistepEnv) -> tuple[Trajectory, list[list[Message]]]:
    [played] = env.rollout([{"seed": 0}], agent := Listener())
    assert played.error is None
    return played, agent.seen


def window(messages: Any, num_first: int, num_last: int) -> list[Message]:
    return [*messages[:num_first], *messages[num_first:][-num_last:]]


@pytest.mark.parametrize("name", sorted({*NAMES} - NOT_APPENDED))
def test_every_family_shows_the_first_observation_and_the_last_nine_turns(name: str) -> None:
    played, seen = play(Facts(family(name), {"history": "last", "max_steps_per_episode": 14}))
    appended, _ = play(Facts(family(name), {"max_steps_per_episode": 14}))
    assert (played.turns[:10], len(played.segments)) == (appended.turns[:10], 5)  # ten prompts that drop nothing
    assert played.token_ids[: played.turns[9].stop] == appended.token_ids[: played.turns[9].stop]
    for k, turn in enumerate(played.turns):
        assert seen[k] == window(played.messages[: turn.message_index], 1, 18)
        assert [message["role"] for message in seen[k]] == ["user", *["assistant", "user"] * min(k, 9)]
        if k > 9:
            assert turn.prompt_messages == seen[k]
            assert [*played.token_ids[turn.prompt_start : turn.start]] == full_render(name, seen[k])


@pytest.mark.parametrize("name", EXACT)
def test_results_stay_with_the_answer_that_has_their_calls(name: str) -> None:
    output = {"reasoning": "I"} if name in THINKING else {}
    transcript = Transcript(ChatFormat.of(tool_family(name), tools=TOOLS), LastTurns(2))
    transcript.observe([GO])
    for k in range(5):
        one_round(transcript, [f"w{k}"], [f"found {k}"], **output)
        shown = window(transcript.messages, 1, 4)
        assert transcript.prompt_messages == shown
        assert transcript.token_ids == tool_render(name, transcript.chat_format.for_template(shown))
        assert (transcript.segment_start == 0) is (k < 2)


@given(num_turns=st.integers(1, 4), played=st.integers(1, 8), system=st.sampled_from(["", "Listen."]))
def test_a_first_observation_of_several_messages_is_kept_whole(num_turns: int, played: int, system: str) -> None:
    own = {"history_turns": num_turns, "max_steps_per_episode": played, "system_prompt": system}
    env = Facts(None, {"history": "last", **own})
    env.opening = ("user", "assistant", "tool", "user")  # an example, then the task
    record, seen = play(env)
    whole = [record.messages[: turn.message_index] for turn in record.turns]
    assert seen == [window(messages, 4 + bool(system), 2 * num_turns) for messages in whole]


def test_prompts_over_several_episodes_begin_with_the_task_of_their_oldest_turn() -> None:
    trial = {"episodes_per_trial": 2, "keep_history": True, "system_prompt": "Listen.", "max_steps_per_episode": 3}
    _, seen = play(Facts(family("chatml"), {**trial, "history": "last", "history_turns": 2}))
    assert [" | ".join(message["content"] for message in prompt) for prompt in seen] == [
        "Listen. | Task user.",
        "Listen. | Task user. | Ok0 | Fact 1.",
        "Listen. | Task user. | Ok0 | Fact 1. | Ok1 | Fact 2.",
        "Listen. | Task user. | Ok1 | Fact 2. | Ok2 | Over.\n\nTask user.",
        "Listen. | Task user. | Ok2 | Over.\n\nTask user. | Ok3 | Fact 1.",
        "Listen. | Task user. | Ok3 | Fact 1. | Ok4 | Fact 2.",
    ]
    (shown, _), (appended, _) = (play(Facts(family("llama3"), {**trial, "history": one})) for one in ("last", "append"))
    assert (shown.token_ids, shown.turns) == (appended.token_ids, appended.turns)  # nothing was dropped


@pytest.mark.parametrize(
    ("kind", "config", "complaint"),
    [
        ("chatml", {"history_turns": 0}, r"\['history_turns'\] must be a positive int or None, got 0"),
        ("chatml", {"history": "append"}, "'history_turns'. = 9 has no effect without env_config"),
        ("none", {}, "'last' needs a chat template .* but the tokenizer has none: set tokenizer.chat_template"),
    ],
)
def test_what_cannot_work_is_refused_before_any_turn(kind: str, config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(AgentsGymError, match=complaint):
        Facts(family(kind), {"history": "last", "history_turns": 9, **config})


@pytest.mark.parametrize("history", ["append", "rerender", "last"])
def test_a_fork_has_each_thought_once(history: str) -> None:
    tokenizer = family("qwen3_8")
    env = Facts(tokenizer, {"history": history, "max_steps_per_episode": 3})
    ids = tokenizer.encode("abc\n</think>\n\n7<|im_end|>", add_special_tokens=False)
    action = Action(text="abc\n</think>\n\n7", token_ids=ids, finish_reason="stop")
    [rollout] = env.rollout([{"seed": 0}], ScriptedAgent([action] * 3))
    [forked] = env.fork(rollout, 2, ScriptedAgent([action]))
    assert [one.get("reasoning_content") for one in forked.messages if one["role"] == "assistant"] == ["abc"] * 3


def test_text_that_is_cut_inside_its_thought_is_a_thought_and_is_closed() -> None:
    tokenizer = family("qwen3_5_think")
    answers = [Action(text="seven", reasoning="let me think long about this thing")] * 2
    env = Facts(tokenizer, {"max_steps_per_episode": 2})
    [rollout] = env.rollout([{"seed": 0}], ScriptedAgent(answers), max_turn_tokens=14)
    cut = [one for one in rollout.messages if one["role"] == "assistant"]
    assert [(one["content"], "let me" in one.get("reasoning_content", "")) for one in cut] == [("", True)] * 2
    assert tokenizer.decode(rollout.token_ids[: rollout.turns[1].start]).count("</think>") == 1
