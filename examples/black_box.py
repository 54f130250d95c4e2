"""Train a policy through a program that knows nothing of this library: an OpenAI client that plays Twenty Questions.

    pip install 'agentsgym[programs,openai]'
    python examples/black_box.py                               # a built-in tiny policy, a few minutes on a laptop CPU

``play`` below is the whole program: it calls whatever model its client finds, and posts the information that each
question gained as the reward of that call. The rest of the file makes tasks, and calls the trainer as any other example
does. It writes ``summary.json``, ``learning_curve.png``, transcripts and ``model/`` to ``outputs/black_box``.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from openai import OpenAI

from agentsgym import TrainingRun, tiny_policy
from agentsgym.envs.AgentProgram import AgentProgramEnv, Endpoint
from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES, ImitationPlayer, TwentyQuestionsEnv
from agentsgym.recipes.from_values import PolicyOptions, parse_options
from agentsgym.recipes.scripts import quiet_logging
from agentsgym.reports.tables import comparison_table
from agentsgym.seeding import derive_seed

NUM_TURNS = 5
OBJECTS = DEMO_OBJECTS[:8]  # few, since a client takes several milliseconds for each call
FACTS: dict[str, dict[str, str]] = {}  # the answer to each question, for each object
CLIENT = OpenAI(base_url="http://localhost", api_key="none")  # its connections are shared by all games


def play(task: dict[str, Any], endpoint: Endpoint) -> tuple[float, dict[str, bool]]:
    """Play a game of Twenty Questions with a language model, and return the reward of its end and whether it is won."""
    client = CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    secret, left = task["secret"], {*FACTS}
    messages: list[Any] = [{"role": "user", "content": "I am thinking of an object. Ask your first question."}]
    for turn in range(NUM_TURNS):
        call = client.chat.completions.create(model="policy", messages=messages)
        said = call.choices[0].message.content or ""
        if said in GUESSES:
            return float(GUESSES[said] == secret), {"success": GUESSES[said] == secret}
        answer = FACTS[secret].get(said, "I don't know.")
        still = {one for one in left if FACTS[one].get(said, "I don't know.") == answer}
        gained = math.log(len(left) / len(still), len(FACTS)) - (0.1 if said not in FACTS[secret] else 0.0)
        client.post("/reward", cast_to=object, body={"call": call.id, "reward": gained})
        left = still
        hint = " This is your last turn: name the object." if turn == NUM_TURNS - 2 else ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": answer + hint}]
    return 0.0, {"success": False}


def facts_of(env: TwentyQuestionsEnv) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return the answer to each question for each object, and the objects by the sentence that guesses them."""
    answers = {"yes": "Yes.", "no": "No.", "sometimes": "Sometimes."}
    known = env.knowledge
    questions = {key: known.properties[key].question for key in env.candidates.properties}
    facts = {
        name: {question: answers[known.value(name, key) or ""] for key, question in questions.items()}
        for name in env.candidates.objects
    }
    return facts, {known.objects[name].guess: name for name in env.candidates.objects}


GUESSES: dict[str, str] = {}

TINY_DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "max_steps": 320,
    "per_device_train_batch_size": 32,
    "steps_per_generation": 2,
    "num_generations": 8,
    "max_turn_tokens": 12,
    "layout": "turn",
}


@dataclass
class Options(PolicyOptions):
    """Options for the number of games."""

    num_games: int = field(default=400, metadata={"help": "Number of games in each evaluation."})
    num_demonstrations: int = field(default=4000, metadata={"help": "Number of games that the tiny policy imitates."})
    warm_start_steps: int = field(default=600, metadata={"help": "Number of optimizer steps of imitation."})


def main() -> None:
    """Imitate players of the packaged game, then train through the program."""
    options, args, model_config = parse_options(Options, output_dir="outputs/black_box", tiny_defaults=TINY_DEFAULTS)
    quiet_logging()
    game = TwentyQuestionsEnv(
        env_config={
            "objects": [*OBJECTS],
            "properties": [*DEMO_PROPERTIES],
            "max_steps_per_episode": NUM_TURNS,
            "final_guess": True,
            "system_prompt": "",
        }
    )
    facts, guesses = facts_of(game)
    FACTS.update(facts)
    GUESSES.update(guesses)
    run = TrainingRun(tiny_policy(game, seed=args.seed), args, model_config, unit="game", overwrite=options.overwrite)
    game = TwentyQuestionsEnv(run.tokenizer, game.given_config)
    secrets = [*game.candidates.objects]

    def tasks(purpose: str, count: int) -> list[dict[str, Any]]:
        return [{"secret": secrets[i % len(secrets)], "seed": derive_seed(purpose, args.seed, i)} for i in range(count)]

    demonstrated = [
        {"solution": one["secret"], "seed": one["seed"]} for one in tasks("demonstrations", options.num_demonstrations)
    ]
    run.warm_start(
        run.play("demonstrations", game, demonstrated, ImitationPlayer(game, seed=args.seed)),
        options.warm_start_steps,
        observation_loss=True,
    )
    env = AgentProgramEnv(run.tokenizer, program=play)
    evaluated = tasks("evaluation", options.num_games)
    run.evaluate("before", env, evaluated, cluster_by="secret")
    curve = run.learning_curve()
    rows: Any = Dataset.from_list([{"task_data": one} for one in tasks("train", 4096)])
    run.learn(env, rows, callbacks=[curve])
    after = run.evaluate("after", env, evaluated, cluster_by="secret")

    curve.draw(after=after.win_rate)
    run.write_transcripts("before", "after")
    run.write_summary(settings=vars(options))
    print(f"\n{comparison_table(run.evaluations)}\n\nEverything is in {run.output}.")
    sys.exit(run.phases.status)


if __name__ == "__main__":
    main()
