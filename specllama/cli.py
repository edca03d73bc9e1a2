"""The command line: thin bodies around what the modules do, and errors into exit codes.

Answers go to standard output, everything else to standard error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

import specllama
from specllama import answers, console
from specllama.cli_batch import batch
from specllama.cli_bench import bench
from specllama.cli_chat import chat
from specllama.cli_doctor import doctor
from specllama.cli_models import models
from specllama.cli_verify import verify
from specllama.errors import ModelError, SpecllamaError, UsageError
from specllama.interrupts import interruptible
from specllama.options import (
    announce,
    file_options,
    file_path,
    load_pair,
    run_options,
    sampling_options,
    sampling_params,
    set_verbose,
)

if TYPE_CHECKING:
    from specllama.generation import Chunk, Stats

# How click 8.2 and later end a group without a command, with its help as the message.
_NO_COMMAND: type[click.UsageError] | tuple[()] = getattr(click.exceptions, "NoArgsIsHelpError", ())


def main() -> NoReturn:
    """Run the command line and exit with its code; no traceback reaches the user without -v."""
    console.prepare()
    sys.unraisablehook = _not_lost
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # What is ignored stays ignored, as nohup wants it.
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            with contextlib.suppress(ValueError, OSError):
                signal.signal(number, _terminated)
    code: int | None = None
    is_deaf = False
    while not is_deaf:
        try:
            if code is None:
                with interruptible():
                    code = _run(sys.argv[1:])
            _be_deaf()
            is_deaf = True
        except KeyboardInterrupt:  # once more, while the first was dealt with
            code = 130
    sys.exit(code)


def _be_deaf() -> None:
    """Take no more interrupts: nothing is left that could be interrupted."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)


def _terminated(number: int, _frame: Any) -> NoReturn:
    # The import of a library can swallow the exception; then it comes again.
    _again(1.0, lambda _alarm, frame: _terminated(number, frame))
    raise SystemExit(128 + number)


def _not_lost(unraisable: Any) -> None:
    """What a signal raised in a callback whose exceptions Python drops is raised once more."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _again(0.01, signal.default_int_handler)
    elif not issubclass(unraisable.exc_type, SystemExit):
        sys.__unraisablehook__(unraisable)


def _again(seconds: float, handler: Callable[[int, FrameType | None], Any]) -> None:
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _run(arguments: Sequence[str]) -> int:
    """The exit code of one command line."""
    try:
        # Not command.main, which has an exit code of its own for a reader that went away.
        with command.make_context("specllama", list(arguments)) as context:
            command.invoke(context)
        sys.stdout.flush()
    except _NO_COMMAND as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        return _report(error, error.exit_code, _usage(error))
    except click.exceptions.Exit as done:
        return done.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return 130
    except BrokenPipeError:
        _abandon_output()
        return 141
    except SpecllamaError as error:
        return _report(error, error.exit_code)
    except OSError as error:
        _abandon_output()
        name = f"{error.filename}: " if error.filename else ""
        return _report(error, 1, f"{name}{error.strerror or error}; check the disk and the path")
    except MemoryError as error:
        return _report(error, 1, "there is not enough memory; try a smaller model or --ctx-size")
    except Exception as error:
        problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return _report(error, 1, f"{problem}; run it again with -v, and report what it shows")
    return 0


def _usage(error: click.UsageError) -> str:
    """What is wrong with the command line, in one sentence."""
    path = error.ctx.command_path if error.ctx else "specllama"
    return f"{error.format_message().rstrip('.')}; see {path} --help"


def _abandon_output() -> None:
    """Standard output takes no more; what Python still wants to flush at exit goes nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: BaseException, code: int, message: str | None = None) -> int:
    if logging.getLogger("specllama").isEnabledFor(logging.DEBUG):
        logging.getLogger("specllama").debug("traceback", exc_info=error)
    click.echo(f"Error: {message or error}", err=True)
    return code


@click.group(name="specllama", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(specllama.__version__, prog_name="specllama")
def command() -> None:
    """Run a large GGUF model faster with a small one, without changing what it says."""


@command.command()
@click.argument("prompt", required=False)
@file_options
@run_options
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="Print one object instead of the text.")
@click.option("--stats", is_flag=True, help="Print what it took, on standard error.")
def generate(prompt: str | None, as_json: bool, stats: bool, **options: Any) -> None:
    """Continue PROMPT, or standard input when it is "-" or left out in a pipe.

    The prompt is text to be continued, as it stands; markers such as <|im_start|> count as the
    model's own. One newline at the end of standard input is left out.
    """
    from specllama.generation import begins_itself

    text = _prompt(prompt)
    seed = None if options["seed"] in (None, -1) else options["seed"]
    params = sampling_params(options)
    with load_pair(options) as pair:
        if begins_itself(pair.tokenizer, text):
            announce(
                "Note: the prompt begins with the model's own beginning-of-text token, so no "
                "second one is put before it"
            )
        chunks = pair.generate(
            text,
            params,
            max_tokens=options["predict"],
            stop=options["stop"],
            seed=seed,
            ignore_eos=options["ignore_eos"],
        )
        if as_json:
            answer = list(chunks)
            answers.print_object(answers.answer_object(answer))
            last = answer[-1].stats
        else:
            last = _stream(chunks)
    if stats and last is not None:
        click.echo(answers.summary(last), err=True)


def _prompt(argument: str | None) -> str:
    if argument is not None and argument != "-":
        return _utf8(os.fsencode(argument), "the prompt")
    if argument is None and sys.stdin.isatty():
        raise UsageError('there is no prompt; give one as an argument, or "-" to type it')
    text = _utf8(sys.stdin.buffer.read(), "standard input")
    return text.removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")


def _utf8(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8 at byte {error.start}; convert it, with iconv for example"
        ) from None


def _stream(chunks: Iterator[Chunk]) -> Stats | None:
    """Print the text as it comes; the statistics of the last chunk."""
    stats = None
    for chunk in chunks:
        # With color=True click leaves escape sequences in the text alone, wherever it goes.
        click.echo(chunk.text, nl=False, color=True)
        sys.stdout.flush()
        stats = chunk.stats
    click.echo()
    return stats


@command.command()
@click.argument("target", required=False, type=file_path)
@click.argument("draft", required=False, type=file_path)
@file_options
@click.option("-b", "--batch-size", default=512, show_default=True, help="Rows of one decode.")
def check(target: Path | None, draft: Path | None, **options: Any) -> None:
    """May two models work together, and what would it take: every rule with its result.

    TARGET and DRAFT are GGUF files, as with -m and -md; without them the pair of --pair.
    """
    from specllama import check as checking
    from specllama.loading import find_files

    files = find_files(
        options["pair"],
        model=target or options["model"],
        draft=draft or options["model_draft"],
        models=options["models"],
        announce=announce,
    )
    report = checking.examine(files, options["ctx_size"], options["batch_size"])
    click.echo(checking.table(report))
    if report.refusal:
        raise ModelError(report.refusal)
    click.echo("This pair can be used." if files.draft else "This model can be used.")


@command.command()
@click.option("--p", "target", default="0.2,0.5,0.3", show_default=True, metavar="LAW",
              help="The target's law, comma separated.")
@click.option("--q", "draft", default="0.6,0.3,0.1", show_default=True, metavar="LAW",
              help="The draft's law.")
@click.option("--labels", help="Names of the tokens, comma separated.")
@click.option("--html", type=file_path, help="Write an interactive page to this file.")
@click.option("--plot", type=file_path, help="Write a picture to this file (needs matplotlib).")
@click.option("-v", "--verbose", is_flag=True, expose_value=False, callback=set_verbose,
              help="Show tracebacks.")
def explain(
    target: str, draft: str, labels: str | None, html: Path | None, plot: Path | None
) -> None:
    """Why the correction is needed: the exact mass balance of one position.

    Tokens are drawn from the draft's law and kept with probability min(1, p/q); the table shows
    where the mass of the target's law p comes from, and what a careless correction would give.
    """
    from specllama import explain as explaining

    p = explaining.parse_law(target, "--p")
    q = explaining.parse_law(draft, "--q")
    balance = explaining.balance(p, q)
    names = explaining.parse_labels(labels, len(p)) if labels is not None else None
    if html is not None:
        explaining.write_page(html, p, q, names)
    if plot is not None:
        explaining.plot(balance, plot, names)
    click.echo(explaining.table(balance, names))


command.add_command(batch)
command.add_command(bench)
command.add_command(models)
command.add_command(doctor)
command.add_command(chat)
command.add_command(verify)


if __name__ == "__main__":
    main()
