"""carbonopt compare: two studies of this machine, from their folders."""

import json
import shutil
from pathlib import Path

import pytest
from commands import within
from replays import study_over, write_table


@pytest.fixture
def cheaper(tmp_path: Path, write_study) -> Path:
    """The same recorded runs on a machine that takes half the energy, under another intensity."""
    table = write_table(tmp_path)
    lines = [json.loads(line) for line in table.read_text().splitlines()]
    table.write_text(
        "".join(
            json.dumps({**line, "joules_per_step": line["joules_per_step"] / 2}) + "\n"
            for line in lines
        )
    )
    study = study_over(table)
    study["name"], study["search"]["sampler"] = "cheaper", "random"
    study["carbon"]["intensity_g_co2e_per_kwh"] = 5000
    done = within("run", write_study(study), "--out", tmp_path / "cheaper")
    assert done.returncode == 0, done.stderr
    return tmp_path / "cheaper"


@pytest.mark.slow
def test_two_machines_beside_each_other(
    finished_study: Path, cheaper: Path, tmp_path: Path
) -> None:
    done = within("compare", finished_study, cheaper, "--json")
    assert done.returncode == 0 and not done.stderr
    told = json.loads(done.stdout)
    here, there = told["studies"]
    assert (here["name"], there["name"]) == ("replayed", "cheaper") and told[
        "g_co2e_per_kwh"
    ] == 500
    assert here["recommended"]["params"] == there["recommended"]["params"]
    assert there["recommended"]["energy_kwh"] == pytest.approx(
        here["recommended"]["energy_kwh"] / 2
    )
    assert there["recommended"]["emissions_kg_co2e"] == pytest.approx(
        5 * here["recommended"]["emissions_kg_co2e"]
    )
    recommended = json.loads(within("recommend", finished_study, "--json").stdout)
    assert here["recommended"]["trial"] == recommended["trial"]
    assert here["recommended"]["emissions_kg_co2e"] == recommended["emissions_kg_co2e"]
    assert [run["trial"] for run in here["front"]] == recommended["pareto_front"]
    assert here["spent_energy_kwh"] == recommended["study"]["energy_kwh"]

    done = within("compare", finished_study, cheaper, "--out", tmp_path / "page", COLUMNS="160")
    assert done.returncode == 0
    # Two tables: nothing says that their runs were evaluated on the same data.
    assert [caveat["key"] for caveat in told["caveats"][:1]] == ["unknown_data"]
    assert "50 %" not in done.stdout.splitlines()[0]
    assert str(tmp_path / "page" / "index.html") in done.stdout
    assert (tmp_path / "page" / "data" / "comparison.json").is_file()
    written = (tmp_path / "page" / "comparison.md").read_text()
    assert [written.count(head) for head in ("| CO2e at its own intensity", "| Machine |")] == [
        2,
        0,
    ]  # they share one
    assert within("compare", finished_study, cheaper, "--out", tmp_path / "page").returncode == 0


def test_studies_of_one_name_go_by_their_folders_too(finished_study: Path, finished: Path) -> None:
    told = json.loads(within("compare", finished_study, finished, "--json").stdout)
    assert [each["name"] for each in told["studies"]] == [
        f"replayed ({at})" for at in (finished_study, finished)
    ]
    assert told["studies"][0]["recommended"] == told["studies"][1]["recommended"]


def test_what_can_not_be_compared_is_refused(
    finished_study: Path, finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(finished)
    shutil.copytree(finished / "report", tmp_path / "report")
    for arguments, said in (
        ((finished,), "two or more different studies"),
        ((finished, tmp_path / "link"), "two or more different studies"),
        ((finished, tmp_path / "nothing"), "holds no study"),
        ((finished, finished_study, "--out", finished), "holds other files and no comparison"),
        (
            (finished, finished_study, "--out", tmp_path / "report"),
            "holds other files and no comparison",
        ),
    ):
        done = within("compare", *arguments)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, (
            arguments
        )
    assert within("compare").returncode == 2
