"""More of what a new user gets wrong: values in the wrong place, rows, configurations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from test_new_mistakes import Guess, policy

import agentsgym
from agentsgym import Curriculum, GRPOEnvConfig, PolicyAgent, RolloutStore, SamplingParams, ScriptedAgent, TrainingRun
from agentsgym.envs.datasets.naming import find_env
from agentsgym.evaluation.replay import replay
from agentsgym.recipes.train import prepare
from agentsgym.reports.frames import rollouts_frame
from agentsgym.reports.html import trajectory_html

# pyright: reportArgumentType=false, reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportCallIssue=false
ONE, SOME = r"must be a rollout, such as store\[0\]", r"must be a list of rollouts, such as \[rollout\], evaluation"
ROW: Any = {"task_data": {}}
pytestmark = pytest.mark.filterwarnings("default")
Endless: Any = type("Endless", (Guess,), {"_step_episode": lambda _env, _id, state, _: (state, 1.0, False, {})})


def evaluated(**options: Any) -> Any:
    return agentsgym.evaluate(Guess(), ScriptedAgent(["4"]), [{"seed": 1}], **options)


def stored(folder: Path) -> RolloutStore:
    evaluated(store=folder)
    return RolloutStore(folder)


def trainer(row: Any = ROW, agent: Any = None, curriculum: Any = None, **given: Any) -> Any:
    model, tokenizer = policy()
    quiet: dict[str, Any] = {"output_dir": "never", "report_to": "none", "save_strategy": "no", "use_cpu": True}
    args = GRPOEnvConfig(**{**quiet, "max_steps": 1, "max_turn_tokens": 4, "per_device_train_batch_size": 8, **given})
    env, rows = Endless(tokenizer, {"max_steps_per_episode": 2}), Dataset.from_list([row])
    parts = {"agent": agent and agent(model, tokenizer), "curriculum": curriculum}
    return agentsgym.GRPOEnvTrainer(model, env, args, rows, **parts)


def played(*words: str) -> Any:
    tokenizer = agentsgym.tiny_policy(words, hidden_size=8, num_layers=1, num_heads=1)[1] if words else policy()[1]
    return Guess(tokenizer).rollout([{}], ScriptedAgent(["go"]))


def imitate(demonstrations: Any, **options: Any) -> None:
    agentsgym.imitate(policy()[0], demonstrations, policy()[1], **options)


def prepared(**parts: Any) -> Any:
    return prepare({"environments": [{"class": Guess}], "name": "never", **parts})


MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "JSON text": (lambda _: trainer({"task_data": '{"seed": 1}'}), r"a dict\), got '{\"seed\": 1}'"),
    "a level": (lambda _: trainer(curriculum=Curriculum(lambda one: one["n"])), r"row 0 has no .*'task_data'\]\['n'\]"),
    "no rows yet": (lambda _: Curriculum("seed").eligible(), "has no levels before the trainer"),
    "a list to fork": (lambda _: Guess().fork(played(), 0, ScriptedAgent(["4"])), ONE),
    "an environment to replay": (lambda folder: replay(Guess(), stored(folder).record(0)), ONE),
    "a store to replay": (lambda folder: replay(stored(folder), Guess()), ONE),
    "an evaluation to show": (lambda _: trajectory_html(evaluated()), ONE),
    "an evaluation as a table": (lambda _: rollouts_frame(evaluated()), SOME),
    "an evaluation to imitate": (lambda _: imitate(evaluated()), SOME),
    "an environment to audit": (lambda _: agentsgym.audit(Guess()), SOME),
    "a role to imitate": (lambda _: imitate(played(), observation_loss="user"), "must be True or False, got 'user'"),
    "another tokenizer": (lambda _: imitate(played("higher", "go")), "prompt 'go' decoded as .*higher"),
    "a filter as text": (lambda folder: stored(folder).filter("success=true"), r"as in filter\(success=True\), got"),
    "one of several": (lambda folder: stored(folder).filter(agent=["a", "b"]), "no lists, so it cannot .* a function"),
    "a column": (lambda folder: stored(folder)["agent"], r"for a column, write store.table\(\['agent'\]\)"),
    "a name without a store": (lambda _: evaluated(agent_name="me"), "agent_name requires store"),
    "a file to play": (lambda _: find_env("runs/quiz.yaml"), "is a configuration: run it with agentsgym train runs/q"),
    "no episodes": (
        lambda _: TrainingRun(policy(), GRPOEnvConfig()).write_transcripts("a"),
        "no evaluation is named 'a'",
    ),
    "noise in noise": (lambda _: prepared(warm_start={"player": "random", "noise": 0.5}), "noise cannot be .* alone"),
    "evaluations": (lambda _: prepared(training={"eval_strategy": "epoch"}).execute(), "eval_strategy must be no"),
    "too few": (lambda _: prepared(num_train_tasks=1, training={"num_generations": 4}), "num_train_tasks .* least 2"),
    "no folder": (lambda _: prepared(training={"output_dir": ""}), "output_dir must be a folder.* got ''"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_is_answered_in_a_sentence(mistake: str, tmp_path: Path) -> None:
    make, sentence = MISTAKES[mistake]
    with pytest.raises((agentsgym.AgentsGymError, TypeError), match=sentence):
        make(tmp_path)


def train(folder: Any) -> None:
    (folder / "checkpoint-3").mkdir()
    with trainer(output_dir=str(folder), observation_loss_weight={"tool": 1}) as one:
        one.train()


WITHOUT_EFFECT: list[tuple[Callable[[Any], Any], str]] = [
    (train, "checkpoint-3 is of another run: train into another folder, or continue that run"),
    (train, "weights no observation of the first batch, whose roles are ['user']"),
    (lambda _: trainer(agent=lambda *own: PolicyAgent(*own, sampling=SamplingParams(top_k=5))), "samples with top_k=5"),
    (lambda _: trainer({**ROW, "answer": "4"}), "columns that nothing reads, ['answer']"),
    (lambda folder: [stored(folder), stored(folder)], "has 1 rollouts of this evaluation by ScriptedAgent"),
    (lambda _: prepared(training={"resume_from_checkpoint": "auto"}), "no effect on runs without checkpoints"),
]


@pytest.mark.parametrize(("act", "sentence"), WITHOUT_EFFECT)
def test_what_has_no_effect_is_warned_of(act: Any, sentence: str, tmp_path: Path, caplog: Any) -> None:
    act(tmp_path)
    assert sentence in caplog.text
