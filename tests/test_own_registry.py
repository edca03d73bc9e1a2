"""Pairs that come into the user's own models.toml and go out again, however it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from specllama import own_registry
from specllama.errors import UsageError
from specllama.registry import PairSpec, load_registry, own_path
from specllama.sources import HubFile, LocalFile, PackageFile, Requantised

ODD = LocalFile(Path("/a b/ü'\"\\.gguf"))
PAIRS = (
    PairSpec("new.one", ODD, Requantised(ODD, "Q2_K"), about='tab\t, "line"\n and 模型'),
    PairSpec(
        "n2", HubFile("o/n", "q/a.gguf", "v1", "a" * 64), PackageFile("p", "1", "w.gguf"),
        licence="mit", context=99, cache="hybrid", gated=True, size_gb=1.5, memory_gb=8,
        gpu_memory_gb=3, chat_template="{{ x }}\n'''",
    ),
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECLLAMA_CONFIG", str(tmp_path / "config"))


def write(text: str) -> Path:
    own_path().parent.mkdir(parents=True)
    own_path().write_bytes(text.encode())
    return own_path()


def names() -> list[str]:
    return [pair.name for pair in load_registry(own_path()).pairs]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# mine",
        "pairs = {}  # mine",
        'pairs = { x = { target = {path="a"}, draft = {path="b"} } } # mine',
        '# mine\npairs.x.target.path="a"\npairs.x.draft.path="b"',
        '# mine\n[pairs]\nx.target.path="a"\nx.draft.path="b"',
        "# mine\n[pairs]\n",
        '[pairs.x]\ntarget.path="a"\n[pairs.x.draft]\npath="b"\n\n[pairs.y]  # mine\n'
        "target.path='a'\ndraft.path='b'",
        '\ufeff# mine\r\n[pairs.x]\r\ntarget.path="a"\r\ndraft.path="b"\r\n',
        '# mine\n[pairs.x]\ntarget.path="a"\ndraft.path="b"\nabout="""m\nn"""',
    ],
)
def test_pairs_come_and_go_in_a_file_that_is_written_in_any_way(text: str) -> None:
    path = write(text)
    before = names()
    for pair in PAIRS:
        own_registry.add(pair)
    assert names() == [*before, *(pair.name for pair in PAIRS)]
    found = load_registry(path)
    assert [found.pair(pair.name) for pair in PAIRS] == list(PAIRS)
    assert ("# mine" in path.read_text("utf-8")) == ("# mine" in text)
    for name in names():
        assert own_registry.remove(name) and not own_registry.remove(name)
    assert names() == []
    own_registry.add(PAIRS[0])
    assert names() == [PAIRS[0].name]


def test_what_could_not_be_read_again_is_not_written() -> None:
    blank = PairSpec("x", ODD, ODD, licence="", about=" ")
    own_registry.add(blank)
    assert load_registry(own_path()).pair("x") == PairSpec("x", ODD, ODD)
    before = own_path().read_bytes()
    file = HubFile("o/n", "a\\b.gguf")
    with pytest.raises(UsageError, match="must be a relative path"):
        own_registry.add(PairSpec("y", file, file))
    lone = LocalFile(Path("/\udcff.gguf"))
    with pytest.raises(UsageError, match="is not UTF-8"):
        own_registry.add(PairSpec("z", lone, lone))
    assert own_path().read_bytes() == before


def test_a_name_that_another_process_took_meanwhile_is_refused() -> None:
    own_registry.add(PAIRS[0])
    with pytest.raises(UsageError, match=r"has a pair new\.one already"):
        own_registry.add(PAIRS[0])


def test_what_is_not_in_the_file_is_not_taken_out_of_it() -> None:
    assert not own_registry.remove("smollm2") and not own_path().parent.exists()
    own_registry.add(PAIRS[0])
    lock = own_path().with_name(".models.toml.lock")
    lock.unlink()
    assert not own_registry.remove("smollm2") and not lock.exists()


def test_a_file_that_is_not_right_is_left_as_it_is() -> None:
    path = write("[pairs.x]\n")
    for change in (lambda: own_registry.add(PAIRS[0]), lambda: own_registry.remove("x")):
        with pytest.raises(UsageError, match='"pairs.x.target" is missing'):
            change()
    assert path.read_text() == "[pairs.x]\n"
