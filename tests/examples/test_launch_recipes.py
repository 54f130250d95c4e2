"""The recipes of examples/launch: accelerate reads its files, ours are valid, and the scripts call what they should."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from agentsgym.recipes.recipe import read_recipe
from agentsgym.recipes.train import prepare
from agentsgym.training import model_checks

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
CONFIGS = sorted((LAUNCH / "accelerate").glob("*.yaml"))
RUNS = sorted((LAUNCH / "runs").glob("*.yaml"))
SCRIPTS = [LAUNCH / "slurm.sbatch", LAUNCH / "two_nodes.sh"]


def parsed(config: Path, *options: str) -> Any:
    """What accelerate makes of a configuration."""
    command = ["--config_file", str(config), *options, "train.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    return args


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_a_configuration_and_means_by_it_what_its_name_states(config: Path) -> None:
    assert isinstance(load_config_from_file(str(config)), ClusterConfig)  # unknown keys raise
    args = parsed(config)
    stage = int(config.stem[-1]) if config.stem.startswith("zero") else None
    assert (args.multi_gpu, args.use_fsdp, args.use_deepspeed) == (
        config.stem == "ddp", config.stem == "fsdp2", stage is not None,
    )  # fmt: skip
    assert (args.num_processes, args.num_machines, args.mixed_precision, args.use_cpu) == (8, 1, "bf16", False)
    if stage is not None:
        assert int(args.zero_stage) == stage
        assert args.zero3_init_flag == ("true" if stage == 3 else "false") or args.zero3_init_flag is (stage == 3)
    if config.stem == "fsdp2":
        assert int(args.fsdp_version) == 2


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_holds_nothing_that_a_run_file_holds(config: Path) -> None:
    values = yaml.safe_load(config.read_text())
    given = {**values.get("deepspeed_config", {}), **values.get("fsdp_config", {})}
    of_runs = {
        "gradient_accumulation_steps",
        "gradient_clipping",
        "train_micro_batch_size_per_gpu",
        "deepspeed_config_file",
    }
    assert not of_runs & given.keys()
    assert given.get("fsdp_activation_checkpointing", False) is False


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.stem)
def test_a_run_file_is_valid_but_for_the_model_that_is_not_loaded_here(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_checks, "find_spec", lambda _name: True)  # as if vLLM were installed
    changes = {"model": "tiny", "training.output_dir": str(tmp_path), "num_train_tasks": 16, "evaluation.num_tasks": 8}
    recipe = read_recipe(run)
    if recipe.model_settings.get("load_in_4bit"):
        changes["model_settings.load_in_4bit"] = False  # the embedded policy is not loaded
    course = prepare(run, overrides=changes)
    args = course.run.args
    assert args.max_steps > 0
    assert args.generation_batch_size % args.num_generations == 0
    assert (course.run.peft_config is not None) == ("lora" in run.stem or run.stem == "colocate")
    if args.use_vllm:
        longest = args.vllm_max_model_length or 8192  # of a server it is an option of the script
        assert longest > args.max_completion_length


def test_the_server_of_the_scripts_takes_what_the_run_file_sets() -> None:
    length = read_recipe(LAUNCH / "runs" / "server.yaml").training["max_completion_length"]
    for script in SCRIPTS:
        [given] = re.findall(r"MAX_MODEL_LEN:-(\d+)", script.read_text())
        assert int(given) > length


def test_options_of_the_server_are_those_of_trl() -> None:
    from trl.scripts.vllm_serve import ScriptArguments  # noqa: PLC0415  # in a test alone

    known = {name.replace("_", "-") for name in ScriptArguments.__dataclass_fields__}
    for script in SCRIPTS:
        [command] = re.findall(r"trl vllm-serve(.*?)(?:&|;;)", script.read_text(), re.DOTALL)
        used = set(re.findall(r"--([a-z][a-z-]+)", command))
        assert {"model", "tensor-parallel-size"} <= used <= known


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_a_script(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


def stand_ins(folder: Path, **scripts: str) -> dict[str, str]:
    """Programs of these names that write how they are called to ``calls``; an environment in which they come first."""
    note = f"""#!{sys.executable}
import json, os, sys
CALLS = {str(folder / "calls")!r}
def note(**more):
    with open(CALLS, "a") as file:
        file.write(json.dumps({{"program": os.path.basename(sys.argv[0]), "arguments": sys.argv[1:], **more}}) + "\\n")
"""
    programs = folder / "programs"
    programs.mkdir()
    for name, body in scripts.items():
        path = programs / name
        path.write_text(note + body)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


def calls(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def option(call: dict[str, Any], name: str) -> str:
    arguments = call["arguments"]
    joined = [one.partition("=")[2] for one in arguments if one.startswith(f"{name}=")]
    return joined[0] if joined else arguments[arguments.index(name) + 1]


SRUN = """
import subprocess, time
own = [one for one in sys.argv[1:] if one.startswith("--")]
start = next(index for index, one in enumerate(sys.argv) if index and not one.startswith("--"))
note(pid=os.getpid())
if "vllm-serve" in sys.argv:
    time.sleep(60)
until = time.monotonic() + 30
while "vllm-serve" not in open(CALLS).read() and time.monotonic() < until:  # training outlasts a server's start
    time.sleep(0.05)
count = int(next(one.partition("=")[2] for one in own if one.startswith("--ntasks=")))
tasks = [subprocess.Popen(sys.argv[start:], env={**os.environ, "SLURM_PROCID": str(rank)}) for rank in range(count)]
import signal
signal.signal(signal.SIGTERM, lambda number, frame: [task.terminate() for task in tasks])
sys.exit(max(abs(task.wait()) for task in tasks))
"""
SCONTROL = 'note(); print("\\n".join(f"node{number}" for number in range(1, 4)))'
SLURM = {"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_GPUS_ON_NODE": "4", "SLURM_SUBMIT_DIR": str(LAUNCH.parents[1])}


def wait_for_end(pid: int, seconds: float = 30) -> None:
    """Wait until a process is gone, or fail."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")


def test_slurm_runs_trainers_on_all_nodes_but_the_last_which_serves(tmp_path: Path) -> None:
    environment = stand_ins(tmp_path, srun=SRUN, scontrol=SCONTROL, accelerate="note(rank=os.environ['SLURM_PROCID'])")
    given = {"RUN": "my run.yaml", "MODEL": "some/model", **SLURM}
    done = subprocess.run(
        ["bash", str(LAUNCH / "slurm.sbatch")],
        env={**environment, **given},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    by_program: dict[str, list[dict[str, Any]]] = {}
    for call in calls(tmp_path):
        by_program.setdefault(call["program"], []).append(call)
    assert [call["arguments"] for call in by_program["scontrol"]] == [["show", "hostnames", "node[1-3]"]]
    [server] = [call for call in by_program["srun"] if "vllm-serve" in call["arguments"]]
    assert (option(server, "--nodelist"), option(server, "--model")) == ("node3", "some/model")
    assert option(server, "--data-parallel-size") == "4"
    wait_for_end(server["pid"])  # it does not hold the job
    [training] = [call for call in by_program["srun"] if call is not server]
    assert (option(training, "--nodelist"), option(training, "--ntasks")) == ("node1,node2", "2")
    assert sorted(option(call, "--machine_rank") for call in by_program["accelerate"]) == ["0", "1"]
    for call in by_program["accelerate"]:
        assert (option(call, "--num_processes"), option(call, "--num_machines")) == ("8", "2")
        assert option(call, "--main_process_ip") == "node1"
        assert Path(option(call, "--config_file")).is_file()
        script, *rest = call["arguments"][call["arguments"].index("29500") + 1 :]
        assert Path(script).is_file()
        assert rest == ["my run.yaml", "--set", "training.vllm_server_base_url=http://node3:8000"]
        parsed(Path(option(call, "--config_file")), *call["arguments"][3 : call["arguments"].index(script)])


def test_slurm_without_a_server_trains_on_all_nodes_and_ends_as_the_training_does(tmp_path: Path) -> None:
    environment = stand_ins(tmp_path, srun=SRUN, scontrol=SCONTROL, accelerate="note(); sys.exit(7)")
    given = {"RUN": "run.yaml", "SERVERS": "0", **SLURM}
    done = subprocess.run(["bash", str(LAUNCH / "slurm.sbatch")], env={**environment, **given}, timeout=60, check=False)
    assert done.returncode == 7
    launched = [call for call in calls(tmp_path) if call["program"] == "accelerate"]
    assert [call["arguments"][-1] for call in launched] == ["run.yaml"] * 3
    assert {option(call, "--num_processes") for call in launched} == {"12"}


def test_slurm_hands_a_signal_to_the_trainers_and_waits_for_them(tmp_path: Path) -> None:
    body = """
import signal, time
def end(number, frame):
    note(ended=True); sys.exit(143)
signal.signal(signal.SIGTERM, end)
note()
time.sleep(60)
"""
    environment = stand_ins(tmp_path, srun=SRUN, scontrol=SCONTROL, accelerate=body)
    given = {"RUN": "run.yaml", "MODEL": "some/model", **SLURM}
    job = subprocess.Popen(["bash", str(LAUNCH / "slurm.sbatch")], env={**environment, **given})
    waited_until = time.monotonic() + 60
    while time.monotonic() < waited_until:
        file = tmp_path / "calls"
        if file.exists() and sum(call["program"] == "accelerate" for call in calls(tmp_path)) == 2:
            break
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=60) == 143
    assert sum(call.get("ended", False) for call in calls(tmp_path)) == 2
    [server] = [call for call in calls(tmp_path) if "vllm-serve" in call["arguments"]]
    wait_for_end(server["pid"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"MODEL": "some/model"}, "RUN is the run file"),
        ({"RUN": "run.yaml"}, "MODEL is what the server loads"),
        ({"RUN": "run.yaml", "SERVERS": "3"}, "3 nodes are too few: 3 for the server, and at least one for training"),
    ],
)
def test_slurm_names_what_is_missing(given: dict[str, str], message: str, tmp_path: Path) -> None:
    environment = stand_ins(tmp_path, srun=SRUN, scontrol=SCONTROL)
    done = subprocess.run(
        ["bash", str(LAUNCH / "slurm.sbatch")],
        env={**environment, **SLURM, **given},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert message in done.stderr


def test_two_nodes_start_the_server_and_the_trainers(tmp_path: Path) -> None:
    environment = stand_ins(tmp_path, trl="note()", accelerate="note()")
    script = ["bash", str(LAUNCH / "two_nodes.sh")]
    subprocess.run([*script, "server"], env={**environment, "MODEL": "some/model"}, check=True)
    more = ["--set", "training.max_steps=3"]
    subprocess.run([*script, "trainer", "run.yaml", *more], env={**environment, "SERVER": "node2"}, check=True)
    server, trainer = calls(tmp_path)
    assert server["arguments"][:3] == ["vllm-serve", "--model", "some/model"]
    address = ["run.yaml", "--set", "training.vllm_server_base_url=http://node2:8000"]
    assert trainer["arguments"][-5:] == [*address, *more]
    for wrong in ([], ["nothing"], ["trainer", "run.yaml"]):
        done = subprocess.run([*script, *wrong], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert "usage: MODEL=NAME two_nodes.sh server" in done.stderr
