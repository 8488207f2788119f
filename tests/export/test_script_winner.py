"""winner/ of a study of the user's own script: its command, its card, and nothing that is of other
trainings.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from small_studies import script_run, script_study, study, trial

from carbonopt.analysis.recommend import recommend
from carbonopt.core.trial import Durations
from carbonopt.export.winner import winner_files
from carbonopt.report.sections.trial_conduct_section import caveats
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import StudyData
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.train.tasks.task import task_for

SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], sorted(os.listdir('..'))]))"
WORDS = ("<img src=x>", '"; rm -rf x"', "$(touch x)", "it's `x` \\ %", "", "-x")


def winner_of(data: StudyData) -> dict[str, str]:
    return winner_files(data, recommend(data))


def study_of(command: str, **own: Any) -> StudyData:
    """One complete trial, with these values of the user's own dimensions."""
    return script_study(script_run(0, 25.0, own=own), workload={"command": command}, space=own)


def started(files: dict[str, str], folder: Path) -> Any:
    """What run.sh of these files prints."""
    (folder / "data").mkdir(parents=True)
    (folder / "data/show.py").write_text(SHOW)
    (folder / "run.sh").write_text(files["run.sh"])
    done = subprocess.run(["sh", folder / "run.sh"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_one_argument_of_the_command(word: str, tmp_path: Path) -> None:
    command = (
        f"{shlex.quote(sys.executable)} show.py {{learning_rate}} {{loss}} --as={{loss}}.{{seed}}"
    )
    arguments, beside = started(winner_of(study_of(command, loss=word)), tmp_path / "winner")
    assert arguments == ["0.001", *([word] if word else []), f"--as={word}.3"]
    assert beside == ["data", "run.sh"]  # no folder for what the command does not write


def test_a_folder_to_write_into_is_made_where_the_command_names_one(tmp_path: Path) -> None:
    command = (
        f"{shlex.quote(sys.executable)} show.py {{learning_rate}} --to '{{output_dir}}/a model'"
    )
    folder = tmp_path / "the winner's"
    arguments, beside = started(winner_of(study_of(command)), folder)
    assert arguments == ["0.001", "--to", f"{folder}/output/a model"]
    assert beside == ["data", "output", "run.sh"]


def test_the_study_file_has_no_settings_that_a_script_can_not_have() -> None:
    workload = yaml.safe_load(winner_of(study_of("python train.py {learning_rate}"))["rerun.yaml"])[
        "workload"
    ]
    assert not workload.keys() & {"training_arguments", "deepspeed"}
    assert yaml.safe_load(winner_of(study(trial(0)))["rerun.yaml"])["workload"][
        "training_arguments"
    ]


def test_the_card_names_the_command_as_it_was_run_and_no_library() -> None:
    text = winner_of(study_of("python train.py --lr {learning_rate} --opt {opt}", opt="sgd"))[
        "model_card.md"
    ]
    card = ModelCard(text)
    assert "python train.py --lr 0.001 --opt sgd" in card.text
    assert not {"library_name", "pipeline_tag", "model-index"} & card.data.to_dict().keys()
    assert card.data.to_dict()["co2_eq_emissions"]["emissions"] > 0
    assert "requirements.txt" not in text and "./run.sh" in text
    other = ModelCard(winner_of(study(trial(0)))["model_card.md"])
    assert (
        other.data.to_dict()["library_name"] == "transformers" and "requirements.txt" in other.text
    )


def test_the_card_says_whether_set_up_is_in_its_figures() -> None:
    without = "Set-up and evaluation are not in it"
    told = script_study(
        script_run(0, 25.0, duration_s=Durations(train=50, setup=8, eval=2, total=60))
    )
    assert without in winner_of(told)["model_card.md"]
    assert without not in winner_of(script_study(script_run(0, 25.0)))["model_card.md"]


def test_a_process_with_deepspeed_knows_its_rank_in_a_trial_and_again(tmp_path: Path) -> None:
    show = "import json, os; print(json.dumps([[os.environ.get(name) for name in NAMES], []]))"
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"]
    imports = {"plain": "", "deepspeed": "import deepspeed\n", "by a module": "import model\n"}
    (tmp_path / "model.py").write_text("def made():\n    from deepspeed import initialize\n")
    for case, line in imports.items():
        (tmp_path / "show.py").write_text(line)
        workload = {
            "command": f"{shlex.quote(sys.executable)} show.py {{learning_rate}}",
            "folder": str(tmp_path),
        }
        data = script_study(script_run(0, 25.0), workload=workload)
        task = task_for(data.config.workload.model_dump(mode="json"))
        params = data.records[0].params
        spec = TrialSpec(
            number=0,
            attempt=1,
            seed=0,
            params=params,
            workload={},
            prepared_dir="",
            trial_dir="/trial",
        )
        assert task.program(spec, data.config.quality).uses_deepspeed is (case != "plain")
        known = [None] * 4 if case == "plain" else ["0", "0", "1", "127.0.0.1"]
        files = {**winner_of(data)}
        folder = tmp_path / f"winner of {case}"
        (folder / "data").mkdir(parents=True)
        (folder / "data/show.py").write_text(f"NAMES = {names}\n{show}")
        (folder / "run.sh").write_text(files["run.sh"])
        unset = {name: value for name, value in os.environ.items() if name not in names}
        done = subprocess.run(["sh", folder / "run.sh"], capture_output=True, text=True, env=unset)
        assert json.loads(done.stdout)[0] == known, done.stderr


def test_ranks_on_the_cpu_train_together_again() -> None:
    run = script_run(0, 25.0)
    two = run.model_copy(update={"params": run.params.model_copy(update={"world_size": 2})})
    for record, is_set in ((run, False), (two, True)):
        assert (
            "export ACCELERATE_USE_CPU=true" in winner_of(script_study(record))["run.sh"]
        ) is is_set
    keys = [caveat.key for caveat in caveats(StudyView(script_study(two)))]
    assert keys == ["ranks_unseen"]
    assert not list(caveats(StudyView(script_study(run))))
