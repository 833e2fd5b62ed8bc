"""The launch files in examples/ are well formed, and every option they use exists."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from pentameter.cli.main import VERBS
from pentameter.cli.options.arguments import parse_arguments
from pentameter.cli.train import TrainArguments
from pentameter.config.files.load import load_config
from pentameter.planning.plan import make_plan

EXAMPLES = Path(__file__).parents[2] / "examples"
SRUN_OPTIONS = {"--distribution", "--wait", "--cpus-per-task"}
SBATCH_OPTIONS = {
    "--job-name", "--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--time",
    "--signal", "--requeue", "--open-mode", "--output",
}  # fmt: skip


def command_in(text: str, program: str) -> list[str]:
    """The words of the command `program …` of a shell script, its continued lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    (line,) = [line for line in lines if line.startswith(f"{program} ")]
    return shlex.split(line)


def check_train(words: list[str], world_size: int, local_size: int) -> None:
    """`pentameter VERB …` parses, and its layout fits the processes."""
    assert words[0] == "pentameter"
    assert words[1] in VERBS
    parsed, overrides = parse_arguments(TrainArguments, words[2:], verb="train")
    assert parsed.nproc is None
    config = load_config(parsed.source, overrides)
    assert config.data.path  # not the standard library, which teaches such a model nothing
    plan = make_plan(config, 50257, 10**6, world_size=world_size, local_size=local_size)
    assert plan.layout.world_size == world_size


@pytest.mark.parametrize("name", ["slurm.sbatch", "torchrun.sh"])
def test_the_shell_scripts_are_well_formed(name):
    done = subprocess.run(
        ["bash", "-n", EXAMPLES / name], capture_output=True, text=True, check=False, timeout=10
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_batch_script_starts_a_run_that_fits():
    text = (EXAMPLES / "slurm.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH (--[\w-]+)(?:=(\S+))?$", text, flags=re.MULTILINE))
    assert set(options) == SBATCH_OPTIONS
    assert options["--signal"] == "USR1@120"
    words = command_in(text, "srun")
    train = words.index("pentameter")
    assert {word.partition("=")[0] for word in words[1:train]} == SRUN_OPTIONS
    per_node = int(options["--ntasks-per-node"])
    assert int(options["--nodes"]) == 2
    for n_nodes in (1, 2, 4):
        check_train(words[train:], n_nodes * per_node, per_node)


@pytest.mark.parametrize(
    ("code", "queued"),
    [(0, 0), (1, 0), (2, 0), (65, 0), (73, 0), (70, 2), (74, 2), (75, 3), (137, 2), (253, 2)],
)
def test_the_batch_script_queues_again_what_is_worth_it(code, queued, tmp_path):
    """Three times without a new checkpoint, and once more with one."""
    for name, line in (("srun", f"exit {code}"), ("scontrol", "echo $@ >> queued")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "runs" / "gpt2-124m" / "checkpoints" / "step-00000500").mkdir(parents=True)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    variables["SLURM_CPUS_PER_TASK"] = "8"

    def start() -> int:
        command = ["bash", EXAMPLES / "slurm.sbatch", "shards"]
        done = subprocess.run(command, cwd=tmp_path, env=variables, check=False, timeout=10)
        assert done.returncode == code
        path = tmp_path / "queued"
        return path.read_text().count("requeue 7\n") if path.exists() else 0

    assert [start() for _ in range(3)][-1] == queued
    (tmp_path / "runs" / "gpt2-124m" / "checkpoints" / "step-00001000").mkdir()
    assert start() == (queued + 1 if queued else 0)


def test_the_torchrun_line_starts_a_run_that_fits():
    words = command_in((EXAMPLES / "torchrun.sh").read_text(), "torchrun")
    asked = get_args_parser().parse_args(words[1:])
    assert asked.module
    n_nodes, per_node = int(asked.nnodes), int(asked.nproc_per_node)
    command = [asked.training_script, *asked.training_script_args]
    check_train(command, n_nodes * per_node, per_node)


def test_the_manifest_starts_a_run_that_fits():
    yaml = pytest.importorskip("yaml")
    claim, job = yaml.safe_load_all((EXAMPLES / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    roles = job["spec"]["pytorchReplicaSpecs"]
    assert set(roles) == {"Master", "Worker"}
    n_pods = sum(role["replicas"] for role in roles.values())
    for role in roles.values():
        assert role["restartPolicy"] == "ExitCode"  # OnFailure begins a mistake again, for ever
        pod = role["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"  # the operator looks for this name
        check_train(container["args"], n_pods, 1)
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        named = volumes["runs"]["persistentVolumeClaim"]["claimName"]
        assert named == claim["metadata"]["name"]
        assert str(container["args"]).count("/runs/") == 2


def test_the_manifest_without_a_yaml_parser():
    text = (EXAMPLES / "pytorchjob.yaml").read_text()
    assert "\t" not in text
    (command,) = re.findall(r"^ +args: \[(.*)\]$", text, flags=re.MULTILINE)
    check_train([word.strip('"') for word in command.split(", ")], 4, 1)


def again(*words: str) -> list[str]:
    """The manifest's command line around `words`."""
    text = (EXAMPLES / "pytorchjob.yaml").read_text()
    lines = text.split("- |\n")[1].split("- again")[0]
    return ["bash", "-c", lines, "again", *words]


@pytest.mark.parametrize(
    ("code", "answered"),
    [(0, 0), (1, 1), (2, 2), (65, 65), (73, 73), (70, 200), (74, 200), (75, 200), (137, 137)],
)
def test_the_manifest_starts_again_what_is_worth_it(code, answered):
    """The operator starts a pod again whose exit code is above 127."""
    done = subprocess.run(again("sh", "-c", f"exit {code}"), check=False, timeout=10)
    assert done.returncode == answered


def test_the_manifest_passes_a_signal_on_and_waits(tmp_path):
    saves = "trap 'echo saved; exit 75' TERM; echo begun; while true; do sleep 0.05; done"
    pod = subprocess.Popen(again("sh", "-c", saves), stdout=subprocess.PIPE, text=True)
    assert pod.stdout.readline() == "begun\n"
    os.kill(pod.pid, signal.SIGTERM)
    assert pod.communicate(timeout=10)[0] == "saved\n"
    assert pod.returncode == 200


def test_readme_names_every_example():
    text = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    assert {name for name in files if f"]({name})" in text} == files
