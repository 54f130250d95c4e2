"""What a new user gets wrong is answered in one sentence, before anything is trained."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from datasets import Dataset
from trl import ModelConfig

import agentsgym
from agentsgym import AgentsGymError, GRPOEnvConfig, MultistepEnv, ScriptedAgent
from agentsgym.envs import AgentProgramEnv
from agentsgym.envs.user_checks import _warn_of_key
from agentsgym.evaluation.compare import compare
from agentsgym.evaluation.replay import replay
from agentsgym.evaluation.run import evaluate
from agentsgym.evaluation.transcripts import render_transcript
from agentsgym.recipes.from_values import check_model_config
from agentsgym.recipes.run import TrainingRun
from agentsgym.store.writer import RolloutWriter
from agentsgym.training.selection.imitate import imitate, imitation_rows
from agentsgym.training.selection.league import League

# Each mistake is a value of another type.
# pyright: reportPrivateUsage=false, reportArgumentType=false, reportCallIssue=false, reportUnknownMemberType=false


class Guess(MultistepEnv):
    def _initialize_episode(self, session_id: str, task_data: Any) -> Any:
        return {"done": False}

    def _format_prompt(self, state: Any, step: int) -> Any:
        return "go"

    def _step_episode(self, session_id: str, state: Any, action: str) -> Any:
        return state, 1.0, True, {}


def policy() -> Any:
    return agentsgym.tiny_policy(["go higher"], hidden_size=8, num_layers=1, num_heads=1)


def trainer(model: Any = None, **given: Any) -> Any:
    own, tokenizer = policy()
    return trainer_of(own if model is None else model, Guess(tokenizer), **given)


def trainer_of(model: Any, env: MultistepEnv, **given: Any) -> Any:
    args = GRPOEnvConfig(output_dir="never", report_to="none", use_cpu=True, per_device_train_batch_size=8)
    return agentsgym.GRPOEnvTrainer(model, env, args, Dataset.from_list([{"task_data": {}}]), **given)


def frozen() -> Any:
    return policy()[0].requires_grad_(requires_grad=False)


class TaskRejected(Guess):
    def _check_task(self, task_data: Any) -> Any:
        return False


class Truncated(Guess):
    def _step_episode(self, session_id: str, state: Any, action: str) -> Any:
        return state, 0.0, False, {"truncated": True}


class Prefilled(Guess):
    def _format_prompt(self, state: Any, step: int) -> Any:
        return [{"role": "user", "content": "go"}, {"role": "assistant", "content": "I"}]


class OwnConstructor(Guess):
    def __init__(self, highest: int) -> None:
        super().__init__()


def played(env: MultistepEnv) -> None:
    [rollout] = env.rollout([{}], ScriptedAgent(["4"]))
    raise AgentsGymError(str(rollout.error))


def program(task: Any, endpoint: Any) -> Any:
    yield


def defines(**names: Any) -> None:
    type("Wrong", (Guess,), names)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a key of env_config": (lambda: GRPOEnvConfig(max_steps_per_episode=3), "is a key of an environment's env_config"),
    "a model and its tokenizer": (lambda: trainer(policy()), "model must be a model or a path, got a tuple"),
    "nothing to train": (lambda: trainer(frozen()), "no parameter of the model requires a gradient"),
    "a column": (lambda: trainer(curriculum="level"), "curriculum must be a Curriculum or None, got 'level'"),
    "one callback": (lambda: trainer(callbacks=int), "callbacks must be a list of callbacks or None"),
    "rollouts": (lambda: trainer(demonstrations=[1]), r"demonstrations must be Demonstrations\(trajectories\) or None"),
    "tasks to imitate": (lambda: imitation_rows([{"seed": 1}]), "imitation needs trajectories, as env.rollout returns"),
    "a list of players": (
        lambda: League([ScriptedAgent(["4"])]),
        r"League\(players\) must be a dict of agents by name",
    ),
    "a model alone": (lambda: TrainingRun(policy()[0], None), r"TrainingRun\(policy\) must be a model and its tok"),
    "a path to compare": (lambda: compare("runs/a", "runs/b"), "compare needs two stores, or lists of"),
    "a class to replay with": (lambda: replay(None, Guess), r"got the class Guess: pass Guess\(\)"),
    "a number of workers": (lambda: Guess().rollout([{}], ScriptedAgent(["4"]), pool=4), "pool must be a pool such as"),
    "no tokenizer": (lambda: agentsgym.PolicyAgent(policy()[0], None), r"PolicyAgent\(tokenizer\) must be the model's"),
    "no tokens": (lambda: agentsgym.PolicyAgent(*policy(), max_turn_tokens=0), "must be a positive int, got 0"),
    "a generator": (lambda: AgentProgramEnv(program=program), "is a generator function, which would not be run"),
    "adapters": (lambda: check_model_config(ModelConfig(lora_r=8)), "lora_r has no effect without use_peft"),
    "tools that nothing calls": (lambda: defines(_tools=list), "defines _tools but not _step_action"),
    "roles that nothing returns": (lambda: defines(roles=("X", "O")), "defines roles but not _role"),
    "a task rejected": (lambda: TaskRejected().rollout([{}], ScriptedAgent(["4"])), "must raise TaskError for a task"),
    "a constructor": (lambda: agentsgym.check_env(OwnConstructor, [{}]), r"must accept \(tokenizer, env_config\)"),
    "a truncated episode": (lambda: played(Truncated()), "with done=False, but a truncated episode is over"),
    "another trainer's settings": (
        lambda: imitate(policy()[0], [], policy()[1], GRPOEnvConfig()),
        r"imitate\(args\) must be TRL's SFTConfig or None, got a GRPOEnvConfig",
    ),
    "a store to render": (lambda: render_transcript([1]), r"must be a rollout, such as store\[0\]"),
    "an environment first": (
        lambda: TrainingRun.evaluate(None, Guess(), "before", []),
        r"TrainingRun.evaluate\(name\) must be a str, the first argument",
    ),
    "no tracker": (lambda: GRPOEnvConfig(report_to={}), "must be .none., .all. or names of trackers"),
    "a misspelled role": (lambda: GRPOEnvConfig(observation_loss_weight={"tools": 1}), "by role, such as 'tool'"),
    "a prefilled answer": (lambda: played(Prefilled()), "must not end with a message of the role assistant"),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_is_answered_in_a_sentence(mistake: str) -> None:
    make, sentence = MISTAKES[mistake]
    with pytest.raises((AgentsGymError, TypeError), match=sentence):
        make()


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ({"_last_mesage": len}, "Wrong._last_mesage is not used; did you mean _last_message?"),
        ({"final_reward": len}, "Wrong.final_reward is not used; did you mean _final_reward?"),
        ({"default_configs": {}}, "Wrong.default_configs is not used; did you mean default_config?"),
        ({"max_steps_per_episode": 1}, "write default_config = {'max_steps_per_episode': 1}"),
    ],
)
def test_a_name_that_nothing_reads_is_warned_of(
    names: dict[str, Any], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    defines(**names)
    assert sentence in caplog.text
    caplog.clear()
    defines(_helper=len, highest=10, history_of_play=[])
    assert caplog.text == ""


def test_an_option_that_the_template_does_not_use_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = policy()[1]
    with caplog.at_level(logging.WARNING):
        Guess(tokenizer, {"chat_template_kwargs": {"enable_think": False}}).rollout([{}], ScriptedAgent(["go"]))
    assert "the chat template does not use 'enable_think' of chat_template_kwargs" in caplog.text


def test_a_history_without_the_newest_message_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    class Long(Guess):
        def _format_prompt(self, state: Any, step: int) -> Any:
            return f"go {step}"

        def _step_episode(self, session_id: str, state: Any, action: str) -> Any:
            return state, 1.0, False, {}

    def first(messages: list[Any]) -> list[Any]:
        return messages[:1]

    def last(messages: list[Any]) -> list[Any]:
        return messages[-1:]

    for history in (last, first):
        assert "leaves out the newest message" not in caplog.text
        Long(env_config={"history": history, "max_steps_per_episode": 3}).rollout([{}], ScriptedAgent(["4"] * 3))
    assert caplog.text.count("first leaves out the newest message") == 1


def test_an_agent_may_change_the_list_that_it_gets() -> None:
    class Changes(agentsgym.Agent):
        def get_action(self, messages: list[Any], agent_state: Any) -> tuple[str, Any]:
            messages.insert(0, {"role": "system", "content": "Be clever"})
            return "4", None

    [rollout] = Guess().rollout([{}], Changes())
    assert [message["content"] for message in rollout.messages] == ["go", "4"]


class Budgeted(Guess):
    default_config: ClassVar[dict[str, Any]] = {"max_trajectory_tokens": 9}


class Judged(Guess):
    def _step_episode(self, session_id: str, state: Any, action: str) -> Any:
        return state, 0.0, True, {"is_success": True}


def judged() -> Any:
    env: Any = Judged()
    env.judge = [len]
    return env.rollout([{}], ScriptedAgent(["4"]))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (judged, "Judged.judge is not called: judges are in its list judges"),
        (judged, "info['is_success'] of Judged is not used; did you mean info['success']?"),
        (lambda: Budgeted().rollout([{}], ScriptedAgent(["4"])), "no episode ends at its token budget"),
        (lambda: trainer(eval_dataset=Dataset.from_list([{"task_data": {}}])), "only when trainer.evaluate()"),
    ],
)
def test_what_has_no_effect_is_warned_of(
    act: Callable[[], Any], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_key.cache_clear()
    act()
    assert sentence in caplog.text


def test_resuming_with_another_configuration_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for most in (3, 3, 4):
        assert "1 rollouts of me, but none of this evaluation" not in caplog.text
        options: dict[str, Any] = {"store": tmp_path / "rollouts", "agent_name": "me", "resume": True}
        evaluate(Guess(None, {"max_steps_per_episode": most}), ScriptedAgent(["4"] * 9), [{}], **options)
    assert "1 rollouts of me, but none of this evaluation" in caplog.text


@pytest.mark.filterwarnings("default")
def test_a_league_that_is_only_half_of_what_it_must_be_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Duel(Guess):
        roles = ("X", "O")

        def _role(self, state: Any) -> str:
            return "X"

    league = League({"scripted": ScriptedAgent(["go"])})
    trainer(callbacks=[league])
    assert "the League in callbacks plays no role" in caplog.text
    caplog.clear()
    model, tokenizer = policy()
    for callbacks in ([], [league]):
        env = Duel(tokenizer, opponent=league)
        trainer_of(model, env, callbacks=callbacks)
        assert ("gets neither copies nor results" in caplog.text) == (not callbacks)
        caplog.clear()


class Inserts(agentsgym.Agent):
    def act(self, requests: Any) -> Any:
        for request in requests:
            request.messages.insert(0, {"role": "system", "content": "Be clever"})
        return [agentsgym.Action(text="4") for _ in requests]


class Generates(agentsgym.Agent):
    """Returns what a model's generate() returns."""

    def act(self, requests: Any) -> Any:
        return [agentsgym.Action(text="go", token_ids=[*one.token_ids, *one.token_ids[:1]]) for one in requests]


@pytest.mark.parametrize(
    ("agent", "sentence"),
    [
        (Inserts(), "the agent changed request.messages"),
        (Generates(), "must be those of the answer alone, but they begin with the prompt"),
    ],
)
def test_an_agent_that_would_spoil_the_record_fails(agent: agentsgym.Agent, sentence: str) -> None:
    [rollout] = Guess(policy()[1], {"system_prompt": "go " * 8}).rollout([{}], agent)
    assert sentence in str(rollout.error)


def test_a_folder_above_a_store_or_a_model_is_named(tmp_path: Path) -> None:
    from agentsgym.agents.policy.loading import load_policy  # noqa: PLC0415  # torch
    from agentsgym.cli.stores import open_store  # noqa: PLC0415

    env = Guess()
    with RolloutWriter(tmp_path / "rollouts") as writer:
        for rollout in env.rollout([{}], ScriptedAgent(["4"])):
            writer.add(rollout)
    with pytest.raises(Exception, match=r"contains no rollouts; did you mean .*rollouts\?"):
        open_store(tmp_path)
    for part in policy():
        part.save_pretrained(tmp_path / "run" / "model")
    with pytest.raises(AgentsGymError, match=r"did you mean .*model\?"):
        load_policy(str(tmp_path / "run"))
