"""A curriculum keeps win rates between its bounds, and draws the same on every rank and after a resume."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from games import GuessNumber, logged, trainer_of

from agentsgym import ConfigError, Curriculum

pytestmark = pytest.mark.filterwarnings("default")


@dataclass
class Outcome:
    """What a curriculum reads of a rollout."""

    success: bool | None
    failed: bool = False


def rows_of(levels: list[Any], num_each: int = 3) -> list[dict[str, Any]]:
    return [{"task_data": {"level": level, "seed": seed}} for level in levels for seed in range(num_each)]


def play(curriculum: Curriculum, rows: list[dict[str, Any]], chances: dict[Any, float], *, batches: int) -> list[float]:
    """Draw batches of 16 task groups with 4 rollouts each, won with known chances; the win rate of each batch."""
    luck, rates = random.Random(0), list[float]()
    for batch in range(batches):
        drawn = [rows[curriculum.draw(7, "train", batch, group)] for group in range(16) for _ in range(4)]
        outcomes = [Outcome(luck.random() < chances[row["task_data"]["level"]]) for row in drawn]
        curriculum.record(drawn, outcomes)  # type: ignore[arg-type]
        rates.append(mean(outcome.success or 0 for outcome in outcomes))
    return rates


CHANCES = [
    pytest.param({level: max(0.0, 1.0 - 0.1 * level) for level in range(20)}, id="numbers"),
    pytest.param({f"kind {k}": k / 9 for k in range(10)}, id="names"),
    pytest.param({1: 1.0, 2: 0.0}, id="nothing within"),
    pytest.param({1: 0.97, 2: 0.5, 3: 0.0, 4: 0.0, 5: 0.0, 6: 0.0}, id="mostly too hard"),
]


@pytest.mark.parametrize("chances", CHANCES)
def test_win_rates_stay_within_the_bounds(chances: dict[Any, float]) -> None:
    rows = rows_of(list(chances))
    curriculum = Curriculum("level", low=0.25, high=0.75)
    curriculum.bind(rows)
    rates = play(curriculum, rows, chances, batches=60)
    settled = rates[10:]
    assert 0.25 <= mean(settled) <= 0.75
    within = [0.25 <= rate <= 0.75 for rate in settled]
    assert mean(within) >= 0.9  # 64 rollouts a batch, a tenth of the groups from anywhere


def test_without_a_curriculum_these_win_rates_are_outside() -> None:
    rows = rows_of(list(range(20)))
    curriculum = Curriculum("level", low=0.25, high=0.75, explore=1.0)  # draws from all alike
    curriculum.bind(rows)
    chances = {level: float(level < 2) for level in range(20)}
    assert mean(play(curriculum, rows, chances, batches=40)) < 0.2


def test_the_levels_move_on_as_the_policy_learns() -> None:
    rows = rows_of(list(range(10)))
    curriculum = Curriculum("level", explore=0.1, window=32)
    curriculum.bind(rows)
    play(curriculum, rows, {level: 1.0 if level < 2 else 0.5 if level < 4 else 0.0 for level in range(10)}, batches=30)
    assert set(curriculum.eligible()) == {2, 3}
    later = {level: 1.0 if level < 6 else 0.5 if level < 8 else 0.0 for level in range(10)}
    rates = play(curriculum, rows, later, batches=80)
    assert set(curriculum.eligible()) == {6, 7}
    assert 0.2 <= mean(rates[-30:]) <= 0.8


def test_a_harder_number_waits_until_the_easier_one_is_not_too_hard() -> None:
    rows = rows_of([1, 2, 3])
    curriculum = Curriculum("level", min_results=4)
    curriculum.bind(rows)
    assert curriculum.eligible() == [1]
    curriculum.record([rows[0]] * 4, [Outcome(False)] * 4)  # type: ignore[arg-type]
    assert curriculum.eligible() == [1]  # too hard, and nothing is easier
    curriculum.record([rows[0]] * 2, [Outcome(True)] * 2)  # type: ignore[arg-type]
    assert curriculum.eligible() == [1, 2]


def test_equal_results_give_equal_draws_also_after_a_way_through_json() -> None:
    rows = rows_of(["easy", "hard"])
    one, other = Curriculum("level"), Curriculum("level")
    for curriculum in (one, other):
        curriculum.bind(rows)
    play(one, rows, {"easy": 0.9, "hard": 0.1}, batches=5)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.win_rates == one.win_rates
    assert [one.draw(3, group) for group in range(50)] == [other.draw(3, group) for group in range(50)]
    one.reset()
    assert not one.win_rates


def test_failed_rollouts_count_for_nothing_and_an_environment_must_name_what_is_won() -> None:
    rows = rows_of([1])
    curriculum = Curriculum("level", min_results=1, window=3)
    curriculum.bind(rows)
    curriculum.record(rows[:1], [Outcome(None, failed=True)])  # type: ignore[arg-type]
    assert not curriculum.win_rates
    curriculum.record(rows[:2], [Outcome(None), Outcome(True)])  # type: ignore[arg-type]
    assert curriculum.win_rates == {1: 0.5}
    with pytest.raises(ConfigError, match="none of the last 3 rollouts had info"):
        curriculum.record(rows[:3], [Outcome(None)] * 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"low": 0.8, "high": 0.2}, "low must be below its high"),
        ({"low": -1}, "low must be a number in"),
        ({"explore": 2}, "explore must be a number in"),
        ({"window": 0}, "window must be a positive int"),
        ({"window": 4, "min_results": 5}, "min_results must be at most window"),
        ({"level": 3}, "level must be a name or a function"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Curriculum(**{"level": "level", **settings})


def test_rows_without_a_level_and_streams_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"row 0 has no column or task_data key 'levle'.*; did you mean 'level'"):
        Curriculum("levle").bind(rows_of([1]))
    with pytest.raises(ConfigError, match="a level must be a string, a finite number or a bool"):
        Curriculum(lambda row: [row]).bind(rows_of([1]))
    with pytest.raises(
        ConfigError, match="row 0 has the level nan: a level must be a string, a finite number or a bool"
    ):
        Curriculum(lambda row: float("nan")).bind(rows_of([1]))
    with pytest.raises(ConfigError, match="random access, not an IterableDataset"):
        Curriculum("level").bind(IterableDataset.from_generator(lambda: iter(rows_of([1]))))


def dataset() -> Dataset:
    """Secrets that a policy of random weights hits equally often, and one that nobody can express: 9."""
    secrets = [0, 9, 9, 9, 9, 9, 9, 9]
    return Dataset.from_list([{"task_data": {"secret": secret, "seed": i}} for i, secret in enumerate(secrets)])


def curriculum_of(window: int = 32) -> Curriculum:
    return Curriculum(lambda row: f"secret {row['task_data']['secret']}", low=0.02, high=0.98, window=window)


def played(folder: Path, **changes: Any) -> tuple[Any, list[int]]:
    """A trainer with a curriculum, and the secrets that it played."""
    secrets: list[int] = []

    class Watched(GuessNumber):
        def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
            secrets.append(task_data["secret"])
            return super()._initialize_episode(session_id, task_data)

    own = {"curriculum": curriculum_of(), "max_steps": 6, "learning_rate": 0.0, **changes}
    trainer = trainer_of(folder, dataset=dataset(), env_class=Watched, **own)
    return trainer, secrets


def test_a_training_plays_the_tasks_that_the_curriculum_draws(tmp_path: Path) -> None:
    trainer, secrets = played(tmp_path)
    trainer.train()
    assert len(secrets) == 6 * 8
    assert secrets[:4] == [secrets[0]] * 4  # a task group is one task
    known = trainer.curriculum.win_rates
    assert known["secret 9"] == 0.0
    assert trainer.curriculum.eligible() == ["secret 0"]
    assert secrets[-16:].count(0) >= 8  # of the rows it is one in eight
    assert logged(trainer, "curriculum/levels_known")[-1] == 1.0


def test_a_resumed_training_draws_as_one_that_was_never_interrupted(tmp_path: Path) -> None:
    whole, secrets = played(tmp_path / "whole", save_strategy="steps", save_steps=3)
    whole.train()
    resumed, later = played(tmp_path / "whole")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert later == secrets[24:]
    assert resumed.curriculum.state_dict() == whole.curriculum.state_dict()
    other, _ = played(tmp_path / "whole", curriculum=curriculum_of(window=16))
    with pytest.raises(ConfigError, match="belongs to a curriculum with"):
        other.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    without, _ = played(tmp_path / "whole", curriculum=None)
    with pytest.raises(ConfigError, match="was saved with a curriculum"):
        without.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))


def test_groups_that_are_played_again_are_drawn_by_the_curriculum_too(tmp_path: Path) -> None:
    trainer, secrets = played(tmp_path, zero_variance_groups="resample", max_steps=4)
    trainer.train()
    counted = sum(len(results) for _, results in trainer.curriculum.state_dict()["results"])
    assert len(secrets) > 4 * 8
    assert counted == min(32, secrets.count(0)) + min(32, secrets.count(9))
