"""`specllama batch` on the command line: prompts from a file, answers into another."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import click

from specllama.errors import SpecllamaError, UsageError
from specllama.options import (
    announce,
    file_options,
    file_path,
    load_pair,
    run_options,
    sampling_options,
    sampling_params,
)

if TYPE_CHECKING:
    from specllama.batch import Batch, Counts, Format, Survey
    from specllama.batch_ledger import Ledger
    from specllama.batch_output import Output
    from specllama.batch_progress import Progress
    from specllama.batch_recipe import Recipe
    from specllama.generation import Pair
    from specllama.loading import Files
    from specllama.markers import ChatTokenizer

SOME_FAILED = 4


def _parallel(_ctx: click.Context, _param: click.Parameter, value: str) -> int | None:
    """How many rows at once; None is "auto"."""
    if value == "auto":
        return None
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f'{value!r} is no whole number and not "auto"') from None


@click.command()
@click.argument("source", metavar="IN", type=click.Path(path_type=Path, allow_dash=True))
@click.option("-o", "--output", type=click.Path(path_type=Path, allow_dash=True),
              default=Path("-"), help="The output; it is gone on with if it is there.  [stdout]")
@click.option("-np", "--parallel", default="auto", metavar="auto|N", callback=_parallel,
              help="Rows at once; auto: as many as are fastest.")
@click.option("--retry-failed", is_flag=True, help="Do rows again that failed before.")
@click.option("--rerun-changed", is_flag=True,
              help="Do finished rows again that are others now, or whose settings or models are.")
@file_options
@run_options
@sampling_options
@click.option("--chat-template", type=file_path, help="A Jinja file instead of the model's own.")
@click.option("--raw", is_flag=True, help="No template: messages just follow each other.")
@click.option("--date", type=click.DateTime(["%Y-%m-%d"]), metavar="YYYY-MM-DD",
              help="The day that a chat template tells the model.  [today]")
def batch(source: Path, output: Path, **options: Any) -> None:
    """Answer every row of IN, a file with a JSON object on each line, or "-".

    A row has an id, a prompt or messages, and sampling parameters where they differ from those
    given here; rows of OpenAI's Batch API are answered in its format. Each answer is a line of the
    output, written as soon as it is there. The same command again does what is missing. Names that
    end in .gz are compressed. Exit code 4: some rows failed.
    """
    from specllama.batch_input import require_readable
    from specllama.batch_output import Output
    from specllama.batch_signals import stopping

    require_readable(source)
    _require_two_files(source, output)
    with stopping(), Output(output) as opened, contextlib.ExitStack() as stack:
        try:
            counts = _run(source, opened, options, stack)
        except KeyboardInterrupt:
            if opened.is_file:
                announce("the same command goes on from here")
            raise
    if counts.n_failed:
        raise click.exceptions.Exit(SOME_FAILED)


def _require_two_files(source: Path, output: Path) -> None:
    """Refuse an output that is the input, by whatever name or stream: it would have no end."""
    with contextlib.suppress(OSError, ValueError):
        read, written = _status(source, sys.stdin), _status(output, sys.stdout)
        if stat.S_ISREG(read.st_mode) and os.path.samestat(read, written):
            name = "standard output" if output == Path("-") else output
            raise UsageError(f"{name} is the input too; name another output")


def _status(path: Path, stream: IO[str]) -> os.stat_result:
    """That of a file, or of a standard stream. Raises OSError, ValueError."""
    return os.fstat(stream.fileno()) if path == Path("-") else path.stat()


def _run(
    source: Path, output: Output, options: dict[str, Any], stack: contextlib.ExitStack
) -> Counts:
    """Everything between the options and the exit code."""
    from specllama.batch import Batch, Counts
    from specllama.batch_input import can_be_read_twice
    from specllama.batch_progress import Progress

    files, template = _files(options), _template(options)
    recipe = _recipe(files, template, options)
    ledger = _ledger(output, stack)
    if ledger.n_done and not can_be_read_twice(source):
        source = stack.enter_context(_kept(source))
    work = Batch(source, output, ledger, recipe)
    survey = _survey(work, options) if can_be_read_twice(source) else None
    if survey is not None and not survey.n_todo:
        work.clean()
        counts = Counts(
            n_before=survey.n_done - survey.n_failed, n_failed_before=survey.n_failed
        )
        announce(_summary(counts, output.path))
        return counts
    n_todo = None if survey is None else survey.n_todo
    # Answers on the same screen would be written into a bar.
    has_bar = sys.stderr.isatty() and (output.is_file or not sys.stdout.isatty())
    terminal = sys.stderr if has_bar else None
    with _load(survey, options) as pair, Progress(n_todo, terminal) as progress:
        counts = _work(work, pair, progress, template, options)
    speed = f"{progress.n_tokens} tokens in {progress.seconds:.1f} s, {progress.speed()}"
    announce(f"{_summary(counts, output.path)}; {speed}")
    return counts


def _files(options: dict[str, Any]) -> Files:
    from specllama.loading import find_files

    return find_files(
        options["pair"],
        model=options["model"],
        draft=options["model_draft"],
        models=options["models"],
        need_draft=options["drafter"] in ("auto", "model") and options["draft_tokens"] != 0,
        announce=announce,
    )


def _template(options: dict[str, Any]) -> str | None:
    """The text of the template that is used instead of the model's own."""
    from specllama.commands import text_of

    if options["chat_template"] is None:
        return None
    if options["raw"]:
        raise UsageError("give either --chat-template or --raw, not both")
    return text_of(options["chat_template"])


def _ledger(output: Output, stack: contextlib.ExitStack) -> Ledger:
    """What the output holds, with what the user should know of it told."""
    from specllama import batch_ledger

    ledger = batch_ledger.read(output)
    stack.callback(ledger.close)
    if not output.is_locked:
        announce(f"Note: the file system of {output.path} has no locks; let no other process "
                 "write it meanwhile")
    if ledger.unreadable:
        announce(f"Note: lines of {output.path} that are no records: {ledger.unreadable}; they are "
                 "left alone, and their rows are done again")
    return ledger


def _survey(work: Batch, options: dict[str, Any]) -> Survey:
    survey = work.survey(
        retry_failed=options["retry_failed"], rerun_changed=options["rerun_changed"]
    )
    if survey.n_others:
        announce(f"Note: rows of the output that are not in the input: {survey.n_others}; they are "
                 "left alone")
    return survey


def _work(
    work: Batch, pair: Pair, progress: Progress, template: str | None, options: dict[str, Any]
) -> Counts:
    from specllama.parallel import Parallel

    formats: list[Format] = []

    def make_format() -> Format:
        formats[:] = [_format(pair, template, options)]
        return formats[0]

    parallel = Parallel(pair, work.recipe.verifier)
    parallel.on_round, work.on_record = progress.round, progress.record
    counts = work.run(pair, make_format, parallel)
    for notice in (notice for each in formats for notice in each.notices):
        announce(f"Note: {notice}")
    return counts


@contextlib.contextmanager
def _kept(source: Path) -> Iterator[Path]:
    """A copy of an input that can be read only once, until the end."""
    with tempfile.TemporaryDirectory(prefix="specllama-") as folder:
        copy = Path(folder) / "input"
        try:
            with open(copy, "wb") as file, contextlib.ExitStack() as stack:
                is_piped = source == Path("-")
                pipe = sys.stdin.buffer if is_piped else stack.enter_context(open(source, "rb"))
                shutil.copyfileobj(pipe, file)
        except OSError as error:
            raise SpecllamaError(
                f"the input cannot be kept in {folder}: {error.strerror}; make room there, name "
                "another folder in the variable TMPDIR, or give the input as a file"
            ) from None
        yield copy


def _recipe(files: Files, template: str | None, options: dict[str, Any]) -> Recipe:
    from specllama.batch_recipe import Recipe
    from specllama.batch_rows import Defaults, digest
    from specllama.header import check_file
    from specllama.kv_files import identity

    paths = [path for path in (files.target, files.draft) if path is not None]
    for path in paths:
        check_file(path)
    models = [identity(path) for path in paths]
    prompts = [template or files.chat_template or "the model's own", str(options["date"])]
    if options["raw"]:
        prompts = ["raw"]
    return Recipe(
        Defaults(
            sampling_params(options),
            None if options["predict"] == -1 else options["predict"],
            tuple(options["stop"]),
            0 if options["seed"] is None else options["seed"],
            options["ignore_eos"],
        ),
        "coupled" if options["verifier"] == "auto" else options["verifier"],
        digest([[model.size, model.sha256] for model in models]),
        hashlib.sha256("\0".join(prompts).encode()).hexdigest(),
        (options["cache_type_k"], options["cache_type_v"]),
    )


def _load(survey: Survey | None, options: dict[str, Any]) -> Pair:
    """The pair, with contexts that are as large as the longest row, for as many rows as pay."""
    from specllama.lookahead import MAX_DRAFT_TOKENS
    from specllama.parallelism import MOST

    enough = None
    if survey is not None and survey.longest < math.inf:
        enough = -(-int(survey.longest + MAX_DRAFT_TOKENS) // 256) * 256  # llama.cpp rounds up
    most = MOST if survey is None else max(1, min(MOST, survey.n_todo))
    parallel = options["parallel"]
    if parallel is not None and survey is not None:
        parallel = min(parallel, max(1, survey.n_todo))
    pair = load_pair(options, parallel=parallel, most_parallel=most, most_ctx=enough)
    rows = "1 row" if pair.target.n_slots == 1 else f"{pair.target.n_slots} rows"
    announce(f"{rows} at once, {pair.target.n_ctx} tokens each")
    return pair


def _format(pair: Pair, template: str | None, options: dict[str, Any]) -> Format:
    """How the model is spoken to. Raises ModelError when that is not known."""
    from specllama.prompts import ChatFormat, RawFormat

    # A file's tokenizer knows its tokens' kinds; only the core makes do with less.
    tokenizer = cast("ChatTokenizer", pair.tokenizer)
    if options["raw"]:
        return RawFormat(tokenizer)
    today: datetime | None = options["date"]
    source = pair.chat_template if template is None else template
    return ChatFormat.of(source, tokenizer, tokenizer.name, now=today)


def _summary(counts: Counts, output: Path) -> str:
    """What became of the rows, in one line."""
    n = counts.n_rows
    parts = [f"{n} {'row' if n == 1 else 'rows'}: {counts.n_done} done"]
    if counts.n_before:
        parts.append(f"{counts.n_before} {'was' if counts.n_before == 1 else 'were'} there before")
    if counts.n_failed:
        codes = [f"{code} {count}" for code, count in counts.codes.most_common()]
        codes += [f"before {counts.n_failed_before}"] if counts.n_failed_before else []
        parts.append(f"{counts.n_failed} failed ({', '.join(codes)})")
    where = "" if output == Path("-") else f"; {output}"
    if counts.n_failed_before:
        where += "; --retry-failed does those that failed again"
    return ", ".join(parts) + where
