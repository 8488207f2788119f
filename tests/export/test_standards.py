"""A study in the forms of others' standards: its figures agree in all of them, each form has what
its standard asks for, and nothing that is not known is stated.
"""

import csv
import hashlib
import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import absl.logging
import mlcroissant
import pandas
import pytest
import yaml
from analysis.test_pipeline import DPO, SFT, with_start
from boamps_schema import REGISTRY, SCHEMAS
from codecarbon.output_methods.emissions_data import EmissionsData
from codecarbon.output_methods.file import FileOutput
from commands import refusal, within
from huggingface_hub import ModelCard
from jsonschema import Draft4Validator
from replays import study_over
from report.test_pipeline_page import view_of
from small_studies import (
    REPLAY,
    beside,
    gpu_study,
    on_gpu,
    pruned,
    reward_study,
    rewarded,
    script_run,
    script_study,
    study,
    trial,
)
from test_frozen import study_data

from carbonopt.analysis.training_work import trained_tokens, training_work
from carbonopt.cli.export_command import FORMATS
from carbonopt.core.errors import BadInput
from carbonopt.core.trial import Attempt, NodeReadings, StopReason, TrialState
from carbonopt.export.emissions_csv import COLUMNS
from carbonopt.report.assemble import top
from carbonopt.report.data_files import data_files
from carbonopt.report.paper.paper_text import checklist
from carbonopt.report.standards import (
    STANDARDS,
    croissant_of,
    pipeline_text,
    standard_files,
    standard_text,
)
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import Hardware, SessionLedger, StudyData, Wait
from carbonopt.spec.trial_spec import Prepared
from carbonopt.study_file.reader import parse_study

# mlcroissant imports absl, whose log handler takes the standard error stream of that moment,
# pytest's capture. When logging is configured anew, as submitit does, the handler closes a stream
# that is not the process's own, and all later tests of this process would fail.
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__

EVIL = "=1+1 <b> 50 % _x_ | `y`"
PREPARED = Prepared(
    fingerprint="",
    train_examples=10,
    eval_examples=2,
    sequence_length=64,
    model_parameters=1_000_000,
    versions={},
)
EMBODIED = {"kg_co2e_per_gpu": 150, "lifetime_years": 4, "source": "a data sheet"}


def text(data: StudyData, form: str) -> str:
    return standard_text(StudyView(data), form)


def rows(data: StudyData) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text(data, "codecarbon"))))


def known(data: StudyData, form: str) -> dict:
    found = text(data, form)
    return json.loads(found.partition("```json\n")[2].removesuffix("```\n") or found)


def carbon(**more) -> dict:
    given = {"country": "USA", "intensity_g_co2e_per_kwh": 230, "pue": 1.1}
    return {"raw": {"carbon": {**given, **more}}}


def recorded_study(name: str) -> StudyData:
    """A study that an earlier carbonopt ran; it named a column that the data lacks."""
    data = study_data(name)
    raw = data.config.model_dump(mode="json")
    del raw["workload"]["dataset"]["text_column"]
    return data.model_copy(update={"config": StudyConfig(**raw), "ended": "all trials done"})


# ----------------------------------------------------------------------------------------------
# all forms


@pytest.mark.parametrize("name", ["demo", pytest.param("h200", marks=pytest.mark.slow)])
def test_energy_emissions_and_tokens_agree_in_all_forms_and_the_report(name):
    data = recorded_study(name)
    view = StudyView(data)
    report = json.loads(json.dumps(view.results()))
    kwh, kg = report["spent"]["energy_kwh"], report["spent"]["emissions_kg_co2e"]
    tokens = report["work"]["tokens"]
    assert (
        tokens > sum(record.evals[-1].tokens for record in data.records if record.evals) > 1e6 / 2
    )

    def same(found: float, expected: float) -> bool:
        return math.isclose(found, expected, rel_tol=1e-9)

    sci, annex, boamps = (known(data, form) for form in ("sci", "annex-xi", "boamps"))
    assert same(sci["energy_kwh"], kwh)
    assert same(sci["operational_g_co2e"], 1000 * kg)
    assert same(1000 * annex["whole_study"]["energy_mwh"], kwh)
    assert same(annex["whole_study"]["emissions_g_co2e"], 1000 * kg)
    assert same(boamps["measures"][0]["powerConsumption"], kwh)
    assert sci["training_tokens"] == annex["whole_study"]["training_tokens"] == tokens
    # codecarbon has the training windows
    table, pue = rows(data), data.config.carbon.pue
    trained = sum(float(row["energy_consumed"]) for row in table if row["energy_consumed"])
    assert same(trained / pue, report["spent"]["by_phase_kwh"]["train"])
    for row, record in zip(table, data.records, strict=True):
        if record.emissions_kg_co2e is not None:
            assert same(float(row["emissions"]), record.emissions_kg_co2e)
    run, recommended = annex["recommended_run"], report["recommendation"]
    assert same(1000 * run["energy_mwh"], recommended["energy_kwh"])
    assert same(run["emissions_g_co2e"], 1000 * recommended["emissions_kg_co2e"])
    flop = annex["whole_study"]["training_flop"]
    assert same(flop, 6 * data.prepared.model_parameters * tokens)


def test_every_format_of_the_command_is_a_standard_or_records():
    assert ("jsonl", "csv", *STANDARDS, "croissant") == FORMATS


@pytest.mark.parametrize("form", STANDARDS)
def test_a_running_study_is_a_draft_in_every_form(form):
    found = text(gpu_study(on_gpu(0), on_gpu(1), ended=None), form)
    assert "draft" in found.lower()
    assert "draft" not in text(gpu_study(on_gpu(0), on_gpu(1)), form).lower()


@pytest.mark.parametrize("form", STANDARDS)
def test_names_cannot_break_a_form(form):
    data = gpu_study(on_gpu(0), on_gpu(1), name=EVIL)
    found = text(data, form)
    if form == "codecarbon":
        assert [row["project_name"] for row in rows(data)] == [f"'{EVIL}"] * 2
    elif form in ("boamps", "sci"):
        assert EVIL in json.dumps(json.loads(found))
    elif form == "annex-xi":
        assert known(data, form)["study"] == EVIL
        assert "<b>" not in found.partition("```json")[0]
    else:
        assert ModelCard(found).data.eval_results[0].metric_type == "perplexity"
        assert "<b>" not in ModelCard(found).text


def test_a_replay_has_the_forms_that_need_no_hardware():
    replay = study(trial(0), raw=REPLAY).model_copy(
        update={
            "provenance": study(raw=REPLAY).provenance.model_copy(update={"hardware": None}),
        }
    )
    assert standard_files(StudyView(replay)).keys() == {"emissions.csv", "sci.json"}
    for form in ("boamps", "annex-xi"):
        with pytest.raises(BadInput, match="hardware"):
            text(replay, form)
    assert "tracking_mode" in rows(replay)[0] and rows(replay)[0]["tracking_mode"] == ""


def test_forms_of_the_whole_study_need_no_trial_that_met_the_target():
    missed = gpu_study(pruned(0))
    of_the_study = {"emissions.csv", "boamps.json", "sci.json"}
    assert standard_files(StudyView(missed)).keys() == of_the_study
    assert known(missed, "sci")["energy_kwh"] == missed.spent_kwh()
    assert known(missed, "boamps")["measures"][0]["powerConsumption"] == missed.spent_kwh()
    assert "measuredAccuracy" not in known(missed, "boamps")["task"]
    assert standard_files(StudyView(gpu_study(on_gpu(0)))).keys() == {
        *("emissions.csv", "boamps.json", "sci.json", "annex-xi.md", "annex-xi.json")
    }


def test_a_pipeline_has_a_report_for_each_step_and_the_sum():
    view = view_of(sft=SFT, dpo=DPO)
    spent_kwh = SFT.spent_kwh() + DPO.spent_kwh()
    for form in ("sci", "boamps"):
        found = json.loads(pipeline_text(view, form))
        assert found["steps"] == {"sft": known(SFT, form), "dpo": known(DPO, form)}
        assert found["sum"]["energy_kwh"] == pytest.approx(
            spent_kwh + view.summary.between_kwh, rel=1e-12
        )
    annex = pipeline_text(view, "annex-xi")
    assert annex.startswith(text(SFT, "annex-xi")) and text(DPO, "annex-xi") in annex
    table = list(csv.DictReader(io.StringIO(pipeline_text(view, "codecarbon"))))
    assert table == rows(SFT) + rows(DPO)
    with pytest.raises(BadInput, match="sft, dpo"):
        pipeline_text(view, "model-card")
    missed = view_of(sft=SFT, dpo=with_start(trial(0, perplexity=9.0)))
    assert json.loads(pipeline_text(missed, "sci"))["steps"].keys() == {"sft", "dpo"}


def test_only_a_pipeline_that_goes_on_is_a_draft():
    missed = with_start(trial(0, perplexity=9.0))
    for studies, status in (({"sft": missed}, "final"), ({"sft": SFT}, "draft")):
        view = view_of(**studies)
        assert json.loads(pipeline_text(view, "sci"))["status"] == status
        table = csv.DictReader(io.StringIO(pipeline_text(view, "codecarbon")))
        assert {row["project_name"].endswith("(draft)") for row in table} == {status == "draft"}


def test_a_replay_is_marked_in_every_form_that_it_has(finished_study):
    def exported(form: str) -> str:
        return within("export", finished_study, "--format", form).stdout

    table = list(csv.DictReader(io.StringIO(exported("codecarbon"))))
    assert {(row["timestamp"], "(replay)" in row["project_name"]) for row in table} == {("", True)}
    assert "recorded runs" in json.loads(exported("sci"))["boundary"]
    assert "recorded runs" in exported("model-card")
    trained = gpu_study(on_gpu(0))
    assert "recorded runs" not in known(trained, "sci")["boundary"]
    assert not any("(replay)" in row["project_name"] for row in rows(trained))


def test_the_command_prints_a_form_or_says_why_not(finished_study):
    table = within("export", finished_study, "--format", "codecarbon")
    assert table.returncode == 0 and table.stdout.startswith("timestamp,project_name,")
    assert json.loads(within("export", finished_study, "--format", "sci").stdout)["energy_kwh"] > 0
    assert "co2_eq_emissions" in within("export", finished_study, "--format", "model-card").stdout
    assert "hardware" in refusal("export", finished_study, "--format", "annex-xi")
    assert "codecarbon" in refusal("export", finished_study, "--format", "codecarbn")


def test_nothing_recommended_ends_with_exit_code_3(tmp_path, table, write_study):
    raw = {**study_over(table), "target": {"perplexity": 1.5}, "budget": {"trials": 2}}
    assert within("run", write_study(raw), "--out", tmp_path / "out").returncode == 3
    done = within("export", tmp_path / "out", "--format", "model-card")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    for form in ("codecarbon", "sci"):
        assert within("export", tmp_path / "out", "--format", form).returncode == 0


# ----------------------------------------------------------------------------------------------
# the work of a study


def test_tokens_of_steps_after_the_last_evaluation_count():
    data = gpu_study(on_gpu(0, steps_done=25), on_gpu(1))  # 100 tokens at step 10
    assert [trained_tokens(data, record) for record in data.records] == [250, 100]
    # before the first evaluation: by the length of the sequences
    early = on_gpu(2, evals=(), steps_done=4)
    assert trained_tokens(gpu_study(early), early) is None
    known_length = gpu_study(early, prepared=PREPARED)
    assert trained_tokens(known_length, early) == 4 * 16 * 64
    assert trained_tokens(known_length, on_gpu(3, evals=())) == 0


def test_flop_are_not_stated_where_the_formula_does_not_hold():
    data = gpu_study(on_gpu(0), prepared=PREPARED)
    assert training_work(data).flop == 6 * 1e6 * 100
    adapters = on_gpu(0, params={"lora_rank": 8})
    assert training_work(gpu_study(adapters, prepared=PREPARED)).flop is None
    assert training_work(reward_study(rewarded(0, (0.6, beside(None, 1.0))))).flop is None
    experts = PREPARED.model_copy(update={"has_experts": True})
    data = data.model_copy(update={"prepared": experts})
    assert training_work(data).flop is None
    annex = known(data, "annex-xi")
    assert annex["recommended_run"]["training_flop"] is None
    assert "experts" in annex["method"]


def test_devices_of_one_launch_count_once_and_those_of_other_launches_beside_them():
    started = gpu_study().sessions[0]

    def device_s(workers: tuple[str, ...], gpus: list[int], **launch) -> float | None:
        sessions = tuple(started.model_copy(update={"worker": worker}) for worker in workers)
        raw = {"launch": {"kind": "local", "gpus": gpus, **launch}}
        data = gpu_study(on_gpu(0), sessions=sessions, raw=raw)
        # The engine of the study's first worker describes its own slot.
        slot = ("a GPU",) * len(data.config.launch.of_slot(0).gpus)
        hardware = data.provenance.hardware.model_copy(update={"gpus": slot})
        provenance = data.provenance.model_copy(update={"hardware": hardware})
        return training_work(data.model_copy(update={"provenance": provenance})).device_s

    side_by_side = {"gpus": [0, 1], "gpus_per_trial": 1}
    assert device_s(("a-1-x", "a-2-y"), **side_by_side) == 2 * 70
    assert device_s(("a-1-x", "b-2-y"), **side_by_side) == 2 * 2 * 70
    assert device_s(("a-1-x", "a-2-y"), [0]) == 2 * 70
    assert device_s(("a-1-x",), [0, 1, 2, 3], gpus_per_trial=2) == 4 * 70


@pytest.mark.parametrize(
    ("launch", "gpus", "machines"),
    [
        ({"kind": "local", "gpus": [0, 1], "gpus_per_trial": 1}, 1, 1),
        ({"kind": "local", "gpus": [], "workers": 2}, 0, 1),
        ({"kind": "slurm", "nodes": 2, "nodes_per_trial": 1, "gpus_per_node": 0}, 0, 2),
        (
            {
                "kind": "slurm",
                "nodes": 2,
                "nodes_per_trial": 1,
                "gpus_per_node": 4,
                "gpus_per_trial": 2,
            },
            2,
            2,
        ),
    ],
)
def test_a_study_has_the_devices_of_all_trials_side_by_side(launch, gpus: int, machines: int):
    """The stored hardware is that of one trial."""
    data = gpu_study(on_gpu(0), raw={"launch": launch})
    hardware = data.provenance.hardware.model_copy(update={"gpus": ("a GPU",) * gpus})
    provenance = data.provenance.model_copy(update={"hardware": hardware})
    work = training_work(data.model_copy(update={"provenance": provenance}))
    slots = data.config.launch.slots
    assert slots > 1
    assert (work.gpus, work.machines) == (("a GPU",) * gpus * slots, machines)


def test_devices_that_wait_for_the_hours_of_a_schedule_are_the_studys():
    began = "2026-01-01T00:00:00Z"
    wait = Wait(started_at=began, duration_s=3600, energy_kwh=0.1, expected_saving=0.3)
    session = SessionLedger(started_at=began, duration_s=3670, gap_kwh=0.1, waits=(wait,))
    data = gpu_study(on_gpu(0), sessions=(session,), **carbon(embodied=EMBODIED))
    work = training_work(data)
    assert (work.wall_clock_s, work.device_s) == (70, 3670)
    assert (work.waited_s, work.elapsed_s) == (3600, 3670)
    whole = known(data, "annex-xi")["whole_study"]
    assert whole["hardware_days"] - whole["wall_clock_days"] == pytest.approx(3600 / 86400)
    assert whole["waiting_days"] == pytest.approx(3600 / 86400)
    view = StudyView(data)
    paper = checklist(view, top(view))
    assert all(time in paper for time in ("1 h 00 min", "1 min 10 s", "1 h 01 min"))
    assert known(data, "sci")["embodied"]["gpu_s"] == 3670
    # Its energy includes that of the wait, so its duration does.
    assert known(data, "boamps")["measures"][0]["measurementDuration"] == 3670


def test_tokens_and_counts_of_trials_and_probes_are_told_apart():
    probe = on_gpu(0, state=TrialState.PRUNED, stop_reason=StopReason.PROBE)
    data = gpu_study(on_gpu(0), on_gpu(1), probes=(probe,))
    assert known(data, "sci")["training_tokens"] == 300
    assert known(data, "sci")["training_tokens_of"] == {"trials": 200, "probes": 100}
    runs = "2 trials and 1 probe"
    assert runs in known(data, "boamps")["task"]["taskDescription"]
    assert runs in text(data, "model-card") and runs in checklist(
        StudyView(data), top(StudyView(data))
    )


# ----------------------------------------------------------------------------------------------
# codecarbon


def test_codecarbon_takes_the_table_for_its_own(tmp_path):
    (tmp_path / "emissions.csv").write_text(text(gpu_study(on_gpu(0)), "codecarbon"))
    output = FileOutput("emissions.csv", str(tmp_path))
    empty = EmissionsData(**dict.fromkeys(EmissionsData.__dataclass_fields__, 0))  # type: ignore[arg-type]
    assert output.has_valid_headers(empty)
    assert list(COLUMNS) == list(empty.values)
    output.out(empty, None)  # it appends to it
    assert len(pandas.read_csv(tmp_path / "emissions.csv")) == 2


def test_energies_and_powers_include_the_pue():
    node = {"name": "n", "devices": ("GPU-1", "GPU-2"), "readings": on_gpu(0).energy_kwh}
    ran = {"nodes": (NodeReadings(**node),), "started_at": "2026-01-01T01:00:00.5+01:00"}
    record = on_gpu(0, **ran, params={"world_size": 2})
    (row,) = rows(gpu_study(record))
    energy = float(row["energy_consumed"])
    assert energy == pytest.approx(1.1 * record.energy_kwh.train, rel=1e-12)
    assert float(row["emissions"]) / energy == pytest.approx(0.23, rel=1e-12)
    parts = [float(row[f"{part}_energy"]) for part in ("gpu", "cpu", "ram")]
    assert sum(parts) == pytest.approx(energy, rel=1e-12)
    assert float(row["gpu_power"]) == pytest.approx(1.1 * 10e3 / 30)  # 10 kJ in 30 s
    assert float(row["emissions_rate"]) == pytest.approx(float(row["emissions"]) / 30)
    assert (row["gpu_count"], row["gpu_model"]) == ("2", "2 x a GPU")
    (alone,) = rows(gpu_study(on_gpu(0, **ran)))  # it leaves the other GPU idle
    assert (alone["gpu_count"], alone["gpu_model"]) == ("1", "1 x a GPU")
    assert (row["timestamp"], row["pue"]) == ("2026-01-01T00:00:00", "1.1")
    assert len({row["run_id"] for row in rows(gpu_study(on_gpu(0), on_gpu(1)))}) == 2


def test_a_row_begins_where_its_duration_does():
    """The duration of a trial that went on from a checkpoint is that of both attempts."""
    first, lost, last = (f"2026-01-01T0{hour}:00:00+00:00" for hour in (1, 2, 3))
    attempts = (Attempt(started_at=first, counted_s=20.0), Attempt(started_at=lost))
    went_on = {"continued_at_steps": (7,), "earlier_attempts": attempts, "started_at": last}
    (row,) = rows(gpu_study(on_gpu(0, **went_on)))
    assert row["timestamp"] == "2026-01-01T01:00:00"
    again = {"earlier_attempts": (Attempt(started_at=first),), "started_at": last}
    (row,) = rows(gpu_study(on_gpu(0, **again)))
    assert row["timestamp"] == "2026-01-01T03:00:00", "all of the first attempt was done again"


def test_what_is_not_known_is_empty():
    unmeasured = trial(0, energy_kwh=None, emissions_kg_co2e=None, duration_s=None)
    (row,) = rows(study(unmeasured))
    for name in ("energy_consumed", "emissions", "duration", "gpu_energy", "water_consumed", "wue"):
        assert row[name] == ""
    assert row["on_cloud"] == row["os"] == row["gpu_count"] == row["country_name"] == ""
    gpus_alone = rows(gpu_study(on_gpu(0), **carbon(objective="gpu")))[0]
    assert gpus_alone["cpu_energy"] == "" and gpus_alone["gpu_energy"] != ""


# ----------------------------------------------------------------------------------------------
# sci


def test_a_script_has_no_functional_unit_and_the_file_says_why():
    found = known(script_study(script_run(0, 30.0), script_run(1, 31.0)), "sci")
    assert found["functional_unit"] is None
    assert "tokens" in found["why_no_functional_unit"]
    assert "why_no_functional_unit" not in known(gpu_study(on_gpu(0)), "sci")


def test_without_embodied_emissions_there_is_no_score():
    found = known(gpu_study(on_gpu(0)), "sci")
    assert found["scope"].startswith("operational only")
    assert not [key for key in found if key.startswith("sci_") or "embodied" in key]


def test_the_score_is_operational_and_embodied_emissions_over_the_unit():
    data = gpu_study(on_gpu(0), pruned(1), **carbon(embodied=EMBODIED))
    found = known(data, "sci")
    embodied_g = 150e3 * 70 / (4 * 365.25 * 86400)  # one GPU for 70 s of four years
    assert found["embodied_g_co2e"] == pytest.approx(embodied_g, rel=1e-12)
    assert found["energy_kwh"] == data.spent_kwh() > data.records[0].energy_kwh.total
    assert "sci_g_co2e_per_training_token" not in found  # the pruned trial's are not known
    by_token = known(gpu_study(on_gpu(0), on_gpu(1), **carbon(embodied=EMBODIED)), "sci")
    assert by_token["functional_unit"]["unit"] == "training token"
    assert by_token["sci_g_co2e_per_training_token"] == pytest.approx(
        (by_token["operational_g_co2e"] + embodied_g) / 200, rel=1e-12
    )


@pytest.mark.parametrize("form", ["sci", "annex-xi", "boamps"])
def test_a_total_names_the_trials_that_it_lacks(form: str):
    lost = on_gpu(7, energy_kwh=None, emissions_kg_co2e=None, state=TrialState.FAILED)
    said = "not known and not counted: trials 7"
    assert said in text(gpu_study(on_gpu(0), lost, prepared=PREPARED), form)
    assert said not in text(gpu_study(on_gpu(0), prepared=PREPARED), form)


def test_tokens_of_runs_whose_energy_is_lost_make_no_score_lower():
    lost = on_gpu(1, energy_kwh=None, emissions_kg_co2e=None, state=TrialState.FAILED)
    found = known(gpu_study(on_gpu(0), lost, **carbon(embodied=EMBODIED)), "sci")
    assert (found["training_tokens"], found["functional_unit"]["amount"]) == (200, 100)
    assert "known energy" in found["functional_unit"]["why"]
    terms = found["operational_g_co2e"] + found["embodied_g_co2e"]
    assert found["sci_g_co2e_per_training_token"] == pytest.approx(terms / 100, rel=1e-12)


def test_the_unit_is_a_parameter_where_tokens_are_not_known():
    data = gpu_study(on_gpu(0), pruned(1), prepared=PREPARED, **carbon(embodied=EMBODIED))
    found = known(data, "sci")  # the pruned trial's tokens are not known
    assert found["training_tokens"] is None
    terms = found["operational_g_co2e"] + found["embodied_g_co2e"]
    assert found["sci_g_co2e_per_parameter"] == pytest.approx(terms / 1e6, rel=1e-12)
    nothing = known(gpu_study(on_gpu(0), pruned(1), **carbon(embodied=EMBODIED)), "sci")
    assert nothing["functional_unit"] is None and "no score" in nothing["scope"]


def test_embodied_emissions_of_gpus_are_not_those_of_a_cpu():
    hardware = Hardware(cpu="a CPU", cpu_cores=8, ram_gib=64)
    data = study(trial(0), **carbon(embodied=EMBODIED))
    provenance = data.provenance.model_copy(update={"hardware": hardware})
    found = known(data.model_copy(update={"provenance": provenance}), "sci")
    assert found["scope"].startswith("operational only")


def test_embodied_emissions_may_be_added_to_a_study_that_has_ended(finished):
    file = finished.parent / "study.yaml"
    raw = yaml.safe_load(file.read_text())
    raw["carbon"]["embodied"] = EMBODIED
    file.write_text(yaml.safe_dump(raw))
    again = within("run", file, "--out", finished)
    assert again.returncode == 0, again.stderr
    found = json.loads(within("export", finished, "--format", "sci").stdout)
    assert "no GPU of this study is known" in found["scope"]  # of a replay, none is


@pytest.mark.parametrize(
    "embodied", [{}, {**EMBODIED, "source": ""}, {**EMBODIED, "lifetime_years": 0}]
)
def test_embodied_emissions_need_figures_and_their_source(embodied):
    raw = study(trial(0)).config.model_dump(mode="json", exclude_none=True)
    raw["carbon"]["embodied"] = embodied
    with pytest.raises(BadInput, match=r"carbon\.embodied"):
        parse_study(raw, "test")


# ----------------------------------------------------------------------------------------------
# annex-xi


def test_the_annex_has_two_digits_or_more_and_claims_no_compliance():
    found = text(gpu_study(on_gpu(0, 1.23456e4), on_gpu(1, 2e4)), "annex-xi")
    assert found.startswith("# Figures for Annex XI")
    assert "| Training energy (MWh) | 3.707e-06 |" in found
    assert not re.search("complian|complies|conform", found, re.IGNORECASE)
    method = known(gpu_study(on_gpu(0)), "annex-xi")["method"]
    assert 80 <= len(method.split()) <= 160


def test_a_run_on_two_gpus_takes_two_hardware_days_a_day():
    two = on_gpu(0, params={"world_size": 2})
    run = known(gpu_study(two, on_gpu(1, 2e4)), "annex-xi")["recommended_run"]
    assert run["wall_clock_days"] == pytest.approx(30 / 86400)
    assert run["hardware_days"] == pytest.approx(2 * 30 / 86400)


# ----------------------------------------------------------------------------------------------
# boamps


def test_a_boamps_report_keeps_to_the_schema_and_has_no_other_key():
    validator = Draft4Validator(SCHEMAS["report"], registry=REGISTRY)
    versions = {"torch": "2.13.0", "python": "3.11.7"}
    data = gpu_study(on_gpu(0), on_gpu(1), prepared=PREPARED, **carbon(region="california"))
    provenance = data.provenance.model_copy(update={"versions": versions})
    found = known(data.model_copy(update={"provenance": provenance}), "boamps")
    assert [error.message for error in validator.iter_errors(found)] == []
    assert not list(validator.iter_errors(known(gpu_study(on_gpu(0), ended=None), "boamps")))
    assert list(validator.iter_errors({**found, "misspelt": 1}))  # the check can fail
    assert list(validator.iter_errors({**found, "measures": [{"powerConsumption": 1}]}))
    assert found["task"]["algorithms"][0]["parametersNumber"] == 1e-3  # billions
    # 100 W for five windows of a second
    assert found["measures"][0]["powerCalibrationMeasurement"] == pytest.approx(500 / 3.6e6)
    assert found["software"] == {"language": "python", "version": "3.11.7"}
    assert found["environment"]["country"] == "USA"


def test_a_perplexity_is_no_accuracy():
    assert "measuredAccuracy" not in known(gpu_study(on_gpu(0, perplexity=1.0)), "boamps")["task"]


def test_a_scripts_task_is_not_known_to_boamps():
    with pytest.raises(BadInput, match="script"):
        text(script_study(script_run(0, 30.0), script_run(1, 31.0)), "boamps")


# ----------------------------------------------------------------------------------------------
# model card


def test_a_card_alone_names_no_files_beside_it():
    found = text(gpu_study(on_gpu(0), on_gpu(1)), "model-card")
    assert "run.sh" not in found and "Training it again" not in found
    assert ModelCard(found).data.co2_eq_emissions["emissions"] == 0.773


# ----------------------------------------------------------------------------------------------
# croissant

ASKED = {
    "--license": "https://creativecommons.org/licenses/by/4.0/",
    "--url": "https://example.org/study",
    "--creator": "A. Person",
}


def publication(**changes: str) -> dict[str, str]:
    given = {option.removeprefix("--"): value for option, value in ASKED.items()}
    return {**given, **changes}


def test_croissants_own_reader_reads_every_record_of_the_tables(tmp_path):
    data = gpu_study(on_gpu(0), on_gpu(1), pruned(2), name=EVIL)
    described = json.loads(croissant_of(StudyView(data), publication()))
    for key in ("@context", "@type", "conformsTo", "description", "license", "name", "url"):
        assert described[key]
    assert described["conformsTo"] == "http://mlcommons.org/croissant/1.1"
    assert described["creator"] == {"@type": "Person", "name": "A. Person"}
    assert described["datePublished"] == "2026-01-01"
    tables = data_files(data.records)
    for file in described["distribution"]:
        content = tables[file["contentUrl"]]
        assert file["sha256"] == hashlib.sha256(content).hexdigest()
        (tmp_path / file["contentUrl"]).write_bytes(content)
    (tmp_path / "croissant.json").write_text(json.dumps(described))
    dataset = mlcroissant.Dataset(tmp_path / "croissant.json")
    assert dataset.metadata.issues.errors == set() and dataset.metadata.name == EVIL
    trials, points = (list(dataset.records(name)) for name in ("trials", "evaluations"))
    kwh = [record.energy_kwh.train for record in data.records]
    assert [row["trials/energy_kwh.train"] for row in trials] == pytest.approx(kwh, rel=1e-12)
    assert [row["trials/state"] for row in trials] == [b"complete", b"complete", b"pruned"]
    assert [row["evaluations/step"] for row in points] == [10, 10, 10]


def test_a_reader_refuses_tables_that_were_changed(tmp_path):
    data = gpu_study(on_gpu(0))
    (tmp_path / "croissant.json").write_text(croissant_of(StudyView(data), publication()))
    for name, content in data_files(data.records).items():
        (tmp_path / name).write_bytes(content + b"0\n")
    with pytest.raises(mlcroissant.GenerationError, match=r"trials\.csv") as refused:
        list(mlcroissant.Dataset(tmp_path / "croissant.json").records("trials"))
    assert "hash" in str(refused.value.__cause__).lower()


def test_a_draft_and_an_organization_are_described_as_such():
    data = gpu_study(on_gpu(0), ended=None)
    found = croissant_of(StudyView(data), publication(creator="Organization: A <b> lab"))
    described = json.loads(found)
    assert described["creator"] == {"@type": "Organization", "name": "A <b> lab"}
    assert described["description"].startswith("A draft")
    assert described["creativeWorkStatus"] == "Draft"


def test_croissant_asks_for_what_only_the_author_knows(finished_study):
    def arguments(**changes: str | None) -> list[str]:
        asked = {**ASKED, **{f"--{name}": value for name, value in changes.items()}}
        return [word for item in asked.items() if item[1] is not None for word in item]

    command = ("export", finished_study, "--format", "croissant")
    described = json.loads(within(*command, *arguments()).stdout)
    report = finished_study / "report" / "data"
    for file in described["distribution"]:
        content = (report / file["contentUrl"]).read_bytes()
        assert file["sha256"] == hashlib.sha256(content).hexdigest()
    for name in ("license", "url", "creator"):
        assert f"--{name} is None" in refusal(*command, *arguments(**{name: None}))
        assert f"--{name} is ' '" in refusal(*command, *arguments(**{name: " "}))
    assert "'example.org'" in refusal(*command, *arguments(url="example.org"))
    assert "--creator is" in refusal(*command, *arguments(creator="a\nb"))
    assert "Organization:" in refusal(*command, *arguments(creator="Organization: "))
    for url in ("http://x/ y", "https://", "https://u:secretpw@x.org/", "javascript:alert(1)"):
        refused = refusal(*command, *arguments(url=url))
        assert "--url must be" in refused and "secretpw" not in refused
    assert "--license" in refusal("export", finished_study, "--license", "MIT")


# ----------------------------------------------------------------------------------------------
# the page of documentation


def example(form: str) -> str:
    """The last block of code of the form's section in docs/exports.md."""
    page = (Path(__file__).parents[2] / "docs" / "exports.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {form}\n")[2].partition("\n## ")[0]
    return section.split("```")[-2].partition("\n")[2]


def is_part(part: Any, whole: Any) -> bool:
    if isinstance(part, dict):
        return all(key in whole and is_part(value, whole[key]) for key, value in part.items())
    if isinstance(part, list):
        return len(part) == len(whole) and all(map(is_part, part, whole))
    return part == whole


@pytest.mark.parametrize("form", [*STANDARDS, "croissant"])
def test_the_examples_of_the_page_are_parts_of_a_studys_exports(form):
    data, shown = recorded_study("h200"), example(form)
    if form == "codecarbon":
        for row, found in zip(csv.DictReader(io.StringIO(shown)), rows(data), strict=False):
            assert is_part(row, found)
    elif form in ("sci", "boamps"):
        assert is_part(json.loads(shown), known(data, form))
    elif form == "annex-xi":
        assert shown in text(data, form)
    elif form == "croissant":
        assert is_part(json.loads(shown), json.loads(croissant_of(StudyView(data), publication())))
    else:
        metadata = yaml.safe_load(text(data, form).split("---\n")[1])
        assert is_part(yaml.safe_load(shown), metadata)
    assert len(shown.splitlines()) > 2
