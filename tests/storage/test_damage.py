"""A storage that lost something is refused in one sentence: what is left of it might recommend
another trial.
"""

import json
import os
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import optuna
import pytest
from commands import refusal, within

RECORD = "SELECT value_json FROM trial_user_attributes WHERE trial_id = 3 AND key = 'record'"
NEW_RECORD = "UPDATE trial_user_attributes SET value_json = ? WHERE trial_id = 3 AND key = 'record'"

PARAMS = {
    "global_batch_size": 16,
    "micro_batch_size_per_gpu": 16,
    "learning_rate": 0.5,
    "epochs": 1,
}


EVALUATION = {"step": 100, "tokens": None, "value": 7.0, "sum": None, "count": 1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study that has ended, and its study file beside it."""
    root = tmp_path_factory.mktemp("whole")
    runs = [
        {
            "params": {"global_batch_size": batch, "learning_rate": rate, "epochs": 1},
            "total_steps": 100,
            "joules_per_step": 1 + batch / 64,
            "seconds_per_step": 0.01,
            "joules_per_eval": 2.0,
            "evals": [{"step": 50, "nll": 2.5}, {"step": 100, "nll": 1 + 100 * rate}],
        }
        for batch in (16, 32)
        for rate in (1e-3, 2e-3, 4e-3)
    ]
    (root / "table.jsonl").write_text("\n".join(map(json.dumps, runs)))
    study = {
        "name": "whole",
        "target": {"perplexity": 4.0},
        "search": {
            "space": {"global_batch_size": {"choices": [16, 32]}, "learning_rate": {"choices": [1e-3, 2e-3, 4e-3]},
                      "epochs": 1},
            "sampler": "random", "pruning": {"cap": False, "target": False},
        },
        "budget": {"trials": 5},
        "carbon": {"intensity_g_co2e_per_kwh": 500},
        "launch": {"kind": "replay", "table": "table.jsonl"},
    }  # fmt: skip
    (root / "study.yaml").write_text(json.dumps(study))
    done = within("run", root / "study.yaml", "--out", root / "out")
    assert done.returncode == 0, done.stderr
    return root / "out"


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "copy")


def execute(folder: Path, *statement: object) -> None:
    with closing(sqlite3.connect(folder / "study.db")) as database, database:
        assert database.execute(*statement).rowcount != 0


def change_record(folder: Path, **fields: object) -> None:
    with closing(sqlite3.connect(folder / "study.db")) as database:
        ((text,),) = database.execute(RECORD)
    execute(folder, NEW_RECORD, (json.dumps(json.loads(text) | fields),))


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("DELETE FROM trials WHERE trial_id = 3", "trial 2 is missing"),
        ("UPDATE trials SET number = 1 WHERE trial_id = 3", "trial 2 is missing"),
        (NEW_RECORD.replace("?", "'null'"), "trial 2 has ended, but has no record"),
        (NEW_RECORD.replace("?", "'{'"), "trial 2: its record can't be read"),
        ("DROP TABLE trial_user_attributes", "trial 0 has ended, but has no record"),
        ("DROP TABLE trial_params", "trial 0 has lost its parameters"),
        ("DROP TABLE trial_values", "trial 0 has lost its values"),
        ("DROP TABLE study_user_attributes", "as it is damaged"),
    ],
)
def test_what_is_gone_is_damage(statement: str, says: str, folder: Path) -> None:
    execute(folder, statement)
    sentence = refusal("recommend", folder)
    assert "damaged" in sentence
    assert says in sentence


def test_a_study_without_a_trial_yet_is_not_called_damaged(folder: Path) -> None:
    for table in ("trials", "studies"):
        execute(folder, f"DELETE FROM {table}")
    sentence = refusal("recommend", folder)
    assert "first trial" in sentence and "damaged" not in sentence


def test_tables_of_another_optuna_are_named_with_the_version_that_can_not_read_them(
    folder: Path,
) -> None:
    execute(folder, "UPDATE alembic_version SET version_num = 'v99.0.0'")
    sentence = refusal("recommend", folder)
    assert optuna.__version__ in sentence and sentence.count(optuna.__version__) == 1
    assert "newer Optuna" in sentence


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"trial": 1}, "trial 2 has the record of trial 1"),
        (
            {"quality": {"name": "perplexity", "value": -5.0}},
            "trial 2: quality: must be at least 1, but is -5",
        ),
        ({"quality": {"name": "perplexity"}}, "trial 2 was ranked by perplexity "),
        ({"energy_kwh": None}, "trial 2 is complete, but its record has no energy_kwh"),
        ({"emissions_kg_co2e": -1e-6}, "trial 2: emissions_kg_co2e"),
        ({"state": "running"}, "trial 2 has ended otherwise than its record says (running)"),
        (
            {"evals": [{"step": 50, "tokens": None, "value": 0.5, "sum": -7.0, "count": 10}]},
            "evals",
        ),
        (
            {"quality": {"name": "perplexity", "value": 5.0, "sum": 10.0, "count": 10}},
            "its sum and count make 2.71828",
        ),
        ({"evals": []}, "trial 2 is complete, but its record has no evals"),
        ({"evals": [EVALUATION]}, "trial 2: evals: the last value is "),
        ({"evals": [EVALUATION | {"stap": 1}]}, "trial 2: unknown key evals.0.stap; restore"),
        ({"evals": 17}, "trial 2: evals: must be a list, but got 17; restore"),
        ({"total_steps": 99}, "evals: the last step is 100, but total_steps is 99; restore"),
        ({"repeat_of": 99}, "trial 2 repeats trial 99, which is not there"),
        ({"emissions_kg_co2e": 1e-9}, "but its record has 1e-09"),
        ({"params": PARAMS}, ", but its record says "),
        (
            {"energy_kwh": {"train": 1.0, "setup": 0.0, "eval": 0.0, "total": 2.0}},
            "its phases add up to 1",
        ),
        ({"gpu_energy_kwh": {}}, "gpu_energy_kwh must have setup, train, eval"),
        (
            {"quality": {"name": "loss", "value": 5.0}},
            "trial 2: quality: name must be one of perplexity",
        ),
    ],
)
def test_what_no_trial_can_have_is_damage(fields: dict, says: str, folder: Path) -> None:
    change_record(folder, **fields)
    assert says in refusal("export", folder)


@pytest.mark.parametrize("command", ["report", "recommend", "export", "run"])
def test_a_file_with_noise_in_it_is_damaged_for_every_command(
    command: str, folder: Path, whole: Path
) -> None:
    file = folder / "study.db"
    pages = file.read_bytes()
    file.write_bytes(pages[:8192] + bytes(range(256)) * ((len(pages) - 8192) // 256))
    given = [whole.parent / "study.yaml", "--out", folder] if command == "run" else [folder]
    sentence = refusal(command, *given)
    assert sentence.startswith(f"carbonopt: the storage {file} is damaged: ")
    assert sentence.endswith("; restore it from a copy.\n")


@pytest.mark.parametrize(("length", "says"), [(20_000, "malformed"), (0, "it is empty")])
def test_a_file_cut_short_is_named_not_an_option_nobody_gave(
    length: int, says: str, folder: Path
) -> None:
    os.truncate(folder / "study.db", length)
    sentence = refusal("recommend", folder)
    assert f"{folder}/study.db is damaged: " in sentence
    assert says in sentence
    assert "sqlite:" not in sentence


@pytest.mark.parametrize("command", ["report", "recommend", "export", "run"])
def test_a_study_without_its_storage_is_told_so(command: str, folder: Path, whole: Path) -> None:
    (folder / "study.db").unlink()
    given = [whole.parent / "study.yaml", "--out", folder] if command == "run" else [folder]
    sentence = refusal(command, *given)
    assert "report.json of a study" in sentence and "study.db" in sentence
    assert not (folder / "study.db").exists()


def test_a_pipeline_without_its_list_of_studies_is_told_so(folder: Path, tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    sentence = refusal("recommend", tmp_path)
    assert f"{folder.name} of a pipeline" in sentence and "pipeline.json" in sentence


PARTS = ("study_directions", "trials", "study_user_attributes")


@pytest.mark.parametrize("kept", [None, "report", *PARTS])
def test_a_new_study_is_not_begun_over_what_is_left_of_one(
    kept: str | None, folder: Path, whole: Path
) -> None:
    """`kept`: all that is left; None: all but the list of studies."""
    execute(folder, "DELETE FROM studies")
    if kept == "report":
        os.truncate(folder / "study.db", 0)
    else:
        shutil.rmtree(folder / "report")
        for part in {*PARTS} - {kept} if kept else ():
            execute(folder, f"DELETE FROM {part}")
    before = trials(folder) if kept != "report" else 0
    sentence = refusal("run", whole.parent / "study.yaml", "--out", folder)
    assert "restore" in sentence
    assert (kept or "study_directions") in sentence
    assert trials(folder) == before


def trials(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "study.db")) as database:
        ((count,),) = database.execute("SELECT count(*) FROM trials")
    return int(count)


def change_text(folder: Path, change: Callable[[str], str]) -> None:
    with closing(sqlite3.connect(folder / "study.db")) as database:
        ((text,),) = database.execute(RECORD)
    assert change(text) != text
    execute(folder, NEW_RECORD, (change(text),))


@pytest.mark.parametrize("command", ["recommend", "report"])
def test_a_key_that_a_record_has_twice_is_damage(command: str, folder: Path) -> None:
    """Readers of JSON differ in which of them they take."""
    change_text(folder, lambda text: text.removesuffix("}") + ', "evals": []}')
    sentence = refusal(command, folder)
    assert "trial 2: its record can't be read" in sentence
    assert "'evals' twice; restore it from a copy.\n" in sentence


@pytest.mark.parametrize("evals", ['[{"step": 50, "tok]', "[ ]", '[{"stap": 1}]', "[7]"])
def test_damaged_evaluations_of_a_stopped_trial_are_said(evals: str, folder: Path) -> None:
    execute(folder, "UPDATE trials SET state = 'PRUNED' WHERE trial_id = 3")
    change_record(folder, state="pruned", stop_reason="target")
    change_text(folder, lambda text: re.sub(r'"evals": \[[^\]]*\]', f'"evals": {evals}', text))
    sentence = refusal("recommend", folder, "--target", "1.5")  # which no trial meets
    assert "trial 2" in sentence and "evals" in sentence
    assert sentence.endswith("; restore it from a copy.\n")
    assert "no key is known" not in sentence


def test_a_folder_holds_one_study(folder: Path, whole: Path) -> None:
    study = json.loads((whole.parent / "study.yaml").read_text()) | {"name": "another"}
    (whole.parent / "another.yaml").write_text(json.dumps(study))
    sentence = refusal("run", whole.parent / "another.yaml", "--out", folder)
    assert "holds the study 'whole'; give 'another' a folder of its own." in sentence
    assert within("recommend", folder).returncode == 0, "nothing was added to it"


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE trial_user_attributes SET value_json = ? WHERE trial_id = 3 AND key = 'record'",
        "UPDATE study_user_attributes SET value_json = ? WHERE key = 'config'",
        "UPDATE study_user_attributes SET value_json = ? WHERE key = 'provenance'",
        "UPDATE study_user_attributes SET value_json = ? WHERE key = 'inputs'",
    ],
)
@pytest.mark.parametrize(
    "value", [DEEP, json.dumps(DEEP), "17", '"text"', "[]", '{"a": []}', "NaN"]
)
def test_values_of_another_kind_are_damage(statement: str, value: str, folder: Path) -> None:
    execute(folder, statement, (value,))
    sentence = refusal("recommend", folder)
    assert "damaged" in sentence and len(sentence) < 1000


@pytest.mark.parametrize(
    "text", [DEEP, "17", "[]", '{"url": {}}', '{"url": "sqlite:////nowhere.db"}', "", "\xff"]
)
def test_a_damaged_pointer_is_named(text: str, folder: Path) -> None:
    (folder / "storage.json").write_text(text, encoding="latin-1")
    assert "storage.json" in refusal("recommend", folder)


@pytest.mark.parametrize("text", [DEEP, "17", "[]", '{"pipeline": {}}', ""])
def test_a_damaged_ledger_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "pipeline.json").write_text(text)
    assert "pipeline.json" in refusal("recommend", tmp_path)


def test_no_byte_of_the_schema_makes_a_traceback(folder: Path) -> None:
    """Each word of the tables' definitions once, changed in the file itself."""
    file = folder / "study.db"
    whole = file.read_bytes()
    for word in (
        b"CREATE TABLE",
        b"PRIMARY KEY",
        b"value_json",
        b"studies",
        b"trial_id",
        b"VARCHAR",
        b"sqlite_master",
    ):
        for place in [place for place in range(len(whole)) if whole.startswith(word, place)][:4]:
            file.write_bytes(whole[:place] + b"\xfe\xffX" + whole[place + 3 :])
            done = within("recommend", folder)
            assert done.returncode in (0, 2), (word, place, done.stderr)
            for foreign in ("Traceback", "sqlalche", "Background on this error", "Error: Error"):
                assert foreign not in done.stderr
