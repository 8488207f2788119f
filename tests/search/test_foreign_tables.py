"""Tables that others recorded, as benchmarks/search/foreign.py reads them."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "search" / "foreign.py"
LINE = {
    "params": {"global_batch_size": 16, "learning_rate": 1e-3, "epochs": 1, "zero_stage": 0},
    "fixed": {"lr_scheduler": "linear"},
    "total_steps": 80,
    "joules_per_step": 2.0,
    "evals": [{"step": 40, "nll": 3.0}, {"step": 80, "nll": 2.5}],
}


def run(table: Path, *options: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(SCRIPT), str(table), "--seeds", "1", "--jobs", "1", *options]
    return subprocess.run(argv, capture_output=True, text=True)


def written(path: Path, *lines: dict | str) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


@pytest.mark.slow
def test_each_search_counts_its_joules_by_the_cheapest(tmp_path: Path) -> None:
    """Of runs whose learning rate alone decides; one diverges. A dimension of one value is no
    dimension.
    """
    lines = [
        {
            **LINE,
            "params": {**LINE["params"], "learning_rate": rate, "epochs": epochs},
            "total_steps": 80 * epochs,
            "evals": [
                {"step": 40 * epochs, "nll": 3.5},
                {"step": 80 * epochs, "nll": 2 + abs(math.log(rate / 1e-3)) / epochs},
            ],
        }
        for rate in (1e-4, 3e-4, 1e-3, 3e-3)
        for epochs in (1, 2)
    ]
    diverged = {
        **LINE,
        "params": {**LINE["params"], "learning_rate": 1e-2},
        "evals": [{"step": 40, "nll": None}],
    }
    table, out = written(tmp_path / "table.jsonl", *lines, diverged), tmp_path / "out.json"
    done = run(
        table, "--met-by", "0.3", "--samplers", "carbon", "random", "asha", "--json", str(out)
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert [result["sampler"] for result in results] == ["carbon", "random", "asha"]
    for result in results[:2]:
        assert 1 <= result["times_cheapest"] <= sum(line["total_steps"] for line in lines) / 80 + 1

    again = run(
        table,
        "--met-by",
        "0.3",
        "--samplers",
        "carbon",
        "--learn-from",
        str(table),
        "--json",
        str(out),
    )
    assert again.returncode == 0, again.stderr
    (result,) = json.loads(out.read_text())
    assert (
        result["sampler"] == "carbon after table"
        and result["times_cheapest"] <= results[0]["times_cheapest"]
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"joules_per_step": -1},
            "line 2: joules_per_step: input should be greater than 0, but got -1",
        ),
        ({"joules_per_step": "2"}, "line 2: joules_per_step: input should be a valid number"),
        ({"total_steps": 0}, "line 2: total_steps"),
        ({"total_steps": 60}, "evals: the last step must be at most 60, total_steps, but is 80"),
        ({"evals": []}, "line 2: evals"),
        (
            {"evals": [{"step": 80, "nll": 3.0}, {"step": 40, "nll": 3.0}]},
            "evals: the steps must rise",
        ),
        (
            {"evals": [{"step": 40, "nll": None}, {"step": 80, "nll": 3.0}]},
            "only the last nll may be null",
        ),
        ({"evals": [{"step": 80, "nll": -1.0}]}, "line 2: evals.0.nll"),
        ({"fixed": {"epochs": 3}}, "epochs can't be in params and in fixed"),
        ({"fixed": {"momentum": 0.9}}, "line 2: fixed must be"),
        (
            {"params": LINE["params"] | {"epochs": 10**25}},
            "line 2: epochs must be at most 9007199254740992",
        ),
        (
            {"params": {"epochs": 2}},
            "line 2: params must be global_batch_size, learning_rate, epochs, zero_stage",
        ),
        ({}, "must have no run twice, but has two or more of the same params and seed"),
        ({"seed": 1}, "must have two runs or more of different params, but has one"),
    ],
)
def test_what_is_no_table_is_refused(change: dict, problem: str, tmp_path: Path) -> None:
    done = run(written(tmp_path / "table.jsonl", LINE, LINE | change))
    assert done.returncode == 2
    assert problem in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "options", [("--met-by", "7"), ("--met-by", "nan"), ("--seeds", "0"), ("--jobs", "0")]
)
def test_options_out_of_range_are_refused(options: tuple[str, str], tmp_path: Path) -> None:
    done = run(
        written(tmp_path / "table.jsonl", LINE, LINE | {"params": {**LINE["params"], "epochs": 2}}),
        *options,
    )
    assert done.returncode == 2
    assert "--met-by must be above 0 and at most 1, --seeds and --jobs at least 1" in done.stderr


@pytest.mark.slow
def test_what_is_no_json_or_has_no_line_is_refused(tmp_path: Path) -> None:
    assert (
        "line 2: its text can't be read"
        in run(written(tmp_path / "table.jsonl", LINE, "[" * 50)).stderr
    )
    assert (
        "must have a line for each run, but has none"
        in run(written(tmp_path / "empty.jsonl")).stderr
    )
    assert "can't read the table" in run(tmp_path / "nowhere.jsonl").stderr


@pytest.mark.parametrize("rates", [("x", "y"), (-1.0, 1.0), (-1.0, -1.0)])
def test_a_value_that_no_dimension_can_have_is_said_with_its_table(
    rates: tuple, tmp_path: Path
) -> None:
    lines = [
        {**LINE, "params": {**LINE["params"], "epochs": epochs, "learning_rate": rate}}
        for epochs, rate in enumerate(rates, 1)
    ]
    done = run(written(tmp_path / "table.jsonl", *lines))
    assert done.returncode == 2 and "table.jsonl: learning_rate can't be" in done.stderr
    assert "Traceback" not in done.stderr


def test_rivals_that_know_the_costs_weigh_them_by_the_chance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import rivals

    chances, costs_j, best_j = np.array([0.9, 0.5, 0.1]), np.array([8.0, 2.0, 1.0]), 10.0
    index = np.exp(-rivals.pbgi(np.log(chances), costs_j, best_j))
    assert chances * (index - costs_j) == pytest.approx(costs_j), "Weitzman's reservation value"
    gains = np.exp(rivals.log_eipc(np.log(chances), costs_j, best_j))
    assert gains == pytest.approx(chances * (best_j - costs_j) / costs_j)
    first = np.exp(rivals.log_eipc(np.log(chances), costs_j, math.inf))
    assert first == pytest.approx(chances / costs_j)


def two_runs(path: Path) -> Path:
    longer = {**LINE, "total_steps": 90, "params": {**LINE["params"], "epochs": 2}}
    return written(path, LINE, longer)


def lacks(module: str) -> bool:
    return importlib.util.find_spec(module) is None


@pytest.mark.parametrize(
    ("script", "sampler", "needed"),
    [
        ("foreign.py", "pbgi", "botorch"),
        ("foreign.py", "smac", "smac"),
        ("foreign.py", "mobster", "syne_tune"),
        ("front.py", "qlognehvi", "botorch"),
    ],
)
def test_what_a_rival_needs_is_said(script: str, sampler: str, needed: str, tmp_path: Path) -> None:
    if not lacks(needed):
        pytest.skip(f"{needed} is there")
    table = two_runs(tmp_path / "table.jsonl")
    argv = [sys.executable, str(SCRIPT.parent / script), str(table), "--samplers", sampler]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2 and f"{sampler} needs {needed}: pip install" in done.stderr


@pytest.fixture
def grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of 24 runs, each with losses after a ninth, a third and all of its steps; the highest
    rate diverges.
    """
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    lines = []
    for epochs in (1, 2, 4):
        for rate in (1e-4, 3e-4, 1e-3, 1e-2):
            for warmup in ("none", "some"):
                far = abs(math.log(rate / 1e-3))
                last = None if rate == 1e-2 else 2 + (far + 0.1) / epochs
                nlls = {10: 3.5 + far, 30: 3 + far, 90: last}
                evals = [{"step": step * epochs, "nll": nll} for step, nll in nlls.items()]
                params = {"epochs": epochs, "learning_rate": rate, "warmup": warmup}
                line = {"params": params, "total_steps": 90 * epochs, "evals": evals}
                lines.append({"joules_per_step": 2.0, **line})
    return written(tmp_path / "table.jsonl", *lines)


def test_multi_fidelity_rivals_minimize_the_energy_of_what_meets_the_target(grown: Path) -> None:
    import listed
    import multifidelity

    table = listed.Table(grown)
    told = multifidelity.Told(table, 2.5)
    cheap, dear = table.runs[0], table.runs[-3]
    assert told.cost(cheap, math.inf) == multifidelity.FIRST_WORST
    assert told.cost(cheap, 2.5) == pytest.approx(0.25) and told.cost(dear, 2.5) == 1.0
    assert told.cost(cheap, 2.75) == told.worst == pytest.approx(1.25)
    assert told.cost(dear, math.inf) == told.worst
    assert [multifidelity.rung(cheap, ((step, 3.0),)) for step in (9, 10, 45, 90)] == [0, 1, 3, 9]


def test_a_paused_run_is_charged_in_parts_and_counted_once(
    grown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import foreign
    import listed

    (cheapest,) = (
        run
        for run in listed.Table(grown).runs
        if run.params == {"epochs": 1, "learning_rate": 1e-3, "warmup": "none"}
    )
    parts = [(20.0, "paused"), (40.0, "paused"), (120.0, "complete")]
    steps = [(listed.Trial(cheapest, spent_j, (), state), 0.0) for spent_j, state in parts]
    monkeypatch.setitem(foreign.ALL_SEARCHES, "paused", lambda *_: iter(steps))
    result = foreign.searched(grown, 0.25, "paused", 0, None)
    assert result["times_cheapest"] == pytest.approx(1.0)
    assert (result["trials"], result["good"], result["good_stopped"]) == (1, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "needed"), [("smac", "smac"), ("mobster", "syne_tune")])
def test_multi_fidelity_rivals_try_each_recorded_run_once(
    name: str, needed: str, grown: Path
) -> None:
    import foreign
    import listed
    import rivals

    if rivals.missing([name]) is not None:
        pytest.skip(f"needs {needed}, a rival of the benchmark")
    table = listed.Table(grown)

    def trials(seed: int) -> list[tuple[int, str, float]]:
        steps = foreign.ALL_SEARCHES[name](table, 2.5, seed)
        return [(table.runs.index(one.run), one.state, one.spent_j) for one, _ in steps]

    first = trials(0)
    assert trials(0) == first != trials(1)
    ended = [index for index, state, _ in first if state != "paused"]
    assert sorted(ended) == list(range(len(table.runs)))
    for index, run in enumerate(table.runs):
        spent_j = sum(joules for other, _, joules in first if other == index)
        assert 0 < spent_j <= run.energy_j


@pytest.mark.parametrize(
    "sampler",
    [
        "random",
        pytest.param(
            "qlognehvi",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(
                    lacks("botorch"), reason="needs botorch, a rival of the benchmark"
                ),
            ],
        ),
    ],
)
def test_a_front_is_found_in_a_list_of_runs(sampler: str, grown: Path) -> None:
    import front

    result = front.search(grown, sampler, 0)
    assert result["trials"] == 24 and result["by_trials"] == pytest.approx(1.0)
    assert result["energy_share"] == pytest.approx(1.0) and result["over_lowest"] == 0.0


def test_generations_of_runs_that_stand_in_for_proposals_are_known(grown: Path) -> None:
    import front
    import listed

    table = listed.Table(grown)
    orders = [
        [table.runs.index(trial.run) for trial, _ in front.optunas(name, table, 0)]
        for name in ("random", "nsga2")
    ]
    assert orders[0][:10] == orders[1][:10], "the first generation is drawn at random"
    assert orders[0] != orders[1]
