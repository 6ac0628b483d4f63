"""Which weights are wished where."""

from quartet_bus.config.schema import ModelSection
from quartet_bus.messages import KvLayout, NodeInventory, PrefetchVerb, WorkerInfo
from quartet_core.catalogue import builtin
from quartet_core.demand import ClassOutlook, Outlook
from quartet_prefetch_predictor.orders import MARGIN, holds, value_of, wishes

CATALOGUE = builtin()
MODELS = {
    "small": ModelSection(spec="llama-3.1-8b"),
    "large": ModelSection(spec="llama-3.1-70b"),
}


def node(name, *workers, resident=()):
    facts = tuple(
        WorkerInfo(
            f"{name}-{ordinal}", ordinal, 1, hardware, model, "fp8", 1, (ordinal,), 1000, 8192, 8, 2048,
            KvLayout(16, 1, "bf16"), "simulated",
        )
        for ordinal, (hardware, model) in enumerate(workers)
    )  # fmt: skip
    return NodeInventory(name, 1, 1, facts, resident=resident)


def outlook(model, near, later):
    return Outlook(model, 0, (near, later, later), (0.1, 0.1, 0.1), 100.0, 10.0)


def wished(*outlooks, nodes, classes=()):
    parts = [ClassOutlook(hardware, share, (0.5,), (0.1,)) for hardware, share in classes]
    return wishes([(one, parts) for one in outlooks], {one.node: one for one in nodes}, MODELS, CATALOGUE)


FREE = node("n1", ("L40S_PCIE", "other"))


def test_a_model_that_will_be_needed_and_is_nowhere_is_wished_for():
    (wish,) = wished(outlook("small", 0.1, 0.8), nodes=[FREE])
    assert (wish.verb, wish.model, wish.node, wish.hardware) == (PrefetchVerb.WARM, "small", "n1", "L40S_PCIE")
    assert wish.weight_bytes == CATALOGUE.model("llama-3.1-8b").weights("fp8")
    assert 0.7 < wish.confidence < 0.8


def test_a_model_that_is_needed_at_once_goes_into_gpu_memory():
    (wish,) = wished(outlook("small", 0.6, 0.9), nodes=[FREE])
    assert (wish.verb, wish.confidence) == (PrefetchVerb.LOAD, 0.6)


def test_what_is_resident_anywhere_is_not_wished_for():
    one = outlook("small", 0.6, 0.9)
    assert wished(one, nodes=[FREE, node("n2", ("H100_SXM5", "small"))]) == []
    assert wished(one, nodes=[FREE, node("n2", ("H100_SXM5", "other"), resident=("small",))]) == []


def test_what_is_hardly_needed_or_not_configured_is_not_wished_for():
    assert wished(outlook("small", 0.01, MARGIN - 0.01), nodes=[FREE]) == []
    assert wished(outlook("stranger", 0.6, 0.9), nodes=[FREE]) == []


def test_the_most_valuable_model_comes_first():
    found = wished(outlook("small", 0.1, 0.5), outlook("large", 0.1, 0.9), nodes=[FREE])
    assert [wish.model for wish in found] == ["large", "small"]


def test_a_load_that_comes_too_late_for_its_request_is_worth_less():
    assert value_of(outlook("small", 0.9, 0.9)) < value_of(outlook("small", 0.2, 0.9))


def test_the_class_it_ran_on_is_preferred_and_its_emptiest_node_taken():
    nodes = [
        node("n1", ("L40S_PCIE", "other")),
        node("n2", ("H100_SXM5", "other"), ("H100_SXM5", "other")),
        node("n3", ("H100_SXM5", "other")),
    ]
    classes = [("L40S_PCIE", 0.3), ("H100_SXM5", 0.7)]
    (wish,) = wished(outlook("small", 0.1, 0.8), nodes=nodes, classes=classes)
    assert (wish.node, wish.hardware) == ("n3", "H100_SXM5")


def test_a_fleet_without_a_fitting_card_gets_no_wish():
    assert wished(outlook("small", 0.6, 0.9), nodes=[node("n1", ("ASIC", "other"))]) == []
    assert wished(outlook("small", 0.6, 0.9), nodes=[]) == []


def test_a_node_holds_what_its_workers_run_and_what_it_says():
    assert holds(node("n1", ("H100_SXM5", "m")), "m")
    assert holds(node("n1", resident=("m",)), "m")
    assert not holds(node("n1", ("H100_SXM5", "m"), resident=("k",)), "x")
