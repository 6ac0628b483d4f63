"""The catalogue: which hardware classes and models exist, what they hold, and how fast the one runs the other.

Classes are data. The ones that ship lie in ``data/*.toml`` and ``data/profiles.json``; a fleet's own configuration
changes them or adds new ones in tables of the same shape, profiles included.
"""

from collections.abc import Mapping
from importlib import resources
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct, field

from quartet_core.profile import Profile

GIB = 1 << 30

RUNTIME_BYTES_PER_GPU = 4_000_000_000
"""Memory an engine needs besides weights and KV: activations, graphs, communication buffers. The memory model of
aiconfigurator (``memory_gb`` less our weights, over eleven set-ups) gives 3.9 to 4.3 GB per GPU."""

ProfileKey = tuple[str, str, str, int]
"""(hardware class, model, weight precision, TP degree)."""

Overrides = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Tables as TOML gives them: ``{"hardware": {name: {...}}, "models": {name: {...}}}``. The values are whatever the
file says, and are checked when they become classes."""

_Entry = TypeVar("_Entry", bound=Struct)


class UnknownProfile(LookupError):
    """``what`` has no entry in the catalogue; ``allowed`` are the nearest ones that have."""

    def __init__(self, what: str, allowed: tuple[str, ...]) -> None:
        super().__init__(f"no {what} in the catalogue; known: {', '.join(allowed) or 'none'}")
        self.what = what
        self.allowed = allowed


class WrongEntry(ValueError):
    """The table ``key`` cannot be read: ``reason``; ``allowed`` are the keys it may have."""

    def __init__(self, key: str, reason: str, allowed: tuple[str, ...]) -> None:
        super().__init__(f"[{key}]: {reason}; keys: {', '.join(allowed)}")
        self.key = key
        self.reason = reason
        self.allowed = allowed


class HostLink(Struct, frozen=True, forbid_unknown_fields=True):
    """The card's way to host memory and NIC. ``gb_per_s`` is what it really takes in, one way, in decimal GB/s."""

    pcie_gen: int
    gb_per_s: float


class GpuLink(Struct, frozen=True, forbid_unknown_fields=True):
    """The card's way to its neighbours in the same host, one way. ``nvlink`` stands for any direct GPU fabric."""

    kind: Literal["nvlink", "pcie"]
    gb_per_s: float


class HardwareClass(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of card.

    ``memory_gb`` is the vendor's decimal figure, ``software_gib`` what the driver reports where that is known.
    ``memory_bandwidth_gb_s`` and the dense TFLOPS are the vendor's; the ``measured_`` ones are timed weight reads and
    large matrix products. ``price_per_hour`` is in USD per GPU. ``idle_w`` and ``tdp_w`` bound its power.
    ``long_context`` says that long uncached prompts belong here. ``estimated`` marks classes whose times were never
    measured. ``pci_devices`` are the cards that belong here, as ``vendor:device`` in hex, for ``quartet detect``.
    """

    name: str
    memory_gb: float
    memory_bandwidth_gb_s: float
    bf16_tflops: float
    host_link: HostLink
    gpu_link: GpuLink
    tdp_w: float
    idle_w: float
    price_per_hour: float
    fp8_tflops: float | None = None
    software_gib: float | None = None
    measured_bandwidth_gb_s: float | None = None
    measured_bf16_tflops: float | None = None
    measured_fp8_tflops: float | None = None
    long_context: bool = False
    estimated: bool = False
    pci_devices: tuple[str, ...] = ()
    source: str = ""

    @property
    def memory_bytes(self) -> int:
        """Memory that software can use."""
        return int(self.memory_gb * 1e9) if self.software_gib is None else int(self.software_gib * GIB)

    def tflops(self, precision: str) -> float | None:
        """Dense TFLOPS for weights of ``precision``; None when the card cannot compute in it."""
        return self.fp8_tflops if precision == "fp8" else self.bf16_tflops

    def ratios_to(self, other: "HardwareClass", precision: str) -> tuple[float, float] | None:
        """(compute, bandwidth) of this class over ``other``'s; None when either cannot compute in ``precision``.

        Measured figures where both have them, else the vendors'.
        """
        mine, theirs = self.tflops(precision), other.tflops(precision)
        if mine is None or theirs is None:
            return None
        if precision == "fp8":
            compute = _ratio(self.measured_fp8_tflops, other.measured_fp8_tflops, mine / theirs)
        else:
            compute = _ratio(self.measured_bf16_tflops, other.measured_bf16_tflops, mine / theirs)
        bandwidth = self.memory_bandwidth_gb_s / other.memory_bandwidth_gb_s
        return compute, _ratio(self.measured_bandwidth_gb_s, other.measured_bandwidth_gb_s, bandwidth)


class ModelSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model's shape, as far as times and memory depend on it.

    ``weight_bytes`` per precision are the whole model's. KV is BF16; ``kv_bytes_per_token`` may be given where the
    usual formula does not hold (latent attention: give it, with ``kv_heads`` 1). ``tags`` are its categories.
    ``hidden``, ``heads``, ``intermediate`` and ``vocab`` say what one layer holds; 0 means that nobody told, and then
    the model cannot be cut into stages (``quartet_sim.partition``).
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    weight_bytes: dict[str, int]
    max_context: int
    given_kv_bytes_per_token: int | None = field(default=None, name="kv_bytes_per_token")
    block_tokens: int = 16
    hidden: int = 0
    heads: int = 0
    intermediate: int = 0
    vocab: int = 0
    tags: tuple[str, ...] = ()
    source: str = ""

    @property
    def kv_bytes_per_token(self) -> int:
        """BF16 KV bytes of one token over all GPUs: key and value, every layer, two bytes each."""
        if self.given_kv_bytes_per_token is not None:
            return self.given_kv_bytes_per_token
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    def weights(self, precision: str) -> int:
        """Weight bytes in ``precision``; raises `UnknownProfile` when the model has none."""
        found = self.weight_bytes.get(precision)
        if found is None:
            raise UnknownProfile(f"weights {self.name}/{precision}", tuple(sorted(self.weight_bytes)))
        return found


class ProfileEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One line of ``profiles.json``: a profile and what it is for."""

    hardware: str
    model: str
    precision: str
    tp: int
    profile: Profile

    @property
    def key(self) -> ProfileKey:
        """Where it goes in `Catalogue.profiles`."""
        return self.hardware, self.model, self.precision, self.tp


class Catalogue(Struct, frozen=True):
    """All hardware classes, models and profiles a process knows. Never changed in place: `merge` makes another."""

    hardware: dict[str, HardwareClass]
    models: dict[str, ModelSpec]
    profiles: dict[ProfileKey, Profile]

    def hardware_class(self, name: str) -> HardwareClass:
        """The class called ``name``; raises `UnknownProfile`."""
        found = self.hardware.get(name)
        if found is None:
            raise UnknownProfile(f"hardware class {name}", tuple(sorted(self.hardware)))
        return found

    def model(self, name: str) -> ModelSpec:
        """The model called ``name``; raises `UnknownProfile`."""
        found = self.models.get(name)
        if found is None:
            raise UnknownProfile(f"model {name}", tuple(sorted(self.models)))
        return found

    def profile(self, hardware: str, model: str, precision: str, tp: int) -> Profile:
        """Times of ``model`` on ``tp`` cards of ``hardware``; raises `UnknownProfile` naming those there are."""
        found = self.profiles.get((hardware, model, precision, tp))
        if found is None:
            same_model = sorted(key for key in self.profiles if key[1] == model)
            allowed = tuple(_spell(key) for key in same_model or sorted(self.profiles))
            raise UnknownProfile(f"profile {_spell((hardware, model, precision, tp))}", allowed)
        return found

    def kv_capacity_tokens(
        self, hardware: str, model: str, precision: str, tp: int, memory_utilisation: float = 0.9
    ) -> int:
        """Tokens of BF16 KV that fit, in whole blocks; 0 when the weights leave no room.

        Per GPU: the share of memory the engine may use, less its part of the weights and `RUNTIME_BYTES_PER_GPU`.
        Heads divide the KV among at most ``kv_heads`` GPUs. Raises `UnknownProfile`.
        """
        spec = self.model(model)
        memory = self.hardware_class(hardware).memory_bytes
        free = memory * memory_utilisation - spec.weights(precision) / tp - RUNTIME_BYTES_PER_GPU
        if free <= 0:
            return 0
        tokens = int(free * min(tp, spec.kv_heads) / spec.kv_bytes_per_token)
        return tokens - tokens % spec.block_tokens

    def merge(self, overrides: Overrides) -> "Catalogue":
        """This catalogue with tables changed or added.

        A table for a known name changes the keys it has; one for a new name must be whole. ``[hardware.X]`` may carry
        ``profiles``, an array of tables {model, precision, tp, profile}, and ``profiles_like``, the name of a class
        whose profiles are scaled (`scaled_profiles`) where X has none of its own. Raises `WrongEntry`.
        """
        unknown = set(overrides) - {"hardware", "models"}
        if unknown:
            raise WrongEntry(min(unknown), "unknown table", ("hardware", "models"))
        models = dict(self.models)
        for name, table in overrides.get("models", {}).items():
            models[name] = _merged(f"models.{name}", ModelSpec, models.get(name), name, table)
        hardware = dict(self.hardware)
        profiles = dict(self.profiles)
        scaled_like: list[tuple[str, str]] = []
        for name, table in overrides.get("hardware", {}).items():
            plain = dict(table)
            own = plain.pop("profiles", [])
            like = plain.pop("profiles_like", None)
            hardware[name] = _merged(f"hardware.{name}", HardwareClass, hardware.get(name), name, plain)
            for entry in _own_profiles(name, own):
                profiles[entry.key] = entry.profile
            if like is not None:
                scaled_like.append((name, like))
        for name, like in scaled_like:  # last, so that a class may be like one that comes later in the file
            if like not in hardware:
                raise WrongEntry(f"hardware.{name}.profiles_like", f"no class {like!r}", tuple(sorted(hardware)))
            for key, profile in scaled_profiles(hardware[name], hardware[like], profiles).items():
                profiles.setdefault(key, profile)
        return Catalogue(hardware, models, profiles)


def scaled_profiles(
    target: HardwareClass, base: HardwareClass, profiles: Mapping[ProfileKey, Profile]
) -> dict[ProfileKey, Profile]:
    """``base``'s profiles moved to ``target`` by their ratios and marked estimated.

    Precisions that ``target`` cannot compute in are left out. ``python -m quartet_sim.fit`` prints how far this rule is
    off where the truth is known: expect 10 to 25 %.
    """
    found: dict[ProfileKey, Profile] = {}
    for (hardware, model, precision, tp), profile in profiles.items():
        if hardware != base.name:
            continue
        ratios = target.ratios_to(base, precision)
        if ratios is not None:
            compute, bandwidth = ratios
            source = f"scaled from {base.name}: compute x{compute:.3g}, bandwidth x{bandwidth:.3g}"
            found[target.name, model, precision, tp] = profile.scaled(
                compute=compute, bandwidth=bandwidth, source=source
            )
    return found


def decode(hardware_toml: str, models_toml: str, profiles_json: bytes) -> Catalogue:
    """The catalogue in these texts: ``[hardware.*]`` and ``[models.*]`` tables, and a JSON array of `ProfileEntry`.

    Raises `WrongEntry` naming the table, or ``msgspec.DecodeError`` when a text is no TOML or JSON at all.
    """
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    tables |= msgspec.toml.decode(hardware_toml, type=dict[str, dict[str, dict[str, Any]]])
    tables |= msgspec.toml.decode(models_toml, type=dict[str, dict[str, dict[str, Any]]])
    entries = msgspec.json.decode(profiles_json, type=list[ProfileEntry])
    empty = Catalogue({}, {}, {entry.key: entry.profile for entry in entries})
    return empty.merge(tables)


def builtin() -> Catalogue:
    """The catalogue that ships with Quartet.

    The one place where core reads files: resources of this very package, read-only and part of its code.
    """
    data = resources.files("quartet_core") / "data"
    return decode(
        (data / "hardware.toml").read_text("utf-8"),
        (data / "models.toml").read_text("utf-8"),
        (data / "profiles.json").read_bytes(),
    )


def _ratio(mine: float | None, theirs: float | None, otherwise: float) -> float:
    return otherwise if mine is None or theirs is None else mine / theirs


def _spell(key: ProfileKey) -> str:
    hardware, model, precision, tp = key
    return f"{hardware}/{model}/{precision}/tp{tp}"


def _merged(key: str, kind: type[_Entry], known: _Entry | None, name: str, table: Mapping[str, Any]) -> _Entry:
    """``known`` with the keys of ``table`` changed, tables inside it key by key, as a checked ``kind``."""
    whole: dict[str, Any] = {} if known is None else msgspec.to_builtins(known)
    for inner, value in table.items():
        before = whole.get(inner)
        whole[inner] = before | value if isinstance(before, dict) and isinstance(value, dict) else value
    whole["name"] = name
    try:
        return msgspec.convert(whole, kind)
    except msgspec.ValidationError as wrong:
        allowed = tuple(spec.encode_name for spec in msgspec.structs.fields(kind) if spec.name != "name")
        if kind is HardwareClass:
            allowed += ("profiles", "profiles_like")
        raise WrongEntry(key, str(wrong), allowed) from wrong


def _own_profiles(hardware: str, tables: object) -> list[ProfileEntry]:
    """The ``profiles`` of one ``[hardware.*]`` table."""
    key = f"hardware.{hardware}.profiles"
    allowed = ("model", "precision", "tp", "profile")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise WrongEntry(key, "must be an array of tables", allowed)
    try:
        return msgspec.convert([{**table, "hardware": hardware} for table in tables], list[ProfileEntry])
    except msgspec.ValidationError as wrong:
        raise WrongEntry(key, str(wrong), allowed) from wrong
