"""The simulator runs the real policy; bad curves and traces are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from vllm_eagle3.drafter import TreeShape
from vllm_eagle3.policy import BudgetLimits, ScoredDrafts, Verdict
from vllm_eagle3.recording import ACCEPTANCE, STEPS, RecordingPolicy
from vllm_eagle3.simulate import (
    CostCurve,
    FixedShape,
    TracedDraft,
    compare,
    curve_of_steps,
    read_curve,
    read_traces,
    simulate,
)
from vllm_eagle3.simulate_command import SimulateOptions, run_simulate_command
from vllm_eagle3.step_cost import StepWork

ROOT = Path(__file__).parents[1]
LIMITS = BudgetLimits(TreeShape.chain(5), TreeShape(8, 2, 4))
# Rows are nearly free up to hundreds, as where memory is the bottleneck; and never.
FREE_ROWS = CostCurve(
    name="free rows",
    verify_ms=((1, 7.0), (64, 7.5), (256, 14.0), (512, 28.0)),
    head_pass_ms=0.3,
    level_ms=0.4,
    head_row_ms=0.002,
    noise=0.05,
)
DEAR_ROWS = CostCurve(
    name="dear rows",
    verify_ms=((1, 20.0), (64, 200.0)),
    head_pass_ms=1.5,
    level_ms=1.2,
    head_row_ms=0.1,
    noise=0.05,
)


def draw_traces(count: int, seed: int = 0) -> list[TracedDraft]:
    """Binary trees of 8 nodes; nodes are accepted 0.9 times as often as confident."""
    rng = np.random.default_rng(seed)
    return [draw_trace(rng) for _ in range(count)]


def draw_trace(rng: np.random.Generator) -> TracedDraft:
    ease = rng.uniform(0.2, 0.9)
    nodes: list[tuple[int, float]] = []  # parent, score
    level = [(-1, 0.0)]
    for _ in range(4):
        grown = []
        for parent, score in level:
            for share in (ease, (1 - ease) / 2):
                nodes.append((parent, score + float(np.log(share))))
                grown.append((len(nodes) - 1, nodes[-1][1]))
        level = sorted(grown, key=lambda node: -node[1])[:2]
    kept = sorted(sorted(range(len(nodes)), key=lambda n: -nodes[n][1])[:8])
    number = {old: new for new, old in enumerate(kept)} | {-1: -1}
    parents = [number[nodes[old][0]] for old in kept]
    scores = [nodes[old][1] for old in kept]
    accepted, here = [], -1
    while True:
        children = [n for n, parent in enumerate(parents) if parent == here]
        above = scores[here] if here >= 0 else 0.0
        odds = [0.9 * np.exp(scores[n] - above) for n in children]
        place = int(np.searchsorted(np.cumsum(odds), rng.random()))
        if place >= len(children):
            return TracedDraft.of(parents, scores, accepted)
        here = children[place]
        accepted.append(here)


TRACES = draw_traces(1500)


@pytest.mark.parametrize(
    ("curve", "batch"),
    [(FREE_ROWS, 1), (FREE_ROWS, 6), (DEAR_ROWS, 1), (DEAR_ROWS, 6)],
    ids=lambda value: getattr(value, "name", value),
)
def test_auto_reaches_the_best_fixed_shape(curve: CostCurve, batch: int) -> None:
    found = compare(curve, TRACES, LIMITS, batch, steps=250, context=200)
    best = found.fixed[found.best].tokens_per_s
    assert found.auto.tokens_per_s >= 0.97 * best
    assert found.speed_up >= 0.97
    if curve is FREE_ROWS:
        assert found.speed_up > 1.3
        assert found.auto.accepted > 100
    if curve is DEAR_ROWS and batch == 6:
        assert found.best == "off"
        assert found.auto.plain_steps > 0.95 * found.auto.steps


def test_a_simulated_step_costs_what_the_curve_says() -> None:
    curve = CostCurve(verify_ms=((1, 10), (11, 20)), head_pass_ms=1, level_ms=2)
    assert curve.seconds(StepWork(1)) == pytest.approx(0.010)
    assert curve.seconds(StepWork(6)) == pytest.approx(0.015)
    assert curve.seconds(StepWork(21, 0, 1, 3)) == pytest.approx(0.030 + 0.007)
    plain = simulate(FixedShape(None), curve, TRACES, batch=6, steps=10)
    assert plain.tokens_per_s == pytest.approx(6 / 0.015)
    assert plain.accepted == plain.drafts == 0


def test_a_smaller_shape_is_cut_out_of_a_draft() -> None:
    #  0 (.6) ─ 2 (.5) ─ 4 (.2)        1 (.3) ─ 3 (.25)
    draft = TracedDraft.of(
        [-1, -1, 0, 1, 2], np.log([0.6, 0.3, 0.5, 0.25, 0.2]).tolist(), [1, 3]
    )
    chain = draft.limited(TreeShape.chain(2))
    assert chain.parents.tolist() == [-1, 0]
    assert not chain.accepted.any()
    tree = draft.limited(TreeShape(4, 2, 2))
    assert tree.parents.tolist() == [-1, -1, 0, 1]
    assert tree.accepted.tolist() == [False, True, False, True]
    assert draft.limited(TreeShape(3, 2, 2)).accepted.tolist() == [False, True, False]


def record(folder: Path, curve: CostCurve) -> None:
    """What an engine on a machine of that curve records."""
    policy = RecordingPolicy(LIMITS, folder)
    for seed, batch in enumerate((1, 4, 16)):
        simulate(
            policy, curve, TRACES, batch, steps=300, context=100 * batch, seed=seed
        )


def test_a_record_gives_the_curve_and_the_drafts_back(tmp_path: Path) -> None:
    record(tmp_path, FREE_ROWS)
    curve = curve_of_steps(tmp_path / STEPS)
    for work in (StepWork(1), StepWork(4), StepWork(80, 0, 1, 3, 120)):
        assert curve.seconds(work) == pytest.approx(FREE_ROWS.seconds(work), rel=0.1)
    traces = read_traces(tmp_path / ACCEPTANCE)
    assert len(traces) > 700
    # Every fixed shape is as long in what was recorded as in what there was.
    for shape in (TreeShape.chain(1), TreeShape.chain(3), TreeShape(4, 2, 4)):
        assert accepted_of(traces, shape) == pytest.approx(
            accepted_of(TRACES, shape), rel=0.06
        )


def test_a_request_may_be_aborted_while_its_drafts_are_verified(tmp_path: Path) -> None:
    policy, draft = RecordingPolicy(LIMITS, tmp_path), TRACES[0]
    drafts = ScoredDrafts(
        ["stays", "aborted"],
        np.tile(draft.scores, (2, 1)),
        np.tile(draft.depths, (2, 1)),
        np.zeros((2, 8), dtype=bool),
        np.full(2, 8),
        top_k=2,
    )
    policy.choose(drafts, 100)
    policy.forget("aborted")
    policy.observe_verdicts(
        [
            Verdict(req_id, draft.parents.tolist(), draft.scores, draft.accepted)
            for req_id in drafts.req_ids
        ]
    )
    assert len(read_traces(tmp_path / ACCEPTANCE)) == 1


def accepted_of(traces: list[TracedDraft], shape: TreeShape) -> float:
    return float(np.mean([trace.limited(shape).accepted.sum() for trace in traces]))


def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    record(tmp_path, FREE_ROWS)
    out, console = tmp_path / "out.json", Console(record=True, width=160)
    options = SimulateOptions(tmp_path, batch="1,8", steps=60, out=out)
    run_simulate_command(options, console)
    rows = json.loads(out.read_text())["batches"]
    assert [row["batch"] for row in rows] == [1, 8]
    assert str(rows[0]["auto_speed_up"]) in console.export_text()
    with pytest.raises(ValueError, match="batch: got '1,x'"):
        run_simulate_command(SimulateOptions(tmp_path, batch="1,x"), console)


def test_a_prediction_is_scored_against_a_benchmark(tmp_path: Path) -> None:
    record(tmp_path, FREE_ROWS)
    results, out = tmp_path / "results.json", tmp_path / "out.json"
    known = compare(FREE_ROWS, draw_traces(1500, seed=9), LIMITS, 4, 300, 256)
    fixed, off = known.fixed, known.fixed["off"].tokens_per_s
    speeds = {"ours:auto": known.speed_up, "off": 1.0, "ours:chain:9": 2.0}
    for name in ("chain:1", "chain:3"):
        speeds[name] = fixed[name].tokens_per_s / off
    runs = [
        {"method": name, "batch": 4, "temperature": 0.0, "speed_up": value}
        for name, value in speeds.items()
    ]
    runs += [{**runs[0], "batch": 8}, {**runs[0], "temperature": 1.0, "speed_up": 9}]
    results.write_text(json.dumps({"runs": runs}))
    options = SimulateOptions(
        tmp_path, batch="1,4", num_speculative_tokens=8, against=results, out=out
    )
    run_simulate_command(options, Console(record=True, width=160))
    scored = json.loads(out.read_text())["scored"]
    names = [(row["method"], row["batch"]) for row in scored]
    assert names == [("chain:1", 4), ("chain:3", 4), ("ours:auto", 4)]
    for row in scored:
        assert row["measured"] == pytest.approx(speeds[row["method"]], abs=1e-3)
        assert abs(row["difference"]) < 0.1


def test_a_benchmark_without_speed_ups_cannot_be_predicted(tmp_path: Path) -> None:
    record(tmp_path, FREE_ROWS)
    results = tmp_path / "results.json"
    off = {"method": "off", "batch": 1, "temperature": 0, "speed_up": 1.0}
    warm = {**off, "method": "chain:1", "temperature": 1, "speed_up": 1.2}
    noisy = {**off, "method": "chain:1", "speed_up": None}
    results.write_text(json.dumps({"runs": [off, warm, noisy]}))
    with pytest.raises(ValueError, match=r"against: .* no speed-up .* --temperature 0"):
        run_simulate_command(SimulateOptions(tmp_path, against=results), Console())
    results.write_text("[]")
    with pytest.raises(ValueError, match=r"against: got .*results\.json"):
        run_simulate_command(SimulateOptions(tmp_path, against=results), Console())


def test_a_published_curve_gives_its_published_steps() -> None:
    curve = read_curve(ROOT / "examples/curves/h100-llama-3.1-8b.yaml")
    for length, published in ((2, 10.2), (4, 12.5), (7, 15.2)):
        step = StepWork(1 + length, 200, 1, length - 1)
        assert 1000 * curve.seconds(step) == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("head_pass_ms: 1", "verify_ms: missing; level_ms: missing"),
        (
            "{verify_ms: [[4, 1], [2, 1]], head_pass_ms: 1, level_ms: 1}",
            "rows .4.0, 2.0.",
        ),
        (
            "{verify_ms: [[1, 1], [2, 1]], head_pass_ms: 1, level_ms: 1, levels: 1}",
            "levels: unknown key, did you mean level_ms",
        ),
        ("[", "curve: got "),
    ],
)
def test_bad_curves_are_refused_by_name(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "curve.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_curve(path)


def test_missing_or_empty_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"steps: got .*steps\.jsonl"):
        curve_of_steps(tmp_path / STEPS)
    (tmp_path / ACCEPTANCE).write_text("")
    with pytest.raises(ValueError, match="holds no drafts"):
        read_traces(tmp_path / ACCEPTANCE)
    (tmp_path / ACCEPTANCE).write_text('{"parents": [0]}\n')
    with pytest.raises(ValueError, match=r"acceptance\.jsonl of a recorded run"):
        read_traces(tmp_path / ACCEPTANCE)
