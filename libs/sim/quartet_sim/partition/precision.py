"""Precisions: what a weight weighs, which card computes it, and what quantizing costs in quality.

The losses that ship are whole models' (``data/precision``). A plan quantizes only some layers; its loss is taken to be
theirs in proportion, which is an estimate: layers differ, and the first and last are thought to matter most.
"""

from collections.abc import Mapping
from importlib import resources
from itertools import product
from typing import Literal

import msgspec
from msgspec import Struct

from quartet_core.catalogue import HardwareClass

UNQUANTIZED = "bf16"


class Precision(Struct, frozen=True, forbid_unknown_fields=True):
    """One way to keep weights. ``compute`` is what matrix products run in."""

    bytes_per_weight: float
    bits: int
    compute: Literal["bf16", "fp8"]
    note: str = ""

    @property
    def aggressive(self) -> bool:
        """Below 8 bits: quality suffers enough that not every card should do it."""
        return self.bits < 8

    def runs_on(self, hardware: HardwareClass) -> bool:
        """Whether the card can compute it."""
        return hardware.tflops(self.compute) is not None


class Loss(Struct, frozen=True, forbid_unknown_fields=True):
    """Quality lost when a whole model is quantized, in hundredths of a percent, and who says so."""

    loss_hundredths: int
    source: str


class PrecisionTable(Struct, frozen=True, forbid_unknown_fields=True):
    """All precisions, and the losses that are known: ``losses[model][precision]``."""

    precisions: dict[str, Precision]
    losses: dict[str, dict[str, Loss]]

    def loss(self, model: str, precision: str) -> Loss | None:
        """What quantizing all of ``model`` costs; None when nobody measured it."""
        if precision == UNQUANTIZED:
            return Loss(0, "not quantized")
        return self.losses.get(model, {}).get(precision)

    def with_losses(self, model: str, given_pct: Mapping[str, float]) -> "PrecisionTable":
        """The table with an operator's own losses, in percent. Raises ``ValueError`` for a wrong name or number."""
        own = dict(self.losses.get(model, {}))
        for precision, pct in given_pct.items():
            if precision not in self.precisions or precision == UNQUANTIZED:
                known = ", ".join(name for name in self.precisions if name != UNQUANTIZED)
                raise ValueError(f"no precision {precision!r} to lose quality by; one of {known}")
            if not 0 <= pct <= 100:
                raise ValueError(f"{precision}: a loss of {pct:g} % is not from 0 to 100")
            own[precision] = Loss(round(pct * 100), "given by the operator")
        return msgspec.structs.replace(self, losses={**self.losses, model: own})


def builtin() -> PrecisionTable:
    """The table that ships with Quartet."""
    text = (resources.files("quartet_sim") / "data" / "precision" / "precision.toml").read_text("utf-8")
    return msgspec.toml.decode(text, type=PrecisionTable)


def standing(hardware: HardwareClass) -> tuple[float, float]:
    """Orders classes from small and old to large and new: by memory, then by its bandwidth."""
    return hardware.memory_gb, hardware.memory_bandwidth_gb_s


def lesser(classes: Mapping[str, HardwareClass]) -> frozenset[str]:
    """The classes that stand below the best of ``classes``: where aggressive quantization is in place by default."""
    best = max((standing(hardware) for hardware in classes.values()), default=None)
    return frozenset(name for name, hardware in classes.items() if standing(hardware) != best)


def assignments(
    classes: Mapping[str, HardwareClass],
    table: PrecisionTable,
    allowed: tuple[str, ...],
    *,
    mixed: bool,
    aggressive_on: frozenset[str],
) -> list[dict[str, str]]:
    """Every choice of one precision per class in which no class is cut further than one that stands below it, and
    aggressive ones are on ``aggressive_on`` alone.

    ``mixed`` False: one precision for all of them, as an engine may demand.
    """
    names = sorted(classes, key=lambda name: (standing(classes[name]), name))
    options = [
        [
            name
            for name in allowed
            if table.precisions[name].runs_on(classes[each])
            and (each in aggressive_on or not table.precisions[name].aggressive)
        ]
        for each in names
    ]
    found: list[dict[str, str]] = []
    for choice in product(*options):
        chosen = dict(zip(names, choice, strict=True))
        if (mixed or len(set(choice)) <= 1) and _rises(classes, table, chosen):
            found.append(chosen)
    return found


def _rises(classes: Mapping[str, HardwareClass], table: PrecisionTable, chosen: Mapping[str, str]) -> bool:
    """Whether of any two classes the one that stands higher keeps at least as many bits."""
    return all(
        table.precisions[chosen[a]].bits <= table.precisions[chosen[b]].bits
        for a in chosen
        for b in chosen
        if standing(classes[a]) < standing(classes[b])
    )
