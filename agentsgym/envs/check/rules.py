"""Check tasks, an environment's tools and recorded episodes, without playing anything."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.check.plays import observations
from agentsgym.envs.check.probe import HookProbe, place_of_tool
from agentsgym.errors import TemplateError, did_you_mean
from agentsgym.texts import sentence_of, shown
from agentsgym.tokens.calls.reader import read_answer, reader_of
from agentsgym.tokens.transcript import Transcript
from agentsgym.tokens.turn_ends import common_prefix
from agentsgym.tokens.unknown_words import named, unknown_id, unknown_words
from agentsgym.types import Action, Message, StopReason, ToolCall, Trajectory

Add = Callable[..., None]
_MIN_RULES, _MIN_REPEATED = 40, 16  # characters; shorter texts may repeat by chance
_MIN_SHARED = 80  # minimum length of a text shared by all prompts; a board, a question or a reminder is shorter
_MIN_WORDS = 4  # minimum number of words in a line of rules; a line of a board has fewer
_MAX_MODEL_LENGTH = 10**7  # a larger ``model_max_length`` means no limit


def check_task_data(task: Mapping[str, Any], name: str, add: Add) -> None:
    """Find task values that a dataset row cannot store, each key once for all tasks."""
    for key, value in task.items():
        where = f"{name}[{key!r}]"
        try:
            back = json.loads(json.dumps({key: value}, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            reason = sentence_of(error)
            text = f"{where} cannot be written as JSON, as required for a dataset row: {reason}"
            add("json-tasks", "", text, about=f"{key!r}: {reason}")
            continue
        if back != {key: value}:
            given = f"{shown(value)} comes back as {shown(back.get(key))}"
            text = f"{where} changes when it is stored as JSON: {given}; use lists and string keys"
            add("json-tasks", "", text, about=f"{key!r}: {type(value).__name__}")


def check_tools(env: MultistepEnv, trajectories: Sequence[Trajectory], add: Add) -> None:
    """Find tools that the agent does not learn about: without a description, or not rendered by the chat template."""
    tools: dict[str, Any] = {tool["function"]["name"]: tool["function"] for tool in env.tool_schemas}
    for name, tool in tools.items():
        if not tool["description"].strip():
            text = f"the tool {name!r} has no description: describe in its docstring what it does"
            add("tools", "_tools", text, False, about=name)
    tokenizer: Any = env.tokenizer
    prompted = [one for one in trajectories if one.turns and one.token_ids]
    if tokenizer is None or not tools or not prompted:
        return
    first = prompted[0]
    prompt = tokenizer.decode(list(first.token_ids[: first.turns[0].start]))
    missing = [name for name in tools if name not in prompt]
    if missing:
        add(
            "tools",
            "_tools",
            f"the chat template does not render the tool {missing[0]!r}, so the policy does not see it: use a "
            "tokenizer whose template supports tools",
        )


def read_back(env: MultistepEnv, trajectories: Sequence[Trajectory], add: Add) -> tuple[int, str]:
    """Parse recorded calls from their tokens; return their number, and a call in the format that is parsed."""
    chat_format, num_calls = env.chat_format, 0
    if chat_format is None or not env.tool_schemas or not chat_format.separates_calls:
        return 0, ""
    for one in trajectories:
        for turn in one.turns:
            made = [call["function"] for call in one.messages[turn.message_index].get("tool_calls", ())]
            ids = one.token_ids[turn.start : turn.stop]
            read = read_answer(Action(text="", token_ids=ids), chat_format, env.tool_schemas).tool_calls if made else ()
            if [(call.name, call.arguments) for call in read] != [(call["name"], call["arguments"]) for call in made]:
                text = f"the call {shown(made[0])} is written as {shown(chat_format.decode(ids))}, but parsed as "
                add("tools", "_tools", f"{text}{shown([*read])}", False, about=made[0]["name"])
            num_calls += len(made)
    return num_calls, reader_of(chat_format).example


def check_calls(env: MultistepEnv, probe: HookProbe) -> None:
    """Find tools whose every call raised an exception, which only the agent reads."""
    for name, errors in probe.calls.items():
        last = errors[-1]
        if last is not None and None not in errors:
            times = "its only call" if len(errors) == 1 else f"all {len(errors)} calls"
            why = f"{type(last).__name__}: {sentence_of(last)}"
            text = f"the tool {name!r} raised in {times}, at last {why}"
            probe.add("tools", "_tools", text, is_error=False, place=place_of_tool(env, [name]), about=name)


def check_prompts(trajectory: Trajectory, add: Add) -> None:
    """Find prompts that repeat earlier messages, which the conversation already contains."""
    texts = ["\n".join(message["content"] for message in one) for one in observations(trajectory)]
    roles = [message["role"] for one in observations(trajectory)[1:] for message in one]
    if "system" in roles:
        text = "_format_prompt returns a system message after the first turn: return it once, from _system_prompt"
        add("prompt-purity", "_format_prompt", text, False)
    if any(turn.prompt_messages is not None for turn in trajectory.turns):
        return  # a rewritten history drops what a prompt repeats
    for k, (earlier, text) in enumerate(itertools.pairwise(texts)):
        if k and _holds(text, texts[0], _MIN_RULES):
            add("prompt-purity", "_format_prompt", _repeats(k + 1, "the entire first prompt", texts[0]), False)
            return
        if k + 2 < len(texts) and _holds(text, earlier, _MIN_REPEATED) and _holds(texts[k + 2], text, _MIN_REPEATED):
            add("prompt-purity", "_format_prompt", _repeats(k + 1, "the entire conversation before it", earlier), False)
            return
    rules = _in_every(texts)
    if rules:
        add("prompt-purity", "_format_prompt", _repeats(1, "rules that are in every prompt", rules), False)


def check_tokens(env: MultistepEnv, trajectory: Trajectory, add: Add, *, with_answers: bool) -> None:
    """Find first prompts that use up the token budget, and words that the tokenizer cannot encode."""
    tokenizer: Any = env.tokenizer
    if tokenizer is None:
        return
    num_prompt = trajectory.turns[0].start if trajectory.turns else len(trajectory.token_ids)
    for limit, name in _limits(env):
        if num_prompt >= limit or (not trajectory.turns and trajectory.stop_reason is StopReason.MAX_TOKENS):
            add("token-budget", "_format_prompt", f"the first prompt has {num_prompt} tokens and {name} is {limit}")
        elif num_prompt > limit / 2:
            text = f"the first prompt has {num_prompt} tokens, more than half of {name} = {limit}"
            add("token-budget", "_format_prompt", text, False)
    if unknown_id(tokenizer) in trajectory.token_ids:
        texts = [message["content"] for one in observations(trajectory) for message in one]
        given = [turn for turn in trajectory.turns if with_answers and not turn.exact]
        answers = [trajectory.messages[turn.message_index]["content"] for turn in given]
        shown_words = unknown_words(tokenizer, texts)
        own_words = [word for word in unknown_words(tokenizer, answers) if word not in shown_words]
        for what, words in (("the prompts contain", shown_words), ("the agent writes", own_words)):
            if words:
                text = f"the tokenizer cannot encode words that {what}, such as {named(words)}"
                add("token-budget", "_format_prompt", text, False, about=what)


def check_template(env: MultistepEnv, messages: Sequence[Message], add: Add) -> None:
    """Find text answers that are recorded differently from how the chat template renders them in history."""
    tokenizer: Any = env.tokenizer
    if tokenizer is None or not tokenizer.chat_template or env.env_config["history"] == "rerender":
        return
    chat_format: Any = env.chat_format
    try:
        transcript = _as_text(chat_format, messages)
        printed = tokenizer.encode(chat_format.printed(transcript.messages), add_special_tokens=False)
    except TemplateError:
        return  # the environment's messages are fine: otherwise the episode fails by itself
    # The last answer may end with a different token than earlier ones (gpt-oss); text may be tokenized differently.
    end, pairs = chat_format.end_of_turn_id, [*zip_longest(transcript.token_ids, printed)]
    recorded, printed = (
        tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for ids in (transcript.token_ids, printed)
    )
    if recorded != printed and any(one not in (other, end) for one, other in pairs):
        start = len(common_prefix(recorded, printed))
        text = (
            f"after {shown(recorded[max(0, start - 40) : start], 60)}, text answers are recorded with "
            f"{shown(recorded[start:], 60)}, but the chat template renders {shown(printed[start:], 60)}, and a policy "
            "learns what is recorded from demonstrations: pass reasoning separately (Action.reasoning), or set "
            "tokenizer.chat_template to one whose generation prompt is the same as the text before answers in history"
        )
        add("chat-template", "", text, False)


def _as_text(chat_format: Any, messages: Sequence[Message]) -> Transcript:
    """Record a conversation as if the agent had answered in text, up to the next prompt."""
    transcript, start = Transcript(chat_format), 0
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            transcript.observe(messages[start:index])
            calls = [
                ToolCall(name=call["function"]["name"], arguments=call["function"]["arguments"], id=call["id"])
                for call in message.get("tool_calls", ())
            ]
            thoughts = message.get("reasoning_content")
            transcript.act(Action(text=message["content"], reasoning=thoughts, tool_calls=calls))
            start = index + 1
    transcript.observe([*messages[start:]] or [{"role": "user", "content": "Go on."}])
    return transcript


def check_roles(env: MultistepEnv, probe: HookProbe, trajectories: Sequence[Trajectory]) -> None:
    """Find rewards for unknown roles, and episodes with several roles but without rewards by role."""
    for one in trajectories:
        roles = sorted({str(turn.role) for turn in one.turns})
        has_rewards = one.final_reward != 0 or any(one.turn_rewards)
        if has_rewards and len(roles) > 1 and not (one.final_rewards or one.failed):
            text = (
                f"an episode has turns of the roles {' and '.join(map(shown, roles))}, but no rewards by role, which "
                "training requires: return info['rewards'] = {role: reward} from _step_episode in each step with a "
                "reward"
            )
            probe.add("roles", "_step_episode", text, is_error=True)
    known = {*env.roles, *probe.roles} - {None}
    has_short_episodes = bool(known) and all(one.num_turns <= len(known) for one in trajectories)
    for role, hook in probe.rewarded_roles.items():
        if role in known:
            continue
        hint = did_you_mean(role, map(str, known))
        may_be_right = has_short_episodes and not env.roles and not hint.startswith("; did you mean")
        turns = f"the roles are {shown(sorted(map(str, known)))}" if known else "_role returns no role"
        if may_be_right:  # an episode may end before a role moves
            turns += " in these episodes: list all of them in the class attribute 'roles'"
        text = f"info['rewards'] has a reward for the role {shown(role)}, but {turns}"
        probe.add("roles", hook, text, is_error=not may_be_right, about=shown(role))


def check_failure(trajectory: Trajectory, add: Add) -> None:
    """Find the errors of failed episodes, and episodes that could not be closed."""
    if trajectory.error is not None:
        place, _, rest = trajectory.error.partition("\n")
        why = rest.partition("\n")[0]
        add("failed", "", f"an episode failed, {place}: {why}", about=why)
    if trajectory.num_close_errors:
        add("failed", "_close_episode", "_close_episode raised: resources of the episode may leak", False)


def _limits(env: MultistepEnv) -> Iterator[tuple[int, str]]:
    budget = env.env_config["max_trajectory_tokens"]
    if budget is not None:
        yield budget, "env_config['max_trajectory_tokens']"
    length: Any = getattr(env.tokenizer, "model_max_length", None)
    if isinstance(length, int) and length < _MAX_MODEL_LENGTH:
        yield length, "tokenizer.model_max_length"


def _holds(text: str, earlier: str, min_length: int) -> bool:
    return len(earlier) >= min_length and text != earlier and earlier in text


def _in_every(texts: Sequence[str]) -> str:
    """Return the text that all prompts of an episode share: lines, a beginning or an end; empty if none."""
    if len(texts) < 2:
        return ""
    lines = set[str].intersection(*({line.strip() for line in text.splitlines()} for text in texts))
    same = "\n".join(line for line in dict.fromkeys(map(str.strip, texts[0].splitlines())) if line in lines)
    begins, ends = _common_start(texts), _common_start([text[::-1] for text in texts])[::-1]
    for part in (same, begins, ends):
        prose: list[str] = []
        for line in part.splitlines():
            words = [word.strip(".,;:!?()'\"") for word in line.split()]
            if sum(map(str.isalpha, words)) >= _MIN_WORDS:
                prose.append(line)
        if len("\n".join(prose)) >= _MIN_SHARED:
            return "\n".join(prose)
    return ""


def _common_start(texts: Sequence[str]) -> str:
    equal = itertools.takewhile(lambda letters: len({*letters}) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in equal)


def _repeats(turn: int, what: str, text: str) -> str:
    return (
        f"the prompt of turn {turn} repeats {what}, {shown(text, 60)}: _format_prompt must return only what is new, "
        "since the conversation keeps the rest"
    )
