"""Train a policy from a recipe: one call for a whole training script.

::

    recipe ─▶ worlds, policy ─▶ TrainingRun: references ─▶ warm start ─▶ before ─▶ learn ─▶ after ─▶ files
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentsgym.agents.policy.loading import limit_threads
from agentsgym.envs.players import anchors_of, has_random_player
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.evaluation.mixed import pooled
from agentsgym.fields import is_int
from agentsgym.recipes.environments import Worlds
from agentsgym.recipes.from_values import imitation_values, model_settings, training_settings
from agentsgym.recipes.recipe import Recipe, as_values, naming_the_file, read_recipe
from agentsgym.recipes.run import TrainingRun, refuse_source_in
from agentsgym.recipes.scripts import load_policy
from agentsgym.recipes.sections import PlacedError
from agentsgym.recipes.warm_start import open_store, play_demonstrations, player_of, stored_demonstrations
from agentsgym.store.runs import held
from agentsgym.texts import sentence_of, shown
from agentsgym.tiny import HasVocabulary, environment_texts, tiny_model, tiny_policy
from agentsgym.training.model_checks import check_size
from agentsgym.training.objectives.demonstrations import Demonstrations

if TYPE_CHECKING:
    from agentsgym.statistics.metrics import Evaluation
    from agentsgym.store.reader import RolloutStore
    from agentsgym.training.config import GRPOEnvConfig


def train(
    config: str | Path | Mapping[str, Any] | Recipe,
    *,
    overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> TrainingRun:
    """Train a policy from a configuration, and write the results to ``output_dir``.

    This runs a complete training without a script, as ``agentsgym train`` does on the command line.

    The environments' random and reference players are evaluated, if there are any, and a pretrained policy before a
    warm start; after the warm start, the policy is evaluated, trained, and evaluated again. ``summary.json``,
    ``transcripts_*.txt``, ``model/`` and, with matplotlib (``agentsgym[plots]``), ``learning_curve.png`` are written.
    Ctrl-C or SIGTERM during the warm start or training keeps the policy at that point: see
    :class:`~agentsgym.recipes.run.TrainingRun`. The summary and the transcripts are written after each evaluation, so
    that they survive a later failure.

    Args:
        config: YAML file (docs/cli.md lists its keys), the contents of one, or a recipe.
        overrides: Values that replace those of a file, as in ``{"training.max_steps": 20}``.
        overwrite: Whether an ``output_dir`` that holds a run is moved to ``NAME.1``; otherwise it is refused.

    Returns:
        The run: the policy, its evaluations by name (``"random"``, ``"reference"``, ``"untrained"``, ``"before"``,
        ``"after"``; the players of several environments as ``"random, LABEL"``), and the duration of each step.

    Raises:
        ConfigError: A key is unknown or a value is invalid; the message names the key, and nothing has been played.
    """
    return prepare(config, overrides=overrides, overwrite=overwrite).execute()


def prepare(
    config: str | Path | Mapping[str, Any] | Recipe,
    *,
    overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> PreparedRun:
    """Check a configuration of :func:`train` and build what its run needs; nothing is played or written yet.

    With ``overwrite``, the folder of an earlier run is moved aside.

    Raises:
        ConfigError: A key is unknown or a value is invalid; the key is named.
    """
    if isinstance(config, Recipe):
        if overrides:
            raise ConfigError("overrides cannot be combined with a Recipe: use dataclasses.replace")
        recipe = config
    else:
        recipe = read_recipe(config, overrides)
    with naming_the_file(config, overrides):
        return PreparedRun(recipe, overwrite=overwrite)


class PreparedRun:
    """The run of a recipe: everything is checked and built before anything is played.

    Attributes:
        recipe: The recipe.
        run: The training run.
        worlds: The environments.
    """

    def __init__(self, recipe: Recipe, *, overwrite: bool = False) -> None:
        with _in_section("training"):
            args = training_settings(recipe.training, output_dir=f"outputs/{recipe.name}")
        _check_folders(args)
        with _in_section("model_settings"):
            models = model_settings(recipe.model_settings)
        with _in_section("warm_start", "settings"):
            self._imitation = imitation_values(recipe.warm_start.settings) if recipe.warm_start else {}
        self.recipe = recipe
        self.worlds = Worlds(recipe, seed=args.seed)
        self._rows = self.worlds.train_rows()
        with _in_section("num_train_tasks"):
            check_size(self._rows, args)
        store: RolloutStore | None = None
        if recipe.warm_start is not None and recipe.warm_start.from_store:
            store = open_store(recipe)
        elif recipe.warm_start is not None:
            for world in self.worlds:
                player_of(world, recipe.warm_start.player, args.seed)
        is_tiny = recipe.model == "tiny"
        if is_tiny and models.load_in_4bit:
            raise PlacedError(("model_settings", "load_in_4bit"), "cannot be combined with the model 'tiny'")
        policy = _tiny_policy(recipe, self.worlds, args.seed) if is_tiny else _loaded_policy(recipe, models, args)
        limit_threads(policy[0])
        self.run = TrainingRun(policy, args, models, store_evaluations=recipe.evaluation.store, overwrite=overwrite)
        first = self.worlds[0]
        # None for several environments, whose rows name theirs
        self.env = first.named.build(self.run.tokenizer) if len(self.worlds) == 1 else None
        is_other = self.env is not None and first.eval_named is not first.named
        self.eval_env = first.eval_named.build(self.run.tokenizer) if is_other else self.env
        self.stored = None if store is None else stored_demonstrations(self.run.tokenizer, store)
        self.references: dict[str, dict[str, Evaluation]] = {}
        self._kept: Demonstrations | None = None  # imitated during training, too

    def execute(self) -> TrainingRun:
        """Evaluate, warm up, train, and write the files; the folder always holds the results so far.

        Raises:
            ConfigError: The output folder cannot be created.
            KeyboardInterrupt: Ctrl-C came while episodes were played outside of training.
        """
        if self.run.args.eval_strategy != "no":
            text = "must be no: the policy is evaluated before and after training, as set in 'evaluation'"
            raise PlacedError(("training", "eval_strategy"), text)
        self.run.keeps_dtypes = "dtype" not in self.recipe.model_settings
        with held(self.run.output) if self.run.is_main else nullcontext():
            try:
                self.evaluate_references()
                if self.recipe.warm_start is not None and self.recipe.model != "tiny":
                    self.evaluate("untrained")
                self.warm_up()
                self.learn()
            except KeyboardInterrupt:
                self.run.phases.interrupted = True
                self._write_summary()
                raise
            self._write_summary()
        return self.run

    def _write_summary(self) -> None:
        self.run.write_summary(configuration=as_values(self.recipe))

    def evaluate_references(self) -> None:
        """Evaluate the environments' random and reference players, if there are any."""
        for world in self.worlds:
            env = world.eval_named.build(self.run.tokenizer)
            for name in ("random", "reference"):
                if name == "random" and not has_random_player(world.named.env_class):
                    continue
                try:
                    player = player_of(world, name, self.run.args.seed, env)
                except ConfigError:
                    continue  # the environment has no such player
                label = name if len(self.worlds) == 1 else f"{name}, {world.label}"
                tasks = self.worlds.eval[world.label]
                found = self.run.evaluate(label, env, tasks, player, references=anchors_of(env))
                self.references.setdefault(name, {})[world.label] = found
                self._write_summary()

    def warm_up(self) -> None:
        """Run the warm start, if there is one."""
        warm_start = self.recipe.warm_start
        if warm_start is None:
            return
        demonstrations = play_demonstrations(self.run, self.worlds, warm_start) if self.stored is None else self.stored
        with _in_section("warm_start"):
            self.run.warm_start(
                demonstrations, warm_start.max_steps, observation_loss=warm_start.observation_loss, **self._imitation
            )
        if warm_start.weight:
            self._kept = Demonstrations(
                trajectories=demonstrations, weight=warm_start.weight, observation_loss=warm_start.observation_loss
            )

    def learn(self) -> None:
        """Evaluate, train, evaluate again, and write the files."""
        run = self.run
        self.evaluate("before")
        everywhere = {name: one for name, one in self.references.items() if len(one) == len(self.worlds)}
        curve = run.learning_curve(references={name: pooled(parts) for name, parts in everywhere.items()})
        run.learn(self.env, self._rows, callbacks=[curve], demonstrations=self._kept)
        after = self.evaluate("after")
        curve.draw(after=after.win_rate)

    def evaluate(self, name: str) -> Any:
        """Evaluate the current policy."""
        run, num_rollouts = self.run, self.recipe.evaluation.num_rollouts
        if self.eval_env is None:
            found = run.evaluate(name, None, self.worlds.eval_rows(), num_rollouts=num_rollouts)
        else:
            tasks = self.worlds.eval[self.worlds[0].label]
            anchors = anchors_of(self.eval_env)
            found = run.evaluate(name, self.eval_env, tasks, num_rollouts=num_rollouts, references=anchors)
        run.write_transcripts(name)
        self._write_summary()
        return found


def _check_folders(args: GRPOEnvConfig) -> None:
    """Check that the output folder can be created and that the checkpoint to resume from exists."""
    given = str(args.output_dir or "")
    output = Path(given)
    if not given or "$" in given or given.startswith("~"):
        text = f"must be a folder without ~ or variables, which are not replaced, got {shown(given)}"
        raise PlacedError(("training", "output_dir"), text)
    there = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not there.is_dir():
        raise PlacedError(("training", "output_dir"), f"must be a folder, but {there} is a file")
    if not os.access(there, os.W_OK):
        raise PlacedError(("training", "output_dir"), f"cannot be created: no permission to write to {there}")
    requested: Any = args.resume_from_checkpoint  # a YAML file may also set true
    if not requested or requested == "auto":
        return
    if requested is True and not any(output.glob("checkpoint-*")):
        raise PlacedError(
            ("training", "resume_from_checkpoint"),
            f"is true, but {output} has no checkpoint; with auto, a new run starts in that case",
        )
    if requested is not True and not Path(requested).is_dir():
        raise PlacedError(
            ("training", "resume_from_checkpoint"), f"must be a folder, auto or true, got {shown(requested)}"
        )


def _check_tiny(sizes: Mapping[str, Any]) -> None:
    """Check the names and types of the tiny policy's sizes; the policy itself checks their values."""
    parameters = {**signature(tiny_policy).parameters, **signature(tiny_model).parameters}
    known = [name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY and isinstance(one.default, int)]
    for name, value in sizes.items():
        if name not in known:
            raise PlacedError(("tiny", name), f"is unknown{did_you_mean(name, known)}")
        if not is_int()(value):
            raise PlacedError(("tiny", name), f"must be a whole number, got {shown(value)}")


def _tiny_policy(recipe: Recipe, worlds: Worlds, seed: int) -> Any:
    """Build the tiny policy from the environments' vocabularies, or from played episodes if there are none."""
    _check_tiny(recipe.tiny)
    name = recipe.warm_start.player if recipe.warm_start is not None and not recipe.warm_start.from_store else "random"
    texts: list[str] = []
    for world in worlds:
        played = [(world.env, worlds.train[world.label]), (world.eval_env, worlds.eval.get(world.label, ()))]
        for env, tasks in played[: 1 + (world.eval_env is not world.env)]:
            player = None if isinstance(env, HasVocabulary) else player_of(world, name, seed, env)
            with _in_section("tiny"):
                texts += environment_texts(env, tasks=player and tasks, agent=player)
    with _in_section("tiny"):
        return tiny_policy(texts, **{"seed": seed, **recipe.tiny})


def _loaded_policy(recipe: Recipe, models: Any, args: GRPOEnvConfig) -> Any:
    beside = recipe.folder / recipe.model
    source = str(beside) if beside.is_dir() else recipe.model
    with _in_section("model"):
        refuse_source_in(Path(args.output_dir or ""), source)
        return load_policy(source, models, trust_remote_code=args.trust_remote_code)


@contextmanager
def _in_section(*keys: str) -> Generator[None]:
    """Add the section to errors about its values."""
    try:
        yield
    except PlacedError as error:
        raise error.below(*keys) from error
    except (ConfigError, TypeError) as error:
        raise PlacedError(keys, f"is invalid: {sentence_of(error)}") from error
