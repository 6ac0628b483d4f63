"""Which workers may exchange KV."""

from typing import NamedTuple

import pytest

from quartet_core.catalogue import builtin
from quartet_core.links import best_path, ceiling_gb_per_s
from quartet_core.pairing import handshake, handshake_of, lacking, place_of, why_not, why_not_pair


class Layout(NamedTuple):
    block_tokens: int = 16
    bytes_per_token: int = 131_072
    precision: str = "bf16"
    revision: str = "r1"
    tp: int = 1


class Replica(NamedTuple):
    model: str = "llama-8b"
    precision: str = "fp8"
    engine: str = "vllm"
    engine_version: str = "0.24"
    capabilities: tuple[str, ...] = ("export", "import", "reserve")
    layout: Layout = Layout()


def test_equal_layouts_pair():
    assert why_not(Layout(), Layout()) is None
    assert why_not_pair(Replica(), Replica()) is None


@pytest.mark.parametrize(
    "change", [{"block_tokens": 32}, {"bytes_per_token": 1}, {"precision": "fp8"}, {"revision": ""}]
)
def test_any_difference_in_layout_is_named(change):
    (name,) = change
    assert name in why_not(Layout(), Layout()._replace(**change))


def test_another_tp_is_refused_unless_the_target_can_cut_heads_anew():
    four, one = Replica(layout=Layout(tp=4)), Replica()
    assert why_not_pair(four, one) == "tp 4 against 1"
    assert why_not_pair(four, one._replace(capabilities=("import", "reshard"))) is None
    assert why_not_pair(four._replace(capabilities=("export", "reshard")), one) == "tp 4 against 1"


@pytest.mark.parametrize(
    "change", [{"model": "other"}, {"precision": "bf16"}, {"engine": "sglang"}, {"engine_version": "0.23"}]
)
def test_kv_of_other_weights_or_another_engine_is_refused(change):
    assert why_not_pair(Replica(), Replica()._replace(**change)) is not None


def test_a_transfer_needs_export_at_its_source_and_import_and_reserve_at_its_target():
    whole = Replica()
    assert lacking(whole, whole) is None
    assert "export" in lacking(whole._replace(capabilities=("import",)), whole)
    assert "import" in lacking(whole, whole._replace(capabilities=("export", "reserve")))
    assert "reserve" in lacking(whole, whole._replace(capabilities=("import",)))


def test_engines_with_the_same_connector_need_none_of_it():
    nixl, other = (Replica(capabilities=(handshake_of(name),)) for name in ("NixlConnector", "OtherConnector"))
    assert handshake(nixl, nixl) == "NixlConnector"
    assert lacking(nixl, nixl) is None
    assert handshake(nixl, other) == handshake(nixl, Replica()) == handshake(Replica(), Replica()) == ""
    assert "export" in lacking(nixl, other)


def test_the_best_fabric_that_both_nodes_announce_is_taken():
    classes = builtin()
    h100, l40s = classes.hardware_class("H100_SXM5"), classes.hardware_class("L40S_PCIE")
    infiniband, ethernet = {"RDMA_IB": 45.0, "TCP": 9.0}, {"TCP": 9.0}
    assert best_path(place_of("a", infiniband, h100, 1), place_of("b", infiniband, l40s, 1)) == "RDMA_IB"
    assert best_path(place_of("a", infiniband, h100, 1), place_of("b", ethernet, l40s, 1)) == "TCP"
    assert best_path(place_of("a", ethernet, h100, 1), place_of("a", ethernet, h100, 1)) == "NVLINK"
    assert best_path(place_of("a", ethernet, h100, 1), place_of("a", ethernet, l40s, 1)) == "PCIE_P2P"
    assert best_path(place_of("a", {"SHM": 12.0}, l40s, 1), place_of("a", {"SHM": 12.0}, l40s, 1)) == "SHM"


def test_one_l40s_takes_in_28_gb_per_s_whatever_its_nic():
    classes = builtin()
    h100, l40s = classes.hardware_class("H100_SXM5"), classes.hardware_class("L40S_PCIE")
    fabrics = {"RDMA_ROCE": 46.6}
    source = place_of("a", fabrics, h100, 1)
    assert ceiling_gb_per_s("RDMA_ROCE", source, place_of("b", fabrics, l40s, 1)) == 28.0
    assert ceiling_gb_per_s("RDMA_ROCE", source, place_of("b", fabrics, l40s, 4)) == 46.6
