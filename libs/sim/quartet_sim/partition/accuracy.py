"""How far the roofline of ``timing`` is from the catalogue's profiles, for whole models on cards of one class."""

from statistics import median

from msgspec import Struct

from quartet_core.catalogue import Catalogue
from quartet_sim.partition.precision import PrecisionTable
from quartet_sim.partition.shape import Shape, UnknownShape, shape_of
from quartet_sim.partition.timing import Cards, StageTimes, Workload, stage_times

_BATCHES = (1, 16, 64)
_CONTEXTS = (1024, 4096)
_PROMPTS = (512, 2048, 8192)


class Accuracy(Struct, frozen=True, kw_only=True):
    """Computed over profiled, less 1, in percent; medians over batches and contexts, and over prompt lengths.

    ``kernels`` says that the profile was timed with the same generation of kernels as the rates: Splitwise's and
    Aegaeon's engines are older, and slower, than any roofline of today's cards.
    """

    hardware: str
    model: str
    precision: str
    tp: int
    step_pct: float
    prefill_pct: float
    kernels: bool


def accuracy(catalogue: Catalogue, table: PrecisionTable) -> list[Accuracy]:
    """One row for each profile that was measured, in the catalogue's order."""
    rows: list[Accuracy] = []
    for (hardware, model, precision, tp), profile in catalogue.profiles.items():
        if profile.estimated:
            continue
        try:
            shape = shape_of(catalogue.model(model))
        except UnknownShape:
            continue
        cards = Cards(hardware=catalogue.hardware_class(hardware), tp=tp, precision=table.precisions[precision])

        steps = [
            _times(shape, cards, context, batch).step_ms / profile.step_ms_at(batch, context) - 1
            for batch in _BATCHES
            for context in _CONTEXTS
        ]
        prefills = [
            _times(shape, cards, prompt, 1).prefill_ms / profile.prefill_ms(0, prompt) - 1 for prompt in _PROMPTS
        ]
        rows.append(
            Accuracy(
                hardware=hardware,
                model=model,
                precision=precision,
                tp=tp,
                step_pct=100 * median(steps),
                prefill_pct=100 * median(prefills),
                kernels="aiconfigurator" in profile.source,
            )
        )
    return rows


def _times(shape: Shape, cards: Cards, prompt: int, batch: int) -> StageTimes:
    """The whole model as one stage."""
    work = Workload(prompt_tokens=prompt, output_tokens=1, concurrency=batch, max_model_len=prompt + 1)
    return stage_times(
        shape, cards, work, shape.layers, batch, first=True, last=True, way_in=None, kv_bytes_per_element=2
    )
