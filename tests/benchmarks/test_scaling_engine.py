"""The simulated engines: where a closed form is known they take that time."""

from __future__ import annotations

from statistics import fmean

import pytest

from benchmarks.scaling_engine import TASKS, Engine, Episode, Lognormal, Play, Task, Turn, continuous, lockstep

ENGINE = Engine(step_s=0.01, context_s=1e-6, prefill_s=1e-4)
INSTANT = Engine(step_s=0.0, context_s=0.0, prefill_s=0.0)
WAYS = ("lockstep, one server", "lockstep, by rank", "continuous, by rank", "continuous, shared")


def always(value: float) -> Lognormal:
    return Lognormal(median=value, sigma=0.0, most=1e9)


def batch_of(task: Task, num_episodes: int, seed: int = 0) -> list[Episode]:
    return [task.episode("scaling", seed, index) for index in range(num_episodes)]


def ends_of(way: str, task: Task, batch: list[Episode], num_engines: int, engine: Engine) -> list[float]:
    """Play a batch, and return when each episode ended, in order."""
    share = len(batch) // num_engines
    if way.startswith("lockstep"):
        shares = [batch[share * place : share * (place + 1)] for place in range(num_engines)]
        return lockstep(task, shares, engine, by_rank=way.endswith("by rank"))
    places = [index // share if way.endswith("by rank") else None for index in range(len(batch))]
    return continuous(batch, places, Play(task, num_engines, engine))


EQUAL = Task(turns=always(3), tokens=always(50), env_s=always(0.25), prompt=100, observation=20, pace=0.0)


def seconds_of_equal(num_together: int, engine: Engine = ENGINE) -> float:
    """Three turns of 50 tokens, of so many episodes on one engine."""
    contexts = (100, 100 + 50 + 20, 100 + 2 * (50 + 20))
    new = (100, 20, 20)
    prefill = sum(new) * num_together * engine.prefill_s
    decoding = sum(50 * (engine.step_s + engine.context_s * num_together * (context + 25)) for context in contexts)
    return prefill + decoding + 3 * 0.25


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("num_episodes", "num_engines"), [(1, 1), (6, 1), (6, 2), (12, 4)])
def test_where_all_episodes_are_alike_all_ways_take_the_time_of_the_closed_form(
    way: str, num_episodes: int, num_engines: int
) -> None:
    batch = batch_of(EQUAL, num_episodes)
    ends = ends_of(way, EQUAL, batch, num_engines, ENGINE)
    assert ends == pytest.approx([seconds_of_equal(num_episodes // num_engines)] * num_episodes)


@pytest.mark.parametrize("name", TASKS)
def test_one_episode_takes_the_sum_of_its_turns_however_it_is_played(name: str) -> None:
    task = TASKS[name]
    episode = task.episode("one")
    seconds, context = 0.0, 0.0
    for number, turn in enumerate(episode):
        new = task.new_tokens(number)
        context += new
        step_s = ENGINE.step_s + ENGINE.context_s * (context + turn.tokens / 2)
        seconds += new * ENGINE.prefill_s + turn.tokens * step_s + turn.env_s
        context += turn.tokens
    assert context == task.num_tokens(episode)
    for way in WAYS:
        assert ends_of(way, task, [episode], 1, ENGINE) == pytest.approx([seconds])


def test_engines_that_take_no_time_leave_the_environments() -> None:
    task = TASKS["tools"]
    batch = batch_of(task, 24, seed=1)
    alone = sorted(sum(turn.env_s for turn in episode) for episode in batch)
    assert ends_of("continuous, by rank", task, batch, 3, INSTANT) == pytest.approx(alone)
    rounds = range(max(map(len, batch)))

    def in_rounds(share: list[tuple[Turn, ...]]) -> float:
        return sum(max((one[k].env_s for one in share if len(one) > k), default=0.0) for k in rounds)

    everyone = in_rounds(list(batch))
    by_rank = max(in_rounds(list(batch[start : start + 8])) for start in (0, 8, 16))
    assert ends_of("lockstep, one server", task, batch, 3, INSTANT)[-1] == pytest.approx(everyone)
    assert ends_of("lockstep, by rank", task, batch, 3, INSTANT)[-1] == pytest.approx(by_rank)
    assert alone[-1] < by_rank < everyone


def test_sequences_of_several_lengths_share_an_engine_as_worked_out_by_hand() -> None:
    task = Task(turns=always(1), tokens=always(1), env_s=always(0), prompt=10, observation=0)
    engine = Engine(step_s=1.0, context_s=0.0, prefill_s=0.5)
    short, long = (Turn(2, 3.0),), (Turn(5, 0.0),)
    # 10 s of prefill for the two, then steps of 1 s: the short one is through at 12 and its environment at 15.
    assert continuous([short, long], [0, 0], Play(task, 1, engine)) == pytest.approx([15.0, 15.0])
    # A context of 10 and half of what is sampled, at 0.1 s each: 1 + 1.1 + 1.25 s a step together, 2.25 alone.
    engine = Engine(step_s=1.0, context_s=0.1, prefill_s=0.0)
    assert continuous([short, long], [0, 0], Play(task, 1, engine)) == pytest.approx(
        [2 * 3.35 + 3, 2 * 3.35 + 3 * 2.25]
    )


def test_medians_are_those_that_are_stated() -> None:
    task = TASKS["tools"]
    episodes = [task.episode("median", index) for index in range(2000)]
    turns = sorted(map(len, episodes))[1000]
    waits = sorted(turn.env_s for one in episodes for turn in one)
    assert turns == 8
    assert waits[len(waits) // 2] == pytest.approx(0.5, rel=0.05)
    assert fmean(waits) == pytest.approx(0.5 * 2.718281828 ** (0.8**2 / 2), rel=0.1)
