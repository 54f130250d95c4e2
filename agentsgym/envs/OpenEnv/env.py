"""An environment on an OpenEnv server; each session has a connection and an environment on the server.

::

    answer ─▶ action (a field, a template, JSON, or tool calls) ─▶ step ─▶ observation ─▶ text, or tool results
"""

from __future__ import annotations

import functools
import json
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Unpack

from agentsgym.credit.components import add_rewards
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.contract import State, Stepped
from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.OpenEnv import SPEC
from agentsgym.envs.OpenEnv.connections import ServerConnections
from agentsgym.envs.OpenEnv.conversion import (
    Format,
    ReadAction,
    UnreadableActionError,
    WriteObservation,
    action_reader,
    as_fields,
    observation_writer,
)
from agentsgym.envs.OpenEnv.interface import DatasetOptions, ServerInterface, request_interface, result_of, task_dataset
from agentsgym.envs.OpenEnv.server import OpenEnvServer, as_server, registered_server
from agentsgym.envs.OpenEnv.wire import RejectedActionError
from agentsgym.envs.Tools.calls import plan_calls
from agentsgym.envs.Tools.env import CUT_OFF, TOOL_FIELDS
from agentsgym.envs.Tools.results import ToolResult, cut
from agentsgym.errors import ConfigError, EnvError, TaskError
from agentsgym.fields import Field, choice_field, has_str_keys, is_bool, is_str, or_none
from agentsgym.texts import sentence_of
from agentsgym.tokens.calls.reader import read_answer
from agentsgym.types import Action, Message

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_SHARED_FIELDS = ("max_result_length", "max_calls_per_turn", "max_calls_per_episode", "invalid_reward")
_MAX_ERROR_CHARS = 4000  # of a server's error that is found before play
_ACTION_ERRORS = frozenset({"VALIDATION_ERROR", "EXECUTION_ERROR"})  # codes of errors about a single action


class _Conversion(NamedTuple):
    """The conversion of actions and observations, from the configuration and the server's schemas."""

    format: Format
    read: ReadAction
    shown_after_reset: WriteObservation
    shown_after_step: WriteObservation


class OpenEnvEnv(MultistepEnv):
    """An environment on an OpenEnv server, which is passed as ``server=`` or named in ``env_config["server"]``.

    A task is ``{"seed": int}`` and further arguments of the reset, such as ``{"split": "train", "index": 3}``. The
    environment is reset with a seed drawn from the session's random generator. A broken connection, a timeout, an
    invalid response or an exception of the environment fails the episode. If the server rejects an action as invalid,
    the turn is invalid, and the agent is shown the server's message.

    Keys of ``env_config`` in addition to the common ones:

    - ``server``: a name registered with :func:`~agentsgym.envs.OpenEnv.server.register_server`.
    - ``format``: with ``"text"``, the answer is one field of the action; with ``"json"``, it is a JSON object; with
      ``"tools"``, it calls the environment's tools, or the tool ``act``, whose arguments are the action, if there are
      none. ``"auto"`` means tools if there are any, text if the action has only one field or one required field, and
      otherwise JSON.
    - ``action``: the conversion of answers that are not tool calls: the name of the field for the text, a template such
      as ``{"message": "{text}"}``, or a callable from the text to the action's dict (None for an invalid action); None
      to use the server's schema.
    - ``observation``: the name of the field to show, a template such as ``"{board} {score}"``, or a callable from the
      observation's dict to a text; None for its only field, if that is a text, and otherwise the entire observation as
      JSON.
    - ``reset``: additional arguments of every reset.
    - ``success``: ``"reward"`` (the episode ended with a reward above 0), or the name of a field of the observation or
      its metadata that is true if the task is solved; None if success is unknown.
    - ``execution_error``: ``"failed"`` if an exception of the environment fails the episode, ``"invalid"`` if it means
      that the action was invalid, for environments that raise at illegal moves.
    - ``answer``: ``"invalid"`` if an answer without a tool call is an invalid action, ``"end"`` if it ends the episode.
    - ``max_result_length``, ``max_calls_per_turn``, ``max_calls_per_episode``, ``invalid_reward``: the same as in
      :class:`~agentsgym.envs.Tools.env.ToolEnv`, but also applied to observations and actions.
    - ``check_capacity``: whether to verify before play that the server supports enough concurrent episodes.
    - ``check_seed``: whether to verify before play, once per server, that two resets with one seed are equal.
    """

    spec = SPEC
    config_fields: ClassVar[Mapping[str, Field]] = {
        "server": Field(
            default=None, expected="a name registered with register_server, or None", valid=or_none(is_str)
        ),
        "format": choice_field("auto", "text", "json", "tools"),
        "action": Field(
            default=None,
            expected="a field's name, a template (a dict), a callable (text) -> dict | None, or None",
            valid=lambda value: (
                value is None or bool(value and is_str(value)) or callable(value) or has_str_keys(value)
            ),
        ),
        "observation": Field(
            default=None,
            expected="a field's name, a template (a str), a callable (observation) -> str, or None",
            valid=or_none(lambda value: bool(value and is_str(value)) or callable(value)),
        ),
        "reset": Field(default={}, expected="a dict of arguments", valid=has_str_keys),
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
        """Validate the configuration without connecting to the server.

        Args:
            tokenizer: The policy's tokenizer; None to record no tokens.
            env_config: The keys above.
            server: The server or its URL, in place of ``env_config["server"]``.

        Raises:
            ConfigError: The configuration is invalid, or it names a server in addition to ``server``.
            MissingDependencyError: The package ``websockets`` is not installed.
        """
        self._by_process: dict[int, ServerConnections] = {}  # by process id
        self._known_url: str | None = None  # the URL of a program that another process started
        self._interface: ServerInterface | None = None
        self._opening = threading.Lock()
        super().__init__(tokenizer, env_config)
        self.spec.check_installed()
        named = self.env_config["server"]
        if named is not None and server is not None:
            raise ConfigError(
                f"OpenEnvEnv got both server={server!r} and env_config['server']={named!r}: pass only one"
            )
        given = server if named is None else registered_server(named)
        self._given_server = None if given is None else as_server(given, "OpenEnvEnv(server=…)")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, which opens separate connections, to a program that runs here."""
        connections = self._by_process.get(os.getpid())
        url = self._known_url if connections is None else connections.known_url
        state: dict[str, Any] = {**super().__getstate__(), "_by_process": {}, "_known_url": url}
        return {name: value for name, value in state.items() if name not in {"_opening", "_conversion"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_opening": threading.Lock()})

    @property
    def server(self) -> OpenEnvServer:
        """The server.

        Raises:
            ConfigError: No server was passed or named.
        """
        if self._given_server is None:
            raise ConfigError(
                "OpenEnvEnv requires a server: pass one, as in OpenEnvEnv(server='http://localhost:8000'), or set "
                "env_config['server'] to a name registered with register_server"
            )
        return self._given_server

    @property
    def interface(self) -> ServerInterface:
        """The schemas and tools of the server's environment, requested at first use.

        Raises:
            ConfigError: The server cannot be reached, or its response is invalid.
        """
        with self._opening:
            if self._interface is None:
                config = self.env_config
                is_given = config["action"] is not None and config["observation"] is not None
                try:
                    self._interface = (
                        ServerInterface()  # the schemas are not needed
                        if is_given and config["format"] == "text"
                        else request_interface(self.server, self._connections.url())
                    )
                except EnvError as error:
                    raise ConfigError(sentence_of(error, _MAX_ERROR_CHARS)) from error
            return self._interface

    @property
    def _connections(self) -> ServerConnections:
        """This process's connections: recreated after a fork, and created once even if several threads request them."""
        connections = self._by_process.get(os.getpid())
        if connections is None:
            made = ServerConnections(self.server, self._known_url)
            connections = self._by_process.setdefault(made.pid, made)  # atomic; a lock might be held during a fork
            if connections is made:
                weakref.finalize(self, made.close)
        return connections

    @functools.cached_property
    def _conversion(self) -> _Conversion:
        config, interface = self.env_config, self.interface
        chosen = interface.format(config["format"])
        read = action_reader(config["action"], interface.action, self.server.label, chosen)
        write_reset, write_step = (
            observation_writer(config["observation"], schema, config["max_result_length"])
            for schema in (interface.reset_observation, interface.observation)
        )
        return _Conversion(chosen, read, write_reset, write_step)

    def close(self) -> None:
        """Close this process's connections, and stop a server that it started; the environment can be used again."""
        connections = self._by_process.pop(os.getpid(), None)
        if connections is not None:
            connections.close()

    # Hooks of the base class

    def _tools(self) -> Sequence[Callable[..., Any] | Mapping[str, Any]] | None:
        return self.interface.tool_schemas() if self._conversion.format == "tools" else None

    def _system_prompt(self) -> str | None:
        given = self.env_config["action"]
        return self.interface.description(self.env_config["format"]) if given is None else None

    def check_task(self, task_data: Mapping[str, Any], name: str = "task_data") -> None:
        """Check a task and, before the first one, that the server responds.

        Raises:
            TaskError: The task is invalid.
            ConfigError: See :attr:`interface`; or ``env_config["action"]`` does not match the server's schema.
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
            self._connections.url()  # restarts a program that exited, since workers have only its URL
            if config["check_seed"]:
                arguments, write = self._reset_arguments(tasks[0]), self._conversion.shown_after_reset
                self._connections.check_seed(class_path(type(self)), arguments, write)
            if config["check_capacity"]:
                self._connections.check_capacity(num_live)
        except EnvError as error:
            raise ConfigError(sentence_of(error, _MAX_ERROR_CHARS)) from error

    def _reset_arguments(self, task_data: Mapping[str, Any]) -> dict[str, Any]:
        task = {key: value for key, value in task_data.items() if value is not None and key != "seed"}
        return {**self.env_config["reset"], **task}

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> State:
        arguments = {**self._reset_arguments(task_data), "seed": self.rng(session_id).getrandbits(31)}
        connection = self._connections.begin(session_id)
        try:
            answer = connection.reset(arguments)
            text = self._conversion.shown_after_reset(answer["observation"])
        except BaseException:
            self._connections.end(session_id)
            raise
        return {"pending": text, "num_calls": 0, "num_failed_calls": 0, "done": False}

    def _format_prompt(self, state: State, step: int) -> str | list[Message]:
        return state["pending"]

    def _step_episode(self, session_id: str, state: State, action: str) -> Stepped:
        given = Action(text=action)
        if self._conversion.format == "tools":
            given = read_answer(given, self.chat_format, self.tool_schemas)
        return self._step_action(session_id, state, given)

    def _step_action(self, session_id: str, state: State, action: Action) -> Stepped:
        if self._conversion.format != "tools":
            return self._play_text(session_id, state, action)
        if action.tool_calls:
            return self._play_calls(session_id, state, action)
        if action.finish_reason == "length":
            return self._invalid(state, CUT_OFF)
        if self.env_config["answer"] == "end":
            return {**state, "pending": ""}, 0.0, True, self._counts(state)
        return self._invalid(state, "Call a tool.")

    def _play_text(self, session_id: str, state: State, action: Action) -> Stepped:
        text = action.text.strip()
        if not text:
            return self._invalid(state, "Invalid action: the answer is empty.")
        try:
            answer = self._connections.connection(session_id).step(self._conversion.read(text))
        except UnreadableActionError as error:
            return self._invalid(state, str(error))
        except RejectedActionError as error:
            return self._invalid(state, self._rejection_message(error))
        pending = "" if answer["done"] else self._conversion.shown_after_step(answer["observation"])
        return {**state, "pending": pending}, float(answer["reward"] or 0.0), answer["done"], self._info(answer)

    def _close_episode(self, session_id: str, state: State) -> None:
        self._connections.end(session_id)

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:
        """Make training rows; see :class:`~.tasks.DatasetOptions` for the options."""
        return task_dataset(cls, env_config, "train", options)

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:
        """Make evaluation rows, which share no seeds with the training rows; see :meth:`get_train_dataset`."""
        return task_dataset(cls, env_config, "eval", options)

    # How a turn is played

    def _rejection_message(self, error: RejectedActionError) -> str:
        """Return the message to the agent about a rejected action.

        Raises:
            EnvError: The server failed for a reason other than the action.
        """
        is_crash = error.code == "EXECUTION_ERROR" and self.env_config["execution_error"] == "failed"
        if is_crash or error.code not in _ACTION_ERRORS:
            raise EnvError(
                f"the environment of {self.server.label} raised: {sentence_of(error)} ({error.code})"
            ) from error
        return cut(f"That action was rejected. {error}", self.env_config["max_result_length"])

    def _info(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Extract the success, and whether the episode was truncated, from the response to a step."""
        known = {**as_fields(answer.get("metadata")), **answer["observation"]}
        success: str | None = self.env_config["success"]
        info: dict[str, Any] = {}
        if success == "reward":
            info["success"] = answer["done"] and float(answer["reward"] or 0.0) > 0
        elif success is not None:
            info["success"] = bool(known.get(success, False))
        if answer["done"] and known.get("truncated") is True:
            info["truncated"] = True
        return info

    def _invalid(self, state: State, complaint: str) -> Stepped:
        info = {"invalid": True, **self._unsolved, **self._counts(state)}
        return {**state, "pending": complaint}, self.env_config["invalid_reward"], False, info

    def _play_calls(self, session_id: str, state: State, action: Action) -> Stepped:
        limits = {**self.env_config, "submit_tool": None}
        plan = plan_calls(action, self.tool_schemas, limits, num_made=state["num_calls"])
        info: dict[str, Any] = self._unsolved
        has_tools = bool(self.interface.tools)  # otherwise, the arguments of the only tool are the action
        waiting, plan.made = plan.made, []
        while waiting and not any(result.done for result in plan.results if result is not None):
            index = waiting.pop(0)
            call, info = plan.calls[index], self._unsolved
            payload: Mapping[str, Any] = call.arguments
            if has_tools:
                payload = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
            try:
                answer = self._connections.connection(session_id).step(payload)
            except RejectedActionError as error:
                plan.results[index] = ToolResult(content=f"Error: {self._rejection_message(error)}", failed=True)
            else:
                seen = answer["observation"]
                text, failed = result_of(seen) if has_tools else (self._conversion.shown_after_step(seen), False)
                content, reward = cut(text, self.env_config["max_result_length"]), float(answer["reward"] or 0.0)
                plan.results[index] = ToolResult(content=content, reward=reward, done=answer["done"], failed=failed)
                info = {**info, **self._info(answer)}
            plan.made.append(index)
        plan.end_before(waiting)
        next_state = {
            **state,
            "pending": plan.messages(),
            "num_calls": state["num_calls"] + len(plan.made),
            "num_failed_calls": state["num_failed_calls"] + plan.num_failed,
        }
        is_invalid = not plan.made
        rewards = [result.reward for _, result in plan.calls_with_results()]
        rewards.append(self.env_config["invalid_reward"] if is_invalid else 0.0)
        info = {**info, "invalid": is_invalid, **self._counts(next_state), "tool_failed": plan.num_failed > 0}
        return next_state, add_rewards(rewards), plan.is_done, info

    @property
    def _unsolved(self) -> dict[str, bool]:
        """The entry ``success`` of ``info`` after a turn that was not sent to the server."""
        return {} if self.env_config["success"] is None else {"success": False}

    def _counts(self, state: State) -> dict[str, int]:
        if self._conversion.format != "tools":
            return {}
        return {name: state[name] for name in ("num_calls", "num_failed_calls")}
