"""The wheel, built for real: what is in it, what it says of itself, and that it works."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import specllama

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return built / "specllama-0.1.0-py3-none-any.whl"


def read(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name).decode("utf-8")


def metadata_of(wheel: Path) -> Message:
    return Parser().parsestr(read(wheel, "specllama-0.1.0.dist-info/METADATA"))


def test_the_wheel_holds_the_whole_package_the_registry_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "specllama").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"specllama/__init__.py", "specllama/py.typed"} <= package
    info = "specllama-0.1.0.dist-info"
    generated = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    licence = f"{info}/licenses/LICENSE"
    assert names == package | generated | {licence, "specllama/models.toml"}
    assert read(wheel, "specllama/models.toml") == (ROOT / "models.toml").read_text("utf-8")
    assert read(wheel, licence) == (ROOT / "LICENSE").read_text("utf-8")


def test_the_metadata_says_what_is_needed(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    assert metadata["Name"] == "specllama"
    assert metadata["Version"] == "0.1.0"
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    requires = metadata.get_all("Requires-Dist", [])
    needed = {line.partition(";")[0].strip() for line in requires if "extra ==" not in line}
    assert "llama-cpp-python<0.4,>=0.3.36" in needed
    assert {line.partition(">")[0].partition("<")[0] for line in needed} == {
        *("llama-cpp-python", "numpy", "click", "huggingface-hub", "tomlkit", "jinja2"),
        *("filelock", "prompt-toolkit", "tqdm"),
    }
    assert set(metadata.get_all("Provides-Extra", [])) == {"plot", "dev"}


def test_the_command_is_an_entry_point(wheel: Path) -> None:
    text = read(wheel, "specllama-0.1.0.dist-info/entry_points.txt")
    assert text.split() == ["[console_scripts]", "specllama", "=", "specllama.__main__:main"]


def test_the_source_distribution_holds_the_tests(built: Path) -> None:
    with tarfile.open(built / "specllama-0.1.0.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"LICENSE", "models.toml", "pyproject.toml", "tests/test_packaging.py"}
    assert needed <= names
    assert not [name for name in names if name.startswith((".venv", ".cache"))]


def test_an_unpacked_wheel_finds_its_own_registry(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from specllama.registry import load_registry\n"
        "registry = load_registry(); registry.pair('smollm2'); print(registry.paths[0])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert Path(run.stdout.strip()).resolve() == (site / "specllama" / "models.toml").resolve()


def test_the_package_and_its_metadata_agree_on_the_version(wheel: Path) -> None:
    assert specllama.__version__ == metadata_of(wheel)["Version"]
