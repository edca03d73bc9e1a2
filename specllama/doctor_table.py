"""The report of `specllama doctor` for people."""

from __future__ import annotations

from typing import Any


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [*_heading(report), *_places(report), *_speeds(report.get("measured"))]
    width = max(len(name) for name, _ in lines)
    text = [f"{name:<{width}}  {value}".rstrip() for name, value in lines]
    for title, key in (("Broken", "problems"), ("To do", "advice")):
        if report[key]:
            text += ["", f"{title}:", *(f"- {each}" for each in report[key])]
    return "\n".join(text)


def _heading(report: dict[str, Any]) -> list[tuple[str, str]]:
    versions, machine, build = report["versions"], report["processor"], report["build"]
    lines = [(name, version or "not installed") for name, version in versions.items()]
    lines.append(("processor", machine["name"]))
    limit = "" if machine["quota"] is None else f", {machine['quota']:g} processors' time"
    lines.append(
        ("threads", f"{machine['threads']} (processors: {machine['processors']}{limit})")
    )
    sizes = report["memory"]
    lines.append(("memory", f"{sizes['available_gib']} GiB free of {sizes['physical_gib']} GiB"))
    if build is not None:
        lines.append(("backends", ", ".join(build["backends"])))
        lines.append(("it uses", " ".join(build["features"])))
        lines += [
            (
                f"device {device['name']}",
                f"{device['description']}, {device['kind']}, "
                f"{device['free_mib']} MiB free of {device['total_mib']}",
            )
            for device in build["devices"]
        ]
    return lines


def _places(report: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [
        (f"{name} folder", folder["path"] + ("" if folder["exists"] else " (not there yet)"))
        for name, folder in report["folders"].items()
    ]
    here = report["pairs"]
    if here is not None:
        names = [pair["name"] + (" (a part)" if pair["here"] == "part" else "") for pair in here]
        lines.append(("pairs here", ", ".join(names) or "none"))
    lines += [("set", f"{name}={value}") for name, value in report["environment"].items()]
    return lines


def _speeds(measured: dict[str, Any] | None) -> list[tuple[str, str]]:
    if not measured:
        return []
    rows = "  ".join(f"{n}: {ms:g} ms" for n, ms in measured["rows_ms"].items())
    speculative = (
        f"{measured['speculative']:.1f} tokens/s with {measured['n_draft']} drafted a round"
    )
    if measured["acceptance"] is not None:
        speculative += f", {100 * measured['acceptance']:.0f} % kept"
    return [
        ("measured", f"{measured['target']} with {measured['draft']}"),
        *(("", sentence) for sentence in measured["layout"]),
        ("rows of a decode", rows),
        ("plain", f"{measured['plain']:.1f} tokens/s"),
        ("speculative", speculative),
    ]
