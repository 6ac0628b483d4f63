"""Subjects reach the patterns that contain them."""

from hypothesis import given
from hypothesis import strategies as st

from quartet_bus.routes import Routes, matches

tokens = st.sampled_from(["a", "b", "c"])
subjects = st.lists(tokens, min_size=1, max_size=4).map(".".join)
patterns = st.builds(
    lambda body, rest: ".".join([*body, *rest]),
    st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=3),
    st.sampled_from([[], [">"]]),
)


@given(st.lists(patterns, max_size=12), st.lists(subjects, max_size=8), st.data())
def test_the_tree_finds_what_a_scan_of_all_patterns_would_in_order(
    registered: list[str], asked: list[str], data: st.DataObject
) -> None:
    routes: Routes[list[int]] = Routes()
    entries = [(pattern, [number]) for number, pattern in enumerate(registered)]
    for pattern, entry in entries:
        routes.add(pattern, entry)
    removed = data.draw(st.sets(st.integers(0, max(len(entries) - 1, 0)))) if entries else set()
    for subject in asked:
        routes.find(subject)  # fills the cache that removing must empty
    for number in removed:
        routes.remove(*entries[number])
    left = [known for number, known in enumerate(entries) if number not in removed]
    for subject in asked:
        assert list(routes.find(subject)) == [entry for pattern, entry in left if matches(pattern, subject)]


def test_removing_what_was_never_added_does_nothing() -> None:
    routes: Routes[str] = Routes()
    routes.add("a.b", "x")
    routes.remove("a.c", "x")
    routes.remove("a.b.c", "x")
    assert routes.find("a.b") == ("x",)


def test_equal_entries_are_told_apart() -> None:
    routes: Routes[list[int]] = Routes()
    one, other = [1], [1]
    routes.add("a", one)
    routes.add("a", other)
    routes.remove("a", one)
    assert routes.find("a")[0] is other
