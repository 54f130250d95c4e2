"""The learning curve: what it counts, what it draws, and that its bar is closed."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from games import settings, trainer_of
from transformers import TrainerControl, TrainerState

from agentsgym.observers.learning_curve import LearningCurve, warn_without_plots
from agentsgym.training.config import GRPOEnvConfig

PNG = b"\x89PNG\r\n"


def at(step: int, max_steps: int = 100) -> TrainerState:
    return TrainerState(global_step=step, max_steps=max_steps)


def step_to(curve: LearningCurve, args: GRPOEnvConfig, step: int, **logs: float) -> None:
    curve.on_step_end(args, at(step), TrainerControl())
    curve.on_log(args, at(step), TrainerControl(), logs=logs)


@pytest.mark.parametrize(
    ("changes", "episodes"),
    [
        ({}, [0, 8, 16, 24, 32]),
        ({"gradient_accumulation_steps": 2}, [0, 16, 32, 48, 64]),  # one batch of 16 is spread over the two
        ({"steps_per_generation": 2}, [0, 16, 16, 32, 32]),
        ({"num_iterations": 3}, [0, 8, 8, 8, 16]),
        ({"steps_per_generation": 2, "num_iterations": 2}, [0, 16, 16, 16, 16]),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, [0, 32, 64, 96, 128]),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, [0, 24, 48, 48, 72]),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 4}, [0, 16, 16, 32, 32]),
    ],
)
def test_episodes_are_those_of_the_batches_played_so_far(
    changes: dict[str, int], episodes: list[int], tmp_path: Path
) -> None:
    args, curve = settings(tmp_path, **changes), LearningCurve(tmp_path / "curve.png")
    counted = []
    for step in range(5):
        curve.on_step_end(args, at(step), TrainerControl())
        counted.append(curve.episodes)
    assert counted == episodes


def test_a_run_that_is_resumed_counts_on(tmp_path: Path) -> None:
    curve = LearningCurve(tmp_path / "curve.png")
    curve.on_train_begin(settings(tmp_path), at(3), TrainerControl())
    assert curve.episodes == 24
    curve.close()


def test_points_are_the_win_rates_of_training(tmp_path: Path) -> None:
    args, curve = settings(tmp_path), LearningCurve(tmp_path / "curve.png")
    step_to(curve, args, 1, win_rate=0.25, loss=3.0)
    step_to(curve, args, 2, loss=2.0)  # rollouts that are used a second time
    step_to(curve, args, 3, eval_win_rate=0.9)
    step_to(curve, args, 4, win_rate=0.5)
    curve.on_log(args, at(4), TrainerControl())
    assert curve.points == [(8, 0.25), (32, 0.5)]


def test_the_picture_is_drawn_again_when_its_time_has_come(tmp_path: Path) -> None:
    args, path = settings(tmp_path), tmp_path / "pictures" / "curve.png"
    patient = LearningCurve(path, redraw_every_s=1e9)
    step_to(patient, args, 1, win_rate=0.25)
    assert not path.exists()
    eager = LearningCurve(path, redraw_every_s=-1.0)
    step_to(eager, args, 1, win_rate=0.25)
    first = path.read_bytes()
    assert first.startswith(PNG)
    step_to(eager, args, 2, win_rate=0.75)
    assert path.read_bytes() != first


class Shown:
    """Stands in for the bar."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.n, self.text, self.closed = arguments, arguments["initial"], "", False

    def update(self, count: int) -> None:
        self.n += count

    def set_postfix_str(self, text: str) -> None:
        self.text = text

    def close(self) -> None:
        self.closed = True


def test_the_bar_moves_and_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Shown] = []
    monkeypatch.setattr(
        "agentsgym.observers.learning_curve.tqdm", lambda **arguments: bars.append(Shown(**arguments)) or bars[-1]
    )
    args, curve = settings(tmp_path), LearningCurve(tmp_path / "curve.png")
    curve.on_train_begin(args, at(2, max_steps=9), TrainerControl())
    [bar] = bars
    assert (bar.arguments["total"], bar.arguments["initial"]) == (9, 2)
    assert bar.arguments["disable"] is args.disable_tqdm is True
    step_to(curve, args, 5, win_rate=0.25)
    assert (bar.n, bar.text, bar.closed) == (5, "win rate 25%", False)
    curve.on_train_end(args, at(9), TrainerControl())
    assert bar.closed
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)
    curve.close()  # a second time does no harm


class Terminal(io.StringIO):
    """Somebody looks at it."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_is_shown_a_bar_with_reward_and_win_rate_and_a_file_gets_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="agentsgym.observers.learning_curve")
    clock = iter([100.0])
    bars: list[Shown] = []
    monkeypatch.setattr(
        "agentsgym.observers.learning_curve.tqdm", lambda **arguments: bars.append(Shown(**arguments)) or bars[-1]
    )
    args, start = settings(tmp_path, disable_tqdm=False), at(2, max_steps=22)
    monkeypatch.setattr("sys.stderr", Terminal())
    curve = LearningCurve(redraw_every_s=1e9)
    curve.on_train_begin(args, start, TrainerControl())
    step_to(curve, args, 4, win_rate=0.25, reward=0.5)
    assert (bars[0].arguments["disable"], bars[0].text) == (False, "reward 0.5, win rate 25%")
    assert caplog.messages == []
    monkeypatch.setattr("sys.stderr", io.StringIO())
    curve = LearningCurve(redraw_every_s=1e9)
    monkeypatch.setattr("agentsgym.observers.learning_curve.time.monotonic", lambda: next(clock))
    curve.on_train_begin(args, start, TrainerControl())
    clock = iter([104.0])
    curve.on_log(args, at(4, max_steps=22), TrainerControl(), logs={"reward": 0.5})
    curve.on_log(args, at(4, max_steps=22), TrainerControl(), logs={"train_runtime": 9.0})
    assert bars[1].arguments["disable"]
    assert caplog.messages == ["step 4 of 22, 0:00:36 left: reward 0.5"]  # 4 s for two steps, and 18 to come


def test_a_whole_run_is_drawn(tmp_path: Path) -> None:
    curve = LearningCurve(tmp_path / "curve.png")
    trainer = trainer_of(tmp_path, callbacks=[curve], num_iterations=2, max_steps=4)
    trainer.train()
    rates = [log["win_rate"] for log in trainer.state.log_history if "win_rate" in log]
    assert curve.points == [(8, rates[0]), (16, rates[1])]
    assert curve.episodes == 16
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)


def test_without_a_path_nothing_is_written_and_a_terminal_shows_the_bar_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    args, curve = settings(tmp_path), LearningCurve(redraw_every_s=-1.0)
    step_to(curve, args, 1, win_rate=0.25)
    curve.on_train_end(args, at(1), TrainerControl())
    assert curve.points == [(8, 0.25)]
    assert [*tmp_path.rglob("*.png")] == []
    assert capsys.readouterr().out == ""


def test_without_matplotlib_only_the_plot_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    warn_without_plots.cache_clear()
    args, curves = settings(tmp_path), [LearningCurve(tmp_path / f"{name}.png", redraw_every_s=-1.0) for name in "ab"]
    step_to(curves[0], args, 1, win_rate=0.25)
    curves[0].on_train_end(args, at(1), TrainerControl())
    assert curves[0].points == [(8, 0.25)]
    assert [*tmp_path.iterdir()] == []
    [warning] = [one.getMessage() for one in caplog.records if "agentsgym[plots]" in one.getMessage()]
    assert "`agentsgym view`" in warning
