"""An engine with round numbers, and a driver that lets its iterations pass."""

from collections.abc import Callable

import pytest

from quartet_core.profile import Profile
from quartet_sim.engine import EngineEvent, SimulatedEngine, Token

PROFILE = Profile(
    a_ms=5.0,
    b_ms_per_token=0.02,
    c_ms_per_token2=1e-7,
    batches=(1, 8, 64, 256),
    contexts=(128, 4096, 32768),
    step_ms=((5.0, 5.2, 7.0), (5.4, 6.0, 13.0), (7.0, 13.0, 60.0), (13.0, 40.0, 240.0)),
)


class Driver:
    """Lets an engine run in its own time, and keeps what it said with when it said it."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.now_ms = 0.0
        self.events: list[tuple[float, EngineEvent]] = []

    def step(self) -> bool:
        """One iteration; False when there was none."""
        duration = self.engine.begin(self.now_ms)
        if duration is None:
            return False
        self.now_ms += duration
        self.events += [(self.now_ms, event) for event in self.engine.finish(self.now_ms)]
        return True

    def run(self, most_steps: int = 100_000) -> None:
        """Until nothing can run."""
        for _ in range(most_steps):
            if not self.step():
                return
        raise AssertionError(f"still busy after {most_steps} iterations")

    def of(self, job_id: str, kind: type | None = None) -> list[EngineEvent]:
        """What was said of a job, of one kind or all."""
        return [e for _, e in self.events if e.job_id == job_id and (kind is None or isinstance(e, kind))]

    def one(self, job_id: str, kind: type) -> EngineEvent:
        (event,) = self.of(job_id, kind)
        return event

    def text(self, job_id: str) -> str:
        tokens = self.of(job_id, Token)
        assert [token.index for token in tokens] == list(range(len(tokens)))
        return "".join(token.text for token in tokens)


@pytest.fixture
def profile() -> Profile:
    return PROFILE


@pytest.fixture
def drive() -> Callable[..., Driver]:
    """Makes a driver of a fresh engine; keywords as the engine's."""

    def make(**settings: object) -> Driver:
        return Driver(SimulatedEngine(PROFILE, **({"kv_tokens": 64_000, "max_context": 32_768} | settings)))

    return make
