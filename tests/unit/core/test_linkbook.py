"""What routers take links to cost: as told, else as their classes say."""

import pytest

from quartet_core.linkbook import LinkBook, PricedLink
from quartet_core.links import Place

MB = 1_000_000


def place(node, **more):
    return Place(node=node, gpus=4, gpu_gb_per_s=25.0, host_gb_per_s=25.0, **more)


def heard():
    book = LinkBook(500.0)
    book.hear(1, "k", 0.0)
    return book


def test_a_link_that_is_told_costs_what_is_told():
    book = heard()
    book.put("a", "b", PricedLink("TCP", 2.0, 3.0, 4 * MB))
    assert book.price_ms(place("a"), place("b"), 2 * MB) == (pytest.approx(6.0), "TCP")


def test_one_that_is_not_told_costs_what_its_class_says():
    price = heard().price_ms(place("a"), place("b"), 9 * MB)
    assert price == (pytest.approx(1.0 + 1.0), "TCP")


def test_its_ends_bound_the_rate_of_its_class():
    slow = place("a", rdma="roce", nic_gb_per_s=5.0)
    price = heard().price_ms(slow, place("b", rdma="roce"), 10 * MB)
    assert price == (pytest.approx(0.4 + 2.0), "RDMA_ROCE")


def test_class_figures_that_are_told_replace_the_built_in_ones():
    book = heard()
    book.put("", "", PricedLink("TCP", 1.0, 5.0, 0))
    assert book.price_ms(place("a"), place("b"), 10 * MB) == (pytest.approx(15.0), "TCP")
    book.clear()
    assert book.price_ms(place("a"), place("b"), 9 * MB) == (pytest.approx(2.0), "TCP")


def test_before_any_coordinator_was_heard_nothing_has_a_price():
    assert LinkBook(500.0).price_ms(place("a"), place("b"), MB) is None
