"""Stream frames: what a client hears on its inbox, one JSON object a message.

A frame belongs to one stream (id, attempt, try). ``seq`` counts a decode agent's frames from 0 at ``accepted``; frames
of a router (held, its errors) have none. A chunk's ``data`` is the engine's JSON as it is, without ``data:``.
"""

from msgspec import Raw, Struct
from msgspec.json import Decoder, Encoder

from quartet_core.openai import ErrorBody


class Frame(Struct, tag_field="frame", kw_only=True, rename={"try_": "try"}):
    """What every frame says: which try of which request it belongs to."""

    id: str
    attempt: int
    try_: int


class Held(Frame, tag="held"):
    """The router keeps the request for a better worker, for at most ``remaining_ms`` more."""

    remaining_ms: float


class Accepted(Frame, tag="accepted"):
    """An agent took the request."""

    seq: int
    worker: str


class Alive(Frame, tag="alive"):
    """Nothing to tell yet; sent after a second of silence. ``seq`` is None when a router says it."""

    seq: int | None = None


class Chunk(Frame, tag="chunk"):
    """The engine's next JSON object (a whole answer when the request did not stream)."""

    seq: int
    data: Raw


class End(Frame, tag="end"):
    """The stream is complete."""

    seq: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Error(Frame, tag="error"):
    """The request failed: HTTP ``status`` and OpenAI's error object; ``retry_after_s`` is 0 when retrying is no use."""

    status: int
    error: ErrorBody
    seq: int | None = None
    retry_after_s: float = 0.0


AnyFrame = Held | Accepted | Alive | Chunk | End | Error

_encoder = Encoder()
_decoder = Decoder(AnyFrame)


def encode(frame: AnyFrame) -> bytes:
    """The frame as one JSON object."""
    return _encoder.encode(frame)


def decode(data: bytes) -> AnyFrame:
    """The frame in ``data``. Raises ``msgspec.ValidationError`` or ``msgspec.DecodeError`` when it is none."""
    return _decoder.decode(data)
