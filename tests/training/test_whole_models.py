"""Models of images and text are trained on text: nothing of their folders is lost, and what text cannot reach rests."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import whole_run
from datasets import Dataset
from games import GuessNumber, demonstrated, policy, settings, tasks, trainer_of
from launch import launch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    ProcessorMixin,
    TrainerCallback,
)
from vllm_engines import Engine, ScriptedGeneration, started
from whole_models import TEXT, Lengths, change, check_kept, configured, folder_of, mixed_folder, tensors, whole

import agentsgym
from agentsgym import ConfigError, GRPOEnvTrainer, PolicyAgent, TrainingRun, imitate
from agentsgym.agents.policy import loading
from agentsgym.agents.policy.loading import load_policy, load_tokenizer
from agentsgym.agents.policy.text_path import beyond_text, decoder_of, spare_layers
from agentsgym.training.selection.imitate import imitation_config

LORA = {"use_peft": True, "lora_target_modules": ["all-linear"], "lora_r": 2}
FAULT = "Llama 4 reads image_outputs of its language model, which has none"
fails_with_llama4 = pytest.mark.xfail(transformers.__version__ == "5.24.0", reason=FAULT)


@pytest.mark.parametrize(
    ("kind", "changes"), [("qwen3_5", {}), ("gemma3", {"beta": 0.1}), ("qwen3_5", {"model_settings": LORA})]
)
def test_a_trained_folder_has_every_tensor_of_the_one_it_began_with(kind: str, changes: Any, tmp_path: Path) -> None:
    folder = mixed_folder(kind, tmp_path / "model")
    agentsgym.train(configured(tmp_path, folder, **changes))
    check_kept(folder, tmp_path / "out" / "model")
    model, _ = load_policy(str(tmp_path / "out" / "model"))
    assert type(model) is type(whole(kind))
    assert model.config.dtype is torch.bfloat16


@pytest.mark.parametrize("changes", [{"beta": 0.1}, {"model_settings": LORA}], ids=["reference", "adapters"])
def test_two_ranks_that_share_the_weights_keep_every_tensor(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = mixed_folder("gemma3", tmp_path / "model")
    done = launch(Path(whole_run.__file__), tmp_path, folder, json.dumps({"fsdp": True, **changes}))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    check_kept(folder, tmp_path / "out" / "model")


def test_saved_folders_and_checkpoints_have_what_the_class_never_reads(tmp_path: Path) -> None:
    folder = mixed_folder("gemma3", tmp_path / "model")
    options = {"model": folder, "env_class": Lengths, "save_strategy": "steps", "save_steps": 1}
    with trainer_of(tmp_path / "out", max_steps=1, **options) as trainer:
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
    for place in (tmp_path / "saved", tmp_path / "out" / "checkpoint-1"):
        assert tensors(place).keys() == tensors(folder).keys()
    with trainer_of(tmp_path / "out", max_steps=2, **options) as trainer:
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("is_slow", [False, True])
def test_what_a_coarser_dtype_rounds_is_saved_as_it_was(
    is_slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "is_slow_in_bfloat16", lambda: is_slow)
    folder = mixed_folder("gemma3", tmp_path / "model")
    run = TrainingRun(load_policy(folder), settings(tmp_path / "out"))
    run.keeps_dtypes = True
    run.save_policy()
    before, after = tensors(folder), tensors(tmp_path / "out" / "model")
    assert all(one.equal(after[name]) and one.dtype is after[name].dtype for name, one in before.items())


def test_another_dtype_is_kept_if_it_was_asked_for(tmp_path: Path) -> None:
    folder = folder_of(whole("gemma3").bfloat16(), tmp_path / "model")
    agentsgym.train(configured(tmp_path, folder, model_settings={"dtype": "float32"}))
    assert {one.dtype for one in tensors(tmp_path / "out" / "model").values()} == {torch.float32}


def test_the_dtype_of_weights_in_a_pickle_is_kept(tmp_path: Path) -> None:
    folder = folder_of(policy()[0].bfloat16(), tmp_path / "model")
    torch.save(tensors(folder), f"{folder}/pytorch_model.bin")
    Path(folder, "model.safetensors").unlink()
    agentsgym.train(configured(tmp_path, folder))
    assert {one.dtype for one in tensors(tmp_path / "out" / "model").values()} == {torch.bfloat16}


def test_the_class_that_a_folder_names_is_loaded(tmp_path: Path) -> None:
    model = whole("qwen3_5")
    folder = folder_of(model, tmp_path / "whole")
    text = AutoModelForCausalLM.from_pretrained(folder)
    assert type(load_policy(folder)[0]) is type(model)
    for name in (type(text).__name__, "Qwen3_5TextModel"):  # one without a head
        assert type(load_policy(folder_of(text, tmp_path / "text", architectures=[name]))[0]) is type(text)


def test_a_folder_of_another_class_is_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=64)
    encoder = folder_of(transformers.T5ForConditionalGeneration(config), tmp_path / "encoder")
    unknown = folder_of(policy()[0], tmp_path / "unknown", architectures=["NoSuchForCausalLM"])
    biased = folder_of(policy()[0], tmp_path / "biased")
    change(biased, **{"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})  # such as Qwen2's
    foreign = folder_of(policy()[0], tmp_path / "foreign")
    save_file(tensors(folder_of(whole("gemma3"), tmp_path / "whole")), f"{foreign}/model.safetensors")
    trainer = partial(GRPOEnvTrainer, env=GuessNumber(policy()[1]), args=settings(tmp_path), train_dataset=tasks())
    for folder, sentence in (
        (encoder, "PolicyAgent requires a decoder-only model, got T5ForConditionalGeneration"),
        (unknown, r"has no class 'NoSuchForCausalLM', which config\.json in .*unknown names"),
        (biased, r"the weights in .*biased are not those of a LlamaForCausalLM.*1 tensors are left over \("),
        (foreign, r"the weights in .*foreign are not those of a LlamaForCausalLM.*12 tensors are missing \("),
    ):
        for load in (load_policy, trainer, lambda model: agentsgym.train(configured(tmp_path, model))):
            with pytest.raises(ConfigError, match=sentence):
                load(folder)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"]])
@pytest.mark.parametrize("trained_on", ["whole", "text"])
def test_adapters_of_the_text_only_class_fit_the_whole_one(trained_on: str, targets: Any, tmp_path: Path) -> None:
    folders = {"whole": folder_of(whole("gemma3"), tmp_path / "whole")}
    text = transformers.Gemma3ForCausalLM(whole("gemma3").config.text_config)
    text.model.load_state_dict(whole("gemma3").model.language_model.state_dict())
    folders["text"] = folder_of(text, tmp_path / "text")
    model, _ = load_policy(folders[trained_on])
    towers = ".*vision.*" if targets == ["q_proj"] and trained_on == "whole" else None
    scaled = {f"{decoder_of(model)[1]}.layers.0.self_attn.q_proj": 32}
    config = LoraConfig(
        r=2, target_modules=targets, exclude_modules=towers, init_lora_weights=False, alpha_pattern=scaled
    )
    adapted: Any = get_peft_model(model, spare_layers(config, model))
    adapted.save_pretrained(tmp_path / "adapters")
    policy()[1].save_pretrained(tmp_path / "adapters")
    ids = torch.arange(5, 14)[None]
    expected = adapted.eval()(ids).logits
    file = tmp_path / "adapters" / "adapter_config.json"
    for folder in folders.values():
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": folder}))
        loaded, _ = load_policy(str(tmp_path / "adapters"))
        torch.testing.assert_close(loaded(ids).logits, expected)
    other = folder_of(policy()[0], tmp_path / "other")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": other}))
    with pytest.raises(ConfigError, match=r"the adapters in .*adapters do not fit their base model .*other: "):
        load_policy(str(tmp_path / "adapters"))


def test_adapters_of_another_class_are_not_resumed(tmp_path: Path) -> None:
    def trainer(model: Any, **changes: Any) -> Any:
        adapters = LoraConfig(r=2, target_modules=["q_proj"])
        saved = {"save_strategy": "steps", "save_steps": 1, "env_class": Lengths, "peft_config": adapters}
        return trainer_of(tmp_path / "out", model=model, **saved, **changes)

    text = transformers.Gemma3ForCausalLM(whole("gemma3").config.text_config)
    with trainer(text, max_steps=1) as begun:
        begun.train()
    with trainer(text, max_steps=2) as resumed:
        resumed.train(resume_from_checkpoint=True)
    with trainer(whole("gemma3"), max_steps=3) as other, pytest.raises(ConfigError, match="are on other layers than"):
        other.train(resume_from_checkpoint=True)


def processor_of(folder: Path) -> Any:
    """A processor of images and text, whose tokenizer has no chat template."""
    names = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
    policy()[1].save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens=names)
    template, tokenizer.chat_template = tokenizer.chat_template, None
    return Gemma3Processor(Gemma3ImageProcessorPil(), tokenizer, chat_template=template)


def rows() -> Any:
    """Tasks that name their environment."""
    agentsgym.register(GuessNumber, "tests.GuessNumber")
    return Dataset.from_list([{"env_class_path": "tests.GuessNumber", **row} for row in tasks()])


def test_what_was_trained_with_a_processor_is_loaded_with_it(tmp_path: Path) -> None:
    processor = processor_of(tmp_path / "tokenizer")
    model, args = whole("gemma3"), settings(tmp_path / "out", max_steps=1, save_strategy="steps", save_steps=1)
    with GRPOEnvTrainer(model, None, args, train_dataset=rows(), processing_class=processor) as trainer:
        assert trainer.processing_class is processor.tokenizer
        assert processor.tokenizer.chat_template == processor.chat_template
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
    agentsgym.train(configured(tmp_path / "again", str(tmp_path / "saved"), beta=0.1))
    folders = [tmp_path / "saved", tmp_path / "out" / "checkpoint-1", tmp_path / "again" / "out" / "model"]
    for folder in folders:
        loaded = AutoProcessor.from_pretrained(folder)
        assert type(loaded) is Gemma3Processor
        assert loaded.chat_template == processor.chat_template
    GRPOEnvTrainer(str(folders[0]), None, settings(tmp_path / "next"), train_dataset=rows()).close()
    for file in folders[0].glob("*processor_config.json"):
        file.unlink()
    GRPOEnvTrainer(str(folders[0]), None, settings(tmp_path / "next"), train_dataset=rows()).close()


def test_a_chat_template_that_only_processors_read_is_read(tmp_path: Path) -> None:
    folder = folder_of(whole("gemma3"), tmp_path / "model")
    (tmp_path / "model" / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert load_tokenizer(folder).chat_template == "{{ messages }}"


def test_a_processor_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    class Images(ProcessorMixin):
        def __init__(self, image_processor: Any = None) -> None:
            super().__init__(image_processor)

    model, env = whole("gemma3"), GuessNumber(policy()[1])
    for build in (
        lambda one: PolicyAgent(model, one),
        lambda one: GRPOEnvTrainer(model, env, settings(tmp_path), train_dataset=tasks(), processing_class=one),
        lambda one: TrainingRun((model, one), settings(tmp_path)),
    ):
        with pytest.raises(ConfigError, match="rollouts are text, but the Images has no tokenizer: pass the model's"):
            build(Images(Gemma3ImageProcessorPil()))


def test_what_text_cannot_reach_is_frozen_unless_it_is_to_be_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for unused in (None, True):
        with trainer_of(tmp_path, model=whole("gemma3"), ddp_find_unused_parameters=unused) as trainer:
            trained = {name for name, weight in trainer.model.named_parameters() if weight.requires_grad}
        towers = {name for name in trained if not name.startswith(("model.language_model.", "lm_head."))}
        assert bool(towers) == bool(unused)
        assert len(trained) > 20
    assert caplog.text.count("no text reaches model.vision_tower, model.multi_modal_projector") == 1
    assert not beyond_text(policy()[0])


@pytest.mark.parametrize("kind", ["gemma3", pytest.param("llama4", marks=fails_with_llama4), "qwen3_5"])
def test_the_gradient_is_that_of_a_plain_forward_pass(kind: str, tmp_path: Path) -> None:
    adapters = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    grads = dict[str, torch.Tensor]()
    changes = {"model": whole(kind), "env_class": Lengths, "peft_config": adapters}
    trainer = trainer_of(tmp_path, max_steps=1, max_grad_norm=1e9, **changes)
    trainer.add_callback(Gradients(grads))
    generate, batches = trainer._generate_and_score_completions, list[dict[str, Any]]()
    trainer._generate_and_score_completions = lambda rows: batches.append(generate(rows)) or batches[0]
    state = {name: one.clone() for name, one in trainer.model.state_dict().items()}
    trainer.train()
    plain: Any = get_peft_model(whole(kind), spare_layers(adapters, whole(kind))).eval()
    plain.load_state_dict(state)
    (batch,) = batches
    for ids, length, advantages in zip(
        batch["prompt_completion_ids"], batch["attention_mask"].sum(1), batch["advantages"], strict=True
    ):
        logprobs = plain(input_ids=ids[None, :length], use_cache=False).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(1, ids[1:length, None])[:, 0]
        (-(chosen * advantages[1:length]).sum() / batch["num_items_in_batch"]).backward()
    expected = {name: one.grad for name, one in plain.named_parameters() if one.grad is not None}
    assert expected.keys() == grads.keys()
    assert sum(bool(one.any()) for one in grads.values()) > len(grads) / 2
    for name, gradient in expected.items():
        torch.testing.assert_close(grads[name], gradient, rtol=1e-3, atol=1e-5)


class Gradients(TrainerCallback):
    """Keeps those of the first step."""

    def __init__(self, kept: dict[str, torch.Tensor]) -> None:
        self.kept = kept

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.kept |= {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def gemma3n() -> Any:
    sizes = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 64, "laurel_rank": 4}
    lists = {"intermediate_size": [32, 32], "activation_sparsity_pattern": [0.0, 0.0], "num_kv_shared_layers": 0}
    return transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**{**TEXT, **sizes, **lists}))


def mamba2() -> Any:
    sizes = {"hidden_size": 16, "state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1, "num_hidden_layers": 1}
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(vocab_size=8, **sizes))


SPARED: dict[str, tuple[Any, set[str]]] = {
    "gemma3": (partial(whole, "gemma3"), {"vision_tower", "multi_modal_projector"}),
    "llama4": (partial(whole, "llama4"), {"vision_model", "multi_modal_projector", "router"}),
    "mamba2": (mamba2, {"out_proj"}),
    "gemma3n": (gemma3n, {"correction_coefs", "modality_router"}),
}


@pytest.mark.parametrize("kind", SPARED)
def test_adapters_on_all_linear_layers_spare_some(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    build, spared = SPARED[kind]
    adapted: Any = get_peft_model(build(), spare_layers(LoraConfig(target_modules="all-linear"), build()))
    names = {name for name, _ in adapted.named_modules() if name.endswith("lora_A")}
    assert names
    assert not any(part in spared for name in names for part in name.split("."))
    assert caplog.text.count("target_modules='all-linear' leaves") == 1
    chosen = LoraConfig(target_modules="all-linear", exclude_modules=["q_proj"])
    assert spare_layers(chosen, build()) is chosen
    assert spare_layers(None, build()) is None


@fails_with_llama4
def test_an_auxiliary_loss_that_cannot_be_computed_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    model = whole("llama4")
    model.config.text_config.router_aux_loss_coef = 0.1
    for refused in (
        lambda: trainer_of(tmp_path, model=model),
        lambda: TrainingRun((model, policy()[1]), settings(tmp_path)),
        lambda: imitate(model, demonstrated(1).trajectories, policy()[1]),
    ):
        with pytest.raises(ConfigError, match=r"auxiliary loss of a llama4_text.*set router_aux_loss_coef to 0"):
            refused()
    trainer_of(tmp_path, model=model, router_aux_loss_coef=0.0).close()


@pytest.mark.parametrize("kind", ["gemma3", pytest.param("llama4", marks=fails_with_llama4)])
def test_a_warm_start_of_a_whole_model_changes_its_weights_alone(kind: str) -> None:
    model, before = whole(kind), whole(kind)
    imitate(model, demonstrated(2).trajectories, policy()[1], imitation_config(max_steps=1, use_cpu=True))
    changed = {name for name, one in before.named_parameters() if not one.equal(model.get_parameter(name))}
    assert changed
    assert not any("vision" in name or "projector" in name for name in changed)
    assert all(weight.requires_grad for weight in model.parameters())
    given, kept = before.config.to_dict(), model.config.to_dict()
    assert dict.fromkeys(kept) | given == kept  # transformers may add an id that is None


def test_an_output_folder_that_holds_the_model_is_refused(tmp_path: Path) -> None:
    folder = folder_of(policy()[0], tmp_path / "out" / "model")
    before = tensors(folder)
    with pytest.raises(ConfigError, match=r"output_dir='.*out' holds the model, .*out/model: train into another"):
        agentsgym.train(configured(tmp_path, folder), overwrite=True)
    with pytest.raises(ConfigError, match=r"output_dir='.*out' holds the model"):
        TrainingRun(load_policy(folder), settings(tmp_path / "out"))
    for model in (folder, load_policy(folder)[0]):
        with pytest.raises(ConfigError, match=r"output_dir is the folder of the model, .*model, which would be "):
            trainer_of(Path(folder), model=model)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"model"}
    assert tensors(folder).keys() == before.keys()


def test_vllm_is_sent_the_names_of_the_class_that_it_serves() -> None:
    adapted: Any = get_peft_model(whole("qwen3_5"), LoraConfig(target_modules=["q_proj"]))
    for model in (whole("qwen3_5"), adapted):
        generation = ScriptedGeneration(Engine())
        generation.model = model
        generation.agent().prepare(started(0))
        names = {name for event in generation.engine.events if event[0] == "load" for name in event[1:]}
        assert names == {name for name, _ in whole("qwen3_5").named_parameters()}
        assert {name.split(".layers.")[0] for name in names if ".layers." in name} == {"model.language_model"}
