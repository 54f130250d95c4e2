"""How a run ends: what a trainer leaves behind in its process, and on two ranks in the group."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import exits_run
import pytest
from games import tasks, trainer_of
from launch import launch

from agentsgym.errors import AgentsGymError

pytestmark = pytest.mark.filterwarnings("default")  # the trainer's libraries warn


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks saw."""
    folder = tmp_path_factory.mktemp("exits")
    done = launch(Path(exits_run.__file__), folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_a_number_that_one_rank_meets_stops_all_of_them(ranks: list[dict[str, Any]]) -> None:
    for outcome in ranks:
        assert outcome["broken"].startswith("NonFiniteError: step 1, rank 1: the loss is nan; the step was skipped")
        assert not outcome["moved"]


def test_the_last_trainer_that_closes_ends_the_group_and_its_threads(ranks: list[dict[str, Any]]) -> None:
    for outcome in ranks:
        assert {"gloo_tcp_loop", "pt_gloo_runloop"} <= {*outcome["while_one_is_open"]}
        assert outcome["after"] == []


def test_a_closed_trainer_reports_that_it_is_closed(tmp_path: Path) -> None:
    with trainer_of(tmp_path, eval_dataset=None) as trainer:
        trainer.train()
    uses = (trainer.train, trainer.save_model, *(partial(use, tasks()) for use in (trainer.evaluate, trainer.predict)))
    for use in uses:
        with pytest.raises(AgentsGymError, match="this trainer, its pool and its process group are closed"):
            use()
    trainer.close()
    assert trainer.state.global_step == 2
    assert not trainer.model.training or all(weight.isfinite().all() for weight in trainer.model.parameters())


def test_closing_frees_the_optimizer_and_ends_the_pool(tmp_path: Path) -> None:
    before = threading.active_count()
    trainer = trainer_of(tmp_path, env_pool="threads", env_pool_kwargs={"num_workers": 3})
    trainer.train()
    held = weakref.ref(trainer.optimizer)
    trainer.close()
    gc.collect()
    assert held() is None
    assert threading.active_count() <= before


def test_an_exception_in_the_block_is_the_one_that_is_raised(tmp_path: Path) -> None:
    with pytest.raises(KeyError), trainer_of(tmp_path):
        raise KeyError
