"""What the winner's training reads: named, recorded, looked for and checked, as inputs.json and
inputs.py have it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from small_studies import study, trial

from carbonopt.analysis.recommend import recommend
from carbonopt.export.winner import winner_files
from carbonopt.spec.study_data import StudyData
from carbonopt.study_file.input_files import input_files, with_sha256

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc", in FIPS 180-2


def changed(**workload) -> dict:
    """The study's raw workload with these keys instead."""
    return {
        "workload": {
            **study().config.workload.model_dump(mode="json", exclude_none=True),
            **workload,
        }
    }


def noted(data: StudyData) -> StudyData:
    """With its files as a study notes them."""
    return data.model_copy(update={"inputs": with_sha256(input_files(data.config), lambda: False)})


def winner_of(data: StudyData) -> dict[str, str]:
    return winner_files(data, recommend(data))


def write(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_files_have_names_and_are_recorded_and_no_path_is_told(tmp_path):
    """Two files of one name; the same one twice; a model's folder; hub names stay."""
    for folder, content in (("one", b"abc"), ("two", b"abcd")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_bytes(content)
    model = tmp_path / "my-model"
    (model / "checkpoint-1").mkdir(parents=True)
    (model / "checkpoint-1" / "optimizer.pt").write_bytes(b"much")
    (model / ".cache").write_bytes(b"")
    (model / "config.json").write_bytes(b"{}")
    files = [str(tmp_path / "one" / "a.txt"), str(tmp_path / "two" / "a.txt")]
    raw = changed(
        dataset={"train_files": files, "eval_files": files[:1]},
        model={"name_or_path": str(model)},
        tokenizer={"name_or_path": "openai-community/gpt2"},
    )
    raw["carbon"] = {"country": "USA", "trace": str(tmp_path / "grid.csv")}
    written = winner_of(noted(study(trial(0), raw=raw)))
    assert [name for name, text in written.items() if str(tmp_path) in text] == []
    for name in ("workload.yaml", "rerun.yaml"):
        read = yaml.safe_load(written[name])
        read = read.get("workload", read)
        assert read["dataset"]["train_files"] == ["data/a.txt", "data/a-2.txt"]
        assert read["dataset"]["eval_files"] == ["data/a.txt"]
        assert read["model"]["name_or_path"] == "./data/my-model"
        assert read["tokenizer"]["name_or_path"] == "openai-community/gpt2"
        assert (
            f"#   data/a.txt: 3 bytes, sha256 {ABC}\n#   data/a-2.txt: 4 bytes, sha256 88d4266f"
            in written[name]
        )
    assert yaml.safe_load(written["rerun.yaml"])["carbon"]["trace"] == "data/grid.csv"
    assert "#   data/grid.csv: size and sha256 not recorded\n" in written["rerun.yaml"]
    recorded = json.loads(written["inputs.json"])
    assert recorded.pop("data/a.txt") == [{"path": "", "bytes": 3, "sha256": ABC}]
    assert recorded.pop("data/a-2.txt")[0]["bytes"] == 4
    (config,) = recorded.pop("data/my-model")
    assert (config["path"], config["bytes"], recorded) == ("config.json", 2, {})


def test_what_the_trials_read_is_recorded_not_what_lies_there_now(tmp_path):
    text = tmp_path / "a.txt"
    text.write_bytes(b"abc")
    data = noted(study(trial(0), raw=changed(dataset={"train_files": [str(text)]})))
    first = winner_of(data)
    text.write_bytes(b"abd")
    assert winner_of(data) == first
    text.unlink()
    assert winner_of(data) == first
    assert json.loads(first["inputs.json"]) == {
        "data/a.txt": [{"path": "", "bytes": 3, "sha256": ABC}]
    }


# -------------------------------------------------------------------------------------------------
# inputs.py, as a user


class CheckedStudy:
    """A winner/ whose training reads a file and a model's folder; both lie where the study had
    them, not beside it.
    """

    def __init__(self, folder: Path) -> None:
        self.data, self.winner = folder / "here it lies", folder / "winner"
        (self.data / "model").mkdir(parents=True)
        self.text, self.config = self.data / "a.txt", self.data / "model" / "config.json"
        self.text.write_bytes(b"abc")
        self.config.write_bytes(b"{}")
        raw = changed(
            dataset={"train_files": [str(self.text)]},
            model={"name_or_path": str(self.config.parent)},
        )
        self.winner.mkdir()
        write(winner_of(noted(study(trial(0), raw=raw))), self.winner)

    def complaints(self, *arguments: str, cwd: Path | None = None, **environment: str) -> list[str]:
        """What it ends with, line by line; empty: all is well."""
        command = (sys.executable, "-I", self.winner / "inputs.py", *arguments)
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
        complaints = [line for line in done.stderr.splitlines() if "is taken as it is" not in line]
        assert (done.returncode == 1) == bool(complaints) and not done.stdout
        return complaints


@pytest.fixture
def checked(tmp_path) -> CheckedStudy:
    return CheckedStudy(tmp_path)


def test_what_is_missing_is_one_sentence_each(checked):
    text, model = checked.complaints()
    assert (
        text == f"a.txt (3 bytes, sha256 {ABC}) is missing: it is not in {checked.winner}/data; put"
        " it at "
        f"{checked.winner}/data/a.txt, or say which folder it lies in: ./run.sh --data FOLDER"
    )
    assert model.startswith("model (a folder of 1 file, 2 bytes; the sha256 of each is in ")
    assert f"put it at {checked.winner}/data/model, or" in model


def test_it_is_found_beside_the_script_and_in_a_given_folder(checked):
    assert checked.complaints("--data", str(checked.data)) == []
    assert checked.complaints("--data", checked.data.name, cwd=checked.data.parent) == []
    assert (
        checked.complaints("--data", ".", cwd=checked.winner, CALLED_FROM=str(checked.data)) == []
    )
    folder, text, _ = checked.complaints("--data", "x", cwd=checked.winner)
    assert folder == f"--data x: {checked.winner}/x does not exist"
    assert (
        f"is missing: it is neither in {checked.winner}/x nor in {checked.winner}/data; put it at"
        in text
    )
    assert checked.complaints("--data", str(checked.text))[0].endswith("a.txt is a file")
    assert not any(
        "--data x" in complaint for complaint in checked.complaints("--data", str(checked.winner))
    )
    (checked.winner / "data").symlink_to(checked.data)
    assert checked.complaints() == [] == checked.complaints("--data", "/nowhere")


def test_what_is_another_file_is_said_and_can_be_used_all_the_same(checked):
    def said() -> list[str]:
        return checked.complaints("--data", str(checked.data))

    checked.text.write_bytes(b"abd")
    checked.config.write_bytes(b"{}\n")
    text, config = said()
    assert text.startswith(
        f"{checked.text} is not the recorded file: its sha256 must be {ABC}, but is a52d159f"
    )
    assert config.startswith(
        f"{checked.config} is not the recorded file: it must have 2 bytes, but has 3; put the"
    )
    checked.config.unlink()
    assert said()[1].startswith(
        f"{checked.config} (2 bytes, sha256 44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e83"
    )
    files = json.loads((checked.winner / "inputs.json").read_text())
    files |= {"data/a.txt": [], "data/model": []}
    (checked.winner / "inputs.json").write_text(json.dumps(files))
    assert said() == []
    checked.text.unlink()
    assert said()[0].startswith("a.txt (size and sha256 not recorded) is missing: ")


def test_weights_of_a_large_model_are_checked_by_the_pieces_that_were_noted(checked, tmp_path):
    weights = checked.config.parent / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(65 * 2**20)
    raw = changed(model={"name_or_path": str(checked.config.parent)})
    written = winner_of(noted(study(trial(0), raw=raw)))["inputs.json"]
    assert [file["pieces"] for file in json.loads(written)["data/model"] if "pieces" in file] == [
        64
    ]
    (checked.winner / "inputs.json").write_text(written)
    assert checked.complaints("--data", str(checked.data)) == []
    with weights.open("r+b") as file:
        file.write(b"x")
    (complaint,) = checked.complaints("--data", str(checked.data))
    assert complaint.startswith(f"{weights} is not the recorded file: its sha256 must be ")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[1]", '{"data/a.txt": [1]}', '{"data/a.txt": [{"path": ""}]}']
)
def test_a_damaged_list_is_said_in_a_sentence(text, checked):
    (checked.winner / "inputs.json").write_text(text)
    (complaint,) = checked.complaints()
    assert complaint.startswith(f"{checked.winner}/inputs.json is not as it was written: ")


def test_an_empty_folder_name_is_refused(checked):
    assert checked.complaints("--data", "") == ["--data: the name of the folder is empty"]


# ---------------------------------------------------------------------------------------------------
# run.sh, as a user


class Called:
    """A winner/ with a stand-in for accelerate that shows what it was started with."""

    def __init__(self, folder: Path, *, with_data: bool) -> None:
        self.winner, tools = folder / "winner", folder / "tools"
        self.winner.mkdir()
        tools.mkdir()
        text = folder / "a.txt"
        text.write_bytes(b"abc")
        raw = changed(dataset={"train_files": [str(text)]}) if with_data else {}
        write(winner_of(noted(study(trial(0), raw=raw))), self.winner)
        (self.winner / "run.sh").chmod(0o755)
        (tools / "accelerate").write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$@"\n')
        (tools / "accelerate").chmod(0o755)
        self.environment = {"PATH": f"{tools}:{Path(sys.executable).parent}:/usr/bin:/bin"}

    def run(
        self, *arguments: str, script: str = "winner/run.sh"
    ) -> subprocess.CompletedProcess[str]:
        command = [self.winner.parent / script, *arguments]
        return subprocess.run(
            command, cwd=self.winner.parent, env=self.environment, capture_output=True, text=True
        )


@pytest.mark.parametrize("with_data", [True, False])
@pytest.mark.parametrize("wanted", ["--help", "-h"])
def test_run_script_helps_and_trains_nothing(with_data, wanted, tmp_path):
    done = Called(tmp_path, with_data=with_data).run(wanted)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: ./run.sh{' [--data FOLDER]' if with_data else ''}\n")
    assert "accelerate" not in done.stdout and "launch" not in done.stdout


@pytest.mark.parametrize(
    "given", [["--data"], ["--date", "."], ["."], ["--data", ".", "x"], ["x", "--help"], [""]]
)
@pytest.mark.parametrize("with_data", [True, False])
def test_run_script_refuses_what_it_does_not_know(given, with_data, tmp_path):
    done = Called(tmp_path, with_data=with_data).run(*given)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: ./run.sh") and "run.sh: it takes" in done.stderr
    assert "inputs.py" not in done.stderr


def test_run_script_takes_no_folder_where_there_is_no_data(tmp_path):
    done = Called(tmp_path, with_data=False).run("--data", ".")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("run.sh: it takes no arguments, not: --data .\n")


def test_run_script_is_found_through_a_link_and_takes_both_spellings(tmp_path):
    called = Called(tmp_path, with_data=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "train").symlink_to("../winner/run.sh")
    for given in (["--data", "."], ["--data=."]):
        done = called.run(*given, script="bin/train")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            str(called.winner), "launch", "--config_file", "accelerate.yaml", "train.py", *given
        ]  # fmt: skip
    missing = called.run(script="bin/train")
    assert (
        missing.returncode == 1
        and "say which folder it lies in: ./run.sh --data FOLDER" in missing.stderr
    )
