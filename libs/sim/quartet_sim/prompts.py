"""Prompts for requests of a trace: token ids in place of text that nobody published, and OpenAI bodies around them."""

from array import array
from hashlib import shake_128

import msgspec

from quartet_sim.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest


def prompt_ids(request: TraceRequest, seed: int = 0) -> "array[int]":
    """The request's prompt, ``prompt_tokens`` ids below 65,536 (every current vocabulary has them).

    Where the trace knows blocks, equal block ids give equal tokens, across requests; else no two requests share any
    prefix, but for the accident of an equal first token. Another ``seed``, other tokens.
    """
    if request.blocks is None:
        return _ids(f"{seed} request {request.number}", request.prompt_tokens)
    ids = array("I")
    for block in request.blocks:
        ids += _ids(f"{seed} block {block}", MOONCAKE_BLOCK_TOKENS)
    return ids[: request.prompt_tokens]


def _ids(name: str, count: int) -> "array[int]":
    """``count`` ids, from two random bytes each: a u32's low halves are set a whole column at a time, which is some
    30 times as fast as number by number."""
    noise = shake_128(name.encode()).digest(2 * count)
    columns = bytearray(4 * count)
    columns[0::4] = noise[:count]
    columns[1::4] = noise[count:]
    return array("I", bytes(columns))


def completion_body(
    request: TraceRequest, model: str, stream: bool = True, *, seed: int = 0, include_usage: bool = False
) -> bytes:
    """An OpenAI completions body: the prompt as token ids, ``max_tokens`` as long as the traced answer was, at least 1.

    ``ignore_eos`` (which vLLM and SGLang know) makes a real engine answer in that length too; the simulated one does so
    whenever a limit is set.
    """
    body: dict[str, object] = {
        "model": model,
        "prompt": list(prompt_ids(request, seed)),
        "max_tokens": max(request.output_tokens, 1),
        "ignore_eos": True,
        "stream": stream,
    }
    if stream and include_usage:
        body["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(body)
