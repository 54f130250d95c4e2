"""What a trainer refuses at construction, and whose games its evaluations are."""

from __future__ import annotations

import math
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from games import WORDS, GuessNumber, TextAgent, has_moved, logged, policy, saved_policy, settings, tasks, trainer_of
from trl import GRPOConfig

from agentsgym import ConfigError, GRPOEnvTrainer, MissingDependencyError, StopReason, TaskError, tiny_policy
from agentsgym.agents.policy import loading
from agentsgym.envs import TwentyQuestionsEnv
from agentsgym.statistics.metrics import summarize
from agentsgym.testing import chat_tokenizer


def built(folder: Path, **arguments: Any) -> GRPOEnvTrainer:
    model, tokenizer = policy()
    given = {"env": GuessNumber(tokenizer), "args": settings(folder), "train_dataset": tasks(), **arguments}
    return GRPOEnvTrainer(given.pop("model", model), **given)


def test_kl_without_a_reference_to_load_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"beta requires a reference model.*save_pretrained"):
        trainer_of(tmp_path, beta=0.1)


def test_a_missing_vllm_is_installed_by_the_extra_of_this_project(tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError, match=r"'vllm' is not installed.*pip install 'agentsgym\[vllm\]'"):
        trainer_of(tmp_path, use_vllm=True, vllm_mode="server")


def test_weights_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    path = saved_policy(tmp_path / "model")
    for file, content, complaint in (
        ("model.safetensors", b"0123456789", "Error while deserializing header"),
        (
            "pytorch_model.bin",
            pickle.dumps({"weight": Path()}, protocol=2),
            "its weights are damaged, or a pickle that",
        ),
    ):
        (tmp_path / "model" / "model.safetensors").unlink()
        (tmp_path / "model" / file).write_bytes(content)
        for load in (loading.load_policy, partial(built, tmp_path / "out", model=path)):
            given = [path] if load is loading.load_policy else []
            with pytest.raises(ConfigError, match=f"^no model can be loaded from '.*/model': {complaint}"):
                load(*given)


def test_evaluation_batches_that_would_cut_a_group_apart_are_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, eval_dataset=tasks(4), num_generations_eval=3)
    with pytest.raises(ConfigError, match=r"multiple of num_generations_eval \(3\).*got 8"):
        trainer.evaluate()


TOKENIZER = policy()[1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        *(
            ({name: [{"task_data": {"seed": 1}}]}, rf"{name} must be a Dataset .*got a list: pass Dataset\.from_list")
            for name in ("train_dataset", "eval_dataset")
        ),
        ({"train_dataset": None}, "train_dataset is missing"),
        ({"train_dataset": tasks().select([])}, "^train_dataset must contain at least one row, got none"),
        ({"eval_dataset": tasks().select([])}, "^eval_dataset must contain at least one row, got none"),
        (
            {"eval_dataset": {"easy": tasks(), "hard": tasks().select([])}},
            r"^eval_dataset\['hard'\] must contain at least one row, got none",
        ),
        ({"env": GuessNumber}, r"env must be a MultistepEnv or None.*GuessNumber\(tokenizer, env_config\)"),
        ({"env": GuessNumber()}, "env has no tokenizer: build it with the policy's"),
        (
            {"env": type("Forgetful", (GuessNumber,), {"__init__": lambda self: None})()},
            r"Forgetful\.__init__ must call super\(\)\.__init__\(tokenizer, env_config\)",
        ),
        (
            {"env": GuessNumber(chat_tokenizer()), "processing_class": TOKENIZER},
            r"env\.tokenizer must be the policy's tokenizer",
        ),
        ({"env": None, "processing_class": TOKENIZER}, "env_class_path"),  # which the rows lack
        *(
            (
                {"env": GuessNumber(TOKENIZER, {"history": history})},
                r"history.*rewrites history.*layout='turn' or history='append'",
            )
            for history in ("rerender", "last")
        ),
        ({"agent": "policy"}, "an agent must define get_action"),
        ({"eval_dataset": {"easy": ()}}, r"eval_dataset\['easy'\] must be a Dataset .*got a tuple: pass Dataset"),
        ({"peft_config": {"r": 8}}, r"got a dict: pass LoraConfig\(\*\*peft_config\)"),
        ({"reward_funcs": [len]}, "the argument reward_funcs of TRL's trainer: rewards come from the environment"),
        ({"environment_factory": GuessNumber}, "pass the environment itself as env"),
        ({"model": "tiny"}, r"^no model can be loaded from 'tiny' \(no such folder; .*: pass tiny_policy"),
        ({"model": "smolm2"}, r"can be loaded from 'smolm2' \(no such folder; did you mean 'smollm2'\?\): "),
        ({"model": "runs/of/mine/model"}, r"'runs/of/mine/model' \(no such folder; .*, nor can it be a name on"),
    ],
)
def test_a_wrong_type_is_refused_with_how_to_make_the_right_one(
    arguments: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        built(tmp_path, **arguments)


def test_an_argument_that_no_trainer_has_is_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="GRPOEnvTrainer got an unexpected keyword argument 'trian_dataset'"):
        built(tmp_path, trian_dataset=tasks())


@pytest.mark.parametrize("argument", ["train_dataset", "eval_dataset"])
def test_a_task_that_cannot_be_played_is_refused_before_training(argument: str, tmp_path: Path) -> None:
    rows = Dataset.from_list([{"task_data": {"solution": solution, "seed": 1}} for solution in ("clock", None)])
    _, tokenizer = policy()
    good = TwentyQuestionsEnv.get_train_dataset(size=4)
    with pytest.raises(TaskError, match=f"row 1 of {argument}: .*'solution'.*got None"):
        built(tmp_path, env=TwentyQuestionsEnv(tokenizer), **{"train_dataset": good, argument: rows})


def test_fewer_rows_than_a_generation_batch_needs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"at least 2 rows.*\(8 rollouts, 4 per group\), got 1"):
        trainer_of(tmp_path, dataset=tasks(1))
    trainer_of(tmp_path, dataset=tasks(2))
    trainer_of(tmp_path, dataset=tasks(1), num_generations=8)


def test_several_gpus_in_one_process_are_refused(tmp_path: Path) -> None:
    """By TRL, which knows what a model that is split over devices makes of them; ours rests on it."""
    args = settings(tmp_path)
    assert args.n_gpu == 0
    args._n_gpu = 2
    with pytest.raises(ValueError, match=r"DataParallel.*CUDA_VISIBLE_DEVICES"):
        built(tmp_path, args=args)


def test_the_settings_of_trl_are_refused_by_name(tmp_path: Path) -> None:
    model, tokenizer = policy()
    args: Any = GRPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to="none")
    with pytest.raises(ConfigError, match=r"args must be a GRPOEnvConfig, .* got a GRPOConfig"):
        GRPOEnvTrainer(model, GuessNumber(tokenizer), args, train_dataset=tasks())


@pytest.mark.parametrize(("save_steps", "aligned"), [(3, 4), (0.3, 4), (4, 4)])
def test_the_settings_of_a_user_stay_as_they_are_where_saving_is_aligned(
    save_steps: float, aligned: int, tmp_path: Path
) -> None:
    args = settings(tmp_path, num_iterations=2, save_strategy="steps", save_steps=save_steps, max_steps=8)
    given = args.to_dict()
    trainer = built(tmp_path, args=args)
    assert trainer.args.save_steps == aligned
    assert args.to_dict() == given
    assert trainer.args is not args


def test_a_tokenizer_with_more_ids_than_the_model_has_is_refused_whoever_plays(tmp_path: Path) -> None:
    small, _ = policy()
    _, large = tiny_policy([*WORDS, "words that the model has never seen"], hidden_size=32, num_heads=2)
    with pytest.raises(ConfigError, match="the model's embedding must have a row for each id of the tokenizer"):
        GRPOEnvTrainer(small, GuessNumber(large), settings(tmp_path), train_dataset=tasks(), agent=TextAgent())


def test_float16_on_a_cpu_is_refused(tmp_path: Path) -> None:
    model, tokenizer = policy()
    with pytest.raises(ConfigError, match=r"weights are float16, in which CPUs compute slowly .* dtype='float32'"):
        GRPOEnvTrainer(model.half(), GuessNumber(tokenizer), settings(tmp_path), train_dataset=tasks())


@pytest.mark.parametrize("is_slow", [True, False])
def test_bfloat16_is_warned_of_where_it_is_slow(
    *, is_slow: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "is_slow_in_bfloat16", lambda: is_slow)
    model, tokenizer = policy()
    GRPOEnvTrainer(model.to(torch.bfloat16), GuessNumber(tokenizer), settings(tmp_path), train_dataset=tasks())
    assert ("computes bfloat16 many times slower than float32" in caplog.text) is is_slow


@pytest.mark.parametrize(("dtype", "warns"), [(torch.bfloat16, True), (torch.float32, False)])
def test_weights_that_round_updates_away_are_warned_of(
    dtype: torch.dtype, *, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = policy()
    GRPOEnvTrainer(model.to(dtype), GuessNumber(tokenizer), settings(tmp_path), train_dataset=tasks())
    assert ("bfloat16, so updates below about 0.39 % of a weight are rounded away" in caplog.text) is warns


def test_evaluation_reports_the_numbers_of_all_games(tmp_path: Path) -> None:
    """Five tasks of two rollouts in batches of eight: the mean over batches would be another."""
    trainer = trainer_of(tmp_path, eval_dataset=tasks(5), num_generations_eval=2)
    metrics = trainer.evaluate()
    evaluation = trainer.last_evaluation
    assert evaluation is not None
    games = evaluation.trajectories
    assert metrics["eval_num_episodes"] == len(games) == 10
    assert metrics["eval_num_failed"] == 0
    assert metrics["eval_win_rate"] == sum(game.stop_reason is StopReason.DONE for game in games) / 10
    assert metrics["eval_reward"] == pytest.approx(sum(game.final_reward for game in games) / 10)
    assert metrics["eval_turns"] == pytest.approx(sum(len(game.turns) for game in games) / 10)
    assert metrics["eval_turns/mean"] == metrics["eval_turns"]
    for name in ("win_rate", "reward", "turns"):
        assert metrics[f"eval_{name}_low"] <= metrics[f"eval_{name}"] <= metrics[f"eval_{name}_high"]
        assert trainer.state.log_history[-1][f"eval_{name}"] == metrics[f"eval_{name}"]
    assert math.isfinite(metrics["eval_loss"])
    assert not has_moved(trainer)
    assert trainer.evaluate()["eval_win_rate"] == metrics["eval_win_rate"]  # the same games again


def test_evaluation_plays_a_task_alike_and_its_intervals_are_over_tasks(tmp_path: Path) -> None:
    dataset = Dataset.from_list([{"task_data": {"number": i}} for i in range(6)])  # the trainer chooses the seeds
    trainer = trainer_of(tmp_path, eval_dataset=dataset, num_generations_eval=2, agent=TextAgent(), max_turn_tokens=8)
    trainer.evaluate()
    evaluation = trainer.last_evaluation
    assert evaluation is not None
    games = evaluation.trajectories
    assert [games[i].messages == games[i + 1].messages for i in range(0, 12, 2)] == [True] * 6
    assert len({str(game.messages) for game in games}) > 1
    assert evaluation.win_rate == summarize(games, clusters=[i // 2 for i in range(12)]).win_rate
    assert evaluation.win_rate != summarize(games, clusters=range(12)).win_rate


def test_a_stream_is_evaluated_too(tmp_path: Path) -> None:
    stream = IterableDataset.from_generator(partial(iter, list(tasks(5))))
    trainer = trainer_of(tmp_path, eval_dataset=stream, num_generations_eval=2)
    metrics = trainer.evaluate()
    assert trainer.last_evaluation is not None
    assert metrics["eval_num_episodes"] == len(trainer.last_evaluation.trajectories) == 10


def test_several_evaluation_sets_have_names_of_their_own(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, eval_dataset={"easy": tasks(2), "hard": tasks(5)}, num_generations_eval=2)
    metrics = trainer.evaluate()
    assert (metrics["eval_easy_num_episodes"], metrics["eval_hard_num_episodes"]) == (4, 10)
    assert "eval_win_rate" not in metrics
    assert {"eval_easy_win_rate", "eval_hard_win_rate_low"} <= metrics.keys()


def test_an_evaluation_during_training_is_kept(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, eval_dataset=tasks(4), eval_strategy="steps", eval_steps=2, max_steps=4)
    assert trainer.last_evaluation is None
    trainer.train()
    assert len(logged(trainer, "eval_win_rate")) == 2
    assert trainer.last_evaluation is not None
    assert trainer.last_evaluation.num_episodes == 16
    assert trainer.last_evaluation.win_rate is not None
    assert trainer.last_evaluation.win_rate.mean == logged(trainer, "eval_win_rate")[-1]
