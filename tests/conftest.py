"""What holds for every test: one thread, no network, no display; order; where a warning is an error; dying fixtures."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import tempfile
import warnings
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings

RELAXED = (
    "tests/training",
    "tests/faults",
    "tests/examples",
    "tests/fuzz",
    "tests/with_real_model",
    "tests/with_vllm",
    "tests/with_harnesses",
    "tests/with_models",
    "agentsgym/training",
)  # TRL and transformers warn for reasons of their own
#: Of which module, and how its message begins: what trl and transformers call in each other, or in themselves.
FOREIGN_WARNINGS = ((r"transformers\.", r"`(is_)?gradient_checkpointing\w*` is deprecated and will be removed in v6"),)
SLOW = (
    "tests/benchmarks",
    "tests/examples",
    "tests/faults",
    "tests/training",
    "tests/test_site.py",
    "tests/test_snippets.py",
)
LONG = (
    "tests/benchmarks/test_credit_benchmark.py::test_random_play",
    "tests/benchmarks/test_named_rewards_benchmark.py",
    "tests/benchmarks/test_rollout_overhead.py",
    "tests/benchmarks/test_short_runs.py",
    "tests/cli/test_serve.py::test_a_policy_is_served",
    "tests/cli/test_stores.py::test_an_evaluation_that_was_ended_goes_on",
    "tests/credit/test_credit_traits.py::test_whatever_is_declared_can_change_the_result[mt_grpo--0.5]",
    "tests/envs/reasoning/test_reasoning_tasks.py::test_an_item_has_the_same_question_in_every_process",
    "tests/envs/terminal/test_terminal_env.py::test_64_episodes",
    "tests/envs/terminal/test_terminal_env.py::test_nothing_is_left_after_episodes",
    "tests/envs/terminal/test_terminal_env.py::test_the_reference_player_solves_every_family_and_level_and_beats_random_play[train",
    "tests/envs/terminal/test_terminal_shell.py",
    "tests/envs/test_packaged.py::test_each_process",
    "tests/envs/test_packaged.py::test_it_keeps_the_contract[Terminal",
    "tests/envs/test_packaged.py::test_it_plays_the_same_in_line_in_threads_in_processes_and_as_a_copy[ReasoningEvals",
    "tests/envs/test_packaged.py::test_it_plays_the_same_in_line_in_threads_in_processes_and_as_a_copy[Terminal",
    "tests/envs/test_programs_at_scale.py",
    "tests/envs/test_textarena_catalogue.py::test_games_are_alike_in_processes",
    "tests/examples/test_black_box.py::test_the_policy",
    "tests/examples/test_launch_recipes.py::test_slurm",
    "tests/examples/test_notebooks.py::test_a_notebook_runs_and_shows_what_it_claims",
    "tests/examples/test_textarena.py",
    "tests/examples/test_whole_examples.py",
    "tests/examples/test_twenty_questions.py::test_a_model_and_settings",
    "tests/faults/test_checkpoints.py::test_three_passes",
    "tests/faults/test_engines_on_ranks.py",
    "tests/faults/test_exits.py::test_a_number",
    "tests/faults/test_exits.py::test_the_last_trainer",
    "tests/faults/test_resume_on_ranks.py",
    "tests/faults/test_signals.py::test_a_run_that_is_signaled_anywhere_goes_on_exactly[accumulated",
    "tests/faults/test_signals.py::test_a_run_that_is_signaled_anywhere_goes_on_exactly[two",
    "tests/faults/test_signals.py::test_a_run_that_is_signaled_anywhere_goes_on_exactly[with",
    "tests/faults/test_signals.py::test_an_environment_that_hangs_does_not_hold_the_run[threads",
    "tests/faults/test_workers.py::test_a_signal_to_the_process_that_workers_are_forked_from_costs_no_session[SIGKILL]",
    "tests/fuzz",
    "tests/recipes/test_train_recipe.py::test_evaluations_alone",
    "tests/recipes/test_train_recipe.py::test_on_two_ranks",
    "tests/recipes/test_train_recipe.py::test_self_play_is_evaluated_against_another_opponent[True",
    "tests/serving/test_serve_policy.py::test_a_server_that_an_error_ended",
    "tests/test_site.py",
    "tests/test_snippets.py::test_the_snippets_of_a_page_run_one_after_the_other[README.md]",
    "tests/test_snippets.py::test_the_snippets_of_a_page_run_one_after_the_other[training.md]",
    "tests/training/test_asynchronous_on_ranks.py",
    "tests/training/test_distillation.py::test_a_policy_learns_from_a_teacher_alone[token",
    "tests/training/test_distillation.py::test_a_policy_learns_from_a_teacher_alone[turn",
    "tests/training/test_in_step.py",
    "tests/training/test_league.py::test_poker",
    "tests/training/test_packaged_mixture.py",
    "tests/training/test_pages_of_environments.py",
    "tests/training/test_programs_in_training.py::test_programs_are_played_ahead",
    "tests/training/test_resampling.py::test_two_runs_are_equal_and_so_is_a_resumed_one[trajectory",
    "tests/training/test_resampling.py::test_two_runs_are_equal_and_so_is_a_resumed_one[turn]",
    "tests/training/test_resume.py::test_a_run_that_was_interrupted_goes_on_as_if_nothing_had_happened[accumulated, tw",
    "tests/training/test_resume.py::test_a_run_that_was_interrupted_goes_on_as_if_nothing_had_happened[accumulated]",
    "tests/training/test_run.py::test_the_whole_run_of_the_page",
    "tests/training/test_value_head.py::test_two_ranks",
    "tests/training/test_value_head_in_training.py::test_it_learns_the_rewards_of_the_games[separate]",
    "tests/training/test_vllm_policy.py::test_a_failing_engine_fails_the_turn_on_all_ranks",
    "tests/training/test_vllm_policy.py::test_every_session_of_every_rank",
    "tests/training/test_vllm_policy.py::test_ranks_make",
    "tests/training/test_vllm_policy.py::test_the_largest_budget",
    "tests/training/test_vllm_policy.py::test_what_breaks_one_rank",
    "tests/training/test_vllm_servers.py::test_each_rank",
    "tests/viewer/test_groups_in_browser.py::test_narrow_windows_do_not_scroll_sideways[700]",
    "tests/viewer/test_groups_in_browser.py::test_words_are_legible_in_light_and_dark[dark",
    "tests/viewer/test_list_in_browser.py::test_keys_move_open_and_go_back",
    "tests/viewer/test_list_in_browser.py::test_ten_thousand_rows",
    "tests/viewer/test_list_in_browser.py::test_the_address_keeps_view_and_filters[written",
    "tests/viewer/test_rollout_in_browser.py::test_a_line_of_a_megabyte",
)  # whole programs, several processes, and slow cases of what faster ones show too; `make test-long` runs them

# In a background job of a script SIGINT is ignored, under nohup SIGHUP; children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # small models: a second thread costs more than it brings
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
_trackers = tempfile.TemporaryDirectory(
    prefix="agentsgym-trackio-"
)  # read when trackio is imported, and gone at the end
os.environ["TRACKIO_DIR"] = _trackers.name

IS_CI = "CI" in os.environ
settings.register_profile("agentsgym", deadline=None, derandomize=IS_CI, max_examples=30 if IS_CI else 100)
settings.load_profile("agentsgym")


#: `make test-order` sets it; it is inherited by the workers, which must agree on the order.
ORDER_SEED = os.environ.get("ORDER_SEED")


def pytest_report_header() -> str | None:
    """Print the seed of a random order, with which the order can be had again."""
    return f"random order: SEED={ORDER_SEED}" if ORDER_SEED else None


def _place(item: pytest.Item) -> list[float]:
    """Draw where a file stands, and where a test stands in its file; neither depends on which others are run."""
    names = (item.nodeid.partition("::")[0], item.nodeid)
    return [random.Random(f"{ORDER_SEED} {name}").random() for name in names]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let warnings be warnings in tests that run foreign training code; everywhere else they are errors.

    Folders whose files take long come first, so that the workers, which take file after file, end together: unless the
    order is to be random.
    """
    for item in items:
        if item.nodeid.startswith(RELAXED):
            item.add_marker(pytest.mark.filterwarnings("default"))
        # the written page has the same script as the served one
        is_repeated = item.path.name.endswith("_in_browser.py") and item.name.endswith("[written]")
        if is_repeated or item.nodeid.startswith(LONG):
            item.add_marker(pytest.mark.long)
    items.sort(key=_place if ORDER_SEED else lambda item: not item.nodeid.startswith(SLOW))


@pytest.fixture(autouse=True, scope="module")
def _path() -> Generator[None]:
    """Take back the folders of imported files: in that of the examples, tools.py would hide the folder of that name."""
    before = [*sys.path]
    yield
    sys.path[:] = before


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Leave out what libraries warn themselves of, before any fixture and whatever the marks of a test let through."""
    for module, message in FOREIGN_WARNINGS:
        warnings.filterwarnings("ignore", message, module=module)


def pytest_collection_finish() -> None:
    """Let the garbage collector pass by all that is imported: it took a third of the tests that train."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """Let a shared fixture that dies be one error, in the first test that requests it; those after it are skipped.

    Whichever test is run alone is the first, so that nothing is ever skipped without an error that gives the reason.
    """
    try:
        return (yield)
    except pytest.skip.Exception:
        raise
    except (Exception, pytest.fail.Exception):
        _, key, _ = fixturedef.cached_result
        first = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        why = pytest.skip.Exception(f"fixture {request.fixturename!r} died, see the error at {first}")
        fixturedef.cached_result = (None, key, (why, None))
        raise
