"""What every hardware class does over time, in a bounded number of samples."""

from collections.abc import Sequence

from quartet_sim.simulation.figures import Sample
from quartet_sim.simulation.site import Site
from quartet_sim.simulation.timeline import Timeline

MOST_SAMPLES = 240
_FIRST_MS = 1_000.0

_Sums = dict[str, tuple[float, float, float, int]]
"""By hardware class: GPU time paid, busy, and busy with prefill so far, and sequences that decode now."""


class Sampler:
    """Looks at ``sites`` every so often; when there are too many looks, every other one is forgotten."""

    def __init__(self, timeline: Timeline, sites: Sequence[Site]) -> None:
        self._timeline = timeline
        self._sites = sites
        self._every_ms = _FIRST_MS
        self._looks: list[tuple[float, _Sums]] = []
        timeline.later(self._every_ms, self._look)

    def _look(self) -> None:
        sums: _Sums = {}
        now_ms = self._timeline.now_ms
        for site in self._sites:
            if site.alive:
                site.count(now_ms)
            paid, busy, prefill, running = sums.get(site.facts.hardware, (0.0, 0.0, 0.0, 0))
            gpus = site.gpus
            sums[site.facts.hardware] = (
                paid + site.paid_ms * gpus,
                busy + site.busy_ms * gpus,
                prefill + site.prefill_busy_ms * gpus,
                running + site.engine.running,
            )
        self._looks.append((now_ms, sums))
        if len(self._looks) > MOST_SAMPLES:
            self._looks = self._looks[1::2]
            self._every_ms *= 2.0
        self._timeline.later(self._every_ms, self._look)

    def samples(self, until_ms: float) -> list[Sample]:
        """The time between each two looks, up to ``until_ms``."""
        found: list[Sample] = []
        before: _Sums = {}
        for at_ms, sums in self._looks:
            if at_ms > until_ms:
                break
            for hardware in sorted(sums):
                paid, busy, prefill, running = sums[hardware]
                paid_before, busy_before, prefill_before, _ = before.get(hardware, (0.0, 0.0, 0.0, 0))
                busy_ms = busy - busy_before
                found.append(
                    Sample(
                        at_s=at_ms / 1e3,
                        hardware=hardware,
                        utilisation=busy_ms / max(paid - paid_before, 1e-9),
                        prefill_share=(prefill - prefill_before) / busy_ms if busy_ms > 0.0 else 0.0,
                        running=running,
                    )
                )
            before = sums
        return found
