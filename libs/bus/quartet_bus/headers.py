"""The headers of a request on the bus, and how far each of them is believed.

Numbers are the sender's wish: they are clamped, so that nobody overflows a deadline or jumps a queue with a huge one.
What is no number, or no possible identifier, is refused with 400. Three headers are taken from the gateway alone.
"""

import re
from collections.abc import Mapping

from msgspec import Struct

from quartet_core.ladder import Sketch, decode_sketch, encode_sketch
from quartet_core.openai import Refused, invalid

REQUEST_ID = "Quartet-Request-Id"
ATTEMPT = "Quartet-Attempt"
TTFT_MS = "Quartet-Ttft-Ms"
TPOT_MS = "Quartet-Tpot-Ms"
DEADLINE_MS = "Quartet-Deadline-Ms"
SESSION = "Quartet-Session"
NO_HOLD = "Quartet-No-Hold"

PRIORITY = "Quartet-Priority"
SKETCH = "Quartet-Sketch"
PROMPT_TOKENS = "Quartet-Prompt-Tokens"
"""Trusted: read from the gateway's subject alone."""

MAX_TARGET_MS = 3_600_000.0
MAX_DEADLINE_MS = 86_400_000
MAX_ATTEMPT = 1000
MAX_PRIORITY = 100
MAX_PROMPT_TOKENS = 1 << 24
MAX_SESSION_CHARS = 256

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_NUMBER = re.compile(r"[0-9]{1,64}(\.[0-9]{1,32})?")
_WHOLE = re.compile(r"[0-9]{1,64}")
_SIGNED = re.compile(r"-?[0-9]{1,64}")


class RequestHeaders(Struct, frozen=True):
    """What the headers say. Zero or "" is "not said".

    ``ttft_ms`` and ``tpot_ms`` are the sender's targets, ``deadline_ms`` is what remains of its patience. ``sketch``
    is the prompt's, None when the receiver must make it.
    """

    request_id: str = ""
    attempt: int = 1
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    deadline_ms: int = 0
    session: str = ""
    no_hold: bool = False
    priority: int = 0
    sketch: Sketch | None = None
    prompt_tokens: int = 0

    def encode(self) -> dict[str, str]:
        """The headers that say this; what is not said is left out."""
        said: dict[str, str] = {}
        if self.request_id:
            said[REQUEST_ID] = self.request_id
        if self.attempt != 1:
            said[ATTEMPT] = str(self.attempt)
        for name, target_ms in ((TTFT_MS, self.ttft_ms), (TPOT_MS, self.tpot_ms)):
            if target_ms:
                said[name] = f"{target_ms:.3f}"
        if self.deadline_ms:
            said[DEADLINE_MS] = str(self.deadline_ms)
        if self.session:
            said[SESSION] = self.session
        if self.no_hold:
            said[NO_HOLD] = "1"
        if self.priority:
            said[PRIORITY] = str(self.priority)
        if self.sketch is not None:
            said[SKETCH] = encode_sketch(self.sketch)
        if self.prompt_tokens:
            said[PROMPT_TOKENS] = str(self.prompt_tokens)
        return said


def parse_headers(headers: Mapping[str, str] | None, trusted: bool) -> RequestHeaders:
    """What ``headers`` say; names in any case. Raises ``Refused`` (400, naming the header) for what cannot be meant.

    ``trusted`` is whether the request came on the gateway's subject; otherwise the gateway's headers are not looked at.
    """
    if not headers:
        return _NOTHING_SAID
    said = {name.lower(): value.strip() for name, value in headers.items()}
    request_id = said.get(_LOWER[REQUEST_ID], "")
    if request_id and not _ID.fullmatch(request_id):
        raise _wrong(REQUEST_ID, "1 to 128 of A-Z a-z 0-9 _ . : -")
    session = said.get(_LOWER[SESSION], "")
    if len(session) > MAX_SESSION_CHARS:
        raise _wrong(SESSION, f"at most {MAX_SESSION_CHARS} characters")
    no_hold = said.get(_LOWER[NO_HOLD], "0")
    if no_hold not in ("0", "1"):
        raise _wrong(NO_HOLD, "0 or 1")
    return RequestHeaders(
        request_id=request_id,
        attempt=_whole(said, ATTEMPT, 1, MAX_ATTEMPT) or 1,
        ttft_ms=_target(said, TTFT_MS),
        tpot_ms=_target(said, TPOT_MS),
        deadline_ms=_whole(said, DEADLINE_MS, 1, MAX_DEADLINE_MS),
        session=session,
        no_hold=no_hold == "1",
        priority=_priority(said) if trusted else 0,
        sketch=_sketch(said) if trusted else None,
        prompt_tokens=_whole(said, PROMPT_TOKENS, 1, MAX_PROMPT_TOKENS) if trusted else 0,
    )


_NOTHING_SAID = RequestHeaders()
_LOWER = {
    name: name.lower()
    for name in (
        *(REQUEST_ID, ATTEMPT, TTFT_MS, TPOT_MS, DEADLINE_MS, SESSION, NO_HOLD),
        *(PRIORITY, SKETCH, PROMPT_TOKENS),
    )
}


def _wrong(name: str, allowed: str) -> Refused:
    return invalid(f"The header `{name}` must be {allowed}.", name)


def _target(said: Mapping[str, str], name: str) -> float:
    text = said.get(_LOWER[name])
    if text is None:
        return 0.0
    if not _NUMBER.fullmatch(text):
        raise _wrong(name, "a number of milliseconds")
    return min(max(float(text), 1.0), MAX_TARGET_MS)


def _whole(said: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = said.get(_LOWER[name])
    if text is None:
        return 0
    if not _WHOLE.fullmatch(text):
        raise _wrong(name, "a whole number")
    return min(max(int(text), least), most)


def _priority(said: Mapping[str, str]) -> int:
    text = said.get(_LOWER[PRIORITY])
    if text is None:
        return 0
    if not _SIGNED.fullmatch(text):
        raise _wrong(PRIORITY, "a whole number")
    return min(max(int(text), -MAX_PRIORITY), MAX_PRIORITY)


def _sketch(said: Mapping[str, str]) -> Sketch | None:
    text = said.get(_LOWER[SKETCH])
    if not text:
        return None
    try:
        return decode_sketch(text)
    except ValueError as error:
        raise _wrong(SKETCH, f"a sketch ({error})") from None
