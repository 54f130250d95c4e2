"""A judge: an agent that scores rollouts by a rubric."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

from agentsgym.agents.base import finish_agent
from agentsgym.agents.calls import Caller, Cost, UnreadableError, request_key
from agentsgym.envs.finished import Change, RolloutHook, hooks_of
from agentsgym.errors import AgentError, ConfigError, JudgeError
from agentsgym.event_loop import gathered, on_agents_loop, run_coroutine
from agentsgym.fields import check_choice, is_fraction, is_int, is_str, is_text, or_none, require
from agentsgym.judging.prompts import (
    Question,
    Verdict,
    correction,
    episode_question,
    group_question,
    read_verdict,
    text_question,
    turn_question,
)
from agentsgym.judging.rubric import Criterion, Scope, as_rubric
from agentsgym.judging.scores import Judgment, with_judgments
from agentsgym.seeding import derive_seed
from agentsgym.texts import sentence_of, shown
from agentsgym.types import Action, Trajectory

logger = logging.getLogger(__name__)

_MAX_ANSWER: Final = 20_000  # characters of an answer that are kept with the rollout


class Judge(RolloutHook):
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
        require("Judge(name)", name, is_text, "a non-empty string")
        require("Judge(reference)", reference, or_none(is_str), "a key of task_data or None")
        require("Judge(on_judge_failure)", on_judge_failure, or_none(is_fraction), "a number in [0, 1] or None")
        require("Judge(max_characters)", max_characters, is_int(1000), "an int of at least 1000")
        require("Judge(num_orders)", num_orders, is_int(1), "a positive int")
        if num_orders > 1 and scope != "group":
            raise ConfigError("Judge(num_orders) has no effect without scope='group': only task groups have an order")
        require("Judge(seed)", seed, is_int(0), "a non-negative int")
        self.rubric, self.scope, self.name, self.reference = as_rubric(rubric, scope), scope, name, reference
        self.on_judge_failure, self.num_orders, self.seed = on_judge_failure, num_orders, seed
        self.max_concurrent, self.max_characters = max_concurrent, max_characters
        self._caller = Caller(
            agent,
            "Judge",
            cache=cache,
            agent_name=agent_name,
            max_concurrent=max_concurrent,
            max_retries=max_retries,
            retry_delay_s=retry_delay_s,
            timeout_s=timeout_s,
            num_corrections=1,
        )
        self.agent, self.agent_name = self._caller.agent, self._caller.agent_name
        self.label, self.takes_groups = f"a judge of scope {scope!r}", scope == "group"
        criteria = [[one.name, one.question, one.scale, one.weight] for one in self.rubric]
        known_as = self.agent_name or type(self.agent).__qualname__
        self.identity = request_key(known_as, scope, criteria, reference, num_orders, seed, max_characters)
        self._is_warned = False

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
        return LeftBehind, ()  # an agent may hold a model or connections; processes play but do not judge

    def judge_turn(self, trajectory: Trajectory, turn: int) -> Judgment:
        """Judge one turn of a rollout.

        Args:
            trajectory: The rollout.
            turn: The index of the turn.

        Raises:
            JudgeError: The agent failed, or its answer could not be read twice, and there is no ``on_judge_failure``.
            ConfigError: The agent cannot be used at all.
        """
        return run_coroutine(self.ajudge(trajectory, turn))

    def judge_episode(self, trajectory: Trajectory) -> Judgment:
        """Judge a rollout; raises as :meth:`judge_turn` does."""
        return run_coroutine(self.ajudge(trajectory))

    def judge_group(self, trajectories: Sequence[Trajectory]) -> list[Judgment]:
        """Rank the rollouts of a task; raises as :meth:`judge_turn` does.

        A single rollout gets 0.5 without a call, since there is nothing to compare it with.

        Returns:
            One judgment for each rollout, (G,).
        """
        return run_coroutine(self.ajudge_group(trajectories))

    async def score_text(self, text: str) -> dict[str, float]:
        """Return a text's scores by criterion, for ``async def _score_state``; raises as :meth:`judge_turn` does."""
        return (await on_agents_loop(self._ajudge_text(text))).scores

    # The coroutines below run on the agents' event loop.

    async def ajudge(self, trajectory: Trajectory, turn: int | None = None) -> Judgment:
        """Judge a rollout or one of its turns; raises as :meth:`judge_turn` does."""
        ask = partial(episode_question, trajectory) if turn is None else partial(turn_question, trajectory, turn)
        return replace(await self._judgment(ask, self._options(trajectory), Cost()), turn=turn)

    async def ajudge_group(self, trajectories: Sequence[Trajectory]) -> list[Judgment]:
        """Rank the rollouts of a task: see :meth:`judge_group`."""
        size, cost = len(trajectories), Cost()
        if size < 2:
            return [self._scored(dict.fromkeys(self._names, 0.5), cost) for _ in trajectories]
        orders = self._orders(trajectories)
        try:
            rankings = [await self._rank(trajectories, order, cost) for order in orders]
        except JudgeError as error:
            return [self._failed(error, cost, share=size) for _ in trajectories]
        reason = " / ".join(one.reason for one, _ in rankings if one.reason)
        answers = [text[:_MAX_ANSWER] for _, text in rankings]
        judgments: list[Judgment] = []
        for index in range(size):
            values = {name: sum(one.values[name][index] for one, _ in rankings) / len(rankings) for name in self._names}
            places = [order.index(index) + 1 for order in orders]
            judgment = self._scored(values, cost, share=size)
            judgments.append(replace(judgment, reason=reason, answers=answers, order=places))
        return judgments

    async def _rank(self, trajectories: Sequence[Trajectory], order: Sequence[int], cost: Cost) -> tuple[Verdict, str]:
        """Rank rollouts, shown in one order: the verdict, with a rank in [0, 1] by rollout, (G,), and the answer."""
        ask = partial(group_question, trajectories, order)
        verdict, text = await self._answer(ask, self._options(trajectories[0]), cost)
        places = [order.index(index) for index in range(len(trajectories))]
        values = {name: [own[place] for place in places] for name, own in verdict.values.items()}
        return replace(verdict, values=values), text

    async def changes(self, env: Any, trajectories: Sequence[Trajectory]) -> Sequence[Change]:
        """Judge a finished rollout, or rank the rollouts of a task."""
        if self.takes_groups:
            found = [[one] for one in await self.ajudge_group(trajectories)]
        else:
            [trajectory] = trajectories
            turns: list[int | None] = [None] if trajectory.turns else []
            if self.scope == "turn":
                free_shots = env.env_config["free_shots"]
                turns = [k for k, turn in enumerate(trajectory.turns) if turn.episode >= free_shots]
            found = [await gathered(self.ajudge(trajectory, turn) for turn in turns)]
        return [partial(with_judgments, judgments=judgments) for judgments in found]

    def check(self, env: Any, agent: Any) -> None:
        """Check that the names of criteria differ, and that the agent that plays does not judge."""
        seen: dict[str, str] = {}
        for judge in [hook for hook in hooks_of(env) if isinstance(hook, Judge)]:
            for criterion in judge.rubric:
                if criterion.name in seen:
                    raise ConfigError(
                        f"the criteria of {type(env).__name__}.judges must have different names, but judges "
                        f"{seen[criterion.name]!r} and {judge.name!r} both have {criterion.name!r}"
                    )
                seen[criterion.name] = judge.name
        player, own = getattr(agent, "inner", agent), getattr(self.agent, "inner", self.agent)
        model = getattr(player, "model", None)
        is_same = own is player and not callable(getattr(player, "aact", None))
        if is_same or (model is not None and not isinstance(model, str) and getattr(own, "model", None) is model):
            whose = "the agent" if is_same else "the model of the agent"
            raise ConfigError(
                f"judge {self.name!r} has {whose} that plays, a {type(player).__name__}, which cannot answer in two "
                "threads at once: give the judge an agent with a model of its own"
            )

    def close(self) -> None:
        """Let the agent free what it holds."""
        finish_agent(self.agent)

    def _orders(self, trajectories: Sequence[Trajectory]) -> list[list[int]]:
        """Draw the orders in which rollouts of a task are shown; every second one reverses the one before."""
        texts = [[message["content"] for message in one.messages] for one in trajectories]
        digest = hashlib.blake2b(repr(texts).encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()
        rng = random.Random(derive_seed("judge order", self.seed, digest))
        orders: list[list[int]] = []
        for number in range(self.num_orders):
            order = orders[-1][::-1] if number % 2 else rng.sample(range(len(trajectories)), len(trajectories))
            orders.append(order)
        return orders

    @property
    def _names(self) -> list[str]:
        return [one.name for one in self.rubric]

    def _options(self, trajectory: Trajectory) -> dict[str, Any]:
        value = None if self.reference is None else trajectory.task_data.get(self.reference)
        if self.reference is not None and value is None and not self._is_warned:
            self._is_warned = True
            text = "a task has no task_data[%r], so judge %r grades it without a reference answer"
            logger.warning(text, self.reference, self.name)
        return {"reference": value, "max_characters": self.max_characters}

    async def _ajudge_text(self, text: str) -> Judgment:
        return await self._judgment(partial(text_question, text), {"max_characters": self.max_characters}, Cost())

    async def _judgment(self, ask: Callable[..., Question], options: dict[str, Any], cost: Cost) -> Judgment:
        try:
            verdict, text = await self._answer(ask, options, cost)
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
            repeats=cost.repeats / (self.num_orders if self.takes_groups else 1),
        )

    def _failed(self, error: JudgeError, cost: Cost, *, share: int = 1) -> Judgment:
        if self.on_judge_failure is None:
            raise error
        values = dict.fromkeys(self._names, float(self.on_judge_failure))
        cause: Any = error.__cause__
        answers = [cause.answer[:_MAX_ANSWER]] if isinstance(cause, UnreadableError) else []
        return replace(self._scored(values, cost, share=share), error=sentence_of(error), answers=answers)

    async def _answer(self, ask: Callable[..., Question], options: dict[str, Any], cost: Cost) -> tuple[Verdict, str]:
        """Return the verdict and the text of an answer, which the agent may correct once."""
        async with self._caller.slots:
            question = ask(self.rubric, **options)
            key = request_key(self.agent_name, [*question.messages], self.seed)
            seed, parse = derive_seed("judge", self.seed, key), partial(_verdict_of, question=question)
            try:
                return await self._caller.read(
                    question.messages, parse, correction, key=key, seed=seed, cost=cost, schema=question.schema
                )
            except AgentError as error:
                raise self._error(f"failed: {sentence_of(error)}") from error
            except UnreadableError as error:
                what = f"gave two answers that cannot be read: of the second, {error}: {shown(error.answer, 300)}"
                raise self._error(what) from error

    def _error(self, what: str) -> JudgeError:
        return JudgeError(f"judge {self.name!r} ({self.agent_name or type(self.agent).__name__}) {what}")


def _verdict_of(action: Action, question: Question) -> Verdict:
    if action.finish_reason == "length":
        raise UnreadableError("it was cut off at the token limit")
    return read_verdict(action.text, question.criteria, len(question.order) or None)


class LeftBehind(RolloutHook):
    """Stands for a judge in a pickled environment."""

    def check(self, env: Any, agent: Any) -> None:
        """Raise :class:`ConfigError`."""
        raise ConfigError(
            f"the judges of {type(env).__name__} are not pickled with it: set env.judges again in this process"
        )
