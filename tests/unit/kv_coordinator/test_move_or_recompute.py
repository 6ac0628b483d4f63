"""Move or recompute: a coordinator's answer about its links is what a router makes of them."""

import pytest

from quartet_bus import catalogue
from quartet_bus.config.schema import Config, KvSection, LinkSection, ModelSection
from quartet_bus.messages import KvLayout, LinkInfo, NodeInventory, WorkerInfo
from quartet_core.linkbook import LinkBook, PricedLink
from quartet_core.links import choose
from quartet_kv_coordinator.lanes import Lanes
from quartet_kv_coordinator.planning import weigh
from quartet_kv_coordinator.roster import Roster

TOKENS, HELD = 8_192, 1_024
CATALOGUE = catalogue.load(Config())
PROFILE = CATALOGUE.profile("L40S_PCIE", "llama-3.1-8b", "fp8", 1)
KV_BYTES = (TOKENS - HELD) * 131_072
COMPUTE_MS = PROFILE.prefill_ms(HELD, TOKENS - HELD) - PROFILE.a_ms
EVEN_GB_PER_S = KV_BYTES / 1e6 / (COMPUTE_MS - 1.0)
"""At this rate, after 1 ms of setup, both take equally long."""


def roster():
    known = Roster(CATALOGUE)
    for node in ("s", "t"):
        info = WorkerInfo(
            id=f"{node}-0", ordinal=0, incarnation=1, hardware="L40S_PCIE", model="m", precision="fp8",
            tp=1, gpus=(0,), kv_tokens=100_000, max_context=100_000, max_batch=8, chunk_tokens=2048,
            layout=KvLayout(16, 131_072, "bf16"), engine="simulated", capabilities=("export", "import", "reserve"),
        )  # fmt: skip
        known.learn(NodeInventory(node, 1, 1, (info,), links=(LinkInfo("TCP", 9.0, 1.0),)), 0)
    return known


@pytest.mark.parametrize(("factor", "moves"), [(0.5, False), (0.99, False), (1.01, True), (2.0, True)])
def test_both_sides_of_the_crossover_router_and_coordinator_choose_alike(factor, moves):
    rate = EVEN_GB_PER_S * factor
    known = roster()
    lanes = Lanes(KvSection(links={"TCP": LinkSection(rate, 1.0)}))
    models = {"m": ModelSection("llama-3.1-8b")}
    told = weigh(known, lanes, CATALOGUE, models, "s-0", "t-0", TOKENS, HELD, 0.0, 0)
    book = LinkBook(500.0)
    book.hear(1, "k", 0.0)
    for row in lanes.states():
        book.put(row.source, row.target, PricedLink(row.kind, row.gb_per_s, row.setup_ms, row.in_flight_bytes))
    move_ms, _ = book.price_ms(known.find("s-0").place, known.find("t-0").place, KV_BYTES)
    here = choose(move_ms, PROFILE, HELD, TOKENS - HELD)
    assert (told.link, told.kv_bytes, told.choice.move) == ("TCP", KV_BYTES, moves)
    assert here.move is moves
    assert (here.move_ms, here.recompute_ms) == pytest.approx((told.choice.move_ms, told.choice.recompute_ms))
