"""Real request traces that come with Quartet: when requests arrived, how long they were, which prefixes they shared.

Sources and what was changed: ``data/traces/ATTRIBUTION.md``.
"""

import gzip
from collections.abc import Iterable
from datetime import datetime
from importlib import resources
from itertools import groupby
from random import Random
from typing import Final

import msgspec
from msgspec import Struct

MOONCAKE_BLOCK_TOKENS: Final = 512
_MOONCAKE_STEP_MS: Final = 3000


class TraceRequest(Struct, frozen=True):
    """One request of a trace. ``number`` counts the trace's rows from 0, and stays with the request when the trace is
    cut. ``blocks``, where the trace tells them, are ids of the prompt's 512-token blocks, the last one perhaps partial:
    an equal id is an equal prefix up to and including that block."""

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] | None = None


class _MooncakeRow(Struct):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def azure_conversation(seed: int = 0) -> list[TraceRequest]:
    """Azure 2023, conversation: 9,754 requests in 29 minutes, no prefixes known. Its stamps are exact (100 ns): the
    ``seed`` changes nothing, and is taken so that the readers are alike."""
    rows = _lines("azure_llm_2023_conv_1815_1845.csv.gz")[1:]
    requests: list[TraceRequest] = []
    start: datetime | None = None
    for number, row in enumerate(rows):
        stamp, prompt, output = row.decode().split(",")
        at = datetime.fromisoformat(stamp[:26])
        start = start or at
        requests.append(TraceRequest(number, (at - start).total_seconds(), int(prompt), int(output)))
    return requests


def mooncake_conversation(seed: int = 0) -> list[TraceRequest]:
    """Mooncake, conversation: 5,719 requests in 30 minutes, with the prefixes they shared.

    The trace's stamps are multiples of 3 s. Arrivals are spread uniformly at random inside their step by ``seed``, and
    keep their order, so that a conversation's turns stay in sequence.
    """
    random = Random(seed)
    decoder = msgspec.json.Decoder(_MooncakeRow)
    rows = [decoder.decode(line) for line in _lines("mooncake_conversation_0_30min.jsonl.gz")]
    requests: list[TraceRequest] = []
    for _, group in groupby(rows, key=lambda row: row.timestamp // _MOONCAKE_STEP_MS):
        step = list(group)
        offsets_ms = sorted(random.random() * _MOONCAKE_STEP_MS for _ in step)
        for row, offset_ms in zip(step, offsets_ms, strict=True):
            at_s = (row.timestamp // _MOONCAKE_STEP_MS * _MOONCAKE_STEP_MS + offset_ms) / 1000
            requests.append(TraceRequest(len(requests), at_s, row.input_length, row.output_length, row.hash_ids))
    return requests


def window(requests: Iterable[TraceRequest], start_s: float, length_s: float) -> list[TraceRequest]:
    """The requests that arrived in ``[start_s, start_s + length_s)``, with times from the window's start."""
    return [
        msgspec.structs.replace(request, at_s=request.at_s - start_s)
        for request in requests
        if start_s <= request.at_s < start_s + length_s
    ]


def sped_up(requests: Iterable[TraceRequest], factor: float) -> list[TraceRequest]:
    """The same requests arriving ``factor`` times as fast. Raises ``ValueError`` unless it is positive."""
    if not factor > 0:
        raise ValueError("a speed-up must be positive")
    return [msgspec.structs.replace(request, at_s=request.at_s / factor) for request in requests]


def _lines(name: str) -> list[bytes]:
    data = resources.files("quartet_sim").joinpath("data", "traces", name).read_bytes()
    return gzip.decompress(data).splitlines()
