"""What the demo asks: requests of two real traces, each sped up so that the fleet has a good day's work."""

from collections.abc import Callable

from msgspec import Struct

from quartet_sim.prompts import completion_body, prompt_ids
from quartet_sim.tokens import PIECES, fingerprint, output
from quartet_sim.traces import TraceRequest, azure_conversation, mooncake_conversation, sped_up, window


class ModelTrace(Struct, frozen=True):
    """A trace for a model, from ``start_s`` on, arriving ``speed_up`` times as fast as it was recorded."""

    model: str
    name: str
    read: Callable[[], list[TraceRequest]]
    start_s: float
    speed_up: float


# Speed-ups are calibrated on the fleet of quartet_cli/fleet/config, so that the busiest pool of each model uses 60-75 %
# of what it could carry (quartet_cli.demo.capacity): run `make demo` and read the column "used" of its last table.
# The Azure recording fades in during its first 50 s, at a fifth of its rate; they are left out.
TRACES = (
    ModelTrace("llama-70b", "Azure 2023, conversation", azure_conversation, 50.0, 1.75),
    ModelTrace("llama-8b", "Mooncake, conversation", mooncake_conversation, 0.0, 1.4),
)


class Arrival(Struct, frozen=True):
    """One request of the demo, ``at_s`` after its start."""

    id: str
    at_s: float
    model: str
    request: TraceRequest

    @property
    def output_tokens(self) -> int:
        """How many tokens are asked for, and must come."""
        return max(self.request.output_tokens, 1)


class Prepared(Struct, frozen=True):
    """An arrival ready to be sent, and what the right answer to it depends on."""

    body: bytes
    fingerprint: int


def arrivals(seconds: float) -> list[Arrival]:
    """What arrives in ``seconds``, in order: every trace from its beginning, with its own pattern and lengths."""
    return sorted(
        (
            Arrival(f"{trace.model}-{request.number}", request.at_s, trace.model, request)
            for trace in TRACES
            for request in sped_up(window(trace.read(), trace.start_s, seconds * trace.speed_up), trace.speed_up)
        ),
        key=lambda arrival: arrival.at_s,
    )


def prepare(arrival: Arrival) -> Prepared:
    """Make the body of an arrival."""
    ids = prompt_ids(arrival.request)
    return Prepared(completion_body(arrival.request, arrival.model), fingerprint(ids.tobytes()))


def right_text(prepared: Prepared, tokens: int) -> str:
    """What every worker must answer: the simulated engines' output is a function of the prompt alone."""
    return "".join(PIECES[byte] for byte in output(prepared.fingerprint, tokens))
