"""Prometheus' text format, as far as an agent reads it: samples by name, and nothing of the rest."""

import math
import re
from collections.abc import Collection
from typing import NamedTuple

_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "\\": "\\", '"': '"'}


class Sample(NamedTuple):
    """One line: what is told apart by ``labels``, and its value."""

    labels: dict[str, str]
    value: float


def samples(text: str, wanted: Collection[str] | None = None) -> dict[str, list[Sample]]:
    """The samples in ``text`` by name, of ``wanted`` names only. Lines that are none are passed over: one odd line
    of an exporter must not hide the others."""
    found: dict[str, list[Sample]] = {}
    for line in text.split("\n"):
        if not line or line[0] == "#":
            continue
        brace = line.find("{")
        space = line.find(" ")
        end = brace if brace >= 0 and (space < 0 or brace < space) else space
        if end <= 0:
            continue
        name = line[:end]
        if wanted is not None and name not in wanted:
            continue
        sample = _sample(line, end)
        if sample is not None:
            found.setdefault(name, []).append(sample)
    return found


def _sample(line: str, at: int) -> Sample | None:
    labels: dict[str, str] = {}
    if line[at] == "{":
        at += 1
        while (label := _LABEL.match(line, at)) is not None:
            labels[label[1]] = _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[0]), label[2])
            at = label.end()
        while at < len(line) and line[at] == " ":
            at += 1
        if at >= len(line) or line[at] != "}":
            return None
        at += 1
    parts = line[at:].split(None, 1)
    try:
        return Sample(labels, float(parts[0]))
    except (IndexError, ValueError):
        return None


def apart(series: list[Sample], copies: Collection[str]) -> list[Sample]:
    """``series`` without what is said twice: of samples that only labels in ``copies`` tell apart, the largest one.

    Values that are no number are left out.
    """
    largest: dict[frozenset[tuple[str, str]], Sample] = {}
    for sample in series:
        if math.isnan(sample.value):
            continue
        key = frozenset(item for item in sample.labels.items() if item[0] not in copies)
        known = largest.get(key)
        if known is None or sample.value > known.value:
            largest[key] = sample
    return list(largest.values())


def total(series: list[Sample]) -> float | None:
    """The sum of ``series``; None when there is nothing, or when it comes to no number."""
    value = math.fsum(sample.value for sample in series) if series else math.nan
    return value if math.isfinite(value) else None


def mean(series: list[Sample]) -> float | None:
    """The mean of ``series``; None as ``total``."""
    value = total(series)
    return None if value is None else value / len(series)
