"""Let vLLM servers load LoRA adapters from a folder, so that no merged weights are pushed to them.

Each version has a new name, since a server's prefix cache goes by name; requests name it as their model. Open requests
keep the version that they began with, so no server pauses.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
import uuid
import weakref
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

from agentsgym.agents.policy.model import evaluation_mode
from agentsgym.agents.policy.sharded import is_sharded, zero_stage
from agentsgym.agents.vllm.server import TransientError, VLLMServer
from agentsgym.errors import AgentError
from agentsgym.texts import sentence_of, shown

_PREFIX: Final = "agentsgym-adapters-"  # of versions; a server that has loaded one still has the weights of its start
_MAX_GAP: Final = 0.06  # nats, the mean over some tokens; rounding to bfloat16 causes about 0.02 to 0.04
_PROBE_S: Final = 120.0  # for the tokens that are compared
_PLAIN: Final = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": 0}
_OPTIONS: Final = {  # of LoRA, which servers follow, or which concern only training
    *("task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "layers_to_transform"),
    *("r", "lora_alpha", "use_rslora", "lora_dropout", "target_modules", "exclude_modules", "layers_pattern"),
}


class AdapterVersions:
    """Versions of the trained adapters, each in a folder under ``TMPDIR`` with its name, of which the last is known."""

    def __init__(self, generation: Any, *, num_slots: int) -> None:
        """Set up for TRL's ``VLLMGeneration`` of a ``PeftModel``; requests use ``num_slots`` versions at once."""
        self._accelerator, self._num_slots = generation.accelerator, num_slots
        self._model: Any = generation.accelerator.unwrap_model(generation.model)
        self.folder = self._root = Path(tempfile.mkdtemp(prefix=_PREFIX))
        weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)

    async def reason_to_merge(self, server: VLLMServer, session: Any, version: str | None, prompt: list[int]) -> str:
        """Return why a server that was started needs merged weights; empty if its weights are those under adapters."""
        config = await server.read_config(session)
        if not config:
            return "its options are unknown: start it with VLLM_SERVER_DEV_MODE=1"
        lora: dict[str, Any] = config.get("lora_config") or {}
        replicas = config.get("parallel_config", {}).get("data_parallel_size", 1)
        checks = [
            (bool(lora), "it was started without --enable-lora"),
            (lora.get("max_loras", 0) >= self._num_slots, f"its --max-loras is below {self._num_slots}"),
            (not lora.get("target_modules"), "its --lora-target-modules may leave some out"),
            (replicas == 1, f"only one of its {replicas} data-parallel replicas would load them"),
            (version is not None, "it does not report the version of its weights (before vLLM 0.31)"),
            (str(version).startswith(("default", _PREFIX)), f"its own weights were replaced (version {version!r})"),
        ]
        reason = next((reason for is_met, reason in checks if not is_met), "") or self._unservable()
        if reason or is_sharded(self._accelerator):
            return reason
        try:
            async with asyncio.timeout(_PROBE_S):
                options = {**_PLAIN, "model": server.model, "ignore_eos": True}
                answer = await server.complete(session, prompt, 64, options)
        except (AgentError, TransientError, TimeoutError) as error:
            return f"its own weights cannot be compared: {sentence_of(error)}"
        ids = torch.tensor([[*prompt, *answer.token_ids]], device=self._accelerator.device)
        frozen = [one for one in self._model.parameters() if not one.requires_grad]  # PEFT thaws all adapters
        with torch.no_grad(), evaluation_mode(self._model), self._model.disable_adapter():
            table = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        for one in frozen:
            one.requires_grad_(requires_grad=False)
        own = table.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0].cpu()
        gap = (own - torch.tensor(answer.logprobs)).abs().mean().item()
        differs = f"its log-probabilities without adapters differ from the trainer's by {gap:.2g} nats on average"
        return "" if gap <= _MAX_GAP else differs

    def _unservable(self) -> str:
        """Return why servers with the adapters would not serve the trained model; empty if they would."""
        name, *others = self._model.active_adapters
        config = self._model.peft_config[name]
        if others or config.peft_type != "LORA" or zero_stage(self._accelerator) == 3:
            return "they must be the one LoRA adapter of a model that ZeRO-3 does not shard"
        for option, value in type(config)().to_dict().items():
            if option not in _OPTIONS and getattr(config, option, value) not in (value, False, "gaussian"):
                return f"not all servers follow {option}={shown(getattr(config, option))}"
        served = re.compile(rf"(?!.*\blm_head\b).*\.lora_[AB]\.{re.escape(name)}\.weight")
        trained = [name for name, parameter in self._model.named_parameters() if parameter.requires_grad]
        return next((f"{name} is trained, too" for name in trained if not served.fullmatch(name)), "")

    def write(self, in_use: set[str]) -> None:
        """Write a version, and delete those that are not in use. Collective."""
        adapter, tensors = self._model.active_adapters[0], dict[str, torch.Tensor]()
        for name, parameter in self._model.named_parameters():
            if ".lora_" in name and f".{adapter}." in name:
                whole: Any = parameter.detach().to(self._accelerator.device)
                whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole  # FSDP2 shards it
                tensors[name.replace("_checkpoint_wrapped_module.", "").replace(f".{adapter}.", ".")] = whole.cpu()
        if self._accelerator.is_main_process:
            for folder in self._root.iterdir():
                if folder.name not in in_use:
                    shutil.rmtree(folder, ignore_errors=True)
            self.folder = self._root / f"{_PREFIX}{uuid.uuid4().hex[:12]}"
            self._model.peft_config[adapter].save_pretrained(self.folder)
            save_file(tensors, self.folder / "adapter_model.safetensors")
