"""`specllama batch` on the command line: prompts from a file, answers into another."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import click

from specllama.errors import UsageError
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
    from specllama.batch import Batch, Counts, Format, Recipe, Survey
    from specllama.batch_output import Output
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
def batch(source: Path, output: Path, **options: Any) -> None:
    """Answer every row of IN, a file with a JSON object on each line, or "-".

    A row has an id, a prompt or messages, and sampling parameters where they differ from those
    given here; rows of OpenAI's Batch API are answered in its format. Each answer is a line of the
    output, written as soon as it is there. The same command again does what is missing. Names that
    end in .gz are compressed. Exit code 4: some rows failed.
    """
    from specllama.batch_input import require_readable
    from specllama.batch_output import Output

    require_readable(source)
    _require_two_files(source, output)
    with _stopping(), Output(output) as opened, contextlib.ExitStack() as stack:
        counts = _run(source, opened, options, stack)
    if counts.n_failed:
        raise click.exceptions.Exit(SOME_FAILED)


def _require_two_files(source: Path, output: Path) -> None:
    with contextlib.suppress(OSError):
        if source != Path("-") and output != Path("-") and os.path.samefile(source, output):
            raise UsageError(f"{output} is the input too; name another output")


def _run(
    source: Path, output: Output, options: dict[str, Any], stack: contextlib.ExitStack
) -> Counts:
    """Everything between the options and the summary."""
    from specllama import batch_ledger
    from specllama.batch import Batch, Counts
    from specllama.batch_input import can_be_read_twice
    from specllama.batch_progress import Progress
    from specllama.loading import find_files

    files = find_files(
        options["pair"],
        model=options["model"],
        draft=options["model_draft"],
        models=options["models"],
        need_draft=options["drafter"] in ("auto", "model") and options["draft_tokens"] != 0,
        announce=announce,
    )
    ledger = batch_ledger.read(output)
    stack.callback(ledger.close)
    if ledger.unreadable:
        announce(f"Note: {output.path} has {ledger.unreadable} lines that are no records; "
                 "they are left alone, and their rows are done again")
    survey = None
    if ledger.n_done and not can_be_read_twice(source):
        source = stack.enter_context(_kept(source))
    work = Batch(source, output, ledger, _recipe(files, options))
    if can_be_read_twice(source):
        survey = work.survey(
            retry_failed=options["retry_failed"], rerun_changed=options["rerun_changed"]
        )
        if not survey.n_todo:
            counts = Counts(n_before=survey.n_done)
            counts.codes["failed before"] = survey.n_failed
            announce(_summary(counts, output.path))
            return counts
    n_todo = None if survey is None else survey.n_todo
    with _load(files, survey, options) as pair, Progress(n_todo) as progress:
        counts = _work(work, pair, progress, options)
    speed = f"{progress.n_tokens} tokens in {progress.seconds:.1f} s, {progress.speed()}"
    announce(f"{_summary(counts, output.path)}; {speed}")
    return counts


def _work(work: Batch, pair: Pair, progress: Any, options: dict[str, Any]) -> Counts:
    from specllama.parallel import Parallel

    formats: list[Format] = []

    def make_format() -> Format:
        formats[:] = [_format(pair, options)]
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
        with open(copy, "wb") as file:
            if source == Path("-"):
                shutil.copyfileobj(sys.stdin.buffer, file)
            else:
                with open(source, "rb") as pipe:
                    shutil.copyfileobj(pipe, file)
        yield copy


def _recipe(files: Files, options: dict[str, Any]) -> Recipe:
    from specllama.batch import Recipe
    from specllama.batch_rows import Defaults, digest
    from specllama.commands import text_of
    from specllama.header import check_file
    from specllama.kv_files import identity

    if options["raw"] and options["chat_template"] is not None:
        raise UsageError("give either --chat-template or --raw, not both")
    template = files.chat_template or "the model's own"
    if options["chat_template"] is not None:
        options["template"] = template = text_of(options["chat_template"])
    paths = [path for path in (files.target, files.draft) if path is not None]
    for path in paths:
        check_file(path)
    models = [identity(path) for path in paths]
    seed = 0 if options["seed"] is None else options["seed"]
    predict = None if options["predict"] == -1 else options["predict"]
    return Recipe(
        Defaults(
            sampling_params(options), predict, tuple(options["stop"]), seed, options["ignore_eos"]
        ),
        "coupled" if options["verifier"] == "auto" else options["verifier"],
        digest([[model.size, model.sha256] for model in models]),
        hashlib.sha256(("raw" if options["raw"] else template).encode()).hexdigest(),
    )


def _load(files: Files, survey: Survey | None, options: dict[str, Any]) -> Pair:
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
    announce(f"{pair.target.n_slots} rows at once, {pair.target.n_ctx} tokens each")
    return pair


def _format(pair: Pair, options: dict[str, Any]) -> Format:
    """How the model is spoken to. Raises ModelError when that is not known."""
    from specllama.prompts import ChatFormat, RawFormat

    # A file's tokenizer knows its tokens' kinds; only the core makes do with less.
    tokenizer = cast("ChatTokenizer", pair.tokenizer)
    if options["raw"]:
        return RawFormat(tokenizer)
    template = options.get("template", pair.chat_template)
    return ChatFormat.of(template, tokenizer, tokenizer.name)


def _summary(counts: Counts, output: Path) -> str:
    """What became of the rows, in one line."""
    n = counts.n_done + counts.n_before + counts.n_failed - counts.codes["failed before"]
    parts = [f"{n} {'row' if n == 1 else 'rows'}: {counts.n_done} done"]
    if counts.n_before:
        parts.append(f"{counts.n_before} were there before")
    if counts.n_failed:
        codes = (f"{code} {count}" for code, count in counts.codes.most_common() if count)
        parts.append(f"{counts.n_failed} failed ({', '.join(codes)})")
    where = "" if output == Path("-") else f"; {output}"
    return ", ".join(parts) + where


@contextlib.contextmanager
def _stopping() -> Iterator[None]:
    """The first SIGINT or SIGTERM drops the rows in flight, the second one ends the process."""

    def leave(number: int, _frame: Any) -> NoReturn:
        os._exit(128 + number)

    def stop(number: int, _frame: Any) -> NoReturn:
        for each in numbers:
            signal.signal(each, leave)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    numbers = [
        each for each in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(each))
    ]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    old = {each: signal.signal(each, stop) for each in numbers}
    yield
    # Not after an interrupt: what is still to be closed can be left at once, too.
    for each, handler in old.items():
        signal.signal(each, handler)
