"""How loaded an engine is, from what its agent sees, corrected by what the engine's metrics say now and then.

The agent sees every request it sends: what it predicted of the prompt, when the first token came, every token after
that. So it knows the queue at once, where metrics are old when they are read. Metrics know what the agent cannot:
requests that others sent, and how full KV memory is.
"""

from msgspec import Struct

from quartet_agent.engines.base import EngineLoad
from quartet_agent.engines.reading import Reading
from quartet_core.profile import Profile

_LEARN = 0.1
"""Weight of one observation in drift."""

_DRIFT_MAX = 5.0
"""Drift that is believed at most: beyond it the profile is wrong, and no reason to leave a worker alone."""

_WORTH_MS = 5.0
"""Predictions below it are not compared with what happened: it would be the network's time, not the engine's."""

_READING_FACTOR, _READING_MS = 3.0, 1000.0
"""How much longer than predicted, and then how many milliseconds more, a prompt may be read before that is a hang."""

_OVERDUE = 0.05
"""Share of its prediction that is left of a prompt which takes longer than predicted."""


class _Job(Struct):
    """One job. ``first_ms`` is when its first token came, 0 before; ``share_ms`` where the share clock then stood."""

    prefill_ms: float
    prompt_tokens: int
    began_ms: float
    share_ms: float
    first_ms: float = 0.0
    tokens: int = 0


class LoadEstimate:
    """The load of one engine. ``kv_tokens`` is the size of its KV memory. Times are the loop's milliseconds.

    ``ranks`` are engines side by side behind one server (data-parallel ranks) that shares requests out by itself: each
    has its part of the queue and of the batch, and a request meets one of them.
    """

    def __init__(self, profile: Profile, kv_tokens: int) -> None:
        self._profile = profile
        self.kv_tokens = kv_tokens
        self.ranks = 1
        self._jobs: dict[str, _Job] = {}
        self._queued: dict[str, None] = {}  # jobs without a first token, oldest first
        self._head_ms = 0.0  # since when the oldest of them is the oldest
        self._running = 0
        self._own_tokens = 0
        self._foreign_running = 0
        self._foreign_waiting = 0
        self._mean_prefill_ms = profile.prefill_ms(0, 512)
        self._used_tokens: float | None = None  # as the last reading said
        self._own_then = 0
        self._drift = 1.0
        self._steps_read = 0.0
        self._moves = 0
        self._busy_ms = 0.0
        self._share_ms = 0.0  # ∫ dt / jobs: what one job has had of the engine since the beginning
        self._at_ms = 0.0

    def __contains__(self, job: str) -> bool:
        return job in self._jobs

    def began(self, job: str, prompt_tokens: int, prefill_ms: float, now_ms: float) -> None:
        """A job was given to the engine. ``prefill_ms`` 0: nobody predicted it."""
        self._pass(now_ms)
        predicted_ms = prefill_ms or self._profile.prefill_ms(0, prompt_tokens)
        self._mean_prefill_ms += _LEARN * (predicted_ms - self._mean_prefill_ms)
        self._jobs[job] = _Job(predicted_ms, prompt_tokens, now_ms, self._share_ms)
        if not self._queued:
            self._head_ms = now_ms
        self._queued[job] = None
        self._own_tokens += prompt_tokens

    def first_token(self, job: str, now_ms: float, *, seen: bool = True) -> float:
        """The job's prompt was read; returns for how long it had waited before, as well as that can be told.

        ``seen`` is False when nobody saw the token, and it is merely taken for granted: nothing is learned of it then.
        """
        found = self._jobs.get(job)
        if found is None or job not in self._queued:
            return 0.0
        self._pass(now_ms)
        took_ms = now_ms - max(self._head_ms, found.began_ms)
        if seen and next(iter(self._queued)) == job and found.prefill_ms >= _WORTH_MS:
            self._learn(took_ms / found.prefill_ms)
        del self._queued[job]
        self._head_ms = now_ms
        found.first_ms = now_ms
        self._running += 1
        self._moves += 1
        return max(0.0, now_ms - found.began_ms - found.prefill_ms * self._drift)

    def output(self, job: str, tokens: int) -> None:
        """The engine said so many more tokens of the job."""
        found = self._jobs.get(job)
        if found is not None:
            found.tokens += tokens
            self._own_tokens += tokens
            self._moves += 1

    def ended(self, job: str, now_ms: float) -> float:
        """The job left the engine; returns its share of the engine's busy time, 0 for one that is not there."""
        found = self._jobs.get(job)
        if found is None:
            return 0.0
        self._pass(now_ms)
        del self._jobs[job]
        if job in self._queued:
            if next(iter(self._queued)) == job:
                self._head_ms = now_ms
            del self._queued[job]
        else:
            self._running -= 1
            if found.tokens > 8:
                step_ms = self._profile.step_ms_at(self._running // self.ranks + 1, found.prompt_tokens)
                if step_ms >= 1.0:
                    self._learn((now_ms - found.first_ms) / found.tokens / step_ms)
        self._own_tokens -= found.prompt_tokens + found.tokens
        return self._share_ms - found.share_ms

    def read(self, reading: Reading) -> None:
        """The engine's metrics were read. What they do not tell any more is not what they told last, either: then only
        what the agent sees itself is known."""
        if reading.running is not None and reading.waiting is not None:
            total = int(reading.running + reading.waiting)
            foreign = max(0, total - len(self._jobs))
            self._foreign_waiting = min(foreign, max(0, int(reading.waiting) - len(self._queued)))
            self._foreign_running = foreign - self._foreign_waiting
        else:
            self._foreign_waiting = self._foreign_running = 0
        if reading.kv_usage is not None:
            self._used_tokens = min(1.0, max(0.0, reading.kv_usage)) * self.kv_tokens
            self._own_then = self._own_tokens
        else:
            self._used_tokens = None
        if reading.steps is not None:
            self._steps_read = reading.steps

    def moved(self) -> None:
        """The engine showed that it lives, though it counts no steps."""
        self._moves += 1

    def restarted(self) -> None:
        """The engine is another one: nothing that was read of it holds."""
        self._used_tokens = None
        self._foreign_running = self._foreign_waiting = 0
        self._drift = 1.0

    def load(self, now_ms: float, *, fault: bool) -> EngineLoad:
        """The load just now."""
        self._pass(now_ms)
        used = float(self._own_tokens)
        if self._used_tokens is not None:
            used = max(used, self._used_tokens + self._own_tokens - self._own_then)
        free = 1.0 - used / self.kv_tokens if self.kv_tokens else 1.0
        return EngineLoad(
            free_kv_fraction=min(1.0, max(0.0, free)),
            queued_prefill_ms=self._queue_ms(now_ms) / self.ranks,
            running=-(-(self._running + self._foreign_running) // self.ranks),
            waiting=len(self._queued) + self._foreign_waiting,
            steps=int(self._steps_read) + self._moves,
            busy_ms=self._busy_ms,
            drift=min(_DRIFT_MAX, max(1.0, self._drift)),
            fault=fault,
        )

    def overdue(self, job: str, now_ms: float) -> bool:
        """Whether the job's first token should have come by now."""
        found = self._jobs.get(job)
        return found is not None and job in self._queued and now_ms - self._head_ms >= self._drift * found.prefill_ms

    def reads_prompt(self, now_ms: float) -> bool:
        """Whether the engine may well be reading a prompt: there is one, and it is not overdue beyond all measure."""
        if not self._queued:
            return False
        predicted_ms = self._jobs[next(iter(self._queued))].prefill_ms * max(1.0, self._drift)
        return now_ms - self._head_ms <= _READING_FACTOR * predicted_ms + _READING_MS

    def _queue_ms(self, now_ms: float) -> float:
        queue_ms = self._foreign_waiting * self._mean_prefill_ms
        for position, job in enumerate(self._queued):
            predicted_ms = self._jobs[job].prefill_ms
            if position == 0:
                done_ms = (now_ms - self._head_ms) / max(1.0, self._drift)
                predicted_ms = max(predicted_ms - done_ms, _OVERDUE * predicted_ms)
            queue_ms += predicted_ms
        return queue_ms

    def _learn(self, ratio: float) -> None:
        self._drift += _LEARN * (min(max(ratio, 0.2), 2.0 * _DRIFT_MAX) - self._drift)

    def _pass(self, now_ms: float) -> None:
        """Time went by: the engine was busy if it had anything to do."""
        passed_ms, self._at_ms = now_ms - self._at_ms, now_ms
        if self._jobs and passed_ms > 0.0:
            self._busy_ms += passed_ms
            self._share_ms += passed_ms / len(self._jobs)
