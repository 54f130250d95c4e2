"""How vLLM is set up on a CPU, beside the environment variables in ``conftest.py``."""

from typing import Any

ENGINE_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 1024,
    "logprobs_mode": "processed_logprobs",
}


def as_arguments(options: dict[str, Any]) -> list[str]:
    """The options as the server's command line writes them."""
    arguments: list[str] = []
    for name, value in options.items():
        arguments.append(f"--{name.replace('_', '-')}")
        if value is not True:
            arguments.append(str(value))
    return arguments
