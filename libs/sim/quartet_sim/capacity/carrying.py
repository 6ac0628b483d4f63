"""What one worker takes of one bucket of request: its time, its KV, and whether it can be in time at all.

A worker that decodes full batches spends on a request its prefill, and for each token of the answer one batch's share
of a step. The batch is the largest that keeps the target for time per token, prefill in between counted, and fits the
KV memory; where prefills alone break that target, the worker must be left idle between them. Time to first token counts
as kept when an idle worker's prefill takes ``Margins.ttft_share`` of it at most: queues are the simulator's to judge.
"""

from collections.abc import Sequence

from msgspec import Struct

from quartet_core.catalogue import Catalogue, ProfileKey
from quartet_core.profile import Profile
from quartet_sim.capacity.demand import Bucket, Sample

MAX_BATCH = 256
_MOST_BUSY = 0.95


class Option(Struct, frozen=True, kw_only=True):
    """A way to run ``model``: one worker on ``tp`` cards. Prices, watts and KV are of the whole worker."""

    hardware: str
    model: str
    precision: str
    tp: int
    price_per_hour: float
    idle_w: float
    tdp_w: float
    kv_tokens: int

    @property
    def key(self) -> ProfileKey:
        """Where its times are in the catalogue."""
        return self.hardware, self.model, self.precision, self.tp

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.hardware}{f'x{self.tp}' if self.tp > 1 else ''} {self.precision}"


class Margins(Struct, frozen=True, kw_only=True):
    """How full workers are planned. ``utilisation`` is of their time and KV, ``ttft_share`` of the target that an idle
    worker's prefill may take. Rounds may raise ``utilisation`` above 1: what a worker carries is itself an estimate."""

    utilisation: float = 0.9
    ttft_share: float = 0.8


class Carried(Struct, frozen=True, kw_only=True):
    """One bucket on one option, for one request: seconds of the worker, token-seconds of its KV, and the share in time.

    ``batch`` is the decode batch, ``held_by`` what keeps it from being larger; ``late`` says why ``within`` is not 1.
    """

    seconds: float
    kv_token_seconds: float
    within: float
    batch: int
    held_by: str
    late: str


def options_of(
    catalogue: Catalogue, models: Sequence[str], stock: dict[str, int], precisions: Sequence[str]
) -> list[Option]:
    """Every profile of ``models`` on a class in ``stock`` that leaves room for KV, in the catalogue's order."""
    found: list[Option] = []
    for hardware, model, precision, tp in catalogue.profiles:
        if model not in models or precision not in precisions or stock.get(hardware, 0) < tp:
            continue
        kv_tokens = catalogue.kv_capacity_tokens(hardware, model, precision, tp)
        if not kv_tokens:
            continue
        cards = catalogue.hardware_class(hardware)
        found.append(
            Option(
                hardware=hardware,
                model=model,
                precision=precision,
                tp=tp,
                price_per_hour=cards.price_per_hour * tp,
                idle_w=cards.idle_w * tp,
                tdp_w=cards.tdp_w * tp,
                kv_tokens=kv_tokens,
            )
        )
    return found


def alone_ms(profile: Profile, sample: Sample) -> float:
    """A request's prefill and a twentieth of its decode: a measure of work that needs no batch."""
    step = profile.step_ms_at(1, sample.cached + sample.uncached)
    return profile.prefill_ms(sample.cached, sample.uncached) + sample.output * step / 20


def carried(option: Option, profile: Profile, bucket: Bucket, margins: Margins) -> Carried:
    """What one request of ``bucket`` takes of a worker of ``option``, whose times are ``profile``."""
    count = len(bucket.samples)
    prefills = [profile.prefill_ms(sample.cached, sample.uncached) for sample in bucket.samples]
    prefill_ms = sum(prefills) / count
    output = sum(sample.output for sample in bucket.samples) / count
    prompt = sum(sample.cached + sample.uncached for sample in bucket.samples) / count
    context = prompt + output / 2

    def step_ms(batch: int) -> float:
        """Of a decode that shares the worker with the prefills of its own bucket."""
        alone = profile.step_ms_at(batch, context)
        decode_ms = output * alone / batch
        prefilling = min(margins.utilisation, _MOST_BUSY) * prefill_ms / (prefill_ms + decode_ms)
        return alone / (1 - prefilling)

    by_kv = int(option.kv_tokens * min(margins.utilisation, 1.0) / (prompt + output))
    most = max(1, min(MAX_BATCH, by_kv))
    low, high = 0, most
    while low < high:  # the time per token only grows with the batch
        middle = (low + high + 1) // 2
        low, high = (middle, high) if step_ms(middle) <= bucket.slo.tpot_ms else (low, middle - 1)
    batch = max(1, low)
    late = ""
    within = sum(ms + step_ms(batch) <= bucket.slo.ttft_ms * margins.ttft_share for ms in prefills) / count
    if within < 1:
        late = (
            f"an idle worker prefills in {prefill_ms:,.0f} ms on average and {max(prefills):,.0f} at most; "
            f"{margins.ttft_share:.0%} of the target are {bucket.slo.ttft_ms * margins.ttft_share:,.0f} ms"
        )
    seconds = (prefill_ms + output * profile.step_ms_at(batch, context) / batch) / 1e3
    idle_share = 1 - profile.step_ms_at(1, context) / bucket.slo.tpot_ms
    if idle_share <= 0:
        within = 0.0
        late = f"even alone a token takes {profile.step_ms_at(1, context):.1f} ms, the target is {bucket.slo.tpot_ms:g}"
    elif not low:
        # A full worker would prefill too much between two tokens: it may spend no more than this share on it.
        seconds = min(margins.utilisation, _MOST_BUSY) * prefill_ms / idle_share / 1e3
    if by_kv < 1:
        within = 0.0
        late = f"{prompt + output:,.0f} tokens of KV do not fit the {option.kv_tokens:,} that a worker has"
    held_by = "time per token" if low < most else "KV memory" if most == by_kv else "the engine's batch limit"
    residence_ms = prefill_ms + output * step_ms(batch)
    return Carried(
        seconds=seconds,
        kv_token_seconds=(prompt + output) * residence_ms / 1e3,
        within=within,
        batch=batch,
        held_by=held_by,
        late=late,
    )
