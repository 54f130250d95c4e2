"""Play and train a family of the zoo, and compare with forward passes over unpadded rows.

::

    played(model)      sampled, shared, refilled, retracted and greedy turns  ─▶ how far off the records are
    trained(family)    one optimizer step on rows of mixed lengths            ─▶ how far off the gradient is
    outcome(family)    the family's cells in the table of docs/real-models.md
    packed(model)      rows that begin alike, as one tree                     ─▶ how far off both are
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback
from zoo import RECURRENT, TOKENIZER, build

from agentsgym import ConfigError, GRPOEnvConfig, GRPOEnvTrainer, MultistepEnv, PolicyAgent, SamplingParams, Trajectory
from agentsgym.agents.policy import decoding_strategy
from agentsgym.agents.policy.attention import EXTENDED
from agentsgym.batch.views import pad_right
from agentsgym.training.tensors import shared_prefix
from agentsgym.training.tensors.scoring import score_labeled_only

WORDS = "the room is dark you see a lamp a table and two doors is it bigger than a book yes or no"
SEEDS = (5, 0, 11, 3, 4, 1, 17, 2)
BOUND = 1e-4  # of log-probabilities in nats, and of gradients relative to their norm
RECURRENT_BOUND = 5e-4
ROUNDING = 1e-6  # in float64, beyond which an error is none of rounding
CACHES = dict(zip(decoding_strategy._STRATEGIES, ("kept", "kept, singly", "prefilled again", "run again"), strict=True))
#: Modules that adapters must leave alone: those outside the text, and those that are not called.
NOT_ADAPTED = r".*(router|gate|out_proj|o_a_proj|correction_coefs|vision|visual|audio|projector|connector|merger).*"


class Talk(MultistepEnv):
    """A conversation of one to six turns, with observations of different lengths."""

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"seed": task_data["seed"], "turn": 0}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        start, words = state["seed"] * 7 + step * 3, WORDS.split()
        return " ".join(words[(start + n * n) % len(words)] for n in range(3 + start * 5 % 14))

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        turn = state["turn"] + 1
        return {**state, "turn": turn}, len(action) % 7 / 7 - 0.3, turn > state["seed"] % 6, {}


def last_three(messages: list[Any]) -> list[Any]:
    """The first message and the last two, so that the history is rewritten at each turn."""
    return messages[:1] + messages[-2:] if len(messages) > 3 else messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The largest error of a log-probability, the number of greedy tokens that are not the likeliest, and the cache."""

    error: float
    num_unlikely: int
    cache: str


def played(model: Any) -> Records:
    """Play with a model, and compare every record with one forward pass over each of its segments."""
    error, num_unlikely = 0.0, 0
    sampled, rewritten, greedy = (SamplingParams(temperature=1.0), {}), (SamplingParams(), {"history": last_three}), 0
    for sampling, config in (sampled, rewritten, (SamplingParams(temperature=greedy), {})):
        agent = PolicyAgent(model, TOKENIZER, sampling=sampling, max_turn_tokens=9)
        options = {"num_rollouts": 2, "max_concurrent": 5} if sampling is sampled[0] else {}
        for trajectory in Talk(TOKENIZER, config).rollout([{"seed": seed} for seed in SEEDS], agent, **options):
            assert not trajectory.failed, trajectory.error
            furthest, unlikely = _compared(model, trajectory)
            error = max(error, furthest)
            num_unlikely += unlikely if sampling.temperature == greedy else 0
    return Records(error=error, num_unlikely=num_unlikely, cache=CACHES[decoding_strategy._chosen[model][0]])


def _compared(model: Any, trajectory: Trajectory) -> tuple[float, int]:
    error, num_unlikely = 0.0, 0
    for start, stop in {turn.prompt_start: turn.stop for turn in trajectory.turns}.items():
        ids = torch.tensor([list(trajectory.token_ids[start:stop])])
        with torch.no_grad():
            logprobs = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        for turn in (one for one in trajectory.turns if one.prompt_start == start):
            for place in range(turn.start, turn.stop):
                row, token = logprobs[place - start - 1], trajectory.token_ids[place]
                error = max(error, abs(float(row[token]) - (trajectory.logprobs or ())[place]))
                num_unlikely += float(row.max() - row[token]) > BOUND  # rounding may break ties
    return error, num_unlikely


class Gradients(TrainerCallback):
    """Copies the gradients of an optimizer step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def trained(family: str, folder: Path, *, adapts: bool, dtype: str = "float32") -> float:
    """Train one step, and return the relative error of its gradient.

    Full weights are loaded from a folder. Adapters are trained with activations that are computed again.
    """
    model, reference = (build(family).to(getattr(torch, dtype)) for _ in range(2))
    lora: Any = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "exclude_modules": NOT_ADAPTED}
    peft = LoraConfig(**lora, init_lora_weights=False) if adapts else None
    settings: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    settings |= {"max_steps": 1, "per_device_train_batch_size": 8, "num_generations": 4, "max_turn_tokens": 7}
    settings |= {"max_grad_norm": 1e9, "gradient_checkpointing": adapts and model.supports_gradient_checkpointing}
    loads = not adapts and dtype == "float32"  # TRL loads no float64
    if loads:
        settings["model_init_kwargs"] = {"dtype": dtype}
        model.save_pretrained(folder / "model")
    args = GRPOEnvConfig(str(folder / "run"), **settings)
    rows = Dataset.from_list([{"task_data": {"seed": seed}} for seed in (5, 2, 10, 3)])
    gradients, batch = Gradients(), dict[str, Any]()
    given: Any = str(folder / "model") if loads else model
    with GRPOEnvTrainer(given, Talk(TOKENIZER), args, rows, peft_config=peft, callbacks=[gradients]) as trainer:
        state = {name: tensor.clone() for name, tensor in trainer._trl.policy().state_dict().items()}
        score = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda inputs: batch.setdefault("first", score(inputs))
        trainer.train()
    if peft is not None:
        reference = get_peft_model(reference, peft)
        reference.load_state_dict(state)
    return _relative_error(gradients.found, _gradient(reference.eval(), batch["first"]))


def _gradient(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The gradient of ``-sum(advantage * logprob) / num_items`` by one pass over each row, without padding."""
    columns = (batch[name] for name in ("prompt_completion_ids", "attention_mask", "agent_token_mask", "advantages"))
    for ids, attention, mask, advantages in zip(*columns, strict=True):
        length = int(attention.sum())
        logits = model(input_ids=ids[None, :length], use_cache=False).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, ids[1:length, None])[:, 0]
        weights = (advantages * mask / batch["num_items_in_batch"])[1:length].to(logprobs.dtype)
        (-(logprobs * weights).sum()).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def _relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    norm = sum(float(one.pow(2).sum()) for one in expected.values()) ** 0.5
    assert norm > 0
    assert not any(one.any() for name, one in found.items() if name not in expected)
    errors = [float((one - found.get(name, 0.0)).pow(2).sum()) for name, one in expected.items()]
    return sum(errors) ** 0.5 / norm


def outcome(family: str, folder: Path) -> tuple[str, str, str, str]:
    """What the table has of a family: its records, its training, its training with LoRA, and its cache."""
    model = build(family)
    try:
        records = played(model)
    except ConfigError:
        return "refused", "refused", "refused", "none"
    assert records.num_unlikely == 0
    bound = RECURRENT_BOUND if family in RECURRENT else BOUND
    if records.error > bound:
        assert played(build(family).double()).error < ROUNDING
    record = f"{bound:.0e}".replace("e-0", "e-")
    return record, _training(family, folder / "full"), _training(family, folder / "lora", adapts=True), records.cache


def _training(family: str, folder: Path, *, adapts: bool = False) -> str:
    try:
        error = trained(family, folder, adapts=adapts)
    except ConfigError:
        return "refused"
    if error <= BOUND:
        return "exact"
    assert trained(family, folder / "double", adapts=adapts, dtype="float64") < ROUNDING
    return "rounding"


def branching_rows(size: int, seed: int = 1) -> list[list[int]]:
    """Rows of ids below ``size`` that branch twice; one stands alone, one begins another, two are equal."""
    draw = random.Random(seed)
    some = lambda count: [draw.randrange(5, size) for _ in range(count)]  # noqa: E731
    base = some(50)
    rows = [base + some(count) for count in (20, 33, 7)]
    middle = rows[0] + some(25)
    return [*rows, middle + some(9), middle[:-3] + some(4), some(40), base[:30], rows[1]]


def packed(model: Any, rows: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return how far off log-probabilities and gradients are if rows are packed, from those of each row alone.

    The gradient's is that of the worst parameter, relative to its norm. The head is a plain one, since TRL's
    computes in float32.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    draws = torch.Generator().manual_seed(0)
    weights = [torch.randn(max(0, len(row) - 1), generator=draws) for row in rows]
    alone = [_logprobs(base, row[1:], input_ids=torch.tensor([row])) for row in rows if len(row) > 1]
    expected, wanted = torch.cat(alone), _gradient_of(model, torch.cat(alone), torch.cat(weights))
    width, attention = max(map(len, rows)), base.config._attn_implementation
    ids = torch.tensor([pad_right(row, width, 0) for row in rows])
    mask = torch.tensor([pad_right([1] * len(row), width, 0) for row in rows])
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    base.forward = MethodType(_scored_by_own_head, base)
    score_labeled_only(base)
    base.set_attn_implementation(EXTENDED[attention])
    base.packs_rows = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prefix, "MAX_FRACTION", 1e9)
        found = model(**inputs, fused_lm_head=True)["log_probs"][mask[:, 1:] == 1]
        gradient = _gradient_of(model, found, torch.cat(weights))
    del base.forward
    base.set_attn_implementation(attention)
    least = 1e-3 * max(one.norm() for one in wanted.values())
    errors = [(gradient[name] - one).norm() / one.norm().clamp(min=least) for name, one in wanted.items()]
    return float((found - expected).detach().abs().max()), float(max(errors))


def _scored_by_own_head(self: Any, *, shift_labels: torch.Tensor, fused_lm_head: bool, **inputs: Any) -> dict[str, Any]:
    return {"log_probs": _logprobs(self, shift_labels[0], **inputs)[None]}


def _logprobs(model: Any, labels: Any, **inputs: Any) -> torch.Tensor:
    labels, states = torch.as_tensor(labels), model.base_model(**inputs).last_hidden_state[0]
    return model.get_output_embeddings()(states[: len(labels)]).log_softmax(-1).gather(1, labels[:, None])[:, 0]


def _gradient_of(model: Any, logprobs: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logprobs * weights).sum().backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
