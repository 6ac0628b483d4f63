"""What one engine iteration does, what it costs by the profile, and how its time is shared among its jobs."""

from typing import Protocol

from msgspec import Struct

from quartet_core.profile import Profile
from quartet_sim.sequence import EngineSequence


class Chunk(Struct, gc=False):
    """``tokens`` of a sequence's prefill, and its share of the iteration's time."""

    sequence: EngineSequence
    tokens: int
    gpu_ms: float = 0.0


class Iteration(Struct):
    """One decode step of ``batch`` sequences together with prefill chunks. ``each_ms`` is one decode's share.

    With neither it computes nothing and takes no time: it ends what was only lent.
    """

    chunks: list[Chunk]
    batch: int
    duration_ms: float = 0.0
    each_ms: float = 0.0


def price(iteration: Iteration, profile: Profile, context: float, time_scale: float) -> None:
    """Set the duration of ``iteration``, whose decodes have a mean ``context``, and every job's share of it.

    Chunks of several prompts are priced as one: attention costs ``n_i (n_i + 2 p_i)`` for each chunk, so one chunk of
    N = sum n_i tokens behind ``p = (sum n_i (n_i + 2 p_i) / N - N) / 2`` costs the same (p may be negative).

    Shares: chunks and decodes divide the time as if each of the two had run alone, which splits the weight read that
    both needed; decodes divide theirs evenly, chunks by their prefill time.
    """
    if not iteration.chunks and not iteration.batch:
        return
    tokens = 0
    attention = 0
    for chunk in iteration.chunks:
        new = chunk.tokens
        tokens += new
        attention += new * (new + 2 * chunk.sequence.computed)
    batch = iteration.batch
    cached = round((attention / tokens - tokens) / 2) if tokens else 0
    duration = profile.iteration_ms(tokens, cached, batch, context) * time_scale
    iteration.duration_ms = duration
    if not tokens:
        iteration.each_ms = duration / batch
        return
    prefill_ms = duration
    if batch:
        alone = profile.iteration_ms(tokens, cached, 0, 0)
        step = profile.step_ms_at(batch, context)
        prefill_ms = duration * alone / (alone + step)
        iteration.each_ms = (duration - prefill_ms) / batch
    weights = [profile.prefill_ms(chunk.sequence.computed, chunk.tokens) for chunk in iteration.chunks]
    per_weight = prefill_ms / sum(weights)
    for chunk, weight in zip(iteration.chunks, weights, strict=True):
        chunk.gpu_ms = weight * per_weight


class Queued(Protocol):
    """What a backlog notes on each job: its tokens to compute, and their time."""

    queued_tokens: int
    queued_ms: float


class Backlog:
    """Prefill that waits or is partly done, as predicted time; kept up to date by differences."""

    __slots__ = ("_chunk_tokens", "_profile", "_tokens", "_work_ms")

    def __init__(self, profile: Profile, chunk_tokens: int) -> None:
        self._profile = profile
        self._chunk_tokens = chunk_tokens
        self._tokens = 0
        self._work_ms = 0.0

    @property
    def tokens(self) -> int:
        """Prompt tokens still to be computed."""
        return self._tokens

    def put(self, sequence: Queued, done: int, remaining: int) -> None:
        """Say that ``sequence`` has ``remaining`` tokens to compute behind ``done``, and no other."""
        profile = self._profile
        work_ms = remaining * (profile.b_ms_per_token + profile.c_ms_per_token2 * (remaining + 2 * done))
        self._tokens += remaining - sequence.queued_tokens
        # rounding must not add up over days: an empty backlog is exactly zero
        self._work_ms = self._work_ms + work_ms - sequence.queued_ms if self._tokens else 0.0
        sequence.queued_tokens = remaining
        sequence.queued_ms = work_ms

    def ms(self) -> float:
        """Undisturbed time to compute all of it, in full chunks: ``a_ms`` is paid once an iteration, not a prompt."""
        if not self._tokens:
            return 0.0
        return self._work_ms + self._profile.a_ms * -(-self._tokens // self._chunk_tokens)
