"""ServeGen's client rates and lengths, as requests: many clients of one service, each with its own rate and burstiness.

Source and what was changed: ``data/traces/ATTRIBUTION.md``. Arrivals are made, not recorded: in each 10-minute window a
client's gaps are drawn from a gamma distribution with its rate (scaled) and its coefficient of variation, whichever
distribution ServeGen fitted, because those two are what it gives for all of them.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import Final

import msgspec
from msgspec import Struct

from quartet_sim.traces import WrongTrace, file_lines, shipped

WINDOW_S: Final = 600.0
_RATES, _LENGTHS = "servegen_client_rates_6h.csv.gz", "servegen_length_pdf_week1.json.gz"
_HEADER: Final = b"model,client,window_start_s,rate_rps,cv,arrival_dist,param1,param2"
_INPUTS: Final = ("input_tokens", "text_tokens")


class ClientRequest(Struct, frozen=True):
    """One request of one client. ``number`` counts from 0 in order of arrival."""

    number: int
    at_s: float
    client: int
    prompt_tokens: int
    output_tokens: int


class _Histogram:
    """Draws values with their probabilities."""

    def __init__(self, pairs: Sequence[tuple[int, float]]) -> None:
        self._values = [max(1, int(value)) for value, _ in pairs]
        self._sums = list(accumulate(weight for _, weight in pairs))

    def draw(self, random: Random) -> int:
        place = bisect_right(self._sums, random.random() * self._sums[-1])
        return self._values[min(place, len(self._values) - 1)]


def requests(
    model: str, seed: int, *, start_s: float, length_s: float, rate_per_s: float, rates: str = "", lengths: str = ""
) -> list[ClientRequest]:
    """The clients of service ``model`` in ``[start_s, start_s + length_s)``, scaled to ``rate_per_s`` in the mean.

    ``rates`` and ``lengths`` are files as ServeGen's, "" those that come with Quartet. Raises ``WrongTrace`` for a
    service or a span that they do not have.
    """
    where = rates or _RATES
    windows = _windows(file_lines(rates) if rates else shipped(_RATES), where, model)
    inputs, outputs = _histograms(lengths, model)
    spans = [
        (client, max(begin_s, start_s), min(begin_s + WINDOW_S, start_s + length_s), rate, cv)
        for client, begin_s, rate, cv in windows
        if begin_s < start_s + length_s and begin_s + WINDOW_S > start_s
    ]
    expected = sum((end - begin) * rate for _, begin, end, rate, _ in spans)
    if not expected:
        raise WrongTrace(where, f"{model} has no client between {start_s:g} and {start_s + length_s:g} s")
    scale = rate_per_s * length_s / expected
    arrivals: list[tuple[float, int]] = []
    by_client: dict[int, list[tuple[float, float, float, float]]] = defaultdict(list)
    for client, begin_s, end_s, rate, cv in spans:
        by_client[client].append((begin_s, end_s, rate * scale, cv))
    for client in sorted(by_client):
        random = Random(f"{seed} {model} {client}")
        for begin_s, end_s, rate, cv in by_client[client]:
            shape = 1.0 / max(cv, 0.05) ** 2
            # A window begins in the middle of a gap: without this, bursty clients would be silent at first.
            at_s = begin_s - random.random() * random.gammavariate(shape, 1.0 / (shape * rate))
            while (at_s := at_s + random.gammavariate(shape, 1.0 / (shape * rate))) < end_s:
                if at_s >= begin_s:
                    arrivals.append((at_s - start_s, client))
    arrivals.sort()
    draw = Random(f"{seed} {model} lengths")
    return [
        ClientRequest(number, at_s, client, inputs.draw(draw), outputs.draw(draw))
        for number, (at_s, client) in enumerate(arrivals)
    ]


def _windows(lines: list[bytes], where: str, model: str) -> list[tuple[int, float, float, float]]:
    """(client, start, rate, coefficient of variation) of every window of a service."""
    if lines[0].strip() != _HEADER:
        raise WrongTrace(f"{where}, line 1", f"the header must be {_HEADER.decode()}")
    found: list[tuple[int, float, float, float]] = []
    names: set[str] = set()
    for line, text in enumerate(lines[1:], 2):
        fields = text.decode().split(",")
        names.add(fields[0])
        if fields[0] != model:
            continue
        try:
            found.append((int(fields[1]), float(fields[2]), float(fields[3]), float(fields[4])))
        except (ValueError, IndexError) as error:
            raise WrongTrace(f"{where}, line {line}", f"{error}; a row is {_HEADER.decode()}") from None
    if not found:
        raise WrongTrace(where, f"no service {model!r}; there are: {', '.join(sorted(names))}")
    return found


def _histograms(path: str, model: str) -> tuple[_Histogram, _Histogram]:
    where = path or _LENGTHS
    text = b"\n".join(file_lines(path) if path else shipped(_LENGTHS))
    try:
        known = msgspec.json.decode(text, type=dict[str, dict[str, list[tuple[int, float]]]])
    except msgspec.DecodeError as error:
        raise WrongTrace(where, str(error)) from None
    fields = known.get(model, {})
    inputs = next((fields[name] for name in _INPUTS if fields.get(name)), None)
    outputs = fields.get("output_tokens")
    if inputs is None or not outputs:
        raise WrongTrace(where, f"no lengths of {model!r}; there are those of {', '.join(sorted(known))}")
    return _Histogram(inputs), _Histogram(outputs)
