"""The example with vLLM generating, on a CPU: its own ``main``, with the engine of :mod:`cpu_support`."""

from __future__ import annotations

import runpy
from pathlib import Path

from cpu_support import CPUGeneration
from trl.trainer import grpo_trainer

EXAMPLE = Path(__file__).parents[2] / "examples" / "twenty_questions.py"

if __name__ == "__main__":
    grpo_trainer.VLLMGeneration = CPUGeneration
    runpy.run_path(str(EXAMPLE), run_name="__main__")
