"""The search environment: the agent answers a question by searching passages, usually more than once."""

from __future__ import annotations

import functools
import json
import re
import string
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, cast

from agentsgym.credit.components import add_rewards
from agentsgym.envs.boundary import system_messages, warn_once
from agentsgym.envs.contract import State, Stepped
from agentsgym.envs.datasets.sources import EXPECTED_SOURCE, QUESTION, is_source
from agentsgym.envs.Search import SPEC, formats, world
from agentsgym.envs.Search.corpus import IndexOptions, Passage, as_passages, load_corpus, open_index
from agentsgym.envs.Search.formats import TOOL
from agentsgym.envs.Search.world import GENERATED, DatasetOptions, are_texts, task_dataset
from agentsgym.envs.Tools.calls import Plan
from agentsgym.envs.Tools.env import TOOL_FIELDS, ToolEnv
from agentsgym.envs.Tools.results import ToolResult
from agentsgym.errors import ConfigError, EnvError, TaskError
from agentsgym.fields import Field, choice_field, is_dict, is_int, is_number, is_str, is_strings, or_none, require
from agentsgym.texts import sentence_of
from agentsgym.types import Action, Message, ToolCall

if TYPE_CHECKING:
    from datasets import Dataset

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(answer: str) -> str:
    """Lowercase, and remove punctuation, articles and extra whitespace, as SQuAD's evaluation does (arXiv:1606.05250).

    >>> normalized(" The  River Tarn. ")
    'river tarn'
    """
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(answer: str, references: Iterable[str]) -> float:
    """Return 1.0 if the answer equals a reference after normalization, and 0.0 otherwise.

    Texts that normalization would empty are compared without removing punctuation and articles.
    """
    own = _compared(answer)
    return float(any(own == _compared(reference) for reference in references))


def f1(answer: str, references: Iterable[str]) -> float:
    """Return the harmonic mean of the precision and recall of words, in [0, 1], for the best reference.

    A repeated word counts as often as it occurs in both texts (arXiv:1606.05250, section 6.1).

    >>> f1("the long river Tarn", ["Tarn"])
    0.5
    """
    words, best = Counter(_compared(answer).split()), 0.0
    for reference in references:
        expected = Counter(_compared(reference).split())
        common = (words & expected).total()
        best = max(best, 2 * common / (words.total() + expected.total()) if common else 0.0)
    return best


def _compared(answer: str) -> str:
    return normalized(answer) or " ".join(answer.lower().split())


Retriever = Callable[[str, int], Sequence[Passage]]

LAST_TURN = "This is your last turn: answer now."

_PROMPTS = {
    "tools": (
        "Answer the question by searching a collection of passages with the search tool. Look for one fact at a time; "
        "what you find tells you what to look for next. You have {turns}. When you know the answer, give it alone: a "
        "name, a date, a number, and no sentence."
    ),
    "tags": (
        "Answer the question by searching a collection of passages. Write <search>your query</search> to search: what "
        "is found comes back between <information> and </information>. Look for one fact at a time; what you find "
        "tells you what to look for next. You have {turns}, with one search or the answer in each. When you know the "
        "answer, write <answer>your answer</answer>: a name, a date, a number, and no sentence."
    ),
}
_SCORES: Mapping[str, Callable[[str, Sequence[str]], float]] = {"exact_match": exact_match, "f1": f1}
_REPLACED_KEYS = ("answer_match", "answer_reward", "wrong_answer_reward")  # "reward" selects how an answer is scored
_COST = Field(default=0.0, expected="a number >= 0", valid=is_number(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(ToolResult):
    """The result of a search.

    Attributes:
        titles: The titles of the passages found.
    """

    titles: frozenset[str] = frozenset()


class SearchEnv(ToolEnv):
    """Questions over a corpus of passages, answered with a search tool; calls are processed as in :class:`ToolEnv`.

    A task is ``{"question": str, "answers": [str, …], "evidence": [title, …], "seed": int}``. ``answers`` are the
    accepted forms of the answer; the optional ``evidence`` lists the titles of the passages that support it.

    Keys of ``env_config`` in addition to the common ones and those of :class:`ToolEnv` (except ``answer_match``,
    ``answer_reward`` and ``wrong_answer_reward``):

    - ``corpus``: ``"generated"`` (default), the path to a JSONL file, a list of dicts, a ``datasets.Dataset``, or a
      dict of arguments for ``datasets.load_dataset``.
    - ``corpus_columns``: the columns that contain ``text`` and ``title``, if their names differ.
    - ``world``: options of the generated corpus; see :class:`~agentsgym.envs.Search.world.World`.
    - ``retriever``: any callable ``(query, k) -> passages`` instead of BM25 over ``corpus``; a passage is a str, a dict
      with ``text`` and optionally ``title``, or a :class:`~agentsgym.envs.Search.corpus.Passage`.
    - ``top_k``: the maximum number of passages that a search shows.
    - ``max_passage_chars``: the maximum number of characters shown per passage.
    - ``format``: ``"tools"`` (default), calls of the tool ``search`` and of any other tools; or ``"tags"``, Search-R1's
      text format (arXiv:2503.09516).
    - ``reward``: the score that is the answer's reward, ``"exact_match"`` (default) or ``"f1"``.
    - ``search_cost``: the cost of each search that is made.
    - ``invalid_penalty``: the cost of each call that cannot be made, and of each turn that is neither a call nor an
      answer.
    - ``evidence_reward``: the total reward for finding a task's ``evidence``, split evenly among its passages; the
      turn that first finds a passage gets its share.
    - ``title_weight``, ``stopwords``: indexing options; see :class:`~agentsgym.envs.Search.corpus.IndexOptions`.
    - ``cache_dir``: the folder where large indexes are cached; None for the user's cache folder, ``""`` for no cache.
    """

    spec = SPEC
    config_fields: ClassVar[Mapping[str, Field]] = {
        **{key: field for key, field in TOOL_FIELDS.items() if key not in _REPLACED_KEYS},
        "corpus": Field(default=GENERATED, expected=f"'generated', {EXPECTED_SOURCE}", valid=is_source),
        "corpus_columns": Field(
            default=None,
            expected="a dict from 'text' or 'title' to a column's name, or None",
            valid=or_none(lambda value: is_dict(value) and all(map(is_str, value.values()))),
        ),
        "world": Field(default={}, expected="a dict of options of the generated world", valid=is_dict),
        "retriever": Field(
            default=None, expected="a callable (query, k) -> passages, or None", valid=or_none(callable)
        ),
        "top_k": Field(default=3, expected="a positive int", valid=is_int(1)),
        "max_passage_chars": Field(default=2000, expected="an int >= 20", valid=is_int(20)),
        "format": choice_field(*_PROMPTS),
        "reward": choice_field(*_SCORES),
        "search_cost": _COST,
        "invalid_penalty": _COST,
        "evidence_reward": _COST,
        "title_weight": Field(default=2, expected="an int >= 0", valid=is_int(0)),
        "stopwords": Field(default="en", expected="a language that bm25s supports, or None", valid=or_none(is_str)),
        "cache_dir": Field(default=None, expected="a path ('' for no cache on disk) or None", valid=or_none(is_str)),
    }
    default_config: ClassVar[Mapping[str, Any]] = {"max_steps_per_episode": 8, "max_result_length": None}
    task_fields: ClassVar[Collection[str] | None] = ("question", "answers", "evidence")

    def __getstate__(self) -> dict[str, Any]:
        """Omit the index and its threads, which another process recreates at its first search."""
        return {name: value for name, value in super().__getstate__().items() if name != "_retriever"}

    @property
    def _in_tags(self) -> bool:
        return self.env_config["format"] == "tags"

    @functools.cached_property
    def _retriever(self) -> Retriever:
        config = self.env_config
        if config["retriever"] is not None:
            return config["retriever"]
        passages = load_corpus(config["corpus"], config["corpus_columns"], config["world"])
        options = IndexOptions(title_weight=config["title_weight"], stopwords=config["stopwords"])
        return open_index(passages, options, config["cache_dir"])

    def search(self, query: str) -> list[Passage]:
        """Return at most ``top_k`` passages, the best first; a custom retriever's results are checked.

        Raises:
            EnvError: The retriever did not return passages.
        """
        top_k: int = self.env_config["top_k"]
        return as_passages(self._retriever(query, top_k), top_k)

    def _check_config(self, config: dict[str, Any]) -> None:
        world.check_options(config["world"])
        if config["world"] and (config["corpus"] != GENERATED or config["retriever"] is not None):
            raise ConfigError("env_config['world'] applies to the generated corpus, but another one is set")
        if config["retriever"] is not None and config["corpus"] != GENERATED:
            raise ConfigError(
                "env_config sets both 'corpus' and 'retriever', but a retriever searches its own passages: set only one"
            )
        if self._in_tags and (self._sources or config["tools"] or config["submit_tool"]):
            raise ConfigError(
                "format='tags' has no tool calls, so it cannot be combined with further tools or submit_tool"
            )
        _ = self._retriever  # raises if the corpus cannot be read

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        evidence = task_data.get("evidence")
        require("task_data['question']", task_data.get("question"), QUESTION.valid, QUESTION.expected, TaskError)
        require("task_data['answers']", task_data.get("answers"), are_texts, "a list of at least one string", TaskError)
        require("task_data['evidence']", evidence, or_none(is_strings), "a list of titles or None", TaskError)
        if self.env_config["evidence_reward"]:
            titles = {*(evidence or ())}
            known = titles if self.env_config["retriever"] else cast("Any", self._retriever).titles
            if not titles or not titles <= known:
                warn_once("evidence_reward cannot be earned in full: a task has no evidence, or a title of no passage")

    def _tools(self) -> Sequence[Callable[..., Any] | Mapping[str, Any]] | None:
        return [formats.SEARCH_SCHEMA, *(super()._tools() or ())]

    @property
    def tool_schemas(self) -> tuple[dict[str, Any], ...]:
        """The JSON schemas of the tools; empty with ``format="tags"``."""
        return () if self._in_tags else super().tool_schemas

    def _system_prompt(self) -> str:
        turns = self.env_config["max_steps_per_episode"]
        return _PROMPTS[self.env_config["format"]].format(turns="1 turn" if turns == 1 else f"{turns} turns")

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> State:
        self._check_task(task_data)
        _ = self._retriever  # opened here, since searches have a time limit
        return {
            **super()._initialize_episode(session_id, task_data),
            "evidence": frozenset(task_data.get("evidence") or ()),
            "seen": frozenset[str](),
            "num_searches": 0,
            "num_mistakes": 0,
        }

    def _format_prompt(self, state: State, step: int) -> list[Message]:
        new = super()._format_prompt(state, step)
        messages: list[Message] = [{"role": "user", "content": new}] if isinstance(new, str) else new
        if self._in_tags:
            messages = [{"role": "user", "content": message["content"]} for message in messages]
        if 0 < step == self.env_config["max_steps_per_episode"] - 1:
            last = messages[-1]
            return [*messages[:-1], cast("Message", {**last, "content": f"{last['content']}\n\n{LAST_TURN}"})]
        return messages

    def _step_action(self, session_id: str, state: State, action: Action) -> Stepped:
        move, text = formats.parse_tagged_turn(action.text) if self._in_tags else ("", "")
        if not self._in_tags:
            turn = super()._step_action(session_id, state, formats.strip_queries(action))
        elif move == "search":
            search = Action(text="", tool_calls=[ToolCall(name=TOOL, arguments={"query": text})])
            turn = self._play_calls(session_id, state, search, [formats.SEARCH_SCHEMA])
        elif move == "answer":
            turn = super()._play_answer(session_id, state, text)
        else:
            turn = self._reject_turn(state, text)
        next_state, reward, done, info = turn
        searches, mistakes = (next_state[name] - state[name] for name in ("num_searches", "num_mistakes"))
        rewards = [reward, -(searches * self.env_config["search_cost"] + mistakes * self.env_config["invalid_penalty"])]
        info = {**info, "num_searches": next_state["num_searches"]}
        evidence, seen = state["evidence"], next_state["seen"]
        if evidence:
            rewards.append(self.env_config["evidence_reward"] * len(evidence & (seen - state["seen"])) / len(evidence))
            info["recall"] = len(evidence & seen) / len(evidence)
        return next_state, add_rewards(rewards), done, info

    def _play_answer(self, session_id: str, state: State, text: str) -> Stepped:
        answer = formats.extract_answer(text)
        if not answer:
            return self._reject_turn(state, formats.NO_ANSWER_MESSAGE)
        return super()._play_answer(session_id, state, answer)

    def _answer(self, session_id: str, state: State, text: str) -> tuple[float, bool, dict[str, Any]]:
        answers: list[str] = state["task"]["answers"]
        is_match = exact_match(text, answers)
        info = {"success": is_match == 1.0, "answer": normalized(text), "exact_match": is_match}
        return _SCORES[self.env_config["reward"]](text, answers), True, {**info, "f1": f1(text, answers)}

    def _call_tool(self, session_id: str, state: State, call: ToolCall) -> ToolResult | Awaitable[ToolResult]:
        if call.name != TOOL:
            return super()._call_tool(session_id, state, call)
        try:
            passages = self.search(call.arguments["query"])
        except EnvError:
            raise
        except Exception as error:  # a tool's exception is shown to the agent, but a retriever's fails the episode
            raise EnvError(f"the retriever raised {type(error).__name__}: {sentence_of(error)}") from error
        content = formats.format_passages(passages, self.env_config["max_passage_chars"], in_tags=self._in_tags)
        return Found(content=content, titles=frozenset(passage.title for passage in passages))

    def _after(self, state: State, plan: Plan) -> State:
        found = frozenset[str]().union(*(one.titles for one in plan.results if isinstance(one, Found)))
        num_refused = sum(not (index in plan.made or index == plan.submitted_by) for index in range(len(plan.calls)))
        return {
            **super()._after(state, plan),
            "seen": state["seen"] | found,
            "num_searches": state["num_searches"] + sum(plan.calls[index].name == TOOL for index in plan.made),
            "num_mistakes": state["num_mistakes"] + num_refused + plan.num_unreadable,
        }

    def _reject_turn(self, state: State, complaint: str, num_unreadable: int = 0) -> Stepped:
        next_state, reward, done, info = super()._reject_turn(state, complaint, num_unreadable)
        return {**next_state, "num_mistakes": state["num_mistakes"] + max(1, num_unreadable)}, reward, done, info

    def _state_key(self, state: State) -> Hashable:
        """The titles found so far, which determine what remains to be found."""
        return state["seen"]

    def vocabulary_texts(self) -> list[str]:
        """Return all texts of the generated corpus and its questions, and all messages of the environment.

        The list is empty with another corpus or a retriever, whose texts are collected from episodes instead.
        """
        if self.env_config["corpus"] != GENERATED or self.env_config["retriever"] is not None:
            return []
        made = world.World(**self.env_config["world"])
        questions = [wording.format(one) for one in made.people for wording in world.QUESTIONS.values()]
        top_k, max_chars = self.env_config["top_k"], self.env_config["max_passage_chars"]
        found = [[Passage(one["title"], one["text"])] * top_k for one in made.passages]  # each passage at each rank
        found.append([])
        results = [formats.format_passages(one, max_chars, in_tags=self._in_tags) for one in found]
        answers = sorted({value for facts in made.facts.values() for value in facts.values()})
        if self._in_tags:
            turns = [f"<search>{entity}</search>" for entity in made.facts]
            turns += [f"<answer>{answer}</answer>" for answer in answers]
        else:
            calls = (json.dumps({"name": TOOL, "arguments": {"query": entity}}) for entity in made.facts)
            turns = [TOOL, *answers, *(f"<tool_call>{call}</tool_call>" for call in calls)]
        system = [message["content"] for message in system_messages(self)]
        texts = [*system, LAST_TURN, *questions, *results, *turns]
        return [*filter(None, texts), *(f"{text}\n\n{LAST_TURN}" for text in results)]

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:  # type: ignore[override]
        """Make training rows; see :class:`~agentsgym.envs.Search.world.DatasetOptions` for the options."""
        return task_dataset(cls, env_config, "train", options)

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:  # type: ignore[override]
        """Make evaluation rows, about people (for custom data: with questions) that are not in the training rows."""
        return task_dataset(cls, env_config, "eval", options)
