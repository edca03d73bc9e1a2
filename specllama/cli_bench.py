"""`specllama bench` on the command line."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specllama import workloads
from specllama.errors import UsageError
from specllama.options import (
    file_options,
    file_path,
    law_options,
    load_pair,
    run_options,
    sampling_params,
)

if TYPE_CHECKING:
    from specllama.bench import Plan, Step


@click.command()
@file_options
@run_options
@click.option("--prompts", type=file_path,
              help="One prompt a line; a .jsonl file has a \"prompt\" in each line.")
@click.option("--workload", "names", multiple=True, type=click.Choice(workloads.NAMES),
              help="A built-in text instead of all; may be repeated.")
@click.option("--temps", default="0,0.8,1", show_default=True, metavar="LIST",
              help="Temperatures; 1 is without truncation unless --top-k or the like is given.")
@law_options
@click.option("-s", "--seed", type=int, help="Seed of the first repetition.  [default: 0]")
@click.option("-n", "--predict", type=click.IntRange(min=2), default=256, show_default=True,
              help="Tokens of each answer.")
@click.option("--repetitions", type=click.IntRange(min=1), default=5, show_default=True,
              help="Measured after one warm-up.")
@click.option("--all-lengths", is_flag=True, help="Try fixed numbers of draft tokens up to 15 too.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, allow_dash=True),
              help="Write the result to this file, after each workload; - prints it instead.")
@click.option("--plot", type=file_path, help="Write a picture to this file (needs matplotlib).")
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
        sampling_params({**options, "temp": 0.0}),
        truncated=_given("top_k", "top_p", "min_p"),
    )
    seed = options["seed"] if options["seed"] not in (None, -1) else None
    if options["verifier"] == "auto" and seed is None:
        options["verifier"] = "block"
    texts = workloads.read(prompts) if prompts else None
    with load_pair(options) as pair:
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
