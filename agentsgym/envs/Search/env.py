"""Search: the agent answers a question by searching passages, most often more than once."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, cast

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.calls.timed import CallTimeoutError
from agentsgym.envs.rows.sources import EXPECTED_SOURCE, is_source
from agentsgym.envs.Search import moves, world
from agentsgym.envs.Search.corpus import GENERATED, Passage, load_corpus
from agentsgym.envs.Search.index import IndexOptions, open_index
from agentsgym.envs.Search.limits import within_time
from agentsgym.envs.Search.moves import TOOL, Answer, Mistake, Move, Search
from agentsgym.envs.Search.results import ShownPassages, as_passages
from agentsgym.envs.Search.scoring import exact_match, f1, normalized
from agentsgym.envs.Search.tasks import DatasetOptions, task_dataset
from agentsgym.errors import ConfigError, TaskError
from agentsgym.fields import Field, choice_field, is_int, is_number, is_positive_number, is_str, or_none
from agentsgym.texts import shown
from agentsgym.types import Action, Message

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

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
_READERS: Mapping[str, Callable[[Action], Sequence[Move]]] = {
    "tools": moves.moves_of_calls,
    "tags": moves.moves_of_tags,
}
_SCORES: Mapping[str, Callable[[str, Sequence[str]], float]] = {"exact_match": exact_match, "f1": f1}


def _are_names(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(is_str, cast("Mapping[Any, Any]", value).values()))


def _is_strings(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(is_str, cast("list[Any]", value)))


_COST = Field(default=0.0, expected="a number >= 0", valid=is_number(0))


class SearchEnv(MultistepEnv):
    """Questions over a corpus of passages, answered with a search tool.

    A task is ``{"question": str, "answers": [str, …], "evidence": [title, …], "seed": int}``. ``answers`` are the ways
    to write the right answer; ``evidence``, which a task may do without, names the passages that it follows from.

    Keys of ``env_config`` beside the common ones:

    - ``corpus``: ``"generated"`` (default), a path of a JSONL file, a list of dicts, a ``datasets.Dataset``, or a dict
      of arguments of ``datasets.load_dataset``.
    - ``corpus_columns``: names of the columns of ``text`` and ``title``, where they have others.
    - ``world``: options of the generated corpus, see :class:`~agentsgym.envs.Search.world.World`.
    - ``retriever``: any callable ``(query, k) -> passages`` instead of BM25 over ``corpus``; a passage is a str, a dict
      with ``text`` and perhaps ``title``, or a :class:`~agentsgym.envs.Search.corpus.Passage`.
    - ``search_timeout_s``: how long a call of ``retriever`` may take; None for any time.
    - ``top_k``: how many passages a search shows at most.
    - ``max_passage_chars``: how much of each.
    - ``format``: ``"tools"`` (default), calls of the tool ``search``; or ``"tags"``, Search-R1's text
      format (2503.09516).
    - ``max_calls_per_turn``: how many calls of one turn are executed; those beyond get an error.
    - ``reward``: ``"exact_match"`` (default) or ``"f1"``, what the answer is rewarded with.
    - ``search_cost``, ``invalid_penalty``: what each search and each invalid move costs.
    - ``evidence_reward``: what finding all of a task's ``evidence`` is worth, in equal parts, each paid in the turn
      that finds a passage of it for the first time.
    - ``title_weight``, ``stopwords``: how the corpus is indexed; see
      :class:`~agentsgym.envs.Search.index.IndexOptions`.
    - ``cache_dir``: where large indexes are kept; None for the user's cache, ``""`` for none on disk.
    """

    config_fields: ClassVar[Mapping[str, Field]] = {
        "corpus": Field(default=GENERATED, expected=f"'generated', {EXPECTED_SOURCE}", valid=is_source),
        "corpus_columns": Field(
            default=None,
            expected="a dict from 'text' or 'title' to a column's name, or None",
            valid=or_none(_are_names),
        ),
        "world": Field(
            default={}, expected="a dict of options of the world", valid=lambda one: isinstance(one, Mapping)
        ),
        "retriever": Field(
            default=None, expected="a callable (query, k) -> passages, or None", valid=or_none(callable)
        ),
        "search_timeout_s": Field(
            default=30.0, expected="a positive number or None", valid=or_none(is_positive_number)
        ),
        "top_k": Field(default=3, expected="a positive int", valid=is_int(1)),
        "max_passage_chars": Field(default=2000, expected="an int >= 20", valid=is_int(20)),
        "format": choice_field(*_READERS),
        "max_calls_per_turn": Field(default=16, expected="a positive int", valid=is_int(1)),
        "reward": choice_field(*_SCORES),
        "search_cost": _COST,
        "invalid_penalty": _COST,
        "evidence_reward": _COST,
        "title_weight": Field(default=2, expected="an int >= 0", valid=is_int(0)),
        "stopwords": Field(default="en", expected="a language that bm25s knows, or None", valid=or_none(is_str)),
        "cache_dir": Field(default=None, expected="a path ('' for no cache on disk) or None", valid=or_none(is_str)),
    }
    default_config: ClassVar[Mapping[str, Any]] = {"max_steps_per_episode": 8}
    task_fields: ClassVar[Collection[str] | None] = ("question", "answers", "evidence")

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None = None, env_config: dict[str, Any] | None = None
    ) -> None:
        """Check the configuration, load the corpus and index it; arguments as for every environment.

        Raises:
            ConfigError: As for every environment; or the corpus cannot be read, is empty or lacks a column.
            MissingDependencyError: The corpus is to be searched with BM25, and ``bm25s`` is not installed.
        """
        super().__init__(tokenizer, env_config)
        self._score = _SCORES[self.env_config["reward"]]
        self._read_moves = _READERS[self.env_config["format"]]
        self._retriever: Retriever | None = self._open_retriever()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the index and its threads, which another process makes at its first search."""
        return {**super().__getstate__(), "_retriever": None}

    def _open_retriever(self) -> Retriever:
        config = self.env_config
        if config["retriever"] is not None:
            return within_time(config["retriever"], config["search_timeout_s"])
        passages = load_corpus(config["corpus"], config["corpus_columns"], config["world"])
        options = IndexOptions(title_weight=config["title_weight"], stopwords=config["stopwords"])
        return open_index(passages, options, config["cache_dir"])

    def search(self, query: str) -> list[Passage]:
        """Give at most ``top_k`` passages, the best first; what a retriever of the user's gives is checked.

        Raises:
            CallTimeoutError: The retriever took longer than ``search_timeout_s``, and was given up.
            EnvError: The retriever did not give passages.
        """
        if self._retriever is None:
            self._retriever = self._open_retriever()
        top_k: int = self.env_config["top_k"]
        return as_passages(self._retriever(query, top_k), top_k)

    def _check_config(self, config: dict[str, Any]) -> None:
        world.check_options(config["world"])
        if config["world"] and (config["corpus"] != GENERATED or config["retriever"] is not None):
            raise ConfigError("env_config['world'] has options of the generated corpus, and another one is given")
        if config["retriever"] is not None and config["corpus"] != GENERATED:
            raise ConfigError("env_config has a 'corpus' and a 'retriever': a retriever searches passages of its own")

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        question, answers = task_data.get("question"), task_data.get("answers")
        if not (isinstance(question, str) and question.strip()):
            raise TaskError(f"task_data['question'] must be a text, got {shown(question)}")
        if not (_is_strings(answers) and answers and all(one.strip() for one in cast("list[str]", answers))):
            raise TaskError(f"task_data['answers'] must be a list of at least one text, got {shown(answers)}")
        evidence = task_data.get("evidence")
        if evidence is not None and not _is_strings(evidence):
            raise TaskError(f"task_data['evidence'] must be a list of titles or None, got {shown(evidence)}")

    def _tools(self) -> Sequence[Mapping[str, Any]] | None:
        return [moves.SEARCH_SCHEMA] if self.env_config["format"] == "tools" else None

    def _system_prompt(self) -> str:
        turns = self.env_config["max_steps_per_episode"]
        return _PROMPTS[self.env_config["format"]].format(turns="1 turn" if turns == 1 else f"{turns} turns")

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        self._check_task(task_data)
        return {
            "question": task_data["question"],
            "answers": list(task_data["answers"]),
            "evidence": frozenset(task_data.get("evidence") or ()),
            "seen": frozenset[str](),
            "num_searches": 0,
            "messages": [{"role": "user", "content": task_data["question"]}],
            "done": False,
        }

    def _format_prompt(self, state: dict[str, Any], step: int) -> list[Message]:
        messages: list[Message] = state["messages"]
        if 0 < step == self.env_config["max_steps_per_episode"] - 1:
            last = messages[-1]
            return [*messages[:-1], cast("Message", {**last, "content": f"{last['content']}\n\n{LAST_TURN}"})]
        return messages

    def _step_episode(
        self, session_id: str, state: dict[str, Any], action: str
    ) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        return self._step_action(session_id, state, Action(text=action))

    def _step_action(
        self, session_id: str, state: dict[str, Any], action: Action
    ) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        made = self._limited(self._read_moves(action))
        if isinstance(made[0], Answer):
            return self._answer(state, made[0].text)
        messages: list[Message] = []
        seen: frozenset[str] = state["seen"]
        for move in made:
            content, found = self._outcome(move)
            seen |= found
            messages.append(_reply(move, content))
        num_mistakes = sum(isinstance(move, Mistake) for move in made)
        num_searches = len(made) - num_mistakes
        reward = self._evidence_reward(state, seen)
        reward -= num_searches * self.env_config["search_cost"] + num_mistakes * self.env_config["invalid_penalty"]
        total = state["num_searches"] + num_searches
        info = {"success": False, "invalid": num_searches == 0, "num_searches": total, **_recall(state, seen)}
        return {**state, "messages": messages, "seen": seen, "num_searches": total}, reward, False, info

    def _limited(self, made: Sequence[Move]) -> Sequence[Move]:
        limit: int = self.env_config["max_calls_per_turn"]
        too_many = [
            Mistake(f"Error: at most {limit} calls of one turn are executed.", getattr(move, "call", None))
            for move in made[limit:]
        ]
        return [*made[:limit], *too_many]

    def _answer(self, state: dict[str, Any], text: str) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        answers: list[str] = state["answers"]
        is_match = exact_match(text, answers)
        info = {
            "success": is_match == 1.0,
            "answer": normalized(text),
            "exact_match": is_match,
            "f1": f1(text, answers),
            "num_searches": state["num_searches"],
            **_recall(state, state["seen"]),
        }
        return dict(state), self._score(text, answers), True, info

    def _outcome(self, move: Move) -> tuple[str, frozenset[str]]:
        """What the agent is told of a move, and the titles that it sees."""
        if not isinstance(move, Search):
            return (move.message if isinstance(move, Mistake) else ""), frozenset()
        try:
            passages = self.search(move.query)
        except CallTimeoutError:
            limit_s = self.env_config["search_timeout_s"]
            return f"Error: the search took longer than {limit_s:g} s, and was given up", frozenset()
        shown_passages = ShownPassages(passages, self.env_config["max_passage_chars"])
        content = shown_passages.numbered() if move.call else shown_passages.in_tags()
        return content, frozenset(passage.title for passage in passages)

    def _evidence_reward(self, state: dict[str, Any], seen: frozenset[str]) -> float:
        evidence: frozenset[str] = state["evidence"]
        if not evidence:
            return 0.0
        return self.env_config["evidence_reward"] * len(evidence & (seen - state["seen"])) / len(evidence)

    def _state_key(self, state: dict[str, Any]) -> Hashable:
        """The titles that were found: where they are the same, so is what is left to find out."""
        return state["seen"]

    def vocabulary_texts(self) -> list[str]:
        """Every text of the generated corpus and its questions, and what the environment says.

        Empty with another corpus or a retriever: what these may show is recorded from episodes.
        """
        if self.env_config["corpus"] != GENERATED or self.env_config["retriever"] is not None:
            return []
        made = world.World(**self.env_config["world"])
        own = self.env_config["system_prompt"]
        questions = [made.question(one, path).text for one in made.people for path in world.QUESTIONS]
        system = self._system_prompt() if own is None else own
        texts = [system, LAST_TURN, *questions, *self._shown_texts(made), *self._said_texts(made)]
        return [*filter(None, texts), *(f"{text}\n\n{LAST_TURN}" for text in self._shown_texts(made))]

    def _shown_texts(self, made: world.World) -> list[str]:
        """What searches may show: each passage in each place."""
        is_called = self.env_config["format"] == "tools"
        top_k, max_chars = self.env_config["top_k"], self.env_config["max_passage_chars"]
        passages = [Passage(one["title"], one["text"]) for one in made.passages]
        found = [ShownPassages([one] * top_k, max_chars) for one in passages] + [ShownPassages([], max_chars)]
        return [one.numbered() if is_called else one.in_tags() for one in found]

    def _said_texts(self, made: world.World) -> list[str]:
        """Searches for every entity, and answers with every one."""
        values = {value for facts in made.facts.values() for value in facts.values()}
        if self.env_config["format"] == "tools":
            calls = (json.dumps({"name": TOOL, "arguments": {"query": entity}}) for entity in made.facts)
            return [TOOL, *sorted(values), *(f"<tool_call>{call}</tool_call>" for call in calls)]
        searches = [f"<search>{entity}</search>" for entity in made.facts]
        return [*searches, *(f"<answer>{value}</answer>" for value in sorted(values))]

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:
        """Rows to train on; the options are those of :class:`~agentsgym.envs.Search.tasks.DatasetOptions`.

        Raises:
            ConfigError: The configuration or an option is not valid, or the data lack a column.
        """
        return task_dataset(cls, env_config, "train", options)

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:
        """Rows to evaluate on, about other people (or, of data of your own, other questions) than those to train on.

        Arguments and errors are those of :meth:`get_train_dataset`.
        """
        return task_dataset(cls, env_config, "eval", options)


def _reply(move: Move, content: str) -> Message:
    call = getattr(move, "call", None)
    if call is None:
        return {"role": "user", "content": content}
    message: Message = {"role": "tool", "content": content, "name": call.name or TOOL}
    if call.id is not None:
        message["tool_call_id"] = call.id
    return message


def _recall(state: Mapping[str, Any], seen: frozenset[str]) -> dict[str, float]:
    evidence: frozenset[str] = state["evidence"]
    return {"recall": len(evidence & seen) / len(evidence)} if evidence else {}
