"""Clusters: the device type, devices per node, node count, and the links between them.

Known devices are in `devices.toml` in this folder; `--cluster mine.toml:8x16` reads a file in the
same format. Bandwidths count one direction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from pentameter.config.choices import refuse_unknown
from pentameter.config.files.load import config_errors, parse_toml, read_small_file
from pentameter.config.messages import shown
from pentameter.config.schema import MatmulPrecision
from pentameter.config.section import Positive, Section, Switch
from pentameter.config.tables import packaged_table
from pentameter.errors import ConfigError, either, listed, nearest, printable
from pentameter.estimating.bytes.fit import CONTEXT_BYTES

MEASURED_FILE = "machine.toml"
"""The file in the cache folder in which `doctor --measure` describes this machine."""

# A number, not a bool. The ranges admit any machine, yet keep every time and price a finite float.
Teraflops = Annotated[float, Field(strict=True, ge=1e-6, le=1e6)]
Bytes = Annotated[float, Field(strict=True, ge=1e6, le=1e16)]
BytesPerSecond = Annotated[float, Field(strict=True, ge=1e3, le=1e16)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=10)]
Share = Annotated[float, Field(strict=True, ge=1e-4, le=1)]
Ratio = Annotated[float, Field(strict=True, ge=1e-2, le=1e3)]
Spread = tuple[Ratio, Ratio]
"""A range of measured ÷ planned seconds: (least, most), which four runs in five were between."""

UNKNOWN_SPREAD: Spread = (0.8, 1.6)
"""The range assumed for a device whose calibration no run has tested. It is that of published bf16
runs on Blackwell, which is planned with Hopper's fractions."""

LINEAR_ONLY = {"fp8": "bf16"}
"""Number formats of linear layers' matmuls alone, each with the precision of everything else in
such a run: weights, activations, attention and the head are kept in 16 bits."""


def trained_precision(precision: str) -> str:
    """Return the `train.precision` that goes with the planned `precision`: itself, or for a format
    in LINEAR_ONLY the precision of everything but linear layers' matmuls."""
    return LINEAR_ONLY.get(precision, precision)


def multiplied_in(precision: str, matmul_precision: MatmulPrecision | None) -> str:
    """Return the number format in which a GPU multiplies, as a key in `Device.tflops`. It is
    `precision` (a `train.precision`), unless that is fp32 or tf32 and `matmul_precision` selects
    the other one. `medium` sounds like bf16, but is TF32 in torch
    (`torch.set_float32_matmul_precision`, CUDA and ROCm)."""
    if precision not in ("fp32", "tf32") or matmul_precision is None:
        return precision
    match matmul_precision:
        case "highest":
            return "fp32"
        case "high" | "medium":
            return "tf32"
        case unknown:
            refuse_unknown(unknown, "train.matmul_precision", "the planner's peaks")


class ProductShares(Section):
    """Fractions of a device's peak FLOP/s that matmuls and attention reach."""

    product_share: Share
    """Fraction of the peak for a matmul that fills the device."""
    attention_share: Share
    """Fraction of the peak for fused attention over a long context, in the forward pass."""
    attention_backward: Ratio = 2.5
    """The backward time ÷ the forward time for fused attention: five matmuls against two, at equal
    speed (Dao et al. 2022, "FlashAttention", algorithm 4)."""
    step_share: Ratio = 1.0
    """The speed at which a step's passes compute everything ÷ the speed in isolation. The other
    fractions were measured on isolated operations, whose inputs are still cached."""
    kernel_seconds: Seconds = 5e-6
    """Minimum seconds for any operation, however small."""


class Calibration(ProductShares):
    """Fractions of a device's published figures that training reaches, fitted to measurements. The
    fractions inherited from ProductShares hold for every precision that `precisions` does not
    list."""

    fitted_on: str
    """The measurements that the fractions are fitted to, in words. It begins with "nothing" if
    there are none."""
    precisions: dict[str, ProductShares] = Field(default_factory=dict)
    """Maps a `train.precision` to its own matmul fractions."""
    fused: dict[str, ProductShares] = Field(default_factory=dict)
    """Maps a `train.precision` to the fractions in the fused CPU step, whose feed-forward layers
    count activation functions as part of their matmuls."""
    assumes: str = "usual fractions of the device's figures"
    """Properties of the runs that it is fitted to: their libraries' year, the power allowed."""
    spread: dict[str, Spread] = Field(default_factory=dict)
    """Maps a precision to the Spread of measured runs; UNKNOWN_SPREAD where it is not listed."""
    memory_share: Share
    """Fraction of the memory bandwidth reached in element-wise operations and in the optimizer."""
    link_share: Share
    """Fraction of the link bandwidth within a node reached in collectives on large tensors."""
    network_share: Share
    """Fraction of the network bandwidth between nodes reached in collectives on large tensors."""
    interference_share: Share = 0.3
    """Overlapped communication slows compute by this fraction of its time: its kernels occupy some
    processors, and both read memory."""
    exponential_seconds: Seconds = 0.0
    """Seconds per element for an exponential, or an equally slow function; 0 if moving the element
    through memory takes longer, as on a GPU."""
    fresh_bytes_per_second: BytesPerSecond | None = None
    """Write speed, in bytes per second, to memory that the system has just mapped, page by page, as
    a ZeRO run on a CPU does again and again. None if an allocator keeps memory, as on a GPU."""
    counts_seconds: Seconds = 0.0
    """Seconds that a device waits in each forward pass of a layer whose experts are sharded: the
    host reads how many rows arrive before it launches what computes with them. Recomputation keeps
    the counts, and does not wait."""
    hop_seconds: Seconds = 5e-6
    """Seconds for the smallest message between two devices in the same node."""
    network_hop_seconds: Seconds = 15e-6
    """Seconds for the smallest message between devices in different nodes."""

    def products(self, precision: str, *, fused: bool = False) -> ProductShares:
        """Return the matmul fractions for a `train.precision`; with `fused`, those in the fused CPU
        step if known. If they set no `kernel_seconds`, the calibration's own value is used."""
        shares = self.precisions.get(precision, self)
        shares = self.fused.get(precision, shares) if fused else shares
        if "kernel_seconds" in shares.model_fields_set:
            return shares
        return shares.model_copy(update={"kernel_seconds": self.kernel_seconds})


UNCALIBRATED = Calibration(
    fitted_on="nothing: usual shares",
    product_share=0.65,
    attention_share=0.4,
    memory_share=0.75,
    link_share=0.7,
    network_share=0.6,
)


class Device(Section):
    """A device type with its vendor's peak figures and a Calibration; one entry in
    `devices.toml`."""

    name: str = ""
    """The device's name for people."""
    driver_names: str = ""
    """A regular expression, searched for in the name that the driver reports."""
    tflops: dict[str, Teraflops]
    """Maps `train.precision`, and formats in LINEAR_ONLY, to the peak matmul speed, in TFLOP/s."""
    units: Positive = 1
    """Processors that each work on one matmul tile (streaming multiprocessors); 1 if matmuls are
    not tiled this way, as on a CPU."""
    memory_bytes: Bytes | None = None
    memory_bytes_per_second: BytesPerSecond | None = None
    link_bytes_per_second: BytesPerSecond | None = None
    """Bandwidth from a device to the others in its node, in one direction."""
    network_bytes_per_second: BytesPerSecond | None = None
    """Bandwidth from a device to other nodes, in one direction: its fraction of the node's
    bandwidth."""
    shared: Switch = False
    """Whether these figures are a node's, which all its ranks share, as on a CPU."""
    calibration: Calibration = UNCALIBRATED
    calibration_key: str = ""
    """The calibration's name in the file."""
    spread: dict[str, Spread] | None = None
    """The calibration's `spread` on this device, if the calibration was fitted to runs on other
    devices and tested on this one; else None."""
    source: str
    """The publication or measurement that the figures come from."""
    date: str
    """The date of publication or measurement."""

    @property
    def can_be_planned(self) -> bool:
        """Whether memory size, memory bandwidth and link bandwidth are all known, not only the
        peak."""
        known = self.memory_bytes, self.memory_bytes_per_second, self.link_bytes_per_second
        return None not in known

    def spread_of(self, precision: str) -> Spread | None:
        """Return (least, most): the range of measured ÷ planned step time in which four of five
        measured runs on this device were. None if no run has tested the plan. `precision` is a
        `train.precision`, or a number format in LINEAR_ONLY."""
        known = self.calibration.spread if self.spread is None else self.spread
        return known.get(precision)

    def peak_flops(
        self, precision: str, matmul_precision: MatmulPrecision | None = None
    ) -> float | None:
        """Return the peak matmul FLOP/s for `train.precision` and `train.matmul_precision`; None if
        unknown. If TF32 is allowed but the device has none, as on a CPU, this is the fp32 peak."""
        key = multiplied_in(precision, matmul_precision)
        if key == "tf32" and (self.shared or (precision == "fp32" and key not in self.tflops)):
            key = "fp32"
        teraflops = self.tflops.get(key)
        return None if teraflops is None else teraflops * 1e12


class Cluster(Section):
    """Identical nodes with identical devices, one rank per device."""

    device_key: str
    device: Device
    node_size: Positive
    """Devices per node, one rank each."""
    n_nodes: Positive

    @property
    def n_devices(self) -> int:
        """Total device count."""
        return self.node_size * self.n_nodes

    @property
    def obstacle(self) -> str | None:
        """The reason, with a remedy, that communication cannot be estimated: there are several
        nodes, and the device's network is not known. None if it can be."""
        if self.n_nodes == 1 or self.device.network_bytes_per_second is not None:
            return None
        return (
            f"no network between nodes is known of {self.device_key}; add "
            "network_bytes_per_second to its table"
        )

    @property
    def sharing(self) -> int:
        """Number of ranks that together have one device's figures: on a CPU all ranks of a node, on
        other devices 1."""
        return self.node_size if self.device.shared else 1

    @property
    def usable_bytes(self) -> float:
        """Bytes of device memory that one rank may use: the device's, less CONTEXT_BYTES on a GPU;
        on a CPU, its fraction of the node's memory."""
        assert self.device.memory_bytes is not None  # checked by parse_cluster
        reserved = 0.0 if self.device.shared else CONTEXT_BYTES
        return self.device.memory_bytes / self.sharing - reserved

    @property
    def memory_bandwidth(self) -> float:
        """Bytes per second that one rank's element-wise operations reach."""
        assert self.device.memory_bytes_per_second is not None
        share = self.device.calibration.memory_share
        return self.device.memory_bytes_per_second * share / self.sharing

    def peak_flops(self, precision: str, matmul_precision: MatmulPrecision | None = None) -> float:
        """Return one rank's peak matmul FLOP/s for `train.precision` and `train.matmul_precision`.
        Raises ConfigError if the device's peak in them is unknown."""
        peak = self.device.peak_flops(precision, matmul_precision)
        if peak is None:
            option = "--matmuls " if precision in LINEAR_ONLY else "train.precision="
            raise ConfigError(
                f"{option}{precision}: a peak in "
                f"{multiplied_in(precision, matmul_precision)} is not known of {self.device_key}, "
                f"if it has one; known: {listed(self.device.tflops)}"
            )
        return peak / self.sharing

    def resized(self, n_devices: int) -> Cluster:
        """Return a cluster with at least `n_devices` devices in nodes like these: as many nodes as
        needed, or one node with `n_devices` devices if that is fewer than `node_size`."""
        node_size = min(self.node_size, n_devices)
        n_nodes = -(-n_devices // node_size)
        return self.model_copy(update={"node_size": node_size, "n_nodes": n_nodes})

    def to_json(self) -> dict[str, Any]:
        """Return the cluster as a JSON object: device, node size and count, usable bytes, and the
        sources of its figures."""
        return {
            "device": self.device_key,
            "name": self.device.name or self.device_key,
            "node_size": self.node_size,
            "n_nodes": self.n_nodes,
            "n_devices": self.n_devices,
            "usable_bytes": round(self.usable_bytes),
            "source": f"{self.device.source} ({self.device.date})",
            "calibration": self.device.calibration.fitted_on,
            "assumes": self.device.calibration.assumes,
        }

    def __str__(self) -> str:
        return f"{self.device_key}:{self.node_size}x{self.n_nodes}"


@cache
def known_devices() -> Mapping[str, Device]:
    """Return the devices in the package's `devices.toml` by key, in file order."""
    file = resources.files("pentameter.estimating") / "devices.toml"
    return _devices(file.read_bytes(), "devices.toml", {})


def device_of_driver(name: str) -> Device | None:
    """Return the known device whose `driver_names` match `name`, a driver's name for it ("NVIDIA
    A100-SXM4-80GB"); None if unknown."""
    found = (
        device
        for device in known_devices().values()
        if device.driver_names and re.search(device.driver_names, name)
    )
    return next(found, None)


def read_devices(path: Path) -> Mapping[str, Device]:
    """Read a TOML file with devices and return them by key. They may use the calibrations in the
    package's own table.

    Raises ConfigError if the file is missing or its content is invalid.
    """
    label = printable(str(path))
    with config_errors(label):
        text = read_small_file(path, label)
    known = packaged_table("estimating/devices.toml")["calibrations"]
    return _devices(text, label, known)


def parse_cluster(text: str) -> Cluster:
    """Parse `DEVICE:GPUSxNODES`, such as `h100-80gb:8x16`. DEVICE is a known device or the path to
    a TOML file with one; GPUS (devices per node) and NODES are each 1 if omitted.

    Raises ConfigError for an unknown device, an invalid shape, a device whose memory or links are
    not known, or several nodes without a known network.
    """
    key, _, shape = text.strip().rpartition(":")
    if not key:
        key, shape = shape, "1x1"
    sizes = re.fullmatch(r"(\d{1,6})(?:[x×](\d{1,6}))?", shape)
    if sizes is None or not all(map(int, sizes.groups("1"))):
        raise ConfigError(
            f"--cluster {text!r} must be DEVICE:GPUSxNODES, such as a100-80gb:8x128 (1,024 devices "
            "in nodes of 8)"
        )
    device = _device(key)
    if not device.can_be_planned:
        raise ConfigError(
            f"--cluster {text!r}: only the peak of {key} is known here, not its memory and links; "
            "describe it in a TOML file (docs/planner.md), or take one of: "
            + listed(name for name, each in known_devices().items() if each.can_be_planned)
        )
    node_size, n_nodes = map(int, sizes.groups("1"))
    name = Path(key).stem if key.endswith(".toml") else key
    cluster = Cluster(device_key=name, device=device, node_size=node_size, n_nodes=n_nodes)
    if (obstacle := cluster.obstacle) is not None:
        raise ConfigError(f"--cluster {text!r}: {obstacle}")
    return cluster


def _device(key: str) -> Device:
    if key.endswith(".toml"):
        devices = read_devices(Path(key))
        if len(devices) != 1:
            raise ConfigError(
                f"{printable(key)} describes {len(devices)} devices ({listed(devices)}); "
                "a cluster's file describes one"
            )
        return next(iter(devices.values()))
    devices = known_devices()
    if key.lower() not in devices:
        names = [name for name, device in devices.items() if device.can_be_planned]
        longer = [name for name in names if name.startswith(f"{key.lower()}-")]
        near = longer or [each for each in (nearest(key.lower(), names),) if each]
        hint = f"; did you mean {either(near)}?" if near else "."
        raise ConfigError(
            f"device {key!r} is not known{hint} Known: {listed(names)}, or a TOML file of your own "
            "(docs/planner.md)"
        )
    return devices[key.lower()]


def _devices(text: bytes, label: str, calibrations: Mapping[str, Any]) -> Mapping[str, Device]:
    tree = parse_toml(text, label)
    unknown = tree.keys() - {"devices", "calibrations"}
    own = tree.get("calibrations", {})
    if unknown or not isinstance(tree.get("devices"), dict) or not isinstance(own, dict):
        raise ConfigError(
            f"{label}: holds {listed(sorted(unknown)) or 'no table'}; it must hold tables "
            "[devices.NAME], and may hold [calibrations.NAME]"
        )
    calibrations = {**calibrations, **own}
    found = {}
    for name, values in tree["devices"].items():
        named = values.get("calibration") if isinstance(values, dict) else None
        if isinstance(named, str):
            if named not in calibrations:
                raise ConfigError(
                    f"{label}: devices.{name}.calibration={named!r} is not known; known: "
                    f"{listed(calibrations)}"
                )
            fitted = {"calibration": calibrations[named], "calibration_key": named}
            values = {**values, **fitted}  # noqa: PLW2901
        try:
            found[name] = Device.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(("devices", name, *map(str, first["loc"])))
            value = "" if first["type"] == "missing" else f"={shown(first['input'])}"
            raise ConfigError(
                f"{label}: {printable(path)}{value}: {first['msg']}; docs/planner.md has a device "
                "as it is written, with units"
            ) from None
    return found


def group_shape(stride: int, size: int, node_size: int) -> tuple[int, int]:
    """Return (members per node, node count) for a communication group with `size` ranks that are
    `stride` ranks apart, in nodes with `node_size` ranks."""
    within = max(1, min(size, math.ceil(node_size / stride))) if stride < node_size else 1
    return within, -(-size // within)
