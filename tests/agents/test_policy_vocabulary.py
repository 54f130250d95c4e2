"""A model with more rows than its tokenizer has ids never samples them; one with fewer is refused."""

import math
from typing import Any

import pytest
import torch
from policy_sessions import TOKENIZER, Session, logits_of, new_model, play
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from agentsgym.agents.policy import PolicyAgent
from agentsgym.agents.policy.model import shared_vocabulary_size
from agentsgym.agents.policy.sampling import Sampler, SamplingParams
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.errors import ConfigError
from agentsgym.testing import chat_tokenizer
from agentsgym.training.drift import logprob_gap
from agentsgym.types import StopReason

SIZE = len(TOKENIZER)


def with_padding_rows(kind: str, weight: float, num_rows: int = 13) -> Any:
    """A model of which those rows are all the likelier, the more ``weight`` they are given."""
    model: Any = new_model(kind)
    model.resize_token_embeddings(SIZE + num_rows, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[SIZE:] *= weight
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.01},
        {"repetition_penalty": 1.4},
    ],
)
def test_padding_rows_change_nothing_of_what_is_sampled(options: dict[str, Any]) -> None:
    padded = with_padding_rows("llama", weight=40.0)
    sessions, others = [Session(n) for n in range(4)], [Session(n) for n in range(4)]
    for _ in range(2):
        actions, expected = (
            play(PolicyAgent(model, TOKENIZER, sampling=SamplingParams(**options)), playing, 8)
            for model, playing in ((padded, sessions), (new_model("llama"), others))
        )
        for action, other in zip(actions, expected, strict=True):
            assert action.token_ids == other.token_ids
            assert list(action.logprobs or ()) == pytest.approx(list(other.logprobs or ()), abs=1e-5)
    likeliest = [logits_of(padded, prompt)[-1].argmax() for session in sessions for prompt, _ in session.turns]
    assert any(token >= SIZE for token in likeliest)


def test_log_probabilities_are_those_of_the_ids_that_the_tokenizer_knows() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 9.0]])
    [token], [logprob] = Sampler(SamplingParams(), 3).draw(logits, [0.999])
    assert token == 2
    assert logprob == pytest.approx(3 - math.log(math.exp(1) + math.exp(2) + math.exp(3)), abs=1e-6)
    [token], [logprob] = Sampler(SamplingParams()).draw(logits, [0.999])
    assert token == 3
    assert logprob == pytest.approx(9 - math.log(math.exp(1) + math.exp(2) + math.exp(3) + math.exp(9)), abs=1e-6)


def test_no_episode_fails_and_the_gap_to_the_model_is_the_probability_of_the_padding_rows() -> None:
    game = {"max_steps_per_episode": 2, "error_allowance": 2, "objects": ["bee", "kite"]}
    tokenizer = chat_tokenizer("chatml")
    env = TwentyQuestionsEnv(tokenizer, game)
    model = with_padding_rows("qwen3", weight=1.0)
    [trajectory] = env.rollout([{"solution": "bee", "seed": 0}], PolicyAgent(model, tokenizer, max_turn_tokens=6))
    assert trajectory.stop_reason is not StopReason.FAILED
    assert max(trajectory.token_ids) < SIZE
    logits = logits_of(model, list(trajectory.token_ids))[:-1]
    lost = -logits.log_softmax(-1)[:, :SIZE].logsumexp(-1)  # -log(1 - p), of each place
    marked = torch.tensor(trajectory.agent_token_mask[1:]).bool()
    gap = logprob_gap(model, [trajectory])
    assert float(lost[marked].max()) > 1e-3
    assert gap.mean_gap == pytest.approx(float(lost[marked].mean()), abs=1e-5)
    assert gap.kl_k1 == pytest.approx(float(lost[marked].mean()), abs=1e-5)


def test_a_vocabulary_with_holes_reaches_to_its_last_id() -> None:
    raw = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "b": 40}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>")
    assert len(tokenizer) == 3
    assert shared_vocabulary_size(new_model("llama"), tokenizer) == 41


def test_a_model_with_fewer_rows_than_the_tokenizer_has_ids_is_refused_and_names_what_to_do() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.add_tokens(["<one>", "<two>"])
    model = new_model("llama")
    sentence = rf"got {SIZE} rows for {SIZE + 2} ids: call model.resize_token_embeddings\({SIZE + 2}\), or use the mod"
    with pytest.raises(ConfigError, match=sentence):
        PolicyAgent(model, tokenizer)
    model.resize_token_embeddings(SIZE + 2, mean_resizing=False)
    PolicyAgent(model, tokenizer)
