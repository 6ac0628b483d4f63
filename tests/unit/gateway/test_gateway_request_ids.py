import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_gateway.request_ids import RequestIds


def test_a_sane_name_is_taken_as_it_is():
    assert RequestIds(random.Random(1)).choose("t", "trace-1.a:b_c") == "trace-1.a:b_c"


@pytest.mark.parametrize("wanted", [None, "", " ", "a b", "a\r\nb", "a/b", "ü", "x" * 129, '"', "a,b"])
def test_a_missing_or_odd_name_gets_a_fresh_one(wanted):
    assert RequestIds(random.Random(1)).choose("t", wanted).startswith("req-")


def test_a_name_already_used_by_the_tenant_gets_an_ending():
    ids = RequestIds(random.Random(1))
    first, second, third = (ids.choose("t", "mine") for _ in range(3))
    assert first == "mine"
    assert second.startswith("mine-")
    assert third.startswith("mine-")
    assert second != third
    assert ids.choose("other tenant", "mine") == "mine"


@given(st.lists(st.sampled_from(["a", "b", "c", "d", "e", None])))
def test_no_id_is_given_twice_within_what_is_remembered(wanted):
    ids = RequestIds(random.Random(1), remembered=5)
    given_out = [ids.choose("t", name) for name in wanted]
    assert len(set(given_out)) == len(given_out)


def test_the_oldest_name_is_forgotten_first():
    ids = RequestIds(random.Random(1), remembered=2)
    for name in ("a", "b", "c"):
        ids.choose("t", name)
    assert ids.choose("t", "c") != "c"
    assert ids.choose("t", "a") == "a"
