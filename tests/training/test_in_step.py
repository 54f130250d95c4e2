"""Two ranks that share the weights of one model against one process that has them all."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sharded_run
import torch
from accelerate.utils import DistributedType
from games import policy, settings, trainer_of
from launch import launch
from transformers import AutoModelForCausalLM

from agentsgym.agents.policy.sharded import LockstepForward, ShardedForwardError, policy_agent_type
from agentsgym.errors import ConfigError
from agentsgym.training.model_checks import check_parts

SYNCED = {"sync_ref_model": True, "beta": 0.1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that all training begins with, in a folder: the KL term's reference is loaded from there."""
    folder = tmp_path_factory.mktemp("base")
    policy(num_layers=2)[0].save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def launched(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder in which two ranks left their outcomes, and how they ended."""
    folder = tmp_path_factory.mktemp("sharded")
    return folder, launch(Path(sharded_run.__file__), base, folder)


@pytest.fixture(scope="module")
def ranks(launched: tuple[Path, subprocess.CompletedProcess[str]]) -> list[dict[str, Any]]:
    """The outcomes of every scenario on each of two ranks."""
    folder, done = launched
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("sharding", sharded_run.SHARDINGS)
@pytest.mark.parametrize("name", sharded_run.GAMES)
def test_a_sharded_model_answers_what_it_answers_unsharded(
    name: str, sharding: str, ranks: list[dict[str, Any]]
) -> None:
    wanted = sharded_run.played_alone(name)["games"]
    given = [game for outcomes in ranks for game in outcomes[f"{name} {sharding}"]["games"]]
    assert [game["error"] for game in given] == [None] * len(wanted)
    assert [game["ids"] for game in given] == [game["ids"] for game in wanted]
    for mine, theirs in zip(given, wanted, strict=True):
        assert mine["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-5)


@pytest.mark.parametrize("sharding", sharded_run.SHARDINGS)
def test_a_sharded_model_keeps_its_caches_over_the_turns(sharding: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (outcomes[f"one_game {sharding}"]["tokens_run"] for outcomes in ranks)
    assert first == sharded_run.played_alone("one_game")["tokens_run"]
    assert len(second) == len(first)  # the other rank, which has no game, runs along


def test_games_of_a_rank_are_uneven(ranks: list[dict[str, Any]]) -> None:
    first, second = ([game["turns"] for game in outcomes["uneven fsdp2"]["games"]] for outcomes in ranks)
    assert len(set(first)) > 1
    assert max(first) != max(second)


@pytest.mark.parametrize("name", sharded_run.TRAINED)
def test_two_ranks_train_shards_as_one_process_trains_all(
    name: str, ranks: list[dict[str, Any]], base: Path, tmp_path: Path
) -> None:
    one = sharded_run.trained(name, tmp_path, base, shared_prefix="off")
    first, second = (outcomes[name] for outcomes in ranks)
    assert first["shares"] is second["shares"] is not one["shares"]
    assert (one["agent"], first["agent"]) == ("PolicyAgent", "ShardedPolicyAgent")
    assert (one["sharded"], first["sharded"]) == (False, True)
    assert any(one["loss"])
    for key in sharded_run.WATCHED:
        assert first[key] == pytest.approx(one[key], abs=1e-5), key
    assert first["weights"] == second["weights"]
    for key, weights in one["weights"].items():
        torch.testing.assert_close(torch.tensor(first["weights"][key]), torch.tensor(weights), rtol=0, atol=1e-5)


def test_what_is_saved_is_the_whole_model(
    ranks: list[dict[str, Any]], launched: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    saved = AutoModelForCausalLM.from_pretrained(launched[0] / "evaluated" / "saved")
    assert ranks[0]["evaluated"]["weights"] == {key: weights.tolist() for key, weights in saved.named_parameters()}


def test_a_gradient_that_breaks_in_the_shard_of_one_rank_stops_all_of_them(ranks: list[dict[str, Any]]) -> None:
    found = f"step 1, rank 1: the gradient of '{sharded_run.BROKEN}' contains NaN; the step was skipped"
    assert all(outcomes["broken"].startswith(found) for outcomes in ranks)


def test_a_forward_pass_that_breaks_off_on_one_rank_ends_the_run(
    launched: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = launched
    assert done.returncode != 0
    assert "failed on rank 1: NotImplementedError('no cache, please')" in done.stderr


def test_one_process_alone_is_in_step_with_itself() -> None:
    forward = LockstepForward(lambda **arguments: arguments)
    assert forward(input_ids=[1], use_cache=True) == {"input_ids": [1], "use_cache": True}
    forward.join(lambda: pytest.fail("there is nobody to run along with"))


def test_nothing_is_run_or_sent_after_a_break() -> None:
    calls: list[str] = []

    def broken(**_: object) -> None:
        calls.append("run")
        raise RuntimeError("out of memory")

    forward = LockstepForward(broken)
    with pytest.raises(ShardedForwardError, match="failed on rank 0: RuntimeError\\('out of memory'\\)"):
        forward(input_ids=[1])
    with pytest.raises(ShardedForwardError, match="already failed"):
        forward(input_ids=[1])
    forward.join(broken)
    assert calls == ["run"]


def test_fsdp1_is_refused_and_the_error_names_what_to_use(tmp_path: Path) -> None:
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=False)
    with pytest.raises(ConfigError, match=r"FSDP1 is not supported .*: use FSDP2 \(fsdp_config="):
        policy_agent_type(accelerator)
    with pytest.raises(ConfigError, match="training with FSDP1 is not supported"):  # whoever plays
        check_parts(*policy(), settings(tmp_path), accelerator, has_aux_loss=False, has_own_scheduler=False)


def test_sharding_that_accelerate_would_leave_aside_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"fsdp=True has no effect here \(processes: 1, device: cpu\)"):
        trainer_of(tmp_path, fsdp=True)
    assert trainer_of(tmp_path).accelerator.distributed_type == DistributedType.NO  # nothing of it is left
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match=r"FSDP \(enabled by the launcher\) has no effect"):
        trainer_of(tmp_path)


@pytest.mark.parametrize("changes", [{"value_head": "shared", "advantage_estimator": "turn_gae"}, SYNCED])
def test_what_shards_cannot_hold_is_refused_where_the_launcher_shards(changes: dict[str, Any], tmp_path: Path) -> None:
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=True)
    args = settings(tmp_path, **changes)
    with pytest.raises(ConfigError, match="is untested with sharded weights"):
        check_parts(*policy(), args, accelerator, has_aux_loss=False, has_own_scheduler=False)
