"""What became of one request of the demo, as its client saw it."""

import math

import msgspec
from msgspec import Struct

from quartet_bus import frames
from quartet_cli.demo.workload import Arrival, Prepared, right_text


class Outcome(Struct):
    """``fault`` "" is a right answer, else what was wrong. Times in ms from the request's arrival in the trace.

    ``lag_ms`` is how late we sent it; ``first_ms`` and ``last_ms`` when its first and last token were here, infinite
    when they never were. ``answered`` is whether it ended at all: a cut-off pass leaves some that did not.
    """

    id: str
    model: str
    prompt_tokens: int
    asked_tokens: int
    lag_ms: float = 0.0
    first_ms: float = math.inf
    last_ms: float = math.inf
    tokens: int = 0
    answered: bool = True
    fault: str = ""

    @property
    def tpot_ms(self) -> float:
        """Time per output token after the first; 0 for an answer of one token, infinite for an unfinished one."""
        if self.last_ms == math.inf:
            return math.inf
        return (self.last_ms - self.first_ms) / (self.tokens - 1) if self.tokens > 1 else 0.0


class _Choice(Struct):
    text: str = ""
    finish_reason: str | None = None


class _Chunk(Struct):
    choices: tuple[_Choice, ...] = ()


_decode = msgspec.json.Decoder(_Chunk).decode


def fault_of(arrival: Arrival, prepared: Prepared, chunks: list[bytes], end: frames.End | None) -> tuple[str, int]:
    """What is wrong with a whole answer ("" for nothing), and its number of tokens."""
    try:
        choices = [choice for chunk in chunks for choice in _decode(chunk).choices]
    except msgspec.DecodeError as error:
        return f"a chunk is no completion: {error}", 0
    texts = [choice.text for choice in choices if choice.text]
    asked = arrival.output_tokens
    if len(texts) != asked:
        return f"{len(texts)} tokens came, {asked} were asked for", len(texts)
    if end is None or end.output_tokens != asked:
        return f"the end frame counts {end.output_tokens if end else 'no'} tokens, {asked} came", asked
    if not choices or choices[-1].finish_reason != "length":
        return f"finish_reason is {choices[-1].finish_reason if choices else None}, not length", asked
    if "".join(texts) != right_text(prepared, asked):
        return "the text is not this prompt's", asked
    return "", asked
