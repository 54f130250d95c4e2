"""A configuration is read whole before anything is played; what is wrong in it is named with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentsgym import ConfigError
from agentsgym.envs.PriceList import PriceListEnv
from agentsgym.recipes.from_values import imitation_values, model_settings, training_settings
from agentsgym.recipes.recipe import read_recipe

pytestmark = pytest.mark.filterwarnings("default")  # TRL is imported

FILE = """\
environments:
  - class: PriceList
    env_config: {max_price: 5}
  - class: games.py:Mine
    weight: 3
warm_start:
  player: random
training:
  learning_rate: 1e-3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(FILE)
    return path


def test_a_file_is_read_with_the_defaults_of_what_it_does_not_state(file: Path) -> None:
    recipe = read_recipe(file)
    assert [part.class_ for part in recipe.environments] == ["PriceList", "games.py:Mine"]
    assert [part.weight for part in recipe.environments] == [1.0, 3]
    assert (recipe.model, recipe.evaluation.num_tasks, recipe.evaluation.num_rollouts) == ("tiny", 200, 1)
    assert recipe.warm_start is not None
    assert (recipe.warm_start.from_store, recipe.warm_start.max_steps) == (False, 300)
    assert (recipe.folder, recipe.name) == (file.parent, "mine")


def test_plain_values_may_hold_a_class() -> None:
    assert read_recipe({"environments": [{"class": PriceListEnv}]}).environments[0].class_ is PriceListEnv


def test_overrides_replace_values_by_their_place(file: Path) -> None:
    recipe = read_recipe(
        file,
        {
            "environments.1.weight": 2,
            "environments[0].env_config.max_price": 9,
            "warm_start": None,
            "tiny.num_layers": 1,
        },
    )
    assert recipe.environments[1].weight == 2
    assert recipe.environments[0].env_config == {"max_price": 9}
    assert recipe.warm_start is None
    assert recipe.tiny == {"num_layers": 1}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("weight: 3", "wieght: 3", r"mine.yaml, line 5: environments\[1\].wieght is unknown; did you mean 'weight'\?"),
        ("weight: 3", "weight: 0", r"line 5: environments\[1\].weight must be a number above 0, got 0"),
        ("class: PriceList", "label: x", r"line 2: environments\[0\] has no 'class'"),
        ("player: random", "noise: 0.5", r"line 6: warm_start has no 'player'"),
        (
            "player: random",
            "{player: random, noise: 2}",
            r"line 7: warm_start.noise must be a number in \[0, 1\], got 2",
        ),
        (
            "player: random",
            "{player: random, filters: {success: true}}",
            "warm_start.filters are only valid with the folder",
        ),
        ("training:", "trainig:", "line 8: trainig is unknown; did you mean 'training'"),
        ("environments:", "environment:", "has no 'environments'"),
        ("warm_start:", "folder: x\nwarm_start:", "line 6: folder cannot be set in a file"),
        ("weight: 3", "weight: [", "mine.yaml cannot be read as YAML"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(old: str, new: str, message: str, file: Path) -> None:
    file.write_text(FILE.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        read_recipe(file)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"environments.1.weight": "x"}, r"mine.yaml: environments\[1\].weight must be a number above 0, got 'x'"),
        ({"environments.2.weight": 1}, r"environments\[2\] cannot be set: the list has 2 items"),
        ({"max_steps": 3}, r"max_steps is unknown here; did you mean 'training\.max_steps'\?"),
        ({"num_rollouts": 3}, r"num_rollouts is unknown here; did you mean 'evaluation\.num_rollouts'\?"),
        ({"warm_start.player.name": 1}, "warm_start.player is not a mapping, so 'name' cannot be set"),
    ],
)
def test_an_override_that_fits_nowhere_is_named_without_a_line(
    overrides: dict[str, Any], message: str, file: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_recipe(file, overrides)


def test_a_file_that_is_not_there_or_holds_no_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recipe(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="the configuration must be a mapping"):
        read_recipe(tmp_path / "list.yaml")


def test_a_number_that_yaml_takes_for_a_text_is_one(tmp_path: Path) -> None:
    values = {"learning_rate": "1e-3", "discount": "9e-1", "truncated_rollouts": "1e-1", "use_cpu": True}
    args = training_settings(values, output_dir=str(tmp_path))
    assert (args.learning_rate, args.logging_steps, args.save_strategy) == (1e-3, 20, "no")
    assert (args.discount, args.truncation_penalty) == (0.9, 0.1)


def test_an_argument_of_the_pool_is_set_by_its_place(file: Path, tmp_path: Path) -> None:
    recipe = read_recipe(file, {"training.env_pool": "threads", "training.env_pool_kwargs.num_workers": 2})
    pool = training_settings({"use_cpu": True, **recipe.training}, output_dir=str(tmp_path)).make_env_pool()
    assert pool is not None
    assert pool.num_workers == 2


@pytest.mark.parametrize(("given", "folder"), [(True, "out/rollouts"), (False, None), ("games", "games"), (None, None)])
def test_the_store_of_a_run_is_given_as_in_python(given: Any, folder: str | None) -> None:
    args = training_settings({"store_rollouts": given, "use_cpu": True}, output_dir="out")
    assert args.rollout_folder == (None if folder is None else Path(folder))


def test_sharding_is_switched_on_as_in_python(tmp_path: Path) -> None:
    for given, kept in ((True, True), (False, False), (None, None)):
        args = training_settings({"fsdp": given, "use_cpu": True}, output_dir=str(tmp_path))
        assert args.fsdp is kept
    with pytest.raises(ConfigError, match="fsdp must be true or false or a string or null, got 2"):
        training_settings({"fsdp": 2}, output_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_stepps": 1}, "max_stepps is unknown; did you mean 'max_steps'"),
        ({"fork_budget": 9}, "fork_budget is unknown: training no longer forks rollouts .*; leave fork_budget out$"),
        ({"fork_kwargs": {"width": 2}}, "fork_kwargs is unknown: .*; leave fork_kwargs out$"),
        ({"advantage_estimator": "tree"}, "got 'tree': training no longer forks .*; use 'return_to_go' or 'mt_grpo'$"),
        ({"max_steps": "ten"}, "max_steps must be a whole number, got 'ten'"),
        ({"learning_rate": "fast"}, "learning_rate must be a number, got 'fast'"),
        ({"discount": 2.0}, r"discount must be a number in \[0, 1\]"),
        ({"truncated_rollouts": -1}, "truncated_rollouts must be 'keep', 'mask' or a penalty .*, got -1"),
        ({"layout": "turns"}, "layout must be one of 'trajectory', 'turn', got 'turns'"),
        ({"turn_timeout_s": "ten"}, "turn_timeout_s must be a positive number or None, got 'ten'"),
        ({"per_device_train_batch_size": 3, "num_generations": 2}, "num_generations"),
    ],
)
def test_settings_of_training_that_are_not_valid(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        training_settings({"use_cpu": True, **values}, output_dir=str(tmp_path))


def test_a_key_that_stands_twice_is_refused_and_one_that_replaces_a_merged_one_is_not(file: Path) -> None:
    file.write_text(FILE + "  max_steps: 3\n  learning_rate: 1e-4\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml .*line 11 repeats the key 'learning_rate' of line 9"):
        read_recipe(file)
    file.write_text(FILE + "warm_start: {player: reference}\n")
    with pytest.raises(ConfigError, match=r"line 10 repeats the key 'warm_start' of line 6"):
        read_recipe(file)
    file.write_text("environments:\n- &one {class: PriceList, weight: 2}\n- {<<: *one, weight: 3, label: more}\n")
    assert [part.weight for part in read_recipe(file).environments] == [2, 3]


def test_keys_that_are_no_texts_are_named(file: Path) -> None:
    file.write_text(FILE + "3: x\n")
    with pytest.raises(ConfigError, match=r"must have strings as keys, got 3"):
        read_recipe(file)


def test_the_recipe_of_make_demo_real_is_valid(tmp_path: Path) -> None:
    recipe = read_recipe(Path(__file__).parents[2] / "examples" / "smollm2.yaml")
    args = training_settings(recipe.training, output_dir=str(tmp_path))
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 32
    assert recipe.warm_start is not None
    assert imitation_values(recipe.warm_start.settings)["learning_rate"] == 5e-4
    assert model_settings(recipe.model_settings).use_peft
