"""The options that commands share, and what they say: sampling parameters, a loaded pair."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specllama.device_options import DEVICE_OPTIONS, device_settings
from specllama.sampling import SamplingParams

if TYPE_CHECKING:
    from specllama.generation import Pair

Command = Callable[..., None]

_BIAS = re.compile(r"(\d+)([+-](?:\d+(?:\.\d*)?|\.\d+|inf))")


def parse_count(text: str) -> int:
    """A number of tokens; "none" and -1 mean no limit. Raises ValueError."""
    if text.lower() == "none":
        return -1
    try:
        count = int(text)
    except ValueError:
        raise ValueError(f'{text!r} is no whole number and not "none"') from None
    if count < -1:
        raise ValueError(f"{count} is below -1 (no limit)")
    return count


def parse_bias(text: str) -> tuple[int, float]:
    """A token and its bias in llama.cpp's notation: 15043+1, 15043-0.5, 15043-inf. ValueError."""
    found = _BIAS.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not like 15043+1 or 15043-inf")
    return int(found[1]), float(found[2])


def _count(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    try:
        return parse_count(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _biases(
    _ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]
) -> dict[int, float]:
    try:
        return dict(parse_bias(value) for value in values)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _stops(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> Any:
    """Refuse what cannot be a text before models are loaded."""
    if "" in values:
        raise click.BadParameter("a stop string is empty; leave it out, or give a text")
    for value in values:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise click.BadParameter(
                f"{value!r} is not UTF-8 at character {error.start}; give it as text"
            ) from None
    return values


def _draft_tokens(_ctx: click.Context, _param: click.Parameter, value: str) -> int | None:
    """A fixed number of draft tokens a round; None is "auto"."""
    if value == "auto":
        return None
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f'{value!r} is no whole number and not "auto"') from None


def _together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several click options as one decorator, in their order."""

    def decorate(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def set_verbose(_ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    """Show the log of llama.cpp and tracebacks from now on."""
    if value:
        logging.basicConfig(stream=sys.stderr, format="%(name)s: %(message)s")
        logging.getLogger("specllama").setLevel(logging.DEBUG)


# Whether a file can be read is for those who read it to say, with the exit code of their own.
file_path = click.Path(path_type=Path, readable=False)
file_options = _together(
    click.option("--pair", metavar="NAME", help="A pair of models.toml.  [default: smollm2]"),
    click.option(
        "-m", "--model", type=file_path,
        help="The target: a GGUF file, the name of a pair, or hf:owner/name/file.gguf.",
    ),
    click.option("-md", "--model-draft", type=file_path, help="The draft, likewise."),
    click.option("--models", type=file_path, help="Another registry file instead of models.toml."),
    click.option(
        "-c", "--ctx-size", type=int, help="Tokens of prompt and answer; 0: as trained.  [4096]"
    ),
    click.option(
        "-v", "--verbose", is_flag=True, expose_value=False, callback=set_verbose,
        help="Show llama.cpp's log and tracebacks.",
    ),
)
run_options = _together(
    click.option("-b", "--batch-size", default=512, show_default=True, help="Rows of one decode."),
    click.option("-t", "--threads", type=int, help="Threads.  [default: physical cores]"),
    click.option("-tb", "--threads-batch", type=int, help="Threads for prompts.  [as --threads]"),
    click.option("-td", "--threads-draft", type=int, help="The draft's.  [as --threads]"),
    *DEVICE_OPTIONS,
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
law_options = _together(
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
sampling_options = _together(
    click.option("-s", "--seed", type=int, help="Seed of all randomness; -1: a new one."),
    click.option("--temp", type=float, default=_default.temperature, show_default=True,
                 help="Temperature; 0 takes the most likely token."),
    law_options,
    click.option("--ignore-eos", is_flag=True, help="Do not let the model end the answer."),
    click.option("--stop", multiple=True, callback=_stops,
                 help="A text that ends the answer; may be repeated."),
    click.option("-n", "--predict", default="-1", show_default=True, metavar="N", callback=_count,
                 help="Most tokens to generate; -1 or none: until the model stops."),
)


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """What the sampling options say. Raises UsageError for what cannot be."""
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


def announce(message: str) -> None:
    """Tell the user something that is no part of the answer."""
    click.echo(message, err=True)


def load_pair(options: dict[str, Any], **more: Any) -> Pair:
    """The pair that the options name, with what the user should know of it told.

    more: what `loading.load` takes besides.
    """
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
        threads_draft=options["threads_draft"],
        announce=announce,
        **device_settings(options),
        **more,
    )
    for notice in pair.notices:
        announce(f"Note: {notice}")
    return pair
