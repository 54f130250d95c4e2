"""The example as a person runs it, shortened: what it prints and leaves behind, signals, a model of one's own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from example_runs import FOLDER, TIMEOUT_S, assert_refused, call_example, stop_example, summary_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentsgym import PolicyAgent, evaluate
from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, TwentyQuestionsEnv
from agentsgym.seeding import derive_seed

NUM_GAMES = 2 * len(DEMO_OBJECTS)
KEYS = ("win_rate", "mean_turns", "mean_reward", "num_episodes")
SHORT = ["--num_games", str(NUM_GAMES), "--num_demonstrations", "200", "--warm_start_steps", "20"]
PLAYERS = {"before", "after", "random", "greedy"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("run")
    options = ["--seed", "3", "--max_steps", "8", "--logging_steps", "4"]
    return output, call_example("twenty_questions", output, *SHORT, *options)


def test_the_summary_names_who_won_how_often(run: tuple[Path, str]) -> None:
    summary = summary_of(run[0])
    for player in PLAYERS:
        result = summary[player]
        low, high = result["win_rate_interval"]
        assert 0 <= low <= result["win_rate"] <= high <= 1
        assert 1 <= result["mean_turns"] <= 7
        assert result["num_episodes"] == NUM_GAMES
        assert isinstance(result["mean_reward"], float)
    assert summary["greedy"]["win_rate"] == 1.0
    assert summary["seed"] == 3
    assert summary["secrets"] == list(DEMO_OBJECTS)
    assert summary["env_config"]["final_guess"] is True
    assert summary["settings"]["advantage_estimator"] == "gigpo"
    assert summary["settings"]["warm_start_steps"] == 20
    assert {"warm start", "reinforcement learning", "after learning"} <= set(summary["seconds"])
    assert summary["interrupted"] is False


def test_a_table_at_the_end_shows_it_in_one_look(run: tuple[Path, str]) -> None:
    lines = run[1].splitlines()
    assert [line.split()[0] for line in lines if line.split() and line.split()[0] in PLAYERS] == [
        "random", "greedy", "before", "after",
    ]  # fmt: skip
    assert "objects that the policy was trained on" in run[1]


def test_transcripts_are_of_the_same_tasks(run: tuple[Path, str]) -> None:
    before, after = ((run[0] / f"transcripts_{name}.txt").read_text(encoding="utf-8") for name in ("before", "after"))
    assert before.count("=== task ") == after.count("=== task ") == NUM_GAMES
    assert before != after
    assert (run[0] / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_saved_policy_plays_as_it_did_at_the_end(run: tuple[Path, str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(run[0] / "model")
    tokenizer = AutoTokenizer.from_pretrained(run[0] / "model")
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.chat_template
    summary = summary_of(run[0])
    env = TwentyQuestionsEnv(tokenizer, summary["env_config"])
    tasks = [{"solution": DEMO_OBJECTS[i % len(DEMO_OBJECTS)]} for i in range(NUM_GAMES)]
    agent = PolicyAgent(model, tokenizer, seed=derive_seed("evaluation", 3), max_turn_tokens=12)
    result = evaluate(env, agent, tasks).as_dict()
    assert [result[key] for key in KEYS] == [summary["after"][key] for key in KEYS]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--load_in_4bit"], "--load_in_4bit requires --use_peft"),
        (["--model", "a", "--model_name_or_path", "b"], "are the same"),
        (["--objects", "cat", "dgo"], "did you mean 'dog'"),
        (["--remove_unused_columns"], "the environment's columns would be dropped"),
    ],
)
def test_what_cannot_be_done_is_reported_at_once(options: list[str], message: str, tmp_path: Path) -> None:
    assert_refused("twenty_questions", tmp_path, options, message)


def test_a_model_and_settings_of_ones_own_and_sigterm(run: tuple[Path, str], tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {run[0] / 'model'}\nobjects: [all]\nmax_steps_per_episode: 20\n"
        "advantage_estimator: rloo\nbeta: 0.01\nper_device_train_batch_size: 8\nnum_generations: 4\n"
        "learning_rate: 1.0e-4\nmax_turn_tokens: 8\nnum_games: 8\n",
        encoding="utf-8",
    )
    printed = stop_example("twenty_questions", tmp_path, signal.SIGTERM, "--config", str(config))
    summary = summary_of(tmp_path)
    assert summary["settings"]["advantage_estimator"] == "rloo"
    assert summary["settings"]["num_games"] == summary["after"]["num_episodes"] == 8
    assert summary["env_config"]["objects"] == summary["env_config"]["properties"] == "all"
    assert summary["env_config"]["max_steps_per_episode"] == 20
    assert "warm start" not in summary["seconds"]
    assert "after" in printed


def test_adapters_are_trained_and_merged_into_the_policy_that_is_saved(tmp_path: Path) -> None:
    options = ["--warm_start_steps", "2", "--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--max_steps", "2"]
    call_example("twenty_questions", tmp_path, *SHORT, *options)
    names = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert not any("lora" in name for name in names)
    assert summary_of(tmp_path)["after"]["num_episodes"] == NUM_GAMES


@pytest.mark.long
def test_two_ranks_train_and_report_together(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    options = [*SHORT, "--max_steps", "2", "--logging_steps", "1", "--output_dir", str(tmp_path)]
    command = [*launcher, str(FOLDER / "twenty_questions.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("every evaluation is on the objects") == 1
    assert summary_of(tmp_path)["after"]["num_episodes"] == NUM_GAMES
