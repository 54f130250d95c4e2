"""A judge: an agent that scores rollouts by a rubric."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast, get_args

from agentsgym.agents.base import Agent, as_agent
from agentsgym.errors import AgentError, ConfigError, JudgeError
from agentsgym.fields import (
    check_choice,
    is_fraction,
    is_int,
    is_number,
    is_positive_number,
    is_str,
    is_text,
    or_none,
    require,
)
from agentsgym.judging.cache import AnswerCache, name_in_cache, request_key
from agentsgym.judging.calls import Caller, Cost, Dialog, Run
from agentsgym.judging.prompts import (
    Question,
    correction,
    episode_question,
    group_question,
    text_question,
    turn_question,
)
from agentsgym.judging.rubric import Criterion, Scope, as_rubric
from agentsgym.judging.verdicts import Verdict, VerdictError, read_verdict
from agentsgym.seeding import derive_seed
from agentsgym.texts import sentence_of, shown
from agentsgym.types import Action, Trajectory

logger = logging.getLogger(__name__)

_MAX_ANSWER: Final = 20_000  # characters of an answer that are kept with the rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgment:
    """The judgment of one turn or one rollout.

    Attributes:
        judge: The name of the judge.
        scope: What was judged at once.
        turn: The index of the turn; None for a rollout.
        values: By criterion, the answer as a number in [0, 1]; in a task group, the rollout's rank.
        scores: By criterion, the reward: the value times the weight.
        reason: The judge's reason.
        answers: The judge's answers, as they were written; several if a task group was shown in several orders.
        order: In a task group, the place at which the rollout was shown each time, from 1; otherwise empty.
        calls: Number of calls that this judgment took; a task group's are divided among its rollouts.
        tokens: Number of tokens of these calls; None if unknown.
        seconds: Duration of these calls.
        cached: Number of answers that came from the cache.
        error: The reason why the judge failed; the values are then its ``on_judge_failure``. None if it answered.
    """

    judge: str
    scope: Scope
    turn: int | None = None
    values: dict[str, float]
    scores: dict[str, float]
    reason: str = ""
    answers: list[str] = field(default_factory=list[str])
    order: list[int] = field(default_factory=list[int])
    calls: float = 0
    tokens: float | None = None
    seconds: float = 0.0
    cached: float = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The ranks of a task's rollouts, shown in one order.

    Attributes:
        values: By criterion, the rank of each rollout as a number in [0, 1], (G,).
        reason: The judge's reason.
        answer: Its answer.
    """

    values: dict[str, list[float]]
    reason: str
    answer: str


class Judge:
    """Scores turns, rollouts or task groups with an agent, which answers a rubric.

    With ``env.judges = [judge]``, the rollouts of an environment are judged wherever they are played. Each criterion
    becomes a named reward.

    What is judged is shown to the agent as quoted data. A judge of task groups shows all rollouts of a task at once, in
    an order that is drawn from ``seed`` and the rollouts, and each criterion is a ranking: the best rollout gets 1, the
    worst 0.
    """

    def __init__(  # noqa: PLR0913  # keywords, most of them usually omitted
        self,
        agent: Any,
        *,
        rubric: str | dict[str, str] | Criterion | Sequence[Criterion],
        scope: Scope = "episode",
        name: str = "judge",
        reference: str | None = None,
        on_judge_failure: float | None = None,
        cache: str | Path | None = None,
        agent_name: str | None = None,
        max_concurrent: int = 64,
        max_retries: int = 2,
        retry_delay_s: float = 0.5,
        timeout_s: float = 120.0,
        max_characters: int = 60_000,
        num_orders: int = 1,
        seed: int = 0,
    ) -> None:
        """Check the arguments; nothing is called yet.

        Args:
            agent: The agent that judges, or any object with ``get_action``. An asynchronous agent is called many times
                at once, any other with batches of requests.
            rubric: The criteria: see :func:`~agentsgym.judging.rubric.as_rubric`.
            scope: What is judged at once: ``"turn"``, ``"episode"`` (a whole rollout) or ``"group"`` (all rollouts of a
                task).
            name: The judge's name in records and messages.
            reference: A key of ``task_data`` whose value is shown as the reference answer; tasks without it are judged
                without.
            on_judge_failure: The value in [0, 1] of every criterion if the judge fails; if None, the rollout fails.
            cache: Folder in which answers are kept, so that an equal request is not sent again; None for none.
            agent_name: Identifies the agent in the cache: the same answers can be expected under the same name.
                Required with ``cache``, except for an :class:`~agentsgym.agents.openai.OpenAIAgent`.
            max_concurrent: Maximum number of open calls, or of requests in a batch.
            max_retries: How often a call that failed is repeated.
            retry_delay_s: Seconds before the first repetition, doubled after each.
            timeout_s: Time limit for one call of an asynchronous agent.
            max_characters: If the quoted text of an episode is longer, its messages are shortened in the middle.
            num_orders: In how many orders a task group is shown; the ranks are averaged.
            seed: Seed of the orders and of the agent's draws.

        Raises:
            ConfigError: An argument is invalid, or ``agent`` is not an agent.
        """
        check_choice("Judge(scope)", scope, get_args(Scope))
        self._check(locals())
        self.agent: Agent = as_agent(agent)
        self.rubric, self.scope, self.name, self.reference = as_rubric(rubric, scope), scope, name, reference
        self.on_judge_failure, self.num_orders, self.seed = on_judge_failure, num_orders, seed
        self.max_concurrent, self.max_characters = max_concurrent, max_characters
        self.agent_name = name_in_cache(agent, agent_name, cache)
        self._cache = None if cache is None else AnswerCache(cache)
        self._caller = Caller(
            self.agent,
            max_concurrent=max_concurrent,
            max_retries=max_retries,
            retry_delay_s=retry_delay_s,
            timeout_s=timeout_s,
        )
        self._is_warned = False
        self._executor: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        criteria = ", ".join(one.name for one in self.rubric)
        return (
            f"<Judge {self.name!r} of each {self.scope}: {criteria}, by {self.agent_name or type(self.agent).__name__}>"
        )

    def __copy__(self) -> Judge:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Judge:
        return self  # judges have no state of their own, so a copied environment shares them

    def __reduce__(self) -> tuple[Any, ...]:
        return LeftBehind, (self.name,)  # an agent may hold a model or connections; processes play but do not judge

    @property
    def identity(self) -> str:
        """A hash of everything that determines the scores: rubric, scope, agent and order."""
        criteria = [[one.name, one.question, one.scale, one.weight] for one in self.rubric]
        agent = self.agent_name or type(self.agent).__qualname__
        return request_key(agent, self.scope, criteria, self.reference, self.num_orders, self.seed, self.max_characters)

    def judge_turn(self, trajectory: Trajectory, turn: int, run: Run | None = None) -> Judgment:
        """Judge one turn of a rollout.

        Args:
            trajectory: The rollout.
            turn: The index of the turn.
            run: A run that another thread may stop.

        Raises:
            JudgeError: The agent failed, or its answer could not be read twice, and there is no ``on_judge_failure``.
            ConfigError: The agent cannot be used at all.
        """
        question = turn_question(trajectory, turn, self.rubric, **self._options(trajectory))
        return replace(self._judgment(question, run), turn=turn)

    def judge_episode(self, trajectory: Trajectory, run: Run | None = None) -> Judgment:
        """Judge a rollout; raises as :meth:`judge_turn` does."""
        question = episode_question(trajectory, self.rubric, **self._options(trajectory))
        return self._judgment(question, run)

    def judge_text(self, text: str, run: Run | None = None) -> Judgment:
        """Judge a text, such as the description of a state; raises as :meth:`judge_turn` does."""
        return self._judgment(text_question(text, self.rubric, max_characters=self.max_characters), run)

    async def score_text(self, text: str) -> dict[str, float]:
        """Return the scores of a text by criterion, while other coroutines go on: for ``async def _score_state``.

        Raises as :meth:`judge_turn` does.
        """
        run = Run()
        try:
            judgment = await asyncio.get_running_loop().run_in_executor(self._threads(), self.judge_text, text, run)
        finally:
            run.stop()  # if the coroutine was canceled
        return judgment.scores

    def judge_group(self, trajectories: Sequence[Trajectory], run: Run | None = None) -> list[Judgment]:
        """Rank the rollouts of a task; raises as :meth:`judge_turn` does.

        A single rollout gets 0.5 without a call, since there is nothing to compare it with.

        Returns:
            One judgment for each rollout, (G,).
        """
        size, cost = len(trajectories), Cost()
        if size < 2:
            return [self._scored(dict.fromkeys(self._names, 0.5), cost) for _ in trajectories]
        orders = self.orders(trajectories)
        rankings: list[Ranking] = []
        try:
            for order in orders:
                rankings.append(self.rank(trajectories, order, cost, run))
        except JudgeError as error:
            return [self._failed(error, cost, share=size) for _ in trajectories]
        reason = " / ".join(one.reason for one in rankings if one.reason)
        answers = [one.answer[:_MAX_ANSWER] for one in rankings]
        judgments: list[Judgment] = []
        for index in range(size):
            values = {name: sum(one.values[name][index] for one in rankings) / len(rankings) for name in self._names}
            places = [order.index(index) + 1 for order in orders]
            judgment = self._scored(values, cost, share=size)
            judgments.append(replace(judgment, reason=reason, answers=answers, order=places))
        return judgments

    def orders(self, trajectories: Sequence[Trajectory]) -> list[list[int]]:
        """Draw the orders in which rollouts of a task are shown; every second one reverses the one before."""
        texts = [[message["content"] for message in one.messages] for one in trajectories]
        digest = hashlib.blake2b(repr(texts).encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()
        rng = random.Random(derive_seed("judge order", self.seed, digest))
        orders: list[list[int]] = []
        for number in range(self.num_orders):
            order = orders[-1][::-1] if number % 2 else rng.sample(range(len(trajectories)), len(trajectories))
            orders.append(order)
        return orders

    def rank(
        self, trajectories: Sequence[Trajectory], order: Sequence[int], cost: Cost | None = None, run: Run | None = None
    ) -> Ranking:
        """Rank rollouts that are shown in one order; raises as :meth:`judge_turn` does, but for ``on_judge_failure``.

        Args:
            trajectories: At least two rollouts of a task, (G,).
            order: The indices of the rollouts in the order in which they are shown, (G,).
            cost: Receives the cost.
            run: A run that another thread may stop.
        """
        question = group_question(trajectories, order, self.rubric, **self._options(trajectories[0]))
        verdict, answer = self._ask(question, run or Run(), cost or Cost())
        places = [question.order.index(index) for index in range(len(trajectories))]
        values = {name: [own[place] for place in places] for name, own in verdict.values.items()}
        return Ranking(values=values, reason=verdict.reason, answer=answer)

    def _threads(self) -> ThreadPoolExecutor:
        """The threads that wait for the answers of :meth:`score_text`, as many as there may be open calls."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.max_concurrent, thread_name_prefix="agentsgym-judge")
        return self._executor

    @property
    def _names(self) -> list[str]:
        return [one.name for one in self.rubric]

    def _check(self, given: dict[str, Any]) -> None:
        checks: dict[str, tuple[Any, str]] = {
            "name": (is_text, "a non-empty string"),
            "reference": (or_none(is_str), "a key of task_data or None"),
            "on_judge_failure": (or_none(is_fraction), "a number in [0, 1] or None"),
            "cache": (or_none(lambda value: isinstance(value, str | Path)), "a folder or None"),
            "agent_name": (or_none(is_str), "a string or None"),
            "max_concurrent": (is_int(1), "a positive int"),
            "max_retries": (is_int(0), "a non-negative int"),
            "retry_delay_s": (is_number(0), "a number of seconds of at least 0"),
            "timeout_s": (is_positive_number, "a positive number of seconds"),
            "max_characters": (is_int(1000), "an int of at least 1000"),
            "num_orders": (is_int(1), "a positive int"),
            "seed": (is_int(0), "a non-negative int"),
        }
        for name, (valid, expected) in checks.items():
            require(f"Judge({name})", given[name], valid, expected)

    def _options(self, trajectory: Trajectory) -> dict[str, Any]:
        value = None if self.reference is None else trajectory.task_data.get(self.reference)
        if self.reference is not None and value is None and not self._is_warned:
            self._is_warned = True
            text = "a task has no task_data[%r], so judge %r grades it without a reference answer"
            logger.warning(text, self.reference, self.name)
        return {"reference": value, "max_characters": self.max_characters}

    def _judgment(self, question: Question, run: Run | None) -> Judgment:
        cost = Cost()
        try:
            verdict, text = self._ask(question, run or Run(), cost)
        except JudgeError as error:
            return self._failed(error, cost)
        judgment = self._scored({name: values[0] for name, values in verdict.values.items()}, cost)
        return replace(judgment, reason=verdict.reason, answers=[text[:_MAX_ANSWER]])

    def _scored(self, values: dict[str, float], cost: Cost, *, share: int = 1) -> Judgment:
        return Judgment(
            judge=self.name,
            scope=self.scope,  # pyright: ignore[reportArgumentType]  # checked at construction
            values=values,
            scores={one.name: one.weight * values[one.name] for one in self.rubric},
            calls=cost.calls / share,
            tokens=None if cost.tokens is None else cost.tokens / share,
            seconds=cost.seconds / share,
            cached=cost.cached / share,
        )

    def _failed(self, error: JudgeError, cost: Cost, *, share: int = 1) -> Judgment:
        if self.on_judge_failure is None:
            error.cost = cost
            raise error
        values = dict.fromkeys(self._names, float(self.on_judge_failure))
        return replace(self._scored(values, cost, share=share), error=sentence_of(error))

    def _ask(self, question: Question, run: Run, cost: Cost) -> tuple[Verdict, str]:
        """Ask, once again if the answer cannot be read, and return the verdict with the answer."""
        key = request_key(self.agent_name, [*question.messages], self.seed)
        known = self._known(key, question)
        if known is not None:
            cost.cached += 1
            return known
        dialog = Dialog(self._caller, question.messages, key=key, seed=derive_seed("judge", self.seed, key))
        try:
            verdict, text = dialog.read(
                partial(_verdict_of, question=question), correction, num_corrections=1, run=run, cost=cost
            )
        except AgentError as error:
            raise self._error(f"failed: {sentence_of(error)}") from error
        except VerdictError as error:
            raise self._error(f"gave two answers that cannot be read: of the second, {error}") from error
        if self._cache is not None:
            self._cache.put(key, question.messages, text)
        return verdict, text

    def _known(self, key: str, question: Question) -> tuple[Verdict, str] | None:
        """Return the cached answer; None if there is none, or none that can be read."""
        text = None if self._cache is None else self._cache.get(key)
        if text is None:
            return None
        try:
            return _verdict_of(Action(text=text), question), text
        except VerdictError:
            return None

    def _error(self, what: str) -> JudgeError:
        return JudgeError(f"judge {self.name!r} ({self.agent_name or type(self.agent).__name__}) {what}")


def _verdict_of(action: Action, question: Question) -> Verdict:
    if action.finish_reason == "length":
        raise VerdictError("it was cut off at the token limit")
    return read_verdict(action.text, question.criteria, len(question.order) or None)


class LeftBehind:
    """Stands for a judge in a pickled environment."""

    def __init__(self, name: str) -> None:
        self.name = name


def judges_of(env: Any) -> tuple[Judge, ...]:
    """Return the judges of an environment.

    Raises:
        ConfigError: ``env.judges`` is not a list of judges, or two criteria have the same name.
    """
    given: Any = getattr(env, "judges", None)
    if given is None or given == ():
        return ()
    name, is_list = type(env).__name__, isinstance(given, list | tuple)
    judges = tuple(cast("Sequence[Any]", given)) if is_list else (given,)
    if any(isinstance(one, LeftBehind) for one in judges):
        raise ConfigError(f"the judges of {name} are not pickled with it: set env.judges again in this process")
    if not all(isinstance(one, Judge) for one in judges):
        raise ConfigError(f"{name}.judges must be a list of agentsgym.Judge, got {shown(cast('object', given))}")
    seen: dict[str, str] = {}
    for judge in judges:
        for criterion in judge.rubric:
            if criterion.name in seen:
                raise ConfigError(
                    f"the criteria of {name}.judges must have different names, but judges {seen[criterion.name]!r} and "
                    f"{judge.name!r} both have {criterion.name!r}"
                )
            seen[criterion.name] = judge.name
    return judges


def ranks_groups(env: Any) -> bool:
    """Whether an environment has a judge of complete task groups."""
    return any(judge.scope == "group" for judge in judges_of(env))
