"""A training run as one object: evaluations, a warm start, reinforcement learning, and output files.

::

    policy ─▶ evaluate ─▶ warm_start ─▶ evaluate ─▶ learn ─▶ evaluate ─▶ write_summary
               references    demonstrations            rows        │
                                                                   └─▶ model/  learning_curve.png  transcripts_*.txt
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accelerate import PartialState
from transformers import PrinterCallback, ProgressCallback
from trl import get_peft_config

from agentsgym.agents.policy.agent import PolicyAgent
from agentsgym.agents.policy.loading import load_model
from agentsgym.agents.policy.model import tokenizer_in
from agentsgym.agents.policy.saving import save_rest, source_of
from agentsgym.agents.policy.sharded import is_sharded
from agentsgym.agents.policy.text_path import spare_layers
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.evaluation.mixed import evaluate_mixed
from agentsgym.evaluation.run import evaluate
from agentsgym.fields import Check, is_str, require
from agentsgym.observers.learning_curve import LearningCurve, warn_without_plots
from agentsgym.observers.stored import TrainingStore
from agentsgym.recipes.scripts import LossBar, Phases, episodes_bar, write_transcripts
from agentsgym.seeding import derive_seed
from agentsgym.store.reader import RolloutStore
from agentsgym.store.runs import claim, new_run_name
from agentsgym.training._trl import check_loss
from agentsgym.training.model_checks import check_vllm
from agentsgym.training.selection.imitate import imitate, tiny_imitation_config
from agentsgym.training.trainer import GRPOEnvTrainer

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState
    from trl import ModelConfig

    from agentsgym.agents.base import Agent
    from agentsgym.envs.base import MultistepEnv
    from agentsgym.statistics.metrics import Evaluation
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.types import Trajectory

_MAX_CONCURRENT = 256


def refuse_source_in(output: Path, source: str) -> None:
    """Raise :class:`ConfigError` if the output folder holds the model that a run would be trained from."""
    if Path(source or "/").exists() and Path(source).resolve().is_relative_to(output.resolve()):
        raise ConfigError(f"output_dir={str(output)!r} holds the model, {source}: train into another folder")


class TrainingRun:
    """Evaluates a policy, warms it up, trains it, and writes the results; each step is one call.

    For scripts that choose the steps of a run themselves; :func:`agentsgym.train` takes them from a configuration.

    Ctrl-C or SIGTERM during the warm start or training ends that step and keeps the policy at that point; later
    learning steps do nothing, evaluations and the summary run as usual, and ``phases.status`` is the exit status for
    the process. While episodes are played outside of training, a signal ends the process as usual.

    With several ranks, as started by ``accelerate launch``, every rank makes the same calls. All play the same
    evaluations and demonstrations; only the first shows progress and writes files.

    ::

        run = TrainingRun(tiny_policy(Quiz()), args)
        env = Quiz(run.tokenizer)
        tasks = [{"solution": name} for name in env.candidates.objects]
        run.evaluate("random", env, tasks, RandomPlayer(env))
        run.warm_start(run.play("demonstrations", env, tasks, ImitationPlayer(env)), num_steps=500)
        run.evaluate("before", env, tasks)
        run.learn(env, env.get_train_dataset(size=10_000), callbacks=[run.learning_curve(references=["random"])])
        run.evaluate("after", env, tasks)
        run.write_summary()

    Attributes:
        model: The policy in training.
        tokenizer: The policy's tokenizer, which the environments need too.
        args: The settings of the trainer; ``args.seed`` seeds every step.
        output: Folder of all output files, ``args.output_dir``.
        phases: Duration of each step, and whether one was interrupted.
        evaluations: Results of :meth:`evaluate`, by name.
        run_name: Name of the run in its rollout store.
        peft_config: PEFT configuration of the adapters to train; None to train the weights.
        keeps_dtypes: Whether ``model/`` has the dtypes of the folder that the policy was loaded from; False by default.
    """

    def __init__(
        self,
        policy: tuple[PreTrainedModel, PreTrainedTokenizerBase],
        args: GRPOEnvConfig,
        model_config: ModelConfig | None = None,
        *,
        unit: str = "episode",
        store_evaluations: bool | None = None,
        overwrite: bool = False,
    ) -> None:
        """Set up; nothing is played or written, but with ``overwrite`` an earlier run is moved aside.

        Args:
            policy: A model and its tokenizer, as returned by :func:`agentsgym.tiny_policy` and
                :func:`~agentsgym.recipes.scripts.load_policy`.
            args: The settings of the trainer.
            model_config: TRL's settings of the model, of which those of adapters are used; None for no adapters.
            unit: Unit of the progress bars of episodes.
            store_evaluations: Whether to store the rollouts of :meth:`evaluate`, in the folder of
                ``args.store_rollouts``, or in ``rollouts/`` if that is not set. None: if training stores its rollouts.
            overwrite: Whether folders that hold a run that is not resumed are moved to ``NAME.1``.

        Raises:
            ConfigError: vLLM would sample from 4-bit weights, or a folder holds a run that is not resumed.
            MissingDependencyError: The settings use vLLM, which is not installed.
        """
        is_pair: Check = lambda value: isinstance(value, tuple) and len(cast("Any", value)) == 2  # noqa: E731
        require("TrainingRun(policy)", policy, is_pair, "a model and its tokenizer, as tiny_policy(…) returns")
        check_vllm(args)
        check_loss(policy[0], args)
        self.model: Any  # with adapters, a PeftModel
        self.model, self._processing_class = policy
        self.tokenizer = tokenizer_in(self._processing_class)
        self._source, self.keeps_dtypes = source_of(self.model), False
        self.args = args
        self.output = Path(args.output_dir or "outputs")
        refuse_source_in(self.output, self._source)
        self.phases = Phases(is_quiet=not self.is_main)
        self.evaluations: dict[str, Evaluation] = {}
        self._unit = unit
        self._num_steps = 0
        keeps = args.rollout_folder is not None if store_evaluations is None else store_evaluations
        self._folder = (args.rollout_folder or self.output / "rollouts") if keeps else None
        self.run_name = new_run_name()
        if self.is_main:
            self.run_name = claim(
                self._folder or args.rollout_folder,
                # what the trainer plays has groups, and only it knows the checkpoint
                is_played_again=(lambda row: row["group"] is None) if args.resume_from_checkpoint else None,
                output=self.output,
                overwrite=overwrite,
            )
        self.peft_config: PeftConfig | None = (
            spare_layers(get_peft_config(model_config), self.model) if model_config else None
        )
        if args.use_vllm and getattr(self.model, "is_loaded_in_4bit", False):
            raise ConfigError("load_in_4bit cannot be combined with use_vllm: vLLM would receive packed 4-bit weights")
        if self.is_main:
            warn_without_plots()

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that shows progress and writes files."""
        return self.args.process_index == 0  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def policy(self, *, seed: int | None = None) -> PolicyAgent:
        """Return the current policy as an agent that samples at temperature 1 without top-k or top-p.

        Args:
            seed: Random seed; None to derive it from ``args.seed``, the same at each call.
        """
        seed = derive_seed("evaluation", self.args.seed) if seed is None else seed
        return PolicyAgent(self.model, self.tokenizer, seed=seed, max_turn_tokens=self.args.max_turn_tokens)

    def evaluate(
        self,
        name: str,
        env: MultistepEnv | None,
        tasks: Sequence[Mapping[str, Any]] | Dataset,
        agent: Agent | None = None,
        *,
        label: str | None = None,
        **options: Any,
    ) -> Evaluation:
        """Evaluate an agent and keep the result under a name.

        If evaluations are stored, the rollouts have ``agent=name``, and those of the policy also the number of
        optimizer steps so far as their ``step``.

        Args:
            name: Key in ``evaluations`` and in the summary.
            env: The environment; None for rows that name theirs, such as those of :func:`agentsgym.mix`.
            tasks: Tasks to play, best the same at each call, so that players are compared on equal terms.
            agent: The player; None for the current policy.
            label: Name in the progress bar and in ``phases``; None for ``name``.
            **options: Arguments of :func:`agentsgym.evaluate` or, without ``env``, :func:`agentsgym.evaluate_mixed`.

        Returns:
            The evaluation.

        Raises:
            StoreError: The rollout store cannot be written.
        """
        require("TrainingRun.evaluate(name)", name, is_str, "a str, the first argument")
        options = {"max_concurrent": _MAX_CONCURRENT, **options}
        is_own = agent is None or getattr(agent, "model", None) is self.model
        step = self._num_steps if is_own else None
        agent, label = agent or self.policy(), label or name
        num_episodes = len(tasks) * options.get("num_rollouts", 1)
        with self._keeping(name, step) as kept, self.phases.measure(label), self._bar(label, num_episodes) as on_finish:
            options = {**kept, **options, "on_finish": on_finish}
            if env is None:
                found = evaluate_mixed(agent, tasks, self.tokenizer, **options)
            else:
                found = evaluate(env, agent, tasks, **options)
        self.evaluations[name] = found
        return found

    @contextmanager
    def _keeping(self, name: str, step: int | None) -> Generator[dict[str, Any]]:
        """Yield the options that make an evaluation store its rollouts; failures to write are only logged."""
        if self._folder is None or not self.is_main:
            yield {}
            return
        writer = RolloutStore.writer(
            self._folder, source="evaluation", run=self.run_name, agent=name, step=step, policy_version=step
        )
        try:
            yield {"store": writer, "agent_name": name}
        finally:
            writer.close(strict=False)

    def play(self, label: str, env: MultistepEnv, tasks: Sequence[Mapping[str, Any]], agent: Agent) -> list[Trajectory]:
        """Play each task once with a progress bar, to record demonstrations.

        Args:
            label: Name in the progress bar and in ``phases``.
            env: The environment, with the tokenizer of the policy.
            tasks: Tasks to play.
            agent: The player.

        Returns:
            The trajectories, in the order of the tasks.
        """
        with self.phases.measure(label), self._bar(label, len(tasks)) as on_finish:
            return env.rollout(tasks, agent, max_concurrent=_MAX_CONCURRENT, on_finish=on_finish)

    def warm_start(
        self, demonstrations: Sequence[Trajectory], num_steps: int, *, observation_loss: bool = False, **settings: Any
    ) -> None:
        """Train the policy to imitate demonstrations, and save it to ``model/``.

        If the run trains adapters, so does the warm start; they are then merged as after :meth:`learn`.

        Args:
            demonstrations: Trajectories recorded with the policy's tokenizer.
            num_steps: Number of optimizer steps.
            observation_loss: Whether the policy also learns to predict observations.
            **settings: Fields of ``SFTConfig``. The defaults are those of
                :func:`~agentsgym.training.selection.imitate.tiny_imitation_config`; a pretrained model needs a learning
                rate far below its 3e-3.

        Raises:
            ConfigError: ``num_steps`` is below 1, or there is nothing to imitate.
        """
        if self.phases.interrupted:
            return
        # use_cpu as in training: without an accelerator ranks form a process group only if it is set, and the settings
        # created last decide that for the whole process.
        shared = {"seed": self.args.seed, "disable_tqdm": True}
        shared |= {name: getattr(self.args, name) for name in ("use_cpu", "bf16", "fp16", "router_aux_loss_coef")}
        config = tiny_imitation_config(num_steps, **(shared | settings))
        if self.peft_config is not None and not hasattr(self.model, "merge_and_unload"):
            from peft import get_peft_model  # noqa: PLC0415  # an extra

            adapted: Any = get_peft_model(self.model, self.peft_config)
            self.model = adapted
        with (
            self.phases.measure("warm start"),
            self.phases.interruptible(),
            LossBar("warm start", config.max_steps, is_shown=self.is_main) as bar,
        ):
            imitate(
                self.model, demonstrations, self.tokenizer, config, observation_loss=observation_loss, callbacks=[bar]
            )
        self._merge_adapters()
        self.save_policy()

    def learning_curve(
        self, *, before: str = "before", references: Sequence[str] | Mapping[str, Evaluation] = ()
    ) -> LearningCurve:
        """Create the callback that shows progress and draws ``learning_curve.png`` during :meth:`learn`.

        Without matplotlib (``agentsgym[plots]``), it only shows progress.

        Args:
            before: Name of the evaluation of the policy before training.
            references: Evaluations of other players, drawn as lines: their names, or a mapping of line names to
                evaluations, such as those that :func:`~agentsgym.evaluation.mixed.pooled` returns.

        Raises:
            ConfigError: There is no evaluation with such a name.
        """
        others: Mapping[str, Evaluation] = references if isinstance(references, Mapping) else {}
        for name in (before, *(name for name in references if name not in others)):
            self._evaluation(name)
        known = {**self.evaluations, **others}
        lines = {name: known[name].win_rate for name in references}
        return LearningCurve(
            self.output / "learning_curve.png" if self.is_main else None,
            before=self.evaluations[before].win_rate,
            references={name: win_rate for name, win_rate in lines.items() if win_rate is not None},
        )

    def _evaluation(self, name: str) -> Evaluation:
        if name not in self.evaluations:
            near = did_you_mean(name, self.evaluations) if self.evaluations else "; nothing has been evaluated yet"
            raise ConfigError(f"no evaluation is named {name!r}{near}")
        return self.evaluations[name]

    def learn(
        self,
        env: MultistepEnv | None,
        rows: Dataset,
        *,
        label: str = "reinforcement learning",
        callbacks: Sequence[TrainerCallback] = (),
        **trainer_options: Any,
    ) -> TrainerState | None:
        """Train the policy with :class:`agentsgym.GRPOEnvTrainer`, and save it to ``model/``.

        Adapters are merged into the weights at the end, except those on 4-bit weights, which are saved alone.
        ``args.resume_from_checkpoint`` is respected. The trainer handles signals itself: it saves a checkpoint to
        resume from if ``args`` enables checkpoints.

        Args:
            env: The environment; None for rows that name theirs.
            rows: Dataset to train on.
            label: Name in ``phases``.
            callbacks: Callbacks of the trainer, such as :meth:`learning_curve`; its bar and printing are removed.
            **trainer_options: Other arguments of the trainer, such as ``curriculum``.

        Returns:
            The state of the trainer, whose ``log_history`` holds the metrics; None if an earlier step was interrupted
            and nothing was trained.
        """
        if self.phases.interrupted:
            return None
        if self.args.beta or self.args.use_vllm:  # the trainer needs a path, for a reference model or for vLLM
            self.save_policy("start")
            PartialState().wait_for_everyone()
            self.model = load_model(str(self.output / "start"))[0]
        trainer = GRPOEnvTrainer(
            self.model,
            env,
            self.args,
            train_dataset=rows,
            processing_class=self.tokenizer,
            callbacks=[*callbacks],
            peft_config=None if hasattr(self.model, "merge_and_unload") else self.peft_config,
            **trainer_options,
        )
        for observer in trainer.observers:
            if isinstance(observer, TrainingStore):
                observer.run = self.run_name
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        with trainer:
            with self.phases.measure(label), self.phases.interruptible(handle_sigterm=False):
                trainer.train(resume_from_checkpoint=self.args.resume_from_checkpoint)
            self._take(trainer)
        self._num_steps = trainer.state.global_step
        for callback in callbacks:
            if isinstance(callback, LearningCurve):
                callback.close()
        self.save_policy()
        return trainer.state

    def _take(self, trainer: Any) -> None:
        """Collective: take the trained model with its adapters; a sharded one is loaded whole from ``model/``."""
        if self.peft_config is not None:
            self.model = trainer.model
            self._merge_adapters()
        if is_sharded(trainer.accelerator):
            trainer.model = self.model
            trainer.save_model(str(self.output / "model"))
            PartialState().wait_for_everyone()
            self.model = load_model(str(self.output / "model"))[0].to(self.args.device)

    def _merge_adapters(self) -> None:
        """Merge adapters into the weights, except those on 4-bit weights, to which the sum would be rounded again."""
        adapted: Any = self.model
        if self.peft_config is not None and not getattr(adapted, "is_loaded_in_4bit", False):
            self.model = adapted.merge_and_unload()

    def _bar(self, label: str, num_episodes: int) -> AbstractContextManager[Callable[[Trajectory], None]]:
        return episodes_bar(label, num_episodes, unit=self._unit, is_shown=self.is_main)

    def save_policy(self, folder: str = "model") -> None:
        """Save the policy and its tokenizer in a folder of ``output``, on the first rank."""
        if not self.is_main:
            return
        place = self.output / folder
        self.model.save_pretrained(place)
        self.tokenizer.save_pretrained(place)
        save_rest(self._processing_class, self.model, place, self._source, keep=self.keeps_dtypes and folder == "model")

    def write_transcripts(self, *names: str) -> None:
        """Write the episodes of evaluations as text to ``transcripts_<name>.txt``, on the first rank."""
        if not self.is_main:
            return
        self.output.mkdir(parents=True, exist_ok=True)
        for name in names:
            write_transcripts(self.output / f"transcripts_{name}.txt", self._evaluation(name).trajectories)

    def summary(self) -> dict[str, Any]:
        """Return every evaluation by name, ``seconds`` by phase, ``seed``, and whether it was ``interrupted``."""
        return {name: found.as_dict() for name, found in self.evaluations.items()} | {
            "seconds": self.phases.seconds,
            "seed": self.args.seed,
            "interrupted": self.phases.interrupted,
        }

    def write_summary(self, **more: Any) -> None:
        """Write :meth:`summary` to ``summary.json``, on the first rank.

        Args:
            **more: Further values, which replace those of the summary. Values that JSON cannot hold are written as
                ``str``.
        """
        if not self.is_main:
            return
        self.output.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.summary() | more, indent=2, default=str)
        (self.output / "summary.json").write_text(text + "\n", encoding="utf-8")
