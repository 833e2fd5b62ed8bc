"""What is said, or refused, before the first step."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import config as tiny_config

from pentameter.config.files.load import load_config
from pentameter.config.schema import Config
from pentameter.disk.atomic import SPARE_BYTES
from pentameter.errors import ConfigError
from pentameter.estimating.bytes.fit import CONTEXT_BYTES
from pentameter.estimating.bytes.plan_estimates import plan_memory
from pentameter.model.gpu.forms import PLAIN_FORMS, GpuForms
from pentameter.planning.plan import Plan, make_plan
from pentameter.processes.group.world import World
from pentameter.record.reading import read_run
from pentameter.train import start
from pentameter.train.faults import device_memory
from pentameter.train.loop import Trainer
from pentameter.train.say import start_warnings
from pentameter.train.say.start_warnings import disk_warnings


def fit(tmp_path, data, *, force=False, **train):
    config = Config.model_validate(
        {
            "model": {"context_length": 8, "n_layers": 1, "n_heads": 1, "d_model": 8},
            "data": data,
            "train": {"steps": 2, "batch_size": 4, "precision": "fp32", **train},
            "log": {"interval": 1},
        }
    )
    tmp_path.mkdir(exist_ok=True)
    Trainer(config, run_dir=tmp_path / "run", quiet=True, force=force).fit()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return (tmp_path / "run" / "log.txt").read_text(), [json.loads(line) for line in lines]


def test_documents_that_are_cut_are_said(tmp_path):
    (tmp_path / "text.txt").write_text("one long document " * 20)
    data = {"path": str(tmp_path / "text.txt"), "order": "documents"}
    said, _ = fit(tmp_path, data)
    assert "reads 9 of 324 tokens" in said
    said, _ = fit(tmp_path / "packed", {**data, "packing": True})
    assert "documents are cut" not in said


def test_a_split_by_document_that_holds_nothing_out_is_said(tmp_path):
    (tmp_path / "text.txt").write_text("one document " * 20)
    data = {"path": str(tmp_path / "text.txt"), "split_by": "document"}
    said, _ = fit(tmp_path, data)
    assert "nothing is held out" in said
    with pytest.raises(ConfigError, match=r"patience=2 counts evaluations.*split_by='position'"):
        fit(tmp_path / "patient", data, patience=2)


def test_a_text_that_is_short_for_the_run_is_said(tmp_path):
    (tmp_path / "text.txt").write_text("some words " * 50)  # 550 characters
    data = {"path": str(tmp_path / "text.txt"), "validation_fraction": 0.1}
    said, _ = fit(tmp_path, data)
    assert "only 55 tokens are held out" in said
    assert "learn it by heart" not in said
    said, _ = fit(tmp_path / "long", data, steps=160)  # of 32 tokens
    assert "train.steps=160 read the text 10 times" in said
    said, _ = fit(tmp_path / "patient", data, steps=160, patience=1)
    assert "learn it by heart" not in said
    said, _ = fit(tmp_path / "more", {**data, "validation_fraction": 0.2}, eval_interval=None)
    assert "held out" not in said


def test_what_is_left_out_of_the_text_is_said(tmp_path):
    (tmp_path / "text.txt").write_text("some words " * 200)
    said, _ = fit(tmp_path, {"path": str(tmp_path / "text.txt"), "max_bytes": 1500})
    assert "text.txt · reads 1.5 kB of 2.2 kB (data.max_bytes) · char tokens" in said
    said, _ = fit(tmp_path / "whole", {"path": str(tmp_path / "text.txt"), "max_bytes": 2200})
    assert " · reads " not in said


def test_a_model_beyond_the_memory_is_refused_with_both_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(device_memory, "memory_bytes", lambda device: 1000)
    (tmp_path / "text.txt").write_text("some text " * 20)
    with pytest.raises(ConfigError, match=r"take 0\.0 GB, cpu.* has 0\.0 GB.*--dry-run"):
        fit(tmp_path, {"path": str(tmp_path / "text.txt")})


def compute_on(device):
    return SimpleNamespace(device=torch.device(device), precision=None, forms=PLAIN_FORMS)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_offloaded_must_fit_the_machine_and_not_the_gpu(monkeypatch, device):
    config = load_config(
        "grammar", {"parallel.zero": 1, "train.offload": True, "model.vocab_size": 16}
    )
    plan = make_plan(config, world_size=2)

    def check():
        device_memory.check_device_memory(plan, compute_on("cuda"), local_size=2)

    memory = plan_memory(plan)
    state = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    on_gpu = CONTEXT_BYTES + max(0, memory.total_bytes - state) + 1
    small = {device: on_gpu if device == "cuda" else 1000}
    monkeypatch.setattr(
        device_memory, "memory_bytes", lambda device: small.get(device.type, 10**12)
    )
    monkeypatch.setattr(device_memory, "held_by_others", lambda device: 0)
    if device == "cuda":
        check()
        plan = make_plan(load_config(config, {"train.offload": False}), world_size=2)
    with pytest.raises(ConfigError, match=rf"{device} .*GB.*") as caught:
        check()
    assert ("train.offload" in str(caught.value)) == (device == "cuda")


@pytest.mark.parametrize("seconds", [0, 3, None])
def test_what_other_programs_hold_is_not_there(monkeypatch, seconds):
    """A desktop's screen stays; a killed run's memory comes back after some seconds."""
    plan = make_plan(load_config("gpt2-124m", {"train.precision": "bf16"}))
    needed = plan_memory(plan, "bf16").total_bytes
    slept = []
    monkeypatch.setattr(device_memory.time, "sleep", slept.append)
    monkeypatch.setattr(
        device_memory, "memory_bytes", lambda device: int(needed + CONTEXT_BYTES + 1e9)
    )

    def held(device):
        return 0 if seconds is not None and len(slept) >= seconds else int(1.5e9)

    monkeypatch.setattr(device_memory, "held_by_others", held)
    chosen = SimpleNamespace(device=torch.device("cuda"), precision="bf16", forms=PLAIN_FORMS)
    if seconds is None:
        with pytest.raises(ConfigError, match=r"GB, as other programs hold 1\.5 GB of it; --train"):
            device_memory.check_device_memory(plan, chosen, local_size=1)
    else:
        device_memory.check_device_memory(plan, chosen, local_size=1)
        assert len(slept) == seconds


def test_a_step_beyond_the_memory_names_settings_that_fit(tmp_path, monkeypatch):
    config = load_config("gpt2-124m", {"train.tokens_per_step": 65536, "train.precision": "bf16"})
    plan = make_plan(config)
    assert plan_memory(plan).total_bytes > 8e9
    monkeypatch.setattr(device_memory, "memory_bytes", lambda device: 8_000_000_000)
    said = (
        r"is planned to take .* GB, cpu(?: \(or its container\))? has 7\.7 GB; "
        r"--train\.micro-batch-size \d+ fits\. --force"
    )
    with pytest.raises(ConfigError, match=said):
        device_memory.check_device_memory(plan, compute_on("cpu"), local_size=1)
    small = make_plan(load_config(config, {"train.micro_batch_size": 1}))
    device_memory.check_device_memory(small, compute_on("cpu"), local_size=1)
    monkeypatch.setattr(device_memory, "memory_bytes", lambda device: 1000)
    (tmp_path / "text.txt").write_text("some text " * 20)
    tiny = {"path": str(tmp_path / "text.txt")}
    fit(tmp_path, tiny, force=True)


def test_micro_batches_left_open_are_the_largest_that_fit_a_gpu(monkeypatch):
    """They were the whole batch, which was refused."""
    open_size = {"train.tokens_per_step": 65536, "train.micro_batch_size": None}
    plan = make_plan(load_config("gpt2-124m", {**open_size, "train.precision": "bf16"}))
    whole, there = plan.micro_batch_size, 24 * 10**9
    assert whole == 64
    held = 0
    monkeypatch.setattr(device_memory, "memory_bytes", lambda device: there)
    monkeypatch.setattr(device_memory, "held_by_others", lambda device: held)
    gpu = compute_on("cuda")
    fitted = device_memory.fit_micro_batches(plan, gpu, World())
    assert fitted.micro_batch_size == fitted.config.train.micro_batch_size == 32
    assert fitted.n_micro_batches == 2
    assert fitted.portable_config == plan.portable_config
    device_memory.check_device_memory(fitted, gpu, local_size=1)
    fits, exceeds = (plan_memory(each).total_bytes * 1.1 for each in (fitted, plan))
    assert fits < there - CONTEXT_BYTES < exceeds
    there = 10**9  # which fits nothing: it is refused as it was
    assert device_memory.fit_micro_batches(plan, gpu, World()) is plan
    there = 80 * 10**9
    assert device_memory.fit_micro_batches(plan, gpu, World()) is plan  # the whole batch fits
    there = 24 * 10**9
    assert device_memory.fit_micro_batches(plan, compute_on("cpu"), World()) is plan
    held = 8 * 10**9  # by other programs
    assert device_memory.fit_micro_batches(plan, gpu, World()).micro_batch_size == 16
    asked = plan_of_size(32, open_size)
    assert device_memory.fit_micro_batches(asked, gpu, World()) is asked


def test_the_gpu_with_the_least_memory_sets_the_micro_batches(monkeypatch):
    class Others(World):
        def all_gather(self, value):
            return [value, 8]

    plan = plan_of_size(None, {"train.tokens_per_step": 65536})
    monkeypatch.setattr(device_memory, "memory_bytes", lambda device: 24 * 10**9)
    monkeypatch.setattr(device_memory, "held_by_others", lambda device: 0)
    assert device_memory.fit_micro_batches(plan, compute_on("cuda"), Others()).micro_batch_size == 8


def plan_of_size(size, settings):
    return make_plan(load_config("gpt2-124m", {**settings, "train.micro_batch_size": size}))


def test_kernels_that_fail_their_check_are_warned_of(tmp_path, monkeypatch):
    def on_a_gpu(plan, world):
        found = choose_compute(plan, world)
        forms = GpuForms(obstacles={"drops_by_blocks": "their dq is off by 3.0e-01"})
        return replace(found, forms=forms)

    choose_compute = start.choose_compute
    monkeypatch.setattr(start, "choose_compute", on_a_gpu)
    (tmp_path / "text.txt").write_text("some text " * 20)
    said, _ = fit(tmp_path, {"path": str(tmp_path / "text.txt")})
    (line,) = (line for line in said.splitlines() if line.startswith("warning: model.attention"))
    assert line.startswith("warning: model.attention.dropout=0.0 writes attention's weights out")
    assert "tried   no drops by blocks (their dq is off by 3.0e-01)" in said
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["fused_attention_dropout"] is False
    assert environment["gpu_forms"]["drops_by_blocks"] == "their dq is off by 3.0e-01"


def test_seen_and_loss_tokens_are_counted_apart(tmp_path):
    """Speed is that of the tokens seen, padding included, as a plan's is."""
    lines = [json.dumps({"text": "ab"}) for _ in range(20)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    data = {"path": str(tmp_path / "text.jsonl"), "order": "documents"}
    said, records = fit(tmp_path, data, eval_interval=None)
    step = next(record for record in records if record["event"] == "train")
    n_seen = next(record for record in records if record["event"] == "start")["tokens_per_step"]
    assert step["tokens"] == n_seen > 4
    assert step["loss_tokens"] == 4  # one target in each of four rows
    assert step["tokens_per_second"] * step["step_seconds"] == pytest.approx(n_seen)
    n_steps = records[-1]["step"]
    assert f"learns  {4 * n_steps} loss tokens of these" in said
    record = read_run(tmp_path / "run")
    assert (record.tokens, record.loss_tokens) == (n_seen * n_steps, 4 * n_steps)


def test_a_run_starts_with_one_plan(tmp_path, monkeypatch):
    made = []
    make = Plan.__init__

    def count(plan, *arguments, **named):
        made.append(plan)
        make(plan, *arguments, **named)

    monkeypatch.setattr(Plan, "__init__", count)
    text = tmp_path / "text.txt"
    text.write_text("one and two and three " * 40)
    fit(tmp_path / "folder", {"path": str(text)})
    assert len(made) == 1


def test_a_schedule_of_ones_own_has_no_warm_up_to_be_warned_of(tmp_path):
    sections = {"train": {"steps": 4}, "schedule": {"warmup_steps": 3}, "optimizer": {}}
    for name, schedule in (("configured", None), ("own", lambda step: 1e-3)):
        asked = tiny_config(**sections)
        Trainer(asked, run_dir=tmp_path / name, schedule=schedule, quiet=True).fit()
        log = (tmp_path / name / "log.txt").read_text()
        assert ("schedule.warmup_steps=3 take most" in log) == (schedule is None)


def test_a_disk_too_small_for_what_is_kept_is_told_before_the_first_step(tmp_path, monkeypatch):
    plan = make_plan(load_config("quickstart", {"train.steps": 400}), 100, 1000)
    saved = 3 * 4 * plan.n_parameters  # weights and two moments, fp32
    kept = plan.config.checkpoint.keep_last + 1 + 1  # the best, and the one being written
    for n_bytes, n_there, is_told in ((kept, 0, False), (kept - 1, 0, True), (kept - 1, 1, False)):
        monkeypatch.setattr(
            start_warnings, "free_bytes", lambda _, n=n_bytes: n * saved + SPARE_BYTES
        )
        folder = tmp_path / f"{n_bytes}-{n_there}" / "checkpoints"
        for step in range(n_there):
            (folder / f"step-{step:08d}").mkdir(parents=True)
        told = disk_warnings(plan, folder)
        assert bool(told) == is_told, (n_bytes, n_there)
    assert disk_warnings(plan, tmp_path / "checkpoints")[0].startswith("checkpoints of 9.")
