"""One job inside a skipping engine: how far it is, and what it holds of the pool."""

from enum import IntEnum
from typing import Final, Literal

WorkKind = Literal["whole", "prefill", "decode", "lend"]


class Stage(IntEnum):
    """Where in the engine a job is."""

    OUTSIDE = -1
    """in no engine"""
    WAITING = 0
    """holds no blocks"""
    READY = 1
    """its prompt's KV came by transfer; it joins the next iteration with a place in the batch"""
    PREFILL = 2
    DECODE = 3
    GONE = 4


class Work:
    """A job: ``prompt_tokens`` to compute, then ``output_tokens`` to generate.

    ``units`` are content ids of the prompt's leading whole units of ``unit_tokens`` tokens, as in ``spec.Request``.
    ``shared`` of them are held by reference to the pool's cached units; the other blocks of the job, as many as reach
    its ``goal``, are its own. A decoding job's ``computed`` is as of its ``join_step``: the engine moves all decoding
    jobs at once, and never touches them in between. ``flight`` is whatever the driver wants to find again.
    """

    __slots__ = (
        "cached_tokens",
        "computed",
        "finish_step",
        "flight",
        "generated",
        "goal",
        "join_step",
        "kept",
        "kept_behind",
        "key",
        "kind",
        "number",
        "order",
        "output_tokens",
        "prompt_tokens",
        "queued_ms",
        "queued_tokens",
        "shared",
        "stage",
        "unit_tokens",
        "units",
    )  # fmt: skip

    def __init__(
        self, key: int, prompt_tokens: int, output_tokens: int, *, units: tuple[int, ...] = (), unit_tokens: int = 512,
        kind: WorkKind = "whole", flight: object = None,
    ) -> None:  # fmt: skip
        """``key`` is a number of its own, from 0 on."""
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.units = units
        self.unit_tokens = unit_tokens
        self.kind = kind
        self.flight = flight
        self.stage = Stage.OUTSIDE
        self.order = 0
        self.goal = prompt_tokens
        self.computed = 0
        self.generated = 0
        self.shared = 0
        self.cached_tokens = -1  # of the prompt, found in the cache when it was first admitted
        self.kept = 0  # own blocks that stayed in the cache when it was preempted
        self.kept_behind = 0  # and behind how many units they lie
        self.number = 0
        self.join_step = 0
        self.finish_step = 0
        self.queued_tokens = 0
        self.queued_ms = 0.0


FIRST: Final = 0
"""The first token is out."""
FINISHED: Final = 1
"""All output is out; the job is gone."""
PREFILLED: Final = 2
"""A ``prefill`` job is computed; its blocks stay pinned until ``release``."""
LENT: Final = 3
"""A ``lend`` job's units can be read; they stay pinned until ``release``."""
PREEMPTED: Final = 4
"""It lost its blocks to older jobs, and waits to be computed again."""

COMPUTED: Final = 5
"""A chunk of a ``prefill`` job ended, and more is to come: so far ``computed`` tokens have their KV."""

EngineEvent = tuple[int, Work]
"""(what, whose)."""
