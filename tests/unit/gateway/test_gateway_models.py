import json

import pytest

from quartet_bus.config.schema import ModelSection
from quartet_bus.messages import KvLayout, NodeInventory, WorkerInfo
from quartet_core.openai import Refused
from quartet_gateway import models
from quartet_gateway.models import ModelBook

STALE_NS = 1000


def worker(model: str, *, adapters: tuple[str, ...] = (), max_context: int = 8192) -> WorkerInfo:
    return WorkerInfo(
        id="n-0",
        ordinal=0,
        incarnation=1,
        hardware="H100_SXM5",
        model=model,
        precision="fp8",
        tp=1,
        gpus=(0,),
        kv_tokens=1 << 17,
        max_context=max_context,
        max_batch=256,
        chunk_tokens=2048,
        layout=KvLayout(16, 1000, "fp8"),
        engine="simulated",
        adapters=adapters,
    )


def inventory(node: str, *workers: WorkerInfo) -> NodeInventory:
    return NodeInventory(node, 1, 1, workers)


def book(*configured: str) -> ModelBook:
    return ModelBook({name: ModelSection(spec=name) for name in configured}, stale_ns=STALE_NS, created_s=7)


def refusal(of: ModelBook, model: str) -> int:
    with pytest.raises(Refused) as refused:
        of.check(model)
    return refused.value.status


def ids(of: ModelBook) -> list[str]:
    return [model["id"] for model in json.loads(of.listing())["data"]]


def test_models_and_adapters_of_all_nodes_are_listed_by_name():
    known = book()
    known.heard(inventory("n1", worker("b"), worker("b")), 0)
    known.heard(inventory("n2", worker("a", adapters=("a-lora",))), 0)
    assert ids(known) == ["a", "a-lora", "b"]
    assert json.loads(known.listing())["data"][1] == {
        "id": "a-lora",
        "object": "model",
        "created": 7,
        "owned_by": "quartet",
        "max_model_len": 8192,
        "parent": "a",
    }


def test_the_longest_context_that_serves_a_model_is_its_context():
    known = book()
    known.heard(inventory("n1", worker("a", max_context=100), worker("a", max_context=300)), 0)
    known.heard(inventory("n2", worker("a", max_context=200)), 0)
    assert [model.max_context for model in known.served] == [300]


def test_a_silent_node_serves_nothing_but_its_models_stay_known():
    known = book()
    known.heard(inventory("n1", worker("a")), 0)
    known.heard(inventory("n2", worker("b")), STALE_NS)
    known.expire(STALE_NS + 1)
    assert ids(known) == ["b"]
    known.check("a")
    with pytest.raises(Refused) as refused:
        known.entry("a")
    assert refused.value.status == 404


def test_a_node_that_changed_its_mind_serves_only_what_it_last_said():
    known = book()
    known.heard(inventory("n1", worker("a"), worker("b")), 0)
    known.heard(inventory("n1", worker("b")), 1)
    assert ids(known) == ["b"]


def test_a_model_nobody_heard_of_is_404_but_503_while_no_node_was_heard():
    known = book("configured")
    known.check("configured")
    assert refusal(known, "a") == 503
    known.heard(inventory("n1", worker("b")), 0)
    assert refusal(known, "a") == 404
    known.check("b")


def test_names_ever_served_are_bounded(monkeypatch):
    monkeypatch.setattr(models, "MAX_NAMES", 3)
    known = book()
    for number in range(6):
        known.heard(inventory("n1", worker(f"m{number}")), 0)
    known.check("m0")
    known.check("m5")  # served right now
    assert refusal(known, "m4") == 404
