"""The stages of a training step: who is given what, what ranks exchange, and that nothing else holds a trainer."""

from __future__ import annotations

import ast
import logging
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from games import TextAgent, logged, settings, tasks, trainer_of
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.agents.base import Agent
from agentsgym.agents.policy.agent import PolicyAgent
from agentsgym.agents.trained import BatchStart, TrainedPolicy, as_trained_policy
from agentsgym.batch.layouts import Layout, trajectory_rows, turn_rows
from agentsgym.credit.registry import estimator_traits
from agentsgym.credit.scored import ScoredRollout
from agentsgym.errors import ConfigError
from agentsgym.training.metrics.diagnostics import Diagnostics
from agentsgym.training.metrics.rollouts import RolloutSummary
from agentsgym.training.tensors.token_batch import TokenBatch
from agentsgym.training.trainer import GRPOEnvTrainer
from agentsgym.types import Action, StopReason, Trajectory, Turn, TurnRequest

TRAINING = Path(__file__).parents[2] / "agentsgym" / "training"


# The policy in training is an interface


class Prepared(Agent, TrainedPolicy):
    """Samples the policy in a way of its own, and notes what it is given and which sessions it plays."""

    logprobs_match_trained_weights = True

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.played: list[set[str]] = []

    def sampling(self, trainer: GRPOEnvTrainer) -> Prepared:
        self._inner = PolicyAgent(trainer.model, trainer.processing_class, max_turn_tokens=4)
        return self

    def prepare(self, start: BatchStart) -> None:
        self.events.append(start)
        self.played.append(set())
        self._inner.prepare(start)

    def weights_changed(self) -> None:
        self.events.append("weights changed")

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        self.played[-1] |= {request.session_id for request in requests}
        return self._inner.act(requests)

    def finish(self) -> None:
        self._inner.finish()


def test_a_policy_of_ones_own_is_prepared_once_a_generation_batch(tmp_path: Path) -> None:
    schedule = {"max_steps": 4, "num_iterations": 2, "seed": 7}
    trainer = trainer_of(tmp_path, eval_dataset=tasks(3), eval_strategy="steps", eval_steps=4, **schedule)
    agent = trainer.agent = Prepared().sampling(trainer)
    trainer.train()
    starts = [event for event in agent.events if isinstance(event, BatchStart)]
    reported = [event if isinstance(event, str) else (*event.seed_parts, event.step) for event in agent.events]
    assert reported == [
        "weights changed",  # by whoever had the trainer before
        (7, "train", 1, 0),
        (7, "train", 2, 2),
        "weights changed",
        (7, "eval", 0, 4),
        (7, "eval", 8, 4),
    ]
    assert [len(start.session_ids) for start in starts] == [8, 8, 8, 4]
    assert [set(start.session_ids) for start in starts] == agent.played
    assert {start.first_session for start in starts} == {0}


def test_a_policy_of_ones_own_that_samples_alike_trains_alike(tmp_path: Path) -> None:
    plain = trainer_of(tmp_path, num_iterations=2)
    plain.train()
    own = trainer_of(tmp_path, num_iterations=2)
    own.agent = Prepared().sampling(own)
    own.train()
    assert logged(own, "loss") == logged(plain, "loss")


def test_groups_that_are_played_again_are_prepared_with_seeds_of_their_own(tmp_path: Path) -> None:
    changes = {"zero_variance_groups": "resample", "max_steps": 1}
    trainer = trainer_of(tmp_path, dataset=tasks(4, secret=99), **changes)
    agent = trainer.agent = Prepared().sampling(trainer)
    trainer.train()
    starts = [event for event in agent.events if isinstance(event, BatchStart)]
    seed = trainer.args.seed
    batch = (seed, "train", 1)
    assert [start.seed_parts for start in starts] == [batch, *((*batch, "again", attempt) for attempt in (1, 2, 3))]


@pytest.mark.parametrize("is_of_trained_weights", [True, False])
def test_log_probabilities_serve_as_the_old_ones_where_they_are_of_the_trained_weights(
    is_of_trained_weights: bool, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, num_iterations=2)
    agent = trainer.agent = Prepared().sampling(trainer)
    agent.logprobs_match_trained_weights = is_of_trained_weights
    scored: list[Any] = []
    score = trainer._get_per_token_logps_and_entropies

    def counted(*args: Any, **kwargs: Any) -> Any:
        scored.append(args)
        return score(*args, **kwargs)

    trainer._get_per_token_logps_and_entropies = counted  # type: ignore[method-assign]
    batch = trainer._generate_and_score_completions(list(tasks(8)))
    assert batch["old_per_token_logps"] is not None
    assert len(scored) == (0 if is_of_trained_weights else 1)


class Unfinished(TextAgent):
    """Knows when weights have moved, and no more."""

    def weights_changed(self) -> None:
        """Do nothing."""


def test_an_agent_that_is_half_a_policy_is_refused(tmp_path: Path) -> None:
    wanted = (
        "a policy in training must define all of logprobs_match_trained_weights, samples_during_updates, prepare, "
        "weights_changed, forget, but Unfinished lacks logprobs_match_trained_weights, samples_during_updates, "
        "prepare, forget: inherit from agentsgym.agents.trained.TrainedPolicy, which has defaults for "
        "samples_during_updates and forget"
    )
    with pytest.raises(ConfigError) as at_construction:
        trainer_of(tmp_path, agent=Unfinished())
    trainer = trainer_of(tmp_path)
    with pytest.raises(ConfigError) as later:
        trainer.agent = Unfinished()
    assert str(at_construction.value) == str(later.value) == wanted


def test_an_agent_with_a_forget_method_alone_is_not_taken_for_a_policy() -> None:
    agent: Any = SimpleNamespace(forget=lambda: None)
    policy = as_trained_policy(agent)
    assert (policy.logprobs_match_trained_weights, policy.samples_during_updates) == (True, False)
    policy.forget(["a session"])  # not the agent's, which takes no argument


def test_a_policy_that_inherits_has_defaults_for_what_only_asynchronous_training_needs() -> None:
    policy = as_trained_policy(Prepared())
    assert policy.samples_during_updates is False
    policy.forget(["a session"])


class Adapted:
    """No subclass of an agent: one that waits for answers, and is a policy in training all the same."""

    logprobs_match_trained_weights = False
    samples_during_updates = False

    def __init__(self) -> None:
        self.num_prepared = 0

    def prepare(self, start: BatchStart) -> None:
        self.num_prepared += 1

    def weights_changed(self) -> None:
        """Do nothing."""

    def forget(self, session_ids: Sequence[str]) -> None:
        """Do nothing."""

    async def aact(self, request: TurnRequest) -> Action:
        return Action(text="one")


def test_a_policy_that_is_adapted_to_an_agent_is_prepared_too(tmp_path: Path) -> None:
    agent: Any = Adapted()
    trainer_of(tmp_path, agent=agent).train()
    assert agent.num_prepared == 2


# What ranks exchange


def long_rollout(num_tokens: int, num_turns: int) -> Trajectory:
    """Turns of equal length, each with a state key, behind as many tokens of the environment."""
    width = num_tokens // (2 * num_turns)
    return Trajectory(
        token_ids=list(range(num_tokens)),
        turns=[
            Turn(start=(2 * k + 1) * width, stop=(2 * k + 2) * width, reward=0.1 * k, state_key=f"state {k}")
            for k in range(num_turns)
        ],
        messages=[{"role": "user", "content": "word " * num_tokens}],
        final_reward=1.5,
        stop_reason=StopReason.DONE,
        logprobs=[-0.5] * num_tokens,
        info={"success": True, "random_reward": 0.1, "optimal_reward": 2.0},
    )


def summary_of(trajectory: Trajectory, layout: Layout = trajectory_rows) -> RolloutSummary:
    scored = ScoredRollout.from_trajectory(trajectory, group=3, environment=("tests.Long", 7))
    return RolloutSummary.of(trajectory, layout(0, trajectory), scored)


@pytest.mark.parametrize("layout", [trajectory_rows, turn_rows])
def test_the_summary_of_a_long_rollout_is_small_and_survives_being_sent(layout: Layout) -> None:
    trajectory = long_rollout(8500, 20)
    summary = summary_of(trajectory, layout)
    sent = pickle.dumps([summary])
    assert len(sent) < 3_000
    assert len(pickle.dumps([trajectory])) > 8_500
    [received] = pickle.loads(sent)
    assert received == summary
    assert (received.num_tokens, received.num_turns, received.num_agent_tokens) == (8500, 20, 20 * 212)
    assert (received.final_reward, received.success, received.references) == (1.5, True, (0.1, 2.0))


Segment = list[tuple[int, int]]
"""For each turn how many tokens of the environment stand before it, and how many it has."""


def laid_out(segments: list[Segment], num_behind: int) -> Trajectory:
    turns: list[Turn] = []
    length = 0
    for segment in segments:
        prompt_start = length
        for num_before, num_own in segment:
            start = length + num_before
            length = start + num_own
            turns.append(Turn(start=start, stop=length, reward=0.0, prompt_start=prompt_start))
    length += num_behind
    return Trajectory(
        token_ids=list(range(length)), turns=turns, messages=[], final_reward=0.0, stop_reason=StopReason.DONE
    )


def one_row_a_turn(rollout: int, trajectory: Trajectory) -> Any:
    return turn_rows(rollout, trajectory, merge=False)


TURNS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=4)


@given(rollouts=st.lists(st.tuples(st.lists(TURNS, max_size=3), st.integers(0, 3)), min_size=1, max_size=4))
def test_a_summary_counts_what_the_tensors_hold(rollouts: list[tuple[list[Segment], int]]) -> None:
    trajectories = [laid_out(segments, num_behind) for segments, num_behind in rollouts]
    whole = all(len(trajectory.segments) == 1 for trajectory in trajectories)
    for layout in (turn_rows, one_row_a_turn, *([trajectory_rows] if whole else [])):
        summaries = [summary_of(trajectory, layout) for trajectory in trajectories]
        rows = [row for i, trajectory in enumerate(trajectories) for row in layout(i, trajectory)]
        batch = TokenBatch.stack(trajectories, rows, pad_token_id=0)
        for i, summary in enumerate(summaries):
            own = [row for row, laid in enumerate(rows) if laid.rollout == i]
            mask = batch.agent_token_mask([j == i for j in range(len(trajectories))])
            assert summary.num_trained_tokens == mask.sum()
            assert summary.num_rows == len(own)
            assert summary.num_row_tokens == batch.attention_mask[own].sum()


# Nothing but the TRL interface holds a trainer


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[ast.arg]:
    given = function.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, [given.vararg, given.kwarg])]


def takes_a_trainer(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return False
    return any(  # a TrainerCallback is no trainer
        one.arg == "trainer" or re.search(r"Trainer\b", ast.unparse(one.annotation or ast.Constant(None)))
        for one in parameters(node)
    )


def requests_who_an_agent_is(node: ast.AST) -> bool:
    is_requested = isinstance(node, ast.Call) and ast.unparse(node.func) in {"isinstance", "issubclass", "type"}
    words = " ".join(map(ast.unparse, node.args)).lower() if is_requested else ""  # type: ignore[attr-defined]
    return re.search("agent(?!sgym)|policy", words) is not None


def found(wanted: Any) -> list[str]:
    """Where a kind of node stands in ``agentsgym/training``, the class around it named."""
    places: list[str] = []
    for file in sorted(TRAINING.rglob("*.py")):
        tree = ast.parse(file.read_text())
        names = {
            id(inner): outer.name for outer in ast.walk(tree) if isinstance(outer, ast.ClassDef) for inner in outer.body
        }
        places += [f"{file.name}:{names.get(id(node), '')}" for node in ast.walk(tree) if wanted(node)]
    return places


def test_only_the_trl_interface_takes_a_trainer() -> None:
    assert found(takes_a_trainer) == ["_trl.py:TRLInterface"]


def test_nobody_checks_an_agents_class() -> None:
    assert found(requests_who_an_agent_is) == []


@pytest.mark.parametrize(
    "source", ["isinstance(self.agent, PolicyAgent)", "type(trainer.agent)", "isinstance(x, Agent)"]
)
def test_a_check_of_an_agents_class_is_found(source: str) -> None:
    assert any(map(requests_who_an_agent_is, ast.walk(ast.parse(source))))


# An estimator of one's own that names what it is


@estimator_traits(uses=["discount", "turn_rewards", "values"])
def critical(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[float]]:
    """Reads the values of a head."""
    return [list(rollout.turn_rewards) for rollout in rollouts]


@estimator_traits(uses=["state_keys", "final_reward"], compares_in_task_groups=True)
def comparing(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[float]]:
    """Compares the turns of a task that are in one state."""
    return [[rollout.final_reward] * len(rollout.turn_rewards) for rollout in rollouts]


@estimator_traits(uses=["per_token_rewards"])
def plain(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[float]]:
    """Takes the rewards of tokens as they are."""
    return [list(rollout.turn_rewards) for rollout in rollouts]


def silent(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[float]]:
    """Does not declare what it reads."""
    return [list(rollout.turn_rewards) for rollout in rollouts]


@pytest.mark.parametrize(
    ("estimator", "changes", "sentence"),
    [
        (critical, {}, "requires values: set value_head"),
        (comparing, {"value_head": "shared"}, "use values"),
        (plain, {"truncated_rollouts": 1.0}, "per-token rewards unchanged"),
        (plain, {"scale_rewards": "batch"}, "unchanged and unscaled"),
    ],
)
def test_settings_that_do_not_suit_its_traits_are_refused(
    estimator: Any, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        settings(tmp_path, advantage_estimator=estimator, **changes)
    settings(tmp_path, advantage_estimator=silent, **changes)


def test_the_final_reward_for_every_turn_is_refused_by_its_traits(tmp_path: Path) -> None:
    changes = {"env_config": {"turn_credit": "repeat_final"}, "value_head": "shared"}
    with pytest.raises(ConfigError, match="advantage_estimator='critical' would count several times"):
        trainer_of(tmp_path, advantage_estimator=critical, **changes)
    trainer_of(tmp_path, advantage_estimator=silent, **changes)


def scored(final_reward: float, *, group: int) -> ScoredRollout:
    return ScoredRollout(
        turn_rewards=[0.0, 1.0], final_reward=final_reward, group=group, state_keys=[None] * 2, token_counts=[2, 2]
    )


@pytest.mark.parametrize(
    ("estimator", "words"),
    [
        (comparing, ["no state keys, so 'comparing'", "'comparing' has no baseline", "discount=0.5 has no effect"]),
        (critical, ["'critical' sums turn rewards"]),
        (plain, ["discount=0.5 has no effect: 'plain'"]),
        (silent, []),
    ],
)
def test_it_is_warned_of_by_its_traits(
    estimator: Any, words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = {"value_head": "shared"} if estimator is critical else {}
    args = settings(tmp_path, advantage_estimator=estimator, discount=0.5, **head)
    caplog.clear()  # of what the settings themselves warn of
    with caplog.at_level(logging.WARNING, logger="agentsgym"):
        Diagnostics(args, args.estimator()).check([scored(3.0, group=group) for group in (0, 0, 1)])
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(words)
    assert all(part in message for part, message in zip(words, messages, strict=True))
