"""A configuration is a whole run: of one environment or several, from games or stored rollouts, on one rank or two."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import recipe_ranks
import yaml
from launch import launch
from transformers import AutoModelForCausalLM

import agentsgym
from agentsgym import ConfigError, LearningCurve, PolicyAgent, RolloutStore, TrainingRun, evaluate, tiny_policy
from agentsgym.envs import PriceListEnv, TwentyQuestionsEnv
from agentsgym.envs.PriceList import ReferencePlayer
from agentsgym.envs.TwentyQuestions import ImitationPlayer
from agentsgym.evaluation.compare import compare
from agentsgym.recipes import run as run_module
from agentsgym.recipes.train import prepare
from agentsgym.recipes.warm_start import play_demonstrations, stored_demonstrations
from agentsgym.reports.plots import curve_of

pytestmark = pytest.mark.filterwarnings("default")  # TRL trains

GAME: dict[str, Any] = {
    "class": "TwentyQuestions",
    "env_config": {"objects": ["cat", "clock"], "max_steps_per_episode": 2, "system_prompt": ""},
    "dataset": {"split": "all"},
}
PRICES: dict[str, Any] = {
    "class": "PriceList",
    "env_config": {"kinds": ["price"], "max_steps_per_episode": 2, "system_prompt": ""},
}


def recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run of seconds."""
    training = {
        "output_dir": str(folder / "out"),
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_turn_tokens": 8,
    }
    return {
        "environments": [GAME],
        "tiny": {"hidden_size": 16, "num_layers": 1, "num_heads": 2},
        "warm_start": {"player": "imitation", "num_episodes": 8, "max_steps": 2},
        "training": training,
        "evaluation": {"num_tasks": 4, "num_rollouts": 2},
        **changes,
    }


def test_a_run_of_one_environment_writes_everything(tmp_path: Path) -> None:
    run = agentsgym.train(recipe(tmp_path))
    assert list(run.evaluations) == ["random", "reference", "before", "after"]
    assert [one.num_episodes for one in run.evaluations.values()] == [4, 4, 8, 8]
    assert {path.name for path in run.output.iterdir()} == {
        "model", "summary.json", "learning_curve.png", "transcripts_before.txt", "transcripts_after.txt",
    }  # fmt: skip
    summary = json.loads((run.output / "summary.json").read_text())
    assert summary["configuration"]["environments"][0]["class"] == "TwentyQuestions"
    assert summary["after"]["num_episodes"] == 8
    saved = AutoModelForCausalLM.from_pretrained(run.output / "model").state_dict()
    assert all(saved[name].equal(tensor) for name, tensor in run.model.state_dict().items())


def test_equal_configurations_give_equal_games(tmp_path: Path) -> None:
    one, other = (agentsgym.train(recipe(tmp_path / name)) for name in ("one", "other"))
    first, second = ([game.token_ids for game in run.evaluations["after"].trajectories] for run in (one, other))
    assert first == second


def test_the_demonstrations_of_the_warm_start_may_be_imitated_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[Any] = []
    learn = TrainingRun.learn
    monkeypatch.setattr(TrainingRun, "learn", lambda *given, **more: states.append(learn(*given, **more)))
    values = recipe(tmp_path)
    values["training"] |= {"logging_steps": 1, "learning_rate": 0.05, "max_steps": 4}
    values["warm_start"] |= {"weight": 2.0, "settings": {"use_cpu": True}}
    agentsgym.train(values)
    losses = [log["demonstration_loss"] for log in states[0].log_history if "demonstration_loss" in log]
    assert losses[-1] < losses[0]


def test_the_warm_start_trains_adapters_if_the_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[set[str]] = []

    def imitate(model: Any, demonstrations: Any, tokenizer: Any, config: Any, **options: Any) -> Any:
        assert config.learning_rate == 5e-4
        trained.append({name for name, weight in model.named_parameters() if weight.requires_grad})
        return agentsgym.imitate(model, demonstrations, tokenizer, config, **options)

    monkeypatch.setattr(run_module, "imitate", imitate)
    for part in tiny_policy(TwentyQuestionsEnv(None, GAME["env_config"]), hidden_size=16, num_layers=1, num_heads=2):
        part.save_pretrained(tmp_path / "pretrained")
    adapters = {"use_peft": True, "lora_r": 2, "lora_target_modules": "all-linear"}
    changes = {"model": str(tmp_path / "pretrained"), "tiny": {}, "model_settings": adapters}
    values = recipe(tmp_path, **changes)
    values["warm_start"] |= {"settings": {"learning_rate": "5e-4"}}  # as YAML reads it
    run = agentsgym.train(values)
    assert list(run.evaluations) == ["random", "reference", "untrained", "before", "after"]
    assert all("lora_" in name for name in trained[0])
    assert not any("lora_" in name for name in run.model.state_dict())
    saved = AutoModelForCausalLM.from_pretrained(run.output / "model").state_dict()
    assert all(saved[name].equal(tensor) for name, tensor in run.model.state_dict().items())


@pytest.mark.parametrize("stopped", ["before", "after"])
def test_ctrl_c_in_an_evaluation_leaves_what_was_found_before_it(
    stopped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = TrainingRun.evaluate

    def evaluate_until(run: TrainingRun, name: str, *args: Any, **options: Any) -> Any:
        if name == stopped:
            raise KeyboardInterrupt
        return play(run, name, *args, **options)

    monkeypatch.setattr(TrainingRun, "evaluate", evaluate_until)
    with pytest.raises(KeyboardInterrupt):
        agentsgym.train(recipe(tmp_path))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["interrupted"]
    names = ["random", "reference", "before", "after"]
    assert [name for name in names if name in summary] == names[: names.index(stopped)]
    assert (tmp_path / "out" / "transcripts_before.txt").exists() == (stopped == "after")
    assert (tmp_path / "out" / "model").is_dir()


def test_what_a_run_would_fail_on_at_its_end_is_named_at_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    training = recipe(tmp_path)["training"]
    for changes, output in (
        (
            {"output_dir": str(tmp_path / "file" / "out")},
            r"training\.output_dir must be a folder, but .*file is a file",
        ),
        ({"resume_from_checkpoint": str(tmp_path / "none")}, r"resume_from_checkpoint must be a folder, auto or true"),
        ({"resume_from_checkpoint": True}, r"resume_from_checkpoint is true, but .* has no checkpoint"),
    ):
        with pytest.raises(ConfigError, match=output):
            prepare(recipe(tmp_path, training={**training, **changes}))
    assert prepare(recipe(tmp_path, training={**training, "resume_from_checkpoint": "auto"})).run
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_several_environments_are_trained_on_by_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [{**GAME, "label": "words"}, {**PRICES, "weight": 3}]
    lines: list[dict[str, Any]] = []
    drawn = LearningCurve.__init__

    def noted(self: LearningCurve, *args: Any, references: Any = None, **options: Any) -> None:
        lines.append(references)
        drawn(self, *args, references=references, **options)

    monkeypatch.setattr(LearningCurve, "__init__", noted)
    run = agentsgym.train(recipe(tmp_path, environments=parts))
    for name in ("random", "reference"):  # as one player, over all environments
        rates = [run.evaluations[f"{name}, {label}"].win_rate for label in ("words", "PriceList")]
        assert lines[0][name].mean == sum(rate.mean for rate in rates if rate) / 2
    assert list(run.evaluations) == [
        "random, words", "reference, words", "random, PriceList", "reference, PriceList", "before", "after",
    ]  # fmt: skip
    assert {name: part.num_episodes for name, part in run.evaluations["after"].by_environment.items()} == {
        "words": 8,
        "PriceList": 8,
    }


def test_stored_texts_are_encoded_anew_to_be_imitated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = GAME["env_config"]
    env = TwentyQuestionsEnv(None, config)
    tasks = [{"solution": name, "seed": 1} for name in config["objects"]]
    evaluate(env, ImitationPlayer(env, seed=0), tasks, 4, store=tmp_path / "texts")
    _, tokenizer = tiny_policy(env, hidden_size=16, num_layers=1, num_heads=2)
    with caplog.at_level("WARNING"):
        lessons = stored_demonstrations(tokenizer, RolloutStore(tmp_path / "texts"))
    assert "8 of 8 rollouts to imitate were recorded with another tokenizer" in caplog.text
    # exactly what the same games are where they are played with this tokenizer
    with_tokens = TwentyQuestionsEnv(tokenizer, config)
    played = with_tokens.rollout(tasks, ImitationPlayer(with_tokens, seed=0), 4)
    assert [one.messages for one in lessons] == [one.messages for one in played]
    for lesson, same in zip(lessons, played, strict=True):
        assert lesson.token_ids == same.token_ids[: len(lesson.token_ids)]
        assert [(one.start, one.stop) for one in lesson.turns] == [(one.start, one.stop) for one in same.turns]
        assert not lesson.exact
    warm_start = {"player": str(tmp_path / "texts"), "max_steps": 2, "settings": {"use_cpu": True}}
    run = agentsgym.train(recipe(tmp_path, warm_start=warm_start))
    assert "warm start" in run.phases.seconds


def test_calls_of_tools_are_not_encoded_anew(tmp_path: Path) -> None:
    env = PriceListEnv(None, PRICES["env_config"])
    evaluate(env, ReferencePlayer(env, seed=0), env.tasks(2, seed=0, part="train"), store=tmp_path / "calls")
    warm_start = {"player": str(tmp_path / "calls"), "max_steps": 2}
    with pytest.raises(ConfigError, match=r"cannot be re-encoded: rollouts with tool calls"):
        agentsgym.train(recipe(tmp_path, warm_start=warm_start, environments=[PRICES]))


def test_stored_rollouts_are_imitated_where_they_are_of_this_tokenizer(tmp_path: Path) -> None:
    config, sizes = GAME["env_config"], {"hidden_size": 16, "num_layers": 1, "num_heads": 2}
    model, tokenizer = tiny_policy(TwentyQuestionsEnv(None, config), **sizes)
    env = TwentyQuestionsEnv(tokenizer, config)
    tasks = [{"solution": name} for name in config["objects"]]
    agent = PolicyAgent(model, tokenizer, max_turn_tokens=8)
    evaluate(env, agent, tasks, 4, store=tmp_path / "games")
    assert len(RolloutStore(tmp_path / "games")) == 8
    warm_start = {
        "player": str(tmp_path / "games"), "filters": {"final_reward": {"max": 5}}, "max_steps": 2,
        "settings": {"use_cpu": True},
    }  # fmt: skip
    run = agentsgym.train(recipe(tmp_path, warm_start=warm_start))
    assert "warm start" in run.phases.seconds
    assert "demonstrations" not in run.phases.seconds
    with pytest.raises(ConfigError, match="its filters match none of"):
        agentsgym.train(recipe(tmp_path, warm_start={**warm_start, "filters": {"final_reward": {"min": 5}}}))
    with pytest.raises(ConfigError, match=r"warm_start\.filters cannot be used: .*finl_reward.*final_reward"):
        agentsgym.train(recipe(tmp_path, warm_start={**warm_start, "filters": {"finl_reward": 1}}))
    other = {**GAME, "env_config": {**config, "objects": ["dog", "apple"]}}
    with pytest.raises(ConfigError, match=r"warm_start\.player has .* the tokenizer cannot encode part"):
        agentsgym.train(recipe(tmp_path / "other", warm_start=warm_start, environments=[other]))


SELF_PLAY: dict[str, Any] = {
    "class": "TextArena:TicTacToe-v0",
    "env_config": {"opponent": "self", "system_prompt": "", "max_steps_per_episode": 9},
}


@pytest.mark.parametrize("several", [False, True])
def test_self_play_is_evaluated_against_another_opponent(tmp_path: Path, *, several: bool) -> None:
    parts = [SELF_PLAY, {**SELF_PLAY, "label": "again"}] if several else [SELF_PLAY]
    evaluation = {"num_tasks": 2, "num_rollouts": 1, "env_config": {"opponent": "random"}}
    run = agentsgym.train(recipe(tmp_path, environments=parts, evaluation=evaluation, warm_start=None))
    for name in ("before", "after"):  # against itself the policy has both seats in every rollout
        assert all(len(set(one.roles)) == 1 for one in run.evaluations[name].trajectories)
    alone = prepare(recipe(tmp_path / "alone", environments=[SELF_PLAY], evaluation=evaluation, warm_start=None))
    assert alone.env is not None
    assert alone.eval_env is not None
    assert (alone.env.env_config["opponent"], alone.eval_env.env_config["opponent"]) == ("self", "random")


def test_the_number_of_steps_changes_neither_tasks_nor_demonstrations(tmp_path: Path) -> None:
    runs = [
        prepare(recipe(tmp_path, training={**recipe(tmp_path)["training"], "max_steps": steps}, num_train_tasks=50))
        for steps in (2, 6, 500)
    ]
    [tasks] = {str(one.worlds.train) for one in runs}
    assert tasks.count("'seed'") == 50
    assert all(one.run.tokenizer.get_vocab() == runs[0].run.tokenizer.get_vocab() for one in runs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"environments": [GAME, PRICES], "evaluation": {"env_config": {"opponent": "random"}}},
            r"evaluation\.env_config cannot be used for 'TwentyQuestions': .*opponent",
        ),
        ({"evaluation": {"env_config": "random"}}, r"evaluation\.env_config must be a mapping"),
        ({"environments": [{"class": "TwentyQestions"}]}, r"environments\[0\] cannot be used: .*did you mean TwentyQ"),
        ({"environments": [{**GAME, "dataset": {"splitt": "all"}}]}, r"environments\[0\] cannot be used: .*splitt"),
        ({"warm_start": {"player": "nowhere"}}, r"warm_start\.player must be random, reference, imitation, or"),
        (
            {"environments": [{"class": "Gymnasium:Taxi-v4"}]},
            r"warm_start\.player cannot be 'imitation': .* no demonstrator",
        ),
        ({"model": "no/such/folder", "tiny": {}}, r"model is invalid: no model can be loaded from 'no/such/folder'"),
        ({"model": "smolm2", "tiny": {}}, r"can be loaded from 'smolm2' \(no such folder; did you mean 'smollm2'"),
        ({"training": {"save_strategy": False}}, r"training\.save_strategy must be a name, but YAML reads no"),
        ({"training": {"max_steps": 16**70}}, r"training\.max_steps must be a number of at most 63 bits"),
        ({"evaluation": {"num_tasks": 16**70}}, r"evaluation\.num_tasks must be a positive int"),
        ({"num_train_tasks": 16**70}, r"num_train_tasks must be a positive int"),
        ({"tiny": {"num_layers": 16**70}}, r"tiny\.num_layers must be a whole number"),
        ({"environments": [{**GAME, "dataset": {"size": 16**70}}]}, r"size must be a positive int"),
        (
            {"environments": [{**GAME, "env_config": {"max_steps_per_episode": 16**70}}]},
            r"env_config\['max_steps_per_episode'\] must be a positive int",
        ),
        ({"training": {"output_dir": "$HOME/x"}}, r"training\.output_dir must be a folder without ~ or variables"),
        ({"tiny": {"width": 3}}, r"tiny\.width is unknown"),
        ({"training": {"max_stepps": 3}}, r"training\.max_stepps is unknown; did you mean 'max_steps'"),
        (
            {"warm_start": {"player": "random", "settings": {"learning_rat": 3}}},
            r"warm_start\.settings\.learning_rat is",
        ),
        ({"tiny": {"hiden_size": 16}}, r"tiny\.hiden_size is unknown; did you mean 'hidden_size'"),
        ({"tiny": {"num_layers": "two"}}, r"tiny\.num_layers must be a whole number, got 'two'"),
        ({"model_settings": {"load_in_4bit": True}}, "load_in_4bit requires use_peft"),
        ({"model_settings": {"load_in_8bit": True}}, "load_in_8bit is not supported: use load_in_4bit"),
        (
            {"model_settings": {"load_in_4bit": True, "use_peft": True}},
            "load_in_4bit cannot be combined with the model 'tiny'",
        ),
    ],
)
def test_what_cannot_be_used_is_named_before_anything_is_played(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        agentsgym.train(recipe(tmp_path, **changes))
    assert not (tmp_path / "out").exists()


def test_a_missing_vllm_is_named_before_anything_is_played(tmp_path: Path) -> None:
    with pytest.raises(agentsgym.MissingDependencyError, match=r"'vllm' is not installed.*'agentsgym\[vllm\]'"):
        agentsgym.train(recipe(tmp_path, training={**recipe(tmp_path)["training"], "use_vllm": True}))
    assert not (tmp_path / "out").exists()


def test_on_two_ranks_the_first_writes_and_both_end_with_one_policy(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(recipe(tmp_path)))
    config = Path(__file__).parents[2] / "examples" / "launch" / "accelerate" / "ddp.yaml"
    done = launch(Path(recipe_ranks.__file__), tmp_path, config=config)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert (first["is_main"], second["is_main"]) == (True, False)
    assert (first["weights"], first["games"]) == (second["weights"], second["games"])
    bars = [line for line in done.stderr.replace("\r", "\n").splitlines() if line.startswith("after: 100%")]
    assert len(set(bars)) == 1
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["after"]["num_episodes"] == 8


def test_the_file_of_the_page_can_be_run_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "tools.yaml").write_text(block)
    monkeypatch.chdir(tmp_path)
    course = prepare(tmp_path / "tools.yaml")
    [world] = course.worlds
    assert (world.label, len(course.worlds.eval["PriceList"]), len(course.worlds.train["PriceList"])) == (
        "PriceList", 600, 10_000,
    )  # fmt: skip
    assert course.run.args.learning_rate == 3e-4
    assert list(tmp_path.iterdir()) == [tmp_path / "tools.yaml"]


def test_the_mixture_of_the_page_can_be_run_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "mixing.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "mixed.yaml").write_text(block)
    monkeypatch.chdir(tmp_path)
    course = prepare(tmp_path / "mixed.yaml")
    assert [world.label for world in course.worlds] == ["PriceList", "Gymnasium:FrozenLake-v1"]
    assert course.run.args.max_steps == 100


def test_noise_is_the_share_of_episodes_that_the_random_player_plays(tmp_path: Path) -> None:
    warm_start = {"player": "reference", "noise": 0.25, "num_episodes": 8, "max_steps": 1}
    course = prepare(recipe(tmp_path, warm_start=warm_start))
    assert course.recipe.warm_start is not None
    played = play_demonstrations(course.run, course.worlds, course.recipe.warm_start)
    assert len(played) == 8
    best = prepare(recipe(tmp_path, warm_start={**warm_start, "noise": 0.0}))
    assert best.recipe.warm_start is not None
    others = play_demonstrations(best.run, best.worlds, best.recipe.warm_start)
    assert all(game.success for game in others)
    assert [game.token_ids for game in played[2:]] == [game.token_ids for game in others[2:]]


@pytest.mark.parametrize("several", [False, True])
def test_before_and_after_are_kept_beside_training_and_can_be_compared(tmp_path: Path, *, several: bool) -> None:
    parts = [{**GAME, "label": "words"}, PRICES] if several else [GAME]
    given = recipe(tmp_path, environments=parts)
    run = agentsgym.train(given, overrides={"training.store_rollouts": True})
    store = RolloutStore(run.output / "rollouts")
    assert {one.run for one in store.records()} == {run.run_name}
    assert len(store.filter(source="training")) == 8
    for name, found in run.evaluations.items():
        kept = store.filter(source="evaluation", agent=name)
        assert sum(one.final_reward for one in kept) == sum(one.final_reward for one in found.trajectories)
        assert len(kept) == found.num_episodes
    steps = {(one.agent, one.step) for one in store.records() if one.source == "evaluation"}
    assert {one for one in steps if one[1] is not None} == {("before", 0), ("after", 1)}
    before, after = (store.filter(agent=name) for name in ("before", "after"))
    found = compare(before, after)
    assert len(found.tasks) == (8 if several else 4)
    curve = curve_of(store)
    after_training = run.evaluations["after"].win_rate
    assert after_training is not None
    assert [(x, one.mean) for x, one in curve.evaluations][1:] == [(8, after_training.mean)]
    assert {*curve.references} == {*run.evaluations} - {"before", "after"}


def test_a_folder_has_one_run(tmp_path: Path) -> None:
    given = recipe(tmp_path, evaluation={"num_tasks": 2}, warm_start=None)
    storing = {"training.store_rollouts": True}
    first = agentsgym.train(given, overrides=storing)
    store = first.output / "rollouts"
    rows = [(one.source, one.agent, one.step) for one in RolloutStore(store).records()]
    with pytest.raises(ConfigError, match=r"out holds a run already \(summary\.json\): .*--overwrite"):
        agentsgym.train(given, overrides=storing)
    again = agentsgym.train(given, overrides={**storing, "training.resume_from_checkpoint": "auto"})
    records = [*RolloutStore(store).records()]
    assert {one.run for one in records} == {again.run_name} == {first.run_name}
    assert sorted(map(str, rows)) == sorted(str((one.source, one.agent, one.step)) for one in records)
    assert [*store.glob("*.superseded")]
    other = agentsgym.train(given, overrides=storing, overwrite=True)
    assert {one.run for one in RolloutStore(store).records()} == {other.run_name}
    assert len(RolloutStore(tmp_path / "out.1" / "rollouts")) == len(rows)


def test_evaluations_alone_are_kept_or_left_out_as_requested(tmp_path: Path) -> None:
    run = agentsgym.train(recipe(tmp_path, evaluation={"num_tasks": 2, "store": True}))
    assert {(one.source, one.agent) for one in RolloutStore(run.output / "rollouts").records()} == {
        ("evaluation", name) for name in run.evaluations
    }
    out = recipe(tmp_path / "b", evaluation={"num_tasks": 2, "store": False})
    run = agentsgym.train(out, overrides={"training.store_rollouts": True})
    assert {one.source for one in RolloutStore(run.output / "rollouts").records()} == {"training"}
