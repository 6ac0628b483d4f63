"""Requests from traces: which part of a trace, how fast, for which models, under which targets.

``Workload`` says what is wanted; ``requests`` makes it. Same workload and seed, same requests.
"""

from msgspec import Struct

from quartet_sim.simulation.spec import INTERACTIVE, RELAXED, Request, Slo


class Part(Struct, frozen=True, kw_only=True):
    """One trace's part in a workload.

    ``trace`` names a trace that comes with Quartet (``azure-conv``, ``azure-code``, ``mooncake``, ``sessions``,
    ``servegen``), or is a path ``KIND:FILE``. The trace's seconds ``[start_s, start_s + length_s)`` are taken and played
    ``speed`` times as fast, or, with ``rate_per_s``, as fast as gives that mean rate. ``models`` are who is asked, with
    weights.
    """

    trace: str
    start_s: float = 0.0
    length_s: float = 600.0
    speed: float = 1.0
    rate_per_s: float = 0.0
    models: tuple[tuple[str, float], ...] = (("llama-3.1-8b", 1.0),)


class Workload(Struct, frozen=True, kw_only=True):
    """Parts that are played together, and the SLO classes that are drawn for their requests by ``share``."""

    parts: tuple[Part, ...]
    slos: tuple[Slo, ...] = (INTERACTIVE, RELAXED)


def requests(workload: Workload, seed: int) -> list[Request]:
    """The requests of ``workload``, in order of arrival, numbered from 0. Raises ``WrongTrace``."""
    raise NotImplementedError("the interface is here first; the body follows")
