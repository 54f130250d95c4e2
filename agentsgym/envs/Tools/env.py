"""An environment whose agent calls tools: functions, methods of an object, or tools of an MCP server.

::

    answer ─▶ calls ─▶ which can be made? ─▶ made in order, parallel tools concurrently ─▶ results, in call order
      └─ no calls: it is the final answer ─▶ reward, and the episode ends
"""

from __future__ import annotations

import os
import random
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from agentsgym.credit.components import GivenReward, add_rewards
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.boundary import as_answer, checked_reward, warn_once
from agentsgym.envs.contract import State, Stepped
from agentsgym.envs.conversation import check_tool_use
from agentsgym.envs.tool_schemas import schemas_of
from agentsgym.envs.Tools import SPEC
from agentsgym.envs.Tools.calls import Plan, make_calls, plan_calls
from agentsgym.envs.Tools.process import Process
from agentsgym.envs.Tools.results import ToolResult, as_text
from agentsgym.envs.Tools.sources import (
    McpServer,
    SessionTools,
    Source,
    Sources,
    as_sources,
    has_async,
    registered_tools,
)
from agentsgym.envs.Tools.tasks import MATCHES, DatasetOptions, matches, task_dataset
from agentsgym.errors import ConfigError, TaskError, did_you_mean, misspelled
from agentsgym.event_loop import awaited
from agentsgym.fields import Field, choice_field, is_int, is_number, is_seconds, is_str, is_strings, or_none, require
from agentsgym.texts import shown
from agentsgym.tokens.calls.reader import read_answer
from agentsgym.types import Action, Message, ToolCall

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

Answered = tuple[GivenReward, bool, dict[str, Any]]
"""The reward, whether the episode is over, and info."""
CUT_OFF = "That was cut off by the limit of a turn's length, and nothing of it was done. Write less at a time."
_CONTINUE = "That is not the end of the task. Call a tool or answer."
_COUNTS = ("num_calls", "num_failed_calls", "num_unreadable_calls", "num_repaired_calls", "num_raised_calls")

TOOL_FIELDS: dict[str, Field] = {
    "tools": Field(
        default=None,
        expected="a name or a list of names registered with register_tools, or None (pass functions, SessionTools and "
        "McpServer to the constructor, as in ToolEnv(tools=[add]))",
        valid=or_none(lambda value: is_str(value) or is_strings(value)),
    ),
    "parallel_tools": Field(
        default=[], expected="'all' or a list of tools' names", valid=lambda value: value == "all" or is_strings(value)
    ),
    "tool_timeout_s": Field(default=30.0, expected="a positive number or None", valid=or_none(is_seconds)),
    "setup_timeout_s": Field(default=60.0, expected="a positive number or None", valid=or_none(is_seconds)),
    "max_result_length": Field(default=10_000, expected="a positive int or None", valid=or_none(is_int(1))),
    "max_calls_per_turn": Field(default=16, expected="a positive int or None", valid=or_none(is_int(1))),
    "max_calls_per_episode": Field(default=None, expected="a positive int or None", valid=or_none(is_int(1))),
    "submit_tool": Field(default=None, expected="a tool's name or None", valid=or_none(is_str)),
    "answer_match": choice_field(*MATCHES),
    "answer_reward": Field(default=1.0, expected="a number", valid=is_number()),
    "wrong_answer_reward": Field(default=0.0, expected="a number", valid=is_number()),
    "call_reward": Field(default=0.0, expected="a number", valid=is_number()),
    "failed_call_reward": Field(default=0.0, expected="a number", valid=is_number()),
    "invalid_reward": Field(default=0.0, expected="a number", valid=is_number()),
}


class ToolEnv(MultistepEnv):
    """A question that the agent answers after calling tools.

    Tools are passed in, named in ``env_config``, or defined by a subclass.
    ``ToolEnv(tokenizer, tools=[add, look_up])`` plays tasks ``{"question": …, "answer": …}``. A subclass overrides
    :meth:`_tools` (typed functions), or :meth:`_call_tool` and :meth:`_answer` for full control of calls and answers,
    and sets rewards with :meth:`_reward_call` and :meth:`_reward_answer`.

    An episode ends with an answer without a call, with the submit tool, with a call or an answer whose result ends it,
    or with an exhausted budget. ``info`` contains counts over the episode so far: ``num_calls`` (made),
    ``num_failed_calls`` (made and failed, or not made), ``num_unreadable_calls`` and ``num_raised_calls`` (in which the
    tool raised an exception); ``tool_failed`` is whether a call failed in this turn.

    Keys of ``env_config`` in addition to the common ones:

    - ``tools``: names registered with :func:`~agentsgym.envs.Tools.sources.register_tools`.
    - ``parallel_tools``: tools, besides those marked ``@parallel``, whose calls run concurrently, or ``"all"``.
    - ``tool_timeout_s``: the time limit for one call; None for no limit.
    - ``setup_timeout_s``: the time limit for creating, and for closing, a session's object; None for no limit.
    - ``max_result_length``: the maximum number of characters in one result; longer results are truncated, with a note.
    - ``max_calls_per_turn``: the maximum number of calls per turn; further ones are not made.
    - ``max_calls_per_episode``: the maximum number of calls per episode; a further call ends the episode.
    - ``submit_tool``: the name of a tool that accepts the answer; a turn without a call is then invalid.
    - ``answer_match``: the comparison with the task's answer.
    - ``answer_reward``, ``wrong_answer_reward``: the rewards for a right and a wrong answer, if the task has one.
    - ``call_reward``, ``failed_call_reward``: the rewards for a call that succeeded, and for a call that failed, was
      not made or could not be parsed.
    - ``invalid_reward``: the reward for a turn in which no call could be made.
    """

    spec = SPEC
    config_fields: ClassVar[Mapping[str, Field]] = TOOL_FIELDS
    never_called: ClassVar[Mapping[str, str]] = {"_step_episode": "override _step_action, or _call_tool and _answer"}

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        env_config: dict[str, Any] | None = None,
        *,
        tools: Sources = (),
    ) -> None:
        """Validate the configuration and the tools; servers are opened later.

        Args:
            tokenizer: The tokenizer, as for :class:`MultistepEnv`.
            env_config: The common keys and those of :data:`TOOL_FIELDS`.
            tools: A function, :class:`SessionTools` or :class:`McpServer`, or a list of these, in addition to the tools
                that ``env_config["tools"]`` names.

        Raises:
            ConfigError: A key or a tool is invalid, or calls rendered by the chat template cannot be parsed.
            TemplateError: The chat template does not support exact tokens, in general or for tool results.
        """
        self._processes: dict[int, Process] = {}  # by process id
        self._sources: tuple[Source, ...] = as_sources(tools, f"{type(self).__name__}(tools=…) accepts")
        super().__init__(tokenizer, env_config)
        check_tool_use(self.tokenizer, self.env_config)
        self._sources += registered_tools(self.env_config["tools"])

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Add ``question`` and ``answer``, which are validated here, to a subclass's ``task_fields``.

        Raises:
            ConfigError: See :class:`MultistepEnv`.
        """
        super().__init_subclass__(**kwargs)
        if cls.task_fields is not None and cls._check_task is ToolEnv._check_task:
            cls.task_fields = tuple(dict.fromkeys(("question", "answer", *cls.task_fields)))

    def __getstate__(self) -> dict[str, Any]:
        """Omit servers and threads, which another process opens itself."""
        return {**super().__getstate__(), "_processes": {}}

    # Methods that a subclass may override

    def _tools(self) -> Any:
        """Return the tools: by default, those passed to the constructor and those named in ``env_config``.

        A subclass returns a typed function, :class:`SessionTools` or :class:`McpServer`, or a list of these; or JSON
        schemas of tools that its :meth:`_call_tool` implements. The method is called once per process, and again after
        :meth:`close`.
        """
        return self._sources

    def _call_tool(self, session_id: str, state: State, call: ToolCall) -> ToolResult | Awaitable[ToolResult]:
        """Make one call, whose arguments match its schema; an exception becomes the result of a failed call.

        The method must not change ``state``: it runs in a separate thread if there is a time limit, and concurrently
        with other calls if the tool is parallel. An :class:`EnvError` fails the episode.
        """
        value = self._process.tool(session_id, call.name).call(call.arguments, self.env_config["tool_timeout_s"])
        return value if isinstance(value, ToolResult) else ToolResult(content=as_text(value))

    def _answer(self, session_id: str, state: State, text: str) -> Answered | Awaitable[Answered]:
        """Score an answer without calls; returns (reward, done, info).

        ``info["success"]`` is whether the answer is right. If the episode continues, ``info["reply"]`` is the next
        observation.
        """
        reward = checked_reward("_reward_answer", awaited(self._reward_answer(state, text)))
        return reward, True, {"success": self._is_right(state, text)}

    def _reward_call(self, state: State, call: ToolCall, result: ToolResult) -> GivenReward | Awaitable[GivenReward]:
        """Return the reward for a call, in addition to its result's: ``call_reward`` or ``failed_call_reward``.

        Like any reward it may be a dict of numbers by name, and so may that of :meth:`_reward_answer`. Both methods,
        :meth:`_call_tool` and :meth:`_answer` may be async.
        """
        return self.env_config["failed_call_reward" if result.failed else "call_reward"]

    def _reward_answer(self, state: State, text: str) -> GivenReward | Awaitable[GivenReward]:
        """Return the reward for an answer, ``answer_reward`` or ``wrong_answer_reward``; 0 if the task has none."""
        is_right = self._is_right(state, text)
        if is_right is None:
            return 0.0
        return self.env_config["answer_reward" if is_right else "wrong_answer_reward"]

    def _is_right(self, state: State, text: str) -> bool | None:
        """Whether an answer matches the task's ``"answer"`` (or one in its list); None if the task has none."""
        expected = state["task"].get("answer")
        if expected is None:
            return None
        return matches(text.strip(), expected, self.env_config["answer_match"])

    def _question(self, state: State) -> str | list[Message]:
        """Return the first observation: the task's ``"question"``."""
        return state["task"]["question"]

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        question = task_data.get("question")
        if not isinstance(question, str) or not question:
            given = shown(question) if "question" in task_data else f"the keys {shown(sorted(map(str, task_data)))}"
            raise TaskError(f"task_data needs a 'question' (a str), got {given}")
        answer, near = task_data.get("answer"), [key for key in task_data if misspelled(key, ["answer"])]
        if near and answer is None and type(self)._reward_answer is ToolEnv._reward_answer:
            warn_once("task_data[%r] is not compared with the agent's answer; did you mean 'answer'?", near[0])
        options: list[Any] = [*answer] if isinstance(answer, list | tuple) else [answer]
        is_valid = bool(options) and all(isinstance(one, str | int | float) for one in options)
        kinds = "a string, a number or a list of these"
        require("task_data['answer']", answer, or_none(lambda _: is_valid), kinds, TaskError)

    # The hooks of an environment

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> State:
        self._process.begin(session_id, task_data, self.rng(session_id))
        return {"task": task_data, "pending": None, **dict.fromkeys(_COUNTS, 0), "done": False}

    def _format_prompt(self, state: State, step: int) -> str | list[Message]:
        return self._question(state) if state["pending"] is None else state["pending"]

    def _step_episode(self, session_id: str, state: State, action: str) -> Stepped:
        return self._step_action(
            session_id, state, read_answer(Action(text=action), self.chat_format, self.tool_schemas)
        )

    def _step_action(self, session_id: str, state: State, action: Action) -> Stepped:
        if action.tool_calls:
            return self._play_calls(session_id, state, action, self.tool_schemas)
        if action.finish_reason == "length":
            return self._reject_turn(state, CUT_OFF)
        if submit := self.env_config["submit_tool"]:
            return self._reject_turn(state, f"To answer, call {submit}.")
        return self._play_answer(session_id, state, action.text)

    def _close_episode(self, session_id: str, state: State) -> None:
        self._process.end(session_id)

    @property
    def tool_schemas(self) -> tuple[dict[str, Any], ...]:
        """The JSON schemas of the tools and the submit tool, determined at first use.

        Raises:
            ConfigError: There are no tools, or a tool has no schema or no implementation.
        """
        if self._tool_schemas is None:
            process = self._process
            if not process.tools:
                raise ConfigError(
                    f"{self._name} has no tools: pass tools=[…], name registered tools in env_config['tools'], or "
                    "override _tools"
                )
            tools: list[Any] = []
            for source in process.tools:
                if isinstance(source, McpServer):
                    tools += process.schemas_of(source)
                else:
                    tools += source.methods() if isinstance(source, SessionTools) else [source]
            if submit := self.env_config["submit_tool"]:
                answer = {"type": "string", "description": "The final answer."}
                parameters = {"type": "object", "properties": {"answer": answer}, "required": ["answer"]}
                about = "Give the final answer and end the task."
                function = {"name": submit, "description": about, "parameters": parameters}
                tools.append({"type": "function", "function": function})
            schemas = schemas_of(tools, self._name)
            names = [schema["function"]["name"] for schema in schemas]
            parallel = self.env_config["parallel_tools"]
            unknown = [] if parallel == "all" else [name for name in parallel if name not in names]
            if unknown:
                raise ConfigError(
                    f"env_config['parallel_tools'] names the unknown tool {shown(unknown[0])}"
                    f"{did_you_mean(unknown[0], names)}"
                )
            bare: list[Any] = [one for one in process.tools if isinstance(one, Mapping)]
            if bare and not self._makes_calls():
                name = schemas_of(bare, self._name)[0]["function"]["name"]
                raise ConfigError(
                    f"{self._name} has only a schema for the tool {name!r}: override _call_tool to implement it"
                )
            self._tool_schemas = schemas
        return self._tool_schemas

    def check_task(self, task_data: Mapping[str, Any], name: str = "task_data") -> None:
        """Check a task and, before the first one, the tools.

        Raises:
            TaskError: The task is invalid.
            ConfigError: The tools are invalid (see :attr:`tool_schemas`), or a server cannot be started.
        """
        _ = self.tool_schemas
        super().check_task(task_data, name)
        for source in self._process.tools:
            if isinstance(source, SessionTools):
                source.arguments(task_data, random.Random(0))

    def close(self) -> None:
        """Close the servers and threads of this process; the environment may be used again."""
        process = self._processes.pop(os.getpid(), None)
        if process is not None:
            process.close()

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:
        """Make training rows from a table; see :class:`~.tasks.DatasetOptions` for the options."""
        return task_dataset(cls, env_config, "train", options)

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:
        """Make evaluation rows, whose questions are not in the training rows; see :meth:`get_train_dataset`."""
        return task_dataset(cls, env_config, "eval", options)

    # How a turn is processed

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _process(self) -> Process:
        """This process's resources: recreated after a fork, and created once even if several threads request them."""
        process = self._processes.get(os.getpid())
        if process is None:
            given = self._tools()
            tools: list[Any] = [*given] if isinstance(given, list | tuple) else [] if given is None else [given]
            functions = [one for one in tools if not isinstance(one, Mapping)]
            as_sources(functions, f"{self._name}._tools() must return JSON schemas,")
            made = Process(tools, self.env_config["setup_timeout_s"], self.env_config["parallel_tools"])
            process = self._processes.setdefault(made.pid, made)  # atomic; a lock might be held during a fork
            self.has_coroutines = type(self).has_coroutines or has_async(functions)
            if process is made:
                weakref.finalize(self, process.close)
        return process

    def _play_calls(
        self, session_id: str, state: State, action: Action, schemas: Sequence[Mapping[str, Any]]
    ) -> Stepped:
        plan = plan_calls(action, schemas, self.env_config, num_made=state["num_calls"])
        if not plan.calls:
            return self._reject_turn(state, plan.complaint, num_unreadable=plan.num_unreadable)
        hook: Callable[[ToolCall], ToolResult] = lambda call: awaited(self._call_tool(session_id, state, call))  # noqa: E731
        make_calls(plan, hook, self._process, session_id, self.env_config, is_own=self._makes_calls())
        rewards: list[GivenReward] = [
            add_rewards(
                [result.reward, checked_reward("_reward_call", awaited(self._reward_call(state, call, result)))]
            )
            for call, result in plan.calls_with_results()
        ]
        rewards.append(plan.num_unreadable * self.env_config["failed_call_reward"])
        next_state = self._after(state, plan)
        done, success = plan.is_done, plan.success
        info: dict[str, Any] = {}
        if plan.submitted is not None:
            reward, _, info = as_answer("_answer", awaited(self._answer(session_id, state, plan.submitted)))
            rewards.append(reward)
            done, success = True, info.get("success")
        is_invalid = not plan.made and plan.submitted is None
        if is_invalid:
            rewards.append(self.env_config["invalid_reward"])
        counts = self._counts(next_state) | {"tool_failed": plan.num_failed > 0, "invalid": is_invalid}
        return next_state, add_rewards(rewards), done, {"success": success, **counts, **info}

    @classmethod
    def _makes_calls(cls) -> bool:
        """Whether the class overrides :meth:`_call_tool`."""
        return cls._call_tool is not ToolEnv._call_tool

    def _after(self, state: State, plan: Plan) -> State:
        return {
            **state,
            "pending": plan.messages(),
            "num_calls": state["num_calls"] + len(plan.made),
            "num_failed_calls": state["num_failed_calls"] + plan.num_failed,
            "num_unreadable_calls": state["num_unreadable_calls"] + plan.num_unreadable,
            "num_repaired_calls": state["num_repaired_calls"] + sum(one.repair is not None for one in plan.calls),
            "num_raised_calls": state["num_raised_calls"] + plan.num_raised,
        }

    def _play_answer(self, session_id: str, state: State, text: str) -> Stepped:
        reward, done, info = as_answer("_answer", awaited(self._answer(session_id, state, text)))
        next_state = {**state, "pending": [{"role": "user", "content": str(info.get("reply", _CONTINUE))}]}
        return next_state, reward, done, {**self._counts(state), "tool_failed": False, **info}

    def _reject_turn(self, state: State, complaint: str, num_unreadable: int = 0) -> Stepped:
        next_state = {
            **state,
            "pending": [{"role": "user", "content": complaint}],
            "num_unreadable_calls": state["num_unreadable_calls"] + num_unreadable,
        }
        info = {"success": False, "invalid": True, **self._counts(next_state), "tool_failed": num_unreadable > 0}
        reward = self.env_config["invalid_reward"] + num_unreadable * self.env_config["failed_call_reward"]
        return next_state, reward, False, info

    def _counts(self, state: State) -> dict[str, int]:
        return {name: state[name] for name in _COUNTS}
