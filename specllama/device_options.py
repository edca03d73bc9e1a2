"""The options of devices and memory, under llama.cpp's names."""

from __future__ import annotations

import platform
from typing import Any

import click

from specllama.placement import (
    CACHE_TYPES,
    FLASH_ATTENTION,
    SPLIT_MODES,
    Cache,
    Placement,
)


def list_devices(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    """Print the devices of this build, and end the command."""
    if not value or ctx.resilient_parsing:
        return
    from specllama import devices

    click.echo("\n".join(devices.listing()))
    if reason := devices.no_gpu():
        line = devices.install_line(platform.system())
        click.echo(f"Note: {reason}; for one with: {line}", err=True)
    ctx.exit()


def _names(
    _ctx: click.Context, _param: click.Parameter, value: str | None
) -> tuple[str, ...] | None:
    """Device names with commas between them."""
    if value is None:
        return None
    names = tuple(name.strip() for name in value.split(","))
    if not all(names):
        raise click.BadParameter(f"{value!r} names no device; --list-devices lists them")
    return names


def _shares(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[float, ...]:
    """Numbers with commas or slashes between them, as llama.cpp takes them."""
    if value is None:
        return ()
    try:
        return tuple(float(share) for share in value.replace("/", ",").split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not like 3,1") from None


_layers = click.IntRange(min=-1)
_cache_type = click.Choice(list(CACHE_TYPES))
DEVICE_OPTIONS = (
    click.option(
        "-ngl", "--gpu-layers", type=_layers, default=-1, help="Layers on the GPU; -1: all."
    ),
    click.option("-ngld", "--gpu-layers-draft", type=_layers, default=-1, help="The draft's."),
    click.option(
        "-dev", "--device", metavar="NAMES", callback=_names,
        help="Devices for the target, comma separated; none: the processor.  [all GPUs]",
    ),
    click.option(
        "-devd", "--device-draft", metavar="NAMES", callback=_names,
        help="The draft's.  [as --device]",
    ),
    click.option(
        "--list-devices", is_flag=True, is_eager=True, expose_value=False, callback=list_devices,
        help="Print the devices and exit.",
    ),
    click.option(
        "-sm", "--split-mode", type=click.Choice(SPLIT_MODES), default="layer", show_default=True,
        help="What is parted between GPUs.",
    ),
    click.option(
        "-ts", "--tensor-split", metavar="N,N", callback=_shares,
        help="The share of each GPU, like 3,1.",
    ),
    click.option(
        "-mg", "--main-gpu", type=click.IntRange(min=0), default=0, show_default=True,
        help="The GPU of --split-mode none.",
    ),
    click.option(
        "-fa", "--flash-attn", type=click.Choice(FLASH_ATTENTION), default="auto",
        show_default=True, help="Flash attention; auto: where it is faster.",
    ),
    click.option(
        "-ctk", "--cache-type-k", type=_cache_type, default="f16", show_default=True,
        help="Type of the target's K cache.",
    ),
    click.option(
        "-ctv", "--cache-type-v", type=_cache_type, default="f16", show_default=True,
        help="Type of its V cache; quantised: with flash attention.",
    ),
    click.option("-ctkd", "--cache-type-k-draft", type=_cache_type, help="The draft's K."),
    click.option("-ctvd", "--cache-type-v-draft", type=_cache_type, help="The draft's V."),
    click.option(
        "--swa-full/--no-swa-full", default=True, show_default=True,
        help="Keep all of a sliding window's tokens; not: less memory, less reuse.",
    ),
    click.option(
        "-cd", "--ctx-size-draft", type=int,
        help="Tokens that the draft sees of a longer text, at most; 0: as trained.",
    ),
    click.option(
        "--mmap/--no-mmap", default=True, show_default=True, help="Map the files, or read them."
    ),
    click.option("--mlock", is_flag=True, help="Keep the weights from being swapped out."),
    click.option("--force", is_flag=True, help="Go on when memory seems too small."),
)


def device_settings(options: dict[str, Any]) -> dict[str, Any]:
    """What the options say, as `loading.load` takes it. Raises UsageError."""
    cache = Cache(
        options["cache_type_k"],
        options["cache_type_v"],
        options["flash_attn"],
        options["swa_full"],
    )
    return {
        "gpu_layers": options["gpu_layers"],
        "gpu_layers_draft": options["gpu_layers_draft"],
        "ctx_size_draft": options["ctx_size_draft"],
        "placement": Placement(
            devices=options["device"] or (),
            split_mode=options["split_mode"],
            tensor_split=options["tensor_split"],
            main_gpu=options["main_gpu"],
            mmap=options["mmap"],
            mlock=options["mlock"],
        ),
        "devices_draft": options["device_draft"],
        "cache": cache,
        "cache_draft": Cache(
            options["cache_type_k_draft"] or cache.type_k,
            options["cache_type_v_draft"] or cache.type_v,
            options["flash_attn"],
            options["swa_full"],
        ),
        "force": options["force"],
    }
