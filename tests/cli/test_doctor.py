import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pentameter.cli import doctor
from pentameter.machine.load import other_programs
from pentameter.report.text import doctor as machine
from pentameter.report.text.doctor import machine_rows

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def facts():
    return machine.examine()


def test_json_shape(facts):
    facts = json.loads(json.dumps(facts))
    assert {"torch", "device", "precision", "product_ceiling_flops"} <= facts.keys()
    assert facts["product_ceiling_flops"].keys() == {"float32", "bfloat16"}
    assert facts["product_ceiling_flops"]["float32"] > 0
    assert facts["precision"] in ("fp32", "bf16", "fp16")
    assert facts["versions"]["numpy"]
    assert facts["disk_free_bytes"] > 0
    assert set(facts["extras"]) == set(machine.EXTRAS)


def test_the_extras_are_those_of_the_package_and_each_is_imported():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(machine.EXTRAS) == declared["optional-dependencies"].keys() - {"test", "dev"}
    sources = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "src").rglob("*.py")
        if path.name != "doctor.py"
    )
    for module in machine.EXTRAS.values():
        quoted = re.escape(f'"{module}"')
        named = rf"import_module\(.*{quoted}|name = .*{quoted}|from \S*{module}|import {module}\b"
        assert re.search(named, sources)


def test_the_verb(facts, monkeypatch, capsys):
    monkeypatch.setattr(machine, "examine", lambda: facts)
    assert doctor.run(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == facts
    monkeypatch.setenv("COLUMNS", "100")
    assert doctor.run([]) == 0
    text = capsys.readouterr().out
    for part in ("precision", facts["precision"], "TFLOP/s", "safetensors", "disk free"):
        assert part in text


def test_a_rate_measured_beside_other_programs_says_so(facts):
    cores = facts["devices"]["cpu"]["cores"]
    quiet = list(machine_rows(facts | {"cores_busy_with_others": 0.2}))
    assert {row[2] for row in quiet if "TFLOP/s" in row[1]} >= {"measured matrix product"}
    busy = machine_rows(facts | {"cores_busy_with_others": 0.94})
    said = f"measured matrix product beside other programs, which kept 0.9 of {cores} cores busy"
    assert [row[2] for row in busy if row[0] in ("float32", "bfloat16")] == [said, said]


def test_other_programs_are_measured_while_products_are(monkeypatch):
    seconds_of_all = [0.0]

    def multiply(device):
        seconds_of_all[0] += 1e6
        return {"float32": 1e9, "bfloat16": None}

    monkeypatch.setattr(other_programs, "busy_seconds", lambda cores: seconds_of_all[0])
    monkeypatch.setattr(machine, "_ceilings", multiply)
    assert machine.examine()["cores_busy_with_others"] > 100


def test_a_containers_limits_are_listed(facts):
    rows = list(machine_rows(facts | {"limits": {"cores": 1.5, "memory_bytes": 2 * 10**9}}))
    assert ("cpu quota", "1.5 cores", "the time that this container has") in rows
    assert ("memory limit", "2 GB", "what this container may hold") in rows
    none = machine_rows(facts | {"limits": {"cores": None, "memory_bytes": None}})
    assert not {"cpu quota", "memory limit"} & {name for name, *_ in none}


def test_proved_and_refused_kernels_are_listed(facts, monkeypatch):
    found = [("fold", "-O3"), ("unfold", "-O3"), ("unfold", "-O2"), ("vector kernels", "plain")]
    monkeypatch.setattr("pentameter.machine.kernel_checks.verdicts", lambda: iter(found))
    kernels = machine._kernels()
    assert kernels == {"proved": ["fold"], "refused": ["unfold (-O2)", "vector kernels (plain)"]}
    rows = list(machine_rows(facts | {"kernels": kernels}))
    assert ("kernels proved", "1", "fold") in rows
    assert ("kernels refused", "2", "unfold (-O2), vector kernels (plain)") in rows


def test_gpus_are_listed(facts):
    gpu = {"name": "NVIDIA H200", "architecture": "sm_90", "memory_bytes": 150_000_000_000}
    with_gpu = {
        **facts,
        "devices": {**facts["devices"], "gpus": [gpu], "gpu_runtime": "cuda 12.8"},
        "published_peak_flops": 989.4e12,
    }
    rows = {name: (value, remark) for name, value, remark in machine_rows(with_gpu)}
    assert rows["gpu 0"] == ("140 GiB", "NVIDIA H200, sm_90")
    assert rows["published"][0] == "989.4 TFLOP/s"


def test_an_untested_torch_is_marked(facts):
    def said(**change):
        rows = {name: remark for name, _, remark in machine_rows({**facts, **change})}
        return rows["torch"]

    assert facts["torch_tested"] == list(machine.TESTED_TORCH)
    assert said(torch_is_tested=True).startswith("tested")
    assert said(torch_is_tested=False).startswith("not tested; it may work")
    assert not machine._is_tested("99.0.0")
    assert not machine._is_tested("2.13.0.dev1")
    for version in machine.TESTED_TORCH:
        assert machine._is_tested(f"{version}+cpu")
        assert version in said()


def test_a_checkout_installs_a_tested_torch_and_a_user_any_newer_one():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = next(pin for pin in pins if pin.name == "torch")
    assert any(pinned.specifier.contains(version) for version in machine.TESTED_TORCH)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    allowed = next(
        need for need in map(Requirement, project["dependencies"]) if need.name == "torch"
    )
    for version in (*machine.TESTED_TORCH, "2.11.0", "2.99.0"):
        assert allowed.specifier.contains(version)


def test_the_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PENTAMETER_DATA_DIR", str(tmp_path / "absent"))
    data = machine._data_folders()
    assert data["data_dir_found"] is False
    assert data["cache_found"] is False
    monkeypatch.delenv("PENTAMETER_DATA_DIR")
    assert machine._data_folders()["PENTAMETER_DATA_DIR"] is None


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        doctor.run(["--help"])
    assert stop.value.code == 0
    assert "--json" in capsys.readouterr().out
