from __future__ import annotations

import codecs
import json
import random

import pytest

from specllama.errors import UsageError
from specllama.text import TextStream


def twin(data: bytes, stops: list[str]) -> tuple[str, str | None, int]:
    """Slow and obviously right: text, stop and where the stop starts, from all bytes at once."""
    text = codecs.utf_8_decode(data, "replace", False)[0]
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            stop = max(completed, key=len)
            return text[: end - len(stop)], stop, end - len(stop)
    return text, None, len(text)


def holdable(text: str, stops: list[str]) -> int:
    """The longest end of text that is a proper beginning of some stop, by trying all of them."""
    beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
    return max((len(each) for each in beginnings if text.endswith(each)), default=0)


def cut(data: bytes, rng: random.Random) -> list[bytes]:
    """Pieces of 0 to 5 bytes that concatenate to data."""
    pieces = []
    while data:
        size = rng.randrange(6)
        pieces.append(data[:size])
        data = data[size:]
    return pieces


def stream(pieces: list[bytes], stops: list[str]) -> tuple[str, TextStream]:
    text = TextStream(stops)
    shown = "".join([text.feed(piece) for piece in pieces])
    return shown + text.flush(), text


def test_text_without_stops_passes_at_once() -> None:
    text = TextStream()
    assert [text.feed(piece) for piece in (b"Hello", b", ", b"world")] == ["Hello", ", ", "world"]
    assert text.flush() == ""
    assert text.stopped is None
    assert text.delivered_pieces == 3


def test_every_code_point_leaves_with_its_last_byte() -> None:
    answer = "水滴 👩\u200d👩\u200d👧 \u00e9 e\u0301 🇫🇮"
    text = TextStream()
    for character in answer:
        *before, last = [bytes([value]) for value in character.encode()]
        assert [text.feed(byte) for byte in before] == [""] * len(before)
        assert text.feed(last) == character
    assert text.flush() == ""


@pytest.mark.parametrize("length", range(1, len("a👧".encode()) + 1))
def test_a_character_cut_by_the_token_limit_is_dropped(length: int) -> None:
    shown, _ = stream([bytes([value]) for value in "a👧".encode()[:length]], [])
    assert shown == ("a👧" if length == 5 else "a")
    assert json.loads(json.dumps({"text": shown})) == {"text": shown}
    assert shown.encode("utf-8")


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"a\xff", b"b"], "a\ufffdb"),
        ([b"\xf0\x9f", b"b"], "\ufffdb"),
        ([b"\xe2\x82", b"\xe2\x82\xac"], "\ufffd€"),
        ([b"\xed", b"\xa0", b"\x80"], "\ufffd\ufffd\ufffd"),
    ],
)
def test_invalid_bytes_become_replacement_characters(pieces: list[bytes], expected: str) -> None:
    assert stream(pieces, [])[0] == expected


@pytest.mark.parametrize(
    "pieces",
    [
        [b"answer\nUser:"],
        [b"answer\nU", b"ser: more"],
        [b"answer", b"\nUs", b"er:"],
        [b"answer", b"\n", b"U", b"se", b"r", b": more"],
    ],
    ids=["1 piece", "2 pieces", "3 pieces", "5 pieces"],
)
def test_a_stop_over_pieces_never_leaks(pieces: list[bytes]) -> None:
    text = TextStream(["\nUser:"])
    shown = [text.feed(piece) for piece in pieces]
    assert "".join(shown) == "answer"
    assert text.stopped == "\nUser:"
    assert text.flush() == ""


def test_a_stop_that_begins_inside_a_piece() -> None:
    text = TextStream(["\n\nUser"])
    assert [text.feed(b"x\n\nUs"), text.feed(b"er says")] == ["x", ""]
    assert text.stopped == "\n\nUser"


def test_after_a_stop_nothing_is_shown_or_counted() -> None:
    text = TextStream(["."])
    assert text.feed(b"one. two") == "one"
    assert [text.feed(b" three"), text.feed(b"."), text.flush()] == ["", "", ""]
    assert text.delivered_pieces == 1


def test_a_near_miss_is_shown_as_soon_as_it_is_one() -> None:
    text = TextStream(["\nUser:"])
    assert text.feed(b"a\nUse") == "a"
    assert text.feed(b"d") == "\nUsed"
    assert text.stopped is None


def test_a_near_miss_at_the_end_is_flushed_once() -> None:
    text = TextStream(["<end>"])
    assert text.feed(b"a<en") == "a"
    assert [text.flush(), text.flush()] == ["<en", ""]
    assert text.stopped is None


def test_a_failed_beginning_may_hide_a_new_one() -> None:
    text = TextStream(["aab"])
    assert [text.feed(b"a"), text.feed(b"a"), text.feed(b"a"), text.feed(b"b")] == ["", "", "a", ""]
    assert text.stopped == "aab"


def test_of_two_stops_the_one_completed_first_wins() -> None:
    shown, text = stream([b"x<|end|>"], ["<|end|>", "<|end"])
    assert (shown, text.stopped) == ("x", "<|end")
    shown, text = stream([b"abcd"], ["abcd", "bc"])
    assert (shown, text.stopped) == ("a", "bc")


def test_of_two_stops_completed_together_the_longest_wins() -> None:
    shown, text = stream([b"ab", b"cd"], ["cd", "bcd", "d"])
    assert (shown, text.stopped) == ("a", "bcd")


def test_a_stop_outside_ascii_is_found_across_its_bytes() -> None:
    pieces = [b"ok \xe6", b"\xb0", b"\xb4\xe6\xbb", b"\xb4!"]
    text = TextStream(["水滴"])
    assert [text.feed(piece) for piece in pieces] == ["ok ", "", "", ""]
    assert text.stopped == "水滴"


def test_a_stop_at_once_gives_an_empty_answer() -> None:
    shown, text = stream([b"#", b"# more"], ["##"])
    assert (shown, text.stopped, text.delivered_pieces) == ("", "##", 0)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(UsageError, match="stop string is empty"):
        TextStream(["ok", ""])


@pytest.mark.parametrize(
    ("pieces", "stop", "delivered"),
    [
        ([b"ab", b"cd", b"XY"], "XY", 2),
        ([b"ab", b"cX", b"Y"], "XY", 2),
        ([b"ab", b"", b"XY"], "XY", 2),
        ([b"", b"XY"], "XY", 1),
        ([b"abX", b"", b"Y"], "XY", 1),
        ([b"ab", b"XYz"], "XY", 1),
        ([b"abXYz"], "XY", 1),
        ([b"\xf0\x9f", b"\x91\xa7", b"X"], "X", 2),
        ([b"a", b"\xe6", b"", b"\xb0\xb4"], "水", 1),
        ([b"a\xe6", b"\xb0\xb4"], "水", 1),
        ([b"\xf0\x9f", b"X"], "X", 1),
        ([b"\xf0\x9f", b"\xe6", b"\xb0\xb4"], "水", 1),
    ],
)
def test_delivered_pieces_begin_before_the_stop(
    pieces: list[bytes], stop: str, delivered: int
) -> None:
    _, text = stream(pieces, [stop])
    assert text.stopped == stop
    assert text.delivered_pieces == delivered


ALPHABETS = [
    [b"a", b"b"],
    [b"a", b"b", b"\n", "é".encode(), "水".encode(), "👧".encode()],
    [b"a", b"\xff", b"\xe6", b"\xb0", b"\xb4", b"\xed\xa0", b"\xf0\x9f", "👧".encode()],
]


@pytest.mark.parametrize("alphabet", ALPHABETS, ids=["two letters", "valid", "invalid bytes"])
def test_streamed_text_equals_unstreamed_text_for_every_split(alphabet: list[bytes]) -> None:
    rng = random.Random(20)
    stopped = 0
    for _ in range(3000):
        data = b"".join(rng.choices(alphabet, k=rng.randrange(16)))
        stops = [
            b"".join(rng.choices(alphabet, k=rng.randrange(1, 6))).decode("utf-8", "replace")
            for _ in range(rng.randrange(4))
        ]
        expected, stop, _ = twin(data, stops)
        shown, text = stream(cut(data, rng), stops)
        assert (shown, text.stopped) == (expected, stop), (data, stops)
        stopped += stop is not None
    assert 300 < stopped < 2700


@pytest.mark.parametrize("alphabet", ALPHABETS, ids=["two letters", "valid", "invalid bytes"])
def test_no_more_is_held_back_than_a_stop_could_begin_with(alphabet: list[bytes]) -> None:
    rng = random.Random(21)
    for _ in range(1000):
        stops = [
            b"".join(rng.choices(alphabet, k=rng.randrange(1, 6))).decode("utf-8", "replace")
            for _ in range(rng.randrange(4))
        ]
        text, seen, shown = TextStream(stops), b"", ""
        for piece in cut(b"".join(rng.choices(alphabet, k=16)), rng):
            shown += text.feed(piece)
            seen += piece
            expected, stop, _ = twin(seen, stops)
            held = 0 if stop else holdable(expected, stops)
            assert shown == expected[: len(expected) - held], (seen, stops)


def test_delivered_pieces_agree_with_the_bytes_before_the_stop() -> None:
    rng = random.Random(22)
    counted = 0
    for _ in range(3000):
        answer = "".join(rng.choices("ab\né水👧", k=rng.randrange(1, 16)))
        stop = "".join(rng.choices("ab\né水👧", k=rng.randrange(1, 4)))
        pieces = cut(answer.encode(), rng)
        before, found, _ = twin(answer.encode(), [stop])
        if found is None:
            continue
        limit, begin, delivered = len(before.encode()), 0, 0
        for piece in pieces:
            # An empty piece is before the stop also where it touches it.
            delivered += begin < limit or (begin == limit and not piece)
            begin += len(piece)
        assert stream(pieces, [stop])[1].delivered_pieces == delivered, (pieces, stop)
        counted += 1
    assert counted > 300
