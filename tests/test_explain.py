"""The mass balance as numbers, text, page source and picture."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from specllama.acceptance import Draft, verify_tokens
from specllama.errors import UsageError
from specllama.explain import (
    balance,
    default_labels,
    page,
    parse_labels,
    parse_law,
    plot,
    table,
    write_page,
)
from specllama.sampling import Floats, Law, Streams

SEED_P, SEED_Q = (0.2, 0.5, 0.3), (0.6, 0.3, 0.1)
SEED = balance(SEED_P, SEED_Q)

SEED_TABLE = """\
token       p       q  accepted  rejected  residual  corrected   total  plain p
-------------------------------------------------------------------------------
A      0.2000  0.6000    0.2000    0.4000    0.0000     0.0000  0.2000   0.2800
B      0.5000  0.3000    0.3000    0.0000    0.5000     0.2000  0.5000   0.5000
C      0.3000  0.1000    0.1000    0.0000    0.5000     0.2000  0.3000   0.2200
-------------------------------------------------------------------------------
sum    1.0000  1.0000    0.6000    0.4000    1.0000     0.4000  1.0000   1.0000
"""


def pairs_of_laws() -> list[tuple[Floats, Floats]]:
    """Random, sparse, disjoint, equal, one-hot and one-ulp-apart laws over 2 to 12 tokens."""
    rng = np.random.default_rng(3)
    pairs = []
    for n in range(2, 13):
        dense, other = rng.dirichlet(np.full(n, 0.5), size=2)
        sparse = np.where(np.arange(n) == 0, 1.0, rng.integers(0, 2, n) * rng.random(n))
        first, last = np.eye(n)[0], np.eye(n)[-1]
        nudged = dense.copy()
        nudged[0] = np.nextafter(nudged[0], 1)
        pairs += [(dense, other), (dense, sparse / sparse.sum()), (sparse / sparse.sum(), other)]
        pairs += [(dense, dense), (dense, first), (first, dense), (first, last), (dense, nudged)]
    return pairs


def test_balance_of_the_seed_text() -> None:
    assert SEED.accepted == pytest.approx((0.2, 0.3, 0.1))
    assert SEED.rejected == pytest.approx((0.4, 0, 0))
    assert SEED.residual == pytest.approx((0, 0.5, 0.5))
    assert SEED.corrected == pytest.approx((0, 0.2, 0.2))
    assert SEED.total == pytest.approx(SEED_P)
    assert SEED.plain == pytest.approx((0.28, 0.50, 0.22))
    assert (SEED.acceptance, SEED.rejection) == pytest.approx((0.6, 0.4))


def test_total_is_the_target_for_any_draft() -> None:
    for p, q in pairs_of_laws():
        books = balance(p.tolist(), q.tolist())
        np.testing.assert_allclose(books.total, p, rtol=0, atol=1e-15)
        assert books.acceptance + books.rejection == pytest.approx(1, abs=1e-14)
        assert math.fsum(books.corrected) == pytest.approx(books.rejection, abs=1e-14)
        assert math.fsum(books.plain) == pytest.approx(1, abs=1e-14)
        assert min(*books.rejected, *books.residual) >= 0


class Scripted:
    """An Rng that answers as told and remembers what it was asked."""

    def __init__(self, accept: bool) -> None:
        self.accept = accept
        self.probability = math.nan
        self.law: Law | None = None

    def categorical(self, law: Law) -> int:
        self.law = law
        return 0

    def bernoulli(self, prob: float) -> bool:
        self.probability = prob
        return self.accept


def test_books_are_those_of_the_verification_that_generation_runs() -> None:
    for p, q in pairs_of_laws():
        accepted, corrected = np.zeros_like(p), np.zeros_like(p)
        for token in np.flatnonzero(q).tolist():
            rng = Scripted(accept=False)
            draft = Draft((token,), (Law(q),))
            verify_tokens(draft, lambda _, p=p: Law(p), Streams(rng, rng, rng))  # type: ignore[misc]
            accepted[token] = q[token] * rng.probability
            assert rng.law is not None
            corrected += q[token] * (1 - rng.probability) * rng.law.probs
        books = balance(p.tolist(), q.tolist())
        np.testing.assert_allclose(books.accepted, accepted, rtol=0, atol=1e-15)
        np.testing.assert_allclose(books.corrected, corrected, rtol=0, atol=1e-15)


def test_equal_laws_need_no_correction() -> None:
    books = balance((0.25, 0.75), (0.25, 0.75))
    assert books.nothing_rejected and books.rejection == 0
    assert books.residual == books.corrected == (0, 0)
    text = table(books)
    assert "p equals q: nothing is rejected, and no correction is needed." in text
    assert "0.2500  0.2500    0.2500    0.0000         -     0.0000" in text


def test_laws_of_different_length_are_refused() -> None:
    with pytest.raises(UsageError, match=r"p has 2 tokens and q has 3; give both"):
        balance((0.5, 0.5), SEED_Q)
    with pytest.raises(UsageError, match="p has 3 tokens and q has 2"):
        page(SEED_P, (0.5, 0.5))


@pytest.mark.parametrize(
    ("text", "law"),
    [
        ("0.2,0.5,0.3", SEED_P),
        (" .2 , 5e-1,0.3 ", SEED_P),
        ("1/3,2/3", (1 / 3, 2 / 3)),
        ("1,0", (1, 0)),
        ("1,-0", (1, 0)),
        ("1/6,1/6,1/6,1/6,1/6,1/6", (1 / 6,) * 6),
        ("0.3333333333,0.6666666667", (0.3333333333, 0.6666666667)),
    ],
)
def test_laws_are_read(text: str, law: tuple[float, ...]) -> None:
    parsed = parse_law(text, "--p")
    assert parsed == pytest.approx(law, abs=1e-15)
    assert math.fsum(parsed) == pytest.approx(1, abs=1e-15)
    assert all(math.copysign(1, mass) == 1 for mass in parsed)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("0.2,0.5,0.2", "--q sums to 0.9, not to 1; raise its entries by 0.1 in all"),
        ("0.6,0.6", "--q sums to 1.2, not to 1; lower its entries by 0.2 in all"),
        ("0,0", "--q sums to 0, not to 1"),
        ("0.333,0.333,0.333", "fractions such as 1/3 are understood"),
        ("0.500000002,0.5", "--q sums to 1.000000002"),
        ("1", "--q has 1 entry; give 2 to 12 probabilities"),
        ("", "--q has 1 entry"),
        (",".join(["1/13"] * 13), "--q has 13 entries; give 2 to 12"),
        ("1.5,-0.5", "--q has the negative entry -0.5"),
        ("nan,1", "--q has the entry 'nan', which is not a finite number"),
        ("inf,0", "--q has the entry 'inf'"),
        ("1e999,0", "--q has the entry '1e999'"),
        ("1/0,1", "--q has the entry '1/0'"),
        ("1/2/3,1", "--q has the entry '1/2/3'"),
        ("0,2;0,8", "--q has the entry '2;0'"),
        ("0.5,,0.5", "--q has the entry ''"),
        ("half,half", "write decimals with a point, or fractions"),
    ],
)
def test_what_is_no_law_is_refused_with_the_cause(text: str, cause: str) -> None:
    with pytest.raises(UsageError, match=re.escape(cause)) as caught:
        parse_law(text, "--q")
    assert "\n" not in str(caught.value)


def test_labels_are_read_or_refused() -> None:
    assert parse_labels("yes, no", 2) == ("yes", "no")
    with pytest.raises(UsageError, match="--labels has 2 names, but there are 3 tokens"):
        parse_labels("yes,no", 3)
    with pytest.raises(UsageError, match="empty name"):
        parse_labels("yes,", 2)


def test_table_of_the_seed_text() -> None:
    text = table(SEED)
    assert SEED_TABLE in text
    notes = " ".join(text.split())
    assert "a correction is needed with probability 0.4000" in notes
    assert "A comes out with 0.2800 instead of 0.2000" in notes
    assert "every token ends with exactly what the target gives it" in notes


def test_table_explains_each_of_its_columns() -> None:
    head, *rest = SEED_TABLE.splitlines()
    titles = [title for title in re.split(r"\s{2,}", head) if title != "token"]
    lines = table(SEED).splitlines()
    below = lines[lines.index(rest[-1]) + 1 :]
    explained = [title for title in titles if any(re.match(title + "  ", line) for line in below)]
    assert explained == titles


@pytest.mark.parametrize("n_tokens", range(2, 13))
def test_table_stays_aligned_and_narrow(n_tokens: int) -> None:
    p = np.random.default_rng(n_tokens).dirichlet(np.ones(n_tokens))
    lines = table(balance(p.tolist(), p[::-1].tolist())).splitlines()
    assert max(map(len, lines)) <= 79
    head = next(line for line in lines if line.startswith("token"))
    body = [line for line in lines if re.match(r"([A-L]|sum)\s+\d", line)]
    assert len(body) == n_tokens + 1
    ends = [match.end() for match in re.finditer(r"\S+(?: p)?", head)][1:]
    for line in body:
        assert [match.end() for match in re.finditer(r"\d\.\d{4}", line)] == ends


def test_table_survives_terminals_that_know_ascii_only() -> None:
    text = table(SEED, ("ночь", "\x1b[31mred\n", "naïve"))
    assert text.isascii()
    assert all(character.isprintable() for character in text.replace("\n", ""))
    assert r"na\xefve" in text and r"\x1b[31mred\n" in text


def test_plain_p_is_not_blamed_where_it_happens_to_agree() -> None:
    disjoint = " ".join(table(balance((0.5, 0.5, 0), (0, 0, 1))).split())
    assert "no harm for this pair by coincidence" in disjoint
    assert "comes out with" not in disjoint
    equal = " ".join(table(balance((0.5, 0.5), (0.5, 0.5))).split())
    assert "no harm here, as there is nothing to correct" in equal


def test_page_is_self_contained_and_shows_the_table_without_javascript() -> None:
    source = page(SEED_P, SEED_Q)
    assert source.count("<script") == 2 and "@@" not in source
    assert re.findall(r"\b(?:src|srcset|@import|url)\s*[=(]", source) == []
    assert re.findall(r"https?://[^\"]+", source) == ["https://arxiv.org/abs/2211.17192"]
    fallback = re.search(r"<noscript>.*?<pre>(.*?)</pre>", source, re.DOTALL)
    assert fallback is not None and SEED_TABLE in fallback.group(1)


def test_page_cannot_be_broken_by_a_label() -> None:
    source = page(SEED_P, SEED_Q, ("</script><b>", "@@TABLE@@", "A&B"))
    assert source.count("</script>") == 2
    assert source.count("<pre>") == 1 and "<b>," not in source


def test_page_is_written_or_the_reason_given(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", SEED_P, SEED_Q)
    written = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert written == page(SEED_P, SEED_Q)
    with pytest.raises(UsageError, match=r"cannot write .*: Is a directory; choose a file"):
        write_page(tmp_path, SEED_P, SEED_Q)
    with pytest.raises(UsageError, match="No such file or directory"):
        write_page(tmp_path / "missing" / "page.html", SEED_P, SEED_Q)


def coloured_pixels(picture: Path, colour: str) -> int:
    """How many pixels of a PNG have exactly this colour."""
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    pixels = imread(picture)[..., :3]
    return int((np.abs(pixels - to_rgb(colour)).max(axis=-1) < 0.004).sum())


def test_picture_shows_masses_as_areas(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "balance.png"
    plot(SEED, picture)
    blue, orange = (coloured_pixels(picture, colour) for colour in ("#2a6b8d", "#dd9330"))
    # Two charts show the accepted 0.6, one the corrected 0.4.
    assert orange / blue == pytest.approx(0.4 / 1.2, rel=0.04)


@pytest.mark.parametrize("ending", ["svg", "pdf", "PNG"])
def test_picture_takes_its_format_from_the_ending(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"balance.{ending}"
    p = tuple(i / 78 for i in range(1, 13))
    plot(balance(p, p[::-1]), picture, ["$x", "same", "same", *default_labels(9)])
    signature = {"svg": b"<?xml", "pdf": b"%PDF", "PNG": b"\x89PNG"}[ending]
    assert picture.read_bytes().startswith(signature)


def test_picture_that_cannot_be_written_is_refused_with_the_cause(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(
        UsageError, match=r"no ending that names a picture format; use one of .*png"
    ):
        plot(SEED, tmp_path / "balance.gguf")
    with pytest.raises(UsageError, match="no ending"):
        plot(SEED, tmp_path / "balance")
    with pytest.raises(UsageError, match="No such file or directory"):
        plot(SEED, tmp_path / "missing" / "balance.png")


def test_picture_in_a_format_that_needs_a_missing_program_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"xelatex.*; choose another ending"):
        plot(SEED, tmp_path / "balance.pgf")


def test_picture_without_matplotlib_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match="pip install matplotlib"):
        plot(SEED, tmp_path / "balance.png")
