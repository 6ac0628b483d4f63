"""What one engine iteration costs: a profile fitted for a hardware class, model, weight precision and TP degree.

Two curves, both in milliseconds on an undisturbed worker (callers multiply by drift):

- prefill of ``n`` new tokens behind ``p`` cached ones: ``a + b*n + c*((p + n)**2 - p**2)``. The linear term is the
  matrix work per token, the quadratic one attention, ``a`` what one iteration costs besides.
- one decode step of a batch at a mean context, from a table, bilinear between its points. Reading weights is the
  constant part, reading KV grows with ``batch * context``, so bilinear is the shape of the thing itself.

Engine overhead (scheduling, sampling, launches) is *inside* both curves, once each; ``overhead_ms`` says how much of
them it is, so that scaling to other hardware can leave it out.
"""

from bisect import bisect_right
from itertools import pairwise

from msgspec import Struct


class FitError(Struct, frozen=True, forbid_unknown_fields=True):
    """How far a profile is from the rows it was fitted to: relative errors in percent.

    Prefill errors are residuals of the fit. A step row sits in the table itself, so each step error is that of the
    table made *without* that row.
    """

    prefill_median_pct: float
    prefill_p90_pct: float
    step_median_pct: float
    step_p90_pct: float


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """Times of one (hardware class, model, precision, TP), with where they come from.

    ``step_ms[i][j]`` is one decode step of ``batches[i]`` sequences whose mean context is ``contexts[j]`` tokens.
    ``estimated`` marks times scaled from other hardware; ``error`` is then missing.

    Raises ``ValueError`` when built from axes that do not rise, from a table of another shape, or from one in which
    more work takes less time: predictions would then prefer the fuller worker.
    """

    a_ms: float
    b_ms_per_token: float
    c_ms_per_token2: float
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    step_ms: tuple[tuple[float, ...], ...]
    overhead_ms: float = 0.0
    estimated: bool = False
    source: str = ""
    error: FitError | None = None

    def __post_init__(self) -> None:
        for name in ("a_ms", "b_ms_per_token", "c_ms_per_token2", "overhead_ms"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        _check_axis("batches", self.batches, least=1)
        _check_axis("contexts", self.contexts, least=0)
        if len(self.step_ms) != len(self.batches) or any(len(row) != len(self.contexts) for row in self.step_ms):
            raise ValueError(f"step_ms must have {len(self.batches)} rows of {len(self.contexts)}, as its axes say")
        if self.step_ms[0][0] <= 0:
            raise ValueError("step_ms must be positive")
        falls_along_context = any(later < row[j] for row in self.step_ms for j, later in enumerate(row[1:]))
        falls_along_batch = any(
            later < earlier
            for fewer, more in pairwise(self.step_ms)
            for earlier, later in zip(fewer, more, strict=True)
        )
        if falls_along_context or falls_along_batch:
            raise ValueError("step_ms must not fall as batch or context grows")

    @property
    def weight_read_ms(self) -> float:
        """The least an iteration takes: weights read once for one sequence, with the engine's overhead."""
        return self.step_ms[0][0]

    def prefill_ms(self, cached: int, new: int) -> float:
        """Prefill of ``new`` tokens whose first attention is to ``cached`` ones already there; 0 when nothing is new.

        Cutting a prompt into chunks adds ``a_ms`` per extra chunk and nothing else.
        """
        if new <= 0:
            return 0.0
        # (p + n)^2 - p^2 = n * (n + 2p): no cancellation at long contexts
        return self.a_ms + new * (self.b_ms_per_token + self.c_ms_per_token2 * (new + 2 * cached))

    def step_ms_at(self, batch: float, context: float) -> float:
        """One decode step of ``batch`` sequences at a mean of ``context`` tokens each; 0 for an empty batch.

        Bilinear between the table's points, the same slopes beyond its edges.
        """
        if batch <= 0:
            return 0.0
        batches = self.batches
        contexts = self.contexts
        i = bisect_right(batches, batch, 1, len(batches) - 1)
        j = bisect_right(contexts, context, 1, len(contexts) - 1)
        fewer = self.step_ms[i - 1]
        more = self.step_ms[i]
        left = contexts[j - 1]
        share = (context - left) / (contexts[j] - left)
        low = fewer[j - 1]
        low += (fewer[j] - low) * share
        high = more[j - 1]
        high += (more[j] - high) * share
        below = batches[i - 1]
        return low + (high - low) * (batch - below) / (batches[i] - below)

    def iteration_ms(self, new_tokens: int, cached: int, batch: float, context: float) -> float:
        """One engine iteration that prefills ``new_tokens`` behind ``cached`` ones and decodes ``batch`` sequences.

        Weights are read once for both, and overhead is paid once: the decodes add only what their step takes above
        the weight read (their KV reads and their share of the matrix work). However small the chunk, the iteration
        reads all weights, so it never beats a decode step of one sequence. Against served Llama-3.1-70B and Qwen3-32B
        (H100, vLLM) ``python -m quartet_sim.fit`` prints how well this predicts time per output token.
        """
        if new_tokens <= 0:
            return self.step_ms_at(batch, context)
        weight_read = self.step_ms[0][0]
        chunk = self.a_ms + new_tokens * (self.b_ms_per_token + self.c_ms_per_token2 * (new_tokens + 2 * cached))
        if chunk < weight_read:
            chunk = weight_read
        if batch <= 0:
            return chunk
        return chunk + self.step_ms_at(batch, context) - weight_read

    def chunk_ms(self, tokens: int) -> float:
        """An iteration that prefills ``tokens`` of a fresh prompt and decodes nothing."""
        return self.iteration_ms(tokens, 0, 0, 0)

    def scaled(self, *, compute: float, bandwidth: float, source: str) -> "Profile":
        """The profile of hardware with ``compute`` and ``bandwidth`` times this one's, marked estimated.

        Prefill is bound by compute, a decode step by memory bandwidth; overhead is the host's, and stays. Traffic
        between GPUs is not told apart, so scale only profiles in which it is small. Raises ``ValueError`` for a ratio
        that is not positive.
        """
        if compute <= 0 or bandwidth <= 0:
            raise ValueError("compute and bandwidth ratios must be positive")
        overhead = self.overhead_ms
        return Profile(
            a_ms=max(self.a_ms - overhead, 0.0) / compute + overhead,
            b_ms_per_token=self.b_ms_per_token / compute,
            c_ms_per_token2=self.c_ms_per_token2 / compute,
            batches=self.batches,
            contexts=self.contexts,
            step_ms=tuple(tuple((step - overhead) / bandwidth + overhead for step in row) for row in self.step_ms),
            overhead_ms=overhead,
            estimated=True,
            source=source,
        )


def _check_axis(name: str, axis: tuple[int, ...], least: int) -> None:
    if len(axis) < 2:
        raise ValueError(f"{name} needs at least two points")
    if axis[0] < least or any(later <= earlier for earlier, later in pairwise(axis)):
        raise ValueError(f"{name} must rise from at least {least}")
