"""`specllama models` as a person uses it, with a hub on loopback, and models named by `-m`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command import Result, without_build_note
from filelock import FileLock
from hubserver import Faults, HubServer, point_at
from tiny import CHECKOUT, tiny

from specllama import listing, memory, own_registry
from specllama.cli import _run
from specllama.loading import find_files, load
from specllama.registry import PairSpec, Registry
from specllama.sources import LocalFile

BIG, SMALL = "owner/Big-GGUF", "owner/Small-GGUF"
LAST = ["it", "is", "for"]
SHORT = ["--draft-tokens", "2", "-n", "4", "-t", "1", "-s", "1"]
# A folder whose name needs care in TOML, in a shell and in a file system.
FOLDER = "mod els/Загрузки/模型 é'\\ \"x\""


@pytest.fixture(scope="module")
def running() -> Iterator[HubServer]:
    server = HubServer()
    yield server
    server.close()


class Person:
    """Somebody with folders of their own, at the command line, in this process."""

    def __init__(
        self, server: HubServer, folder: Path, capture: pytest.CaptureFixture[bytes]
    ) -> None:
        self.server, self.folder, self._capture = server, folder, capture
        self.own = folder / "config" / "models.toml"
        self.cache = folder / "hf" / "hub"

    def runs(self, *arguments: str | Path, code: int = 0) -> Result:
        self._capture.readouterr()
        found = _run([str(argument) for argument in arguments])
        out, err = self._capture.readouterr()
        result = Result(found, out, without_build_note(err))
        assert result.code == code, result.err
        return result

    def writes(self, text: str) -> None:
        self.own.parent.mkdir(parents=True, exist_ok=True)
        self.own.write_text(text, encoding="utf-8")

    def contents(self) -> int:
        """How many models the cache holds."""
        return len([each for each in self.cache.rglob("blobs/*") if each.is_file()])


@pytest.fixture
def person(
    running: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> Iterator[Person]:
    from huggingface_hub.utils import close_session  # type: ignore[attr-defined]

    running.files = {
        BIG: {"big.gguf": tiny().read_bytes()},
        SMALL: {"small.gguf": tiny("attention", noise=0.05).read_bytes()},
    }
    running.faults, running.requests = Faults(), []
    folder = tmp_path / FOLDER
    folder.mkdir(parents=True)
    point_at(running, folder, monkeypatch)
    yield Person(running, folder, capfdbinary)
    close_session()


HUB_PAIR = f"""
[pairs.tiny]
target = {{ repo = "{BIG}", file = "big.gguf" }}
draft = {{ repo = "{SMALL}", file = "small.gguf" }}
about = "Two tiny ones."
"""


# --- from nothing to an answer -------------------------------------------------------------------


def test_a_pair_of_the_hub_is_pulled_and_used(person: Person) -> None:
    person.writes(HUB_PAIR)
    before = person.runs("generate", "--pair", "tiny", "hi", code=3)
    assert "is not in the cache" in before.err and "`specllama models pull tiny`" in before.err
    assert "\n" not in before.err.rstrip("\n")
    pulled = person.runs("models", "pull", "tiny")
    target, draft = map(Path, pulled.text.splitlines())
    assert target.read_bytes() == tiny().read_bytes() and draft.name == "small.gguf"
    assert person.runs("models", "path", "tiny").text == pulled.text
    by_pair = person.runs("generate", "--pair", "tiny", *SHORT, "hi")
    by_names = person.runs("generate", "-m", "tiny", "-md", "tiny", *SHORT, "hi")
    by_hub = person.runs(
        *("generate", "-m", f"hf:{BIG}/big.gguf", "-md", f"hf:{SMALL}/small.gguf", *SHORT, "hi")
    )
    by_path = person.runs("generate", "-m", target, "-md", draft, *SHORT, "hi")
    assert by_pair.text == by_names.text == by_hub.text == by_path.text != "\n"


def test_room_for_both_is_looked_for_before_either_is_fetched(person: Person) -> None:
    person.writes(HUB_PAIR)
    person.server.faults.claimed_size = 10**17
    failed = person.runs("models", "pull", "tiny", code=1)
    assert "needs 200000000.00 GB" in failed.err
    assert person.server.asked("content") == []


def test_a_pair_that_is_pulled_already_is_not_fetched_again(person: Person) -> None:
    first = person.runs("models", "pull", f"hf:{BIG}", f"hf:{SMALL}/small.gguf")
    again = person.runs("models", "pull", f"hf:{BIG}", f"hf:{SMALL}/small.gguf")
    assert again.text == first.text and again.err == ""
    assert len(person.server.asked("content")) == 2


# --- list ----------------------------------------------------------------------------------------


def test_list_tells_what_is_here_and_what_it_is_for(person: Person) -> None:
    person.writes(HUB_PAIR + 'licence = "mit"\ncontext = 99\nmemory_gb = 1e6\nsize_gb = 3\n')

    def here() -> str:
        listed = json.loads(person.runs("models", "list", "--json").text)
        assert listed[0]["name"] == "tiny" and len(listed) > 10
        assert (listed[0]["licence"], listed[0]["context"]) == ("mit", 99)
        assert listed[0]["fits"] is False
        return str(listed[0]["here"])

    assert here() == "no"
    person.runs("models", "pull", f"hf:{BIG}/big.gguf")
    assert here() == "part"
    person.runs("models", "pull", "tiny")
    assert here() == "yes"
    lines = person.runs("models", "list").text.splitlines()
    assert lines[0].split() == ["name", "size", "memory", "fits", "here", "what", *LAST]
    assert lines[1].split()[:7] == ["tiny", "3", "GB", "1e+06", "GB", "no", "yes"]
    assert lines[1].endswith("Two tiny ones.")
    assert any(line.startswith("smollm2 ") for line in lines)
    assert person.server.asked("hub", "HEAD")  # by pull
    person.server.requests.clear()
    person.runs("models", "list")
    assert person.server.requests == []


def test_a_pair_that_is_not_right_does_not_hide_the_others(person: Person) -> None:
    person.writes(HUB_PAIR.replace(BIG, "o/a..b"))
    assert person.runs("models", "list").text.count("\n") > 10
    assert 'no repository called "o/a..b"' in person.runs("models", "pull", "tiny", code=1).err
    assert 'no repository called "o/a..b"' in person.runs("models", "path", "tiny", code=3).err


def test_what_fits_follows_from_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    file = LocalFile(tiny())

    def fits(physical: int | None, **known: float) -> bool | None:
        monkeypatch.setattr(memory, "physical_bytes", lambda: physical)
        [row] = listing.rows(Registry((), (PairSpec("x", file, file, **known),)))  # type: ignore[arg-type]
        assert row.here == "yes"
        return row.fits

    almost = 15_400_000_000  # what a machine that is sold with 16 GB may show
    assert fits(almost, memory_gb=16) is True
    assert fits(almost, memory_gb=24) is False
    assert fits(almost, size_gb=10) is True
    assert fits(almost, size_gb=16) is False
    assert fits(None, memory_gb=16) is None and fits(almost) is None


# --- add -----------------------------------------------------------------------------------------


def test_add_writes_a_checked_pair_and_keeps_what_is_in_the_file(person: Person) -> None:
    person.writes("\ufeff# mine\n" + HUB_PAIR.replace("tiny", "other") + "# the end\n")
    local = person.folder / "small é.gguf"
    local.write_bytes(tiny("attention", noise=0.05).read_bytes())
    about = 'For "tests": C:\\ and 模型.'
    added = person.runs(
        *("models", "add", "new.one", "-m", f"hf:{BIG}", "-md", local),
        *("--licence", "mit", "--about", about),
    )
    assert added.text == f"new.one is in {person.own}; use it with --pair new.one\n"
    text = person.own.read_text("utf-8")
    assert text.startswith("# mine\n") and "# the end\n" in text
    pairs = tomllib.loads(text)["pairs"]
    assert list(pairs) == ["other", "new.one"]
    assert pairs["new.one"] == {
        "target": {"repo": BIG, "file": "big.gguf"},
        "draft": {"path": str(local)},
        "licence": "mit",
        "about": about,
    }
    answer = person.runs("generate", "--pair", "new.one", *SHORT, "hi")
    assert answer.text.strip()
    taken = person.runs("models", "add", "new.one", "-m", local, "-md", local, code=2)
    assert "has a pair new.one already" in taken.err


def test_a_pair_of_one_model_and_a_smaller_copy(
    person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECLLAMA_CACHE", str(person.folder / "copies"))
    person.runs("models", "add", "alone", "-m", f"hf:{BIG}", "--requantise", "q8_0")
    assert tomllib.loads(person.own.read_text("utf-8"))["pairs"]["alone"]["draft"] == {
        "requantise": {"repo": BIG, "file": "big.gguf"},
        "type": "Q8_0",
    }
    target, draft = map(Path, person.runs("models", "path", "alone").text.splitlines())
    assert draft.parent.parent == person.folder / "copies" and draft.stat().st_size
    removed = person.runs("models", "remove", "alone")
    assert not draft.exists() and not target.exists() and person.contents() == 0
    assert f"removed {draft}" in removed.text
    for kind in ("", "Q4 K", "../Q2_K"):
        wrong = ("models", "add", "alone", "-m", f"hf:{BIG}", "--requantise", kind)
        assert "a quantisation type is like Q2_K" in person.runs(*wrong, code=2).err
    failed = person.runs("models", "add", "alone", "-m", f"hf:{BIG}", code=2)
    assert "name either a draft model or a type" in failed.err


def test_names_that_look_alike_and_the_longest_name_are_kept_apart(person: Person) -> None:
    names = ["\u00e9.gguf", "e\u0301.gguf", "x" * 250 + ".gguf"]
    for name in names:
        (person.folder / name).write_bytes(tiny().read_bytes())
    for count, name in enumerate(names):
        file = person.folder / name
        person.runs("models", "add", f"p{count}", "-m", file, "-md", file)
        found = person.runs("models", "path", f"p{count}").text.splitlines()
        assert found == [str(file), str(file)]


def test_a_chat_template_of_the_registry_replaces_the_files(person: Person) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    person.writes(f'[pairs.x]\ntarget.path = "{tiny()}"\ndraft.path = "{tiny()}"\n')
    files = find_files("x")
    assert files.chat_template is None
    person.writes(person.own.read_text("utf-8") + f"chat_template = '{template}'\n")
    with load("x", ctx_size=64, threads=1) as pair:
        assert pair.chat_template == template


def test_a_tilde_that_the_shell_left_is_the_home_folder(
    person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(person.folder))
    monkeypatch.setenv("USERPROFILE", str(person.folder))
    (person.folder / "small é.gguf").write_bytes(tiny().read_bytes())
    assert find_files(model="~/small é.gguf").target == person.folder / "small é.gguf"
    assert person.runs("check", "--model=~/small é.gguf").text
    assert "there is no file" in person.runs("check", "--model=~/x.gguf", code=3).err


@pytest.mark.parametrize("fault", ["no file", "no model", "no hub"])
def test_what_cannot_work_is_not_added(person: Person, fault: str) -> None:
    person.writes(HUB_PAIR)
    before = person.own.read_bytes()
    target, draft, code = str(tiny()), str(tiny()), 3
    if fault == "no file":
        draft = str(person.folder / "absent.gguf")
    elif fault == "no model":
        (person.folder / "text.gguf").write_text("no model")
        draft = str(person.folder / "text.gguf")
    else:
        person.server.faults.status["hub"] = (500, {})
        draft, code = f"hf:{SMALL}/small.gguf", 1
    failed = person.runs("models", "add", "new", "-m", target, "-md", draft, code=code)
    assert failed.err.startswith("Error: ") and failed.text == ""
    assert person.own.read_bytes() == before


def test_add_refuses_a_name_and_a_registry_that_are_not_right(person: Person) -> None:
    files = ("-m", tiny(), "-md", tiny())
    assert "a pair is named with" in person.runs("models", "add", "a b", *files, code=2).err
    person.writes("pairs = 3")
    assert "line 1" in person.runs("models", "add", "ab", *files, code=2).err


def test_pairs_that_are_added_at_once_are_all_kept(person: Person) -> None:
    person.writes(HUB_PAIR)
    file = LocalFile(tiny())
    names = [f"p{count}" for count in range(12)]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: own_registry.add(PairSpec(name, file, file)), names))
    assert set(tomllib.loads(person.own.read_text("utf-8"))["pairs"]) == {"tiny", *names}
    with ThreadPoolExecutor(len(names)) as pool:
        assert all(pool.map(own_registry.remove, names))
    assert list(tomllib.loads(person.own.read_text("utf-8"))["pairs"]) == ["tiny"]


def test_a_registry_that_another_process_is_writing_is_waited_for(
    person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_registry, "LOCK_SECONDS", 0.2)
    person.writes(HUB_PAIR)
    lock = person.own.with_name(".models.toml.lock")
    with FileLock(lock):
        for arguments in (("add", "x", "-m", tiny(), "-md", tiny()), ("remove", "tiny")):
            failed = person.runs("models", *arguments, code=1)
            assert f"another process is writing {person.own}" in failed.err
            assert str(lock) in failed.err
    person.runs("models", "remove", "tiny")


# --- remove --------------------------------------------------------------------------------------


def test_remove_deletes_what_was_fetched_and_what_no_other_uses(person: Person) -> None:
    other = HUB_PAIR.replace("pairs.tiny", "pairs.other").replace("big.gguf", "big2.gguf")
    person.server.files[BIG]["big2.gguf"] = tiny("attention", seed=3).read_bytes()
    person.writes(HUB_PAIR + other)
    person.runs("models", "pull", "tiny", "other")
    assert person.contents() == 3
    removed = person.runs("models", "remove", "tiny")
    assert f"removed big.gguf of {BIG}" in removed.text
    assert f"small.gguf of {SMALL} stays, for other" in removed.text
    assert f"tiny is no longer in {person.own}" in removed.text
    assert person.contents() == 2
    assert person.runs("generate", "--pair", "other", *SHORT, "hi").text
    person.runs("models", "remove", "other")
    assert person.contents() == 0
    assert not tomllib.loads(person.own.read_text("utf-8")).get("pairs")
    gone = person.runs("models", "remove", "other", code=2)
    assert 'no pair named "other"' in gone.err


def test_a_content_with_another_name_stays(person: Person) -> None:
    same = person.server.files[BIG]["big.gguf"]
    person.server.files[BIG]["copy.gguf"] = same
    person.writes(HUB_PAIR)
    [copy] = person.runs("models", "pull", f"hf:{BIG}/copy.gguf").text.splitlines()
    person.runs("models", "pull", "tiny")
    removed = person.runs("models", "remove", "tiny")
    assert f"big.gguf of {BIG}" in removed.text
    assert Path(copy).read_bytes() == same


def test_files_that_are_no_download_are_never_deleted(person: Person) -> None:
    own = person.folder / "own.gguf"
    own.write_bytes(tiny().read_bytes())
    person.runs("models", "add", "mine", "-m", own, "-md", own)
    assert person.runs("models", "remove", "mine").text == f"mine is no longer in {person.own}\n"
    assert own.is_file()
    stays = person.runs("models", "remove", "qwen3-8b")
    assert stays.text == f"qwen3-8b stays listed by {CHECKOUT / 'models.toml'}\n"


def test_one_file_is_removed_by_its_name_on_the_hub(person: Person) -> None:
    person.writes(HUB_PAIR)
    person.runs("models", "pull", "tiny")
    stays = person.runs("models", "remove", f"hf:{BIG}/big.gguf")
    assert stays.text == f"big.gguf of {BIG} stays, for tiny\n"
    person.runs("models", "remove", "tiny")
    person.runs("models", "pull", f"hf:{BIG}/big.gguf")
    assert "removed big.gguf" in person.runs("models", "remove", f"hf:{BIG}/big.gguf").text
    assert person.contents() == 0


def test_what_another_program_fetched_stays(person: Person) -> None:
    person.writes(HUB_PAIR)
    [path] = person.runs("models", "pull", f"hf:{BIG}/big.gguf").text.splitlines()
    for record in (person.folder / "config" / "pulled").glob("*.json"):
        record.unlink()  # as if specllama had not been there
    assert "specllama did not fetch it" in person.runs("models", "remove", "tiny").text
    assert Path(path).is_file()


# --- names ---------------------------------------------------------------------------------------


def test_names_that_are_wrong_are_told_apart(person: Person) -> None:
    person.writes(HUB_PAIR)
    for arguments, code, words in (
        (("models", "path", "tinny"), 2, 'did you mean "tiny"?'),
        (("models", "pull", "tinny"), 2, 'did you mean "tiny"?'),
        (("models", "path", f"hf:{BIG}"), 2, "names no file"),
        (("models", "pull", "hf:x"), 2, "is not like hf:owner/name/file.gguf"),
        (("check", "tinny"), 3, "there is no file tinny, and "),
        (("check", "hf:x"), 2, "is not like hf:owner/name/file.gguf"),
        (("models", "pull", "tiny", "--models", "absent.toml"), 2, "absent.toml"),
        (("models",), 2, "Usage: "),
    ):
        failed = person.runs(*arguments, code=code)
        assert words in failed.err, arguments


def test_a_file_that_exists_wins_over_a_pair_of_that_name(
    person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    person.writes(HUB_PAIR)
    monkeypatch.chdir(person.folder)
    Path("tiny").write_bytes(tiny().read_bytes())
    assert "This model can be used." in person.runs("check", "tiny").text
