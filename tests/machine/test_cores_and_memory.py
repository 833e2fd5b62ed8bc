"""What a machine can carry."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pentameter.cli.main import main
from pentameter.errors import ConfigError
from pentameter.machine import cores_and_memory as machine_cores
from pentameter.machine.cores_and_memory import (
    check_memory,
    check_processes,
    chosen_threads,
    cpu_quota,
    environment_of_one,
    fair_thread_count,
    has_gpu_file,
    host_memory_bytes,
    memory_limit,
    n_usable_cores,
)
from pentameter.machine.load import idle_threads
from pentameter.machine.load.idle_threads import prepare_threads


@pytest.fixture
def small_machine(monkeypatch):
    monkeypatch.setattr(machine_cores, "usable_cores", lambda: frozenset(range(2)))
    monkeypatch.setattr(machine_cores, "cpu_quota", lambda: None)
    monkeypatch.setattr(machine_cores, "host_memory_bytes", lambda: 8 * 10**9)


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize("n_processes", [9, 1024, 99_999_999_999])
def test_more_processes_than_cores_can_serve_are_refused(n_processes):
    with pytest.raises(ConfigError) as caught:
        check_processes(n_processes)
    for word in (
        f"--nproc {n_processes:,}",
        "2 cores",
        "at most 8",
        "--oversubscribe",
        "--dry-run",
    ):
        assert word in str(caught.value)


@pytest.mark.usefixtures("small_machine")
def test_who_means_it_may_oversubscribe_as_far_as_memory_goes():
    check_processes(8)
    check_processes(20, oversubscribe=True)
    with pytest.raises(ConfigError, match=r"--nproc 1,024: .* would take 307 GB, .* has 8 GB"):
        check_processes(1024, oversubscribe=True)


@pytest.mark.usefixtures("small_machine")
def test_what_the_plan_needs_is_compared_with_the_memory():
    check_memory(4, 10**9)
    with pytest.raises(ConfigError, match=r"processes of about 2\.30 GB each .* would take 9 GB"):
        check_memory(4, 2 * 10**9)


@pytest.mark.parametrize(
    ("names", "found"),
    [(["nvidia3", "nvidiactl"], True), (["kfd"], True), (["dxg"], True), (["nvidiactl"], False)],
)
def test_any_gpu_counts_not_the_first_alone(tmp_path, names, found):
    for name in names:
        (tmp_path / name).touch()
    assert has_gpu_file(tmp_path) is found


V2 = "30 24 0:26 {top} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = (
    "33 32 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "34 32 0:30 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
)


@pytest.fixture
def limited(tmp_path):
    """A function that writes /proc and /sys as a control group's member finds them, and returns
    (CPU quota, memory limit)."""

    def write(mounts, groups, files, top="/"):
        for name, text in {
            "proc/self/mountinfo": "23 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mounts.format(top=top),
            "proc/self/cgroup": groups,
            **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
        }.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return cpu_quota(tmp_path), memory_limit(tmp_path)

    return write


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000", "memory.max": "2147483648"}, (1.5, 2**31)),
        ({"cpu.max": "max 100000", "memory.max": "max"}, (None, None)),
        ({"cpu.max": "rubbish", "memory.max": ""}, (None, None)),
        ({}, (None, None)),
        # a unit of systemd, inside a slice that has less
        (
            {
                "a.slice/b.service/cpu.max": "800000 100000",
                "a.slice/cpu.max": "50000 100000",
                "a.slice/b.service/memory.max": "1000",
                "a.slice/memory.max": "9000",
            },
            (0.5, 1000),
        ),
        ({"other.slice/cpu.max": "50000 100000"}, (None, None)),  # another's
    ],
)
def test_limits_of_control_groups(limited, files, expected):
    assert limited(V2, "0::/a.slice/b.service", files) == expected


@pytest.mark.parametrize("top", ["/", "/docker/4711"], ids=["the machine's", "the container's"])
def test_limits_of_version_1(limited, top):
    """A container sees its own group mounted as the topmost, whatever the process's is called."""
    inside = "docker/4711/" if top == "/" else ""
    files = {
        f"cpu,cpuacct/{inside}cpu.cfs_quota_us": "250000",
        f"cpu,cpuacct/{inside}cpu.cfs_period_us": "100000",
        f"memory/{inside}memory.limit_in_bytes": "4000000000",
        f"memory/{inside}job/memory.limit_in_bytes": "9223372036854771712",
    }
    groups = "4:memory:/docker/4711/job\n3:cpu,cpuacct:/docker/4711/job\n1:name=systemd:/\n0::/"
    assert limited(V1 + "\n" + V2, groups, files, top) == (2.5, 4 * 10**9)
    assert limited(V1, groups, {**files, f"cpu,cpuacct/{inside}cpu.cfs_quota_us": "-1"}, top) == (
        None,
        4 * 10**9,
    )


def test_version_1_without_a_limit_has_none(limited):
    files = {"memory/memory.limit_in_bytes": "9223372036854771712"}
    assert limited(V1, "4:memory:/\n3:cpu,cpuacct:/", files) == (None, None)


def test_a_group_outside_of_a_containers_namespace_leaves_its_own(limited):
    assert limited(V2, "0::/../../other", {"cpu.max": "300000 100000"})[0] == 3.0


@pytest.mark.parametrize(("quota", "n_cores"), [(None, 64), (0.2, 1), (1.5, 1), (8.0, 8), (99, 64)])
def test_a_quota_counts_as_so_many_cores(monkeypatch, quota, n_cores):
    monkeypatch.setattr(machine_cores, "usable_cores", lambda: frozenset(range(64)))
    for module in (machine_cores, idle_threads):
        monkeypatch.setattr(module, "cpu_quota", lambda: quota)
    assert n_usable_cores() == n_cores
    environ: dict[str, str] = {}
    prepare_threads(environ)
    assert environ.get("OMP_NUM_THREADS") == (None if quota is None else str(n_cores))
    assert chosen_threads(environ) is None  # nobody chose it, so processes divide it
    each = environment_of_one(4, environ)["OMP_NUM_THREADS"]
    assert each == str(max(1, n_cores // 4))
    everywhere = frozenset(range(64))
    assert fair_thread_count(everywhere, [everywhere] * 4, quota) == max(1, n_cores // 4)
    chosen = {"OMP_NUM_THREADS": "3"}
    prepare_threads(chosen)
    assert chosen["OMP_NUM_THREADS"] == "3"
    with pytest.raises(ConfigError, match=rf"start at most {4 * n_cores},"):
        check_processes(4 * n_cores + 1)


def test_a_containers_memory_counts(monkeypatch):
    whole = host_memory_bytes()
    monkeypatch.setattr(machine_cores, "memory_limit", lambda: 10**9)
    assert host_memory_bytes() == 10**9
    with pytest.raises(ConfigError, match=r"this machine \(or its container\) has 1 GB"):
        check_memory(2, 10**9)
    monkeypatch.setattr(machine_cores, "memory_limit", lambda: 2**61)  # more than there is
    assert host_memory_bytes() == whole


def test_torch_computes_with_as_many_threads_as_a_quota_has_time_for():
    code = (
        "import pentameter.machine.cores_and_memory as cores; cores.cpu_quota = lambda: 1.9;"
        "import pentameter.machine.load.idle_threads as idle; idle.cpu_quota = lambda: 1.9;"
        "cores.usable_cores = lambda: frozenset(range(64));"
        "import pentameter as pm; pm.load_model; import torch, torch._inductor.config as inductor;"
        "print(torch.get_num_threads(), inductor.compile_threads)"
    )
    unset = {"OMP_NUM_THREADS", "PENTAMETER_QUOTA_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=kept
    )
    assert done.stdout == "1 1\n"


@pytest.mark.parametrize("arguments", [["--nproc", "99999999999"], ["--nproc", "4096"]])
def test_the_command_starts_none_of_them(monkeypatch, capsys, arguments):
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    assert main(["train", "quickstart", *arguments]) == 2
    assert "start at most" in capsys.readouterr().err
