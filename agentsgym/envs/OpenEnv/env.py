"""An environment that runs on an OpenEnv server: each session is one connection and one server-side environment.

::

    answer ─▶ action (a field, a template, JSON, or calls of tools) ─▶ step ─▶ observation ─▶ text, or tools' results
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, cast

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.contract import State
from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.OpenEnv import SPEC
from agentsgym.envs.OpenEnv.connections import ServerConnections, as_config_error
from agentsgym.envs.OpenEnv.conversion import UnreadableActionError
from agentsgym.envs.OpenEnv.converters import Converters, make_converters, outcome_of
from agentsgym.envs.OpenEnv.interface import ServerInterface, request_interface, result_of
from agentsgym.envs.OpenEnv.seeds import check_seed
from agentsgym.envs.OpenEnv.server import OpenEnvServer, as_server, registered_server
from agentsgym.envs.OpenEnv.tasks import DatasetOptions, task_dataset
from agentsgym.envs.OpenEnv.wire import RefusedActionError
from agentsgym.envs.shared.numbers import without_thoughts
from agentsgym.envs.Tools.calls import Plan, plan_of
from agentsgym.envs.Tools.env import TOOL_FIELDS
from agentsgym.envs.Tools.results import ToolResult, cut
from agentsgym.errors import ConfigError, EnvError, TaskError
from agentsgym.fields import Field, choice_field, is_bool, is_str, or_none
from agentsgym.texts import sentence_of
from agentsgym.tokens.calls.parse import with_calls
from agentsgym.types import Action, Message, ToolCall

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_CALL = "Call a tool."
_CUT = "That was cut off by the limit of a turn's length, and nothing of it was done. Write less at a time."
_SHARED_FIELDS = ("max_result_length", "max_calls_per_turn", "max_calls_per_episode", "invalid_reward")
_REFUSED = frozenset({"VALIDATION_ERROR", "EXECUTION_ERROR"})  # the codes that are about one action


def _is_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(is_str, cast("Mapping[Any, Any]", value)))


class OpenEnvEnv(MultistepEnv):
    """An environment on an OpenEnv server, given as ``server=`` or named in ``env_config["server"]``.

    A task is ``{"seed": int}`` and whatever else the game's reset takes, ``{"split": "train", "index": 3}`` for
    example. The game is reset with a seed drawn from the session's own generator. A connection that breaks, a server
    that takes too long or answers nonsense, and a game that raises fail the episode; an action that the server refuses
    as invalid is an invalid action, answered with the server's words.

    Keys of ``env_config`` beside the common ones:

    - ``server``: a name that :func:`~agentsgym.envs.OpenEnv.server.register_server` knows.
    - ``format``: ``"text"``: the answer is one field of the action; ``"json"``: it is a JSON object; ``"tools"``: it
      calls the game's tools, or for a game without tools the tool ``act``, whose arguments are the action; ``"auto"``:
      tools if the game has some, text if the action has one field that must be given, else JSON.
    - ``action``: for other answers than calls the name of the field that takes the text, a template such as
      ``{"message": "{text}"}``, or a callable from the text to the action's dict (None for what is no action); None for
      what the server's schema says.
    - ``observation``: the name of the field that is shown, a template such as ``"{board} {score}"``, or a callable from
      the observation's dict to a text; None for its only field, if that is a text, else all of it as JSON.
    - ``reset``: further arguments of every reset.
    - ``success``: ``"reward"`` (the game ended with a reward above 0), or the name of a field of the observation or
      its metadata that says whether the task is solved; None if nothing does.
    - ``execution_error``: what an exception of the game is: ``"failed"``, the episode's failure, or ``"invalid"``, an
      invalid action, for games that raise at illegal moves.
    - ``answer``: what an answer without a call of a tool is: ``"invalid"``, or the ``"end"`` of the episode.
    - ``max_result_length``: characters of one observation or result; what is longer is cut, and a sentence says so.
    - ``max_calls_per_turn``: further calls are not made.
    - ``max_calls_per_episode``: one more ends the episode.
    - ``invalid_reward``: what an invalid action is paid.
    - ``check_capacity``: whether to find out before play if the server has room for all episodes that will be live.
    - ``check_seed``: whether to find out before play, once a server, if two resets with one seed are equal.
    """

    spec = SPEC
    config_fields: ClassVar[Mapping[str, Field]] = {
        "server": Field(default=None, expected="a name that register_server knows, or None", valid=or_none(is_str)),
        "format": choice_field("auto", "text", "json", "tools"),
        "action": Field(
            default=None,
            expected="a field's name, a template (a dict), a callable (text) -> dict | None, or None",
            valid=lambda value: value is None or bool(value and is_str(value)) or callable(value) or _is_dict(value),
        ),
        "observation": Field(
            default=None,
            expected="a field's name, a template (a str), a callable (observation) -> str, or None",
            valid=lambda value: value is None or bool(value and is_str(value)) or callable(value),
        ),
        "reset": Field(default={}, expected="a dict of arguments", valid=_is_dict),
        "success": Field(default=None, expected="'reward', a field's name, or None", valid=or_none(is_str)),
        "execution_error": choice_field("failed", "invalid"),
        "answer": choice_field("invalid", "end"),
        **{name: TOOL_FIELDS[name] for name in _SHARED_FIELDS},
        "check_capacity": Field(default=True, expected="True or False", valid=is_bool),
        "check_seed": Field(default=True, expected="True or False", valid=is_bool),
    }

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        env_config: dict[str, Any] | None = None,
        *,
        server: OpenEnvServer | str | None = None,
    ) -> None:
        """Store the server; no connection is opened yet.

        Args:
            tokenizer: As every environment takes it.
            env_config: The keys above.
            server: The server or its URL, in place of ``env_config["server"]``.

        Raises:
            ConfigError: The configuration is invalid, or there is no server, or there are two.
            MissingDependencyError: The package ``websockets`` is not installed.
        """
        self._links: dict[int, ServerConnections] = {}  # by process id
        self._link_url: str | None = None
        self._interface: ServerInterface | None = None
        self._converters: Converters | None = None
        self._opening = threading.Lock()
        super().__init__(tokenizer, env_config)
        self.spec.check_installed()
        named = self.env_config["server"]
        if named is not None and server is not None:
            raise ConfigError(
                f"OpenEnvEnv got both server={server!r} and env_config['server']={named!r}: pass only one"
            )
        self._given_server = None if server is None else as_server(server, "OpenEnvEnv(server=…)")
        if named is not None:
            self._given_server = registered_server(named)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, which opens its own connections to a server that already runs here."""
        link = self._links.get(os.getpid())
        url = self._link_url if link is None else link.known_url
        state: dict[str, Any] = {**super().__getstate__(), "_links": {}, "_converters": None, "_link_url": url}
        del state["_opening"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_opening": threading.Lock()})

    @property
    def server(self) -> OpenEnvServer:
        """The server.

        Raises:
            ConfigError: No server was given.
        """
        if self._given_server is None:
            raise ConfigError(
                "OpenEnvEnv requires a server: OpenEnvEnv(server='http://localhost:8000'), or in env_config['server'] "
                "a name registered by register_server"
            )
        return self._given_server

    @property
    def interface(self) -> ServerInterface:
        """The schemas and tools of the server's environment, requested at first use.

        Raises:
            ConfigError: The server cannot be reached, or its answer is invalid.
        """
        with self._opening:
            if self._interface is None:
                try:
                    is_known = self._needs_no_schema()
                    self._interface = (
                        ServerInterface() if is_known else request_interface(self.server, self._link.url())
                    )
                except EnvError as error:
                    raise as_config_error(error) from error
            return self._interface

    def _needs_no_schema(self) -> bool:
        """Whether the configuration makes the schemas unnecessary."""
        config = self.env_config
        says_action = config["format"] == "text" and config["action"] is not None
        return says_action and config["observation"] is not None

    @property
    def _link(self) -> ServerConnections:
        link = self._links.get(os.getpid())
        if link is None:
            made = ServerConnections(self.server, self._link_url)
            link = self._links.setdefault(made.pid, made)  # one step; a lock might be held as the process forks
            if link is made:
                weakref.finalize(self, link.close)
        return link

    @property
    def _how(self) -> Converters:
        if self._converters is None:
            self._converters = make_converters(self.interface, self.env_config, self.server.label)
        return self._converters

    def close(self) -> None:
        """Close this process's connections, and stop a server started here; the environment can be used again."""
        link = self._links.pop(os.getpid(), None)
        if link is not None:
            link.close()

    # The hooks

    def _tools(self) -> Sequence[Callable[..., Any] | Mapping[str, Any]] | None:
        return self.interface.tool_schemas() if self._how.format == "tools" else None

    def _system_prompt(self) -> str | None:
        given = self.env_config["action"]
        return self.interface.description(self.env_config["format"]) if given is None else None

    def check_task(self, task_data: Mapping[str, Any], name: str = "task_data") -> None:
        """Check a task, and before the first one also that the server answers.

        Raises:
            TaskError: The task cannot be played.
            ConfigError: As for :attr:`interface`, or ``env_config["action"]`` does not suit the server.
        """
        _ = self.tool_schemas
        super().check_task(task_data, name)

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        try:
            json.dumps(task_data, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise TaskError(f"task_data is sent to the server and must be plain JSON: {sentence_of(error)}") from error

    def _prepare_play(self, tasks: Sequence[Mapping[str, Any]], num_live: int) -> None:
        config = self.env_config
        try:
            self._link.url()  # a program that ended is started again: workers only know where it was
            if config["check_seed"]:
                arguments, write = self._reset_arguments(tasks[0]), self._how.shown_after_reset
                check_seed(self._link, self.server, class_path(type(self)), arguments, write)
            if config["check_capacity"]:
                self._link.check_capacity(num_live)
        except EnvError as error:
            raise as_config_error(error) from error

    def _reset_arguments(self, task_data: Mapping[str, Any]) -> dict[str, Any]:
        task = {key: value for key, value in task_data.items() if value is not None and key != "seed"}
        return {**self.env_config["reset"], **task}

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> State:
        arguments = {**self._reset_arguments(task_data), "seed": self.rng(session_id).getrandbits(31)}
        game = self._link.begin(session_id)
        try:
            answer = game.reset(arguments)
            text = self._how.shown_after_reset(answer["observation"])
        except BaseException:
            self._link.end(session_id)
            raise
        return {"pending": text, "num_calls": 0, "num_failed_calls": 0, "done": False}

    def _format_prompt(self, state: State, step: int) -> str | list[Message]:
        return state["pending"]

    def _step_episode(self, session_id: str, state: State, action: str) -> tuple[State, float, bool, dict[str, Any]]:
        given = Action(text=action)
        is_called = self._how.format == "tools"
        return self._step_action(
            session_id, state, with_calls(given, self.chat_format, self.tool_schemas) if is_called else given
        )

    def _step_action(self, session_id: str, state: State, action: Action) -> tuple[State, float, bool, dict[str, Any]]:
        if self._how.format != "tools":
            return self._play_text(session_id, state, action)
        if action.tool_calls:
            return self._play_calls(session_id, state, action)
        if action.finish_reason == "length":
            return self._invalid(state, _CUT)
        if self.env_config["answer"] == "end":
            return {**state, "pending": ""}, 0.0, True, self._counts(state)
        return self._invalid(state, _CALL)

    def _close_episode(self, session_id: str, state: State) -> None:
        self._link.end(session_id)

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:
        """Return rows to train on; the options are those of :class:`~.tasks.DatasetOptions`.

        Raises:
            ConfigError: The configuration or an option is invalid.
        """
        return task_dataset(cls, env_config, "train", options)

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:
        """Return rows to evaluate on, which share no seed with :meth:`get_train_dataset`.

        Arguments and errors are those of :meth:`get_train_dataset`.
        """
        return task_dataset(cls, env_config, "eval", options)

    # How a turn is played

    def _play_text(self, session_id: str, state: State, action: Action) -> tuple[State, float, bool, dict[str, Any]]:
        text = without_thoughts(action.text).strip()
        if not text:
            return self._invalid(state, "Invalid action: the answer is empty.")
        try:
            answer = self._link.game(session_id).step(self._how.read(text))
        except UnreadableActionError as error:
            return self._invalid(state, str(error))
        except RefusedActionError as error:
            return self._invalid(state, self._refusal(error))
        reward, done, info = outcome_of(answer, self.env_config["success"])
        pending = "" if done else self._how.shown_after_step(answer["observation"])
        return {**state, "pending": pending}, reward, done, info

    def _refusal(self, error: RefusedActionError) -> str:
        """Return the message to the agent about a rejected action.

        Raises:
            EnvError: The server failed for another reason than the action.
        """
        is_crash = error.code == "EXECUTION_ERROR" and self.env_config["execution_error"] == "failed"
        if is_crash or error.code not in _REFUSED:
            raise EnvError(
                f"the environment of {self.server.label} raised: {sentence_of(error)} ({error.code})"
            ) from error
        return cut(f"That action was rejected. {error}", self.env_config["max_result_length"])

    def _invalid(self, state: State, complaint: str) -> tuple[State, float, bool, dict[str, Any]]:
        info = {"invalid": True, **self._unsolved, **self._counts(state)}
        return {**state, "pending": complaint}, self.env_config["invalid_reward"], False, info

    def _play_calls(self, session_id: str, state: State, action: Action) -> tuple[State, float, bool, dict[str, Any]]:
        limits = {**self.env_config, "submit_tool": None}
        plan = plan_of(action, self.tool_schemas, limits, num_made=state["num_calls"])
        infos: list[dict[str, Any]] = []
        waiting, plan.made = plan.made, []
        while waiting and not any(result.done for result in plan.results if result is not None):
            index = waiting.pop(0)
            plan.results[index], info = self._called(session_id, plan.calls[index])
            plan.made.append(index)
            infos.append(info)
        plan.end_before(waiting)
        return self._played(state, plan, infos)

    def _called(self, session_id: str, call: ToolCall) -> tuple[ToolResult, dict[str, Any]]:
        """Execute one call: a step of the environment."""
        is_own = bool(self.interface.tools)  # else it is the tool that takes an action
        payload: Mapping[str, Any] = call.arguments
        if is_own:
            payload = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
        try:
            answer = self._link.game(session_id).step(payload)
        except RefusedActionError as error:
            return ToolResult(content=f"Error: {self._refusal(error)}", failed=True), {}
        text, failed = (
            result_of(answer["observation"]) if is_own else (self._how.shown_after_step(answer["observation"]), False)
        )
        reward, done, info = outcome_of(answer, self.env_config["success"])
        content = cut(text, self.env_config["max_result_length"])
        return ToolResult(content=content, reward=reward, done=done, failed=failed), info

    def _played(
        self, state: State, plan: Plan, infos: Sequence[Mapping[str, Any]]
    ) -> tuple[State, float, bool, dict[str, Any]]:
        is_invalid = not plan.made
        next_state = {
            **state,
            "pending": plan.messages(),
            "num_calls": state["num_calls"] + len(plan.made),
            "num_failed_calls": state["num_failed_calls"] + plan.num_failed,
        }
        reward = sum(result.reward for _, result in plan.answered())
        reward += self.env_config["invalid_reward"] if is_invalid else 0.0
        known = {**self._unsolved, **(infos[-1] if infos else {})}
        info = {**known, "invalid": is_invalid, **self._counts(next_state), "tool_failed": plan.num_failed > 0}
        return next_state, float(reward), plan.is_done, info

    @property
    def _unsolved(self) -> dict[str, bool]:
        """Return the next state after a turn that was not sent to the server."""
        return {} if self.env_config["success"] is None else {"success": False}

    def _counts(self, state: State) -> dict[str, int]:
        if self._how.format != "tools":
            return {}
        return {name: state[name] for name in ("num_calls", "num_failed_calls")}
