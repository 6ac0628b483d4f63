"""Rungs of prompts of which only unit ids are known: what the ladder's hashes would tell, without tokens to hash.

Equal unit ids are equal prefixes, so a rung that ends inside a unit is named by the unit and the rung. Two prompts that
part inside a unit have no rung in common there, though their tokens may: matches are rounded down to whole units.
"""

from bisect import bisect_right
from functools import lru_cache
from typing import Final

from quartet_core.ladder import BLOCK_TOKENS, RUNGS, Sketch

_RUNG_TOKENS: Final = tuple(blocks * BLOCK_TOKENS for blocks in RUNGS)
_MASK: Final = (1 << 64) - 1


def unit_rungs(unit: int, place: int, unit_tokens: int) -> list[int]:
    """Hashes of the rungs that end in ``unit``, which is number ``place`` of its prompt, shallowest first."""
    first, last = _spans(place, unit_tokens)
    return [_mixed(unit, rung) for rung in range(first, last)]


def sketch(units: tuple[int, ...], unit_tokens: int, prompt_tokens: int) -> Sketch:
    """The sketch of a prompt whose leading whole units are ``units``; without any, one that nobody holds."""
    if not units:
        return Sketch((), prompt_tokens)
    count = bisect_right(_RUNG_TOKENS, len(units) * unit_tokens)
    rungs = [_mixed(units[(_RUNG_TOKENS[rung] - 1) // unit_tokens], rung) for rung in range(count)]
    return Sketch(tuple(rungs), prompt_tokens)


@lru_cache(maxsize=1 << 16)
def _spans(place: int, unit_tokens: int) -> tuple[int, int]:
    return bisect_right(_RUNG_TOKENS, place * unit_tokens), bisect_right(_RUNG_TOKENS, (place + 1) * unit_tokens)


def _mixed(unit: int, rung: int) -> int:
    """64 well-mixed bits of two numbers (the finalizer of SplitMix64)."""
    mixed = (unit * 0x9E3779B97F4A7C15 + rung * 0xD1B54A32D192ED03 + 1) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31
