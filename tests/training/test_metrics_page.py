"""Every key that a run logs is a metric of the registry, of which ``docs/metrics.md`` is made.

``python tests/training/test_metrics_page.py`` writes the tables of the page anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from games import GuessNumber, correcting, demonstrated, tasks, trainer_of

from agentsgym import Distillation
from agentsgym.training.metrics.registry import GROUPS, METRICS, metric_of

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
# What transformers sums up of a whole run, which its own pages report.
OF_TRANSFORMERS = {
    *("train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos"),
    *("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_loss", "eval_model_preparation_time"),
}


class Measured(GuessNumber):
    """Gives a number of its own: 4 for each rollout that it lost, and 0 for one that it won; and names its rewards."""

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        state, reward, done, info = super()._step_episode(session_id, state, action)
        return state, {"won": reward, "tries": -0.125}, done, {**info, "loss_of_mine": 4 * (not info["success"])}


RUNS: list[dict[str, Any]] = [
    {"advantage_estimator": "gigpo", "num_iterations": 2},
    {"loss_type": "cispo", "entropy_coef": 0.01},
    {"loss_type": "vespo", **correcting("token_mask")},
    {"drift_interval": 1, "zero_variance_groups": "resample", "episode_retries": 1},
    {"advantage_estimator": "turn_gae", "value_head": "shared", "observation_loss_weight": 0.1},
    {"distillation": Distillation(context=lambda _: "Higher."), "demonstrations": demonstrated()},
    {"eval_dataset": tasks(2), "eval_strategy": "steps", "eval_steps": 1, "env_class": Measured},
]
# What other tests play: roles, mixed batches, references, curricula, a reference model, mixtures of experts,
# rollouts ahead of training, leagues.
PLAYED_ELSEWHERE = {
    *(metric.name for metric in METRICS if "by_role" in metric.name or "by_environment" in metric.name),
    *(metric.name for metric in METRICS if metric.name.startswith("staleness/")),
    *("fraction_of_optimal", "curriculum/levels_known", "curriculum/levels_in_bounds", "kl", "aux_loss"),
    *("league/rating", "league/uncertainty"),
    *(metric.name for metric in METRICS if metric.name.startswith("tools/")),
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[set[str]]:
    """What each run logs."""
    logged: list[set[str]] = []
    for changes in RUNS:
        trainer = trainer_of(tmp_path_factory.mktemp("run"), **changes)
        trainer.train()
        found = {key for log in trainer.state.log_history for key in log}
        logged.append(found - OF_TRANSFORMERS - {"step"})
    return logged


def test_every_key_that_is_logged_is_listed(keys: list[set[str]]) -> None:
    assert min(map(len, keys)) > 40
    assert {key for found in keys for key in found if metric_of(key) is None} == set()


def test_every_metric_that_is_listed_is_logged(keys: list[set[str]]) -> None:
    found = {metric.name for own in keys for key in own if (metric := metric_of(key))}
    assert {metric.name for metric in METRICS} - found == PLAYED_ELSEWHERE


def test_the_numbers_of_info_are_logged_in_training_and_in_evaluations(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, eval_dataset=tasks(4), env_class=Measured)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "win_rate" in log]
    assert [log["info/loss_of_mine"] for log in logs] == pytest.approx([4 * (1 - log["win_rate"]) for log in logs])
    found = trainer.evaluate()
    assert found["eval_info/loss_of_mine"] == pytest.approx(4 * (1 - found["eval_win_rate"]))
    assert (
        found["eval_info/loss_of_mine_low"] <= found["eval_info/loss_of_mine"] <= found["eval_info/loss_of_mine_high"]
    )
    names = [metric.name for key in ("info/loss_of_mine", "eval_info/loss_of_mine_low") if (metric := metric_of(key))]
    assert names == ["info/…"] * 2


def test_a_key_belongs_to_the_metric_that_it_names() -> None:
    named = {
        "reward": "reward",
        "reward/turn_123": "reward/turn_00",
        "eval_reward/turn_01": "reward/turn_00",
        "reward/by_role/player x": "reward/by_role/…",
        "eval_easy_tasks_win_rate": "win_rate",
        "eval_easy_tasks_win_rate_low": "eval_win_rate_low",
        "eval_num_failed": "eval_num_failed",
        "eval_policy_loss": "policy_loss",
        "clip_ratio/turn_00": "clip_ratio/turn_00",
    }
    found = {key: metric_of(key) for key in named}
    assert {key: metric and metric.name for key, metric in found.items()} == named
    assert [metric_of(key) for key in ("eval_loss_of_mine", "train_runtime", "rewards", "turn_00", "")] == [None] * 5


def test_every_metric_is_of_one_group_that_there_is() -> None:
    assert {metric.group for metric in METRICS} == set(GROUPS)
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))


def with_tables(page: str) -> str:
    """The page with its tables as the registry has them now."""
    for section in dict.fromkeys(metric.section for metric in METRICS):
        page = re.sub(
            rf"(^## {section}\n(?:(?!\n## |\n\| key).)*\n)(?:\|[^\n]*\n)+",
            lambda match, section=section: match[1] + table(section),
            page,
            flags=re.MULTILINE | re.DOTALL,
        )
    groups = "".join(f"| `{name}` | {content} |\n" for name, content in GROUPS.items())
    return re.sub(r"(\| group \| content \|\n\| --- \| --- \|\n)(?:\|[^\n]*\n)+", lambda match: match[1] + groups, page)


def table(section: str) -> str:
    """The table of a section, without the columns that would answer the same in each row."""
    rows = [metric for metric in METRICS if metric.section == section]
    columns = {
        "key": [f"`{metric.name}`" for metric in rows],
        "group": [f"`{metric.group}`" for metric in rows],
        "meaning": [metric.meaning for metric in rows],
        "needs": [metric.logged for metric in rows],
    }
    shown = {name: cells for name, cells in columns.items() if len({*cells}) > 1}
    lines = [shown.keys(), ["---"] * len(shown), *zip(*shown.values(), strict=True)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def test_the_page_has_the_tables_of_the_registry() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page
    assert all(table(section) in page for section in {metric.section for metric in METRICS})
    assert all(f"| `{name}` | {content} |" in page for name, content in GROUPS.items())


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
