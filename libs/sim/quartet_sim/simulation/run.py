"""``simulate``: one fleet, one list of requests, one policy, one seed; one outcome."""

from collections.abc import Sequence

from quartet_core.catalogue import Catalogue
from quartet_sim.simulation.figures import Outcome
from quartet_sim.simulation.spec import FleetSpec, Request, Settings


def simulate(
    catalogue: Catalogue,
    fleet: FleetSpec,
    requests: Sequence[Request],
    *,
    policy: str = "finish-time",
    seed: int = 0,
    settings: Settings | None = None,
) -> Outcome:
    """Let ``requests`` pass over ``fleet`` and say how they fared.

    ``requests`` are in order of ``at_ms`` and carry their targets (``Request.slo``). ``policy`` is one of
    ``policies.NAMES``. The ``seed`` is of the simulation alone (lost words, ties): what the requests are was decided
    when they were made. Raises ``WrongFleet``, and ``UnknownPolicy`` for a policy that is none.
    """
    raise NotImplementedError(
        "the interface is here first; the body follows"
    )
