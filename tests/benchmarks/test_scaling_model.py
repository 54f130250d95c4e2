"""The model of scaling: where a closed form is known it gives that number, and equal seeds give equal numbers."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.scaling_engine import (
    TASKS,
    Cluster,
    Engine,
    Learner,
    Lognormal,
    Play,
    Task,
    Turn,
    batches_of,
    continuous,
    generation,
)
from benchmarks.scaling_model import (
    BEGIN,
    END,
    PAGE,
    NoBarrier,
    no_barrier,
    one_batch_ahead,
    page_with,
    simulate,
    table,
    together,
)
from benchmarks.scaling_plots import draw_all

ENGINE = Engine(step_s=0.01, context_s=1e-6, prefill_s=1e-4)
INSTANT = Engine(step_s=0.0, context_s=0.0, prefill_s=0.0)
WAYS = ("lockstep, one server", "lockstep, by rank", "continuous, by rank", "continuous, shared")


def always(value: float) -> Lognormal:
    return Lognormal(median=value, sigma=0.0, most=1e9)


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
    [batch] = batches_of(EQUAL, num_episodes, 1, seed=0)
    ends = generation(way, EQUAL, batch, num_engines, ENGINE)
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
        assert generation(way, task, [episode], 1, ENGINE) == pytest.approx([seconds])


def test_engines_that_take_no_time_leave_the_environments() -> None:
    task = TASKS["tools"]
    [batch] = batches_of(task, 24, 1, seed=1)
    alone = sorted(sum(turn.env_s for turn in episode) for episode in batch)
    assert generation("continuous, by rank", task, batch, 3, INSTANT) == pytest.approx(alone)
    rounds = range(max(map(len, batch)))

    def in_rounds(share: list[tuple[Turn, ...]]) -> float:
        return sum(max((one[k].env_s for one in share if len(one) > k), default=0.0) for k in rounds)

    everyone = in_rounds(list(batch))
    by_rank = max(in_rounds(list(batch[start : start + 8])) for start in (0, 8, 16))
    assert generation("lockstep, one server", task, batch, 3, INSTANT)[-1] == pytest.approx(everyone)
    assert generation("lockstep, by rank", task, batch, 3, INSTANT)[-1] == pytest.approx(by_rank)
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


def test_an_update_prefills_what_is_open_at_once_and_what_waits_with_its_next_turn() -> None:
    play = Play(EQUAL, 1, Engine(step_s=1.0, context_s=0.0, prefill_s=0.01))
    [episode] = batches_of(EQUAL, 1, 1, seed=0)[0]
    play.begin(0, episode)
    play.until(26.0)  # 1 s of prefill and 25 of 50 tokens
    play.clear_caches()
    assert play.next_time() == pytest.approx(51 + (100 + 25) * 0.01)
    assert play.advance() is None  # the environment has the turn
    play.until(play.now + 0.1)
    play.clear_caches()
    while play.advance() is None:
        pass
    assert play.now == pytest.approx(52.25 + 0.25 + (20 + 150) * 0.01 + 50.25 + 20 * 0.01 + 50.25)


def test_a_step_is_generation_then_learning_then_the_update() -> None:
    learner = Learner(token_s=0.001, update_s=2.0)
    cluster = Cluster(num_gpus=2, per_gpu=3, engine=ENGINE, learner=learner)
    batches = batches_of(EQUAL, 6, 2, seed=0)
    step = together("continuous, by rank", EQUAL, batches, cluster)
    learn_s = 6 * (100 + 2 * 20 + 3 * 50) * 0.001 / 2
    assert (step.generate_s, step.step_s) == pytest.approx((seconds_of_equal(3), seconds_of_equal(3) + learn_s + 2.0))
    ahead = one_batch_ahead(EQUAL, batches, cluster, 1)
    assert ahead.step_s == pytest.approx(max(seconds_of_equal(6), 2 * learn_s) + 2.0)


@pytest.mark.parametrize("token_s", [1e-4, 5e-3])
def test_without_a_barrier_staleness_bounds_give_the_synchronous_step_and_the_longer_of_two(token_s: float) -> None:
    cluster = Cluster(num_gpus=2, per_gpu=3, engine=ENGINE, learner=Learner(token_s=token_s, update_s=0.5))
    learn_s = 6 * (100 + 2 * 20 + 3 * 50) * token_s + 0.5
    play_s = seconds_of_equal(6)
    assert no_barrier(EQUAL, cluster, 1, 0, seed=0).step_s == pytest.approx(play_s + learn_s)
    # Where learning is shorter, each update comes after the first turn, whose history is prefilled again.
    again_s = 6 * (100 + 50) * ENGINE.prefill_s
    assert no_barrier(EQUAL, cluster, 1, 1, seed=0).step_s == pytest.approx(max(play_s + again_s, learn_s))


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_no_episode_is_older_than_the_bound_and_none_is_lost(max_staleness: int) -> None:
    cluster = Cluster(num_gpus=2, per_gpu=8)
    run = NoBarrier(TASKS["tools"], cluster, 1, max_staleness, seed=3)
    run.run(8)
    assert max(run.staleness) == max_staleness
    assert len(run.staleness) in {8 * 16, 9 * 16}  # learning from the next batch may have begun
    taken = {index for index in range(run.num_begun) if not run.is_outstanding(index)}
    assert len(taken) == len(run.staleness)


def test_waiting_less_is_never_slower() -> None:
    cluster = Cluster(num_gpus=2, per_gpu=8)
    for task in TASKS.values():
        batches = batches_of(task, cluster.num_episodes, 2, seed=0)
        times = [together(way, task, batches, cluster).step_s for way in WAYS[:3]]
        assert times == sorted(times, reverse=True)


def test_medians_are_those_that_are_stated() -> None:
    task = TASKS["tools"]
    episodes = [task.episode("median", index) for index in range(2000)]
    turns = sorted(map(len, episodes))[1000]
    waits = sorted(turn.env_s for one in episodes for turn in one)
    assert turns == 8
    assert waits[len(waits) // 2] == pytest.approx(0.5, rel=0.05)
    assert fmean(waits) == pytest.approx(0.5 * 2.718281828 ** (0.8**2 / 2), rel=0.1)


def test_equal_seeds_give_equal_pages_and_pictures(tmp_path: Path) -> None:
    cluster = Cluster(num_gpus=2, per_gpu=2)
    runs = [
        {(name, 2): simulate(task, cluster, num_batches=1, seed=seed) for name, task in TASKS.items()}
        for seed in (0, 0, 1)
    ]
    tables = ["\n\n".join(table(name, cluster, steps) for (name, _), steps in run.items()) for run in runs]
    assert tables[0] == tables[1] != tables[2]
    page = page_with(f"before\n{BEGIN}\nold\n{END}\nafter\n", tables[0])
    assert page == f"before\n{BEGIN}\n\n{tables[0]}\n\n{END}\nafter\n"
    draw_all(runs[0], tmp_path, per_gpu=2, seed=0)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"scaling_{name}.png" for name in ("steps", "staleness", "tail")
    }


def test_the_page_has_the_tables_of_the_model_and_its_pictures() -> None:
    page = PAGE.read_text()
    assert page.count(BEGIN) == page.count(END) == 1
    for name in TASKS:
        assert f"**{name.capitalize()}, 8 GPUs, 512 episodes per step**" in page
    assert page.count(" episodes per step**") == len(TASKS)
    for name in ("steps", "staleness", "tail"):
        assert f"](scaling_{name}.png)" in page
        assert (PAGE.parent / f"scaling_{name}.png").is_file()
