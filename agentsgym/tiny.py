"""A language model small enough to learn on a laptop CPU, built from an environment's own words.

::

    env.vocabulary_texts() or episodes ─▶ tiny_tokenizer ─▶ tiny_model ─▶ the same code as for a large model

The tokenizer is word-level and lossless: each token is a word together with its article, the punctuation after it and
the space before it, so that decoding simply joins tokens. It has a chat template, and ``AutoTokenizer`` and
``AutoModelForCausalLM`` can load the files written by :meth:`save_pretrained`.

If a text contains a tool call in the format of :func:`call_text`, the template also renders tools and calls. Calls have
the format of Hermes and Qwen, ``<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>``. This one is
eight tokens: the text around names, keys and values is merged into one token each.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from agentsgym.agents.base import as_agent
from agentsgym.agents.exploring import ExploringAgent
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.check.plays import record
from agentsgym.envs.conversation import SUMMARIZE
from agentsgym.envs.dataset_rows import environment_key, tasks_of_rows
from agentsgym.envs.datasets.environments import make
from agentsgym.errors import ConfigError
from agentsgym.evaluation.mixed import label_of
from agentsgym.failures import headline
from agentsgym.fields import is_int, is_str, require
from agentsgym.seeding import derive_seed

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)


def _tasks(env: MultistepEnv, tasks: Any, num_episodes: int) -> Sequence[Mapping[str, Any]]:
    if tasks is None:
        try:
            tasks = env.get_train_dataset()
        except NotImplementedError as error:
            raise ConfigError(
                f"the vocabulary is collected by playing episodes, but there are no tasks to play: {error}"
            ) from error
    given = tasks_of_rows(env, tasks, "tasks")
    seeds = [derive_seed("recorded texts", 0, episode) for episode in range(num_episodes)]
    first = [task if task.get("seed") is not None else {**task, "seed": own} for task, own in zip(given, seeds)]  # noqa: B905  # the shorter
    again = [{**given[i % len(given)], "seed": seeds[i]} for i in range(len(given), num_episodes)]
    return [*first, *again][:num_episodes]


PAD, UNKNOWN, END, ASSISTANT = "<|pad|>", "<|unknown|>", "<|end|>", "<|assistant|>"

# A word with the punctuation inside and after it, or only punctuation, each with the space before it; or other white
# space. An article belongs to its word: a policy that chose it first might write "a airplane".
_PIECE = r" ?(?:an? )?\w+(?:['\u2019\-]\w+)*[^\w\s]*| ?[^\w\s]+|\s"

# With tools, the keys of a call's arguments are separate pieces, so that a value is the same token everywhere.
_KEY = r"""(?:"?, )?"\w+": "?"""
_PIECE_OR_KEY = rf"""{_KEY}| ?(?:an? )?\w+(?:['\u2019\-]\w+)*(?:(?!"?, "\w+": )[^\w\s])*| ?[^\w\s]+|\s"""

TOOL = "<|tool|>"  # precedes the name of each tool in the template's list
_CALL, _ARGUMENTS, _END_OF_CALL = '<tool_call>{"name": "', '", "arguments": {', "}}</tool_call>"
_CALL_MARKS = (_CALL, _ARGUMENTS, _END_OF_CALL, f'"{_END_OF_CALL}')  # the last one follows a string
_AROUND_CALLS = re.compile("|".join(map(re.escape, sorted(_CALL_MARKS, key=len, reverse=True))))

# A short sequence is easier to attend over, so no control tokens mark the environment's text.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{% if message['role'] == 'assistant' %}}{ASSISTANT}{{{{ message['content'] }}}}{END}"
    f"{{% else %}}{{% if loop.previtem is defined and loop.previtem['role'] != 'assistant' %}}{END}{{% endif %}}"
    "{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)
# A result follows its call without control tokens, like every observation.
_PRINTED_TOOLS = f"{{% for tool in tools or [] %}}{TOOL}{{{{ tool['function']['name'] }}}}{{% if loop.last %}}{END}"
_PRINTED_CALLS = (
    "{% for call in message['tool_calls'] or [] %}"
    "{% set given = call['function']['arguments'] %}"
    "{% set given = given if given is string else given | tojson %}"
    f"{{{{ '{_CALL}' ~ call['function']['name'] ~ '{_ARGUMENTS}' ~ given[1:-1] ~ '{_END_OF_CALL}' }}}}"
    "{% endfor %}"
)
_TOOL_TEMPLATE = f"{_PRINTED_TOOLS}{{% endif %}}{{% endfor %}}" + _CHAT_TEMPLATE.replace(
    f"{{{{ message['content'] }}}}{END}", f"{{{{ message['content'] }}}}{_PRINTED_CALLS}{END}"
)


@runtime_checkable
class HasVocabulary(Protocol):
    """An environment that provides its vocabulary."""

    def vocabulary_texts(self) -> Iterable[str]:
        """Return texts with every word of the environment: prompts, observations and possible answers.

        Empty if the words are unknown with its configuration.
        """
        ...


def tiny_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Build a word-level chat tokenizer whose vocabulary is the words of the given texts.

    Every given text is restored exactly by decoding; words in no text become the unknown token. A token includes
    adjacent punctuation: ``a clock?``, ``clock?`` and ``[clock]`` are three different tokens. Each turn needs two
    control tokens: one that opens the agent's turn, and one that ends it (the EOS).

    Args:
        texts: Prompts, observations and answers, exactly as in episodes; their order does not matter.

    Raises:
        ConfigError: The texts contain no words, or are a single string.

    >>> tokenizer = tiny_tokenizer(["Is it a clock?", "Yes."])
    >>> tokenizer.tokenize("Is it a clock?")
    ['Is', ' it', ' a clock?']
    >>> tokenizer.decode(tokenizer("Is it a clock?").input_ids)
    'Is it a clock?'
    """
    given = _as_texts(texts)
    has_calls = any(_CALL in text for text in given)
    splitter = pre_tokenizers.Split(Regex(_PIECE_OR_KEY if has_calls else _PIECE), behavior="isolated")
    parts = [part for text in given for part in (_AROUND_CALLS.split(text) if has_calls else [text])]
    pieces = sorted({piece for part in parts for piece, _ in splitter.pre_tokenize_str(part)})
    if not pieces:
        raise ConfigError("the texts for a tiny tokenizer must contain at least one word")
    control = [PAD, UNKNOWN, END, ASSISTANT, *([TOOL] if has_calls else [])]
    marks = [*_CALL_MARKS] if has_calls else []
    vocabulary = {piece: index for index, piece in enumerate([*control, *marks, *pieces])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(  # pyright: ignore[reportUnknownMemberType]
        [AddedToken(token, normalized=False, special=True) for token in control]
    )
    tokenizer.add_tokens(  # pyright: ignore[reportUnknownMemberType]  # not special: they are part of an answer's text
        [AddedToken(mark, normalized=False, special=False) for mark in marks]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        extra_special_tokens=control[3:],
        chat_template=_TOOL_TEMPLATE if has_calls else _CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Format a call as the template of a tiny tokenizer does, for the texts that the tokenizer is built from.

    >>> call_text("add", {"a": 3, "b": 4})
    '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
    """
    return f"{_CALL}{name}{_ARGUMENTS}{json.dumps(dict(arguments), ensure_ascii=False)[1:-1]}{_END_OF_CALL}"


_COMMON_CONFIG: dict[str, Any] = {"initializer_range": 0.1, "bos_token_id": None, "dtype": torch.float32}


def tiny_model(
    tokenizer: PreTrainedTokenizerBase,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    max_positions: int = 8192,
    seed: int = 0,
) -> LlamaForCausalLM:
    """Make a small Llama model with random weights (0.09 million parameters by default), determined by the seed.

    Args:
        tokenizer: Determines the vocabulary size and the EOS and padding ids.
        hidden_size: Width; a multiple of ``2 * num_heads``, since rotary embeddings rotate pairs.
        num_layers: Number of decoder layers.
        num_heads: Attention heads per layer.
        max_positions: Maximum sequence length in tokens; has no cost.
        seed: Seed of the weights.
    """
    if min(hidden_size, num_layers, num_heads, max_positions) < 1 or hidden_size % (2 * num_heads):
        raise ConfigError(
            "the sizes of a tiny model must be at least 1, and hidden_size a multiple of 2 * num_heads, got "
            f"{hidden_size=}, {num_layers=}, {num_heads=}, {max_positions=}"
        )
    if tokenizer.eos_token_id is None or tokenizer.pad_token_id is None:
        raise ConfigError(
            f"the tokenizer of a tiny model must have an EOS token and a padding token, got {tokenizer!r}"
        )
    end, pad = cast("int", tokenizer.eos_token_id), cast("int", tokenizer.pad_token_id)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        max_position_embeddings=max_positions,
        **_COMMON_CONFIG,
        eos_token_id=end,
        pad_token_id=pad,
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # pyright: ignore[reportUnknownMemberType]
        torch.default_generator.manual_seed(derive_seed("tiny model", seed))
        model = LlamaForCausalLM(config)
        # With small embeddings, training plateaus for long: the layers must learn to distinguish words before they can
        # match answers to questions. Large embeddings keep Adam's steps small in relation to the words.
        torch.nn.init.normal_(model.model.embed_tokens.weight)
    # top_k=0 because the default of 50 would change the sampling distribution.
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, eos_token_id=end, pad_token_id=pad)
    return model


def tiny_policy(
    source: MultistepEnv | HasVocabulary | Dataset | Iterable[str] | Iterable[Mapping[str, Any]],
    *,
    tasks: Any = None,
    agent: Any = None,
    num_episodes: int = 256,
    **sizes: int,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Make a tiny model and its tokenizer from an environment, from rows of several environments, or from texts.

    The words of an environment are those of its ``vocabulary_texts()``. If there are none, or if tasks or an agent are
    given, episodes are played, and the words of all their messages and calls are added. All other words become the
    unknown token, so the agent should produce everything that the policy should be able to write.

    Args:
        source: An environment; dataset rows, as :func:`agentsgym.mix` makes them, whose environments are built and
            played; or the texts themselves.
        tasks: Tasks to play, if the source is an environment; None for its training dataset.
        agent: The agent that plays, or a dict of agents by the rows' column ``environment``; None for an
            :class:`~agentsgym.agents.exploring.ExploringAgent`.
        num_episodes: Number of episodes to play in each environment.
        **sizes: Arguments of :func:`tiny_model`, including the seed.

    Returns:
        The model and its tokenizer.

    Raises:
        ConfigError: The source is of an unsupported type, has no words, or cannot be played.
    """
    tokenizer = tiny_tokenizer(_texts_of(source, tasks, agent, num_episodes))
    return tiny_model(tokenizer, **sizes), tokenizer


def _texts_of(source: Any, tasks: Any, agent: Any, num_episodes: int) -> Any:
    """Return the texts of a source of any kind; an invalid one is returned unchanged, for the tokenizer to reject."""
    if isinstance(source, type):
        raise ConfigError(
            f"a tiny policy is built from an environment, not a class: pass {source.__name__}(None, config)"
        )
    if isinstance(source, MultistepEnv):
        return environment_texts(source, tasks, agent, num_episodes)
    own = source.vocabulary_texts() if isinstance(source, HasVocabulary) else source
    rows = [] if isinstance(own, str | Mapping) or not isinstance(own, Iterable) else list(cast("Iterable[Any]", own))
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        return rows or own  # pyright: ignore[reportUnknownVariableType]
    parts: dict[tuple[str, str], list[Mapping[str, Any]]] = {}  # the rows of each environment
    for row in rows:
        parts.setdefault((label_of(row), environment_key(row)), []).append(row)
    texts: list[str] = []
    for (label, _), played in parts.items():
        player = cast("Mapping[str, Any]", agent).get(label) if isinstance(agent, Mapping) else agent
        env = make(played[0])
        known = _as_texts(env.vocabulary_texts()) if player is None and isinstance(env, HasVocabulary) else []
        texts += known or environment_texts(env, played, player, num_episodes)
    return texts


def environment_texts(env: MultistepEnv, tasks: Any = None, agent: Any = None, num_episodes: int = 256) -> list[str]:
    """Collect texts with the words of an environment, as :func:`tiny_policy` does.

    Every distinct text of the played episodes is returned: prompts, observations, tool results, answers and calls. The
    tasks are played in order, and repeated with other seeds if there are fewer tasks than episodes.
    """
    given = _as_texts(env.vocabulary_texts()) if isinstance(env, HasVocabulary) else []
    if env.env_config["history"] == SUMMARIZE and given:
        given.append(env.env_config["summary_prompt"])
    if given and tasks is None and agent is None:
        return given
    require("num_episodes", num_episodes, is_int(1), "a positive int")
    actor = as_agent(ExploringAgent(seed=0) if agent is None else agent)
    trajectories, scripts = record(env, _tasks(env, tasks, num_episodes), actor, max_concurrent=256)
    errors = [headline(trajectory.error or "") for trajectory in trajectories if trajectory.failed]
    if len(errors) == len(trajectories):
        raise ConfigError(f"the vocabulary cannot be collected, since every episode failed: {errors[0]}")
    if errors:
        text = "%d of %d episodes failed, whose words may be missing in the vocabulary: %s"
        logger.warning(text, len(errors), len(trajectories), errors[0])
    names = [str(tool.get("function", tool).get("name", "")) for tool in env.tool_schemas]
    texts = dict.fromkeys(call_text(name, {}) for name in names)  # including tools that were never called
    for trajectory in trajectories:
        texts |= dict.fromkeys(message["content"] for message in trajectory.messages)
    for script in scripts:
        for action in script:
            texts |= dict.fromkeys([action.text, *(call_text(call.name, call.arguments) for call in action.tool_calls)])
    return [*given, *texts]


def _as_texts(source: object) -> list[str]:
    if isinstance(source, str) or not isinstance(source, Iterable):
        raise ConfigError(
            "a tiny tokenizer is built from several texts, or from an environment whose vocabulary_texts() lists them; "
            f"got {source!r}"
        )
    texts = [*cast("Iterable[Any]", source)]
    for text in texts:
        require("every text for a tiny tokenizer", text, is_str, "a str")
    return texts
