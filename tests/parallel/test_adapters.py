"""Low-rank adapters: what they compute, what is trained, saved, merged and handed to PEFT."""

import json
from dataclasses import replace

import pytest
import torch
from cache_of_a_folder import cache_of_a_file  # noqa: F401
from pydantic import ValidationError
from safetensors.torch import load_file
from tiny_runs import config, fit

from pentameter.checkpoint.folders.load_model import load_model, open_model
from pentameter.checkpoint.folders.model_folder import save_model
from pentameter.checkpoint.folders.opening import open_checkpoint
from pentameter.checkpoint.hugging_face.folder import export_hf, hub_name
from pentameter.checkpoint.hugging_face.peft import export_peft
from pentameter.errors import ConfigError
from pentameter.estimating.bytes.plan_estimates import plan_state_bytes
from pentameter.parallel.assemble import assemble
from pentameter.planning.plan import make_plan
from pentameter.processes.launch.local_launch import check_launch

SIZES = {"context_length": 16, "n_layers": 2, "n_heads": 2, "d_model": 16, "vocab_size": 16}
MODEL = {**SIZES, "qkv_bias": True, "bias": True}
LORA = {"rank": 3, "alpha": 6.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run of a few steps, whose model is tuned."""
    folder = tmp_path_factory.mktemp("runs") / "base"
    fit(folder, sections={"model": MODEL, "train": {"steps": 4}})
    return folder


def tuned(folder, base, steps=6, **sections):
    constant = {"name": "constant"}  # so that a run of more steps is the same run
    sections = {"model": MODEL, "lora": LORA, "schedule": constant, **sections}
    sections["train"] = {"steps": steps, "eval_interval": 3, **sections.get("train", {})}
    return fit(folder, init_from=base, sections=sections)


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tuned"
    trainer, _ = tuned(folder, base)
    return folder, trainer


def plan(**sections):
    return make_plan(config(model=MODEL, **sections))


def test_an_adapted_model_begins_as_it_was_and_learns_by_its_adapters(run, base):
    _, trainer = run
    before = load_model(base).model.state_dict()
    after = trainer.engine.model.state_dict()
    names = after.keys() - before.keys()
    assert names == {
        f"{path}.{name}" for path in trainer.plan.adapted_modules for name in ("lora_a", "lora_b")
    }
    assert len(names) == 2 * 4 * 2
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(after[name].any() for name in names)
    held = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert sum(p.numel() for p in held) == trainer.plan.n_trained
    assert all(p.requires_grad == ("lora" in n) for n, p in trainer.engine.named_parameters())
    fresh = assemble(plan(lora=LORA), torch.device("cpu"), "fp64", compiled=False).model
    plain = assemble(plan(), torch.device("cpu"), "fp64", compiled=False).model
    tokens = torch.arange(16)[None]
    assert torch.equal(fresh(tokens), plain(tokens))


def test_the_merged_model_computes_the_same(run, tmp_path):
    folder, trainer = run
    last = max((folder / "checkpoints").iterdir())
    stored = open_model(last)
    assert stored.config.lora.rank is None
    merged = load_model(last).model.double()
    tokens = torch.arange(16)[None]
    expected = trainer.engine.model.eval()(tokens)
    # Sums in fp32, in another order.
    torch.testing.assert_close(merged(tokens).float(), expected, rtol=0, atol=1e-5)
    export_hf(stored, tmp_path / "hf")
    theirs = load_file(tmp_path / "hf" / "model.safetensors")
    weight = stored.weights["blocks.0.mlp.up.weight"][...]
    assert torch.equal(theirs["transformer.h.0.mlp.c_fc.weight"], weight.t())


def test_peft_files_hold_the_same_sum(run, base, tmp_path):
    folder, _ = run
    stored = open_model(max((folder / "checkpoints").iterdir()))  # the best is step 0
    export_peft(stored, tmp_path / "peft")
    export_hf(open_model(base), tmp_path / "base")
    export_hf(stored, tmp_path / "merged")
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    assert (settings["r"], settings["lora_alpha"], settings["fan_in_fan_out"]) == (3, 6.0, True)
    adapters = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    changed = [name for name in weights if not torch.equal(weights[name], merged[name])]
    assert len(changed) == len(adapters) // 2 == 8
    for name in changed:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (adapters[f"{module}.lora_{each}.weight"] for each in "AB")
        # As PEFT adds it where fan_in_fan_out: the weight is (inputs, outputs).
        sum_ = weights[name] + settings["lora_alpha"] / settings["r"] * (b @ a).t()
        torch.testing.assert_close(merged[name], sum_, rtol=0, atol=1e-6)
    with pytest.raises(ConfigError, match="has no adapters"):
        export_peft(open_model(base), tmp_path / "none")


def test_adapters_name_what_they_began_with(run, base, tmp_path):
    began = replace(open_model(base), base_model="owner/small")
    save_model(began, tmp_path / "imported")
    tuned(tmp_path / "run", tmp_path / "imported", steps=3)
    tuned(tmp_path / "run", tmp_path / "imported")  # continued
    stored = open_model(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert export_peft(stored, tmp_path / "peft").notes == ()
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "owner/small"
    unnamed = export_peft(open_model(max((run[0] / "checkpoints").iterdir())), tmp_path / "none")
    assert "name no base model" in unnamed.notes[0]


def test_a_model_in_the_hub_s_cache_has_its_name_there(tmp_path):
    cached = tmp_path / "models--owner--small-1.5b" / "snapshots" / "0123abc"
    assert hub_name(cached) == "owner/small-1.5b"
    assert hub_name(tmp_path / "small") == str(tmp_path.resolve() / "small")


def test_a_run_goes_on_exactly(run, base, tmp_path):
    folder, trainer = run
    tuned(tmp_path / "again", base, steps=3)
    again, _ = tuned(tmp_path / "again", base)
    assert again.folder.checkpoint.step == 3
    for name, tensor in trainer.engine.model.state_dict().items():
        assert torch.equal(tensor, again.engine.model.state_dict()[name]), name
    optimizer = open_checkpoint(max((folder / "checkpoints").iterdir())).tensors("optimizer")
    assert all("lora_" in name for name in optimizer)
    with pytest.raises(ConfigError, match=r"lora\.rank: 3 → 2"):
        tuned(tmp_path / "again", base, steps=9, lora={"rank": 2})


def test_merged_weights_begin_another_run(run, tmp_path):
    folder = max((run[0] / "checkpoints").iterdir())
    other, _ = tuned(tmp_path / "next", folder, steps=1, lora={"rank": 1, "targets": ("qkv",)})
    state = other.engine.model.state_dict()
    merged = load_model(folder).model.state_dict()
    assert torch.equal(state["blocks.1.mlp.up.weight"], merged["blocks.1.mlp.up.weight"])
    assert [name for name in state if "lora_a" in name] == [
        f"blocks.{layer}.attention.qkv.lora_a" for layer in range(2)
    ]


def test_the_plan_counts_what_is_trained():
    adapted, whole = plan(lora={"rank": 2, "targets": ["up"]}), plan()
    assert adapted.n_trained == 2 * (2 * 16 + 64 * 2)
    assert adapted.n_parameters == whole.n_parameters == whole.n_trained
    held, before = plan_state_bytes(adapted), plan_state_bytes(whole)
    assert held.gradients_bytes == 4 * adapted.n_trained
    assert held.optimizer_bytes == 8 * adapted.n_trained
    assert held.weights_bytes == before.weights_bytes + 4 * adapted.n_trained
    attention = 12 * 2 * 16 * 16
    model = (whole.flops_per_token - attention) // 6
    assert adapted.flops_per_token == 4 * model + 6 * adapted.n_trained + attention


def test_muon_trains_adapters(base, tmp_path):
    trainer, _ = tuned(tmp_path / "muon", base, steps=2, optimizer={"name": "muon"})
    (rule,) = trainer.optimizer.parts
    assert isinstance(rule, torch.optim.Muon)
    state = trainer.engine.model.state_dict()
    assert all(state[name].any() for name in state if name.endswith("lora_b"))


def test_a_rank_is_that_of_the_smallest_adapted_matrix_at_most():
    assert plan(lora={"rank": 16}).n_trained == 2 * 16 * (2 * 16 + 4 * 16 + 2 * 5 * 16)
    with pytest.raises(ConfigError, match=r"lora\.rank=17 is more .*\(48, 16\) .* at most rank 16"):
        plan(lora={"rank": 17})


def test_alpha_is_bounded():
    with pytest.raises(ValidationError, match="less than or equal to 65536"):
        plan(lora={"rank": 1, "alpha": 1e300})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"lora": {"rank": 2, "targets": ["q_proj"]}}, "'q_proj', which is no linear layer"),
        (
            {"lora": LORA, "parallel": {"tensor": 4, "tensor_mode": "2d"}},
            "not possible with parallel.tensor_mode='2d'",
        ),
        (
            {"lora": LORA, "parallel": {"pipeline": 2, "schedule": "zero-bubble"}},
            "not possible with parallel.schedule='zero-bubble'",
        ),
    ],
)
def test_refusals(sections, words):
    with pytest.raises(ConfigError, match=words):
        plan(**sections)


def test_a_layout_that_knows_no_adapters_is_refused_before_data_is_read():
    grid = config(model=MODEL, lora=LORA, parallel={"tensor": 4, "tensor_mode": "2d"})
    without_vocabulary = grid.model_copy(
        update={"model": grid.model.model_copy(update={"vocab_size": None})}
    )
    with pytest.raises(ConfigError, match=r"not possible with parallel\.tensor_mode='2d'"):
        check_launch(without_vocabulary, 4, None, oversubscribe=True, check_fit=False)
