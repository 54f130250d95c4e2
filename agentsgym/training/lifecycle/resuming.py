"""Resume a run where its checkpoint was saved: at the same position in the generation cycle and in the dataset."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import torch
from accelerate import PartialState
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from agentsgym.errors import ConfigError
from agentsgym.ranks import all_gather_objects
from agentsgym.removed import REMOVED
from agentsgym.texts import shown
from agentsgym.training.lifecycle.checkpoint_files import (
    checkpoints_in,
    finish_renames,
    problem_with,
    read_manifest,
    read_state,
)

if TYPE_CHECKING:
    from agentsgym.training.config import GRPOEnvConfig


def take_generator_states(device: torch.device) -> Callable[[], None]:
    """Save the states of the global generators of Python, NumPy and torch, and return a function that restores them."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    module: Any = None if device.type == "cpu" else torch.get_device_module(device)
    device_state = module.get_rng_state() if hasattr(module, "get_rng_state") else None

    def restore() -> None:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if device_state is not None:
            module.set_rng_state(device_state)

    return restore


@contextlib.contextmanager
def preserve_rng_state(device: torch.device) -> Generator[None]:
    """Restore the global generators of Python, NumPy and torch, so that an evaluation does not affect later draws."""
    restore = take_generator_states(device)
    try:
        yield
    finally:
        restore()


logger = logging.getLogger(__name__)

_MAX_HASHED: Final = 1000  # rows, evenly spaced
# Prefixes of the names of settings that do not affect the trained policy.
_IRRELEVANT_SETTINGS: Final = (
    *("output_dir", "run_name", "project", "report_to", "disable_tqdm", "log", "save_", "hub_", "push_to_hub"),
    *("eval_", "do_", "per_device_eval", "num_generations_eval", "dataloader_", "resume_from", "max_steps"),
    *("num_train_epochs", "load_best", "metric_for", "greater_is", "local_rank", "env_", "ddp_"),
    *("turn_timeout", "episode_timeout", "max_failed", "num_completions", "trackio", "overwrite", "push_", "bf16_"),
    "preemption_",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The point at which a run is resumed.

    Attributes:
        folder: The checkpoint; None for a new run.
        step: Number of completed optimizer steps.
    """

    folder: Path | None = None
    step: int = 0


def facts_of(args: GRPOEnvConfig, dataset: Any, env_config: Any = None) -> dict[str, Any]:
    """The facts about a run, as JSON for its checkpoints, that a resumed run is compared with."""
    order: dict[str, Any] = {
        "num_rows": None if isinstance(dataset, IterableDataset) else len(dataset),
        "generation_batch_size": args.generation_batch_size,
        "rollouts_per_step": args.train_batch_size * args.world_size * args.gradient_accumulation_steps,  # pyright: ignore[reportUnknownMemberType]
    }
    if order["num_rows"] is not None:
        table, size = cast("Any", dataset), order["num_rows"]
        rows: list[Any] = [table[index] for index in range(0, size, size // _MAX_HASHED + 1)]
        text = json.dumps([rows, env_config], default=lambda value: type(value).__qualname__, skipkeys=True)
        order["tasks"] = hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()
    order |= {name: getattr(args, name) for name in ("num_generations", "num_iterations", "shuffle_dataset", "seed")}
    settings: Any = json.loads(json.dumps(args.to_dict(), default=repr))
    plugin: Any = args.deepspeed_plugin
    stage = 0 if plugin is None else int(plugin.zero_stage)
    facts: dict[str, Any] = {"num_ranks": args.world_size, "save_only_model": args.save_only_model, "zero_stage": stage}  # pyright: ignore[reportUnknownMemberType]
    return {**facts, "order": order, "settings": settings}


def find_resume_point(
    requested: str | bool | None, run_folder: Path, args: GRPOEnvConfig, facts: Mapping[str, Any], max_steps: int
) -> ResumePoint:
    """Collective: find the checkpoint to resume from, the same on all ranks.

    Args:
        requested: The argument of ``train``: a folder; True for the newest complete checkpoint of the run; ``"auto"``
            for that checkpoint or, if there is none, a new run; None or False for a new run.
        run_folder: The folder of the run's checkpoints.
        args: The settings.
        facts: The facts about this run, from :func:`facts_of`.
        max_steps: Total optimizer steps of the run.

    Raises:
        ConfigError: There is no such checkpoint, it is damaged, or the resumed run would play different tasks.
    """
    if not requested:
        return ResumePoint()
    problem: Exception | None = None
    found: list[ResumePoint] = []
    if PartialState().is_main_process:
        try:
            found = [_find(requested, run_folder, args, facts, max_steps)]
        except ConfigError as error:
            problem = error
    [point] = all_gather_objects(found, problem)
    return point


def _find(
    requested: str | bool, run_folder: Path, args: GRPOEnvConfig, facts: Mapping[str, Any], max_steps: int
) -> ResumePoint:
    finish_renames(run_folder)
    if requested is True or requested == "auto":
        folder, passed_over = _newest_resumable(run_folder, args, max_steps)
        for reason in passed_over:
            logger.warning("skipped %s", reason)
        if folder is None and requested == "auto" and not passed_over:
            return ResumePoint()
        if folder is None:
            remedy = (
                "move them away to start over" if passed_over else "resume_from_checkpoint='auto' would start a new run"
            )
            raise ConfigError(
                f"{run_folder} has no checkpoint to resume from{': ' * bool(passed_over)}"
                f"{'; '.join(passed_over)} ({remedy})"
            )
        logger.info("resuming from %s", folder)
    else:
        is_path = isinstance(requested, str | Path)
        if not is_path or not (folder := Path(requested)).is_dir():
            raise ConfigError(f"resume_from_checkpoint={shown(requested)} is not a folder")
        if damage := problem_with(folder, max_steps):
            raise ConfigError(f"cannot resume from {folder}: {damage}")
    state = read_state(folder)
    step = int(state["global_step"])
    if step < max_steps:
        generations_before(step, args)
        _check_epoch(folder, state, facts)
    _check_facts(folder, facts)
    return ResumePoint(folder=folder, step=step)


def _newest_resumable(run_folder: Path, args: GRPOEnvConfig, max_steps: int) -> tuple[Path | None, list[str]]:
    """Find the newest checkpoint from which the run can be resumed, and why newer ones were skipped."""
    passed_over: list[str] = []
    for folder in checkpoints_in(run_folder):
        reason = problem_with(folder, max_steps)
        if reason is None and (step := int(read_state(folder)["global_step"])) < max_steps:
            try:
                generations_before(step, args)
            except ConfigError as error:
                reason = str(error)
        if reason is None:
            return folder, passed_over
        passed_over.append(f"{folder.name}: {reason}")
    return None, passed_over


def _check_epoch(folder: Path, state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Reject a checkpoint from a later epoch of an iterable dataset, whose epochs transformers cannot count."""
    if facts["order"]["num_rows"] is None and state.get("epoch", 0) > 1:
        raise ConfigError(
            f"{folder} was saved in epoch {int(state['epoch']) + 1} of an iterable dataset, but only the first epoch "
            "can be resumed: use a dataset with a length, or start a new run with this checkpoint as its model"
        )


def _check_facts(folder: Path, now: Mapping[str, Any]) -> None:
    """Reject a run that would play different tasks than the saved run, and warn about other changes."""
    then = read_manifest(folder) or {}
    _check_engine(folder, then, now)
    if (num_ranks := then.get("num_ranks")) != now["num_ranks"]:
        logger.warning(
            "%s was saved by %s ranks, but this run has %d: since each rank has its own random generators, the order "
            "of rows within an optimizer step, and dropout, will differ",
            *(folder, num_ranks, now["num_ranks"]),
        )
    if not then.get("order"):
        return
    for name, value in now["order"].items():
        if then["order"].get(name, value if name == "tasks" else None) != value:  # unknown in older checkpoints
            raise ConfigError(
                f"{folder} was saved with {name}={then['order'].get(name)!r} but this run has {value!r} and would "
                "play different tasks: restore the saved value, or start a new run with this checkpoint as its model"
            )
    before, after = _without_removed(folder, then["settings"]), now["settings"]
    if _optimizer_state(before["optim"]) != _optimizer_state(after["optim"]):
        raise ConfigError(
            f"{folder} contains the optimizer state of optim={before['optim']!r}, which {after['optim']!r} cannot "
            "load: restore the saved optim, or start a new run with this checkpoint as its model"
        )
    changed = [
        f"{name}={after.get(name)!r} (was {before.get(name)!r})"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name) and not name.startswith(_IRRELEVANT_SETTINGS)
    ]
    if changed:
        logger.warning("the settings of the resumed run differ from %s: %s", folder, ", ".join(changed))


def _without_removed(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the settings that no longer exist; reject a run that used one."""
    for name in sorted(settings.keys() & REMOVED.keys()):
        if settings[name]:
            raise ConfigError(
                f"cannot resume from {folder}, which was saved with {name}={settings[name]!r}: start a new run with "
                f"this checkpoint as its model, since {REMOVED[name]}"
            )
    return {name: value for name, value in settings.items() if name not in REMOVED}


def _optimizer_state(optim: str) -> str:
    """Strip the parts of an optimizer's name that do not change its state.

    >>> _optimizer_state("adamw_torch_fused"), _optimizer_state("paged_adamw_8bit")
    ('adamw_torch', 'adamw_8bit')
    """
    for part in ("paged_", "_bnb", "_npu", "_xla", "_fused"):
        optim = optim.replace(part, "")
    return optim


def _check_engine(folder: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Reject a checkpoint from another engine (DeepSpeed or not), or with a different sharding."""
    wanted, stage = now["zero_stage"], then.get("zero_stage", 0)
    if stage != wanted:
        was, is_now = (f"under DeepSpeed ZeRO-{one}" if one else "without DeepSpeed" for one in (stage, wanted))
        problem = f"was saved {was}, but this run is {is_now}, which stores the optimizer's state differently"
    elif stage and then.get("num_ranks") != now["num_ranks"]:
        problem = (
            f"was saved by {then.get('num_ranks')} ranks under DeepSpeed, which splits the optimizer's state between "
            f"them, but this run has {now['num_ranks']}"
        )
    else:
        return
    raise ConfigError(
        f"{folder} {problem}: resume with the same setup, or start a new run with this checkpoint as its model"
    )


def generations_before(step: int, args: GRPOEnvConfig) -> int:
    """The number of generation batches that were played before an optimizer step."""
    cycle = args.steps_per_cycle
    if step % cycle:
        raise ConfigError(
            f"a run can be resumed only at a multiple of {cycle} steps, because partly used generation batches are "
            f"not saved, but this checkpoint is from step {step}: resume from an earlier checkpoint, or start a new "
            "run with this checkpoint as its model"
        )
    return args.generations_at(step)


class RestoreDataOrder(TrainerCallback):
    """Restores the task order of a resumed run, and rejects a run whose checkpoints could not be resumed.

    The sampler draws a new order in each epoch. A resumed run's sampler starts at the first epoch, so the draws of the
    epochs before the checkpoint are repeated.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        """Draw the orders of the completed epochs.

        Raises:
            ConfigError: Optimizer steps do not stay aligned with generation batches.
        """
        if train_dataloader is not None and not isinstance(train_dataloader.dataset, IterableDataset):
            accumulation, num_microbatches = args.gradient_accumulation_steps, len(train_dataloader)
            has_several_epochs = state.max_steps > math.ceil(num_microbatches / accumulation)
            if num_microbatches % accumulation and has_several_epochs:  # an epoch's last one always ends a step
                raise ConfigError(
                    f"gradient_accumulation_steps={accumulation} must divide steps_per_generation * num_iterations "
                    f"({args.micro_steps_per_generation}) or the number of micro-batches per epoch "
                    f"({num_microbatches}): otherwise checkpoints cannot be resumed exactly"
                )
        batches: Any = getattr(train_dataloader, "batch_sampler", None)
        while hasattr(batches, "batch_sampler"):  # with several ranks, accelerate wraps it to split batches
            batches = batches.batch_sampler
        sampler: Any = getattr(batches, "sampler", None)
        if isinstance(getattr(sampler, "generator", None), torch.Generator):  # an iterable dataset has none
            for _ in range(int(state.epoch + 1e-6)):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
