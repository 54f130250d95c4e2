"""The example as a person runs it, shortened: what it prints, what it leaves behind, Ctrl-C, a model of one's own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentsgym import PolicyAgent, evaluate
from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, TwentyQuestionsEnv
from agentsgym.seeding import derive_seed

ROOT = Path(__file__).parents[2]
NUM_GAMES = 2 * len(DEMO_OBJECTS)
KEYS = ("win_rate", "mean_turns", "mean_reward", "num_episodes")
SHORT = ["--num_games", str(NUM_GAMES), "--num_demonstrations", "200", "--warm_start_steps", "20", "--max_steps", "8"]
PLAYERS = {"before", "after", "random", "greedy"}


def command(output: Path, *options: str) -> list[str]:
    script = ROOT / "examples" / "twenty_questions.py"
    return [sys.executable, str(script), *SHORT, "--logging_steps", "4", "--output_dir", str(output), *options]


def summary_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "summary.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("run")
    done = subprocess.run(command(output, "--seed", "3"), capture_output=True, text=True, check=True, cwd=output)
    return output, done.stdout


def test_the_summary_says_who_won_how_often(run: tuple[Path, str]) -> None:
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


def test_a_table_at_the_end_says_it_in_one_look(run: tuple[Path, str]) -> None:
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
        (["--load_in_4bit"], "--load_in_4bit is not supported yet"),
        (["--model", "a", "--model_name_or_path", "b"], "are the same"),
        (["--objects", "cat", "dgo"], "did you mean 'dog'"),
        (["--remove_unused_columns"], "the environment's columns would be dropped"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(options: list[str], message: str, tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path, *options), capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ConfigError" in done.stderr
    assert message in done.stderr


def test_a_model_and_settings_of_ones_own(run: tuple[Path, str], tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {run[0] / 'model'}\nobjects: [all]\nmax_steps_per_episode: 20\nmax_steps: 2\n"
        "advantage_estimator: rloo\nbeta: 0.01\nper_device_train_batch_size: 8\nnum_generations: 4\n"
        "learning_rate: 1.0e-4\nmax_turn_tokens: 8\n",
        encoding="utf-8",
    )
    output = tmp_path / "out"
    arguments = [arg for arg in command(output) if arg not in {"--max_steps", "8"}]
    done = subprocess.run([*arguments, "--config", str(config)], capture_output=True, text=True, check=True)
    summary = summary_of(output)
    assert summary["settings"]["advantage_estimator"] == "rloo"
    assert summary["settings"]["max_steps"] == 2
    assert summary["env_config"]["objects"] == summary["env_config"]["properties"] == "all"
    assert summary["env_config"]["max_steps_per_episode"] == 20
    assert "warm start" not in summary["seconds"]
    assert "after" in done.stdout


@pytest.mark.parametrize(
    ("signum", "phase", "status"),
    [(signal.SIGINT, "win rate", 0), (signal.SIGTERM, "win rate", 143), (signal.SIGTERM, "warm start", 143)],
)
def test_ctrl_c_and_sigterm_keep_the_policy_as_it_is(
    signum: signal.Signals, phase: str, status: int, tmp_path: Path
) -> None:
    arguments = [*command(tmp_path, "--max_steps", "100000", "--warm_start_steps", "2000"), "--logging_steps", "1"]
    if phase == "win rate":
        arguments += ["--warm_start_steps", "20"]
    process = subprocess.Popen(
        arguments,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Where the tests themselves run in the background, SIGINT is ignored, and children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    assert process.stderr is not None
    watchdog = threading.Timer(240, process.kill)
    watchdog.start()
    for line in process.stderr:  # tqdm's carriage returns count as line ends
        if phase in line and "loss" * (phase == "warm start") in line:
            process.send_signal(signum)
            break
    output, _ = process.communicate()
    watchdog.cancel()
    assert process.returncode == status, output
    assert "keeping the policy as it is now" in output
    assert summary_of(tmp_path)["interrupted"] is True
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_adapters_are_trained_and_merged_into_the_policy_that_is_saved(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, "--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--max_steps", "4"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    names = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert not any("lora" in name for name in names)
    assert summary_of(tmp_path)["after"]["num_episodes"] == NUM_GAMES
