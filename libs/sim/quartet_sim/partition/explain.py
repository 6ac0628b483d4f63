"""What stands in the way of a better placement, or of any: the same search with one limit less at a time."""

from collections.abc import Iterator

import msgspec

from quartet_core.catalogue import RUNTIME_BYTES_PER_GPU
from quartet_sim.partition.binding import Alternative, Binding
from quartet_sim.partition.engines import ANY, ENGINES
from quartet_sim.partition.placement import Placement
from quartet_sim.partition.question import Question, TooManyWays
from quartet_sim.partition.search import best
from quartet_sim.partition.timing import layer_bytes

WORTH_TELLING_PCT = 1.0
"""Limits that cost less rate than this do not bind."""

_ROOMIER = 1.25
_PARTS = {
    "weights": "reading weights: memory bandwidth",
    "kv": "reading KV: memory bandwidth",
    "compute": "matrix products: compute",
    "all_reduce": "all-reduces within the tensor-parallel group",
    "link": "waiting for the stage before: the link",
    "overhead": "the engine's overhead per iteration",
}


def binding(question: Question, placement: Placement) -> list[Binding]:
    """What binds ``placement``, the best answer to ``question``; the most costly limit first, the cards' own last."""
    found: list[Binding] = []
    for limit, text, relaxed in _relaxations(question):
        try:
            other = best(relaxed)
        except TooManyWays:
            continue
        if other is None:
            continue
        gain_pct = 100 * (other.rate_per_s / placement.rate_per_s - 1)
        if gain_pct >= WORTH_TELLING_PCT:
            found.append(Binding(limit=limit, gain_pct=gain_pct, text=text))
    found.sort(key=lambda each: -each.gain_pct)
    slowest = placement.slowest
    part, part_ms = max(slowest.times.parts_ms.items(), key=lambda item: item[1])
    share = part_ms / slowest.times.request_ms
    found.append(
        Binding(
            limit=part,
            gain_pct=0.0,
            text=f"{slowest.hardware} at {slowest.gpus[0]} is the slowest stage and spends {share:.0%} of its time on "
            f"{_PARTS[part]}",
        )
    )
    return found


def obstacles(question: Question) -> list[Binding]:
    """Why nothing fits: each limit without which something would, or what is missing when none alone is the reason."""
    found: list[Binding] = []
    for limit, text, relaxed in _relaxations(question):
        try:
            other = best(relaxed)
        except TooManyWays:
            continue
        if other is not None:
            remedy = f"without this limit there is a placement at {other.rate_per_s:.2f} requests/s"
            found.append(Binding(limit=limit, gain_pct=0.0, text=f"{text}: {remedy}", feasible=False))
    shorter = _shorter(question)
    if shorter is not None:
        found.append(shorter)
    found.append(_memory_account(question))
    return found


def _relaxations(question: Question) -> Iterator[tuple[str, str, Question]]:
    limits = question.limits

    def with_limits(**changes: object) -> Question:
        return msgspec.structs.replace(question, limits=msgspec.structs.replace(limits, **changes))

    roomier = min(1.5, limits.utilisation * _ROOMIER)
    yield (
        "memory",
        f"memory: with {roomier / limits.utilisation - 1:.0%} more on every card",
        with_limits(utilisation=roomier),
    )
    yield (
        "quality",
        (f"quality: with any loss allowed, not {limits.budget_hundredths / 100:g} % at most"),
        with_limits(budget_hundredths=100 * 100),
    )
    classes = frozenset(pool.hardware.name for pool in question.pools)
    aggressive = any(question.table.precisions[name].aggressive for name in question.precisions)
    if aggressive and question.aggressive_on != classes:
        spared = ", ".join(sorted(classes - question.aggressive_on))
        yield (
            "quality",
            f"quality: with aggressive quantization on {spared}, too",
            msgspec.structs.replace(with_limits(budget_hundredths=100 * 100), aggressive_on=classes),
        )
    if len(question.pools) > 1 or any(pool.gpus > 1 for pool in question.pools):
        yield "link", "links: if stages were next to each other for nothing", with_limits(links_free=True)
    if question.rules is not ANY:
        yield (
            "engine",
            (f"engine: without what {question.rules.name} cannot run ({question.rules.refuses[0].split(':')[0]})"),
            msgspec.structs.replace(question, rules=ANY),
        )
    if limits.budget_hundredths:
        quantized = tuple(name for name in question.table.precisions if name not in question.precisions)
        if quantized:
            yield (
                "quality",
                f"precision: with {', '.join(quantized)} allowed",
                msgspec.structs.replace(question, precisions=tuple(question.table.precisions)),
            )


def _shorter(question: Question) -> Binding | None:
    """The longest sequence for which one request at a time would fit, when that is the way out."""
    work = question.work
    low, high = 0, work.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        prompt = max(1, min(work.prompt_tokens, middle - 1))
        alone = msgspec.structs.replace(
            work, concurrency=1, max_model_len=max(middle, 2), prompt_tokens=prompt,
            output_tokens=max(1, min(work.output_tokens, middle - prompt)),
        )  # fmt: skip
        fits = best(msgspec.structs.replace(question, work=alone)) is not None
        low, high = (middle, high) if fits else (low, middle - 1)
    if low < 2:
        return None
    return Binding(
        limit="kv",
        gain_pct=0.0,
        text=f"KV: {work.kv_tokens:,} tokens must fit; one request at a time of up to {low:,} tokens would",
        feasible=False,
    )


def _memory_account(question: Question) -> Binding:
    """The sum that any placement must meet: all weights at their smallest and all KV, against all cards."""
    shape, table = question.shape, question.table
    smallest = min(
        (table.precisions[name] for name in question.precisions), key=lambda precision: precision.bytes_per_weight
    )
    weights = shape.layers * layer_bytes(shape, smallest) + 2 * shape.table_bytes
    kv = question.work.kv_tokens * shape.layers * shape.kv_layer_bytes * question.limits.kv_bytes_per_element // 2
    room = sum(
        pool.gpus * (int(pool.hardware.memory_bytes * question.limits.utilisation) - RUNTIME_BYTES_PER_GPU)
        for pool in question.pools
    )
    compared = "more than" if weights + kv > room else "within"
    return Binding(
        limit="memory",
        gain_pct=0.0,
        text=f"memory: weights of at least {weights / 1e9:.1f} GB and KV of {kv / 1e9:.1f} GB are {compared} the "
        f"{room / 1e9:.1f} GB that all cards have for them",
        feasible=False,
    )


def alternatives(question: Question) -> list[Alternative]:
    """Other engines' rules, one precision for all, and each class of card left out."""
    others: list[tuple[str, Question]] = [
        (f"--engine {rules.name}", msgspec.structs.replace(question, rules=rules))
        for rules in ENGINES.values()
        if rules is not question.rules
    ]
    if len(question.precisions) > 1:
        others += [
            (f"--precisions {name}", msgspec.structs.replace(question, precisions=(name,)))
            for name in question.precisions
        ]
    for hardware in dict.fromkeys(pool.hardware.name for pool in question.pools):
        if (fewer := question.without(hardware)) is not None:
            others.append((f"without {hardware}", fewer))
    return [_alternative(choice, other) for choice, other in others]


def _alternative(choice: str, question: Question) -> Alternative:
    try:
        found = best(question)
    except TooManyWays:
        found = None
    if found is None:
        return Alternative(choice=choice, rate_per_s=0.0, tpot_ms=0.0, ttft_ms=0.0, loss_hundredths=0.0, stages=0)
    return Alternative(
        choice=choice,
        rate_per_s=found.rate_per_s,
        tpot_ms=found.tpot_ms,
        ttft_ms=found.ttft_ms,
        loss_hundredths=found.loss_hundredths,
        stages=len(found.stages),
    )
