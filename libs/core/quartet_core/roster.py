"""Rosters: which workers of a model stand ready, whatever the request.

Who lives, takes work and may do what changes some times a second; requests come thousands of times a second. So it is
asked once for each change of ``Fleet.revision``, not once for each request.
"""

from msgspec import Struct

from quartet_core.fleet import Fleet, Kind


class Roster(Struct, frozen=True):
    """The workers of one model, as planes and their counts.

    ``working`` are those alive that take work. ``healthy`` are those of them that are up or, when none is (then
    ``up`` is False), all of them. ``halves`` says that some may do only one half of a request. ``least_context`` is
    what fits every kind, in tokens.
    """

    revision: int
    kinds: list[Kind]
    serving: int
    alive: int
    working: int
    healthy: int
    up: bool
    halves: bool
    least_context: int
    counts: tuple[int, int, int, int]
    """How many serve, live, work and are healthy."""


class Rosters:
    """The rosters of all models that were asked for, as new as the fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._rosters: dict[str, Roster] = {}

    def of(self, model: str) -> Roster | None:
        """The roster of a model, None when nobody ever served it."""
        roster = self._rosters.get(model)
        if roster is None or roster.revision != self._fleet.revision:
            roster = self._made(model)
            if roster is not None:
                self._rosters[model] = roster
        return roster

    def _made(self, model: str) -> Roster | None:
        fleet = self._fleet
        serving = fleet.serving.get(model)
        if serving is None:
            return None
        kinds = fleet.kinds_of[model]
        alive = serving & (fleet.up | fleet.suspect | fleet.frozen)
        working = alive & fleet.planes.sound & fleet.open
        up = working & fleet.up
        healthy = up or working
        return Roster(
            revision=fleet.revision,
            kinds=kinds,
            serving=serving,
            alive=alive,
            working=working,
            healthy=healthy,
            up=up != 0,
            halves=alive & fleet.prefills & fleet.decodes != alive,
            least_context=min((min(k.max_context, k.kv_tokens) for k in kinds if k.plane & alive), default=0),
            counts=(serving.bit_count(), alive.bit_count(), working.bit_count(), healthy.bit_count()),
        )
