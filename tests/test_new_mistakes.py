"""What a new user gets wrong is answered in one sentence, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from guess_game import Quiet
from trl import ModelConfig

import agentsgym
from agentsgym import AgentsGymError, GRPOEnvConfig, MultistepEnv, ScriptedAgent
from agentsgym.credit.registry import get_estimator
from agentsgym.envs import AgentProgramEnv, GymnasiumEnv, SearchEnv, TextArenaEnv, ToolEnv, TwentyQuestionsEnv
from agentsgym.envs.boundary import warn_once
from agentsgym.envs.user_checks import _warn_of_key
from agentsgym.evaluation.compare import compare
from agentsgym.evaluation.replay import replay
from agentsgym.evaluation.run import evaluate
from agentsgym.evaluation.transcripts import render_transcript
from agentsgym.fields import Field, is_int
from agentsgym.judging.judge import Judge
from agentsgym.recipes.from_values import check_model_config
from agentsgym.recipes.run import TrainingRun
from agentsgym.store.writer import RolloutWriter
from agentsgym.tiny import environment_texts
from agentsgym.training.selection.imitate import imitate, imitation_rows
from agentsgym.training.selection.league import League

# Each mistake is a value of another type.
# pyright: reportPrivateUsage=false, reportArgumentType=false, reportCallIssue=false, reportUnknownMemberType=false
# pyright: reportUnknownLambdaType=false


class Guess(Quiet):
    """A game whose mistakes are named."""


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


class OwnConstructor(Guess):
    def __init__(self, highest: int) -> None:
        super().__init__()


def played(env: MultistepEnv, agent: Any = None) -> None:
    [rollout] = env.rollout([{"seed": 0}], agent or ScriptedAgent(["4"], repeat_last=True))
    raise AgentsGymError(str(rollout.error))


def program(task: Any, endpoint: Any) -> Any:
    yield


def defines(base: Any = Guess, **names: Any) -> Any:
    return type("Wrong", (base,), names)


def steps(reward: Any, done: bool = True, **info: Any) -> Any:
    """A class whose steps return this."""
    return defines(_step_episode=lambda self, session_id, state, action: ({"done": done}, reward, done, info))


def duel(role: str = "X", done: bool = True, **rewards: float) -> Any:
    step = defines(steps(0.0, done, rewards=rewards), roles=("X", "O"), _role=lambda *_: role)
    return step(opponent=ScriptedAgent(["4"], repeat_last=True))


class NotAsync(agentsgym.AsyncAgent):
    def aact(self, request: Any) -> Any:
        return agentsgym.Action(text="4")


PREFILLED = defines(_format_prompt=lambda *_: [{"role": "assistant", "content": "I"}])
SCORED = defines(steps({"progress": 1.0}), _score_state=lambda *_: 1.0)
UNEVEN = defines(_initialize_episode=lambda self, session_id, task: {"done": task["seed"] > 0})
COUNT = Field(default=0, expected="a positive int", valid=is_int(1))
DUEL = {"game": "TicTacToe-v0"}
CORPUS = {"corpus": [{"title": "A", "text": "alpha"}], "evidence_reward": 1.0}
QUESTION = {"question": "a", "answers": ["4"]}


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a key of env_config": (lambda: GRPOEnvConfig(max_steps_per_episode=3), "is a key of an environment's env_config"),
    "a model and its tokenizer": (lambda: trainer(policy()), "model must be a model or a path, got a tuple"),
    "nothing to train": (lambda: trainer(frozen()), "no parameter of the model requires a gradient"),
    "a column": (lambda: trainer(curriculum="level"), "curriculum must be a Curriculum or None, got 'level'"),
    "one callback": (lambda: trainer(callbacks=int), "callbacks must be a list of callbacks or None"),
    "rollouts": (lambda: trainer(demonstrations=[1]), r"demonstrations must be Demonstrations\(trajectories\) or None"),
    "tasks to imitate": (lambda: imitation_rows([{"seed": 1}]), "a demonstration must be a rollout, such as store"),
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
    "a task rejected": (lambda: played(defines(_check_task=lambda *_: False)()), "must raise TaskError for a task"),
    "a configuration": (defines(_check_config=lambda *_: False), "must raise ConfigError for incompatible"),
    "a constructor": (lambda: agentsgym.check_env(OwnConstructor, [{}]), r"must accept \(tokenizer, env_config\)"),
    "a truncated episode": (lambda: played(steps(0.0, False, truncated=True)()), "but a truncated episode is over"),
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
    "a prefilled answer": (lambda: played(PREFILLED()), "must not end with a message of the role assistant"),
    "roles in lower case": (lambda: played(duel(x=1.0, o=0.0)), "must be 'X', 'O', got 'x'"),
    "a role that never changes": (lambda: played(duel("O", False)), r"_role returned {'O': 1000} times"),
    "a step of tools": (lambda: defines(ToolEnv, _step_episode=len), "would never be called: override _step_action"),
    "a step of a program": (lambda: defines(AgentProgramEnv, _step_episode=len), "the turns are the calls"),
    "a program's errors": (lambda: AgentProgramEnv(None, {"error_allowance": 2}, program=len), "must be 1, since the"),
    "success as a reward": (lambda: played(steps({"right": 1.0, "success": True})()), "return it in info"),
    "named rewards in info": (lambda: played(steps(0.0, rewards={"right": 1.0})()), "are returned as the reward"),
    "progress twice": (lambda: played(SCORED()), "the name of what _score_state adds"),
    "a common key": (lambda: defines(config_fields={"history": replace(COUNT, default=3)}), "as in any env.*, got 3"),
    "a default": (lambda: defines(config_fields={"top": COUNT}), "default must be a positive int, got 0"),
    "a class": (lambda: defines(config_fields={"top": replace(COUNT, valid=int)}), "a Field whose valid is a function"),
    "potentials": (lambda: Guess(None, {"state_scores": "potential"}), "no effect without a method _score_state"),
    "a discount": (lambda: Guess(None, {"score_discount": 0.5}), "no effect without env_config..state_scores"),
    "a request for notes": (lambda: Guess(None, {"summary_prompt": "Note"}), "no effect without env_config..history"),
    "one text": (lambda: agentsgym.tiny_policy(defines(vocabulary_texts=lambda _: "go")()), "lists them; got 'go'"),
    "orders": (lambda: Judge(ScriptedAgent(["4"]), rubric="good", num_orders=2), "no effect without scope='group'"),
    "hops of data": (lambda: SearchEnv.get_train_dataset(data=[QUESTION], hops=[2]), "hops has no effect with data"),
    "maps": (lambda: GymnasiumEnv.get_train_dataset(map_size=8), "no effect without random_maps=True"),
    "nobody else": (
        lambda: TextArenaEnv(None, {"game": "Wordle-v0", "opponent": "first"}),
        "has a single role here, and no opponent can play",
    ),
    "one conversation": (lambda: TextArenaEnv(None, DUEL | {"shared_conversation": True}), "has no effect without"),
    "no gamemaster": (lambda: TextArenaEnv(None, DUEL, gamemaster=NotAsync()), "has no gamemaster"),
    "a text as a hook": (lambda: defines(_system_prompt="Be kind"), "_system_prompt must be a method, got 'Be kind'"),
    "no coroutine": (lambda: played(Guess(), NotAsync()), "write async def aact"),
    "on_finish": (lambda: Guess().rollout([{}], NotAsync(), on_finish=[]), "on_finish must be a function"),
    "OpenAI's base": (lambda: agentsgym.OpenAIAgent("m", api_base="x"), "did you mean 'base_url'"),
    "turns": (lambda: Guess(None, {"max_turns": 3}), "did you mean 'max_steps_per_episode'"),
    "turns elsewhere": (lambda: GRPOEnvConfig(max_turns=3), "did you mean env_config..max_steps_per_episode"),
    "gae": (lambda: get_estimator("gae"), "did you mean 'turn_gae'"),
    "env_config": (lambda: GRPOEnvConfig(env_config={}), "did you mean the environment's env_config"),
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
        ({"max_turns": 2}, "Wrong.max_turns is not used: write default_config = {'max_steps_per_episode': 2}"),
    ],
)
def test_a_name_that_nothing_reads_is_warned_of(
    names: dict[str, Any], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    defines(**names)
    assert sentence in caplog.text
    caplog.clear()
    defines(_helper=len, highest=10, history_of_play=[], max_turns=3, _state_key=lambda self, _: self.max_turns)
    assert caplog.text == ""


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


def judged() -> Any:
    env: Any = steps(0.0, is_success=True, loss=float("nan"))()
    env.judge, env.system_prompt = [len], "Be kind"
    return env.rollout([{}], ScriptedAgent(["4"]))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (judged, "Wrong.judge is not called: judges are in its list judges"),
        (judged, "info['is_success'] of Wrong is not used; did you mean info['success']?"),
        (judged, "info['loss'] of Wrong is NaN or infinite"),
        (judged, "Wrong.system_prompt is not used: write default_config = {'system_prompt': 'Be kind'}"),
        (lambda: Guess(None, {"keep_history": True}), "no effect without env_config['episodes_per_trial'] above 1"),
        (lambda: Guess(None, {"unguarded_tokens": ["<b>"]}), "no effect without env_config['guard_added_tokens']"),
        (lambda: environment_texts(UNEVEN(), [{"seed": 0}, {"seed": 1}], None, 2), "1 of 2 episodes failed"),
        (lambda: ToolEnv()._check_task(QUESTION), "task_data['answers'] is not compared"),
        (lambda: TwentyQuestionsEnv(None, {"objects": ["dog"]})._check_task({"solution": "cow"}), "one object more"),
        (lambda: SearchEnv(None, CORPUS)._check_task(QUESTION), "evidence_reward cannot be earned"),
        (lambda: SearchEnv(None, CORPUS)._check_task(QUESTION | {"evidence": ["B"]}), "evidence_reward cannot be"),
        (lambda: Guess(None, {"max_trajectory_tokens": 9}).trials([{}]), "no episode ends at its token budget"),
        (lambda: Guess(policy()[1], {"chat_template_kwargs": {"think": 1}}), "the chat template does not use 'think'"),
        (lambda: trainer(eval_dataset=Dataset.from_list([{"task_data": {}}])), "only when trainer.evaluate()"),
    ],
)
def test_what_has_no_effect_is_warned_of(
    act: Callable[[], Any], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_key.cache_clear()
    warn_once.cache_clear()
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
