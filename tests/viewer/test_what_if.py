"""What-if: the trainer's own numbers where the settings are the run's, and what other settings would have given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from games import GuessNumber, settings, tasks, trainer_of

from agentsgym import ConfigError, GRPOEnvConfig, RolloutStore, Trajectory
from agentsgym.credit.assignment import AdvantageAssigner
from agentsgym.credit.settings import CreditSettings
from agentsgym.viewer.answers import Answers
from agentsgym.viewer.server import included_requests
from agentsgym.viewer.what_if import available, options_of


def trained(folder: Path, env_config: dict[str, Any] | None = None, **changes: Any) -> RolloutStore:
    trainer = trainer_of(folder, env_config=env_config, store_rollouts=True, **changes)
    trainer.train()
    trainer.close()
    return RolloutStore(folder / "rollouts")


def answers_of(store: RolloutStore, limit: int = 1000) -> Answers:
    return Answers(store, limit=limit, mode="served")


def on_tokens(trajectory: Trajectory, turns: list[Any]) -> list[float]:
    """Turn entries laid on tokens, 0.0 elsewhere."""
    laid = [0.0] * len(trajectory.token_ids)
    for turn, entry in zip(trajectory.turns, turns, strict=True):
        width = turn.stop - turn.start
        laid[turn.start : turn.stop] = entry if isinstance(entry, list) else [entry] * width
    return laid


def assert_is_stored(store: RolloutStore) -> None:
    """What-if without a word of what should be otherwise gives every stored advantage."""
    answers = answers_of(store)
    seen = 0
    for key in answers.index.groups:
        answer = answers.what_if(key, {})
        assert answer["note"] is None
        for row, turns in zip(answer["rows"], answer["advantages"], strict=True):
            record = store.record(row)
            assert record.advantages is not None
            assert on_tokens(record.trajectory, turns) == pytest.approx([*record.advantages], abs=1e-12)
            seen += 1
    assert seen == len(store)


RUNS: list[dict[str, Any]] = [
    {"advantage_estimator": "grpo"},
    {"advantage_estimator": "rloo", "scale_rewards": "none", "env_config": {"turn_credit": "final"}},
    {"advantage_estimator": "gigpo", "estimator_kwargs": {"baseline": "others", "step_weight": 0.5}, "discount": 0.9},
    {"advantage_estimator": "return_to_go", "scale_rewards": "batch", "discount": 0.5},
    {"advantage_estimator": "return_to_go", "estimator_kwargs": {"baseline": "batch"}, "scale_rewards": "none"},
    {"advantage_estimator": "rebn", "env_config": {"turn_credit": "final"}},
    {"advantage_estimator": "mt_grpo", "env_config": {"turn_credit": "spread_final"}},
    {"advantage_estimator": "reward", "env_config": {"token_credit": "last"}},
    {"advantage_estimator": "grpo", "truncated_rollouts": 0.25},
    {"advantage_estimator": "return_to_go", "truncated_rollouts": "mask", "loss_aggregation": "turn"},
    {"advantage_estimator": "grpo", "zero_variance_groups": "drop", "loss_aggregation": "constant"},
    {"advantage_estimator": "grpo", "invalid_turns": "mask", "min_group_size": 2},
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(map(str, run.values()))[:60])
def test_the_settings_of_the_run_give_the_advantages_that_it_was_trained_with(
    run: dict[str, Any], tmp_path: Path
) -> None:
    assert_is_stored(trained(tmp_path, **run))


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, {}),
        ({"truncated_rollouts": "mask"}, {"truncation": "mask"}),
        ({"truncated_rollouts": 0.25}, {"truncation": "penalize", "truncation_penalty": 0.25}),
        ({"truncated_rollouts": "1"}, {"truncation": "penalize"}),  # by one, as a record states that states nothing
        ({"estimator_kwargs": {"potential_weight": 0.5}}, {"potential_weight": 0.5}),
    ],
)
def test_a_record_keeps_the_fields_that_it_has_always_had(
    changes: dict[str, Any], kept: dict[str, Any], tmp_path: Path
) -> None:
    args = settings(tmp_path, **changes)
    written = CreditSettings.of(args, args.estimator()).as_dict()
    assert written == {"advantage_estimator": "return_to_go", "discount": 1.0, "scale_rewards": "group", **kept}
    assert CreditSettings.from_dict(written).estimator() == args.estimator()


def test_another_discount_than_that_of_a_potential_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(GuessNumber, "_score_state", lambda self, state: 0.0)
    answers = answers_of(trained(tmp_path, advantage_estimator="grpo", env_config={"state_scores": "potential"}))
    key, requested = next(iter(answers.index.groups)), {"estimator": "return_to_go", "scale": "none"}
    answers.what_if(key, requested)
    with pytest.raises(ConfigError, match=r"'score_discount'\] = 1.0 must be .* which is 0.5"):
        answers.what_if(key, {**requested, "discount": "0.5"})


def test_rollouts_that_failed_are_left_out_as_in_training(tmp_path: Path) -> None:
    dataset = tasks(8, fears="six")
    store = trained(tmp_path, dataset=dataset, max_failed_fraction=1.0, advantage_estimator="grpo")
    assert 0 < len(store.filter(stop_reason="failed")) < len(store)
    assert_is_stored(store)
    answers = answers_of(store)
    failed = store.filter(stop_reason="failed").rows[0]
    answer = answers.what_if(answers.index.columns["group"][failed], {"estimator": "rloo", "scale": "none"})
    assert set(answer["advantages"][answer["rows"].index(failed)]) <= {0.0}


def test_another_setting_gives_what_a_run_with_that_setting_had_given(tmp_path: Path) -> None:
    store = trained(tmp_path / "one", advantage_estimator="grpo", max_steps=1)
    other = trained(  # the same weights and seeds: the same rollouts
        tmp_path / "other",
        advantage_estimator="gigpo",
        estimator_kwargs={"baseline": "others"},
        discount=0.8,
        scale_rewards="batch",
        max_steps=1,
        env_config={"turn_credit": "final"},
    )
    answers = answers_of(store)
    requested = {
        "estimator": "gigpo",
        "options": '{"baseline": "others"}',
        "discount": "0.8",
        "scale": "batch",
        "turn_credit": "final",
    }
    differences = 0
    for key in answers.index.groups:
        answer = answers.what_if(key, requested)
        assert {**answer["settings"], **requested} == {
            **requested,
            **answer["settings"],
            "discount": "0.8",
            "options": requested["options"],
        }
        for row, turns in zip(answer["rows"], answer["advantages"], strict=True):
            trajectory = store[row]
            assert trajectory.token_ids == other[row].token_ids
            laid = on_tokens(trajectory, turns)
            assert laid == pytest.approx([*(other.record(row).advantages or ())], abs=1e-12)
            differences += laid != pytest.approx([*(store.record(row).advantages or ())], abs=1e-3)
    assert differences > 0


def test_reward_with_another_turn_credit_places_it_on_the_tokens_anew(tmp_path: Path) -> None:
    store = trained(tmp_path / "one", advantage_estimator="reward", env_config={"token_credit": "last"}, max_steps=1)
    final = {"turn_credit": "final", "token_credit": "last"}
    other = trained(tmp_path / "other", advantage_estimator="reward", env_config=final, max_steps=1)
    answer = answers_of(store).what_if(0, {"turn_credit": "final"})
    for row, turns in zip(answer["rows"], answer["advantages"], strict=True):
        assert on_tokens(store[row], turns) == list(other.record(row).advantages or ())


def test_a_list_that_is_cut_or_filtered_changes_no_number(tmp_path: Path) -> None:
    store = trained(tmp_path, num_layers=2, advantage_estimator="return_to_go", scale_rewards="batch")
    whole = answers_of(store)
    expected = whole.what_if(whole.index.columns["group"][-1], {})
    some = store.filter(num_turns=lambda turns: turns > 1)
    assert len(some) < len(store)
    for answers in (answers_of(store, limit=2), answers_of(some)):
        key = answers.index.columns["group"][-1]
        answer = answers.what_if(key, {})
        assert answer["compared"] == expected["compared"] == 8
        assert answer["note"] is None
        assert 0 < len(answer["rows"]) < len(expected["rows"]) or answers.index.total < len(store)
        for row, turns in zip(answer["rows"], answer["advantages"], strict=True):
            assert turns == expected["advantages"][expected["rows"].index(row)]


def test_a_batch_of_which_a_file_is_gone_is_reported_to_be_incomplete(tmp_path: Path) -> None:
    with RolloutStore.writer(tmp_path / "part") as writer:
        for record in [*trained(tmp_path, max_steps=1).records()][:6]:
            writer.add_record(record)
    answer = answers_of(RolloutStore(tmp_path / "part")).what_if(1, {})
    assert answer["note"] == "only 6 of the 8 rollouts of the generation batch are available"


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ({"estimator": "turn_gae"}, "turn_gae cannot be computed from stored rollouts.*value head"),
        ({"estimator": "rae"}, "rae cannot be computed from stored rollouts.*averages over earlier batches"),
        ({"estimator": "tree"}, "estimator cannot be 'tree': training no longer forks rollouts"),
        ({"estimator": "grop"}, "estimator cannot be 'grop'; did you mean 'grpo'"),
        ({"estimator": "return_to_go", "options": '{"baseline": "role_ema"}'}, "baseline cannot be 'role_ema'"),
        (
            {"estimator": "gigpo", "options": '{"step_wieght": 1}'},
            "no option 'step_wieght' in a what-if; did you mean 'step_w",
        ),
        ({"estimator": "gigpo", "options": '{"step_weight": "x"}'}, "step_weight must be a finite number"),
        ({"estimator": "gigpo", "options": '{"step_weight": NaN}'}, "step_weight must be a finite number"),
        ({"estimator": "gigpo", "options": "[1]"}, "options must be a JSON object"),
        ({"estimator": "gigpo", "options": "{"}, "options must be a JSON object"),
        ({"discount": "2"}, r"discount must be a number in \[0, 1\]"),
        ({"discount": "nan"}, "discount must be a number"),
        ({"discount": "x"}, "discount must be a number, got 'x'"),
        ({"scale": "groups"}, "scale cannot be 'groups'; did you mean 'group'"),
        ({"turn_credit": "last"}, "turn_credit cannot be 'last'"),
        ({"estimator": "return_to_go", "potential_weight": "1"}, "potential"),
    ],
)
def test_a_request_that_cannot_be_is_a_sentence(
    requested: dict[str, str], message: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "what_if_refusals"
    store = RolloutStore(folder / "rollouts") if folder.exists() else trained(folder, max_steps=1)
    with pytest.raises(ConfigError, match=message):
        answers_of(store).what_if(0, requested)


def test_a_function_of_ones_own_is_listed_and_never_called(tmp_path: Path) -> None:
    store = trained(tmp_path, advantage_estimator=everything_is_one, max_steps=1)
    answers = answers_of(store)
    assert answers.group(0)["settings"]["estimator"] == f"{__name__}.everything_is_one"
    with pytest.raises(ConfigError, match="estimator cannot be"):
        answers.what_if(0, {})
    assert answers.what_if(0, {"estimator": "grpo"})["settings"]["estimator"] == "grpo"
    assert {request.settings.advantage_estimator for request in included_requests(answers.batch(0).settings)} == {
        *available()
    }


def everything_is_one(rollouts: Any, *, discount: float, scale: str) -> list[list[float]]:
    return [[1.0] * len(one.turn_rewards) for one in rollouts]


def test_every_choice_that_is_offered_can_be_computed(tmp_path: Path) -> None:
    store = trained(tmp_path, max_steps=1)
    answers = answers_of(store)
    offered = answers.list()["what_if"]
    assert {one["name"] for one in offered["estimators"]} == {
        *("reward", "grpo", "rloo", "return_to_go", "rebn", "mt_grpo", "gigpo")
    }
    for one in offered["estimators"]:
        given = [{}] + [{name: value} for name, of in one["options"].items() for value in of["choices"] or [2.0]]
        for options in given:
            for scale in offered["scales"]:
                requested = {"estimator": one["name"], "options": json.dumps(options), "scale": scale}
                assert len(answers.what_if(0, requested)["advantages"]) == 4
    assert options_of("return_to_go") == {
        "baseline": {"default": "others", "choices": ["none", "batch", "others"]},
        "follow": {"default": "turns", "choices": ["turns", "calls"]},
    }
    requests = [*included_requests(answers.batch(0).settings)]
    assert requests[0].settings == answers.batch(0).settings
    assert len(requests) == len({repr(one) for one in requests}) < 40


def test_settings_come_back_from_what_is_kept_and_are_what_the_assigner_reads(tmp_path: Path) -> None:
    args = GRPOEnvConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", loss_aggregation="constant")
    settings = CreditSettings.of(args, args.estimator())
    assert CreditSettings.from_dict({**settings.as_dict(), "of_a_later_release": 1}) == settings
    assert settings.max_completion_length == args.max_completion_length
    assert AdvantageAssigner(settings).estimator == args.estimator()
