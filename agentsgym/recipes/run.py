"""A whole training run as one object: evaluations, a warm start, reinforcement learning, and what is written of them.

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
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from transformers import AutoModelForCausalLM, PrinterCallback, ProgressCallback
from trl import get_peft_config

from agentsgym.agents.policy.agent import PolicyAgent
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.evaluation.mixed import evaluate_mixed
from agentsgym.evaluation.run import evaluate
from agentsgym.observers.learning_curve import LearningCurve
from agentsgym.observers.stored import TrainingStore, new_run_name
from agentsgym.recipes.scripts import LossBar, Phases, episodes_bar, write_transcripts
from agentsgym.seeding import derive_seed
from agentsgym.store.reader import RolloutStore
from agentsgym.training.imitate import imitate, tiny_imitation_config
from agentsgym.training.trainer import GRPOEnvTrainer

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState
    from trl import ModelConfig

    from agentsgym.agents.base import Agent
    from agentsgym.envs.base import MultistepEnv
    from agentsgym.statistics.metrics import Evaluation
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.types import Trajectory

_MAX_CONCURRENT = 256


class TrainingRun:
    """Evaluates a policy, warms it up, trains it, and writes what came of it; each step is one call.

    For scripts that choose the steps of a run themselves; :func:`agentsgym.train` takes them from a configuration.

    Ctrl-C or SIGTERM in a warm start or in training ends that step and keeps the policy as it is then; the steps of
    learning that follow do nothing, the evaluations and the summary are made as ever, and ``phases.status`` is what the
    process is to exit with. While episodes are played outside of training, a signal ends the process as it always does.

    Under several ranks, as ``accelerate launch`` starts them, every rank makes the same calls. All play the same
    evaluations and demonstrations; the first alone shows progress and writes files.

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
        tokenizer: Its tokenizer, which the environments need too.
        args: The settings of the trainer; ``args.seed`` seeds every step.
        output: The folder of all that is written, ``args.output_dir``.
        phases: How long each step took, and whether one was stopped.
        evaluations: What :meth:`evaluate` found, by name.
        run_name: What the run is called in its rollout store.
        peft_config: The adapters that are trained, of PEFT's kind; None to train the weights.
    """

    def __init__(
        self,
        policy: tuple[PreTrainedModel, PreTrainedTokenizerBase],
        args: GRPOEnvConfig,
        model_config: ModelConfig | None = None,
        *,
        unit: str = "episode",
        store_evaluations: bool | None = None,
    ) -> None:
        """Set up; nothing is played or written.

        Args:
            policy: A model and its tokenizer, as :func:`agentsgym.tiny_policy` and
                :func:`~agentsgym.recipes.scripts.load_policy` give them.
            args: The settings of the trainer.
            model_config: TRL's settings of the model, of which those of adapters are used; None for no adapters.
            unit: What progress bars call an episode.
            store_evaluations: Whether the rollouts of :meth:`evaluate` are kept, beside those of training: in the
                folder of ``args.store_rollouts``, or where that keeps none in ``rollouts/``. None: if training keeps
                its own.

        Raises:
            ConfigError: Weights of 4 bits are to be sampled by vLLM.
        """
        self.model, self.tokenizer = policy
        self.args = args
        self.output = Path(args.output_dir or "outputs")
        self.phases = Phases(is_quiet=not self.is_main)
        self.evaluations: dict[str, Evaluation] = {}
        self.run_name = new_run_name()
        self._unit = unit
        self._num_steps = 0
        keeps = args.rollout_folder is not None if store_evaluations is None else store_evaluations
        self._folder = (args.rollout_folder or self.output / "rollouts") if keeps else None
        self.peft_config = get_peft_config(model_config) if model_config else None
        if args.use_vllm and getattr(self.model, "is_loaded_in_4bit", False):
            raise ConfigError("load_in_4bit with use_vllm is refused: vLLM would be sent weights packed into 4 bits")

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that shows progress and writes files; True where there is but one."""
        return self.args.process_index == 0

    def policy(self, *, seed: int | None = None) -> PolicyAgent:
        """Give the policy as it is now as an agent, sampled at temperature 1 without top-k or top-p.

        Args:
            seed: Of its draws; None for one that is derived from ``args.seed``, the same at each call.
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

        Args:
            name: Under which ``evaluations`` and the summary hold it.
            env: The environment; None for rows that each name their own, as :func:`agentsgym.mix` makes them.
            tasks: The same at each call, so that players are compared on equal terms.
            agent: Who plays; None for the policy as it is now.
            label: What the progress bar and ``phases`` call it; None for ``name``.
            **options: What :func:`agentsgym.evaluate` or, without ``env``, :func:`agentsgym.evaluate_mixed` takes.

        Where evaluations are kept, the rollouts are in the store under ``agent=name``, those of the policy with the
        optimizer steps of :meth:`learn` that it has behind it as their ``step``.

        Returns:
            The evaluation.

        Raises:
            StoreError: There can be no store at its place.
        """
        options = {"max_concurrent": _MAX_CONCURRENT, **options}
        is_own = agent is None or getattr(agent, "model", None) is self.model
        step = self._num_steps if is_own else None
        agent, label = agent or self.policy(), label or name
        num_episodes = len(tasks) * options.get("num_rollouts", 1)
        with (
            self._keeping(name, step) as kept,
            self.phases.measure(label),
            self._bar(label, num_episodes) as on_finish,
        ):
            options = {**kept, **options, "on_finish": on_finish}
            if env is None:
                found = evaluate_mixed(agent, tasks, self.tokenizer, **options)
            else:
                found = evaluate(env, agent, tasks, **options)
        self.evaluations[name] = found
        return found

    @contextmanager
    def _keeping(self, name: str, step: int | None) -> Generator[dict[str, Any]]:
        """Give what an evaluation needs to keep its rollouts; a disk that takes nothing is logged, and ends nothing."""
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
        """Let an agent play each task once behind a progress bar, to record demonstrations.

        Args:
            label: What the progress bar and ``phases`` call it.
            env: The environment, made with the tokenizer of the policy.
            tasks: What is played.
            agent: Who plays.

        Returns:
            The trajectories, in the order of the tasks.
        """
        with self.phases.measure(label), self._bar(label, len(tasks)) as on_finish:
            return env.rollout(tasks, agent, max_concurrent=_MAX_CONCURRENT, on_finish=on_finish)

    def warm_start(
        self, demonstrations: Sequence[Trajectory], num_steps: int, *, observation_loss: bool = False, **settings: Any
    ) -> None:
        """Let the policy imitate demonstrations, and save it to ``model/``.

        Args:
            demonstrations: Trajectories recorded with the policy's tokenizer.
            num_steps: Optimizer steps.
            observation_loss: Whether it also learns to predict observations.
            **settings: Any field of ``SFTConfig``. The defaults are those of
                :func:`~agentsgym.training.imitate.tiny_imitation_config`: a pretrained model needs a learning rate far
                below its 3e-3.

        Raises:
            ConfigError: ``num_steps`` is below 1, or there is nothing to imitate.
        """
        if self.phases.interrupted:
            return
        # use_cpu as in training: ranks without an accelerator know each other only where it is set, and the settings
        # that are made last decide that for the whole process.
        shared = {"seed": self.args.seed, "disable_tqdm": True, "use_cpu": self.args.use_cpu}
        config = tiny_imitation_config(num_steps, **(shared | settings))
        with (
            self.phases.measure("warm start"),
            self.phases.interruptible(),
            LossBar("warm start", config.max_steps, is_shown=self.is_main) as bar,
        ):
            imitate(
                self.model,
                demonstrations,
                self.tokenizer,
                config,
                observation_loss=observation_loss,
                callbacks=[bar],
            )
        self.save_policy()

    def learning_curve(
        self, *, before: str = "before", references: Sequence[str] | Mapping[str, Evaluation] = ()
    ) -> LearningCurve:
        """Make the plot ``learning_curve.png`` that :meth:`learn` draws.

        Args:
            before: The evaluation of the policy before training.
            references: The evaluations of other players, drawn as lines: their names here, or evaluations by the name
                of the line, say those that :func:`~agentsgym.evaluation.mixed.pooled` makes of several environments'.

        Raises:
            ConfigError: There is no evaluation of such a name.
        """
        others = references if isinstance(references, Mapping) else {}
        for name in (before, *(name for name in references if name not in others)):
            if name not in self.evaluations:
                near = did_you_mean(name, self.evaluations) if self.evaluations else "; nothing was evaluated yet"
                raise ConfigError(f"the learning curve shows the evaluation {name!r}, which was not made{near}")
        known = {**self.evaluations, **others}
        lines = {name: known[name].win_rate for name in references}
        return LearningCurve(
            self.output / "learning_curve.png" if self.is_main else None,
            before=self.evaluations[before].win_rate,
            references={name: win_rate for name, win_rate in lines.items() if win_rate is not None},
        )

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

        Adapters are merged into the weights at the end, but for those on weights of 4 bits, which are saved alone.
        ``args.resume_from_checkpoint`` is heeded. The trainer handles
        signals itself: it saves a checkpoint to go on from where ``args`` asks for checkpoints.

        Args:
            env: The environment; None for rows that each name their own.
            rows: What is trained on.
            label: What ``phases`` calls it.
            callbacks: As the trainer takes them, say :meth:`learning_curve`. Its own bar and printing are left out.
            **trainer_options: Other arguments of the trainer, say ``curriculum``.

        Returns:
            The state of the trainer, whose ``log_history`` holds the metrics; None if nothing was trained because a
            step before was stopped.
        """
        if self.phases.interrupted:
            return None
        self._load_from_path_if_needed()
        trainer = GRPOEnvTrainer(
            self.model,
            env,
            self.args,
            train_dataset=rows,
            processing_class=self.tokenizer,
            callbacks=[*callbacks],
            peft_config=self.peft_config,
            **trainer_options,
        )
        for observer in trainer.observers:
            if isinstance(observer, TrainingStore):
                observer.run = self.run_name
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        with trainer, self.phases.measure(label), self.phases.interruptible(handle_sigterm=False):
            trainer.train(resume_from_checkpoint=self.args.resume_from_checkpoint)
        self._num_steps = trainer.state.global_step
        for callback in callbacks:
            if isinstance(callback, LearningCurve):
                callback.close()
        if self.peft_config is not None:
            adapted: Any = trainer.model
            is_packed = getattr(adapted, "is_loaded_in_4bit", False)  # merged, they would be rounded to 4 bits again
            self.model = adapted if is_packed else adapted.merge_and_unload()
        self.save_policy()
        return trainer.state

    def _load_from_path_if_needed(self) -> None:
        """Load the policy anew where the trainer reads it from its path: for a reference model, and for vLLM."""
        if self.args.beta or self.args.use_vllm:
            self.save_policy("start")
            PartialState().wait_for_everyone()
            self.model = AutoModelForCausalLM.from_pretrained(self.output / "start")

    def _bar(self, label: str, num_episodes: int) -> AbstractContextManager[Callable[[Trajectory], None]]:
        return episodes_bar(label, num_episodes, unit=self._unit, is_shown=self.is_main)

    def save_policy(self, folder: str = "model") -> None:
        """Write the policy and its tokenizer as they are now, into a folder of ``output``; the first rank does."""
        if not self.is_main:
            return
        self.model.save_pretrained(self.output / folder)
        self.tokenizer.save_pretrained(self.output / folder)

    def write_transcripts(self, *names: str) -> None:
        """Write the episodes of evaluations as text, each to ``transcripts_<name>.txt``; the first rank does."""
        if not self.is_main:
            return
        self.output.mkdir(parents=True, exist_ok=True)
        for name in names:
            write_transcripts(self.output / f"transcripts_{name}.txt", self.evaluations[name].trajectories)

    def summary(self) -> dict[str, Any]:
        """Give every evaluation by name, ``seconds`` by phase, ``seed``, and whether it was ``interrupted``."""
        return {name: found.as_dict() for name, found in self.evaluations.items()} | {
            "seconds": self.phases.seconds,
            "seed": self.args.seed,
            "interrupted": self.phases.interrupted,
        }

    def write_summary(self, **more: Any) -> None:
        """Write :meth:`summary` to ``summary.json``.

        The first rank does.

        Args:
            **more: What else it holds; a key from above is replaced. What JSON cannot hold is written as its ``str``.
        """
        if not self.is_main:
            return
        self.output.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.summary() | more, indent=2, default=str)
        (self.output / "summary.json").write_text(text + "\n", encoding="utf-8")
