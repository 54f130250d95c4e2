"""The protocols of Twenty Questions: what a name fixes, and the digest of all else that decides a score."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import ran

import agentsgym.envs.TwentyQuestions.protocols as protocols_module
from agentsgym import ConfigError, make
from agentsgym.cli.players import PlayerOptions, make_player
from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.datasets.naming import completions, find_env, known_names, name_of_env
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.envs.TwentyQuestions.knowledge import FOLDER, load_knowledge
from agentsgym.envs.TwentyQuestions.protocols import fingerprint, variants
from agentsgym.recipes.environments import Worlds
from agentsgym.recipes.recipe import Recipe, read_recipe
from agentsgym.recipes.sections import PlacedError
from benchmarks import twenty_questions

ROOT = Path(__file__).parents[3]
BENCHMARKS = ("v1", "v1-hard", "v1-small")
FINGERPRINT = "deb9eab48b61"
ON_CHANGE = (
    "facts, wordings or rules have changed. If that was an accident, undo it. If play has changed on purpose since a "
    "release, give the protocols new names (v2), since their scores cannot be compared with those of v1. In any case "
    "write the new digest here, and record the results again with `python -m benchmarks.twenty_questions`, for every "
    "agent in benchmarks/results/twenty_questions.json, and copy the printed table to docs/twenty_questions.md"
)


def secrets(name: str, split: str = "eval") -> list[str]:
    named = find_env(f"TwentyQuestions:{name}")
    make_rows = {"train": TwentyQuestionsEnv.get_train_dataset, "eval": TwentyQuestionsEnv.get_eval_dataset}[split]
    rows = make_rows(named.env_config, **named.dataset_options)
    return [row["task_data"]["solution"] for row in rows]


def test_the_facts_the_wordings_and_the_rules_are_those_of_the_version() -> None:
    assert fingerprint() == FINGERPRINT, ON_CHANGE


def test_the_recorded_results_and_the_manual_are_those_of_the_version() -> None:
    result = json.loads((twenty_questions.RESULTS / "twenty_questions.json").read_text(encoding="utf-8"))
    assert result["fingerprint"] == {"play": FINGERPRINT}
    page = (ROOT / "docs" / "twenty_questions.md").read_text(encoding="utf-8")
    rows = twenty_questions.table(result["figures"])
    assert [row for row in rows if row not in page.splitlines()] == []
    for name in BENCHMARKS:
        win_rates = {one: result["figures"][f"{name}, {one}: win_rate"] for one in ("RandomPlayer", "GreedyPlayer")}
        assert win_rates["RandomPlayer"]["high"] < win_rates["GreedyPlayer"]["low"]


def test_the_digest_changes_with_facts_words_and_code_and_not_with_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "game"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(protocols_module, "__file__", str(folder / "protocols.py"))
    expected = fingerprint()

    def changed(name: str, old: str, new: str) -> bool:
        before = (folder / name).read_bytes()
        text = before.decode()
        assert old in text
        (folder / name).write_bytes(text.replace(old, new, 1).encode())
        found = fingerprint()
        (folder / name).write_bytes(before)
        return found != expected

    assert changed("knowledge.csv", "yes", "no")
    assert changed("properties.csv", "(", "(x/")
    assert changed("wordings.csv", ";", "; x;")
    assert changed("gamemaster.py", 'UNKNOWN = "Yes."', 'UNKNOWN = "Yes!"')
    assert changed("protocols.json", '"num_rollouts": 4', '"num_rollouts": 8')
    assert not changed("gamemaster.py", '"""', '"""Other words. ')
    assert not changed("gamemaster.py", "import functools\n", "import functools  # for caches\n\n")
    assert not changed("players.py", "class RandomPlayer", "class AnyPlayer")
    assert not changed("knowledge.csv", "\n", "\r\n")
    assert fingerprint() == expected == protocols_module.fingerprint()


def test_version_1_has_150_secrets_of_the_332_that_training_never_sees() -> None:
    held_out, train = secrets("v1"), secrets("v1", "train")
    assert len({*held_out}) == len(held_out) == variants()["v1"]["evaluation"]["num_tasks"] == 150
    everyday = {name for name, known in load_knowledge().objects.items() if not known.hard}
    assert {*held_out} | {*train} == everyday
    assert not {*held_out} & {*train}


def test_the_hard_version_has_the_rarer_secrets_among_all_objects() -> None:
    known = load_knowledge().objects
    env = find_env("TwentyQuestions:v1-hard").build()
    assert isinstance(env, TwentyQuestionsEnv)
    assert env.candidates.objects == tuple(known)
    assert sorted(secrets("v1-hard")) == sorted(env.secrets) == sorted(name for name in known if known[name].hard)
    assert len(env.secrets) == variants()["v1-hard"]["evaluation"]["num_tasks"] == 151
    assert TwentyQuestionsEnv(None, {"objects": "both"}).secrets == [*known]


def test_the_small_version_has_12_secrets_also_in_training() -> None:
    assert sorted(secrets("v1-small")) == sorted(secrets("v1-small", "train"))
    assert sorted(secrets("v1-small")) == find_env("TwentyQuestions:v1-small").env_config["objects"]
    assert variants()["v1-small"]["evaluation"]["num_tasks"] == 12


def test_the_objects_of_another_benchmark_are_known() -> None:
    env = find_env("TwentyQuestions:lmrl").build()
    assert isinstance(env, TwentyQuestionsEnv)
    assert len(env.candidates.objects) == 123
    assert "lawn mower" in env.candidates.objects


@pytest.mark.parametrize("name", variants())
def test_a_variant_is_named_as_games_are(name: str) -> None:
    full = f"TwentyQuestions:{name}"
    named = find_env(full, {"reward_scheme": "win"})
    env = named.build()
    assert (env.env_config["reward_scheme"], named.name) == ("win", full)
    assert full in known_names()
    assert full in completions("TwentyQuestions:")
    path = class_path(TwentyQuestionsEnv)
    assert name_of_env(path, json.loads(json.dumps(env.env_config))) == full
    row = next(iter(TwentyQuestionsEnv.get_eval_dataset(named.env_config, **named.dataset_options)))
    assert name_of_env(row["env_class_path"], row["env_config"]) == full
    assert make(row).env_config == env.env_config
    assert ran("envs", full, "--json").json["game"]["note"] == variants()[name]["note"]
    played = ran("play", full, "--agent", "reference", "--seed", "1")
    assert played.code == 0


def test_other_settings_have_no_variants_name() -> None:
    path = class_path(TwentyQuestionsEnv)
    assert name_of_env(path, TwentyQuestionsEnv().env_config) == "TwentyQuestions"
    other = {**find_env("TwentyQuestions:v1").build().env_config, "max_steps_per_episode": 19}
    assert name_of_env(path, other) == "TwentyQuestions"


def test_nothing_is_fixed_by_a_name_without_a_colon() -> None:
    given = {"seed": float("nan")}  # which differs from itself
    assert find_env("TwentyQuestions").settings("dataset", given) == given


@pytest.mark.parametrize("key", ["max_steps_per_episode", "spelling", "style", "final_guess", "objects", "hardcore"])
def test_what_a_protocol_fixes_cannot_be_set(key: str) -> None:
    other = {"max_steps_per_episode": 30, "spelling": True, "style": "textarena", "final_guess": True}
    value = {**other, "objects": ["dog", "cat"], "hardcore": True}[key]
    with pytest.raises(ConfigError, match=rf"TwentyQuestions:v1 fixes {key} at .*, got .*: leave it out"):
        find_env("TwentyQuestions:v1", {key: value})


@pytest.mark.parametrize(
    "options",
    [
        ("-n", "10"),
        ("-k", "2"),
        ("--seed", "3"),
        ("--split", "train"),
        ("--dataset", "size=3"),
        ("--tasks", "tasks.json"),
        ("-c", "spelling=true"),
    ],
)
def test_an_evaluation_by_a_protocol_has_its_numbers(options: tuple[str, ...]) -> None:
    done = ran("eval", "TwentyQuestions:v1", "-a", "random", *options)
    assert done.code == 2
    assert "TwentyQuestions:v1 fixes" in done.words


def test_the_decoding_of_a_policy_is_the_protocols() -> None:
    player = make_player("policy:tiny", find_env("TwentyQuestions:v1-small"), PlayerOptions())
    fixed = variants()["v1-small"]["evaluation"]
    assert player.agent.sampling.temperature == fixed["temperature"]
    assert player.agent.max_turn_tokens == fixed["max_turn_tokens"]
    done = ran("eval", "TwentyQuestions:v1-small", "-a", "policy:tiny", "--temperature", "0.5")
    assert (done.code, "fixes temperature at 1.0, got 0.5" in done.words) == (2, True)


def test_results_name_the_digest_and_hold_the_columns() -> None:
    done = ran("eval", "TwentyQuestions:v1-small", "-a", "reference", "--no-references", "--json").json
    assert (done["fingerprint"], done["num_tasks"], done["num_rollouts"]) == (fingerprint(), 12, 32)
    [agent] = done["agents"]
    kinds = ("not_understood", "not_known", "invalid", "guess")
    assert {f"info/{kind}_turns" for kind in kinds} | {"info/information", "win_rate"} <= agent["results"].keys()
    shown = ran("eval", "TwentyQuestions", "-a", "reference", "-n", "2", "--no-references")
    assert f"fingerprint: {fingerprint()}" in shown.words
    assert "info/not_understood_turns" in shown.words
    assert ran("eval", "PriceList", "-a", "random", "-n", "2", "--no-references", "--json").json["fingerprint"] is None


def test_every_canonical_question_is_understood_without_spelling() -> None:
    env = find_env("TwentyQuestions:v1").build()
    state = env._initialize_episode("s", {"solution": "clock"})
    for entry in load_knowledge().properties.values():
        assert not env._step_episode("s", state, entry.question)[3].get("not_understood"), entry.question


def recipe(folder: Path, **part: Any) -> Recipe:
    training = {"output_dir": str(folder), "max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 4}
    environment = {"class": "TwentyQuestions:v1", **part}
    return read_recipe({"environments": [environment], "tiny": {}, "training": training})


@pytest.mark.filterwarnings("default")  # TRL's settings
def test_training_by_a_protocol_never_sees_its_secrets(tmp_path: Path) -> None:
    [tasks] = Worlds(recipe(tmp_path), seed=0).train.values()
    assert not {task["solution"] for task in tasks} & {*secrets("v1")}
    with pytest.raises(PlacedError, match=r"fixes eval_fraction at 0\.452, got 0\.2"):
        Worlds(recipe(tmp_path, dataset={"eval_fraction": 0.2}), seed=0)


def test_the_script_adds_rows_and_removes_what_cannot_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def recorded(*agents: str) -> dict[str, Any]:
        arguments = ["twenty_questions", *agents, "--protocols", "v1-small", "--results", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", arguments)
        twenty_questions.main()
        return json.loads(path.read_text(encoding="utf-8"))

    path = tmp_path / "twenty_questions.json"
    first = recorded("greedy=reference")
    assert first["figures"]["v1-small, greedy: win_rate"]["value"] == 1.0
    assert first["fingerprint"] == {"play": fingerprint()}
    assert "| v1-small | greedy | 100 [74, 100] | 100 [100, 100] |" in capsys.readouterr().out
    both = recorded("again=reference")
    assert both["agents"] == {"greedy": "reference", "again": "reference"}
    assert both["figures"].items() > first["figures"].items()
    path.write_text(json.dumps({**both, "fingerprint": {"play": "older"}}))
    assert recorded("again=reference")["agents"] == {"again": "reference"}
