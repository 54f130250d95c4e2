"""The customers of ``examples/customer_service.py`` as a lesson for a small pretrained model."""

from __future__ import annotations

from typing import Any, cast

from datasets import Dataset

from examples.customer_service import RULES, CustomerService, draw_tasks

# The model's chat template has no place for tools: the prompt describes them and the format of a call.
SHOP_PROMPT = (
    f"{RULES} Your tools are find_order(number), cancel_order(number) and return_order(number). Call a tool like this: "
    '<tool_call>{"name": "find_order", "arguments": {"number": 12}}</tool_call>.'
)


class Shop(CustomerService):
    """Customer service with datasets of its tasks."""

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **options: Any) -> Dataset:  # noqa: ARG003
        """Return rows of tasks; the options are ``size`` (4096) and ``seed``."""
        return _rows("train", **{"size": 4096, **options})

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **options: Any) -> Dataset:  # noqa: ARG003
        """Return rows of other tasks; the options are ``size`` (256) and ``seed``."""
        return _rows("evaluation", **{"size": 256, **options})


def _rows(part: str, *, size: int, seed: int = 0) -> Dataset:
    return cast("Any", Dataset).from_dict({"task_data": draw_tasks(size, seed, part)})
