"""Small models, made-up conversations and textbook references: what the tests of the policy agent share."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentsgym.agents.policy import PolicyAgent, Sampling
from agentsgym.agents.stopping import stop_token_ids
from agentsgym.testing import chat_tokenizer
from agentsgym.types import Action, TurnRequest

TOKENIZER = chat_tokenizer("chatml")
STOPS = list(range(0, 60))  # many, so that turns end early at different places
SIZES: Any = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama-eager": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager")),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(TOKENIZER),
            n_embd=32,
            n_layer=2,
            n_head=4,
            initializer_range=0.3,
            bos_token_id=0,
            eos_token_id=0,
        )
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)),
}


@cache
def model_of(kind: str) -> PreTrainedModel:
    return new_model(kind)


def new_model(kind: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = MODELS[kind]().eval()
    model.generation_config.eos_token_id = STOPS
    return model


class Session:
    """One conversation of token ids: what was said and what came back, made up by a private generator."""

    def __init__(self, name: int) -> None:
        self.draws = random.Random(name)
        self.name, self.token_ids, self.state = str(name), list[int](), None
        self.turns: list[tuple[list[int], list[int]]] = []

    def ask(self, limit: int | None = None) -> TurnRequest:
        self.token_ids += [self.draws.randrange(60, 400) for _ in range(self.draws.randint(1, 9))]
        return TurnRequest(
            session_id=self.name,
            messages=[],
            token_ids=self.token_ids,
            agent_state=self.state,
            max_new_tokens=limit,
        )

    def hear(self, action: Action) -> None:
        ids = list(action.token_ids or ())
        self.turns.append((list(self.token_ids), ids))
        self.token_ids += ids
        self.state = action.agent_state


def play(agent: PolicyAgent, sessions: list[Session], limit: int | None = None) -> list[Action]:
    actions = list(agent.act([session.ask(limit) for session in sessions]))
    for session, action in zip(sessions, actions, strict=True):
        session.hear(action)
    return actions


def greedy_reference(model: PreTrainedModel, prompt: list[int], limit: int) -> list[int]:
    ids = torch.tensor([prompt])
    output: Any = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=limit,
        eos_token_id=sorted(stop_token_ids(model, TOKENIZER)),
        pad_token_id=TOKENIZER.pad_token_id,
    )
    return output[0, len(prompt) :].tolist()


def greedy(model: PreTrainedModel, **options: Any) -> PolicyAgent:
    return PolicyAgent(model, TOKENIZER, sampling=Sampling(temperature=0), **options)


def logits_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]  # (T, V)


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[list[tuple[int, int]]]:
    """How many tokens each forward pass ran, and over how many columns."""
    passes: list[tuple[int, int]] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        mask, width = kwargs["attention_mask"], kwargs["input_ids"].shape[1]
        passes.append((int(mask[:, -width:].sum()), mask.shape[1]))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield passes
    finally:
        handle.remove()


def sampled(agent: PolicyAgent) -> list[list[int]]:
    sessions = [Session(n) for n in range(3)]
    for _ in range(2):
        play(agent, sessions, 8)
    agent.finish()
    return [session.token_ids for session in sessions]
