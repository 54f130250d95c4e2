"""What an environment returns last: in the conversation and the record, and never trained."""

from typing import Any

import pytest
from guess_game import GuessEnv, tasks

from agentsgym import ContractError, Message, RolloutStore, ScriptedAgent, StopReason, Trajectory, check_env, evaluate
from agentsgym.batch.layouts import trajectory_rows, turn_rows
from agentsgym.evaluation import render_transcript
from agentsgym.evaluation.replay import replay
from agentsgym.testing import chat_tokenizer

TOKENIZER = chat_tokenizer("chatml")


class Telling(GuessEnv):
    """Answers at the end how it ended."""

    def _last_message(self, state: dict[str, Any]) -> str | list[Message] | None:
        return "Right." if state["done"] else f"It was {state['solution']}."


def play(env: GuessEnv, *answers: str, solution: int = 2, **options: Any) -> Trajectory:
    [trajectory] = env.rollout(tasks(solution), ScriptedAgent([*answers], repeat_last=True), **options)
    assert trajectory.error is None
    return trajectory


def test_what_is_output_last_ends_the_conversation_and_the_record_without_a_generation_prompt() -> None:
    reported, untold = play(Telling(TOKENIZER), "1", "2"), play(GuessEnv(TOKENIZER), "1", "2")
    assert [*reported.messages] == [*untold.messages, {"role": "user", "content": "Right."}]
    assert reported.token_ids == TOKENIZER.apply_chat_template(reported.messages, return_dict=False)
    num_before = len(untold.token_ids)
    assert reported.token_ids[:num_before] == untold.token_ids
    assert TOKENIZER.decode(reported.token_ids[num_before:]) == "\n<|im_start|>user\nRight.<|im_end|>\n"
    assert not any(reported.agent_token_mask[num_before:])
    assert not any(reported.per_token_rewards[num_before:])
    assert (reported.turns, reported.final_reward) == (untold.turns, untold.final_reward)


@pytest.mark.parametrize("layout", [trajectory_rows, turn_rows])
def test_training_rows_are_the_same_with_and_without_it(layout: Any) -> None:
    reported, untold = play(Telling(TOKENIZER), "1", "2"), play(GuessEnv(TOKENIZER), "1", "2")
    assert layout(0, reported) == layout(0, untold)


@pytest.mark.parametrize(
    ("answers", "config", "message", "stop_reason"),
    [
        (["2"], {}, "Right.", StopReason.DONE),
        (["1"], {"max_steps_per_episode": 3}, "It was 2.", StopReason.MAX_TURNS),
        (["none"], {"error_allowance": 0}, "It was 2.", StopReason.INVALID),
    ],
)
def test_it_is_reported_whatever_ended_an_episode_that_had_room(
    answers: list[str], config: dict[str, Any], message: str, stop_reason: StopReason
) -> None:
    trajectory = play(Telling(TOKENIZER, config), *answers)
    assert (trajectory.messages[-1]["content"], trajectory.stop_reason) == (message, stop_reason)


def test_nothing_is_reported_where_a_budget_left_no_room() -> None:
    trajectory = play(Telling(TOKENIZER, {"max_trajectory_tokens": 60}), "1", solution=9)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.messages[-1]["role"] == "assistant"
    assert len(trajectory.token_ids) == trajectory.turns[-1].stop


def test_tokens_that_do_not_fit_the_budget_are_left_out_and_the_message_stays() -> None:
    whole = play(Telling(TOKENIZER), "1", "2")
    length, stop = len(whole.token_ids), whole.turns[-1].stop
    for limit, kept in ((length, length), (length - 1, stop)):
        bounded = play(Telling(TOKENIZER, {"max_trajectory_tokens": limit}), "1", "2")
        assert (bounded.messages, bounded.token_ids) == (whole.messages, whole.token_ids[:kept])
    completion = length - whole.turns[0].start
    assert len(play(Telling(TOKENIZER), "1", "2", max_completion_length=completion).token_ids) == length
    assert len(play(Telling(TOKENIZER), "1", "2", max_completion_length=completion - 1).token_ids) == stop
    assert len(play(Telling(TOKENIZER), "1", "2", max_turn_tokens=5).token_ids) == length


def test_episodes_that_share_a_conversation_announce_it_in_front_of_the_next_first_prompt() -> None:
    env = Telling(TOKENIZER, {"episodes_per_trial": 3, "free_shots": 1, "keep_history": True})
    trajectory = play(env, "2")
    first = "Guess a number from 1 to 9."
    output = [one["content"] for one in trajectory.messages if one["role"] == "user"]
    assert output == [first, f"Right.\n\n{first}", f"Right.\n\n{first}", "Right."]
    assert trajectory.token_ids == TOKENIZER.apply_chat_template(trajectory.messages, return_dict=False)
    prompts = [trajectory.token_ids[: turn.start] for turn in trajectory.turns]
    assert prompts == [
        TOKENIZER.apply_chat_template(
            trajectory.messages[: turn.message_index], add_generation_prompt=True, return_dict=False
        )
        for turn in trajectory.turns
    ]


def test_where_the_next_episode_has_no_room_it_ends_the_conversation() -> None:
    config = {"episodes_per_trial": 2, "keep_history": True}
    single = play(Telling(TOKENIZER), "2")
    trajectory = play(Telling(TOKENIZER, {**config, "max_trajectory_tokens": len(single.token_ids)}), "2")
    assert (trajectory.messages, trajectory.token_ids) == (single.messages, single.token_ids)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS


def test_each_fresh_conversation_has_its_own() -> None:
    env = Telling(TOKENIZER, {"episodes_per_trial": 2, "keep_history": False})
    assert play(env, "2").messages == play(Telling(TOKENIZER), "2").messages


@pytest.mark.parametrize("history", ["rerender", lambda messages: messages[-1:], lambda messages: messages])
def test_a_history_that_is_rewritten_ends_with_it_too(history: Any) -> None:
    reported = play(Telling(TOKENIZER, {"history": history}), "1", "2")
    untold = play(GuessEnv(TOKENIZER, {"history": history}), "1", "2")
    assert reported.segments[:-1] == untold.segments[:-1]
    assert TOKENIZER.decode(reported.token_ids[len(untold.token_ids) :]) == "\n<|im_start|>user\nRight.<|im_end|>\n"
    assert [*reported.messages] == [*untold.messages, {"role": "user", "content": "Right."}]


@pytest.mark.parametrize(
    ("expected", "complaint"),
    [
        (7, "_last_message must return a str or a list of at least one message, got 7"),
        ([], "_last_message must return a str or a list of at least one message"),
        ("\ud800", "_last_message must return valid Unicode"),
        ([{"role": "nobody", "content": "x"}], "_last_message cannot be recorded: "),
    ],
)
def test_what_is_no_message_fails_the_episode_and_reports_it(expected: Any, complaint: str) -> None:
    class Wrong(GuessEnv):
        """Answers that."""

        def _last_message(self, state: dict[str, Any]) -> Any:
            return expected

    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = "{% for one in messages %}{% if one.role == 'nobody' %}{{ raise_exception('who?') }}" + (
        "{% endif %}{% endfor %}" + str(TOKENIZER.chat_template)
    )
    [trajectory] = Wrong(tokenizer).rollout(tasks(2), ScriptedAgent(["2"]))
    assert complaint in (trajectory.error or "")
    assert trajectory.num_turns == 1


def test_what_was_stored_and_written_out_has_it_and_is_replayed(tmp_path: Any) -> None:
    trajectory = play(Telling(TOKENIZER), "1", "2")
    env = Telling(TOKENIZER)
    evaluate(env, ScriptedAgent(["1", "2"]), tasks(2), store=tmp_path)
    record = RolloutStore(tmp_path).record(0)
    assert (record.trajectory.messages, record.trajectory.token_ids) == (trajectory.messages, trajectory.token_ids)
    assert render_transcript(record.trajectory).endswith("[assistant +1] 2\n[user] Right.\n")
    assert replay(record, env).difference is None

    class Other(Telling):
        """Answers something else."""

        def _last_message(self, state: dict[str, Any]) -> str:
            return "Well done."

    difference = replay(record, Other(TOKENIZER)).difference
    assert (difference.turn, difference.recorded, difference.played) == (2, "Right.", "Well done.")


def test_a_last_message_that_is_not_reproducible_is_found_by_the_contract_test() -> None:
    class Changing(GuessEnv):
        """Counts over all episodes."""

        num_output = 0

        def _last_message(self, state: dict[str, Any]) -> str:
            self.num_output += 1
            return f"Said {self.num_output} times."

    with pytest.raises(ContractError, match=r"turn 1: the observation was 'Said 1 times\.' and then 'Said "):
        check_env(Changing(TOKENIZER), tasks=tasks(2), agent=ScriptedAgent(["2"], repeat_last=True))
    check_env(Telling(TOKENIZER), tasks=tasks(2), agent=ScriptedAgent(["2"], repeat_last=True))


def test_it_stays_where_a_note_was_written_and_the_next_episode_has_no_room() -> None:
    class Over(Telling):
        def _format_prompt(self, state: dict[str, Any], step: int) -> str:
            return "obs" + "x" * (5 if step else 45)

        def _last_message(self, state: dict[str, Any]) -> str:
            return "OVER"

    config: dict[str, Any] = {"episodes_per_trial": 3, "keep_history": True, "history": "summarize"}
    config |= {"summarize_over_tokens": 60, "summary_prompt": "Note.", "max_steps_per_episode": 2}
    config |= {"error_allowance": 9, "max_trajectory_tokens": 120}
    trajectory = play(Over(TOKENIZER, config), "aaaaaaaaaa")
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert [one["content"] for one in trajectory.messages[-3:]] == ["Note.", "aaaaaaaaaa", "OVER"]
