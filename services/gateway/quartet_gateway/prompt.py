"""Reading request bodies: off the event loop when they are long, and with the sketch that a router would else make."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from msgspec import Struct

from quartet_bus.config.schema import ModelSection
from quartet_core import openai
from quartet_core.ladder import Sketch, sketch_text, sketch_tokens
from quartet_core.openai import Endpoint, Inference, invalid
from quartet_core.salt import salt_of

THREAD_FROM_BYTES = 256 * 1024
"""Bodies from here on are read in a thread, which lets the loop run between the steps of reading one.

Reading takes some 0.4 ms for this many bytes of text, and 10 ms for the 6.5 MB of the longest body; a single step holds
the interpreter for less than that.
"""

P = ParamSpec("P")
R = TypeVar("R")


class Prompt(Struct, frozen=True):
    """A sketched prompt. ``exact`` is False when the model wants a sketch of tokens and only text was there."""

    sketch: Sketch
    tokens: int
    exact: bool


async def read_inference(body: bytes, endpoint: Endpoint) -> Inference:
    """What routing needs of ``body``. Raises ``Refused`` (400): not JSON, not for ``endpoint``, or without a model."""
    inference = await _where_it_fits(len(body), openai.parse, body)
    if inference.endpoint is not endpoint:
        wanted = "messages" if endpoint is Endpoint.CHAT else "prompt"
        raise invalid(f"`{wanted}` is required here; this body is one for /v1/{_path(inference.endpoint)}.", wanted)
    if not inference.model:
        raise invalid("`model` is required.", "model")
    return inference


async def sketch_prompt(inference: Inference, tenant: str, model: str, section: ModelSection) -> Prompt:
    """The prompt's sketch as the configuration of ``model`` wants it, under the salt that isolates ``tenant``."""
    salt = salt_of(tenant, model, isolated=section.isolation, adapter=bool(section.base))
    ids = inference.prompt_ids
    if ids is not None:
        sketch = await _where_it_fits(len(ids) * 4, _of_ids, ids, salt)
    else:
        sketch = await _where_it_fits(len(inference.prompt_text), _of_text, inference.prompt_text, salt)
    return Prompt(sketch, inference.prompt_tokens, exact=ids is not None or section.sketch == "text")


async def _where_it_fits(size_bytes: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    if size_bytes < THREAD_FROM_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def _path(endpoint: Endpoint) -> str:
    return "chat/completions" if endpoint is Endpoint.CHAT else "completions"


def _of_ids(ids: list[int], salt: bytes) -> Sketch:
    return sketch_tokens(ids, salt=salt)


def _of_text(text: bytes, salt: bytes) -> Sketch:
    return sketch_text(text, salt=salt)
