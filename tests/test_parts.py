"""The names of the files that a split model is in."""

from __future__ import annotations

from pathlib import Path

from specllama.parts import first_part, joining, part_names, part_paths, stem

PARTS = ("q/m-00001-of-00003.gguf", "q/m-00002-of-00003.gguf", "q/m-00003-of-00003.gguf")
WHOLE = ("m.gguf", "m-00001-of-00003.bin", "m-1-of-3.gguf", "m-00001-of-00000.gguf")


def test_the_parts_of_a_split_model_follow_from_any_of_them() -> None:
    for part in PARTS:
        assert part_names(part) == PARTS
        assert part_paths(Path(part)) == [Path(each) for each in PARTS]
    for whole in WHOLE:
        assert part_names(whole) == (whole,)


def test_the_first_part_is_opened_where_it_is_there(tmp_path: Path) -> None:
    first, *others = (tmp_path / Path(part).name for part in PARTS)
    for path in others:
        assert first_part(path) == path
    first.write_bytes(b"")
    for path in (first, *others):
        assert first_part(path) == first
    for path in (tmp_path, Path(), Path("/")):
        assert first_part(path) == path


def test_parts_have_a_stem_in_common_and_links_are_resolved(tmp_path: Path) -> None:
    real, link = tmp_path / "m-00002-of-00003.gguf", tmp_path / "x.gguf"
    real.write_bytes(b"")
    link.symlink_to(real)
    assert stem(link) == stem(real) == stem(tmp_path / "m-00001-of-00003.gguf")
    assert stem(real) == str(tmp_path.resolve() / "m")


def test_what_is_cut_without_a_name_of_its_own_is_to_be_joined() -> None:
    for piece in ("m.gguf.part1of2", "m.gguf-part-a", "m.gguf-split-b", "m.gguf.part-01"):
        assert ("m.gguf" in (joining(Path(piece)) or "")) == (piece != "m.gguf-part-a")
    for whole in ("m.gguf", "my-part.gguf", "m-part1of2.gguf", *PARTS):
        assert joining(Path(whole)) is None
