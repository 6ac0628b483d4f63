"""Embeddings as an OpenAI-compatible engine gives them: a unit vector for each input, the same for the same input."""

import base64
import math
import struct
from hashlib import shake_128
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from quartet_core.openai import embedding_inputs, invalid

DIMENSIONS = 64
MAX_DIMENSIONS = 4096


class _Fields(Struct):
    input: Raw
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS)] | None = None


class _Embedding(Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class _Usage(Struct):
    prompt_tokens: int
    total_tokens: int


class _Answer(Struct):
    data: list[_Embedding]
    model: str
    usage: _Usage
    object: str = "list"


_fields = msgspec.json.Decoder(_Fields)
_encode = msgspec.json.Encoder().encode


def embed(body: bytes, model: str, prompt_tokens: int) -> bytes:
    """The answer to an embeddings ``body``. Raises ``Refused`` (400) for fields that are wrong.

    Vectors are noise made from the input alone: nothing is near anything but itself.
    """
    try:
        fields = _fields.decode(body)
    except msgspec.DecodeError as error:
        raise invalid(f"The body is not valid: {error}") from None
    vectors = [_vector(each, fields.dimensions or DIMENSIONS) for each in embedding_inputs(fields.input)]
    data = [
        _Embedding(index, vector if fields.encoding_format == "float" else _packed(vector))
        for index, vector in enumerate(vectors)
    ]
    return _encode(_Answer(data, model, _Usage(prompt_tokens, prompt_tokens)))


def _vector(text: str | list[int], dimensions: int) -> list[float]:
    noise = shake_128(_encode(text)).digest(2 * dimensions)
    raw = [value / 32768.0 for value in struct.unpack(f"<{dimensions}h", noise)]
    length = math.sqrt(sum(value * value for value in raw)) or 1.0
    return [value / length for value in raw]


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
