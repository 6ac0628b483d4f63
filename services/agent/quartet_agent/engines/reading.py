"""What an engine's metrics say, under whatever names its version has for it, and what they fail to say."""

from msgspec import Struct

from quartet_agent.engines.dialect import Dialect, Generation, Quantity
from quartet_agent.engines.exposition import Sample, apart, mean, samples, total

_START_TIME = "process_start_time_seconds"
_CACHE_INFO = "vllm:cache_config_info"


class Reading(Struct, frozen=True):
    """One look at an engine's metrics, or at those of one of its ranks. A quantity that could not be read is None,
    never 0.

    ``missing`` are required ones under no known name. ``started_s`` tells one process from the next. ``ranks`` are the
    data-parallel ranks that the whole server has, as it calls them. ``block_tokens`` and ``kv_tokens`` (of all ranks
    that were looked at) are 0 where the engine does not say them here.
    """

    generation: str
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    steps: float | None = None
    queries: float | None = None
    hits: float | None = None
    missing: tuple[Quantity, ...] = ()
    started_s: float = 0.0
    ranks: tuple[str, ...] = ()
    block_tokens: int = 0
    kv_tokens: int = 0

    @property
    def tells_process(self) -> bool:
        """Whether it can be told by it if the next reading is of another process."""
        return bool(self.started_s) or self.steps is not None


def read(text: str, dialect: Dialect, rank: int | None = None) -> Reading:
    """What ``text`` says in the words of ``dialect``, of all ranks together or of one.

    Of several generations that could be meant, the newest whose marker is there; without any, each quantity is looked
    for under all names that it ever had.
    """
    found = samples(text, _names(dialect))
    generation = next((g for g in dialect.generations if g.marker in found), None)
    ranks = _ranks(found, dialect)
    about = {name: _about(series, dialect, rank) for name, series in found.items()}
    values = {quantity: _value(about, dialect, generation, quantity) for quantity in _quantities(dialect)}
    info = found.get(_CACHE_INFO, [Sample({}, 0.0)])[0].labels
    block_tokens = _whole(info.get("block_size"))
    # Every rank's line has its own rank's tokens, and the blocks of all ranks (vLLM's core client sums them).
    rank_tokens = _whole(info.get("kv_cache_size_tokens"))
    all_tokens = rank_tokens * max(1, len(ranks)) or _whole(info.get("num_gpu_blocks")) * block_tokens
    return Reading(
        generation=generation.name if generation is not None else "unknown",
        running=values.get("running"),
        waiting=values.get("waiting"),
        kv_usage=values.get("kv_usage"),
        steps=values.get("steps"),
        queries=values.get("queries"),
        hits=values.get("hits"),
        missing=tuple(quantity for quantity in dialect.required if values[quantity] is None),
        started_s=total(found.get(_START_TIME, [])) or 0.0,
        ranks=ranks,
        block_tokens=block_tokens,
        kv_tokens=all_tokens if rank is None else all_tokens // max(1, len(ranks)),
    )


def _ranks(found: dict[str, list[Sample]], dialect: Dialect) -> tuple[str, ...]:
    label = dialect.rank_label
    names = {
        sample.labels[label]
        for generation in dialect.generations
        for sample in found.get(generation.aliases["running"].name, [])
        if label in sample.labels
    }
    return tuple(sorted(names, key=lambda name: (len(name), name)))


def _about(series: list[Sample], dialect: Dialect, rank: int | None) -> list[Sample]:
    """What of ``series`` counts: of the rank (if that is told), no part of a total, and nothing twice."""
    label = dialect.rank_label
    chosen = [
        sample
        for sample in series
        if (rank is None or sample.labels.get(label, str(rank)) == str(rank))
        and not any(sample.labels.get(part) for part in dialect.totals)
    ]
    return apart(chosen, dialect.copies)


def _quantities(dialect: Dialect) -> tuple[Quantity, ...]:
    known = [quantity for generation in dialect.generations for quantity in generation.aliases]
    return tuple(dict.fromkeys((*dialect.required, *known)))


def _names(dialect: Dialect) -> frozenset[str]:
    names = {alias.name for generation in dialect.generations for alias in generation.aliases.values()}
    return frozenset({*names, *(generation.marker for generation in dialect.generations), _START_TIME, _CACHE_INFO})


def _value(
    found: dict[str, list[Sample]], dialect: Dialect, generation: Generation | None, quantity: Quantity
) -> float | None:
    for spoken in (generation,) if generation is not None else dialect.generations:
        alias = spoken.aliases.get(quantity)
        if alias is not None:
            series = found.get(alias.name, [])
            value = mean(series) if alias.how == "mean" else total(series)
            if value is not None:
                return value
    return None


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
