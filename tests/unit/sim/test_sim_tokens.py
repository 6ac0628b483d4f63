"""Text, ids and answers share one key space; content ids tell one computed block from every other."""

from hypothesis import given
from hypothesis import strategies as st

from quartet_core.ladder import sketch_text, sketch_tokens
from quartet_core.openai import parse
from quartet_sim import content
from quartet_sim.engine import Finished, FirstToken, Job
from quartet_sim.tokens import PIECE_IDS, PIECES, output, prompt_ids, text_ids


@given(st.binary(max_size=3000))
def test_text_has_the_rungs_of_its_ids(text):
    ids = text_ids(text)
    assert len(ids) == -(-len(text) // 4)
    rungs = sketch_text(text).rungs
    assert sketch_tokens(ids).rungs[: len(rungs)] == rungs


def test_pieces_are_four_bytes_and_their_ids_are_their_bytes():
    assert len(PIECES) == len(PIECE_IDS) == 256
    assert len(set(PIECES)) == 128
    for piece, id in zip(PIECES, PIECE_IDS, strict=True):
        assert list(text_ids(piece.encode())) == [id]


def test_ids_of_a_request_are_the_clients_or_those_of_its_text():
    assert list(prompt_ids(parse(b'{"prompt": [7, 8]}'))) == [7, 8]
    assert prompt_ids(parse(b'{"prompt": "hello"}')) == text_ids(b"hello")
    chat = parse(b'{"messages": [{"role": "user", "content": "hello"}]}')
    assert prompt_ids(chat) == text_ids(chat.prompt_text)


def test_a_text_that_comes_back_with_its_answer_finds_its_own_kv(drive):
    run = drive()
    question = b"Four bytes are a token, so this one has whole ones!!"
    assert len(question) % 4 == 0
    run.engine.submit(Job("a", text_ids(question), max_tokens=100), 0.0)
    run.run()
    again = question + run.text("a").encode() + b" And then?"
    run.engine.submit(Job("b", text_ids(again), max_tokens=1), run.now_ms)
    run.run()
    assert run.one("a", Finished).output_tokens == 100
    assert run.one("b", FirstToken).cached_tokens == (13 + 99) // 16 * 16


def test_a_longer_answer_continues_the_shorter_one():
    assert output(5, 400)[:70] == output(5, 70)
    assert output(5, 70) != output(6, 70)


@given(st.binary(min_size=256, max_size=256), st.integers(0, 255), st.binary(max_size=8))
def test_one_other_token_changes_its_block_and_all_behind_it(data, at, salt):
    spoilt = bytearray(data)
    spoilt[at] ^= 0x40
    before = content.chain(data, content.root(salt), 64)
    after = content.chain(bytes(spoilt), content.root(salt), 64)
    assert len(before) == 4
    first = at // 64
    assert before[:first] == after[:first]
    assert all(a != b for a, b in zip(before[first:], after[first:], strict=True))
    assert content.chain(data[64:], before[0], 64) == before[1:]
    assert content.after(data[64:128], before[0]) == before[1]


def test_a_payload_is_64_bytes_a_token_and_a_part_is_a_prefix():
    assert len(content.payload(9, 16)) == 1024
    assert content.payload(9, 5) == content.payload(9, 16)[:320]
    assert content.payload(9, 16) != content.payload(10, 16)
