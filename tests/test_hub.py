"""Fetching from a hub on loopback: what is kept, what is checked, and each way it goes wrong."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import environment, specllama
from filelock import FileLock
from hubserver import Faults, HubServer, point_at, variables
from tiny import tiny

from specllama import hub, hub_cache, models, pulled
from specllama.errors import HubError, ModelError
from specllama.hub_errors import told
from specllama.sources import HubFile

REPO = "owner/Model-GGUF"
FILE = HubFile(REPO, "sub folder/model é.gguf")
SECRET = "hf_vErySecret"

said: list[str] = []


def say(message: str) -> None:
    said.append(message)


@pytest.fixture(scope="module")
def running() -> Iterator[HubServer]:
    server = HubServer()
    yield server
    server.close()


@pytest.fixture
def server(
    running: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HubServer]:
    """The hub with one model, and huggingface-hub pointed at it and at an empty cache."""
    from huggingface_hub.utils import close_session  # type: ignore[attr-defined]

    running.files = {REPO: {FILE.file: tiny().read_bytes()}}
    running.faults, running.requests = Faults(), []
    point_at(running, tmp_path, monkeypatch)
    said.clear()
    yield running
    close_session()


def pull(*files: HubFile) -> list[Path]:
    return models.pull(files or (FILE,), say)


def refusal(*files: HubFile) -> str:
    """The one sentence with which a pull fails, after which nothing of the file is there."""
    with pytest.raises(HubError) as caught:
        pull(*files)
    assert kept() == []
    message = str(caught.value)
    assert "\n" not in message and "Traceback" not in message
    return message


def kept() -> list[Path]:
    """Every file with some content in the cache, but for huggingface-hub's own notes."""
    return [
        path
        for path in hub_cache.cache_dir().rglob("*")
        if path.is_file()
        and path.stat().st_size
        and path.name != "CACHEDIR.TAG"
        and "refs" not in path.parts
    ]


# --- what is fetched -----------------------------------------------------------------------------


def test_a_file_is_fetched_once_verified_and_recorded(server: HubServer) -> None:
    [path] = pull()
    assert path.read_bytes() == server.files[REPO][FILE.file]
    record = pulled.find(FILE)
    assert record is not None and record.commit == server.commit(REPO)
    [part] = record.parts
    assert part.etag == hashlib.sha256(path.read_bytes()).hexdigest() and part.fetched
    assert said == [f"fetching {FILE.file} of {REPO}, 0.00 GB"]
    assert pull() == [path] == [hub_cache.locate(FILE)]
    assert len(server.asked("content")) == 1


def test_others_find_the_file_in_the_cache(server: HubServer) -> None:
    from huggingface_hub import scan_cache_dir, try_to_load_from_cache

    [path] = pull()
    assert try_to_load_from_cache(REPO, FILE.file) == str(path)
    cache = scan_cache_dir()
    assert not cache.warnings
    [repo] = cache.repos
    assert (repo.repo_id, repo.nb_files) == (REPO, 1)


def test_a_split_model_comes_whole_and_a_missing_part_is_named(server: HubServer) -> None:
    parts = [f"q/big-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    server.files[REPO] = {part: part.encode() for part in parts}
    for asked in (parts[0], parts[1]):
        [path] = pull(HubFile(REPO, asked))
        assert path.read_bytes() == parts[0].encode()
    assert [path.with_name(Path(part).name).read_bytes() for part in parts] == [
        part.encode() for part in parts
    ]
    assert len(server.asked("content")) == 3
    path.with_name("big-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match=r"the part q/big-00002-of-00003\.gguf of .* is not in"):
        hub_cache.locate(HubFile(REPO, parts[0]))
    del server.files[REPO][parts[2]]
    with pytest.raises(HubError, match=r"has no file q/big-00003-of-00003\.gguf"):
        pull(HubFile(REPO, parts[0]))


def test_the_parts_of_a_model_are_of_one_commit_though_the_branch_moves(
    server: HubServer,
) -> None:
    parts = [f"big-0000{i}-of-00002.gguf" for i in (1, 2)]
    server.files[REPO] = {part: f"old {part}".encode() for part in parts}
    commit = server.commit(REPO)

    def move() -> None:
        server.files[REPO] = {part: f"newer {part}".encode() for part in parts}

    server.faults.moves = move
    [path] = pull(HubFile(REPO, parts[0]))
    both = [path.with_name(part).read_text() for part in parts]
    assert both == [f"old {part}" for part in parts]
    assert path == hub_cache.locate(HubFile(REPO, parts[0])) and commit in path.parts
    [path] = pull(HubFile(REPO, parts[0]))
    both = [path.with_name(part).read_text() for part in parts]
    assert both == [f"newer {part}" for part in parts]


def test_a_small_file_that_is_kept_in_git_is_verified_too(server: HubServer) -> None:
    server.files[REPO]["tiny.bin"] = b"small"
    [path] = pull(HubFile(REPO, "tiny.bin"))
    record = pulled.find(HubFile(REPO, "tiny.bin"))
    assert path.read_bytes() == b"small" and record is not None
    assert len(record.parts[0].etag) == 40


def test_a_revision_is_pinned_until_it_is_pulled_again(server: HubServer) -> None:
    [old] = pull()
    server.files[REPO][FILE.file] = tiny("attention", seed=5).read_bytes()
    # Another program follows the branch; what was pulled stays what is used.
    from huggingface_hub import hf_hub_download

    hf_hub_download(REPO, FILE.file)
    assert hub_cache.locate(FILE) == old
    [new] = pull()
    assert new != old and new.read_bytes() == server.files[REPO][FILE.file]
    assert not old.exists()  # it was of specllama's fetching
    assert hub_cache.locate(FILE) == new


def test_a_tag_is_fetched_and_found_by_its_name(server: HubServer) -> None:
    tagged = HubFile(REPO, FILE.file, "v1")
    [path] = pull(tagged)
    assert hub_cache.locate(tagged) == path
    with pytest.raises(ModelError, match="is not in the cache"):
        hub_cache.locate(FILE)


def test_what_another_program_fetched_is_verified_and_used(server: HubServer) -> None:
    from huggingface_hub import hf_hub_download

    theirs = Path(hf_hub_download(REPO, FILE.file))
    assert pull() == [theirs]
    record = pulled.find(FILE)
    assert record is not None and not record.parts[0].fetched
    assert len(server.asked("content")) == 1


def test_a_cache_that_cannot_be_written_to_is_used_as_it_is(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import hf_hub_download

    theirs = Path(hf_hub_download(REPO, FILE.file))

    def refused(_: hub.Remote) -> None:
        raise HubError("the file system is read-only")

    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(hub, "_locked", refused)
    right = theirs.read_bytes()
    theirs.write_bytes(b"x" * len(right))
    with pytest.raises(HubError, match="read-only"):
        pull()
    theirs.write_bytes(right)
    assert pull() == [theirs] == pull()


def test_a_damaged_file_in_the_cache_is_fetched_again(server: HubServer) -> None:
    from huggingface_hub import hf_hub_download

    path = Path(hf_hub_download(REPO, FILE.file))
    right = path.read_bytes()
    path.write_bytes(b"x" * len(right))
    assert pull() == [path]
    assert path.read_bytes() == right
    assert any("is damaged; fetching" in message for message in said)
    path.write_bytes(right[:-1])
    assert pull() == [path]
    assert path.read_bytes() == right


def test_without_links_the_content_lies_there_once(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(1314, "A required privilege is not held by the client")

    monkeypatch.setattr(os, "symlink", refused)
    monkeypatch.setenv("HF_HUB_DISABLE_SYMLINKS_WARNING", "1")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS_WARNING", True)
    [path] = pull()
    assert kept() == [path] and not path.is_symlink()
    assert pull() == [path] and len(server.asked("content")) == 1


def test_the_one_model_of_a_repository_is_chosen_and_several_are_listed(server: HubServer) -> None:
    pictures = "mmproj-m-Q4_K_M.gguf"  # what makes tokens of them is no model
    server.files[REPO] = {"README.md": b"", "m-Q8_0.gguf": b"8", "m-Q4_K_M.gguf": b"4"}
    server.files[REPO][pictures] = b"p"
    assert hub.choose_file(REPO, part_of_name="q4_k_m") == HubFile(REPO, "m-Q4_K_M.gguf")
    with pytest.raises(HubError, match=r"several models; .*: m-Q4_K_M\.gguf, m-Q8_0\.gguf"):
        hub.choose_file(REPO)
    with pytest.raises(HubError, match=r'no \.gguf file like "q2"; name one of m-Q4'):
        hub.choose_file(REPO, part_of_name="q2")
    server.files[REPO] = {"README.md": b""}
    with pytest.raises(HubError, match=r"has no \.gguf file; name another repository"):
        hub.choose_file(REPO)
    with pytest.raises(HubError, match="there is no repository o/absent"):
        hub.choose_file("o/absent")


# --- what is refused -----------------------------------------------------------------------------

GATED = {"X-Error-Code": "GatedRepo"}
REFUSALS = {
    "a login": (401, {}, "or it is private (HTTP 401); check the name, or give a token"),
    "a gate": (403, GATED, "is gated: accept its terms on "),
    "a right": (403, {}, "forbids"),
    "a name": (404, {}, "there is no repository owner/Model-GGUF on http"),
    "patience": (429, {"Retry-After": "7"}, "(HTTP 429); wait 7 seconds and pull again"),
    "a hub": (500, {}, "has trouble of its own (HTTP 500); pull again later"),
    "a teapot": (418, {}, "HTTP 418"),
}


@pytest.mark.parametrize("lacking", REFUSALS)
def test_every_status_has_its_own_sentence(
    server: HubServer, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # huggingface-hub waits between its own tries.
    monkeypatch.setattr(time, "sleep", lambda _: None)
    status, headers, words = REFUSALS[lacking]
    server.faults.status["hub"] = (status, headers)
    message = refusal()
    assert words in message
    assert not any(other in message for _, _, other in REFUSALS.values() if other != words)


@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_a_status_of_the_content_is_told_too(server: HubServer, status: int) -> None:
    server.faults.status["content"] = (status, {})
    message = refusal()
    assert f"(HTTP {status})" in message
    if status < 500:  # not the name's fault, nor the token's, which the hub has taken
        assert "the server to which the hub sends" in message


def test_what_the_hub_does_not_have_is_named(server: HubServer) -> None:
    page = f"{server.endpoint}/{REPO}"
    assert f"has no file x.gguf; see {page}/tree/main" in refusal(HubFile(REPO, "x.gguf"))
    assert "has no revision v9" in refusal(HubFile(REPO, FILE.file, "v9"))
    assert "no repository o/n, or it is private" in refusal(HubFile("o/n", "x.gguf"))
    assert 'no repository called "o/a..b"' in refusal(HubFile("o/a..b", "x.gguf"))


def test_a_token_that_is_not_taken_is_not_shown(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    server.faults.status["hub"] = (401, {"X-Error-Message": f"bad token {SECRET}"})
    message = refusal()
    assert "does not take this token" in message and SECRET not in message
    monkeypatch.setenv("HF_TOKEN", f"{SECRET}é")
    server.faults.status.clear()
    message = refusal()
    assert "the token has characters that no token has" in message and SECRET not in message


def test_the_token_goes_to_the_hub_alone(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    pull()
    sent = [(each.place, each.headers.get("authorization")) for each in server.requests]
    assert ("hub", f"Bearer {SECRET}") in sent
    assert {token for place, token in sent if place == "content"} == {None}


def test_a_password_in_the_endpoint_is_not_shown(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", f"http://me:{SECRET}@127.0.0.1:1")
    server.faults.status["hub"] = (404, {})
    assert "http://127.0.0.1:1" in (message := refusal()) and SECRET not in message


def test_a_password_in_an_address_that_is_not_reached_is_not_shown(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(time, "sleep", lambda _: None)
    nowhere = f"http://me:{SECRET}@127.0.0.1:1"
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    template = nowhere + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    said = refusal() + capfd.readouterr().err
    assert "http://127.0.0.1:1" in said and SECRET not in said and "me:" not in said
    for odd in (f"http://me:{SECRET}/x@h", f"http://me:{SECRET}@[", ""):
        monkeypatch.setattr(constants, "ENDPOINT", odd)
        template = odd + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        assert SECRET not in (message := refusal()) and "HF_ENDPOINT" in message
    with pytest.raises(HubError) as caught, told(FILE):
        raise ValueError(f"no proxy at http://me:{SECRET}@x@proxy:1/")
    assert "http://proxy:1/" in str(caught.value) and SECRET not in str(caught.value)


def test_a_token_that_cannot_be_had_is_no_other_trouble(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def no_exchange() -> str:
        raise OSError("no token for this machine")

    monkeypatch.setattr(huggingface_hub, "get_token", no_exchange)
    assert "no repository o/n, or it is private" in refusal(HubFile("o/n", "x.gguf"))


def test_no_network_is_said(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    nowhere = "http://127.0.0.1:1"
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    template = nowhere + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    assert f"cannot reach {nowhere} for" in refusal()


def test_a_login_page_in_the_way_is_said(server: HubServer) -> None:
    server.faults.login_page = True
    assert "does not answer like a Hugging Face hub" in refusal()
    with pytest.raises(HubError, match="does not answer like a Hugging Face hub"):
        hub.choose_file(REPO)


@pytest.mark.parametrize("size", ["-5", "x", ""])
def test_a_size_that_is_none_is_noticed(server: HubServer, size: str) -> None:
    headers = {"X-Linked-Etag": "e" * 40, "X-Repo-Commit": "c" * 40, "X-Linked-Size": size}
    server.faults.status["hub"] = (302, headers | {"Location": "http://127.0.0.1:1/x"})
    assert "does not answer like a Hugging Face hub" in refusal()


@pytest.mark.parametrize("name", ["../../x", "a/b", "a\\b", "..", "a:b", "n" * 300])
@pytest.mark.parametrize("header", ["ETag", "X-Repo-Commit"])
def test_a_server_cannot_name_a_place_outside_the_cache(
    server: HubServer, header: str, name: str
) -> None:
    headers = {"ETag": "e" * 40, "X-Repo-Commit": "c" * 40, header: name}
    server.faults.status["hub"] = (200, headers)
    assert "does not answer like a Hugging Face hub" in refusal()


# --- what arrives damaged ------------------------------------------------------------------------


def test_a_connection_that_breaks_off_is_taken_up_again(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    for resumable in (True, False):
        server.faults = Faults(cuts=2, resumable=resumable)
        [path] = pull()
        assert path.read_bytes() == server.files[REPO][FILE.file]
        ranges = [each.headers.get("range") for each in server.asked("content")]
        assert len(ranges) == 3 and ranges[0] is None and all(ranges[1:])
        server.requests.clear()
        path.resolve().unlink()
        path.unlink()


def test_a_connection_that_always_breaks_off_leaves_nothing(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    server.faults.cuts = 10**6
    server.faults.garble = lambda data: b""
    assert "broke off" in refusal()
    assert pulled.every() == []


def test_wrong_bytes_of_the_right_size_are_noticed(server: HubServer) -> None:
    server.faults.garble = lambda data: data[:-1] + bytes([data[-1] ^ 1])
    assert "came damaged: what arrived does not have its checksum" in refusal()
    server.faults = Faults()
    pull()


def test_a_content_of_another_size_is_noticed(server: HubServer) -> None:
    server.faults.garble = lambda data: data[:-1]
    assert "broke off" in refusal() and pulled.every() == []


def test_a_checksum_of_the_registry_is_held_against_the_hubs(server: HubServer) -> None:
    wanted = HubFile(REPO, FILE.file, sha256="0" * 64)
    assert f"and the registry wants {'0' * 64}" in refusal(wanted)
    assert server.asked("content") == []
    pull()
    with pytest.raises(ModelError, match="and the registry wants 0000"):
        hub_cache.locate(wanted)
    right = HubFile(REPO, FILE.file, sha256=hashlib.sha256(tiny().read_bytes()).hexdigest())
    assert pull(right) == [hub_cache.locate(right)]


def test_a_mirror_whose_checksums_change_at_every_request_is_asked_no_more_than_needed(
    server: HubServer,
) -> None:
    server.faults.etags = (f"mirror-{count}" for count in itertools.count())
    [path] = pull()
    assert path.read_bytes() == server.files[REPO][FILE.file]
    assert path.resolve().name == "mirror-0" and set(kept()) == {path.resolve(), path}
    assert hub_cache.locate(FILE) == path
    for wrong in ("0" * 64, "0" * 40):  # one that is a checksum is held against the content
        server.files[REPO][FILE.file] += b"x"
        server.faults.etags = iter([wrong] * 9)
        with pytest.raises(HubError, match="does not have its checksum"):
            pull()
    assert hub_cache.locate(FILE) == path


def test_a_record_that_is_damaged_counts_as_none(server: HubServer, tmp_path: Path) -> None:
    [path] = pull()
    [file] = (tmp_path / "config" / "pulled").iterdir()
    sound = json.loads(file.read_text())
    part = sound["parts"][0]
    for damaged in (
        b"", b"\xff", b"[]", b"{}", b"[" * 10_000, sound | {"commit": 3}, sound | {"more": 1},
        sound | {"parts": [part | {"etag": None}]}, sound | {"parts": [part | {"file": "../../x"}]},
        sound | {"parts": 3}, sound | {"repo": [1]},
    ):  # fmt: skip
        data = damaged if isinstance(damaged, bytes) else json.dumps(damaged).encode()
        file.write_bytes(data)
        assert pulled.find(FILE) is None and pulled.every() == [], data[:80]
        assert hub_cache.locate(FILE) == path
    assert pull() == [path] and pulled.find(FILE) is not None


# --- the disk ------------------------------------------------------------------------------------


def test_room_for_all_files_is_looked_for_before_the_first(server: HubServer) -> None:
    server.files[REPO]["b.gguf"] = b"b"
    server.faults.claimed_size = 10**17
    message = refusal(FILE, HubFile(REPO, "b.gguf"))
    assert "needs 200000000.00 GB" in message and "HF_HOME" in message
    assert server.asked("content") == []


def test_what_a_killed_download_left_is_deleted_before_room_is_looked_for(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = hub_cache.storage(REPO) / ".specllama"
    ours, theirs = staging / ("a" * 16), staging / ("b" * 16)
    for folder in (ours, theirs):
        folder.mkdir(parents=True)
        (folder / "x.incomplete").write_bytes(b"x" * 1000)

    def room(_: Path) -> shutil._ntuple_diskusage:
        return shutil._ntuple_diskusage(0, 0, 0 if ours.exists() else 10**9)

    monkeypatch.setattr(shutil, "disk_usage", room)
    with FileLock(theirs.with_name(f"{theirs.name}.lock")):  # that one is under way
        pull()
    assert not ours.exists() and theirs.exists()
    assert said[0] == f"an earlier download from {REPO} was cut off; it starts over"


def test_a_full_disk_is_said(server: HubServer, tmp_path: Path) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    server.files[REPO]["big.gguf"] = b"b" * 1_000_000
    done = subprocess.run(
        [sys.executable, "-m", "specllama.cli", "models", "pull", f"hf:{REPO}/big.gguf"],
        env=environment(variables(server, tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=small_files,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert "is full (File too large), so nothing of big.gguf of" in done.stderr
    assert kept() == []


def test_other_troubles_of_the_disk_are_named(tmp_path: Path) -> None:
    for number, words in ((errno.ENOSPC, "is full"), (errno.EACCES, "cannot be written to")):
        with pytest.raises(HubError, match=words), told(FILE, tmp_path):
            raise OSError(number, os.strerror(number))


def test_another_process_that_fetches_the_file_is_named(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "LOCK_SECONDS", 0.2)
    [remote] = hub.look_up(FILE)
    lock = hub_cache.storage(REPO) / ".specllama" / f"{remote.etag[:16]}.lock"
    lock.parent.mkdir(parents=True)
    with FileLock(lock):
        message = refusal()
    assert "another process is fetching" in message and str(lock) in message
    pull()


# --- the end of the process ----------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_download_that_is_ended_leaves_no_file_and_starts_over(
    server: HubServer, tmp_path: Path, number: signal.Signals
) -> None:
    server.faults.stall = threading.Event()
    server.files[REPO]["big.gguf"] = os.urandom(3_000_000)
    name = f"hf:{REPO}/big.gguf"
    process = subprocess.Popen(
        [sys.executable, "-m", "specllama.cli", "models", "pull", name],
        env=environment(variables(server, tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not server.asked("content") and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    server.faults.stall.set()
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
    assert (process.returncode, out) == (codes[number], "")
    finals = [path for path in kept() if ".specllama" not in path.parts]
    assert finals == []
    killed = number == signal.SIGKILL
    assert ("was stopped; nothing of it is kept" in err) is not killed
    again = specllama("models", "pull", name, env=variables(server, tmp_path))
    assert again.code == 0, again.err
    assert ("was cut off; it starts over" in again.err) is killed
    path = Path(again.text.strip())
    assert path.read_bytes() == server.files[REPO]["big.gguf"]
    assert {each.resolve() for each in kept()} == {path.resolve()}


def test_a_pull_in_a_pipe_shows_no_bar_and_no_token(server: HubServer, tmp_path: Path) -> None:
    env = {**variables(server, tmp_path), "HF_TOKEN": SECRET}
    done = specllama("models", "pull", f"hf:{REPO}", "-v", env=env)
    assert done.code == 0
    assert Path(done.text.strip()).read_bytes() == tiny().read_bytes()
    assert "fetching" in done.err and "%" not in done.err and SECRET not in done.err
    server.faults.status["hub"] = (403, {})
    failed = specllama("models", "pull", f"hf:{REPO}/x.gguf", "-v", env=env)
    assert failed.code == 1 and "Traceback" in failed.err and SECRET not in failed.err


# --- offline -------------------------------------------------------------------------------------

# The command with every way to a network taken away.
BLOCKED = """
import socket, sys

def refused(*_, **__):
    print("a socket was opened", file=sys.stderr)
    raise SystemExit(99)

made = socket.socket.__init__

def make(self, family=-1, *arguments, **named):
    # A pair of sockets within the process goes nowhere.
    if family != getattr(socket, "AF_UNIX", None):
        refused()
    made(self, family, *arguments, **named)

socket.socket.__init__ = make
socket.create_connection = socket.getaddrinfo = refused
from specllama.cli import main
main()
"""


def test_offline_no_socket_is_opened(server: HubServer, tmp_path: Path) -> None:
    env = {**variables(server, tmp_path), "HF_HUB_OFFLINE": "1"}
    blocked = ("-c", BLOCKED)
    name = f"hf:{REPO}/{FILE.file}"
    cache = str(tmp_path / "hf" / "hub")
    absent = specllama("generate", "-m", name, "hi", env=env, python=blocked)
    assert absent.code == 3
    assert "offline (HF_HUB_OFFLINE is set)" in absent.err and f"cache at {cache};" in absent.err
    not_pulled = specllama("models", "pull", name, env=env, python=blocked)
    assert (not_pulled.code, not_pulled.err) == (3, absent.err)
    online = specllama("models", "pull", name, env={**env, "HF_HUB_OFFLINE": "0"}, python=blocked)
    assert (online.code, online.err) == (99, "a socket was opened\n")
    [path] = pull()
    there = specllama(
        *("generate", "-m", name, "--drafter", "none", "-n", "4", "-t", "1", "hi"),
        env=env,
        python=blocked,
    )
    assert (there.code, there.err) == (0, "") and there.out
    pulled_again = specllama("models", "pull", name, env=env, python=blocked)
    assert (pulled_again.code, pulled_again.text) == (0, f"{path}\n")
    elsewhere = specllama(
        "check", name, env={**env, "HF_HOME": str(tmp_path / "other")}, python=blocked
    )
    assert elsewhere.code == 3 and str(tmp_path / "other") in elsewhere.err


def test_offline_a_repository_cannot_be_listed(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="offline .* cannot be listed; name the file"):
        hub.choose_file(REPO)
    with pytest.raises(HubError, match="offline .* cannot be asked for"):
        hub.look_up(FILE)
    assert server.requests == []
