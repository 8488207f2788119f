"""The commands, as a user types them: arguments, outputs, exit codes, one clear sentence for bad
input.
"""

import csv
import io
import json
import math
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
import yaml
from commands import carbonopt, refusal, within
from replays import study_over
from small_studies import study, trial

from carbonopt.cli.answers import print_recommendation
from carbonopt.core.trial import TrialRecord
from carbonopt.doctor import host_checks
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect, storage_url
from carbonopt.study_file.reader import load_study


def test_run_reports_and_recommends(finished: Path, write_study) -> None:
    assert (finished / "report" / "index.html").exists()
    before = within("export", finished).stdout.splitlines()
    assert 0 < len(before) <= 12
    again = within("run", finished.parent / "study.yaml", "--out", finished)
    assert again.returncode == 0
    assert "Recommended" in again.stdout and " CO2e at the target quality" in again.stdout
    assert within("export", finished).stdout.splitlines() == before  # nothing is run twice


def test_the_recommendation_has_the_contracts_keys(finished_study: Path) -> None:
    answer = json.loads(within("recommend", finished_study, "--json").stdout)
    assert set(answer) == {
        "target", "met", "trial", "params", "quality", "emissions_kg_co2e",
        "energy_kwh", "baseline", "saving_fraction", "saving_interval", "pareto_front", "study", "confidence",
        "ties", "failed_replicates", "rejected", "caveats",
    }  # fmt: skip
    assert set(answer["study"]) == {
        "trials", "energy_kwh", "emissions_kg_co2e", "break_even_runs", "break_even_interval",
    }  # fmt: skip
    assert answer["met"] is True
    assert answer["target"].keys() == {"quality", "at_most"}
    assert answer["quality"]["name"] == answer["target"]["quality"] == "perplexity"
    assert answer["quality"]["value"] <= answer["target"]["at_most"]
    # emissions = energy × 500 g/kWh × PUE 1.2
    assert answer["emissions_kg_co2e"] == pytest.approx(answer["energy_kwh"] * 0.5 * 1.2)


def test_another_target_needs_no_new_trial(finished_study: Path) -> None:
    records = [json.loads(line) for line in within("export", finished_study).stdout.splitlines()]
    reached = [record["quality"]["value"] for record in records]
    best = min(value for value in reached if value is not None)
    met = within("recommend", finished_study, "--target", best, "--json")
    assert (met.returncode, json.loads(met.stdout)["quality"]["value"]) == (0, best)
    missed = within("recommend", finished_study, "--target", best * 0.999, "--json")
    assert missed.returncode == 3
    answer = json.loads(missed.stdout)
    assert (answer["met"], answer["trial"], answer["closest"]["value"]) == (False, None, best)


def test_at_another_target_it_says_for_which_one_the_study_ended(capsys) -> None:
    data = study(trial(0)).model_copy(update={"ended": "all trials done"})
    for target, said in (
        (7.0, "The study, whose own target is 6, ended: all"),
        (6.0, "The study ended: all"),
    ):
        assert print_recommendation(data, target)
        assert f"  {said} trials done." in capsys.readouterr().out


def test_a_recommendation_by_modelled_energy_says_so(finished_study: Path, capsys) -> None:
    known = study().provenance.model_copy(
        update={"energy_source": {"cpu": "modelled", "ram": "modelled"}}
    )
    assert print_recommendation(study(trial(0), provenance=known))
    assert "Modelled, not measured: the energy of CPU and RAM" in capsys.readouterr().out
    assert "Modelled" not in within("recommend", finished_study).stdout
    print_recommendation(study(trial(0)))  # on a GPU
    assert "Modelled" not in capsys.readouterr().out


def test_records_have_the_contracts_fields(finished_study: Path) -> None:
    records = [
        json.loads(line)
        for line in within("export", finished_study, "--format", "jsonl").stdout.splitlines()
    ]
    assert [record["trial"] for record in records] == list(range(len(records)))
    for record in records:
        assert record["quality"].keys() == {"name", "value", "sum", "count"}
        assert record["quality"]["name"] == "perplexity"
        for point in record["evals"]:
            assert point["value"] == pytest.approx(math.exp(point["sum"] / point["count"]))
        assert {
            "trial", "state", "stop_reason", "attempt", "seed", "params", "quality", "emissions_kg_co2e",
            "energy_kwh", "duration_s", "evals", "peak_memory_gib", "failure",
        } <= set(record)  # fmt: skip
        assert {"train", "setup", "eval", "total", "train_gpu", "train_cpu", "train_ram"} == set(
            record["energy_kwh"]
        )
        assert {
            "global_batch_size", "micro_batch_size_per_gpu", "gradient_accumulation_steps", "learning_rate", "epochs",
            "zero_stage", "offload", "world_size",
        } == set(record["params"])  # fmt: skip
        # A replay's table does not have these.
        assert record["energy_kwh"]["setup"] is None
        assert record["duration_s"]["setup"] is record["duration_s"]["eval"] is None
        energy_kwh = {**record["energy_kwh"], "setup": 0.0}
        duration_s = {**record["duration_s"], "setup": 0.0, "eval": 0.0}
        stored = {**record, "energy_kwh": energy_kwh, "duration_s": duration_s}
        assert TrialRecord.from_json(stored).as_json() == stored
        assert TrialRecord.from_json(stored).as_exported(is_replay=False) == stored
        assert TrialRecord.from_json(stored).as_exported(is_replay=True) == record
    states = {record["state"] for record in records}
    assert states <= {"complete", "pruned"}
    assert "complete" in states


def test_csv_has_one_row_a_trial(finished_study: Path) -> None:
    rows = list(
        csv.DictReader(io.StringIO(within("export", finished_study, "--format", "csv").stdout))
    )
    assert len(rows) == len(within("export", finished_study).stdout.splitlines())
    assert rows[0]["params.zero_stage"] == "1"
    assert float(rows[0]["energy_kwh.train"]) > 0


def test_a_report_can_be_written_elsewhere(finished_study: Path, tmp_path: Path) -> None:
    done = within("report", finished_study, "--out", tmp_path / "elsewhere")
    assert done.returncode == 0
    assert (tmp_path / "elsewhere" / "report.md").exists()


@pytest.mark.slow
def test_no_trial_meets_the_target(replay_study: dict, write_study, tmp_path: Path) -> None:
    replay_study["target"]["perplexity"] = 1.01
    done = within("run", write_study(replay_study), "--out", tmp_path / "out")
    assert done.returncode == 3
    assert "No trial reached the target, perplexity at most 1.010" in done.stdout


@pytest.mark.slow
def test_trials_and_seed_can_be_given(replay_study: dict, write_study, tmp_path: Path) -> None:
    replay_study["search"]["sampler"] = "random"
    study = write_study(replay_study)
    runs = {}
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        assert within("run", study, "--out", folder, "--trials", 5, "--seed", seed).returncode in (
            0,
            3,
        )
        runs[seed] = [
            json.loads(line)["params"] for line in within("export", folder).stdout.splitlines()
        ]
    assert len(runs[0]) == 5
    assert runs[0] != runs[1]


COUNTED = """
import atexit, gc
from carbonopt.cli.app import main
atexit.register(lambda: print(*(made["collections"] for made in gc.get_stats()[:2])))
main()
"""


def test_a_command_rarely_looks_for_garbage() -> None:
    """Its imports make some, and leave hundreds of thousands of objects to look at."""
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, "schema"], capture_output=True, text=True, check=True
    )
    youngest, older = map(int, done.stdout.splitlines()[-1].split())
    assert youngest < 120 and older <= 12  # 46 and 4; by Python's own thresholds 271 and 24


def test_check_says_what_will_be_done(tiny_study: dict, write_study) -> None:
    done = within("check", write_study(tiny_study))
    assert done.returncode == 0
    for words in ("perplexity at most 200", "64, 128", "3 trials", "CPU", "500 g CO2e/kWh"):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("budget", "objective", "most", "also"),
    [
        ({"hours": 2}, "all", "1.4 kWh in GPUs", True),  # of 700 W; the CPU counts, too
        ({"hours": 2}, "gpu", "1.4 kWh in GPUs", False),
        ({"hours": 2, "energy_kwh": 1}, "all", "1 kWh", False),
        ({"emissions_kg_co2e": 1}, "all", "2 kWh", False),
    ],
)
@pytest.mark.slow
def test_check_says_what_its_most_energy_leaves_out(
    budget: dict, objective: str, most: str, also: bool, tiny_study: dict, write_study
) -> None:
    tiny_study |= {"budget": budget, "launch": {"gpus": [0]}}
    tiny_study["carbon"]["objective"] = objective
    lines = within("check", write_study(tiny_study)).stdout.splitlines()
    (costs,) = (line.split(maxsplit=1)[1] for line in lines if line.startswith("  costs"))
    assert costs.startswith(f"at most about {most}")
    assert ("CPU and the RAM" in costs) is also and ("GPUs" in costs) is ("GPUs" in most)


def test_check_says_what_a_script_is_run_with(
    tiny_study: dict, write_study, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import helper\nrows = open('rows.csv')\n")
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "rows.csv").write_text("1\n")
    command = "python train.py {width}"
    tiny_study["workload"] = {
        "task": "script",
        "command": command,
        "folder": str(tmp_path),
        "warm": True,
    }
    tiny_study["search"] = {"space": {"width": {"low": 16, "high": 128, "step": 16}}}
    lines = within("check", write_study(tiny_study)).stdout.splitlines()
    (workload,) = (line.split(maxsplit=1)[1] for line in lines if line.startswith("  workload"))
    assert command in workload and "warm" in workload and "evaluations" not in workload
    (reads,) = (line for line in lines if line.startswith("  reads"))
    assert reads.split(maxsplit=1)[1] == "train.py, helper.py, rows.csv"
    assert "workload.files" in "\n".join(lines)
    assert "width: 16 to 128, step 16" in "\n".join(lines)


def test_check_counts_configurations(replay_study: dict, write_study) -> None:
    space = replay_study["search"]["space"]
    for choices, words in (([32], "1 configuration that"), ([32, 64], "2 configurations that")):
        space |= {"global_batch_size": {"choices": choices}, "learning_rate": 1e-3, "epochs": 1}
        assert words in within("check", write_study(replay_study)).stdout


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("研究", "研究"),
        ("Étude n° 2", "Étude-n-2"),
        ("a/b", "a-b"),
        ("नमस्ते", "नमस्ते"),
        ("/..", "study"),
        ("木" * 90, "木" * 66),
    ],
)
def test_a_study_lives_in_a_folder_of_its_name(name: str, folder: str) -> None:
    assert StudyPaths.default(name).root == Path("runs") / folder


def test_check_refuses_no_schedule_of_a_study_that_has_begun(
    tiny_study: dict, write_study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`carbonopt run` goes on with it, and says why it does not wait."""
    monkeypatch.chdir(tmp_path)
    tiny_study["schedule"] = {
        "finish_by": "2026-01-01T09:00+00:00",
        "hours": ["18:00-09:00"],
        "time_zone": "UTC",
    }
    file = write_study(tiny_study)
    assert "schedule.finish_by" in refusal("check", file)
    paths = StudyPaths.default("tiny")
    paths.root.mkdir(parents=True)
    database = connect(storage_url(paths, None))
    StudyStorage.create(database, load_study(file), study().provenance)
    done = within("check", file)
    assert done.returncode == 0, done.stderr
    assert "has passed" in done.stdout


def test_check_shows_the_folder_and_no_terminal_sequences(replay_study: dict, write_study) -> None:
    replay_study["name"] = "good\u202ebad"
    done = within("check", write_study(replay_study))
    assert done.returncode == 0
    assert "\u202e" not in done.stdout
    assert "good\\u202ebad: the study file is valid" in done.stdout
    assert f"  folder      {Path('runs/good-bad')}, unless" in done.stdout


@pytest.mark.parametrize(
    ("option", "value"), [("--trials", "0"), ("--trials=x", "x"), ("--seed", "-4")]
)
def test_a_value_that_an_option_can_not_have_is_named(
    option: str, value: str, replay_study, write_study
) -> None:
    words = (option,) if "=" in option else (option, value)
    assert f"but got {value!r}" in refusal("run", write_study(replay_study), *words)


@pytest.mark.slow
def test_only_a_study_with_something_left_to_run_warns(finished: Path, monkeypatch) -> None:
    monkeypatch.setattr(host_checks, "_LOW_DISK_GIB", 1e9)
    again = ("run", finished.parent / "study.yaml", "--out", finished)
    done = within(*again)
    assert (done.returncode, done.stderr) == (0, "")
    more = within(*again, "--trials", 14)
    assert more.stderr.startswith("warning: disk for runs: ")


def test_a_study_killed_before_it_said_why_it_ended_says_so_later(finished: Path) -> None:
    with closing(sqlite3.connect(finished / "study.db")) as database, database:
        assert (
            database.execute("DELETE FROM study_user_attributes WHERE key = 'ended'").rowcount == 1
        )
    before = within("recommend", finished)
    assert before.returncode == 0
    assert (
        "The study has not ended: it was interrupted; the same `carbonopt run` goes on with it."
        in before.stdout
    )
    again = within("run", finished.parent / "study.yaml", "--out", finished)
    assert "The study ended: all 12 trials of the budget have been run." in again.stdout
    assert "has not ended" not in again.stdout


def test_one_trial_is_not_all_of_them(replay_study: dict, write_study, tmp_path: Path) -> None:
    done = within("run", write_study(replay_study), "--out", tmp_path / "out", "--trials", 1)
    assert "The study ended: the one trial of the budget has been run." in done.stdout


@pytest.mark.parametrize("target", ["0.5", "nan", "inf"])
def test_a_target_that_no_perplexity_can_be_is_refused(target: str, finished_study: Path) -> None:
    assert f"must be a perplexity from 1 to 1e+09, but is {target}" in refusal(
        "recommend", finished_study, "--target", target
    )


def test_help_and_refusals_take_little_more_than_what_reads_and_prints_them(
    tiny_study: dict, write_study
) -> None:
    """Their CPU time, a third of a second where nothing else runs, beside that of the libraries
    which they can't do without: other work on the same cores makes both longer.
    """

    def used_s(*command: object) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *map(str, command)], capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    tiny_study["target"]["perplexity"] = 0
    libraries = "import pydantic, typer.rich_utils, yaml; import rich.markdown"
    for arguments in (["--help"], ["run", write_study(tiny_study)]):
        times = [(used_s("-m", "carbonopt", *arguments), used_s("-c", libraries)) for _ in range(3)]
        assert min(own_s for own_s, _ in times) < 4 * min(theirs_s for _, theirs_s in times)


@pytest.mark.slow
def test_an_output_that_is_full_lacks_signs_or_is_closed(finished_study: Path) -> None:
    command = [sys.executable, "-m", "carbonopt", "recommend", str(finished_study)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert (
        done.stderr
        == "carbonopt: no space left for the output; make room and type the same command again.\n"
    )
    for name in ("recommend", "export"):
        words = ["sh", "-c", 'exec "$@" >&-', "sh", *command[:3], name, str(finished_study)]
        closed = subprocess.run(words, stderr=subprocess.PIPE, text=True)
        assert closed.returncode == 1 and "standard output must be open" in closed.stderr
    plain = carbonopt("doctor", "--nonsense→", PYTHONIOENCODING="ascii")
    assert plain.returncode == 2
    assert "--nonsense\\u2192" in plain.stderr


def _probes(doctor: int) -> list[psutil.Process]:
    probes = []
    for child in psutil.Process(doctor).children():
        with suppress(psutil.NoSuchProcess):  # nvidia-smi and the like come and go
            if "carbonopt.train.probe" in child.cmdline():
                probes.append(child)
    return probes


def test_ctrl_c_outside_a_study_ends_at_once_with_all_processes(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "carbonopt", "doctor"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as doctor:  # fmt: skip
        try:
            until = time.monotonic() + 60
            while not (probes := _probes(doctor.pid)):
                assert time.monotonic() < until
                time.sleep(0.05)
            time.sleep(0.5)
            doctor.send_signal(signal.SIGINT)
            _, errors = doctor.communicate(timeout=30)
        finally:
            doctor.kill()
    assert (doctor.returncode, errors) == (130, "carbonopt: interrupted.\n")
    _, left = psutil.wait_procs(
        probes, timeout=5
    )  # killed, but on a busy machine not gone in the same moment
    assert not left


# -----------------------------------------------------------------------------------------------------------
# bad input


def test_a_deleted_working_folder_gets_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            "sh",
            "-c",
            'rmdir "$PWD"; exec "$@"',
            "sh",
            sys.executable,
            "-m",
            "carbonopt",
            "check",
            "x.yaml",
        ],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert (
        done.stderr
        == "carbonopt: the working folder must exist, but it was deleted; change to another one: cd"
        " ~.\n"
    )


def test_a_folder_of_another_study_is_refused(finished: Path, write_study) -> None:
    before = within("export", finished).stdout
    other = yaml.safe_load((finished.parent / "study.yaml").read_text())
    other["target"]["perplexity"] = 5.5
    sentence = refusal("run", write_study(other, "other.yaml"), "--out", finished)
    assert "target.perplexity is 5.5" in sentence
    assert within("export", finished).stdout == before


def test_a_study_of_a_moved_project_is_told_to_move_it_back(finished: Path, write_study) -> None:
    study = yaml.safe_load((finished.parent / "study.yaml").read_text())
    moved = shutil.copy(study["launch"]["table"], finished.parent)
    study["launch"]["table"] = str(moved)
    sentence = refusal("run", write_study(study, "moved.yaml"), "--out", finished)
    assert "launch.table" in sentence and str(moved) in sentence
    assert "move it back" in sentence


def test_a_folder_with_other_files_is_refused(
    replay_study: dict, write_study, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    assert "holds other files" in refusal("run", write_study(replay_study), "--out", folder)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_a_worker_leaves_nothing_in_a_folder_with_other_files(
    replay_study: dict, write_study, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    study = write_study(replay_study)
    assert "holds other files" in refusal("run", study, "--out", folder, "--worker")
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_the_root_folder_is_refused_as_others_are(replay_study: dict, write_study) -> None:
    assert "/ holds other files" in refusal("run", write_study(replay_study), "--out", "/")


@pytest.mark.parametrize("inside", ["study", "deep/study"])
def test_a_file_on_the_way_to_a_folder_is_named(
    inside: str, replay_study: dict, write_study, tmp_path: Path
) -> None:
    (tmp_path / "notes").write_text("x")
    said = refusal("run", write_study(replay_study), "--out", tmp_path / "notes" / inside)
    assert f"{tmp_path / 'notes'} has to be a folder, but is a file" in said
    assert (tmp_path / "notes").read_text() == "x"


def test_an_unreachable_storage_is_refused_without_its_password(
    replay_study: dict, write_study, tmp_path: Path
) -> None:
    study = write_study(replay_study)
    url = f"sqlite:///{tmp_path}/no/such/folder/x.db"
    assert "can't be opened" in refusal("run", study, "--out", tmp_path / "out", "--storage", url)
    assert not (tmp_path / "out").exists()
    sentence = refusal(
        "run",
        study,
        "--out",
        tmp_path / "out",
        "--storage",
        "postgresql://me:s3cret@localhost:1/db",
    )
    assert "s3cret" not in sentence
    assert "not a storage URL" in refusal(
        "run", study, "--out", tmp_path / "out", "--storage", "nonsense s3cret"
    )


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:{s3cret}@127.0.0.1:1/db",
        "postgresql://u@127.0.0.1:1/db?PASSWORD=s3cret",
        "postgresql://u:p@s3cret@127.0.0.1:1/db",
        "postgresql:///u:s3cret@127.0.0.1/db",
        "sqlite:///no/such/folder/x.db?pwd=s3cret",
        "sqlite://",
    ],
)
def test_no_storage_url_shows_its_password(
    url: str, replay_study: dict, write_study, tmp_path: Path
) -> None:
    assert "s3cret" not in refusal(
        "run", write_study(replay_study), "--out", tmp_path / "made" / "out", "--storage", url
    )
    assert not (tmp_path / "made").exists()


def test_a_study_has_one_storage(finished: Path, tmp_path: Path) -> None:
    other = f"sqlite:///{tmp_path}/other.db"
    assert "leave the storage out" in refusal(
        "run", finished.parent / "study.yaml", "--out", finished, "--storage", other
    )
    assert "no such file" in refusal("recommend", tmp_path / "nowhere", "--storage", other)
    assert not (tmp_path / "other.db").exists()


@pytest.mark.slow
def test_a_relative_storage_is_the_same_one_from_everywhere(
    table: Path, write_study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another study's file of that name lies in the folder from which the next command is called."""
    here, there, trials = tmp_path / "here", tmp_path / "there", {}
    for folder, budget in ((here, 3), (there, 1)):
        folder.mkdir()
        monkeypatch.chdir(folder)
        path = write_study(
            {**study_over(table), "budget": {"trials": budget}}, f"{folder.name}.yaml"
        )
        done = within("run", path, "--out", "out", "--storage", "sqlite:///s.db")
        assert done.returncode in (0, 3), done.stderr
        trials[folder] = within("export", "out", "--format", "jsonl").stdout
    assert trials[here].count("\n") == 3 and trials[there].count("\n") == 1
    assert within("export", "../here/out", "--format", "jsonl").stdout == trials[here]
    again = ("run", tmp_path / "here.yaml", "--out", here / "out", "--storage", "sqlite:///s.db")
    elsewhere = within(*again)
    assert elsewhere.returncode == 2 and "leave the storage out" in elsewhere.stderr
    monkeypatch.chdir(here)
    assert within(*again).returncode == done.returncode


@pytest.mark.slow
def test_a_home_that_the_shell_left_alone_is_no_folder_of_that_name(
    table: Path, write_study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    monkeypatch.chdir(here)
    write_study(study_over(table)).rename(home / "study.yaml")
    done = within("run", "~/study.yaml", "--trials", 1, "--out=~/runs/one", HOME=str(home))
    assert done.returncode in (0, 3), done.stderr
    assert within("report", "~/runs/one", "--out=~/page", HOME=str(home)).returncode == 0
    assert (home / "runs/one/study.db").is_file() and (home / "page/index.html").is_file()
    assert list(here.iterdir()) == []
    assert "~nobody-of-this-name/x" in refusal("recommend", "~nobody-of-this-name/x")


@pytest.mark.parametrize("name", [".lock", "storage.json"])
def test_a_pipe_in_a_study_folder_holds_nothing_up(name: str, finished: Path) -> None:
    (finished / name).unlink(missing_ok=True)
    os.mkfifo(finished / name)
    done = carbonopt("recommend", finished, timeout_s=30)
    assert done.returncode == 0 if name == ".lock" else "must be a regular file" in done.stderr
    assert (
        "a pipe" in refusal("run", finished.parent / "study.yaml", "--out", finished)
        or name != ".lock"
    )


@pytest.mark.parametrize("name", ["study.db-journal", "study.db-wal", "study.db-shm"])
def test_a_pipe_beside_the_storage_is_refused(name: str, finished: Path) -> None:
    (finished / name).unlink(missing_ok=True)
    os.mkfifo(finished / name)
    sentence = refusal("recommend", finished)
    assert name in sentence and "a pipe" in sentence


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("report", "a folder"),
        ("trials", "a folder"),
        ("trials/0000/ds_config.json", "a file"),
        ("report/index.html", "a file"),
        ("report/winner/ds_config.json", "a file"),
        ("report/paper", "a folder"),
    ],
)
@pytest.mark.slow
def test_what_could_not_be_written_is_found_before_the_first_trial(
    name: str, kind: str, finished: Path
) -> None:
    before, path = within("export", finished).stdout, finished / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "a file":
        path.mkdir(parents=True)
    else:
        path.write_text("")
    refused = within("run", finished.parent / "study.yaml", "--out", finished, "--trials", 99)
    assert refused.returncode == 2 and f"{name} has to be {kind}" in refused.stderr
    assert within("export", finished).stdout == before


def test_a_report_replaces_only_a_report(finished_study: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "index.html").write_text("mine")
    assert "holds other files" in refusal("report", finished_study, "--out", folder)
    assert (folder / "index.html").read_text() == "mine"


@pytest.mark.parametrize(
    "arguments",
    [["--seed", "-1"], ["--trials", "0"], ["--trials", "many"], ["--nonsense"], ["--out"]],
)
def test_wrong_options_get_one_sentence(
    arguments: list[str], replay_study: dict, write_study
) -> None:
    refusal("run", write_study(replay_study), *arguments)


def test_an_unknown_country_is_refused(replay_study: dict, write_study, tmp_path: Path) -> None:
    replay_study["carbon"] = {"country": "XYZ"}
    assert "XYZ" in refusal("run", write_study(replay_study), "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_table_that_lacks_a_point_is_refused(
    replay_study: dict, write_study, tmp_path: Path
) -> None:
    replay_study["search"]["space"]["epochs"]["choices"] = [1, 3]
    sentence = refusal("run", write_study(replay_study), "--out", tmp_path / "out")
    assert "has no run of" in sentence
    assert "nearest" in sentence


def test_missing_files_and_folders_are_refused(
    tiny_study: dict, write_study, tmp_path: Path
) -> None:
    tiny_study["workload"]["dataset"] = {"train_files": ["nowhere.txt"]}
    assert "nowhere.txt" in refusal("run", write_study(tiny_study), "--out", tmp_path / "out")
    tiny_study["workload"]["dataset"] = {"builtin": "python-docs"}
    tiny_study["workload"]["model"] = {"name_or_path": "./no-model"}
    assert "no-model" in refusal("run", write_study(tiny_study), "--out", tmp_path / "out")
    assert "holds no study" in refusal("report", tmp_path)


def test_a_gpu_that_is_not_there_is_refused(tiny_study: dict, write_study, tmp_path: Path) -> None:
    tiny_study["launch"]["gpus"] = [99]
    assert "launch.gpus: []" in refusal("run", write_study(tiny_study), "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_the_preparation_finds_wrong_is_refused(
    tiny_study: dict, write_study, tmp_path: Path, capfd
) -> None:
    tiny_study["workload"]["deepspeed"] = {"zero_optimization": {"stage3_prefetch_buket_size": 1}}
    done = within("run", write_study(tiny_study), "--out", tmp_path / "out")
    assert done.returncode == 2
    *_, begun, sentence = (
        done.stderr.splitlines()
    )  # before them what the doctor warns of, such as a busy CPU
    assert begun.startswith("preparing ")
    assert "stage3_prefetch_bucket_size" in sentence
    assert not (tmp_path / "out").exists()
    assert capfd.readouterr() == ("", ""), "what prepares says it to the command alone"
