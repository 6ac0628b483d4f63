"""``simulate``: one fleet, one list of requests, one policy, one seed; one outcome."""

from collections.abc import Callable, Sequence

from quartet_core.catalogue import Catalogue
from quartet_core.routing import UnknownPolicy
from quartet_sim.simulation.figures import Outcome
from quartet_sim.simulation.policies import KNOWN
from quartet_sim.simulation.spec import FleetSpec, Request, Settings
from quartet_sim.simulation.world import World


def simulate(
    catalogue: Catalogue,
    fleet: FleetSpec,
    requests: Sequence[Request],
    *,
    policy: str = "finish-time",
    seed: int = 0,
    settings: Settings | None = None,
    progress: Callable[[float], None] | None = None,
    least_within: float = 0.0,
) -> Outcome:
    """Let ``requests`` pass over ``fleet`` and say how they fared.

    ``requests`` are in order of ``at_ms`` and carry their targets (``Request.slo``). ``policy`` is one of
    ``policies.KNOWN``. The ``seed`` is of the simulation alone (lost words, ties): what the requests are was decided
    when they were made. ``progress`` is told the share of the time that has passed, now and then. A run that can no
    longer reach ``least_within`` is cut short; its figures then only say that much. Raises ``WrongFleet``, and
    ``UnknownPolicy`` for a policy that is none.
    """
    fleet.check(catalogue)
    if policy not in KNOWN:
        raise UnknownPolicy(policy, list(KNOWN))
    world = World(catalogue, fleet, requests, policy=policy, seed=seed, settings=settings or Settings())
    world.run(progress, (1.0 - least_within) * len(requests) if least_within else float("inf"))
    return world.outcome(policy, seed)
