"""Two processes under `accelerate launch` against one with the same global batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ranks_run
from launch import launch

TRAINED = [
    *("dapo", "grpo", "accumulated", "iterated", "evaluated", "two_episodes", "adapters", "silent_rank", "shown"),
    *("rewritten", "rewritten_accumulated", "resampled", "shared_values", "own_values", "remembering"),
    "retried",
    "drawn",
    "programs",
    "ranked",
    "observed",
    "imitating",
    "towers",
]
REWRITTEN = ["rewritten", "rewritten_accumulated"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The outcomes of every scenario on each of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    done = launch(Path(ranks_run.__file__), folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", TRAINED)
def test_two_ranks_train_as_one_process_does(name: str, ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    one = ranks_run.outcome(name, tmp_path, shared_prefix="off")  # on the ranks, rows that begin alike are packed
    first, second = (outcomes[name] for outcomes in ranks)
    assert one["loss"]
    assert any(one["loss"])
    # Where micro-batches are others, so is TRL's mean over them.
    uncompared = (
        {"entropy"}
        if name in {"accumulated", "own_values", "observed", "imitating", "programs", *REWRITTEN}
        else set[str]()
    )
    for key in one.keys() - uncompared - {"weights", "sent"}:
        assert first[key] == pytest.approx(one[key], abs=1e-5), key
    assert first["weights"] == second["weights"]


@pytest.mark.parametrize("name", TRAINED)
def test_all_ranks_log_the_same_names(name: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (outcomes[name]["names"] for outcomes in ranks)
    assert first == second
    wanted = {"advantage/turn_00", "entropy/turn_00", "ratio/turn_00", "clip_ratio/turn_00", "effective_sample_size"}
    assert {f"1: {one}" for one in wanted} <= {*first}


def test_a_stock_trainer_on_two_ranks_is_given_what_it_would_be_given_on_one(
    ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    one = json.loads(json.dumps(ranks_run.stock_batches(tmp_path)))
    batches = [outcomes["stock"] for outcomes in ranks]
    assert len(one) == len(batches[0]) == len(batches[1]) == 2
    for whole, first, second in zip(one, *batches, strict=True):
        together: dict[str, list[Any]] = {name: first[name] + second[name] for name in whole}
        for name in ("prompt_ids", "completion_ids", "env_mask", "row_reward", "step_rewards", "stop_reason"):
            assert together[name] == whole[name], name
        for name in ("advantages", "logprobs"):  # a matrix of other height is rounded otherwise
            assert [value for row in together[name] for value in row] == pytest.approx(
                [value for row in whole[name] for value in row], abs=1e-5
            )


def test_episodes_of_the_scenarios_are_uneven(ranks: list[dict[str, Any]]) -> None:
    assert all(1 < turns < 4 for turns in ranks[0]["dapo"]["turns/mean"])


def test_an_evaluation_counts_each_game_once(ranks: list[dict[str, Any]]) -> None:
    assert {count for outcomes in ranks for count in outcomes["evaluated"]["eval_num_episodes"]} == {12}


def test_rows_that_only_fill_the_last_batch_do_not_count(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    one = ranks_run.outcome("streamed", tmp_path)
    assert one["eval_num_episodes"] == [12, 12]
    for outcomes in ranks:
        for key in ranks_run.EVALUATED:
            assert outcomes["streamed"][key] == pytest.approx(one[key], abs=1e-5), key


def test_groups_without_spread_are_replaced_in_the_scenario(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["resampled"]["groups/resampled"][0] >= 1 / 3
    assert ranks[0]["resampled"]["groups/kept"] == ranks[1]["resampled"]["groups/kept"]


def test_the_scenarios_have_a_divergence_and_a_drift_to_log(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["adapters"]["kl"][-1] > 1e-5
    assert ranks[0]["silent_rank"]["sampling/sampling_logp_difference/mean"][0] > 0.1


def test_the_main_rank_shows_the_conversations_of_all(ranks: list[dict[str, Any]]) -> None:
    first, second = (outcomes["shown"]["conversations"] for outcomes in ranks)
    assert (len(first), len(second)) == (12, 6)
    assert first[6:] == second


def test_each_rank_stores_its_own_rollouts_under_one_name_of_the_run(
    ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    one = ranks_run.outcome("stored", tmp_path)["stored"]
    both = [
        rollout
        for generation in (1, 2)
        for rank in ranks
        for rollout in rank["stored"]["stored"]
        if rollout[1] == generation
    ]
    assert [len(rank["stored"]["stored"]) for rank in ranks] == [12, 12]
    assert len({run for run, *_ in both}) == 1
    assert [[*rest] for _, *rest in both] == [[*rest] for _, *rest in one]
    # Groups of four straddle the ranks, each of which plays six rollouts.
    places = [[generation, i // 4, i // 4, i % 4] for generation in (1, 2) for i in range(12)]
    assert [[*rest[:4]] for _, *rest in both] == places


@pytest.mark.parametrize("name", TRAINED)
def test_ranks_send_summaries_of_rollouts_and_no_tokens(name: str, ranks: list[dict[str, Any]]) -> None:
    kinds = {"RolloutSummary", "float"}  # the latter of the loss: the ratio of each row
    kinds |= {"tuple"} if name.endswith("_values") else set()  # of the value head: what it predicts for each turn
    kinds |= {"LogprobGapSums", "int"} if name == "silent_rank" else set()  # and the turns that can be compared
    kinds |= {"CompletionRow"} if name == "shown" else set()
    kinds |= {"int"} if name == "retried" else set()  # how many each rank plays again
    first, second = (outcomes[name]["sent"] for outcomes in ranks)
    assert first.keys() | second.keys() == kinds
    assert max(first["RolloutSummary"], second["RolloutSummary"]) < 3_000  # of four turns, or of a traceback


def test_a_rank_whose_every_rollout_failed_does_not_stop_the_others(ranks: list[dict[str, Any]]) -> None:
    first, second = (outcomes["silent_rank"] for outcomes in ranks)
    assert "error" not in first
    assert first["weights"] == second["weights"]
    assert all(norm > 0 for norm in first["grad_norm"])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("too_many_failed", "4 of 8 rollouts failed"),
        ("refused", "no model is loaded here"),
        ("unplayable", "TaskError: task_data_list[0]['seed'] must be an int or None, got 'two'"),
        ("misfitting", "must return one finite number for each"),
        ("uneven", "RuntimeError: only here"),
        ("unstorable", "cannot create a rollout store at"),
    ],
)
def test_what_ends_the_run_on_one_rank_ends_it_on_all(name: str, sentence: str, ranks: list[dict[str, Any]]) -> None:
    for outcomes in ranks:
        assert sentence in outcomes[name]["error"]


def test_a_rank_that_broke_raises_its_own_error_and_the_others_name_which_it_was(ranks: list[dict[str, Any]]) -> None:
    first, second = (outcomes["unplayable"]["error"] for outcomes in ranks)
    assert first.startswith("AgentsGymError: rank 1 of the run failed: TaskError: ")
    assert second.startswith("TaskError: ")
