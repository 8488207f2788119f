"""The engines' seam: one table, one protocol, and readings of several nodes."""

import ast
import json
import math
import typing
from pathlib import Path

import pytest
from small_studies import study

import carbonopt
from carbonopt.core.errors import BadInput
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import Node, Phase
from carbonopt.energy.meter_reading import Reading
from carbonopt.energy.node_meters import NodeMeters
from carbonopt.energy.replay_meter import ReplayMeter
from carbonopt.engines.kinds import ENGINES
from carbonopt.engines.replay import _apart, read_table
from carbonopt.spec.launch_settings import Launch
from carbonopt.spec.study_data import StudyData
from carbonopt.study_file.reader import parse_study
from carbonopt.study_file.study_checks import check

HERE, THERE = Node(name="here", devices=("GPU-a",)), Node(name="there", devices=("GPU-b", "GPU-c"))


def test_every_kind_of_launch_has_its_engine() -> None:
    kinds = [
        typing.get_args(kind.model_fields["kind"].annotation)[0] for kind in typing.get_args(Launch)
    ]
    assert sorted(kinds) == sorted(ENGINES)


@pytest.mark.parametrize("launch", typing.get_args(Launch), ids=lambda launch: launch.__name__)
def test_every_kind_of_launch_says_of_itself_what_is_asked(launch: type) -> None:
    for name in ("trains", "files", "gpus", "world_size", "timeout_s", "warm_start"):
        assert name in launch.model_fields or hasattr(launch, name), name


def test_nobody_else_asks_for_the_kind_of_launch() -> None:
    package = Path(carbonopt.__file__).parent
    asking = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                named = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                if named & {"LocalLaunch", "ReplayLaunch"}:
                    asking.add(path.relative_to(package).parts[0])
    assert asking == {"engines"}


def test_a_replay_is_known_by_what_was_recorded() -> None:
    def of(energy_source: dict) -> StudyData:
        return study(
            provenance=study().provenance.model_copy(update={"energy_source": energy_source})
        )

    assert of({"gpu": "recorded"}).provenance.is_replay
    assert not of({"gpu": "measured", "cpu": "modelled"}).provenance.is_replay
    assert not of({}).provenance.is_replay


def test_a_replay_takes_a_range_of_one_value_for_a_choice(replay_study: dict) -> None:
    space = replay_study["search"]["space"]
    epochs = space["epochs"]["choices"]
    space["epochs"] = {"low": epochs[0], "high": epochs[0]}
    searched = check(parse_study(replay_study, "here")).space
    assert len(searched.combinations) == 9
    space["epochs"] = {"low": epochs[0], "high": epochs[-1]}
    with pytest.raises(BadInput, match=r"search\.space\.epochs: a replay needs choices"):
        check(parse_study(replay_study, "here"))


# -----------------------------------------------------------------------------------------------------
# several nodes


def advanced(**phases: tuple[float, float]) -> ReplayMeter:
    """A meter that has read these energies in kWh and seconds."""
    meter = ReplayMeter()
    for phase, (energy_kwh, duration_s) in phases.items():
        meter.advance(Phase(phase), energy_kwh, duration_s)
    return meter


def test_energies_of_nodes_add_up_and_their_seconds_do_not() -> None:
    meter = NodeMeters(
        {HERE: advanced(train=(3.0, 10.0), eval=(1.0, 1.0)), THERE: advanced(train=(5.0, 9.0))},
        [1, 1],
    )
    meter.enter(Phase.GAP)
    running = meter.running(Phase.TRAIN)
    assert (running.total_kwh, running.duration_s) == (8.0, 10.0)
    assert meter.outer().total_kwh == 9.0
    taken = meter.take(Phase.TRAIN, Phase.EVAL, Phase.SETUP)
    assert {phase: reading.total_kwh for phase, reading in taken.items()} == {
        Phase.TRAIN: 8.0,
        Phase.EVAL: 1.0,
        Phase.SETUP: 0.0,
    }
    whole = taken[Phase.TRAIN] + taken[Phase.EVAL] + taken[Phase.SETUP]
    assert {node: part.total_kwh for node, part in whole.nodes.items()} == {HERE: 4.0, THERE: 5.0}
    assert whole.total_kwh == sum(part.total_kwh for part in whole.nodes.values())
    assert meter.running(Phase.TRAIN).total_kwh == 0.0, "taken on each node"


def test_what_is_modelled_on_one_node_is_not_measured_on_all() -> None:
    measured, modelled = ReplayMeter(), ReplayMeter()
    measured.energy_source = {"cpu": "measured", "gpu": "measured"}
    modelled.energy_source = {"cpu": "modelled", "gpu": "measured"}
    assert NodeMeters({HERE: measured, THERE: modelled}, [1, 1]).energy_source == {
        "cpu": "modelled",
        "gpu": "measured",
    }


def test_all_nodes_end_their_meters_though_one_cant() -> None:
    class Lost(ReplayMeter):
        def close(self) -> None:
            raise OSError("the node is gone")

    last = ReplayMeter()
    last.enter(Phase.TRAIN)
    with pytest.raises(OSError, match="the node is gone"):
        NodeMeters({HERE: last, THERE: Lost()}, [1, 1]).close()
    assert last.take(Phase.TRAIN)[Phase.TRAIN] == Reading(gpu_kwh=0.0), (
        "it is closed: nothing is open"
    )


def test_a_node_that_a_trial_leaves_idle_is_in_gap_meanwhile() -> None:
    here, there = ReplayMeter(), ReplayMeter()
    meter = NodeMeters({HERE: here, THERE: there}, [2, 2])
    meter.enter(Phase.SETUP)
    meter.use(2)
    assert (here._phase, there._phase) == (Phase.SETUP, Phase.GAP)
    meter.enter(Phase.TRAIN)
    assert (here._phase, there._phase) == (Phase.TRAIN, Phase.GAP)
    meter.enter(Phase.GAP)
    meter.enter(Phase.SETUP)
    meter.use(3)
    assert (here._phase, there._phase) == (Phase.SETUP, Phase.SETUP)
    meter.enter(Phase.EVAL)
    assert (here._phase, there._phase) == (Phase.EVAL, Phase.EVAL)


ROW = {
    "params": {"global_batch_size": 16, "learning_rate": 1e-3, "epochs": 1},
    "seed": 0,
    "total_steps": 100,
    "joules_per_step": 1.0,
    "seconds_per_step": 0.01,
    "joules_per_eval": 2.0,
    "evals": [{"step": 50, "nll": 2.5}, {"step": 100, "nll": 1.0}],
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": -5}, "seed: input should be greater than or equal to 0, but got -5"),
        ({"seed": 0}, "has the configuration and the seed of line 1; remove one of them"),
        (
            {"seed": 1, "joules_per_step": 0},
            "joules_per_step: input should be greater than 0, but got 0",
        ),
        (
            {"seed": 1, "joules_per_step": True},
            "joules_per_step: input should be a valid number, but got True",
        ),
        (
            {"seed": 1, "params": {**ROW["params"], "epochs": float("nan")}},
            "must be a finite number or a word",
        ),
        (
            {"seed": 1, "params": {**ROW["params"], "epochs": [1]}},
            "must be a finite number or a word, but got [1]",
        ),
        (
            {"seed": 1, "evals": [{"step": 100, "nll": "1"}]},
            "evals.0.nll: input should be a valid number, but got '1'",
        ),
        ({"seed": 1, "evals": [{"step": 100, "nll": -1.5}]}, "evals.0.nll: must be 0 or more"),
        ({"seed": 1, "evals": [{"step": 100, "nll": -math.inf}]}, "evals.0.nll"),
        ({"seed": 1, "evals": [{"step": 100, "nll": 1.0, "count": 10**400}]}, "evals.0.count"),
        (
            {"seed": 1, "evals": ROW["evals"][:1] * 2},
            "rising steps up to total_steps, 100, but have [50, 50]",
        ),
        ({"seed": 1, "params": {**ROW["params"], "epochs": 10**399}}, "400"),
        (
            {"seed": 1, "joule_per_step": 1.0},
            "unknown key joule_per_step; did you mean joules_per_step?",
        ),
    ],
)
def test_what_no_run_can_have_is_refused_with_its_line(
    change: dict, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "table.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n{json.dumps({**ROW, **change})}\n")
    with pytest.raises(BadInput) as refused:
        read_table(path, PERPLEXITY)
    assert f"line 2 of {path}" in str(refused.value)
    assert says in str(refused.value)


@pytest.mark.parametrize("nll", [math.nan, math.inf])
def test_a_recorded_run_that_diverged_has_no_finite_loss(nll: float, tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    path.write_text(json.dumps({**ROW, "evals": [ROW["evals"][0], {"step": 100, "nll": nll}]}))
    (run,) = read_table(path, PERPLEXITY)
    assert not math.isfinite(run.evals[-1].total)


@pytest.mark.parametrize("twice", ['"seed": 1', '"params": {"epochs": 1.0}', '"step": 100'])
def test_a_line_that_has_a_key_twice_is_refused(twice: str, tmp_path: Path) -> None:
    row = json.dumps({**ROW, "seed": 1})
    at = row.index(twice.split(":")[0])
    path = tmp_path / "table.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n{row[:at]}{twice}, {row[at:]}\n")
    with pytest.raises(BadInput, match=f"line 2 of {path}") as refused:
        read_table(path, PERPLEXITY)
    assert f"{twice.split(':')[0][1:-1]!r} twice" in str(refused.value)


@pytest.mark.parametrize(("one", "other"), [(1e-320, 1e300), (1e300, 1e-320), (10**290, 1e-300)])
def test_values_far_apart_have_a_distance(one: float, other: float) -> None:
    assert _apart(one, other) == pytest.approx(abs(math.log(one) - math.log(other)))
