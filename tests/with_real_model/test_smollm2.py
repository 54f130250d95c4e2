"""SmolLM2-135M-Instruct in every part of the library, and in TRL's SFT and DPO trainers on exported games."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ran
from datasets import Dataset, load_dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from agentsgym import (
    GRPOEnvConfig,
    GRPOEnvTrainer,
    PolicyAgent,
    RolloutStore,
    ScriptedAgent,
    Trajectory,
    audit,
    check_env,
    evaluate,
    imitate,
    logprob_gap,
    packaged_model,
)
from agentsgym.agents.policy.loading import is_slow_in_bfloat16, load_model
from agentsgym.envs.TwentyQuestions import ImitationPlayer, TwentyQuestionsEnv
from agentsgym.training.selection.imitate import imitation_config
from benchmarks.real_games import NumberGuessing

TASKS = [{"seed": seed} for seed in range(8)]
IS_BFLOAT16 = not is_slow_in_bfloat16()  # 40 times slower on some processors
DTYPE = torch.bfloat16 if IS_BFLOAT16 else torch.float32
LORA = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")


@pytest.fixture(scope="module")
def policy() -> tuple[Any, Any]:
    """The model, which no test changes, and its tokenizer."""
    return load_model("smollm2", dtype=DTYPE)


@pytest.fixture(scope="module")
def rollouts(policy: tuple[Any, Any]) -> list[Trajectory]:
    model, tokenizer = policy
    env = NumberGuessing(tokenizer, {"max_steps_per_episode": 4})
    return env.rollout(TASKS, PolicyAgent(model, tokenizer, max_turn_tokens=12))


def test_it_answers_a_question(policy: tuple[Any, Any]) -> None:
    model, tokenizer = policy
    prompt: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


def test_the_record_is_what_its_own_template_renders(policy: tuple[Any, Any], rollouts: list[Trajectory]) -> None:
    _, tokenizer = policy
    assert audit(rollouts, vocabulary_size=len(tokenizer)).ok
    for rollout in rollouts:
        rendered = tokenizer.apply_chat_template([dict(message) for message in rollout.messages], tokenize=False)
        recorded = tokenizer.decode(rollout.token_ids)
        assert rendered.startswith(recorded.removesuffix("\n"))
        assert len(rendered) - len(recorded) <= len("<|im_end|>\n")  # an answer at its limit has no end
        assert sum(rollout.agent_token_mask) == sum(turn.stop - turn.start for turn in rollout.turns)


def test_an_episode_that_the_caller_began_is_a_row_of_its_tokens(policy: tuple[Any, Any]) -> None:
    _, tokenizer = policy
    env = TwentyQuestionsEnv(tokenizer, {"objects": ["bee", "kite"], "max_steps_per_episode": 3})
    env.active_states["mine"] = env._initialize_episode("mine", {"solution": "bee", "seed": 0})
    output = ["Is it an animal?", "Can it fly?", "Is it a bee?"]
    row = env._run_complete_episode("mine", ScriptedAgent(output))
    mask, rewards = row["agent_token_mask"], row["per_token_rewards"]
    assert len(row["full_token_ids"]) == len(mask) == len(rewards)
    turns = [list(part) for is_agent, part in groupby(range(len(mask)), lambda i: mask[i]) if is_agent]
    for turn, text in zip(turns, output, strict=True):
        decoded = tokenizer.decode([row["full_token_ids"][i] for i in turn], skip_special_tokens=True)
        assert decoded.strip() == text
    assert sum(rewards) == pytest.approx(row["final_reward"])
    assert all(is_agent for is_agent, reward in zip(mask, rewards, strict=True) if reward)


def test_its_environment_passes_every_check(policy: tuple[Any, Any]) -> None:
    _, tokenizer = policy
    report = check_env(NumberGuessing, TASKS[:2], tokenizer=tokenizer, raise_on="warning")
    assert report.num_turns > 0


def test_logprobs_of_sampling_are_those_of_a_forward_pass(policy: tuple[Any, Any], rollouts: list[Trajectory]) -> None:
    model, _ = policy
    gap = logprob_gap(model, rollouts)
    assert gap.mean_gap < 0.05, gap
    gap = logprob_gap(model.float(), rollouts)
    model.to(DTYPE)
    assert gap.mean_gap < 0.1, gap


def test_evaluations_are_stored_and_read(policy: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = policy
    env = NumberGuessing(tokenizer, {"max_steps_per_episode": 2})
    result = evaluate(env, PolicyAgent(model, tokenizer, max_turn_tokens=12), TASKS[:4], store=tmp_path / "store")
    stored = RolloutStore(tmp_path / "store")
    assert [one.token_ids for one in stored] == [one.token_ids for one in result.trajectories]


def trained(folder: Path, *, max_steps: int, **settings: Any) -> GRPOEnvTrainer:
    model, tokenizer = load_model("smollm2", dtype=DTYPE)
    env = NumberGuessing(tokenizer, {"max_steps_per_episode": 2})
    batch = {"per_device_train_batch_size": 4, "num_generations": 4, "max_turn_tokens": 8}
    defaults = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "report_to": "none", "save_strategy": "no"}
    args = GRPOEnvConfig(
        str(folder), max_steps=max_steps, use_cpu=True, bf16=IS_BFLOAT16, **(batch | defaults | settings)
    )
    rows = Dataset.from_list([{"task_data": task} for task in TASKS])
    return GRPOEnvTrainer(model, env, args, train_dataset=rows, peft_config=LORA)


def adapters(trainer: GRPOEnvTrainer) -> dict[str, torch.Tensor]:
    model: Any = trainer.model
    return {name: weight.clone() for name, weight in model.named_parameters() if weight.requires_grad}


def test_a_resumed_run_ends_with_the_same_adapters(tmp_path: Path) -> None:
    straight = trained(tmp_path / "straight", max_steps=3)
    start = adapters(straight)
    straight.train()
    trained(tmp_path / "resumed", max_steps=3, save_strategy="steps", save_steps=1).train()
    for newer in (2, 3):
        folder = tmp_path / "resumed" / f"checkpoint-{newer}"
        folder.rename(tmp_path / folder.name)
    resumed = trained(tmp_path / "resumed", max_steps=3, save_strategy="steps", save_steps=1)
    resumed.train(resume_from_checkpoint=True)
    assert any(not torch.equal(start[name], weight) for name, weight in adapters(straight).items())
    torch.testing.assert_close(adapters(resumed), adapters(straight), atol=0, rtol=0)


def test_all_weights_are_trained_in_float32_under_autocast(tmp_path: Path) -> None:
    model, tokenizer = load_model("smollm2", dtype=torch.float32)
    before = model.model.embed_tokens.weight.detach().clone()
    env = NumberGuessing(tokenizer, {"max_steps_per_episode": 2})
    args = GRPOEnvConfig(
        str(tmp_path),
        max_steps=1,
        learning_rate=1e-5,
        per_device_train_batch_size=4,
        num_generations=4,
        max_turn_tokens=8,
        use_cpu=True,
        bf16=IS_BFLOAT16,
        report_to="none",
        save_strategy="no",
    )
    trainer = GRPOEnvTrainer(model, env, args, train_dataset=Dataset.from_list([{"task_data": task} for task in TASKS]))
    trainer.train()
    assert model.dtype == torch.float32
    assert not torch.equal(before, model.model.embed_tokens.weight)


def test_it_imitates_a_player_of_twenty_questions(tmp_path: Path) -> None:
    model, tokenizer = load_model("smollm2", dtype=torch.float32)
    env = TwentyQuestionsEnv(tokenizer, {"objects": ["dog", "car", "apple"], "max_steps_per_episode": 3})
    tasks = [{"solution": name, "seed": seed} for seed, name in enumerate(env.candidates.objects)]
    games = env.rollout(tasks, ImitationPlayer(env, seed=0))
    args = imitation_config(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=3,
        learning_rate=2e-5,
        bf16=IS_BFLOAT16,
        use_cpu=True,
        logging_steps=1,
    )
    losses = [entry["loss"] for entry in imitate(model, games, tokenizer, args).log_history if "loss" in entry]
    assert losses[-1] < losses[0]


def test_other_programs_open_its_folder() -> None:
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in Path(packaged_model()).iterdir()
    }


SETTINGS: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": IS_BFLOAT16,
    "gradient_checkpointing": False,
}


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of easy games, some won and some lost."""
    folder = tmp_path_factory.mktemp("games") / "store"
    model, tokenizer = load_model("smollm2", dtype=DTYPE)
    env = NumberGuessing(tokenizer, {"highest": 2, "max_steps_per_episode": 3})
    tasks = [{"seed": seed} for seed in range(4)]
    result = evaluate(env, PolicyAgent(model, tokenizer, max_turn_tokens=12), tasks, num_rollouts=16, store=folder)
    assert {one.success for one in result.trajectories} == {True, False}
    return folder


def rows(games: Path, to: str, folder: Path) -> Dataset:
    assert ran("export", games, "--to", to, "-o", folder / "rows.jsonl").code == 0
    return load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / "cache"))


@pytest.mark.parametrize(
    ("to", "trainer_class", "args_class"), [("sft", SFTTrainer, SFTConfig), ("dpo", DPOTrainer, DPOConfig)]
)
def test_trl_trains_on_exported_games(
    to: str, trainer_class: Any, args_class: Any, games: Path, tmp_path: Path
) -> None:
    model, tokenizer = load_model("smollm2", dtype=DTYPE)
    lora = LoraConfig(r=8, target_modules="all-linear")
    args = args_class(output_dir=str(tmp_path / "out"), **SETTINGS)
    exported = rows(games, to, tmp_path)
    assert len(exported) >= 4
    trainer = trainer_class(
        model=model, args=args, train_dataset=exported, processing_class=tokenizer, peft_config=lora
    )
    trainer.train()
    trained = [one for name, one in trainer.model.named_parameters() if "lora_B" in name]
    assert any(float(one.detach().abs().max()) > 0 for one in trained)
