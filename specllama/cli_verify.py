"""`specllama verify` on the command line."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import click

from specllama import workloads
from specllama.errors import SpecllamaError, UsageError
from specllama.options import (
    announce,
    file_options,
    file_path,
    law_options,
    load_pair,
    run_options,
    sampling_params,
)
from specllama.sampling import SamplingParams


@click.command()
@file_options
@run_options
@click.option("--prompts", type=file_path,
              help="One prompt a line; a .jsonl file has a \"prompt\" in each line.")
@click.option("--workload", "names", multiple=True, type=click.Choice(workloads.NAMES),
              help="A built-in text instead of all; may be repeated.")
@click.option("--temp", type=float, default=SamplingParams().temperature, show_default=True,
              help="Temperature of the tests of the law.")
@law_options
@click.option("-s", "--seed", type=int, default=0, show_default=True,
              help="Seed of all randomness; -1: a new one.")
@click.option("-n", "--predict", type=click.IntRange(min=2), default=64, show_default=True,
              help="Tokens of each greedy answer.")
@click.option("--seconds", type=click.FloatRange(min=1), default=60, show_default=True,
              help="About how long it may take, after the models are loaded.")
@click.option("--json", "as_json", is_flag=True, help="Print one object instead of the page.")
def verify(
    prompts: Path | None,
    names: tuple[str, ...],
    seed: int,
    predict: int,
    seconds: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Is the output really the target's, on this machine, with this pair?

    Greedy answers are decoded again without the loop; many short sampled answers are counted
    against the target's law; and a rule that is wrong on purpose shows that the test would see it.
    Exit code 1 when something is off. The built-in texts are prose, code, a copying task and a
    question. More --seconds find smaller differences.
    """
    from specllama import verify as verifying
    from specllama import verify_report

    if options["drafter"] == "none" or options["draft_tokens"] == 0:
        raise UsageError("nothing would be drafted; choose another --drafter or --draft-tokens")
    if prompts and names:
        raise UsageError("give either --prompts or --workload, not both")
    params = sampling_params(options)
    if params.temperature == 0:
        raise UsageError(
            "at temperature 0 there is no law to test; leave --temp out, greedy answers are "
            "verified anyway"
        )
    loads = workloads.read(prompts) if prompts else None
    with load_pair(options) as pair:
        chosen = loads or workloads.built_in(pair.tokenizer, names or workloads.NAMES)
        plan = verifying.Plan(
            verifying.texts(pair, chosen),
            params,
            "block" if options["verifier"] == "auto" else options["verifier"],
            options["draft_tokens"] or verifying.DRAFT_TOKENS,
            seconds,
            secrets.randbits(32) if seed == -1 else seed,
            predict,
        )
        report = verifying.verify(pair, plan, announce)
        click.echo(
            verify_report.write(pair, report) if as_json else verify_report.page(pair, report)
        )
    if not report.ok:
        raise SpecllamaError(verify_report.verdict(report))
