"""What a caller may say about its request in ``x-quartet-…`` headers, and what it becomes on the bus."""

from collections.abc import Mapping

from quartet_bus import headers as names
from quartet_bus.headers import RequestHeaders, parse_headers
from quartet_core.openai import Refused, invalid

_PASSED = {
    names.TTFT_MS: "x-quartet-ttft-ms",
    names.TPOT_MS: "x-quartet-tpot-ms",
    names.DEADLINE_MS: "x-quartet-deadline-ms",
    names.SESSION: "x-quartet-session",
    names.NO_HOLD: "x-quartet-no-hold",
}


def request_headers(http: Mapping[str, str], request_id: str) -> RequestHeaders:
    """The request's headers on the bus, with numbers clamped as for any other publisher.

    Raises ``Refused`` (400, naming the header) for values that are none. Trusted fields are never the caller's to set.
    """
    said = {names.REQUEST_ID: request_id}
    for passed, name in _PASSED.items():
        value = http.get(name)
        if value is None:
            continue
        if not (value.isascii() and value.isprintable()):
            raise invalid(f"The header `{name}` must be printable ASCII.", name)
        said[passed] = value
    try:
        return parse_headers(said, trusted=False)
    except Refused as refused:
        passed = refused.body.param or ""
        name = _PASSED.get(passed, passed)
        raise invalid(refused.body.message.replace(passed, name), name) from None
