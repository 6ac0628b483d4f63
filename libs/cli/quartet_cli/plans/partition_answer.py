"""From a question to what ``quartet plan partition`` answers."""

import msgspec

from quartet_cli.plans.answers import NoPlacement, PartitionAnswer, WrongCurrent
from quartet_sim.partition import explain, moves, placement, search, settings
from quartet_sim.partition.engines import TENSORRT_LLM, VLLM
from quartet_sim.partition.placement import Placement
from quartet_sim.partition.question import Question


def answer(question: Question, current: Placement | None, store_gb_per_s: float) -> PartitionAnswer | NoPlacement:
    """The best placement with all that is told about it, or why there is none.

    With a ``current`` placement also how it fares under the question's workload, and the way from it. Raises
    `WrongCurrent` when it is of another model or of other cards, and ``TooManyWays``.
    """
    found = search.best(question)
    if found is None:
        return NoPlacement(obstacles=explain.obstacles(question))
    made = PartitionAnswer(
        placement=found,
        binding=explain.binding(question, found),
        alternatives=explain.alternatives(question),
        settings=_settings(question, found),
        engine=question.rules,
    )
    return made if current is None else _with_moves(made, question, current, store_gb_per_s)


def _settings(question: Question, found: Placement) -> dict[str, str]:
    """For the engine asked for, or for those that run the placement."""
    made: dict[str, str] = {}
    for rules, write in ((VLLM, settings.vllm), (TENSORRT_LLM, settings.tensorrt_llm)):
        if question.rules.name in (rules.name, "any") and not settings.unrunnable(found, rules):
            made[rules.name] = write(found, question.limits)
    return made


def _with_moves(
    made: PartitionAnswer, question: Question, current: Placement, store_gb_per_s: float
) -> PartitionAnswer:
    shape, pools, table, limits = question.shape, question.pools, question.table, question.limits
    if current.model != shape.model:
        raise WrongCurrent(f"it is a placement of {current.model}, not of {shape.model}")
    try:
        stays = placement.for_workload(current, shape, pools, question.work, table, limits)
        plan = moves.move_plan(
            current, made.placement, shape, pools, table,
            kv_element=limits.kv_bytes_per_element, store_gb_per_s=store_gb_per_s,
        )  # fmt: skip
    except ValueError as error:
        raise WrongCurrent(str(error)) from error
    return msgspec.structs.replace(made, current=stays, moves=plan)
