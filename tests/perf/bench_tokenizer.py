"""A long chat made into tokens at the gateway: how long it takes, and how long the event loop has to wait meanwhile.

``held_ms`` is the same with the tokenizers library's ``encode``, in a thread as well, which holds the interpreter.
``make bench ONLY=tokenizer``. The tokenizer is the small one of the tests (600 tokens): real
vocabularies give longer tokens, hence fewer of them, for the same text.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path

from tokenizers import Tokenizer

from quartet_bus.config.schema import ModelSection
from quartet_core import openai
from quartet_gateway.prompt import sketch_prompt
from quartet_gateway.tokens.model_tokenizer import ModelTokenizer

DIRECTORY = Path(__file__).parents[1] / "unit" / "gateway" / "tokenizer"
TEXT_BYTES = (16 * 1024, 128 * 1024, 512 * 1024)
RUNS = 5


async def _watched(work: Coroutine[object, object, object]) -> tuple[float, float]:
    """How long ``work`` took, and the longest that the loop was away meanwhile; both in ms."""
    task = asyncio.ensure_future(work)
    started_s = last_s = time.perf_counter()
    longest_s = 0.0
    while not task.done():
        await asyncio.sleep(0.001)
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    await task
    return (last_s - started_s) * 1e3, longest_s * 1e3


def run() -> Iterator[dict[str, object]]:
    """One line for each length of a prompt."""
    tokenizer, bare = ModelTokenizer(DIRECTORY), Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    section = ModelSection(spec="s", sketch="tokens")
    words = "the router decides which worker prefills a request, and which one decodes it; "
    for text_bytes in TEXT_BYTES:
        text = (words * (text_bytes // len(words) + 1))[:text_bytes]
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
        inference = openai.parse(body)
        took, waited, held = [], [], []
        for _ in range(RUNS):
            ours = asyncio.run(_watched(sketch_prompt(inference, body, "t", "m", section, tokenizer)))
            took.append(ours[0])
            waited.append(ours[1])
            held.append(asyncio.run(_watched(asyncio.to_thread(bare.encode, text)))[1])
        yield {
            "bench": "tokenizer",
            "config": {"text_bytes": text_bytes, "tokens": len(bare.encode(text).ids)},
            "took_ms": round(statistics.median(took), 1),
            "loop_away_ms": round(statistics.median(waited), 1),
            "held_ms": round(statistics.median(held), 1),
            "runs": RUNS,
            "spread": round((max(took) - min(took)) / statistics.median(took), 3),
        }


if __name__ == "__main__":
    for line in run():
        print(json.dumps(line))
