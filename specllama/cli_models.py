"""The command `specllama models`: thin bodies around what specllama.models does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specllama.options import announce, file_path, set_verbose

if TYPE_CHECKING:
    from specllama.registry import Registry

_registry = click.option(
    "--models", "registry", type=file_path, help="Another registry file instead of models.toml."
)
_verbose = click.option(
    "-v", "--verbose", is_flag=True, expose_value=False, callback=set_verbose,
    help="Show llama.cpp's log and tracebacks.",
)


@click.group()
def models() -> None:
    """The pairs of models that specllama knows by name: what there is, and getting it here."""


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one object for each pair.")
@_registry
@_verbose
def list_pairs(as_json: bool, registry: Path | None) -> None:
    """Every pair: its size, the memory it needs, whether it fits this machine and is here."""
    from specllama import listing

    rows = listing.rows(_load(registry))
    if as_json:
        click.echo(json.dumps([listing.as_object(row) for row in rows], indent=1))
    else:
        click.echo(listing.table(rows))


@models.command()
@click.argument("names", nargs=-1, required=True)
@_registry
@_verbose
def pull(names: tuple[str, ...], registry: Path | None) -> None:
    """Fetch both models of a pair, or one as hf:owner/name/file.gguf, and verify them.

    hf:owner/name, or hf:owner/name:Q4_K_M, is enough where it leaves one file. Files go into
    huggingface-hub's cache (HF_HOME). Prints where they are, a path on each line.
    """
    from specllama import models as registered

    for name in names:
        wanted = registered.named(name, lambda: _load(registry))
        for path in registered.pull(wanted, announce, name):
            click.echo(path)


@models.command()
@click.argument("name")
@_registry
@_verbose
def path(name: str, registry: Path | None) -> None:
    """Print where the target and the draft of a pair are, a path on each line."""
    from specllama import models as registered

    for each in registered.find(name, lambda: _load(registry), announce):
        click.echo(each)


@models.command()
@click.argument("name")
@click.option("-m", "--model", required=True, help="The target: a path, or hf:owner/name/file.")
@click.option("-md", "--model-draft", help="The draft, likewise.")
@click.option("--requantise", metavar="TYPE", help="Draft with a smaller copy: Q2_K, for example.")
@click.option("--licence", help="The licence of the weights.")
@click.option("--about", help="One sentence for the list.")
@_verbose
def add(name: str, model: str, model_draft: str | None, **texts: str | None) -> None:
    """Add a pair of your own: fetch what is on the hub, check that the two work together, write it.

    It goes into models.toml in the configuration folder, where you can edit it.
    """
    from specllama import models as registered
    from specllama.registry import own_path

    spec = registered.add(name, model, model_draft, announce, **texts)
    click.echo(f"{spec.name} is in {own_path()}; use it with --pair {spec.name}")


@models.command()
@click.argument("names", nargs=-1, required=True)
@_verbose
def remove(names: tuple[str, ...]) -> None:
    """Delete what was fetched for a pair, and take a pair of your own off the list.

    What another pair uses stays, and so does every file that specllama did not fetch.
    """
    from specllama import models as registered

    for name in names:
        for sentence in registered.remove(name, _load(None)):
            click.echo(sentence)


def _load(path: Path | None) -> Registry:
    from specllama.registry import load_registry

    return load_registry(path)
