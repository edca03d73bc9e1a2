"""The command `specllama doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from specllama.options import set_verbose


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one object, for a bug report.")
@click.option("--no-measurement", is_flag=True, help="Leave the few seconds of measuring out.")
@click.option("-t", "--threads", type=click.IntRange(1, 512), help="Threads to measure with.")
@click.option("-v", "--verbose", is_flag=True, expose_value=False, callback=set_verbose,
              help="Show llama.cpp's log and tracebacks.")
def doctor(as_json: bool, no_measurement: bool, threads: int | None) -> None:
    """What this machine can do, what is missing, and what would make it faster.

    Needs no network and no weights; with the default pair it measures for about five seconds.
    The exit code is 1 when something is broken.
    """
    from specllama import doctor as examining
    from specllama import doctor_table

    def measure() -> dict[str, Any]:
        from specllama import trial

        return asdict(trial.run(threads))

    report = examining.examine(None if no_measurement else measure)
    click.echo(json.dumps(report, indent=1) if as_json else doctor_table.table(report))
    if report["problems"]:
        raise click.exceptions.Exit(1)
