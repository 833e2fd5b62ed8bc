"""The one answer to: can the fused step run a plan, do the AMX kernels serve it, and if not, why?

An obstacle is a phrase that names what stands in the way, for a person to read; None says yes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict

from pentameter.config.messages import shown
from pentameter.config.schema import ModelConfig
from pentameter.fused_cpu import amx
from pentameter.fused_cpu.activations import ACTIVATIONS
from pentameter.fused_cpu.kernels import CENTRED
from pentameter.machine.capabilities import Capabilities
from pentameter.planning.layout import Layout
from pentameter.planning.plan import Plan
from pentameter.processes.world import World

ANY = None

FUSES: Mapping[str, Collection[object] | None] = {
    "activation": ACTIVATIONS,
    "norm": CENTRED,
    "norm_position": ("pre",),
    "positions": ("learned", "sinusoidal", "rotary"),
    "qk_norm": (None, "head", "width"),
    "sliding_window": (None,),
    "sliding_window_pattern": ANY,  # of sliding windows
    "parallel_residual": (False,),
    **dict.fromkeys(("rope_theta", "rotary_fraction", "rope_scaling"), ANY),
    **dict.fromkeys(("n_kv_heads", "head_size", "norm_eps", "logit_softcap"), ANY),
    **dict.fromkeys(("vocab_size", "vocab_multiple", "context_length"), ANY),
    **dict.fromkeys(("n_layers", "n_heads", "d_model", "d_ff"), ANY),
    **dict.fromkeys(("tied_head", "head_bias", "qkv_bias", "bias", "embedding_scale"), ANY),
    **dict.fromkeys(("dropout", "attention_dropout", "embedding_dropout"), ANY),
    **dict.fromkeys(("init", "init_std", "residual_init_scale"), ANY),
}
"""Key of `[model]` → the values that `fused_loss_sum` computes, ANY where it takes them all from
the plain module. A key or a value that is not here is left to the plain module as a whole."""


def architecture_obstacle(config: ModelConfig) -> str | None:
    """The first key of `[model]`, with its value, that `fused_loss_sum` does not compute; None
    where it computes the architecture."""
    for key in type(config).model_fields:
        possible, value = FUSES.get(key, ()), getattr(config, key)
        if possible is not None and value not in possible:
            return f"model.{key}={shown(value)}"
    return None


def fused_obstacle(plan: Plan) -> str | None:
    """The first setting of `plan`, with its value, that the fused step does not know: torch then
    compiles the plain model as a whole. None where the fused step runs the plan."""
    if plan.built_by is not None:
        return f"the module that {plan.built_by} builds"
    obstacle = architecture_obstacle(plan.config.model)
    if obstacle is not None:
        return obstacle
    if plan.config.lora.rank is not None:
        return f"lora.rank={plan.config.lora.rank}"
    copies = asdict(Layout(data=plan.layout.data))  # all that the fused step can be divided into
    for name, value in asdict(plan.layout).items():
        if value != copies[name]:
            return f"parallel.{name}={value}"
    how = plan.config.train.activation_checkpoint
    return None if how is None else f"train.activation_checkpoint={how!r}"


def choose_kernels(
    plan: Plan, precision: str, capabilities: Capabilities, world: World
) -> tuple[str, bool]:
    """How a compiled step is computed on a CPU, a phrase for the reason of compiling, and whether
    the AMX kernels serve it. Collective: they serve all processes of `world` or none."""
    obstacle = fused_obstacle(plan)
    if obstacle is not None:
        return f"; the plain model as a whole, as the fused step does not know {obstacle}", False
    if precision != "bf16":
        return "", False
    missing = amx.load(capabilities)
    missing_anywhere = next((each for each in world.all_gather(missing) if each is not None), None)
    if missing_anywhere is not None:
        amx.unload()  # they round differently from what the others compute with
        return f"; {missing_anywhere}", False
    obstacle = amx.attention_obstacle(plan.config.model)
    return f"; with AMX kernels{f', but not for attention: {obstacle}' if obstacle else ''}", True
