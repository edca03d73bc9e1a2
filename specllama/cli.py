"""The command line: thin bodies around what the modules do, and errors into exit codes.

Answers go to standard output, everything else to standard error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

import specllama
from specllama import workloads
from specllama.errors import ModelError, SpecllamaError, UsageError
from specllama.sampling import SamplingParams

if TYPE_CHECKING:
    from specllama.bench import Plan, Step
    from specllama.generation import Chunk, Pair, Stats

Command = Callable[..., None]
# How click 8.2 and later end a group without a command, with its help as the message.
_NO_COMMAND: type[click.UsageError] | tuple[()] = getattr(click.exceptions, "NoArgsIsHelpError", ())


def main() -> NoReturn:
    """Run the command line and exit with its code; no traceback reaches the user without -v."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the shell
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A console that cannot show a character must not end the run.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    with contextlib.suppress(ValueError, OSError):
        signal.signal(signal.SIGTERM, _terminated)
    sys.exit(_run(sys.argv[1:]))


def _terminated(_signal: int, _frame: Any) -> NoReturn:
    if hasattr(signal, "setitimer"):
        # The import of a library can swallow the exception; then it comes again.
        signal.signal(signal.SIGALRM, _terminated)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
    raise SystemExit(143)


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


_BIAS = re.compile(r"(\d+)([+-](?:\d+(?:\.\d*)?|\.\d+|inf))")


def _count(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    """A number of tokens; "none" and -1 mean no limit."""
    if value.lower() == "none":
        return -1
    try:
        count = int(value)
    except ValueError:
        raise click.BadParameter(f'{value!r} is no whole number and not "none"') from None
    if count < -1:
        raise click.BadParameter(f"{count} is below -1 (no limit)")
    return count


def _biases(
    _ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]
) -> dict[int, float]:
    """llama.cpp's notation: 15043+1, 15043-0.5, 15043-inf."""
    biases = {}
    for value in values:
        found = _BIAS.fullmatch(value)
        if found is None:
            raise click.BadParameter(f"{value!r} is not like 15043+1 or 15043-inf")
        biases[int(found[1])] = float(found[2])
    return biases


def _stops(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> Any:
    """Refuse an empty text before models are loaded."""
    if "" in values:
        raise click.BadParameter("a stop string is empty; leave it out, or give a text")
    return values


def _draft_tokens(_ctx: click.Context, _param: click.Parameter, value: str) -> int | None:
    """A fixed number of draft tokens a round; None is "auto"."""
    if value == "auto":
        return None
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f'{value!r} is no whole number and not "auto"') from None


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several click options as one decorator, in their order."""

    def decorate(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _set_verbose(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        logging.basicConfig(stream=sys.stderr, format="%(name)s: %(message)s")
        logging.getLogger("specllama").setLevel(logging.DEBUG)


# Whether a file can be read is for those who read it to say, with the exit code of their own.
_path = click.Path(path_type=Path, readable=False)
_file_options = _options(
    click.option("--pair", metavar="NAME", help="A pair of models.toml.  [default: smollm2]"),
    click.option("-m", "--model", type=_path, help="The target, a GGUF file."),
    click.option("-md", "--model-draft", type=_path, help="The draft, a GGUF file."),
    click.option("--models", type=_path, help="Another registry file instead of models.toml."),
    click.option(
        "-c", "--ctx-size", type=int, help="Tokens of prompt and answer; 0: as trained.  [4096]"
    ),
    click.option(
        "-v", "--verbose", is_flag=True, expose_value=False, callback=_set_verbose,
        help="Show llama.cpp's log and tracebacks.",
    ),
)
_run_options = _options(
    click.option("-b", "--batch-size", default=512, show_default=True, help="Rows of one decode."),
    click.option("-t", "--threads", type=int, help="Threads.  [default: physical cores]"),
    click.option("-tb", "--threads-batch", type=int, help="Threads for prompts.  [as --threads]"),
    click.option("-ngl", "--gpu-layers", type=int, default=-1, help="Layers on the GPU; -1: all."),
    click.option("-ngld", "--gpu-layers-draft", type=int, default=-1, help="The draft's."),
    click.option(
        "--drafter", type=click.Choice(["auto", "model", "lookup", "none"]), default="auto",
        show_default=True, help="Who proposes tokens; auto: model or lookup, whichever pays.",
    ),
    click.option(
        "--draft-tokens", default="auto", metavar="auto|N", callback=_draft_tokens,
        help="Tokens drafted a round, 0 to 16; auto: as many as pay.",
    ),
    click.option("--draft-temp", type=float, help="The draft's temperature.  [as --temp]"),
    click.option(
        "--verifier", type=click.Choice(["auto", "block", "token", "coupled"]), default="auto",
        show_default=True, help="The acceptance rule; auto: coupled with --seed, else block.",
    ),
)
_default = SamplingParams()
_law_options = _options(
    click.option("--top-k", type=int, default=_default.top_k, show_default=True,
                 help="Keep the k most likely tokens; 0: all."),
    click.option("--top-p", type=float, default=_default.top_p, show_default=True,
                 help="Keep the most likely tokens up to this mass; 1: all."),
    click.option("--min-p", type=float, default=_default.min_p, show_default=True,
                 help="Keep tokens this likely relative to the first; 0: all."),
    click.option("--repeat-penalty", type=float, default=_default.repeat_penalty,
                 show_default=True, help="Divide the logits of recent tokens."),
    click.option("--presence-penalty", type=float, default=_default.presence_penalty,
                 show_default=True, help="Subtract for a recent token."),
    click.option("--frequency-penalty", type=float, default=_default.frequency_penalty,
                 show_default=True, help="Subtract for each recent occurrence."),
    click.option("--repeat-last-n", type=int, default=_default.penalty_last_n,
                 show_default=True, help="Tokens that penalties look at; -1: all, 0: off."),
    click.option("--logit-bias", multiple=True, metavar="ID(+/-)BIAS", callback=_biases,
                 help="Add to a token's logit: 15043+1, 15043-inf."),
)
_sampling_options = _options(
    click.option("-s", "--seed", type=int, help="Seed of all randomness; -1: a new one."),
    click.option("--temp", type=float, default=_default.temperature, show_default=True,
                 help="Temperature; 0 takes the most likely token."),
    _law_options,
    click.option("--ignore-eos", is_flag=True, help="Do not let the model end the answer."),
    click.option("--stop", multiple=True, callback=_stops,
                 help="A text that ends the answer; may be repeated."),
    click.option("-n", "--predict", default="-1", show_default=True, metavar="N", callback=_count,
                 help="Most tokens to generate; -1 or none: until the model stops."),
)


@click.group(name="specllama", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(specllama.__version__, prog_name="specllama")
def command() -> None:
    """Run a large GGUF model faster with a small one, without changing what it says."""


@command.command()
@click.argument("prompt", required=False)
@_file_options
@_run_options
@_sampling_options
@click.option("--json", "as_json", is_flag=True, help="Print one object instead of the text.")
@click.option("--stats", is_flag=True, help="Print what it took, on standard error.")
def generate(prompt: str | None, as_json: bool, stats: bool, **options: Any) -> None:
    """Continue PROMPT, or standard input when it is "-" or left out in a pipe.

    The prompt is text to be continued, as it stands; markers such as <|im_start|> count as the
    model's own. One newline at the end of standard input is left out.
    """
    text = _prompt(prompt)
    seed = None if options["seed"] in (None, -1) else options["seed"]
    params = _sampling_params(options)
    with _load(options) as pair:
        chunks = pair.generate(
            text,
            params,
            max_tokens=options["predict"],
            stop=options["stop"],
            seed=seed,
            ignore_eos=options["ignore_eos"],
        )
        if as_json:
            last = _print_json(list(chunks))
        else:
            last = _stream(chunks)
    if stats and last is not None:
        click.echo(_summary(last), err=True)


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


def _sampling_params(options: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        temperature=options["temp"],
        top_k=options["top_k"],
        top_p=options["top_p"],
        min_p=options["min_p"],
        repeat_penalty=options["repeat_penalty"],
        presence_penalty=options["presence_penalty"],
        frequency_penalty=options["frequency_penalty"],
        penalty_last_n=options["repeat_last_n"],
        logit_bias=options["logit_bias"],
    )


def _announce(message: str) -> None:
    click.echo(message, err=True)


def _load(options: dict[str, Any]) -> Pair:
    """The pair that the options name, with what the user should know of it told."""
    from specllama.loading import load

    pair = load(
        options["pair"],
        model=options["model"],
        draft=options["model_draft"],
        models=options["models"],
        drafter=options["drafter"],
        draft_tokens=options["draft_tokens"],
        draft_temperature=options["draft_temp"],
        verifier=None if options["verifier"] == "auto" else options["verifier"],
        ctx_size=options["ctx_size"],
        batch_size=options["batch_size"],
        threads=options["threads"],
        threads_batch=options["threads_batch"],
        gpu_layers=options["gpu_layers"],
        gpu_layers_draft=options["gpu_layers_draft"],
        announce=_announce,
    )
    for notice in pair.notices:
        _announce(f"Note: {notice}")
    return pair


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


def _print_json(chunks: Sequence[Chunk]) -> Stats | None:
    """Print the whole answer as one object, in UTF-8 whatever the console's encoding."""
    last = chunks[-1]
    answer = {
        "text": "".join(chunk.text for chunk in chunks),
        "tokens": [dataclasses.asdict(token) for chunk in chunks for token in chunk.tokens],
        "finish_reason": last.finish_reason,
        "finish_detail": last.finish_detail,
        "seed": last.stats.seed if last.stats else None,
        "stats": _stats_object(last.stats) if last.stats else None,
    }
    line = json.dumps(answer, ensure_ascii=False) + "\n"
    sys.stdout.flush()
    sys.stdout.buffer.write(line.encode("utf-8"))
    sys.stdout.buffer.flush()
    return last.stats


def _stats_object(stats: Stats) -> dict[str, Any]:
    """The statistics as JSON has them: no NaN, and the derived figures with the counts."""
    derived = {
        "acceptance": stats.acceptance,
        "tokens_per_round": stats.tokens_per_round,
        "tokens_per_second": stats.tokens_per_second,
    }
    clean = {name: None if math.isnan(value) else value for name, value in derived.items()}
    return {**dataclasses.asdict(stats), **clean}


def _summary(stats: Stats) -> str:
    """The statistics in two lines for a person."""
    first = (
        f"{stats.predicted_n} tokens in {stats.predicted_ms / 1000:.2f} s "
        f"({stats.tokens_per_second:.1f} tokens/s) after a prompt of {stats.prompt_n} "
        f"in {stats.prompt_ms / 1000:.2f} s"
    )
    if stats.verifier == "coupled":  # elsewhere the seed alone does not give the text again
        first += f"; seed {stats.seed}"
    if stats.verdict:
        first = f"{first}\n{stats.verdict}"
    if not stats.draft_n:
        return f"{first}\nnothing was drafted in {stats.rounds} rounds, drafter {stats.drafter}"
    return (
        f"{first}\n{stats.rounds} rounds, {stats.tokens_per_round:.2f} tokens a round; "
        f"{stats.draft_n_accepted} of {stats.draft_n} drafted tokens accepted "
        f"({100 * stats.acceptance:.0f} %), verifier {stats.verifier}"
    )


@command.command()
@click.argument("target", required=False, type=_path)
@click.argument("draft", required=False, type=_path)
@_file_options
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
        announce=_announce,
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
@click.option("--html", type=_path, help="Write an interactive page to this file.")
@click.option("--plot", type=_path, help="Write a picture to this file (needs matplotlib).")
@click.option("-v", "--verbose", is_flag=True, expose_value=False, callback=_set_verbose,
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


@command.command()
@_file_options
@_run_options
@click.option("--prompts", type=_path,
              help="One prompt a line; a .jsonl file has a \"prompt\" in each line.")
@click.option("--workload", "names", multiple=True, type=click.Choice(workloads.NAMES),
              help="A built-in text instead of all; may be repeated.")
@click.option("--temps", default="0,0.8,1", show_default=True, metavar="LIST",
              help="Temperatures; 1 is without truncation unless --top-k or the like is given.")
@_law_options
@click.option("-s", "--seed", type=int, help="Seed of the first repetition.  [default: 0]")
@click.option("-n", "--predict", type=click.IntRange(min=2), default=256, show_default=True,
              help="Tokens of each answer.")
@click.option("--repetitions", type=click.IntRange(min=1), default=5, show_default=True,
              help="Measured after one warm-up.")
@click.option("--all-lengths", is_flag=True, help="Try fixed numbers of draft tokens up to 15 too.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, allow_dash=True),
              help="Write the result to this file, after each workload; - prints it instead.")
@click.option("--plot", type=_path, help="Write a picture to this file (needs matplotlib).")
@click.option("--note", help="A remark to be shown with the numbers.")
def bench(
    prompts: Path | None,
    names: tuple[str, ...],
    temps: str,
    predict: int,
    repetitions: int,
    all_lengths: bool,
    json_path: Path | None,
    plot: Path | None,
    note: str | None,
    **options: Any,
) -> None:
    """Measure plain decoding against speculation, in turn, on the same prompts.

    Tokens per second count from the end of the prompt; their median is followed by the lowest and
    the highest, and the ratio is that of each repetition. The built-in texts are prose, code, a
    copying task and a question. Without --seed the rule is block verification.
    """
    from specllama import bench as benching
    from specllama import bench_plot, bench_report, comparison
    from specllama.bench_stand import Stand

    if options["drafter"] == "none" or options["draft_tokens"] == 0:
        raise UsageError("nothing would be drafted; choose another --drafter or --draft-tokens")
    if prompts and names:
        raise UsageError("give either --prompts or --workload, not both")
    printed = str(json_path) == "-"
    if json_path and not printed:
        bench_report.require_writable(json_path)
    if plot:
        bench_plot.require_plottable(plot)
    settings = benching.settings(
        temps,
        _sampling_params({**options, "temp": 0.0}),
        truncated=_given("top_k", "top_p", "min_p"),
    )
    seed = options["seed"] if options["seed"] not in (None, -1) else None
    if options["verifier"] == "auto" and seed is None:
        options["verifier"] = "block"
    texts = workloads.read(prompts) if prompts else None
    with _load(options) as pair:
        chosen = texts or workloads.built_in(pair.tokenizer, names or workloads.NAMES)
        plan = benching.Plan(chosen, settings, predict, repetitions, seed or 0)
        benching.require_room(pair, plan)
        stand = Stand(pair)
        variants = stand.variants(options["draft_tokens"], all_lengths)
        head = bench_report.head(stand, options["threads"], options["verifier"], note)
        found = []
        with _progress(plan, [variant.name for variant in variants]) as tick:
            for cell in benching.run(plan, variants, tick):
                found.append(comparison.compare(cell, variants, stand, pair.notices))
                if json_path and not printed:
                    whole = bench_report.as_object(head, plan, stand, found)
                    bench_report.write_object(json_path, whole)
    if plot:
        bench_plot.plot(plot, head, stand, found)
    if printed:
        click.echo(json.dumps(bench_report.as_object(head, plan, stand, found)))
    else:
        click.echo(bench_report.table(head, plan, stand, found))


def _given(*names: str) -> bool:
    """Whether any of these options stands on the command line."""
    source = click.get_current_context().get_parameter_source
    return any(source(name) is click.core.ParameterSource.COMMANDLINE for name in names)


@contextlib.contextmanager
def _progress(plan: Plan, variants: Sequence[str]) -> Iterator[Callable[[Step], None]]:
    """A bar on a terminal, elsewhere a line for each workload and temperature as it begins."""
    from specllama.bench import schedule

    begun = itertools.count()
    if not sys.stderr.isatty():
        n_cells = len(plan.workloads) * len(plan.settings)

        def tell(step: Step) -> None:
            if step.repetition == 0 and step.variant == variants[0]:
                click.echo(f"{next(begun) + 1}/{n_cells} {_place(step)}", err=True)

        yield tell
        return
    bar: Any
    with click.progressbar(
        length=sum(1 for _ in schedule(plan, variants)),
        file=sys.stderr,
        item_show_func=lambda step: _place(step) if step else None,
    ) as bar:
        # A step that begins is no step that is done.
        yield lambda step: bar.update(min(next(begun), 1), step)


def _place(step: Step) -> str:
    return f"{step.workload.name} at temperature {step.setting.name}"


if __name__ == "__main__":
    main()
