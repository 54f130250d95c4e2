"""Generate rollouts for TRL's ``GRPOTrainer(rollout_func=...)`` and its subclasses.

Settings that would handle multi-turn rollouts wrongly are rejected with the reason.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from agentsgym.agents.trained import DEFAULT_TURN_TOKENS
from agentsgym.credit.settings import CreditSettings
from agentsgym.errors import ConfigError
from agentsgym.fields import is_fraction, is_int, is_strings, one_of, or_none, require
from agentsgym.interop.player import GroupPlayer, PlayerSettings
from agentsgym.interop.prompts import row_of
from agentsgym.interop.rows import StockRow, group_rows, whole_row
from agentsgym.types import StopReason

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv
    from agentsgym.interop.player import Played
    from agentsgym.rollouts.scheduler import Pool

logger = logging.getLogger(__name__)

Credit = Literal["final", "turn"]


class RolloutFunc:
    """The rollout function of a stock trainer; made by :func:`rollout_func`.

    It may be reused with another trainer; a trainer's settings are checked at its first call. Its state consists of the
    estimator's state and the number of batches so far.

    Attributes:
        settings: The settings of rollouts.
        credit: What a row contains: a complete rollout (``"final"``) or a part of one (``"turn"``).
        rollouts_per_group: The number of rollouts that share the rows of a task group; None for one per row.
    """

    def __init__(self, settings: PlayerSettings, *, credit: Credit, rollouts_per_group: int | None) -> None:
        self.settings, self.credit, self.rollouts_per_group = settings, credit, rollouts_per_group
        self._trainer: Callable[[], Any] = lambda: None
        self._player: GroupPlayer | None = None
        self._warned = False

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any] | None]:
        """Collective: generate the rollouts of this process's prompts.

        Args:
            prompts: Prompts from :func:`~agentsgym.interop.prompts.prompt_dataset`, repeated once per rollout.
            trainer: The calling trainer.

        Returns:
            One entry per prompt for each of ``prompt_ids``, ``completion_ids``, ``logprobs``, ``env_mask`` and
            ``action_mask`` (identical to ``env_mask``), ``advantages`` (one per completion token), ``step_rewards``,
            ``final_reward``, ``stop_reason``, ``success``, ``row_reward`` and ``is_first_row``.

        Raises:
            ConfigError: The trainer's settings are unsuitable, or a prompt contains no task.
            TaskError: A task is invalid.
            TooManyFailuresError: More rollouts failed than ``max_failed_fraction`` allows.
        """
        if self._trainer() is not trainer or self._player is None:
            check_trainer(trainer, by_turn=self.credit == "turn", rollouts_per_group=self.rollouts_per_group)
            self._player = GroupPlayer(trainer, self.settings)
            self._trainer = weakref.ref(trainer)
        is_training = bool(trainer.model.training)
        num_rows = trainer.num_generations if is_training else trainer.num_generations_eval
        by_turn = self.credit == "turn" and is_training
        num_rollouts = cast("int", self.rollouts_per_group) if by_turn else num_rows
        played = self._player.play(
            [row_of(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)],
            num_rows=num_rows,
            num_rollouts=num_rollouts,
            step=trainer.state.global_step,
            is_training=is_training,
        )
        self._warn_of_budget(played, trainer)
        if by_turn:
            rows = _rows_by_turn(played, num_rows, num_rollouts)
        else:
            parts = zip(played.trajectories, played.advantages, played.included, strict=True)
            rows = [whole_row(one, advantages, included=included) for one, advantages, included in parts]
        entries = [row.columns(self._player.filler) for row in rows]
        columns: dict[str, list[Any] | None] = {name: [entry[name] for entry in entries] for name in entries[0]}
        if any(entry["logprobs"] is None for entry in entries):
            columns["logprobs"] = None
        return columns

    def _warn_of_budget(self, played: Played, trainer: Any) -> None:
        cut = sum(one.stop_reason is StopReason.MAX_TOKENS for one in played.trajectories)
        if not self._warned and 2 * cut > len(played.trajectories):
            self._warned = True
            logger.warning(
                "%d of %d rollouts reached their token budget: max_completion_length=%s limits the "
                "complete rollout, including observations, while TRL's default is meant for one response; consider "
                "raising it",
                cut,
                len(played.trajectories),
                trainer.args.max_completion_length,
            )


def _rows_by_turn(played: Played, num_rows: int, num_rollouts: int) -> list[StockRow]:
    rows: list[StockRow] = []
    num_joined = 0
    for start in range(0, len(played.trajectories), num_rollouts):
        own = slice(start, start + num_rollouts)
        made, joined = group_rows(played.trajectories[own], played.advantages[own], played.included[own], num_rows)
        rows += made
        num_joined += joined
    if num_joined:
        logger.info("%d turns share a row with a turn of similar advantage, since there are too few rows", num_joined)
    return rows


def rollout_func(  # noqa: PLR0913  # keywords, most of them usually omitted
    env: MultistepEnv | Callable[[Any], MultistepEnv] | None = None,
    *,
    credit: Credit = "final",
    rollouts_per_group: int | None = None,
    advantage_estimator: str = "return_to_go",
    estimator_kwargs: Mapping[str, Any] | None = None,
    discount: float = 1.0,
    scale_rewards: Literal["none", "group", "batch"] = "group",
    max_turn_tokens: int = DEFAULT_TURN_TOKENS,
    stop_strings: Sequence[str] = (),
    max_failed_fraction: float = 0.1,
    pool: Pool | None = None,
    turn_timeout_s: float | None = None,
    episode_timeout_s: float | None = None,
    agent: Any = None,
) -> RolloutFunc:
    """Make the ``rollout_func`` of a stock ``trl.GRPOTrainer`` for a multi-turn environment.

    The trainer also needs :func:`environment_reward` as its reward function and
    :func:`~agentsgym.interop.prompts.prompt_dataset` as its dataset::

        trainer = GRPOTrainer(
            model, reward_funcs=environment_reward, rollout_func=rollout_func(env), train_dataset=prompt_dataset(rows)
        )

    With the same seed, its rollouts equal those of ``GRPOEnvTrainer`` token for token. The policy keeps its key/value
    cache across turns, or generates with TRL's vLLM if the trainer uses it.

    Args:
        env: The environment of every row, built with the trainer's tokenizer; a class or another function that builds
            it from that tokenizer; or None to build the environment that each row names.
        credit: ``"final"``: a row is a rollout and its reward is the final reward, which TRL compares within the group;
            each turn's advantage is passed to reward functions but not trained on. ``"turn"``: the rows of a group are
            parts of fewer rollouts, so that every turn is trained with its own advantage; requires
            ``scale_rewards="none"`` in TRL's settings.
        rollouts_per_group: With ``credit="turn"``, the number of rollouts that share the ``num_generations`` rows of a
            task group.
        advantage_estimator: The estimator's name, as in ``GRPOEnvConfig``.
        estimator_kwargs: The estimator's options, as in ``GRPOEnvConfig``.
        discount: The discount factor, as in ``GRPOEnvConfig``.
        scale_rewards: The estimator's scaling, as in ``GRPOEnvConfig``; independent of TRL's setting.
        max_turn_tokens: The maximum number of tokens in one turn; TRL's ``max_completion_length`` limits the rollout.
        stop_strings: Strings that end a turn.
        max_failed_fraction: The fraction of failed rollouts in a batch above which the run stops.
        pool: The ``EnvThreadPool`` or ``EnvProcessPool`` in which the environments run, which the caller must close;
            None for the calling thread.
        turn_timeout_s: The wall-clock limit for one environment call, in seconds; None for no limit.
        episode_timeout_s: The wall-clock limit for a rollout, in seconds; None for no limit.
        agent: The agent that plays; None for the policy in training.

    Raises:
        ConfigError: A value is invalid.
    """
    require("max_turn_tokens", max_turn_tokens, is_int(1), "a positive int")
    require("stop_strings", stop_strings, is_strings, "a list of strings")
    require("max_failed_fraction", max_failed_fraction, is_fraction, "a number in [0, 1]")
    require("discount", discount, is_fraction, "a number in [0, 1]")
    require("rollouts_per_group", rollouts_per_group, or_none(is_int(1)), "a positive int or None")
    require("credit", credit, one_of("final", "turn"), "'final' or 'turn'")
    require("scale_rewards", scale_rewards, one_of("none", "group", "batch"), "'none', 'group' or 'batch'")
    if (rollouts_per_group is None) == (credit == "turn"):
        raise ConfigError(
            "rollouts_per_group (the number of rollouts that share the num_generations rows of a task group) must be "
            f"set with credit='turn' and must not be set otherwise; got credit={credit!r} and "
            f"rollouts_per_group={rollouts_per_group!r}"
        )
    credit_settings = CreditSettings(
        advantage_estimator=advantage_estimator,
        options=dict(estimator_kwargs or {}),
        discount=discount,
        scale_rewards=scale_rewards,
    )
    estimator = credit_settings.estimator()  # raises if its name or an option is invalid
    if estimator.traits is not None and estimator.traits.reads_values:
        raise ConfigError(
            f"advantage_estimator={advantage_estimator!r} requires a value head, which only "
            "GRPOEnvTrainer has: choose an estimator without one"
        )
    settings = PlayerSettings(
        env=env,
        credit_settings=credit_settings,
        agent=agent,
        max_turn_tokens=max_turn_tokens,
        stop_strings=tuple(stop_strings),
        max_failed_fraction=max_failed_fraction,
        drive_options={"pool": pool, "turn_timeout_s": turn_timeout_s, "episode_timeout_s": episode_timeout_s},
    )
    return RolloutFunc(settings, credit=credit, rollouts_per_group=rollouts_per_group)


def environment_reward(
    prompts: Sequence[Any],  # noqa: ARG001  # TRL passes it
    completions: Sequence[Any],  # noqa: ARG001  # TRL passes it; Axolotl counts the parameters
    row_reward: Sequence[float | None] | None = None,
    **columns: Any,
) -> list[float | None]:
    """Return the rewards of rows from :func:`rollout_func`; to be used as the reward function of a stock trainer.

    It also logs ``final_reward`` and, if the environment defines success, ``win_rate``, each a mean over the rollouts
    that did not fail.

    Args:
        prompts: The prompts, which TRL passes; unused.
        completions: The completions, which TRL passes; unused.
        row_reward: The rewards from the rollout function; None for a failed rollout, which TRL excludes.
        **columns: The other arguments that TRL passes: the remaining columns, and ``log_metric``.

    Raises:
        ConfigError: The rows do not come from :func:`rollout_func`.
    """
    if row_reward is None:
        raise ConfigError(
            "environment_reward needs the rows returned by agentsgym's rollout_func: pass "
            "GRPOTrainer(rollout_func=agentsgym.interop.rollout_func(...))"
        )
    log_metric = columns.get("log_metric")
    if log_metric is not None:
        stops = zip(columns["is_first_row"], columns["stop_reason"], strict=True)
        counted = [index for index, (is_first, stop) in enumerate(stops) if is_first and stop != StopReason.FAILED]
        for name, column in (("final_reward", "final_reward"), ("win_rate", "success")):
            values = [float(columns[column][index]) for index in counted if columns[column][index] is not None]
            if values:
                log_metric(name, fmean(values))
    return [None if reward is None or math.isnan(reward) else reward for reward in row_reward]


Rule = tuple[str, Callable[[Any], bool], str]
"""A TRL setting, the predicate for values that are rejected, and the reason."""

_IS_SET: Final[Callable[[Any], bool]] = lambda value: value is not None  # noqa: E731  # an entry of the table

_NO_EFFECT: Final = (
    "it would have no effect, since rollout_func samples itself and keeps its own key/value cache across turns"
)

_UNSUPPORTED: Final[tuple[Rule, ...]] = (
    (
        "mask_truncated_completions",
        bool,
        "TRL detects truncation by the last token, which is an end of turn even if a turn limit ended the episode, and "
        "is not one if only the last turn was truncated: remove it",
    ),
    ("use_transformers_paged", bool, _NO_EFFECT),
    ("use_transformers_continuous_batching", bool, _NO_EFFECT),
    ("cache_implementation", _IS_SET, "rollouts keep their own key/value cache across turns"),
    ("max_tool_calling_iterations", _IS_SET, "the environment counts turns: set env_config['max_steps_per_episode']"),
    ("temperature", lambda value: not value > 0, "the loss divides by it: it must be a positive number"),
)

_TURN_LOSSES: Final = ("dapo", "cispo", "dr_grpo")

_UNSUPPORTED_BY_TURN: Final[tuple[Rule, ...]] = (
    (
        "scale_rewards",
        lambda value: value not in {"none", False},
        "the rows' rewards are already advantages, scaled by rollout_func(scale_rewards=...): set scale_rewards='none'",
    ),
    (
        "loss_type",
        lambda value: value not in _TURN_LOSSES,
        "it would weight each row by its number of tokens or by its neighbors, but a row is a part of a rollout: use "
        f"one of {', '.join(_TURN_LOSSES)}",
    ),
    (
        "importance_sampling_level",
        lambda value: value != "token",
        "a row's ratio would cover only a part of a rollout: use 'token'",
    ),
    (
        "multi_objective_aggregation",
        lambda value: value != "sum_then_normalize",
        "it divides the rows' rewards, which are already advantages, by their spread: use 'sum_then_normalize'",
    ),
    (
        "reward_weights",
        lambda value: value is not None and list(value) != [1.0],
        "the rows' rewards are already advantages: remove it",
    ),
    ("off_policy_mask_threshold", _IS_SET, "it would mask parts of a rollout separately: remove it"),
    ("top_entropy_quantile", lambda value: value < 1.0, "it would rank tokens across parts of rollouts: leave it at 1"),
)


def check_trainer(trainer: Any, *, by_turn: bool, rollouts_per_group: int | None) -> None:
    """Raise :class:`ConfigError` if the settings of a ``GRPOTrainer`` would silently produce wrong results.

    With ``by_turn``, rows are parts of rollouts, of which ``rollouts_per_group`` share the rows of a task group.
    """
    args = trainer.args
    for name, reason in _structural_errors(trainer):
        raise ConfigError(f"rollout_func does not support this trainer: {name}: {reason}")
    for name, is_unsupported, reason in (*_UNSUPPORTED, *(_UNSUPPORTED_BY_TURN if by_turn else ())):
        if hasattr(args, name) and is_unsupported(getattr(args, name)):
            setting = f"GRPOConfig({name}={getattr(args, name)!r})"
            raise ConfigError(f"{setting} is not supported with rollout_func: {reason}")
    if args.generation_kwargs and not args.use_vllm:
        raise ConfigError(
            f"GRPOConfig(generation_kwargs={args.generation_kwargs!r}) is not supported with rollout_func "
            "unless use_vllm=True: set the fields temperature, top_p, top_k, min_p and repetition_penalty of "
            "GRPOConfig instead, and pass stop_strings to rollout_func"
        )
    if by_turn:
        _check_turns(trainer, rollouts_per_group)
    mode = getattr(args, "vllm_importance_sampling_mode", "")
    if args.use_vllm and args.vllm_importance_sampling_correction and str(mode).startswith("sequence"):
        logger.warning(
            "vllm_importance_sampling_mode=%r multiplies the ratios of all tokens of a rollout, so with many turns a "
            "few rollouts dominate the loss: consider 'token_truncate', which corrects each token separately",
            mode,
        )


def _structural_errors(trainer: Any) -> Iterator[tuple[str, str]]:
    if getattr(trainer, "environment_factories", None) or getattr(trainer, "environments", None):
        yield "environment_factory", "TRL runs its environments itself: remove it or rollout_func"
    elif getattr(trainer, "tools", None):
        yield "tools", "with tools, TRL ignores env_mask, so observations would be trained on: remove the tools"
    if len(trainer.reward_funcs) == 0:
        yield "reward_funcs", "it is empty: pass reward_funcs=agentsgym.interop.environment_reward"


def _check_turns(trainer: Any, rollouts_per_group: int | None) -> None:
    num_rows = trainer.num_generations
    if rollouts_per_group is None or rollouts_per_group >= num_rows:
        raise ConfigError(
            f"with credit='turn', the num_generations={num_rows} rows of a task group hold the turns of "
            "rollouts_per_group rollouts, plus one row that makes the rewards sum to 0; so rollouts_per_group must be "
            f"an int below {num_rows}, got {rollouts_per_group!r}. For one row per turn, num_generations must be at "
            "least rollouts_per_group * turns + 1"
        )
    if len(trainer.reward_funcs) != 1:
        raise ConfigError(
            f"credit='turn' passes advantages to TRL as rewards and cannot be combined with other rewards, got "
            f"{len(trainer.reward_funcs)} reward_funcs: pass only agentsgym.interop.environment_reward"
        )
    local = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    if local % num_rows:
        raise ConfigError(
            f"credit='turn' requires complete task groups in each process: per_device_train_batch_size * "
            f"steps_per_generation ({local}) must be a multiple of num_generations ({num_rows})"
        )
