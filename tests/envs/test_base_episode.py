import itertools
from typing import Any

import pytest
from guess_game import INVALID, MISS, WIN, Counting, GuessEnv, tasks

from agentsgym import Action, AgentError, ConfigError, EnvError, ScriptedAgent, StopReason, Trajectory
from agentsgym.credit.rewards import TOKEN_CREDITS, TURN_CREDITS
from agentsgym.testing import chat_tokenizer

KINDS: Any = ["chatml", "llama3", "inst", "default_system", "trimming", "none"]
RECORDED = ("full_token_ids", "full_attention_mask", "agent_token_mask", "per_token_rewards")


def complete(env: GuessEnv, actions: list[Any], solution: int = 3) -> dict[str, Any]:
    env.active_states["mine"] = env._initialize_episode("mine", {"solution": solution})
    return env._run_complete_episode("mine", ScriptedAgent(actions))


def masked_spans(result: dict[str, Any]) -> list[list[int]]:
    marked = itertools.groupby(
        zip(result["full_token_ids"], result["agent_token_mask"], strict=True), key=lambda pair: pair[1]
    )
    return [[token for token, _ in span] for is_agent, span in marked if is_agent]


@pytest.mark.parametrize("kind", KINDS)
def test_a_complete_episode_marks_exactly_what_the_agent_answered(kind: Any) -> None:
    tokenizer = chat_tokenizer(kind)
    output = ["5", "I am lost", "3"]
    result = complete(GuessEnv(tokenizer), output)
    assert len({len(result[key]) for key in RECORDED}) == 1
    assert set(result["full_attention_mask"]) == {1}
    spans = masked_spans(result)
    ending = " [/END]\n" if kind == "inst" else ""
    assert [tokenizer.decode(span, skip_special_tokens=True) for span in spans] == [text + ending for text in output]
    has_end_token = kind not in {"inst", "none"}
    assert all((span[-1] == tokenizer.eos_token_id) is has_end_token for span in spans)
    rewarded = [reward for reward, agent in zip(*map(result.get, RECORDED[3:1:-1]), strict=True) if agent == 0]
    assert set(rewarded) == {0.0}
    assert result["final_reward"] == MISS + INVALID + WIN
    assert sum(result["per_token_rewards"]) == pytest.approx(MISS + INVALID + WIN)
    assert [message["content"] for message in result["final_completion_messages"][1::2]] == output
    assert result["session_id"] == "mine"


def test_a_complete_episode_is_not_padded_and_keeps_sampled_ids() -> None:
    tokenizer = chat_tokenizer("chatml")
    odd = [*tokenizer("3", add_special_tokens=False).input_ids, tokenizer.pad_token_id, 300, tokenizer.eos_token_id]
    env = GuessEnv(tokenizer)
    action = Action(text="3", token_ids=odd, logprobs=[-0.5] * len(odd))
    long, short = complete(env, ["5", "4", action]), complete(env, [action])
    assert len(long["full_token_ids"]) > len(short["full_token_ids"])
    assert masked_spans(short) == [odd]
    assert masked_spans(long)[-1] == long["full_token_ids"][-len(odd) :] == odd


def test_a_complete_episode_raises_what_went_wrong() -> None:
    env = GuessEnv(chat_tokenizer("chatml"))
    env = GuessEnv()
    env.active_states["over"] = {**env._initialize_episode("over", {}), "done": True}
    with pytest.raises(EnvError, match="the episode of session 'over' is over: put the state of a new episode there"):
        env._run_complete_episode("over", ScriptedAgent(["3"]))
    with pytest.raises(EnvError, match="active_states has no session 'nobody'"):
        env._run_complete_episode("nobody", Counting())
    with pytest.raises(AgentError, match="the script has only 1 actions"):
        complete(env, ["5"])
    env.active_states["broken"] = {"done": False}
    with pytest.raises(EnvError, match=r"GuessEnv._step_episode raised KeyError: 'solution'"):
        env._run_complete_episode("broken", Counting())
    with pytest.raises(ConfigError, match="an agent must define get_action"):
        env._run_complete_episode("mine", object())  # type: ignore[arg-type]


PLACEMENTS = [pair for pair in itertools.product(TURN_CREDITS, TOKEN_CREDITS) if pair[0] != "spread_final"]


@pytest.mark.parametrize(("turn_credit", "token_credit"), [*PLACEMENTS, ("spread_final", "spread")])
def test_every_credit_placement_reaches_the_tokens(turn_credit: str, token_credit: str) -> None:
    env = GuessEnv(chat_tokenizer("chatml"), {"turn_credit": turn_credit, "token_credit": token_credit})
    [trajectory] = env.rollout(tasks(3), ScriptedAgent(["5", "lost in the dark", "3"]))
    counts = [turn.stop - turn.start for turn in trajectory.turns]
    assert len(set(counts)) > 1
    total = MISS + INVALID + WIN
    earned = {
        "step": [MISS, INVALID, WIN],
        "final": [0.0, 0.0, total],
        "repeat_final": [total] * 3,
        "spread_final": [total * count / sum(counts) for count in counts],
    }[turn_credit]
    for turn, amount, count in zip(trajectory.turns, earned, counts, strict=True):
        wanted = {"spread": [amount / count] * count, "last": [0.0] * (count - 1) + [amount], "each": [amount] * count}[
            token_credit
        ]
        assert trajectory.per_token_rewards[turn.start : turn.stop] == pytest.approx(wanted)
    on_environment = zip(trajectory.per_token_rewards, trajectory.agent_token_mask, strict=True)
    assert {reward for reward, agent in on_environment if not agent} == {0.0}
    assert trajectory.turn_rewards == [MISS, INVALID, WIN]


def test_the_final_reward_and_the_token_rewards_can_be_overridden() -> None:
    class Tuned(GuessEnv):
        """Worth the number of guesses, with the final reward on the very last token."""

        def _final_reward(self, state: dict[str, Any], turn_rewards: list[float]) -> float:
            assert state["done"]
            return 10.0 * len(state["guesses"]) + len(turn_rewards)

        def _calculate_rewards(self, trajectory: Trajectory) -> list[float]:
            return [0.0] * (len(trajectory.token_ids) - 1) + [trajectory.final_reward]

    env = Tuned(chat_tokenizer("chatml"), {"turn_credit": "final"})
    [trajectory] = env.rollout(tasks(3), Counting())
    assert trajectory.final_reward == 33.0
    assert trajectory.per_token_rewards[-1] == sum(trajectory.per_token_rewards) == 33.0
    assert env.generate(tasks(3), Counting(), return_all_steps=True)["rewards"] == [[0.0, 0.0, 33.0]]


@pytest.mark.parametrize(
    ("allowance", "actions", "stop_reason", "num_turns"),
    [
        (0, ["a", "3"], "invalid", 1),
        (1, ["a", "3"], "done", 2),
        (1, ["a", "1", "b", "3"], "invalid", 3),
        (3, ["a", "b", "c", "3"], "done", 4),
        (3, ["a", "b", "1", "c", "d", "3"], "invalid", 5),
    ],
)
def test_invalid_actions_are_forgiven_as_often_as_allowed(
    allowance: int, actions: list[str], stop_reason: str, num_turns: int
) -> None:
    env = GuessEnv(env_config={"error_allowance": allowance})
    [trajectory] = env.rollout(tasks(3), ScriptedAgent(actions))
    assert (trajectory.stop_reason, len(trajectory.turns)) == (stop_reason, num_turns)
    assert [turn.invalid for turn in trajectory.turns] == [not action.isdecimal() for action in actions[:num_turns]]
    assert trajectory.success is (stop_reason == "done")


def test_the_last_turn_may_end_the_game_or_the_allowance() -> None:
    env = GuessEnv(env_config={"max_steps_per_episode": 2, "error_allowance": 0})
    ends = {action: env.rollout(tasks(3), ScriptedAgent(["1", action]))[0].stop_reason for action in ("3", "2", "a")}
    assert ends == {"3": StopReason.DONE, "2": StopReason.MAX_TURNS, "a": StopReason.INVALID}


def test_an_invalid_action_that_ends_the_game_is_done() -> None:
    class Strict(GuessEnv):
        """Ends with the first invalid action."""

        def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            state, reward, done, info = super()._step_episode(session_id, state, action)
            return state, reward, done or bool(info.get("invalid")), info

    env = Strict(env_config={"error_allowance": 0})
    assert env.rollout(tasks(3), ScriptedAgent(["a"]))[0].stop_reason is StopReason.DONE


class WithSystem(GuessEnv):
    """A game with a system message of its own."""

    def _system_prompt(self) -> str:
        return "Play well."


@pytest.mark.parametrize(
    ("env_class", "override", "system"),
    [
        (GuessEnv, None, []),
        (GuessEnv, "Win.", ["Win."]),
        (WithSystem, None, ["Play well."]),
        (WithSystem, "Win.", ["Win."]),
        (WithSystem, "", []),
    ],
)
def test_the_system_message_comes_once_and_first(env_class: Any, override: str | None, system: list[str]) -> None:
    [trajectory] = env_class(chat_tokenizer("chatml"), {"system_prompt": override}).rollout(tasks(3), Counting())
    roles = [message["role"] for message in trajectory.messages]
    assert roles == ["system"] * len(system) + ["user", "assistant"] * 3
    assert [message["content"] for message in trajectory.messages[: len(system)]] == system


def test_a_prompt_may_be_several_messages() -> None:
    class Twofold(GuessEnv):
        """Shows an example first."""

        def _format_prompt(self, state: dict[str, Any], step: int) -> Any:
            prompt: Any = super()._format_prompt(state, step)
            example = [{"role": "user", "content": "Ready?"}, {"role": "assistant", "content": "Ready."}]
            return [*(example if step == 0 else []), {"role": "user", "content": prompt}]

    tokenizer = chat_tokenizer("chatml")
    result = Twofold(tokenizer).run_trial(tasks(2), Counting())
    [messages], [ids], [mask] = (
        result[key] for key in ("final_completion_messages", "padded_full_token_ids", "padded_agent_token_mask")
    )
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant", "user", "assistant"]
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith(tokenizer.decode(ids))
    agent_text = tokenizer.decode([token for token, agent in zip(ids, mask, strict=True) if agent])
    assert agent_text == "1<|im_end|>2<|im_end|>"


def test_without_a_tokenizer_everything_but_the_tokens_is_there() -> None:
    with_ids = ScriptedAgent([Action(text=text, token_ids=[1, 2], logprobs=[-1.0, -2.0]) for text in ("5", "a", "3")])
    [read] = GuessEnv().rollout(tasks(3), with_ids)
    [exact] = GuessEnv(chat_tokenizer("none")).rollout(tasks(3), with_ids)
    assert (list(read.token_ids), list(read.per_token_rewards), read.agent_token_mask) == ([], [], [])
    assert (read.messages, read.turn_rewards, read.final_reward) == (
        exact.messages,
        exact.turn_rewards,
        exact.final_reward,
    )
    assert read.stop_reason is StopReason.DONE
    rows = GuessEnv().run_trial(tasks(3, 1), Counting())
    assert rows["padded_full_token_ids"] == rows["padded_per_token_rewards"] == [[], []]
    assert rows["final_rewards"] == [2 * MISS + WIN, WIN]
    steps = GuessEnv().generate(tasks(2), Counting(), return_all_steps=True)
    assert (steps["ids"], steps["mask"], steps["rewards"]) == ([[[], []]], [[[], []]], [[MISS, WIN]])
    result = complete(GuessEnv(), ["3"])
    assert [result[key] for key in RECORDED] == [[], [], [], []]


def test_logprobs_stand_on_agent_tokens_or_are_unknown() -> None:
    env = GuessEnv(chat_tokenizer("none"))
    known = Action(text="1", token_ids=[40, 41], logprobs=[-1.0, -2.0])
    [trajectory] = env.rollout(tasks(3), ScriptedAgent([known, Action(text="3", token_ids=[42], logprobs=[-3.0])]))
    assert trajectory.logprobs is not None
    assert [value for value in trajectory.logprobs if value] == [-1.0, -2.0, -3.0]
    assert [value != 0.0 for value in trajectory.logprobs] == [bool(agent) for agent in trajectory.agent_token_mask]
    assert trajectory.exact
    [mixed] = env.rollout(tasks(3), ScriptedAgent([known, "3"]))
    assert mixed.logprobs is None
    assert [turn.exact for turn in mixed.turns] == [True, False]


def test_an_empty_answer_is_a_turn_whose_reward_lies_on_no_token() -> None:
    env = GuessEnv(chat_tokenizer("none"))
    [trajectory] = env.rollout(tasks(3), ScriptedAgent(["", "3"]))
    assert [turn.stop - turn.start for turn in trajectory.turns] == [0, 1]
    assert (trajectory.turn_rewards, trajectory.final_reward) == ([INVALID, WIN], INVALID + WIN)
    assert sum(trajectory.per_token_rewards) == WIN


def test_state_keys_are_kept_by_episode() -> None:
    class Keyed(GuessEnv):
        """Knows its decision problems by the guesses so far."""

        def _state_key(self, state: dict[str, Any]) -> Any:
            return tuple(state["guesses"])

    config = {"episodes_per_trial": 2, "keep_history": True}
    [trajectory] = Keyed(env_config=config).rollout(tasks(2), ScriptedAgent(["1", "2", "1", "2"]))
    assert [turn.state_key for turn in trajectory.turns] == [(0, ()), (0, (1,)), (1, ()), (1, (1,))]
    assert {turn.state_key for turn in GuessEnv().rollout(tasks(2), Counting())[0].turns} == {None}


def test_hooks_that_describe_states_may_be_set_later(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(GuessEnv):
        """Has no hook that describes its states."""

    env = Late()
    assert {turn.role for turn in env.rollout(tasks(2), Counting())[0].turns} == {None}
    monkeypatch.setattr(Late, "_role", lambda _env, _state: "of the class")
    assert {turn.role for turn in env.rollout(tasks(2), Counting())[0].turns} == {"of the class"}
    monkeypatch.setattr(env, "_role", lambda _state: "of the instance")
    assert {turn.role for turn in env.rollout(tasks(2), Counting())[0].turns} == {"of the instance"}


def test_turns_know_who_the_agent_was_and_what_the_state_before_them_was_worth() -> None:
    class Valued(GuessEnv):
        """Takes turns between two seats, and counts guesses down."""

        def _role(self, state: dict[str, Any]) -> str:
            return "odd" if len(state["guesses"]) % 2 else "even"

        def _potential(self, state: dict[str, Any]) -> int:
            return -len(state["guesses"])

    config = {"episodes_per_trial": 2, "keep_history": True}
    [trajectory] = Valued(env_config=config).rollout(tasks(2), ScriptedAgent(["1", "2", "1", "2"]))
    assert [turn.role for turn in trajectory.turns] == ["even", "odd"] * 2
    assert [turn.potential for turn in trajectory.turns] == [0.0, -1.0] * 2
    plain = GuessEnv().rollout(tasks(2), Counting())[0].turns
    assert {(turn.role, turn.potential) for turn in plain} == {(None, None)}
