"""What the processes of `test_sharded_models` do with a GPT whose matrices they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from counted_reads import counted_reads
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pentameter.checkpoint.folders.opening import open_checkpoint
from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.format.save_phases import Contents
from pentameter.checkpoint.format.tensor_reader import StoredRegion, StoredTensors
from pentameter.checkpoint.state.initial_weights import initial_weights
from pentameter.checkpoint.state.state_dicts import load_model_state, model_state
from pentameter.config.files.write import to_toml
from pentameter.config.schema import Config
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.errors import StorageError
from pentameter.model.gpt import build_model
from pentameter.processes.group.world import World

TOKENIZER = CharTokenizer("abcdefgh \n")


def configuration(**model: Any) -> Config:
    base = {"vocab_size": TOKENIZER.vocab_size, "vocab_multiple": 8, "context_length": 12}
    base |= {"n_layers": 2, "n_heads": 2, "d_model": 8, "bias": True, "qkv_bias": True}
    return Config.model_validate(
        {"model": {**base, **model}, "data": {"corpus": "stdlib"}, "train": {"batch_size": 2}}
    )


LLAMA = {
    "n_heads": 4,
    "n_kv_heads": 2,
    "positions": "rotary",
    "activation": "swiglu",
    "norm": "rmsnorm",
    "bias": False,
    "qkv_bias": False,
}
"""Keys of a Llama of that size."""
MIXTRAL = {**LLAMA, "n_experts": 5, "d_expert": 6, "router_renormalize": True}
"""Keys of a Mixtral of that size."""


def share(model: nn.Module, mesh: DeviceMesh, placements: list[Any]) -> None:
    """Leave a part of every matrix here; vectors stay whole."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim >= 2:
                shared = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
                module.register_parameter(name, shared)


def save_model_of_two(world: World, folder: Path) -> tuple[Config, CharTokenizer]:
    config = configuration()
    model = build_model(config.model, seed=5)
    share(model, init_device_mesh("cpu", (2,)), [Shard(1)])
    extra = {"config.toml": to_toml(config).encode(), "tokenizer.json": TOKENIZER.to_bytes()}
    store = CheckpointStore(folder / "checkpoints", run_id="r", config_hash="c")
    tensors = {"model": model_state(model), "optimizer": {}}
    store.save(Contents(3, tensors, {"step": 3}, extra, {"data": 1, "tensor": 2}), world)
    return config, TOKENIZER


def initialize_from(world: World, folder: Path) -> list[str]:
    """Names of parameters of which this process did not get its part."""
    return _wrong_parts(folder, configuration(vocab_multiple=4, context_length=7))


def initialize_from_llama(world: World, folder: Path) -> list[str]:
    """The same of a Hugging Face folder, whose matrices are put together from several of theirs;
    also of a mixture whose experts begin as copies, with noise and channels of their own."""
    dense = configuration(**LLAMA, vocab_multiple=4, context_length=7)
    mixture = configuration(**LLAMA, n_experts=3, router_renormalize=True)
    options = {"upcycle_noise": 0.5, "upcycle_drop": 0.5}
    mixture = mixture.model_copy(update={"train": mixture.train.model_copy(update=options)})
    return [*_wrong_parts(folder, dense), *_wrong_parts(folder, mixture)]


def _wrong_parts(folder: Path, config: Config) -> list[str]:
    weights = initial_weights(folder, config, TOKENIZER)
    true, model = (build_model(config.model, seed=seed) for seed in (1, 1))
    weights.load_into(true)  # as one process does
    mesh = init_device_mesh("cpu", (2, 2))
    wrong = []
    for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Shard(0)]):
        model, expected = build_model(config.model, seed=1), build_model(config.model, seed=1)
        expected.load_state_dict(true.state_dict())
        share(model, mesh, placements)
        share(expected, mesh, placements)
        weights.load_into(model)
        wrong += [
            name
            for (name, own), other in zip(
                model_state(model).items(), model_state(expected).values(), strict=True
            )
            if not torch.equal(_local(own), _local(other))
        ]
    return wrong


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def initialize_from_theirs(world: World, folder: Path) -> list[str]:
    """The same of two Hugging Face folders, one of them with a tensor for each expert."""
    mixtral = configuration(**MIXTRAL, vocab_multiple=4, context_length=7)
    return [
        *initialize_from_llama(world, folder / "llama"),
        *_wrong_parts(folder / "mixtral", mixtral),
    ]


def load_wrongly(world: World, folder: Path) -> dict[str, Any]:
    """What each process says of a model that does not fit in the second process alone."""
    tensors = open_checkpoint(folder / "checkpoints" / "step-00000003").tensors("model")
    mesh = init_device_mesh("cpu", (2,))
    outcomes: dict[str, Any] = {"unchanged": True}

    def attempt(case: str, change: Any, everywhere: bool = False) -> None:
        model = build_model(configuration().model, seed=1)
        share(model, mesh, [Shard(0)])
        if world.rank == 1 or everywhere:
            change(model)
        before = {name: _local(tensor).clone() for name, tensor in model_state(model).items()}
        try:
            load_model_state(model, tensors, world)
            outcomes[case] = "loaded"
        except Exception as error:
            outcomes[case] = f"{type(error).__name__}: {error}"
        for name, tensor in model_state(model).items():
            outcomes["unchanged"] &= torch.equal(_local(tensor), before[name])

    def widen(model: nn.Module) -> None:
        model.final_norm.weight = nn.Parameter(torch.ones(9))

    def doubled(model: nn.Module) -> None:
        model.final_norm.weight = nn.Parameter(model.final_norm.weight.detach().double())

    def without(model: nn.Module) -> None:
        model.blocks["0"].mlp.up.bias = None

    attempt("missing", lambda model: model.add_module("new", nn.Linear(2, 2, bias=False)))
    attempt("unexpected", without, everywhere=True)
    attempt("shape", widen)
    attempt("dtype", doubled)
    return outcomes


def count_reads(world: World, folder: Path) -> dict[str, Any]:
    """How many elements this process read and has, and what it says when one process cannot."""
    tensors = open_checkpoint(folder / "checkpoints" / "step-00000003").tensors("model")
    model = build_model(configuration().model, seed=1)
    share(model, init_device_mesh("cpu", (2,)), [Shard(0)])
    outcomes = {"has": sum(_local(tensor).numel() for tensor in model_state(model).values())}

    def fail(self: StoredTensors, region: StoredRegion) -> torch.Tensor:
        raise StorageError(f"cannot read {region.path}")

    with pytest.MonkeyPatch.context() as patch:
        n_read = counted_reads(patch)
        load_model_state(model, tensors, world)
    outcomes["read"] = sum(n_read)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(StoredTensors, "read", fail)
        try:
            load_model_state(model, tensors, world)
        except StorageError as error:
            outcomes["error"] = str(error)
    return outcomes
