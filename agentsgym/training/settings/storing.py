"""The setting that says where a training run's rollouts are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agentsgym.fields import or_none
from agentsgym.training.settings.fields import number


def _is_folder(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and bool(value))


if TYPE_CHECKING:
    Folder = bool | str
else:
    Folder = str  # a command line has but one type a setting; "true" is read as True


@dataclass
class StoreSettings:
    """Where rollouts are kept.

    Attributes:
        store_rollouts: Keep every rollout with its advantages in a rollout store: that folder, or for True ``rollouts``
            in ``output_dir``; None for no store.
    """

    store_rollouts: Folder | None = number(  # noqa: RUF009  # it makes a field
        None, "Keep all rollouts there.", expected="a folder, True or None", valid=or_none(_is_folder)
    )

    @property
    def rollout_folder(self) -> Path | None:
        """The folder of the rollout store; None for none."""
        given = str(self.store_rollouts or "")
        if given.lower() in {"", "false", "none"}:
            return None
        return Path(cast("Any", self).output_dir) / "rollouts" if given.lower() == "true" else Path(given)
