"""One step of training passes through few of the library's functions: each is a place that a reader must visit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from games import trainer_of
from transformers import TrainerCallback

import agentsgym

PACKAGE = str(Path(agentsgym.__file__).parent)
MOST_FUNCTIONS = 445  # lower it with the code, and raise it only for what every step needs, as the trees of its rows
IN_PLACE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>")  # read where they stand


@contextmanager
def functions_entered(entered: set[CodeType]) -> Iterator[None]:
    """Add to ``entered`` every function of the package that this thread enters."""

    def enter(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in IN_PLACE:
            entered.add(code)

    sys.setprofile(enter)
    try:
        yield
    finally:
        sys.setprofile(None)


class ThirdStep(TrainerCallback):
    """Watches the third optimizer step, by which all that a process or a run makes once is made."""

    def __init__(self) -> None:
        self.entered: set[CodeType] = set()
        self._watching = functions_entered(self.entered)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self._watching.__enter__()
        elif state.global_step == 3:
            self._watching.__exit__(None, None, None)


def test_one_step_enters_a_bounded_number_of_functions(tmp_path: Path) -> None:
    step = ThirdStep()
    trainer_of(tmp_path, num_layers=2, callbacks=[step], max_steps=3).train()
    names = sorted(f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}" for code in step.entered)
    assert 100 < len(names) <= MOST_FUNCTIONS, f"{len(names)} functions:\n" + "\n".join(names)
