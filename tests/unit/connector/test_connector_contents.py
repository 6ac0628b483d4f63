"""Content ids and pages: what engine and agent compute alike, and what a page must be to be taken."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_connector import page
from quartet_connector.contents import Root, blocks_of, chain, next_id, root_id, token_bytes
from quartet_connector.layout import PageLayout

LAYOUT = PageLayout(4, 64, "bf16", ("2 of ab",), 1, "vllm 0", "m", "w")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
texts = st.text(max_size=20)
roots = st.builds(Root, texts, texts)


@given(roots, tokens, st.integers(1, 9))
def test_a_chain_names_full_blocks_and_each_name_depends_on_all_before_it(root, ids, block_tokens):
    data = token_bytes(ids)
    blocks = blocks_of(data, block_tokens)
    assert b"".join(blocks) == data[: len(ids) // block_tokens * block_tokens * 4]
    named = chain(root, blocks)
    assert len(named) == len(ids) // block_tokens
    assert all(0 < each < 2**64 for each in named)
    parent = root_id(root)
    for block, each in zip(blocks, named, strict=True):
        assert each == next_id(parent, block)
        parent = each
    longer = chain(root, [*blocks, b"\1\2\3\4" * block_tokens])
    assert longer[:-1] == named


def test_ids_are_as_they_were():
    """They travel between hosts of unlike versions: another way to make them is another protocol."""
    assert root_id(Root()) == 3933956913646065970
    assert chain(Root("s", "a\0/p"), blocks_of(token_bytes(range(8)), 4)) == [5443962699951642712, 8112339339353865822]


@given(roots, roots)
def test_roots_keep_prompts_apart(one, other):
    assert (root_id(one) == root_id(other)) == (one == other)


@given(roots, st.integers(0, 2**64 - 1), st.booleans(), st.integers(0, 4), st.binary(min_size=64, max_size=64))
def test_a_page_says_what_it_is_of(root, parent, first, count, kv):
    if first and not page.can_root(root):
        return
    data = token_bytes(range(count))
    tail = count < 4
    parent = root_id(root) if first else parent
    head = page.encode(7, parent, data, root if first else None, 0 if tail else 64, 4)
    assert len(head) == page.header_bytes(4)
    found = page.decode(head + (b"" if tail else kv), 7, 4, 64)
    assert (found.layout, found.parent, found.tokens, found.tail) == (7, parent, data, tail)
    assert found.id == next_id(parent, data)
    assert found.root == (root if first else None)


@given(st.binary(max_size=1400))
def test_noise_is_refused_and_never_fails_otherwise(data):
    with pytest.raises(page.PageRefused):
        page.decode(data, 7, 4, 64)


@given(st.data())
def test_a_page_with_any_byte_of_its_header_changed_is_refused_or_reads_as_before(data):
    head = bytearray(page.encode(7, root_id(Root("s")), token_bytes(range(4)), Root("s"), 64, 4))
    at = data.draw(st.integers(0, len(head) - 1))
    head[at] ^= data.draw(st.integers(1, 255))
    whole = page.encode(7, root_id(Root("s")), token_bytes(range(4)), Root("s"), 64, 4) + bytes(64)
    before = page.decode(whole, 7, 4, 64)
    with contextlib.suppress(page.PageRefused):
        assert page.decode(bytes(head) + bytes(64), 7, 4, 64) == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layout": 8}, "layout 0000000000000007 against 0000000000000008"),
        ({"kv_bytes": 32}, "64 bytes of KV"),
        ({"block_tokens": 8}, "4 tokens in a block of 8"),
    ],
)
def test_what_is_wrong_with_a_page_is_said(change, says):
    head = page.encode(7, root_id(Root()), token_bytes(range(4)), Root(), 64, 8)
    whole = head.ljust(page.header_bytes(change.get("block_tokens", 4)), b"\0")[: page.header_bytes(4)] + bytes(64)
    if "block_tokens" in change:
        whole = head + bytes(64)
    given = {"layout": 7, "block_tokens": 4, "kv_bytes": 64} | change
    with pytest.raises(page.PageRefused, match=says):
        page.decode(whole, **given)


@pytest.mark.parametrize(
    "field", ["block_tokens", "kv_bytes", "dtype", "layers", "ranks", "engine", "model", "weights"]
)
def test_two_layouts_differ_in_anything_and_say_in_what(field):
    value = getattr(LAYOUT, field)
    other = msgspec.structs.replace(LAYOUT, **{field: value * 2})
    assert other.fingerprint != LAYOUT.fingerprint
    assert LAYOUT.differs(other).startswith(f"{field} {value}")
    assert LAYOUT.differs(LAYOUT) == ""
