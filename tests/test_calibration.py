"""Costs are measured once, kept, and measured again when the memo is of no use."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from toys import Table, ToyContext

from specllama import calibration
from specllama.calibration import Knowledge
from specllama.costs import CostTable
from specllama.lm import CachedLM
from specllama.lookahead import AcceptancePredictor
from specllama.sampling import Law


def lm(n_ctx: int = 200) -> tuple[CachedLM, ToyContext]:
    context = ToyContext(Table(7, seed=1), 7, n_ctx=n_ctx, n_batch=128, n_outputs=20)
    return CachedLM(context), context


@pytest.mark.parametrize("all_logits", [True, False])
def test_decodes_of_each_number_of_rows_are_timed(all_logits: bool) -> None:
    model, context = lm()
    costs = CostTable()
    calibration.measure(model, costs, 17, all_logits=all_logits)
    assert set(costs.timings()) == {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 16, 17}
    assert all(len(times) == 3 for times in costs.timings().values())
    measured = [batch[0] for batch in context.decodes if batch[0][1] > 0]
    assert all(logits == (rows if all_logits else 1) for rows, logits in measured)
    assert sorted({rows for rows, _ in measured}) == sorted(costs.timings())
    assert model.held(0) == ()


def test_a_slow_model_is_timed_for_a_few_rows_only() -> None:
    ticks = iter(range(1000))
    model, _ = lm()
    costs = CostTable()
    calibration.measure(model, costs, 17, all_logits=True, clock=lambda: float(next(ticks)))
    assert costs.is_measured
    assert len(costs.timings()) <= 3


@pytest.mark.parametrize("n_ctx", [1, 5, 17, 20, 40])
def test_small_contexts_are_no_problem(n_ctx: int) -> None:
    model, _ = lm(n_ctx)
    calibration.measure(model, CostTable(), min(17, n_ctx), all_logits=True)


def knowledge() -> Knowledge:
    predictor = AcceptancePredictor()
    target, draft = CostTable({1: [3.0, 4.0], 4: [5.0]}), CostTable({1: [1.0]})
    known = Knowledge(target, draft, predictor, 0.4, -0.1)
    predictor.learn(predictor.features(Law(np.array([0.6, 0.4])), 0), 0.3)
    return known


def test_a_disturbed_time_of_a_draft_is_mended_the_next_time() -> None:
    model, _ = lm()
    ticks = itertools.count(0, 0.011)
    costs = CostTable({1: [45.0] * 4, 4: [60.0]})
    calibration.refresh(model, costs, clock=lambda: next(ticks))
    assert costs.ms(1) == pytest.approx(11)
    assert model.n_held(0) == 0


def test_a_long_text_does_not_make_the_next_run_seem_dear(tmp_path: Path) -> None:
    path = tmp_path / "memo.json"
    calibration.store(path, Knowledge(CostTable({1: [11.0] * 4})))
    calibration.store(path, Knowledge(CostTable({1: [52.0] * 9})))
    again = calibration.recall(path)
    assert again is not None and again.target.ms(1) == 11


def test_what_is_stored_is_recalled(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "memo.json"
    known = knowledge()
    calibration.store(path, known)
    again = calibration.recall(path)
    assert again is not None
    assert again.target.timings() == known.target.timings()
    assert again.draft.timings() == known.draft.timings()
    assert again.predictor.state() == known.predictor.state()
    assert (again.forecast, again.worth) == (0.4, -0.1)
    assert [p.name for p in path.parent.iterdir()] == ["memo.json"]


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", '{"format": 99}', '{"format": 2}', '{"format": 2, "target": 3}'),
        '{"format": 2, "target": {"1": []}, "draft": {}, "predictor": {}, "forecast": 0.5,'
        ' "worth": null}',
        '{"format": 2, "target": {"1": [1%s]}, "draft": {}, "predictor": {}, "forecast": 0.5,'
        ' "worth": null}' % ("0" * 400),
        '{"format": 2, "target": {"1": [NaN]}, "draft": {}, "predictor": {}, "forecast": 0.5,'
        ' "worth": null}',
        '{"format": 2, "target": {}, "draft": {}, "forecast": 0.5, "worth": 0.1,'
        ' "predictor": {"weights": [1], "covariance": [[1]]}}',
    ],
)
def test_a_memo_that_cannot_be_read_is_no_memo(tmp_path: Path, content: str) -> None:
    path = tmp_path / "memo.json"
    path.write_text(content)
    assert calibration.recall(path) is None
    assert calibration.recall(tmp_path / "absent.json") is None
    calibration.store(path, knowledge())
    assert calibration.recall(path) is not None
    assert json.loads(path.read_text())["forecast"] == 0.4


def test_a_folder_that_cannot_be_written_costs_only_the_memo(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    calibration.store(blocker / "memo.json", knowledge())


def test_the_identity_changes_with_the_files_and_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"one")
    first = calibration.identity([path], threads=2)
    assert first == calibration.identity([path], threads=2)
    assert first != calibration.identity([path], threads=3)
    assert first != calibration.identity([path, path], threads=2)
    path.write_bytes(b"more")
    assert first != calibration.identity([path], threads=2)
