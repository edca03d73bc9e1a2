"""What `specllama verify` found, as a page and as one object."""

from __future__ import annotations

import json
import math
from typing import Any

from specllama.generation import Pair
from specllama.replay import Fork, Replay
from specllama.sampled_law import LEVEL, Fit
from specllama.verify import Report

_LISTED = 8  # forks on the page


def page(pair: Pair, report: Report) -> str:
    """Every question with its answer, and the verdict."""
    plan = report.plan
    lines = [
        f"{_names(pair)}: {plan.verifier} verification, {plan.draft_tokens} draft tokens, "
        f"temperature {plan.params.temperature:g}, seed {plan.seed}",
        "",
        *_greedy(pair, report),
        _line(report.law_ok, "law of the tokens", _law(report)),
        *(
            f"       {position.name}: {_fit(position.fit)}"
            for position in report.positions
            if not position.fit.fits
        ),
        _line(report.acceptance.ok, "acceptance", _acceptance(report)),
        _line(report.control_ok, "negative control", _control(report)),
        "",
        verdict(report),
    ]
    return "\n".join(lines)


def verdict(report: Report) -> str:
    """The whole in one sentence."""
    if report.ok:
        return "What comes out is the target's own."
    if report.greedy_ok and report.law_ok and report.acceptance.ok:
        return "Nothing is wrong, but the tests saw too little to say more; give it more --seconds."
    return "Something is off: what comes out is not what the target alone would say."


def as_object(pair: Pair, report: Report) -> dict[str, Any]:
    """Everything that was found, for JSON."""
    plan, acceptance = report.plan, report.acceptance
    return {
        "ok": report.ok,
        "verdict": verdict(report),
        "files": [path.name for path in pair.files],
        "verifier": plan.verifier,
        "draft_tokens": plan.draft_tokens,
        "temperature": plan.params.temperature,
        "seed": plan.seed,
        "greedy": {
            "ok": report.greedy_ok,
            "answers": [_replay_object(name, one) for name, one in report.greedy],
        },
        "law": {
            "ok": report.law_ok,
            "level": LEVEL,
            "draft_temperature": report.draft_temperature,
            **_fit_object(report.fit),
            "positions": [
                {"name": p.name, **_fit_object(p.fit)} for p in report.positions
            ],
        },
        "acceptance": {
            "ok": acceptance.ok,
            "rounds": acceptance.rounds,
            "kept": _number(acceptance.kept),
            "expected": [_number(acceptance.low), _number(acceptance.high)],
            "standard_error": _number(acceptance.error),
        },
        "control": {"ok": report.control_ok, **_fit_object(report.control)},
    }


def write(pair: Pair, report: Report) -> str:
    """The object as a line of JSON."""
    return json.dumps(as_object(pair, report), allow_nan=False)


def _names(pair: Pair) -> str:
    names = [path.name for path in pair.files] or [pair.target.name]
    return names[0] if len(names) == 1 else f"{names[0]} with the draft {names[1]}"


def _line(ok: bool, name: str, detail: str) -> str:
    return f"{'ok' if ok else 'NO':<5}{name:<19}{detail}"


def _greedy(pair: Pair, report: Report) -> list[str]:
    """The greedy answers, decoded again at their own widths and at one."""
    replays = [one for _, one in report.greedy]
    n_tokens = sum(len(one.trace.answer) for one in replays)
    n_drafted = sum(one.trace.drafted for one in replays)
    wrong = [f"{name}: token {at}" for name, one in report.greedy for at in one.wrong]
    same = "identical" if not wrong else "not the best token of its row at " + ", ".join(wrong[:5])
    forks = [(name, fork, one) for name, one in report.greedy for fork in one.forks]
    noise = max((one.noise for one in replays), default=0.0)
    far = sum(fork.margin > one.limit for _, fork, one in forks)
    narrow = f"{len(forks)} of {n_tokens} tokens differ; logits differ by up to {noise:.2g}"
    if forks and not far:
        narrow += ", so that near ties fall either way, and these are such"
    if far:
        narrow += f", and {far} of these tokens are further from the best one than twice that"
    return [
        _line(
            not wrong and n_drafted > 0,
            "greedy, replayed",
            f"{len(replays)} answers, {n_tokens} tokens, {n_drafted} drafted: {same}",
        ),
        _line(not far, "greedy, row by row", narrow),
        *(
            f"       {name}, token {fork.position}: {_piece(pair, fork.emitted)} for "
            f"{_piece(pair, fork.best)}, {fork.margin:.2g} below it (limit {one.limit:.2g})"
            for name, fork, one in forks[:_LISTED]
        ),
        *([f"       and {len(forks) - _LISTED} more"] if len(forks) > _LISTED else []),
    ]


def _law(report: Report) -> str:
    n = report.fit.n
    return (
        f"{n} answers of {report.plan.answer_tokens} tokens after {len(report.positions)} "
        f"texts: {_fit(report.fit)}; a total variation distance of {report.fit.detectable:.2g} "
        f"would show{_cold(report)}"
    )


def _cold(report: Report) -> str:
    if report.draft_temperature is None:
        return ""
    return (
        "; the draft is nearly the target, so it draws at temperature "
        f"{report.draft_temperature:g} here, to have something corrected"
    )


def _fit(fit: Fit) -> str:
    if fit.impossible:
        return f"{fit.impossible} answers hold a token to which the target gives no chance"
    return f"chi-square {fit.statistic:.0f} with {fit.freedom} degrees of freedom, p {_p(fit)}"


def _p(fit: Fit) -> str:
    return f"= {fit.tail:.2g}" if fit.tail >= 1e-12 else "< 1e-12"


def _acceptance(report: Report) -> str:
    found = report.acceptance
    if not found.rounds:
        return "nothing was drafted; give a text that repeats itself, or a draft model"
    expected = f"{found.low:.3f}"
    if found.high > found.low:
        expected += f" to {found.high:.3f}"
    return (
        f"{found.kept:.3f} tokens kept a round in {found.rounds} rounds; by the two laws "
        f"{expected}, with a standard error of {found.error:.3f}"
    )


def _control(report: Report) -> str:
    seen = "a correction from p instead of the residual"
    if report.control_ok:
        return f"{seen} is seen: {_fit(report.control)}"
    return f"{seen} is not seen, so the test of the law proves little here: {_fit(report.control)}"


def _piece(pair: Pair, token: int) -> str:
    text = pair.tokenizer.piece(token).decode("utf-8", "replace")
    return repr(text) if text else f"id {token}"


def _fit_object(fit: Fit) -> dict[str, Any]:
    return {
        "answers": fit.n,
        "chi_square": _number(fit.statistic),
        "degrees_of_freedom": fit.freedom,
        "p": fit.tail,
        "impossible": fit.impossible,
        "detectable_distance": fit.detectable,
    }


def _replay_object(name: str, one: Replay) -> dict[str, Any]:
    return {
        "name": name,
        "ok": one.ok,
        "tokens": len(one.trace.answer),
        "drafted": one.trace.drafted,
        "wrong": list(one.wrong),
        "forks": [_fork_object(fork) for fork in one.forks],
        "width_noise": one.noise,
    }


def _fork_object(fork: Fork) -> dict[str, Any]:
    return {
        "position": fork.position,
        "emitted": fork.emitted,
        "best": fork.best,
        "margin": fork.margin,
    }


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None
