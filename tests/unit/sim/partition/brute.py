"""All cuts there are, one by one: what the search must agree with, on instances small enough for that."""

from collections.abc import Iterator
from itertools import combinations, pairwise

from quartet_sim.partition.placement import Cut, Placement, place
from quartet_sim.partition.question import Question


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ways to write ``total`` as an ordered sum of ``parts`` positive numbers."""
    for borders in combinations(range(1, total), parts - 1):
        edges = (0, *borders, total)
        yield tuple(b - a for a, b in pairwise(edges))


def sequences(question: Question, tps: tuple[int, ...], stages: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Ordered groups of cards, within what each pool has and what the engine's ranks allow."""

    def grow(taken: tuple[tuple[int, int], ...]) -> Iterator[tuple[tuple[int, int], ...]]:
        if len(taken) == stages:
            yield taken
            return
        for number, pool in enumerate(question.pools):
            for tp in tps:
                used = sum(other for pool_number, other in taken if pool_number == number)
                if used + tp > pool.gpus:
                    continue
                nodes = [question.pools[each].node.name for each, _ in taken]
                node = pool.node.name
                if question.rules.whole_nodes_in_line and node in nodes and nodes[-1] != node:
                    continue
                yield from grow((*taken, (number, tp)))

    yield from grow(())


def every_cut(question: Question) -> Iterator[Placement]:
    """Every placement that the rules allow and that fits memory and quality."""
    for assignment in question.assignments():
        for tps in question.degrees():
            for stages in range(1, question.most_stages(tps) + 1):
                for groups in sequences(question, tps, stages):
                    for layers in compositions(question.shape.layers, stages):
                        cuts = [
                            Cut(pool, tp, assignment[question.pools[pool].hardware.name], count)
                            for (pool, tp), count in zip(groups, layers, strict=True)
                        ]
                        made = place(
                            question.shape, question.pools, cuts, question.work, question.table, question.limits
                        )
                        if made.fits and made.loss_hundredths <= question.limits.budget_hundredths + 1e-9:
                            yield made
