"""The page of `specllama explain --html`, in a real headless Chromium.

The browser is driven through its DevTools protocol over a pipe, so the tests need Chromium (or
Chrome) on the machine and no Python package.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import random
import select
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from specllama.explain import Balance, balance, write_page

SEED_P, SEED_Q = (0.2, 0.5, 0.3), (0.6, 0.3, 0.1)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip
# How long a starved machine may take to answer one command; nothing waits for it otherwise.
PATIENCE_S = 120.0
SHOWN_ERROR = 5.1e-5  # four decimals are shown
REQUEST = "Network.requestWillBeSent"
TEXT = "(e) => e.textContent"


class Browser:
    """One tab: commands go out and replies and events come back as JSON between NUL bytes."""

    def __init__(self, binary: str, profile: Path) -> None:
        command_read, self._command = os.pipe()
        self._reply, reply_write = os.pipe()

        self._pid = _spawn(
            [binary, *FLAGS, f"--user-data-dir={profile}"], command_read, reply_write
        )
        os.close(command_read)
        os.close(reply_write)
        self._buffer = b""
        self._last_id = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def attach(self) -> None:
        """Open the tab and listen to everything that happens in it."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        """Ask the browser to end, and make sure of it."""
        self._session = None
        with contextlib.suppress(OSError, AssertionError):
            self.send("Browser.close")
        for descriptor in (self._command, self._reply):
            os.close(descriptor)
        deadline = time.monotonic() + 20
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.02)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result; events that arrive meanwhile are kept."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._command, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reply], [], [], deadline - time.monotonic())
            chunk = os.read(self._reply, 1 << 16) if ready else b""
            assert chunk, "the browser went silent"
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, path: Path, width: int = 1200, height: int = 1600, dark: bool = False) -> None:
        """Load a file and wait until it has loaded; what happened on earlier pages is forgotten."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        wishes = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce",  # so that bars can be measured at once
        }
        features = [{"name": name, "value": value} for name, value in wishes.items()]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.events.clear()
        self.send("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        reply = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def drag(self, selector: str, to: float) -> None:
        """Move a slider's thumb to a fraction of its track with the mouse."""
        box = self.run(
            f"(() => {{ const e = document.querySelector('{selector}');"
            "const b = e.getBoundingClientRect();"
            "return [b.x, b.y + b.height / 2, b.width, e.valueAsNumber]; })()"
        )
        left, y, width, value = box
        thumb = 16.0  # the thumb's centre stays half its width away from either end
        start, end = (left + thumb / 2 + (width - thumb) * at for at in (value, to))
        held: dict[str, Any] = {"y": y, "button": "left", "buttons": 1, "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type="mousePressed", x=start, **held)
        for step in range(1, 6):
            x = start + (end - start) * step / 5
            self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, **held)
        self.send("Input.dispatchMouseEvent", type="mouseReleased", x=end, **held | {"buttons": 0})

    def press(self, key: str) -> None:
        """One key on whatever has the focus."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)


def _spawn(command: list[str], read: int, write: int) -> int:
    """Start the browser with its ends of the pipe as descriptors 3 and 4, where it expects them."""
    # `read` or `write` may be 3 or 4 themselves: move them out of the way first.
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (read, write))
    silence = [(os.POSIX_SPAWN_OPEN, end, os.devnull, os.O_RDWR, 0) for end in (0, 1, 2)]
    ends = [(os.POSIX_SPAWN_DUP2, read, 3), (os.POSIX_SPAWN_DUP2, write, 4)]
    try:
        return os.posix_spawn(command[0], command, os.environ, file_actions=[*silence, *ends])
    finally:
        os.close(read)
        os.close(write)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    if binary is None:
        pytest.skip("no Chromium on this machine; install one to test the page (apt: chromium)")
    browser = Browser(binary, tmp_path_factory.mktemp("profile"))
    try:
        browser.attach()
        yield browser
    finally:
        browser.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """The tab; whatever a test does in it, the page must not complain, nor load anything."""
    chromium.events.clear()
    yield chromium
    complaints = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    events = chromium.events
    assert [event for event in events if event["method"] in complaints] == []
    requests = [e["params"]["request"]["url"] for e in events if e["method"] == REQUEST]
    assert requests, "not even the page itself was loaded"
    assert [url for url in requests if not url.startswith(("file:///", "data:,"))] == []


@pytest.fixture
def seed_page(tmp_path: Path, browser: Browser) -> Browser:
    path = tmp_path / "seed.html"
    write_page(path, SEED_P, SEED_Q)
    browser.open(path)
    return browser


def law(browser: Browser, name: str) -> list[float]:
    """The law behind the sliders, after checking that it is the one shown and sums to one."""
    exact: list[float] = browser.run(f"state.{name}")
    shown = browser.run(f"[...document.querySelectorAll('#sliders-{name} .value')].map({TEXT})")
    thumbs = browser.run(
        f"[...document.querySelectorAll('#sliders-{name} input')].map((e) => e.valueAsNumber)"
    )
    assert [float(text) for text in shown] == pytest.approx(exact, abs=SHOWN_ERROR)
    assert thumbs == pytest.approx(exact, abs=1e-9)
    assert sum(exact) == pytest.approx(1, abs=1e-12)
    assert browser.run(f"document.getElementById('sum-{name}').textContent") == "1.0000"
    return exact


def rows(browser: Browser) -> list[list[str]]:
    """The table's cells, without its head."""
    lines = "[...document.querySelectorAll('#balance tbody tr, #balance tfoot tr')]"
    found: list[list[str]] = browser.run(f"{lines}.map((row) => [...row.cells].map({TEXT}))")
    return found


def check_books(browser: Browser) -> Balance:
    """Every number on the page is the one that `balance` gives for the laws shown."""
    books = balance(law(browser, "p"), law(browser, "q"))
    *tokens, sums = rows(browser)
    nothing = (None,) * len(books.p)
    columns: list[tuple[float | None, ...]] = [
        books.p,
        books.q,
        tuple(min(1, p / q) if q else None for p, q in zip(books.p, books.q, strict=True)),
        books.accepted,
        books.rejected,
        nothing if books.nothing_rejected else books.residual,
        books.corrected,
        books.total,
        books.plain,
    ]
    for i, (_, *cells) in enumerate(tokens):
        assert numbers(cells) == pytest.approx([c[i] for c in columns], abs=SHOWN_ERROR)
    totals = [None if None in c else math.fsum(x or 0 for x in c) for c in columns]
    totals[2] = None  # probabilities of different events have no sum
    assert numbers(sums[1:]) == pytest.approx(totals, abs=SHOWN_ERROR)
    summary = browser.run("document.getElementById('summary').textContent")
    accepted, rejected = f"{books.acceptance:.4f}", f"{abs(books.rejection):.4f}"
    assert f"Accepted {accepted}, rejected {rejected}, total 1.0000" in summary
    check_bars(browser, books)
    return books


def numbers(cells: Sequence[str]) -> list[float | None]:
    """Cells as numbers, None for one that shows that there is no number."""
    return [None if cell in ("", "\N{EN DASH}") else float(cell) for cell in cells]


def check_bars(browser: Browser, books: Balance) -> None:
    """The stacks on the screen are as high as the numbers say, all three charts on one scale."""
    high = "(e) => e.getBoundingClientRect().height"
    top = browser.run("[...document.querySelectorAll('#chart-exact i')].at(-1).dataset.at")
    scale = browser.run(f"({high})(document.querySelector('#chart-exact .cols'))") / float(top)
    wrong = [plain - kept for plain, kept in zip(books.plain, books.accepted, strict=True)]
    stacks = {"draft": books.rejected, "exact": books.corrected, "plain": wrong}
    for name, added in stacks.items():
        shown = browser.run(
            f"[...document.querySelectorAll('#chart-{name} .col')]"
            f".map((col) => [...col.querySelectorAll('.seg')].map({high}))"
        )
        for bars, *masses in zip(shown, books.accepted, added, books.p, strict=True):
            *filled, outline = [mass * scale for mass in masses]
            assert bars[:2] == pytest.approx(filled, abs=0.6)
            assert bars[2] == pytest.approx(outline, abs=2.1)  # never less than its border


def test_page_starts_with_the_balance_of_the_seed_text(seed_page: Browser) -> None:
    books = check_books(seed_page)
    assert books.p == SEED_P and books.q == SEED_Q
    head = seed_page.run(f"[...document.querySelectorAll('#balance thead th')].map({TEXT})")
    columns = dict(zip(head, zip(*rows(seed_page), strict=True), strict=True))
    assert columns["accepted"] == ("0.2000", "0.3000", "0.1000", "0.6000")
    assert columns["corrected"] == ("0.0000", "0.2000", "0.2000", "0.4000")
    assert columns["total"] == ("0.2000", "0.5000", "0.3000", "1.0000")
    assert columns["plain p"] == ("0.2800", "0.5000", "0.2200", "1.0000")


def test_dragging_a_slider_moves_mass_and_keeps_the_books(seed_page: Browser) -> None:
    seed_page.drag("#p-1", 0.8)
    p = law(seed_page, "p")
    assert p[1] == pytest.approx(0.8, abs=0.02)
    assert p[0] / p[2] == pytest.approx(0.2 / 0.3)
    assert law(seed_page, "q") == list(SEED_Q)
    check_books(seed_page)
    seed_page.drag("#q-0", 0.25)
    q = law(seed_page, "q")
    assert q[0] == pytest.approx(0.25, abs=0.02)
    assert q[1] / q[2] == pytest.approx(3)
    assert law(seed_page, "p") == p
    check_books(seed_page)


def test_many_drags_never_break_a_law(seed_page: Browser) -> None:
    rng = random.Random(5)
    for _ in range(12):
        name, token = rng.choice("pq"), rng.randrange(3)
        seed_page.drag(f"#{name}-{token}", rng.choice([0, 1, rng.random()]))
        check_books(seed_page)


def test_dragging_to_one_and_back_restores_the_proportions(seed_page: Browser) -> None:
    seed_page.drag("#q-2", 0.7)
    before = law(seed_page, "q")
    seed_page.drag("#q-0", 1)
    assert law(seed_page, "q") == [1, 0, 0]
    check_books(seed_page)
    seed_page.drag("#q-0", 0.5)
    after = law(seed_page, "q")
    assert after[1] / after[2] == pytest.approx(before[1] / before[2])
    seed_page.drag("#q-0", 0)
    assert law(seed_page, "q")[0] == 0
    check_books(seed_page)


def test_without_proportions_to_keep_the_others_share_equally(seed_page: Browser) -> None:
    seed_page.run("document.querySelector('[data-preset=sure]').click()")
    assert law(seed_page, "q") == [1, 0, 0]
    seed_page.drag("#q-0", 0.4)
    q = law(seed_page, "q")
    assert q[1] == q[2] == pytest.approx(0.3, abs=0.01)


def test_sliders_work_from_the_keyboard(seed_page: Browser) -> None:
    seed_page.run("document.getElementById('p-0').focus()")
    for key, value in (
        ("ArrowRight", 0.21), ("ArrowLeft", 0.2), ("PageUp", 0.3), ("ArrowDown", 0.29),
        ("End", 1), ("ArrowUp", 1), ("Home", 0), ("PageDown", 0),
    ):  # fmt: skip
        seed_page.press(key)
        assert law(seed_page, "p")[0] == pytest.approx(value), key
    assert law(seed_page, "p")[1:] == pytest.approx([0.625, 0.375])
    check_books(seed_page)


def test_sliders_and_charts_have_accessible_names(seed_page: Browser) -> None:
    tree = seed_page.send("Accessibility.getFullAXTree")["nodes"]
    by_role: dict[str, list[str]] = {}
    for node in tree:
        role, name = (node.get(key, {}).get("value", "") for key in ("role", "name"))
        by_role.setdefault(role, []).append(name)
    assert sorted(by_role["slider"]) == sorted(
        f"{law}, the {owner}'s probability of {token}"
        for law, owner in (("p", "target"), ("q", "draft"))
        for token in "ABC"
    )
    charts = by_role.get("image", []) + by_role.get("img", [])
    assert any("A 0.2800, B 0.5000, C 0.2200" in name for name in charts)


@pytest.mark.parametrize(
    ("preset", "said"),
    [
        ("equal", "p equals q, so nothing is rejected and no correction is needed"),
        ("disjoint", "Accepted 0.0000, rejected 1.0000"),
        ("sure", "Accepted 0.2000, rejected 0.8000"),
        ("example", "Accepted 0.6000, rejected 0.4000"),
    ],
)
def test_presets_keep_the_books(seed_page: Browser, preset: str, said: str) -> None:
    seed_page.run(f"document.querySelector('[data-preset={preset}]').click()")
    check_books(seed_page)
    assert said in seed_page.run("document.getElementById('summary').textContent")
    pressed = "[...document.querySelectorAll('[aria-pressed=true]')].map((e) => e.dataset.preset)"
    assert seed_page.run(pressed) == [preset]
    seed_page.drag("#p-2", 0.9)
    check_books(seed_page)
    seed_page.run("document.getElementById('reset').click()")
    books = check_books(seed_page)
    assert books.p == SEED_P and books.q == SEED_Q


def test_correcting_from_plain_p_is_not_blamed_where_it_happens_to_agree(
    seed_page: Browser,
) -> None:
    verdict = "document.getElementById('verdict-plain').textContent"
    assert "A comes out with 0.2800 instead of 0.2000" in seed_page.run(verdict)
    seed_page.run("document.querySelector('[data-preset=disjoint]').click()")
    assert "happens to agree" in seed_page.run(verdict)
    seed_page.run("document.querySelector('[data-preset=equal]').click()")
    assert "Nothing to correct" in seed_page.run(verdict)


def test_arithmetic_of_the_page_is_that_of_the_package(seed_page: Browser) -> None:
    rng = random.Random(11)
    for n_tokens in range(2, 13):
        p, q = (random_law(rng, n_tokens) for _ in range(2))
        theirs = seed_page.run(f"massBalance({json.dumps(p)}, {json.dumps(q)})")
        books = balance(p, q)
        for name in ("accepted", "rejected", "residual", "corrected", "total", "plain"):
            assert theirs[name] == pytest.approx(getattr(books, name), abs=1e-14), name
        assert theirs["acceptance"] == pytest.approx(books.acceptance, abs=1e-14)


def random_law(rng: random.Random, n_tokens: int) -> list[float]:
    """A law with about a third of its tokens impossible."""
    masses = [rng.expovariate(1) * (rng.random() < 0.7) for _ in range(n_tokens - 1)] + [0.1]
    total = math.fsum(masses)
    return [mass / total for mass in masses]


def test_twelve_tokens_with_hostile_labels_fit_a_phone(tmp_path: Path, browser: Browser) -> None:
    labels = [
        "</script><script>oops()</script>", "<b>", "&amp;", '"', "'", "@@TABLE@@", "\\u003c",
        "a label that is far too long for the place it has", " the", "ночь", "\u2028", "👩‍🚀",
    ]  # fmt: skip
    p = [i / 78 for i in range(1, 13)]
    path = tmp_path / "phone.html"
    write_page(path, p, p[::-1], labels)
    browser.open(path, width=360, height=800)
    assert [row[0] for row in rows(browser)] == [*labels, "sum"]
    assert browser.run("document.documentElement.scrollWidth <= 360")
    check_books(browser)
    browser.drag("#q-11", 0.6)
    check_books(browser)
    browser.run("document.querySelector('[data-preset=example]').click()")
    assert check_books(browser).p == SEED_P
    browser.run("document.getElementById('reset').click()")
    assert list(check_books(browser).p) == pytest.approx(p)


def test_dark_theme_is_dark_and_light_is_light(tmp_path: Path, browser: Browser) -> None:
    path = tmp_path / "themes.html"
    write_page(path, SEED_P, SEED_Q)
    luminance = (
        "['backgroundColor', 'color'].map((key) => getComputedStyle(document.body)[key]"
        ".match(/\\d+/g).map(Number).reduce((a, b) => a + b) / 3)"
    )
    for dark in (False, True):
        browser.open(path, dark=dark)
        background, ink = browser.run(luminance)
        darker, lighter = (background, ink) if dark else (ink, background)
        assert darker < 60 and lighter > 200
