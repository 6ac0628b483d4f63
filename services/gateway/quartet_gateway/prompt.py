"""Reading request bodies: off the event loop when they are long, and with the sketch that a router would else make."""

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar, TypeVarTuple

from msgspec import Struct

from quartet_bus.config.schema import ModelSection
from quartet_core import openai
from quartet_core.ladder import Sketch, sketch_text, sketch_tokens
from quartet_core.openai import Endpoint, Inference, invalid
from quartet_core.salt import salt_of
from quartet_gateway.tokens.book import PromptTokenizer
from quartet_gateway.tokens.errors import NotRendered, NotText

THREAD_FROM_BYTES = 256 * 1024
"""Bodies from here on are read in a thread, which lets the loop run between the steps of reading one.

Reading takes some 0.4 ms for this many bytes of text, and 10 ms for the 6.5 MB of the longest body; a single step holds
the interpreter for less than that.
"""

_PROMPT_FIELDS = {Endpoint.CHAT: "messages", Endpoint.COMPLETIONS: "prompt", Endpoint.EMBEDDINGS: "input"}

Arguments = TypeVarTuple("Arguments")
R = TypeVar("R")


TOKENIZE_IN_THREAD_FROM_BYTES = 1024
"""The same for finding out tokens, which takes some 2 us a byte."""


class Inexact(StrEnum):
    """Why a model that wants a sketch of tokens got one of text."""

    NO = ""
    NO_TOKENIZER = "no_tokenizer"
    NOT_TEXT = "not_text"
    NOT_RENDERED = "not_rendered"


class Prompt(Struct, frozen=True):
    """A sketched prompt, and its length in tokens, which is an estimate where the sketch is one of text."""

    sketch: Sketch
    tokens: int
    inexact: Inexact


async def read_inference(body: bytes, endpoint: Endpoint) -> Inference:
    """What routing needs of ``body``. Raises ``Refused`` (400): not JSON, not for ``endpoint``, or without a model."""
    inference = await _where_it_fits(len(body), openai.parse, body)
    if inference.endpoint is not endpoint:
        wanted = _PROMPT_FIELDS[endpoint]
        raise invalid(
            f"`{wanted}` is required here; this body is one for /v1/{inference.endpoint.replace('.', '/')}.", wanted
        )
    if not inference.model:
        raise invalid("`model` is required.", "model")
    return inference


async def sketch_prompt(
    inference: Inference,
    body: bytes,
    tenant: str,
    model: str,
    section: ModelSection,
    tokenizer: PromptTokenizer | None = None,
) -> Prompt:
    """The prompt's sketch as the configuration of ``model`` wants it, under the salt that isolates ``tenant``."""
    salt = salt_of(tenant, model, isolated=section.isolation, adapter=bool(section.base))
    ids = inference.prompt_ids
    if ids is not None:
        sketch = await _where_it_fits(len(ids) * 4, _of_ids, ids, salt)
        return Prompt(sketch, inference.prompt_tokens, Inexact.NO)
    inexact = Inexact.NO
    if section.sketch == "tokens":
        inexact = Inexact.NO_TOKENIZER
        if tokenizer is not None:
            exact = await _where_it_fits(
                len(body), _of_tokens, tokenizer, body, inference.endpoint, salt, most=TOKENIZE_IN_THREAD_FROM_BYTES
            )
            if isinstance(exact, Sketch):
                return Prompt(exact, exact.tokens, Inexact.NO)
            inexact = exact
    sketch = await _where_it_fits(len(inference.prompt_text), _of_text, inference.prompt_text, salt)
    return Prompt(sketch, inference.prompt_tokens, inexact)


def _of_tokens(tokenizer: PromptTokenizer, body: bytes, endpoint: Endpoint, salt: bytes) -> Sketch | Inexact:
    try:
        return sketch_tokens(tokenizer.prompt_ids(body, endpoint), salt=salt)
    except NotText:
        return Inexact.NOT_TEXT
    except NotRendered:  # the engine will say the same, and better
        return Inexact.NOT_RENDERED


async def _where_it_fits(
    size_bytes: int, work: Callable[[*Arguments], R], *arguments: *Arguments, most: int = THREAD_FROM_BYTES
) -> R:
    if size_bytes < most:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)


def _of_ids(ids: list[int], salt: bytes) -> Sketch:
    return sketch_tokens(ids, salt=salt)


def _of_text(text: bytes, salt: bytes) -> Sketch:
    return sketch_text(text, salt=salt)
