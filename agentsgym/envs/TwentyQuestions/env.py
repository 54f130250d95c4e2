"""Twenty Questions: the agent identifies the gamemaster's secret object."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.boundary import system_messages, warn_once
from agentsgym.envs.contract import State, Stepped
from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.datasets.options import (
    COMMON_OPTIONS,
    CommonOptions,
    Part,
    checked_options,
    dataset_of,
    names_in_part,
    row_env,
    shuffled,
    task_seed,
)
from agentsgym.envs.TwentyQuestions import SPEC
from agentsgym.envs.TwentyQuestions.gamemaster import NO, REPLIES, UNKNOWN, YES, Gamemaster, load_reader
from agentsgym.envs.TwentyQuestions.knowledge import COMPARISONS, Candidates, KnowledgeBase, load_knowledge
from agentsgym.envs.TwentyQuestions.language import load_language
from agentsgym.envs.TwentyQuestions.parsing import Fault, Guess, Question, core, normalize
from agentsgym.envs.TwentyQuestions.styles import STYLES
from agentsgym.envs.user_checks import is_async
from agentsgym.errors import ConfigError, EnvError, TaskError, did_you_mean
from agentsgym.event_loop import awaited
from agentsgym.fields import Field, choice_field, is_bool, is_number, is_str, is_strings, or_none, require
from agentsgym.seeding import derive_seed
from agentsgym.texts import shown

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


def _is_choice(value: Any) -> bool:
    return value == "all" or (is_strings(value) and len(value) > 0)


def _are_objects(value: Any) -> bool:
    return value == "both" or _is_choice(value)


_PENALTY = Field(default=None, expected="a number >= 0, or None for the scheme's default", valid=or_none(is_number(0)))
_SWITCH = Field(default=False, expected="True or False", valid=is_bool)
#: What a turn can be apart from a question that is answered; their fractions of all turns are metrics.
_KINDS_OF_TURNS = ("not_understood", "not_known", "invalid", "guess")
_REPLY_OF_TEXT = {core(normalize(reply)): reply for reply in REPLIES}
#: The reward of a turn before penalties, from whether it was the correct guess and the fraction of information that it
#: gained (0 if it ended the game), by scheme; the first one is the default.
REWARD_SCHEMES: dict[str, Callable[[bool, float], float]] = {
    "win_plus_information": lambda is_correct, information: 1.0 if is_correct else information,
    "win": lambda is_correct, _: float(is_correct),
    "lmrl": lambda is_correct, _: 0.0 if is_correct else -1.0,  # LMRL-Gym, arXiv 2311.18232
}
#: The default penalties of an invalid action and a repeated question, by scheme.
DEFAULT_PENALTIES: dict[str, tuple[float, float]] = {
    "win_plus_information": (0.1, 0.05),
    "win": (0.0, 0.0),
    "lmrl": (0.0, 0.0),
}


class TwentyQuestionsEnv(MultistepEnv):
    """Twenty Questions over a knowledge base of everyday objects.

    A task is ``{"solution": str, "seed": int}``; any solution is allowed. If the knowledge base does not contain it, a
    correct guess is still recognized, but every question about a property is answered "I don't know.".

    A question that is not understood, for which ``info["not_understood"]`` is True, is answered "I don't know what
    you mean."; in the style of TextArena, with listed ``properties`` and from a ``gamemaster``, it is "I don't know.".
    Metrics are the ``information`` gained, in [0, 1], and the fractions of turns ``not_understood_turns``,
    ``not_known_turns``, ``invalid_turns`` and ``guess_turns``.

    Keys of ``env_config`` in addition to the common ones:

    - ``objects``: the possible secrets, relative to which information is measured: a list of names, ``"all"`` everyday
      objects, or ``"both"``, which adds the rarer ones (with ``hardcore``, the datasets have only those as secrets).
    - ``properties``: the properties that the gamemaster can answer questions about: ``"all"`` or a list of keys.
    - ``hardcore``: whether only the rarer objects are used.
    - ``final_guess``: whether a wrong guess loses the game; otherwise it is only answered "No.".
    - ``spelling``: whether questions about the letters, the length and the words of the object's name are answered.
    - ``style``: ``"agentsgym"`` (default) or ``"textarena"``, the prompts, words and rules of guessing of TextArena's
      ``TwentyQuestions-v0`` (which allows 21 turns): see :mod:`agentsgym.envs.TwentyQuestions.styles`.
    - ``reward_scheme``: ``"win_plus_information"`` (default), ``"win"`` or ``"lmrl"``; see
      :data:`REWARD_SCHEMES`.
    - ``invalid_penalty``, ``repeat_penalty``: the costs of an invalid action and a repeated question, in any scheme; by
      default 0.1 and 0.05 under ``win_plus_information`` and 0 under the others, which keep their definitions.
    - ``unknown_penalty``: the cost of a question that is not understood or answered "I don't know."; 0 by default.
    - ``gamemaster``: a callable ``(solution, question) -> str`` that replaces the built-in one. It may be async, as an
      :class:`~agentsgym.envs.TwentyQuestions.agent_gamemaster.AgentGamemaster` is. Its arguments are the solution as
      written in the task, and the agent's text; guesses are judged by the environment. "Yes", "no", "Sometimes" and "I
      don't know" are read as the built-in gamemaster's replies, and any other text is shown to the agent as it is. If
      the knowledge base does not confirm the answer, it rules out no object.
    """

    spec = SPEC
    config_fields: ClassVar[Mapping[str, Field]] = {
        "objects": Field(default="all", expected="'both', 'all' or a list of object names", valid=_are_objects),
        "properties": Field(default="all", expected="'all' or a list of property keys", valid=_is_choice),
        "hardcore": _SWITCH,
        "final_guess": _SWITCH,
        "spelling": Field(default=True, expected="True or False", valid=is_bool),
        "style": choice_field(*STYLES),
        "reward_scheme": choice_field(*REWARD_SCHEMES),
        "invalid_penalty": _PENALTY,
        "repeat_penalty": _PENALTY,
        "unknown_penalty": Field(default=0.0, expected="a number >= 0", valid=is_number(0)),
        "gamemaster": Field(
            default=None, expected="a callable (solution, question) -> str, or None", valid=or_none(callable)
        ),
    }

    task_fields: ClassVar[Collection[str] | None] = ("solution",)

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None = None, env_config: dict[str, Any] | None = None
    ) -> None:
        """Check the configuration and select the objects and properties; the arguments are those of every environment.

        Raises:
            ConfigError: The configuration is invalid, or ``properties`` do not distinguish all ``objects``.
        """
        super().__init__(tokenizer, env_config)
        config = self.env_config
        if config["gamemaster"] is not None:
            own = (config["gamemaster"], type(config["gamemaster"]).__call__)
            self.has_coroutines = type(self).has_coroutines or any(map(is_async, own))
        self.style = STYLES[config["style"]](config)
        self.candidates = _candidates(config)
        self._gamemaster = Gamemaster(self.candidates.properties)
        invalid, repeat = DEFAULT_PENALTIES[config["reward_scheme"]]
        self._invalid_penalty: float = invalid if config["invalid_penalty"] is None else config["invalid_penalty"]
        self._repeat_penalty: float = repeat if config["repeat_penalty"] is None else config["repeat_penalty"]

    @property
    def knowledge(self) -> KnowledgeBase:
        """The objects and properties, which all environments of a process share."""
        return load_knowledge()

    @property
    def secrets(self) -> list[str]:
        """The objects that its datasets draw secrets from."""
        names, known = self.candidates.objects, self.knowledge.objects
        is_part = self.env_config["objects"] == "both" and self.env_config["hardcore"]
        return [name for name in names if known[name].hard or not is_part]

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        solution: Any = task_data.get("solution")
        name = load_reader().canonical(solution) if is_str(solution) else ""
        require("task_data['solution']", solution, lambda _: bool(name), "one or more words", TaskError)
        is_known = self.env_config["objects"] != "all" and name in self.knowledge.objects
        if is_known and not self.is_candidate(solution):
            warn_once("a task's solution is not one of env_config['objects'], so that the game has one object more")

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> State:
        self._check_task(task_data)
        solution = load_reader().canonical(task_data["solution"])
        is_candidate = solution in self.candidates.bit
        # A secret that is not one of the objects gets a separate bit, so that a candidate always remains.
        secret_bit = self.candidates.bit[solution] if is_candidate else self.candidates.all + 1
        return {
            "solution": solution,
            "solution_as_given": task_data["solution"],
            "secret_bit": secret_bit,
            "candidates": self.candidates.all | secret_bit,
            "num_at_start": (self.candidates.all | secret_bit).bit_count(),
            "asked": frozenset[str](),
            "kinds": (),
            "turns_left": self.env_config["max_steps_per_episode"],
            "observation": self.style.first_prompt(solution),
            "done": False,
        }

    def _format_prompt(self, state: State, step: int) -> str:
        is_last = step >= self.env_config["max_steps_per_episode"] - 1
        return f"{state['observation']} {self.style.last_turn}" if is_last else state["observation"]

    def _step_episode(self, session_id: str, state: State, action: str) -> Stepped:
        next_state, reward, done, info = self._step_move(state, action)
        kinds = (*state["kinds"], _kind_of_turn(info))
        fractions = {f"{kind}_turns": kinds.count(kind) / len(kinds) for kind in _KINDS_OF_TURNS}
        information = 1 + self._potential(next_state)
        return {**next_state, "kinds": kinds}, reward, done, {**info, "information": information, **fractions}

    def _step_move(self, state: State, action: str) -> Stepped:
        move = self.style.parse(load_reader(), action, state["solution"])
        state = {**state, "turns_left": state["turns_left"] - 1}
        if isinstance(move, Fault):
            reward = self._reward(penalty=self._invalid_penalty)
            info = {"success": False, "invalid": True, "reason": move.name.lower()}
            return {**state, "observation": move.value}, reward, False, info
        if isinstance(move, Question):
            meaning = load_language().understand(move.text)
            if not move.name or (meaning and meaning.key in self.candidates.properties):
                return self._step_question(state, move, action)
            move = Guess(name=move.name)  # this game knows only the object of that name
        info = {"success": move.name == state["solution"], "guess": move.name}
        if info["success"]:
            next_state = {**state, "candidates": state["secret_bit"], "observation": self.style.replies[YES]}
            return next_state, self._reward(is_correct=True), True, info
        kept = ~self.candidates.bit.get(move.name, 0)
        is_final = self.style.is_final_guess
        if is_final:
            state = {**state, "turns_left": 0}
        next_state, reward = self._rule_out(state, f"guess {move.name}", kept=kept, penalty=0.0)
        return {**next_state, "observation": self.style.replies[NO]}, reward, is_final, info

    def _state_key(self, state: State) -> Hashable:
        """The objects that are consistent with all answers; states with equal sets have the same remaining task."""
        return state["candidates"]

    def _potential(self, state: State) -> float:
        """Minus the fraction of information that is missing, ``-log2(n) / log2(n_0)`` if n objects remain.

        Undiscounted shaping with this potential rewards each turn with the fraction of information gained, and the last
        turn with the rest, whether the game is won or lost, so the sum over a game is always 1.
        """
        return -information_fraction(state["candidates"].bit_count(), 1, state["num_at_start"])

    def _system_prompt(self) -> str | None:
        return self.style.system_prompt()

    def _step_question(self, state: State, question: Question, action: str) -> Stepped:
        meaning = load_language().understand(question.text)
        expected = self.style.allowed(self._gamemaster(state["solution"], question.text))
        reply = expected
        is_about_name = meaning is not None and ":" in meaning.key and not meaning.key.startswith(COMPARISONS)
        if is_about_name and not self.env_config["spelling"]:
            meaning, reply = None, UNKNOWN
        elif self.env_config["gamemaster"]:
            reply = self.style.allowed(self._custom_reply(state["solution_as_given"], action.strip()))
        kept = ~self.candidates.bit.get(question.name, 0)
        if meaning and reply == expected != UNKNOWN:
            value = self.knowledge.value(state["solution"], meaning.key) or ""
            kept &= self.candidates.mask(self.knowledge, meaning.key, value) | state["secret_bit"]
        topic = f"property {meaning.key}" if meaning else f"question {question.text}"
        penalty: float = self.env_config["unknown_penalty"] if reply == UNKNOWN else 0.0
        next_state, earned = self._rule_out(state, topic, kept=kept, penalty=penalty)
        not_understood = meaning is None and reply == UNKNOWN
        info = {"success": False, "property": meaning and meaning.key, "reply": reply, "not_understood": not_understood}
        text = self.style.not_understood if not_understood else self.style.replies.get(reply, reply)
        return {**next_state, "observation": text}, earned, False, info

    def _custom_reply(self, solution: str, question: str) -> str:
        """Return the configured gamemaster's reply, in the wording of the built-in one if it is one of its replies."""
        reply: Any = awaited(self.env_config["gamemaster"](solution, question))
        text = core(normalize(reply)) if isinstance(reply, str) else ""
        if not text:
            raise EnvError(f"the gamemaster must answer with a str that is not empty, got {shown(reply)}")
        return _REPLY_OF_TEXT.get(text, reply)

    def _reward(self, *, is_correct: bool = False, information: float = 0.0, penalty: float = 0.0) -> float:
        return REWARD_SCHEMES[self.env_config["reward_scheme"]](is_correct, information) - penalty

    def _rule_out(self, state: State, topic: str, *, kept: int, penalty: float) -> tuple[State, float]:
        """Rule out the objects that are not in the mask ``kept``, record the topic, and return the reward.

        Information is worth nothing once the game is over: rewarding it teaches a policy to ask until the end.
        """
        before: int = state["candidates"]
        after = before & kept
        fraction = 0.0
        if state["turns_left"]:
            fraction = information_fraction(before.bit_count(), after.bit_count(), state["num_at_start"])
        repeat = self._repeat_penalty if topic in state["asked"] else 0.0
        next_state = {**state, "candidates": after, "asked": state["asked"] | {topic}}
        return next_state, self._reward(information=fraction, penalty=repeat + penalty)

    def is_candidate(self, solution: str) -> bool:
        """Whether a solution, in any of its names, is one of the objects."""
        return load_reader().canonical(solution) in self.candidates.bit

    def vocabulary_texts(self) -> list[str]:
        """Return every message of the environment, and every question and guess in canonical wording.

        A word-level tokenizer built from these encodes and decodes whole games.
        """
        replies = dict.fromkeys([*self.style.replies.values(), self.style.not_understood])
        observations = [*self.style.first_prompts(), *replies, *(fault.value for fault in Fault)]
        system = [message["content"] for message in system_messages(self)]
        prompts = [*system, *observations, *(f"{text} {self.style.last_turn}" for text in observations)]
        questions = [self.knowledge.properties[key].question for key in self.candidates.properties]
        guesses = [self.style.guess(self.knowledge.objects[name]) for name in self.candidates.objects]
        return [text for text in (*prompts, *questions, *guesses) if text]

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[CommonOptions]) -> Dataset:
        """Return rows to train on, each secret equally often (± 1); the options are those of :class:`CommonOptions`.

        A row is JSON and cannot contain a ``gamemaster``. If this is called on an environment that has one, the rows do
        not include it; an environment created from such a row uses the built-in gamemaster.

        Raises:
            ConfigError: The configuration or an option is invalid, ``env_config`` has a ``gamemaster``, or there are
                too few secrets to split.
        """
        return cls._rows(env_config, "train", options)

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[CommonOptions]) -> Dataset:
        """Return rows to evaluate on, which share no secret with :meth:`get_train_dataset` unless ``split="all"``."""
        return cls._rows(env_config, "eval", options)

    @classmethod
    def _rows(cls, env_config: dict[str, Any] | None, part: Part, options: Mapping[str, Any]) -> Dataset:
        settings = checked_options(options, COMMON_OPTIONS)
        secrets = row_env(cls, env_config, "gamemaster").secrets
        chosen = names_in_part(secrets, part, settings, "objects", topic="twenty questions")
        generator = random.Random(derive_seed("twenty questions rows", part, settings["seed"]))
        tasks = [
            {"solution": solution, "seed": task_seed(part, "twenty questions task", settings["seed"], row)}
            for row, solution in enumerate(shuffled(chosen, settings["size"], generator))
        ]
        return dataset_of(tasks, class_path(cls), env_config)


def _kind_of_turn(info: Mapping[str, Any]) -> str:
    named = next((kind for kind in _KINDS_OF_TURNS if info.get(kind)), "answered")
    return "not_known" if named == "answered" and info.get("reply") == UNKNOWN else named


def information_fraction(before: int, after: int, at_start: int) -> float:
    """Return the fraction of information gained by ruling out objects, ``log2(n_k / n_{k+1}) / log2(n_0)``.

    ``n_k`` is the number of objects that are consistent with all answers before turn k. Over a game in which one object
    remains, the fractions add up to 1.

    >>> information_fraction(16, 4, 16)
    0.5
    """
    return math.log2(before / after) / math.log2(at_start) if at_start > 1 else 0.0


def _candidates(config: Mapping[str, Any]) -> Candidates:
    known = load_knowledge()
    if config["objects"] == "all":
        objects = STYLES[config["style"]](config).objects(known)
    elif config["objects"] == "both":
        objects = list(known.objects)
    else:
        objects = _selected_names("objects", config["objects"], known.objects)
        objects = [name for name in objects if known.objects[name].hard or not config["hardcore"]]
    if not objects:
        raise ConfigError("env_config['hardcore'] requires at least one hard object in env_config['objects'], got none")
    candidates = Candidates(known, objects, _selected_names("properties", config["properties"], known.properties))
    pair = candidates.indistinguishable_pair()
    if pair:
        raise ConfigError(
            f"env_config['properties'] must distinguish all objects, but none of them distinguishes {pair[0]!r} "
            f"and {pair[1]!r}"
        )
    return candidates


def _selected_names(key: str, names: str | Sequence[str], known: Mapping[str, Any]) -> list[str]:
    """Return the selected objects or properties, after checking that they are known and distinct."""
    chosen = list(known) if names == "all" else list(names)
    kind = {"objects": "object", "properties": "property"}[key]
    for i, name in enumerate(chosen):
        if name not in known:
            canonical = load_knowledge().names.get(name)
            hint = f", which is another name of {canonical!r}" if canonical in known else did_you_mean(name, known)
            raise ConfigError(f"env_config[{key!r}] contains the unknown {kind} {shown(name)}{hint}")
        if name in chosen[:i]:
            raise ConfigError(f"env_config[{key!r}] must contain each {kind} only once, got {shown(name)} twice")
    return chosen
