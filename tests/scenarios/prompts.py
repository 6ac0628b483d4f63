"""Prompts of scenarios: pieces with names, so that equal beginnings are equal tokens."""

import random
from array import array
from functools import cache
from itertools import count

_IDS = range(1000, 100_000)
_own = count()


@cache
def _piece(name: str, tokens: int) -> "array[int]":
    return array("I", random.Random(name).choices(_IDS, k=tokens))


def prompt_ids(recipe: str) -> "array[int]":
    """The token ids of ``"system 2000 + own 300"``; a piece called ``own`` is new every time."""
    ids = array("I")
    for piece in recipe.split("+"):
        name, tokens = piece.split()
        ids += _piece(f"own {next(_own)}" if name == "own" else name, int(tokens))
    return ids
