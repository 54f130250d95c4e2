"""The settings that say where a training run's environments run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from agentsgym.errors import ConfigError
from agentsgym.fields import is_int, is_positive_number, or_none
from agentsgym.rollouts.process_pool import EnvProcessPool
from agentsgym.rollouts.thread_pool import EnvThreadPool
from agentsgym.training.settings.fields import choice, number

ENV_POOLS: Final = ("threads", "processes")


@dataclass
class PoolSettings:
    """Where the environments run.

    Attributes:
        env_pool: None for the training process itself, ``"threads"`` for environments that wait, ``"processes"`` for
            those that compute, hang or crash. The workers end with the training or a stand-alone evaluation.
        num_env_workers: Number of threads or processes, on each rank.
        env_worker_sessions: The most sessions that live in a process at once, so that ``num_env_workers`` times as many
            are answered together; None for any number.
        env_worker_memory_mb: Megabytes above which a process is replaced; a rollout that passes them alone fails. None
            for no limit.
        env_worker_recycle_episodes: Rollouts after which a process is replaced; None for never.
        env_worker_recycle_mb: Megabytes above which a process is replaced once it has no session; None for never.
    """

    env_pool: str | None = choice(None, "Where environments run: 'threads' or 'processes'.", (None, *ENV_POOLS))
    num_env_workers: int = number(8, "Threads or processes of env_pool.", expected="a positive int", valid=is_int(1))
    env_worker_sessions: int | None = number(
        32, "Sessions in one process at once.", expected="a positive int or None", valid=or_none(is_int(1))
    )
    env_worker_memory_mb: float | None = number(
        None,
        "Memory of one process.",
        expected="a positive number of megabytes or None",
        valid=or_none(is_positive_number),
    )
    env_worker_recycle_episodes: int | None = number(
        None, "Replace a process after so many.", expected="a positive int or None", valid=or_none(is_int(1))
    )
    env_worker_recycle_mb: float | None = number(
        None,
        "Replace a process that has grown above.",
        expected="a positive number of megabytes or None",
        valid=or_none(is_positive_number),
    )

    def make_env_pool(self) -> EnvThreadPool | EnvProcessPool | None:
        """The pool in which the environments run; None for the training process itself.

        Raises:
            ConfigError: A limit of processes is set, and there are none.
        """
        if self.env_pool == "processes":
            return EnvProcessPool(
                self.num_env_workers,
                max_sessions_per_worker=self.env_worker_sessions,
                max_memory_mb=self.env_worker_memory_mb,
                recycle_after_episodes=self.env_worker_recycle_episodes,
                recycle_above_mb=self.env_worker_recycle_mb,
            )
        for name in ("env_worker_memory_mb", "env_worker_recycle_episodes", "env_worker_recycle_mb"):
            if (value := getattr(self, name)) is not None:
                raise ConfigError(f"GRPOEnvConfig({name}={value!r}) is for env_pool='processes', got {self.env_pool!r}")
        return None if self.env_pool is None else EnvThreadPool(self.num_env_workers)
