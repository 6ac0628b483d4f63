"""What a simulated engine is asked (``Job``), and what it tells at the end of an iteration (events)."""

from array import array
from collections.abc import Sequence
from typing import Final, Literal

from msgspec import Struct

from quartet_core.ladder import Sketch

Kind = Literal["whole", "prefill", "decode"]

KV_MISMATCH: Final = "kv_mismatch"
"""Reason of ``Failed``: a block of the transfer was wrong, missing or stale when decode came to read it."""


class Job(Struct):
    """One piece of work for an engine.

    ``tokens`` are the prompt's ids (u32); ``array('I')`` is the quick form. ``max_tokens`` bounds the output;
    with ``may_stop`` the model may end its answer earlier by itself (give it when the client set no limit).
    ``salt`` keeps cached blocks of one tenant from another's. ``sketch`` is the prompt's, made with the same salt;
    the engine makes it itself when it is None.

    ``kind`` is ``whole``; or ``prefill``: compute the prompt's KV and keep it pinned in the pool under ``transfer``;
    or ``decode``: the prompt's KV lies in the pool's committed lease ``transfer``, whose blocks become the job's.
    A ``whole`` job may have a ``transfer``, too: its committed lease has the KV of the first part of the prompt, which
    goes into the prefix cache as far as it is right, and is found there when the job's turn comes.
    """

    id: str
    tokens: "array[int] | Sequence[int]"
    max_tokens: int
    sketch: Sketch | None = None
    salt: bytes = b""
    kind: Kind = "whole"
    transfer: str = ""
    may_stop: bool = False


class FirstToken(Struct, frozen=True, gc=False):
    """Comes just before a job's token 0. ``queue_ms`` is from submission to its first iteration's start, ``ttft_ms``
    from submission to now. ``cached_tokens`` of the prompt were found in the prefix cache; what came by a transfer does
    not count. ``transferred_tokens`` are those of a whole job's prefix that a transfer brought and that were used."""

    job_id: str
    cached_tokens: int
    queue_ms: float
    ttft_ms: float
    transferred_tokens: int = 0


class Token(Struct, frozen=True, gc=False):
    """Output token number ``index``, from 0."""

    job_id: str
    index: int
    token_id: int
    text: str


class Prefilled(Struct, frozen=True, gc=False):
    """A ``prefill`` job is done: its KV is pinned in the pool under its transfer until that is released."""

    job_id: str
    cached_tokens: int
    queue_ms: float
    took_ms: float
    gpu_ms: float


class Computed(Struct, frozen=True, gc=False):
    """A chunk of a ``prefill`` job's prompt ended, and more is to come: the KV of its first ``tokens`` tokens is there,
    and can be exported as far as it fills blocks."""

    job_id: str
    tokens: int


class Finished(Struct, frozen=True, gc=False):
    """Every token of the job was said before this. ``verified_blocks`` came by transfer and were found right.

    ``reason`` is ``stop`` when the model ended by itself, ``length`` at ``max_tokens``. ``gpu_ms`` is the job's share
    of the worker's busy time, all GPUs of the worker together. ``transferred_tokens`` as in ``FirstToken``;
    ``dropped_blocks`` came for a whole job's prefix and were not its own, or lay behind one that was not, and were
    computed instead.
    """

    job_id: str
    reason: Literal["stop", "length"]
    cached_tokens: int
    output_tokens: int
    verified_blocks: int
    gpu_ms: float
    transferred_tokens: int = 0
    dropped_blocks: int = 0


class Failed(Struct, frozen=True, gc=False):
    """A job ended without an answer; ``verified_blocks`` is how many blocks of its transfer were right."""

    job_id: str
    reason: str
    verified_blocks: int
    gpu_ms: float


class Preempted(Struct, frozen=True, gc=False):
    """A job lost its blocks to older ones and waits to be computed again. Its tokens so far stand; it goes on later."""

    job_id: str


EngineEvent = FirstToken | Token | Computed | Prefilled | Finished | Failed | Preempted
