"""Real request traces: when requests arrived, how long they were, which prefixes they shared.

Some come with Quartet (what was changed: ``data/traces/ATTRIBUTION.md``); ``azure`` and ``mooncake`` read others of the
same shape from a file, gzip or not.
"""

import gzip
from collections.abc import Iterable
from datetime import datetime
from importlib import resources
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Final

import msgspec
from msgspec import Struct

MOONCAKE_BLOCK_TOKENS: Final = 512
_MOONCAKE_STEP_MS: Final = 3000
_AZURE_HEADER: Final = b"TIMESTAMP,ContextTokens,GeneratedTokens"


class WrongTrace(ValueError):
    """A trace that cannot be read: ``where`` (a file, and its line if one is to blame), ``what`` is wrong there."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"trace {where}: {what}")
        self.where = where
        self.what = what

    def __reduce__(self) -> tuple[type["WrongTrace"], tuple[str, str]]:
        return type(self), (self.where, self.what)  # it may be raised in another process


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
    name = "azure_llm_2023_conv_1815_1845.csv.gz"
    return _azure(shipped(name), name)


def azure_code(seed: int = 0) -> list[TraceRequest]:
    """Azure 2023, code completion: 5,100 requests in 27 minutes, in bursts (the gaps' coefficient of variation is
    13.7), long prompts and short answers. No prefixes known; ``seed`` as above."""
    name = "azure_llm_2023_code_1815_1845.csv.gz"
    return _azure(shipped(name), name)


def mooncake_conversation(seed: int = 0) -> list[TraceRequest]:
    """Mooncake, conversation: 5,719 requests in 30 minutes, with the prefixes they shared.

    The trace's stamps are multiples of 3 s. Arrivals are spread uniformly at random inside their step by ``seed``, and
    keep their order, so that a conversation's turns stay in sequence.
    """
    name = "mooncake_conversation_0_30min.jsonl.gz"
    return _mooncake(shipped(name), name, seed)


def azure(path: str) -> list[TraceRequest]:
    """A file as AzureLLMInferenceTrace: ``TIMESTAMP,ContextTokens,GeneratedTokens``. Rows may be out of order: they are
    sorted. Answers without a token are taken for one token. Raises ``WrongTrace``."""
    return _azure(file_lines(path), path)


def mooncake(path: str, seed: int = 0) -> list[TraceRequest]:
    """A file as Mooncake's traces: JSON lines of ``timestamp`` (ms), ``input_length``, ``output_length`` and
    ``hash_ids`` of 512-token blocks; stamps are spread inside their 3 s as above. Raises ``WrongTrace``."""
    return _mooncake(file_lines(path), path, seed)


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


def shipped(name: str) -> list[bytes]:
    """The lines of a trace that comes with Quartet."""
    data = resources.files("quartet_sim").joinpath("data", "traces", name).read_bytes()
    return gzip.decompress(data).splitlines()


def file_lines(path: str) -> list[bytes]:
    """The lines of a file, unpacked if it is gzip. Raises ``WrongTrace``, also for an empty one."""
    try:
        data = Path(path).read_bytes()
        lines = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).splitlines()
    except (OSError, EOFError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise WrongTrace(path, f"{why}; give the path of a trace, or one that comes with Quartet") from error
    if not lines:
        raise WrongTrace(path, "the file is empty")
    return lines


def _azure(lines: list[bytes], where: str) -> list[TraceRequest]:
    if lines[0].strip() != _AZURE_HEADER:
        raise WrongTrace(f"{where}, line 1", f"the header must be {_AZURE_HEADER.decode()}")
    rows: list[tuple[datetime, int, int]] = []
    for line, row in enumerate(lines[1:], 2):
        if not row.strip():
            continue
        try:
            stamp, prompt, output = row.decode().split(",")
            # The seventh digit, 100 ns, is more than datetime holds.
            rows.append((datetime.fromisoformat(stamp[:26]), int(prompt), int(output)))
        except ValueError as error:
            raise WrongTrace(
                f"{where}, line {line}", f"{error}; a row is stamp, prompt tokens, output tokens"
            ) from None
        if rows[-1][1] < 1 or rows[-1][2] < 0:
            raise WrongTrace(f"{where}, line {line}", "a prompt has at least 1 token, an answer at least 0")
    if not rows:
        raise WrongTrace(where, "there are no requests in it")
    rows.sort(key=lambda row: row[0])
    start = rows[0][0]
    return [
        TraceRequest(number, (at - start).total_seconds(), prompt, output)
        for number, (at, prompt, output) in enumerate(rows)
    ]


def _mooncake(lines: list[bytes], where: str, seed: int) -> list[TraceRequest]:
    random = Random(seed)
    decode = msgspec.json.Decoder(_MooncakeRow).decode
    rows: list[_MooncakeRow] = []
    for line, text in enumerate(lines, 1):
        try:
            row = decode(text)
        except msgspec.DecodeError as error:
            raise WrongTrace(f"{where}, line {line}", str(error)) from None
        wanted = -(-row.input_length // MOONCAKE_BLOCK_TOKENS)
        if row.input_length < 1 or len(row.hash_ids) != wanted or row.timestamp < 0:
            raise WrongTrace(
                f"{where}, line {line}",
                f"input_length {row.input_length} with {len(row.hash_ids)} hash_ids at {row.timestamp} ms;"
                f" a prompt of at least 1 token has one id for each {MOONCAKE_BLOCK_TOKENS} tokens, at 0 ms or later",
            )
        rows.append(row)
    rows.sort(key=lambda row: row.timestamp)
    requests: list[TraceRequest] = []
    for step_ms, group in groupby(rows, key=lambda row: row.timestamp // _MOONCAKE_STEP_MS * _MOONCAKE_STEP_MS):
        step = list(group)
        offsets_ms = sorted(random.random() * _MOONCAKE_STEP_MS for _ in step)
        for row, offset_ms in zip(step, offsets_ms, strict=True):
            at_s = (step_ms + offset_ms) / 1000
            requests.append(TraceRequest(len(requests), at_s, row.input_length, row.output_length, row.hash_ids))
    return requests
