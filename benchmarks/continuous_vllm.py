"""Measure rollouts on a real vLLM on this CPU: each episode at its own pace, beside all of them in rounds.

A tiny model, 64 episodes, in which the number of turns, the tokens of each turn and the environment's time are drawn
from lognormal distributions. How much is won depends on the longest of the 64, so that several sets are drawn. Each is
measured in four ways, one after the other in one process, so that what counts is their ratio:

- *lockstep*: all live episodes in one call of ``LLM.generate`` a round;
- *continuous*: ``VLLMPolicyAgent``, one request for each turn, on the stepped engine;
- *full*: no environment at all, the same requests with their whole prompts, all given to the engine at once (turns
  cannot be: each follows the one before it);
- *fed*: a bare loop over the engine, without agent, environment, tokenizer or threads. It steps the engine while any
  request is open and adds a turn when the one before it has ended and its environment's time is over: the engine kept
  as full as these episodes let it be. *Continuous* is measured against it.

Run it with the interpreter that has vLLM (``make .venv-vllm/.installed``), on a machine that is otherwise idle.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
# torch, transformers and vLLM leave parts of their signatures untyped.

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # TRL's colocated engine runs in the process, too
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch

from agentsgym import Action, Agent, MultistepEnv, TurnRequest
from agentsgym.agents.vllm.policy import SteppedEngine, VLLMPolicyAgent
from agentsgym.rollouts.thread_pool import EnvThreadPool
from agentsgym.tiny import tiny_policy
from benchmarks.scaling_engine import Episode, Lognormal, Task

WORDS = ["higher lower guess a number"]
WAITS_S = (0.001, 0.1, 0.5)  # medians of an environment's step

Plan = list[Episode]


def make_plan(num_episodes: int, median_wait_s: float, draw: int) -> Plan:
    """Draw episodes: about 7 turns of about 35 tokens, the longest more than twice as long."""
    task = Task(
        turns=Lognormal(median=6, sigma=0.6, most=16),
        tokens=Lognormal(median=24, sigma=0.9, most=120),
        env_s=Lognormal(median=median_wait_s, sigma=0.8, most=40 * median_wait_s),
        prompt=0,
        observation=0,
    )
    return [task.drawn_by(random.Random(f"{draw} {number}")) for number in range(num_episodes)]


class PlannedEnv(MultistepEnv):
    """Waits as planned, with the same observation each turn."""

    def __init__(self, tokenizer: Any, plan: Plan) -> None:
        super().__init__(tokenizer, {"max_steps_per_episode": 50})
        self.plan = plan
        self.indices: dict[str, int] = {}

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        self.indices[session_id] = task_data["index"]
        return {"done": False, "index": task_data["index"], "turn": 0}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return "higher lower guess a number"

    def _step_episode(
        self, session_id: str, state: dict[str, Any], action: str
    ) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        turns = self.plan[state["index"]]
        time.sleep(turns[state["turn"]].env_s)
        return {**state, "turn": state["turn"] + 1}, 0.0, state["turn"] + 1 == len(turns), {}


class Budgets:
    """Knows how many tokens each session's next turn has."""

    def __init__(self, env: PlannedEnv) -> None:
        self.env = env

    def of(self, request: TurnRequest) -> tuple[int, Any]:
        """The tokens of this turn, and the state that the next request bears."""
        turn = request.agent_state or 0
        return self.env.plan[self.env.indices[request.session_id]][turn].tokens, turn + 1


class Lockstep(Agent):
    """All live sessions in one call."""

    def __init__(self, llm: Any, env: PlannedEnv) -> None:
        self.llm, self.budgets = llm, Budgets(env)
        self.params = type(llm.get_default_sampling_params())

    def act(self, requests: Sequence[TurnRequest]) -> list[Action]:
        """Answer them together."""
        sizes = [self.budgets.of(request) for request in requests]
        params = [self.params(max_tokens=size, **options()) for size, _ in sizes]
        prompts = [{"prompt_token_ids": list(request.token_ids)} for request in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        actions: list[Action] = []
        for output, (_, state) in zip(outputs, sizes, strict=True):
            answer = output.outputs[0]
            logprobs = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            actions.append(Action(text="a", token_ids=list(answer.token_ids), logprobs=logprobs, agent_state=state))
        return actions


class Continuous(VLLMPolicyAgent):
    """The library's own agent, with the planned budgets in the place of ``max_turn_tokens``."""

    def __init__(self, generation: Any, tokenizer: Any, env: PlannedEnv) -> None:
        super().__init__(generation, tokenizer)
        # Without stop tokens an answer is as long as its budget, as in the other ways of playing.
        generation.generation_kwargs = {"ignore_eos": True, "stop": []}
        self._engine = SteppedEngine(self.sampling)
        self.budgets = Budgets(env)

    async def aact(self, request: TurnRequest) -> Action:
        """Answer one turn."""
        size, state = self.budgets.of(request)
        sampled = await self._engine.sample(request.session_id, list(request.token_ids), size)
        return Action(text="a", token_ids=sampled.token_ids, logprobs=sampled.logprobs, agent_state=state)


def options() -> dict[str, Any]:
    """How tokens are drawn: an answer is as long as its budget."""
    return {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "detokenize": False}


def make_engine(folder: Path) -> tuple[Any, Any, Any]:
    """A vLLM of a tiny random model, its tokenizer, and what of TRL's engine the agent reads."""
    from vllm import LLM  # pyright: ignore  # noqa: PLC0415  # not in the environment that checks types

    model, tokenizer = tiny_policy(WORDS, hidden_size=128, num_heads=4, max_positions=2048)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    llm: Any = LLM(
        str(folder), dtype="float32", enforce_eager=True, max_model_len=2048, block_size=32,
        logprobs_mode="processed_logprobs", max_num_seqs=256,
    )  # fmt: skip
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, device=torch.device("cpu"), process_index=0)
    generation = SimpleNamespace(
        llm=llm, model=model, accelerator=accelerator, mode="colocate", tensor_parallel_size=1, enable_sleep_mode=False,
        repetition_penalty=1.0, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, logprobs=0,
        structured_outputs_regex=None, generation_kwargs={"ignore_eos": True},
    )  # fmt: skip
    return llm, tokenizer, generation


def play(env: PlannedEnv, agent: Agent, num_episodes: int) -> tuple[float, list[Any]]:
    """The seconds of a rollout of all episodes, their environments on threads of their own."""
    tasks = [{"seed": index, "index": index} for index in range(num_episodes)]
    with EnvThreadPool(num_episodes) as pool:
        began = time.perf_counter()
        trajectories = env.rollout(tasks, agent, pool=pool)
        seconds = time.perf_counter() - began
    if failed := [one.error for one in trajectories if one.failed]:
        raise RuntimeError(failed[0])
    for number, (planned, one) in enumerate(zip(env.plan, trajectories, strict=True)):
        lengths = [turn.stop - turn.start for turn in one.turns]
        if lengths != [turn.tokens for turn in planned]:
            raise RuntimeError(f"episode {number} is planned as {planned}, and its answers have {lengths} tokens")
    return seconds, trajectories


def fill(llm: Any, trajectories: Sequence[Any]) -> float:
    """The seconds of the same requests, all given at once: an engine that is simply kept full."""
    params = type(llm.get_default_sampling_params())
    turns = [(one.token_ids, turn) for one in trajectories for turn in one.turns]
    llm.reset_prefix_cache()
    began = time.perf_counter()
    llm.generate(
        [{"prompt_token_ids": list(ids[: turn.start])} for ids, turn in turns],
        [params(max_tokens=turn.stop - turn.start, **options()) for _, turn in turns],
        use_tqdm=False,
    )
    return time.perf_counter() - began


def feed(llm: Any, plan: Plan, trajectories: Sequence[Any]) -> float:
    """The seconds of a bare loop that plays the same turns, their environments' times included: an engine kept full."""
    defaults, engine = llm.get_default_sampling_params(), llm.llm_engine
    last_alone = type(defaults.output_kind).FINAL_ONLY
    histories = [list(one.token_ids) for one in trajectories]  # with its own answers, so that their cache is used
    left = [[*zip(turns, one.turns, strict=True)][::-1] for turns, one in zip(plan, trajectories, strict=True)]
    llm.reset_prefix_cache()
    began = time.perf_counter()
    waiting = [(began, number) for number in range(len(plan))]
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][0] <= time.perf_counter():
            _, number = heapq.heappop(waiting)
            if left[number]:
                planned, turn = left[number][-1]
                params = type(defaults)(max_tokens=planned.tokens, output_kind=last_alone, **options())
                engine.add_request(str(number), {"prompt_token_ids": histories[number][: turn.start]}, params)
        if engine.has_unfinished_requests():
            for output in filter(lambda output: output.finished, engine.step()):
                number = int(output.request_id)
                planned, turn = left[number].pop()
                histories[number][turn.start : turn.stop] = output.outputs[0].token_ids
                heapq.heappush(waiting, (time.perf_counter() + planned.env_s, number))
        elif waiting:
            time.sleep(max(0.0, waiting[0][0] - time.perf_counter()))
    return time.perf_counter() - began


def play_all_ways(engine: tuple[Any, Any, Any], plan: Plan) -> dict[str, float]:
    """The seconds of each way, one after the other."""
    llm, tokenizer, generation = engine
    env = PlannedEnv(tokenizer, plan)
    lockstep_s, _ = play(env, Lockstep(llm, env), len(plan))
    llm.reset_prefix_cache()
    continuous_s, trajectories = play(env, Continuous(generation, tokenizer, env), len(plan))
    full_s, fed_s = fill(llm, trajectories), feed(llm, plan, trajectories)
    return {"lockstep": lockstep_s, "continuous": continuous_s, "full": full_s, "fed": fed_s}


def measure(engine: tuple[Any, Any, Any], num_episodes: int, median_wait_s: float, num_draws: int) -> dict[str, Any]:
    """Play several draws of the episodes; medians, and the least and the largest of each ratio within a draw."""
    plans = [make_plan(num_episodes, median_wait_s, draw) for draw in range(num_draws)]
    found = [play_all_ways(engine, plan) for plan in plans]

    def ratios(way: str, other: str) -> list[float]:
        values = sorted(seconds[way] / seconds[other] for seconds in found)
        return [round(value, 2) for value in (median(values), values[0], values[-1])]

    return {
        "wait_s": median_wait_s,
        "turns": [sum(map(len, plan)) for plan in plans],
        "tokens": [sum(turn.tokens for episode in plan for turn in episode) for plan in plans],
        **{f"{way}_s": round(median(seconds[way] for seconds in found), 2) for way in found[0]},
        "speedup": ratios("lockstep", "continuous"),
        "speedup_at_best": ratios("lockstep", "fed"),
        "over_fed": ratios("continuous", "fed"),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--draws", type=int, default=5, help="how many sets of episodes are drawn and played")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(Path(folder))
        measure(engine, chosen.episodes, 0.0, 1)  # what the first calls allocate is not counted
        rows: list[dict[str, Any]] = []
        for wait_s in WAITS_S:
            rows.append(measure(engine, chosen.episodes, wait_s, chosen.draws))
            if not chosen.json:
                sys.stdout.write("  ".join(f"{name} {value}" for name, value in rows[-1].items()) + "\n")
                sys.stdout.flush()
    if chosen.json:
        sys.stdout.write(json.dumps({"episodes": chosen.episodes, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
