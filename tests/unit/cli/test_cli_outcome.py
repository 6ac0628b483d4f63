import msgspec
import pytest

from quartet_bus import frames
from quartet_cli.demo.outcome import Outcome, fault_of
from quartet_cli.demo.workload import Arrival, prepare, right_text
from quartet_sim.traces import TraceRequest

ARRIVAL = Arrival("x", 0.0, "m", TraceRequest(1, 0.0, 40, 6))
PREPARED = prepare(ARRIVAL)
TEXT = right_text(PREPARED, 6)
PIECES = [TEXT[at : at + 4] for at in range(0, 24, 4)]


def chunks(pieces: list[str], finish: str = "length") -> list[bytes]:
    choices = [{"index": 0, "text": piece, "finish_reason": None} for piece in pieces]
    choices.append({"index": 0, "text": "", "finish_reason": finish})
    return [msgspec.json.encode({"choices": [choice]}) for choice in choices]


def end(tokens: int) -> frames.End:
    return frames.End(id="x", attempt=1, try_=1, seq=9, output_tokens=tokens)


def test_a_whole_answer_with_the_prompts_own_text_is_right():
    assert fault_of(ARRIVAL, PREPARED, chunks(PIECES), end(6)) == ("", 6)


@pytest.mark.parametrize(
    ("answer", "last", "fault"),
    [
        (chunks(PIECES[:5]), end(5), "5 tokens came, 6 were asked for"),
        (chunks(PIECES), end(5), "the end frame counts 5 tokens"),
        (chunks(PIECES), None, "the end frame counts no tokens"),
        (chunks(PIECES, "stop"), end(6), "finish_reason is stop"),
        (chunks(PIECES[1:] + PIECES[:1]), end(6), "the text is not this prompt's"),
        ([b"{"], end(6), "a chunk is no completion"),
        ([], end(0), "0 tokens came"),
    ],
)
def test_what_is_wrong_with_an_answer_is_said(answer, last, fault):
    said, _ = fault_of(ARRIVAL, PREPARED, answer, last)
    assert said.startswith(fault)


def test_time_per_token_is_between_the_tokens():
    assert Outcome("x", "m", 1, 5, first_ms=100.0, last_ms=140.0, tokens=5).tpot_ms == 10.0
    assert Outcome("x", "m", 1, 1, first_ms=100.0, last_ms=100.0, tokens=1).tpot_ms == 0.0
    assert Outcome("x", "m", 1, 5).tpot_ms == float("inf")
