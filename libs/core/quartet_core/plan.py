"""What is asked of a policy, and what it answers."""

from enum import StrEnum

from msgspec import Struct

from quartet_core.ladder import Sketch


class Ask(Struct):
    """A request, as a policy sees it.

    ``output_tokens`` is what the answer will probably have (learned mean, at most ``max_tokens``). ``ttft_ms`` and
    ``tpot_ms`` are its targets. ``waited_ms`` is how long it has been here. ``excluded`` is the plane of workers
    already tried. ``plans_split`` says whether its halves may go to two workers, ``plans_fetch`` whether a cached
    prefix may be moved to another worker. With ``whole_first`` the halves go to two workers only where none can do all.
    """

    model: str
    prompt_tokens: int
    output_tokens: float
    ttft_ms: float
    tpot_ms: float
    sketch: Sketch
    waited_ms: float = 0.0
    excluded: int = 0
    plans_split: bool = True
    plans_fetch: bool = False
    whole_first: bool = False
    embeds: bool = False
    """Whether it wants embeddings, which only some engines make. How many inputs it has, only its engine knows: each of
    them must fit a context, not all together."""
    max_tokens: int = 1
    """What the client allows the answer at most, and so what must fit a context; 1 when it sets no limit."""
    most_tokens: float = 0.0
    """What nine of ten answers do not exceed, for which free memory is looked for; 0 takes ``output_tokens``."""
    at_ms: float = 0.0
    """When it is decided, on the router's clock."""


class Reason(StrEnum):
    """Why a decision is what it is."""

    BEST = "best"
    ONLY_CANDIDATE = "only_candidate"
    SPLIT = "split"
    FETCH = "fetch"
    HELD = "held"
    POLICY = "policy"
    TRIAL = "trial"
    UNKNOWN_MODEL = "unknown_model"
    NO_WORKER = "no_worker"
    ALL_BUSY = "all_busy"
    TOO_LONG = "too_long"
    NO_EMBEDDINGS = "no_embeddings"
    NO_PREFILL_WORKER = "no_prefill_worker"
    POLICY_FAILED = "policy_failed"


class Plan(Struct):
    """Who prefills and who decodes, and what that is predicted to take.

    ``prefill`` and ``decode`` are slots, equal unless the request is split. ``cached_tokens`` of the prompt are at
    ``prefill`` already. ``prefill_ms`` is predicted work on ``prefill``, ``ahead_ms`` the work before it there.
    ``cost`` is the policy's own figure: less is better. ``kv_ms`` is what the KV takes on its link, ``kv_wait_ms`` how
    much of that is left when a split's prefill ends.

    A plan that fetches has a ``source``: the slot that lends the KV of the first ``fetched_tokens`` tokens, a whole
    number of KV blocks; ``prefill_ms`` is then of the rest alone. ``fetch_wait_ms`` is how long it is worth waiting
    for: what is ahead, and what computing the prefix would take.
    """

    prefill: int
    decode: int
    cached_tokens: int
    prefill_ms: float
    ttft_ms: float
    tpot_ms: float
    total_ms: float
    ahead_ms: float
    cost: float
    kv_bytes: int = 0
    kv_ms: float = 0.0
    kv_wait_ms: float = 0.0
    source: int = -1
    fetched_tokens: int = 0
    fetch_wait_ms: float = 0.0

    @property
    def fetches(self) -> bool:
        """Whether a cached prefix is moved to the worker."""
        return self.source >= 0

    @property
    def split(self) -> bool:
        """Whether the halves go to two workers."""
        return self.prefill != self.decode


FILTERS = ("model", "alive", "context", "accepting", "healthy", "free_kv", "long_prompt", "contained")
"""The hard filters, in their order. The last one is said only of long prefills that it kept to some of the workers."""


class Candidates(Struct):
    """The workers that hard filters leave, as planes, and how many were left after each filter, in its order.

    ``whole`` may do all of a request; ``prefill`` and ``decode`` one half. ``holders`` is (cached tokens, plane) from
    the longest prefix down, over all of ``prefill`` and ``whole``; a worker in none of them holds nothing. ``left``
    counts by ``FILTERS``.
    """

    whole: int
    prefill: int
    decode: int
    holders: list[tuple[int, int]]
    left: tuple[int, ...]


class Decision(Struct):
    """A policy's answer: a plan, or a reason why there is none. ``hold`` asks to wait for ``plan``'s worker.

    ``considered`` are the best plans looked at, for explanation; ``left`` counts candidates after each of ``FILTERS``.
    """

    reason: Reason
    plan: Plan | None = None
    hold: bool = False
    left: tuple[int, ...] = ()
    considered: tuple[Plan, ...] = ()
