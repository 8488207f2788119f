"""The study file: what is read, and what is refused with which sentence."""

import copy
import json
import os
import re
from pathlib import Path

import pytest
import yaml

from carbonopt.core.errors import BadInput
from carbonopt.spec.space_settings import Choices, Fixed, Range
from carbonopt.spec.study_config import StudyConfig
from carbonopt.study_file.reader import load_study, parse_study
from carbonopt.study_file.study_checks import check
from carbonopt.study_file.yaml_file import read_yaml


def refused(study: dict, write_study) -> str:
    with pytest.raises(BadInput) as error:
        load_study(write_study(study))
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


def test_dimensions_are_choices_ranges_or_single_values(tiny_study: dict) -> None:
    tiny_study["search"]["space"]["zero_stage"] = 2
    space = parse_study(tiny_study, "here").search.space
    assert space.global_batch_size == Choices(choices=(64, 128))
    assert space.learning_rate == Range(low=1e-4, high=1e-2, log=True)
    assert space.zero_stage == Fixed(value=2)


def test_a_study_survives_being_stored(tiny_study: dict, replay_study: dict) -> None:
    for study in (tiny_study, replay_study):
        config = parse_study(study, "here")
        stored = StudyConfig.model_validate(json.loads(json.dumps(config.model_dump(mode="json"))))
        assert stored == config
        assert json.dumps(stored.identity()) == json.dumps(config.identity()), "types count, too"


def test_the_keys_that_may_change_are_those_outside_a_studys_identity(tiny_study: dict) -> None:
    config = parse_study(tiny_study, "here")
    whole, identity = config.model_dump(), config.identity()
    outside = whole.keys() - identity.keys()
    for part in ("carbon", "search", "launch"):
        outside |= {f"{part}.{key}" for key in whole[part].keys() - identity[part].keys()}
    assert set(re.findall(r"[\w.]+", config.may_change)) - {"and"} == outside
    slurm = parse_study({**tiny_study, "launch": {"kind": "slurm"}}, "here")
    assert "Slurm" in slurm.may_change


def test_exponents_without_a_dot_are_numbers(tmp_path: Path, tiny_study: dict) -> None:
    text = yaml.safe_dump(tiny_study).replace("0.0001", "1e-4")
    assert "1e-4" in text
    path = tmp_path / "study.yaml"
    path.write_text(text)
    assert load_study(path).search.space.learning_rate.low == 1e-4


def test_paths_are_taken_from_the_study_files_folder(
    tmp_path: Path, tiny_study: dict, write_study
) -> None:
    tiny_study["workload"]["dataset"] = {"train_files": ["data/a.txt"]}
    config = load_study(write_study(tiny_study))
    assert config.workload.dataset.train_files == (str(tmp_path / "data/a.txt"),)


@pytest.mark.parametrize(
    ("text", "value"), [("-.5", -0.5), ("+.5", 0.5), (".5e-3", 0.0005), ("1.e-3", 0.001)]
)
def test_decimal_points_without_digits_beside_them_are_read(
    tmp_path: Path, text: str, value: float
) -> None:
    (tmp_path / "piece.yaml").write_text(f"key: {text}\n")
    assert read_yaml(tmp_path / "piece.yaml", "the study file").values == {"key": value}


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("target.perplexty", 3, ["unknown key target.perplexty", "did you mean perplexity?"]),
        (
            "search.space.learning_rat",
            1e-3,
            ["unknown key search.space.learning_rat", "learning_rate"],
        ),
        ("search.space.epochs", {"step": 2}, ["search.space.epochs", "step", "low and high"]),
        ("search.space.epochs", {"log": True}, ["search.space.epochs", "log", "low and high"]),
        (
            "search.space.epochs",
            {"choices": [1, 2], "step": 2},
            ["search.space.epochs", "step", "leave it out"],
        ),
        ("target.perplexity", "75,0", ["target.perplexity", "75,0", "75.0"]),
        ("search.space.epochs.choice", [1], ["unknown key search.space.epochs.choice", "choices"]),
        ("serach", {}, ["unknown key serach", "search"]),
        ("workload.model.from_confg", {}, ["unknown key workload.model.from_confg"]),
        ("launch.gpu", [0], ["unknown key launch.gpu", "gpus"]),
        ("workload.dropout", 0.1, ["unknown key workload.dropout", "search.space"]),
        ("search.space.evaluations", 4, ["unknown key search.space.evaluations", "in workload"]),
        ("target.perplexity", 0, ["target.perplexity", "greater than or equal to 1", "0"]),
        ("target.perplexity", -1.5, ["target.perplexity", "-1.5"]),
        ("target.perplexity", "low", ["target.perplexity", "'low'"]),
        (
            "search.space.epochs",
            {"choices": []},
            ["search.space.epochs", "choices must have at least one"],
        ),
        (
            "search.space.learning_rate",
            {"low": 1e-2, "high": 1e-4},
            ["low <= high", "0.01", "0.0001"],
        ),
        ("search.space.learning_rate", {"low": 0, "high": 1, "log": True}, ["low > 0"]),
        ("search.space.learning_rate", None, ["search.space.learning_rate"]),
        ("search.sampler", "bayes", ["search.sampler", "'bayes'", "carbon"]),
        ("budget", {}, ["budget", "at least one of"]),
        ("budget.trials", 2.5, ["budget.trials", "2.5"]),
        ("carbon", {}, ["carbon", "country"]),
        ("carbon.country", "usa", ["carbon.country", "'usa'"]),
        ("carbon.pue", 0.5, ["carbon.pue", "0.5"]),
        ("launch.kind", "torque", ["launch", "torque"]),
        ("launch.gpus", [0, 0], ["launch", "differ"]),
        ("workload.sequence_length", 1, ["workload.sequence_length", "1"]),
        ("workload.model", {}, ["workload.model", "exactly one of"]),
        (
            "workload.tokenizer",
            {"kind": "byte", "train_bpe": 300},
            ["workload.tokenizer", "exactly one of"],
        ),
        ("name", "", ["name"]),
        ("target.perplexity", "45", ["target.perplexity", "'45'"]),
        ("target.perplexity", float("inf"), ["target.perplexity"]),
        ("target.perplexity", True, ["target.perplexity", "True"]),
        ("budget.trials", "5", ["budget.trials", "'5'"]),
        ("search.space.epochs", {"choices": [1], "low": 1, "high": 2}, ["has both"]),
        ("search.space.epochs", {1: 2}, ["search.space.epochs"]),
        (
            "search.space.learning_rate",
            {"low": 1e-4, "high": float("inf")},
            ["search.space.learning_rate.high"],
        ),
        ("workload.dataset", {"train_files": ["~nosuchuser/x"]}, ["path"]),
        ("carbon", "~nosuchuser/carbon.yaml", ["path"]),
        ("carbon", "", ["carbon", "''"]),
        ("carbon", "/dev/zero", ["can't read carbon /dev/zero: it must be a regular file"]),
        ("search.space", ".", ["can't read search.space", "it must be a regular file"]),
        ("carbon.trace", "", ["carbon.trace", "at least 1 character", "''"]),
        ("name", "two\nlines", ["name", "control character", r"'two\nlines'"]),
        (
            "search.space.learning_rate",
            float("inf"),
            ["learning_rate", "must be a finite number", "inf"],
        ),
        ("search.space.epochs", {"choices": [None]}, ["epochs", "must be a finite number", "None"]),
        ("search.space.epochs", {"low": "1", "high": 8}, ["epochs", "low", "'1'"]),
        (
            "launch.kind",
            "abc",
            ["launch: kind must be one of 'local', 'slurm', 'hostfile', 'replay', but got 'abc'"],
        ),
        ("name", "..", ["name", "must not be of dots only", "'..'", "give a word"]),
        ("carbon.region", "\x1b[31m", ["carbon.region", "control character"]),
    ],
)
def test_what_is_wrong_is_named(
    path: str, value: object, words: list[str], tiny_study: dict, write_study
) -> None:
    study = copy.deepcopy(tiny_study)
    *parents, last = path.split(".")
    place = study
    for parent in parents:
        place = place[parent]
    place[last] = value
    sentence = refused(study, write_study)
    for word in words:
        assert word in sentence


def test_missing_keys_are_named(tiny_study: dict, write_study) -> None:
    del tiny_study["target"]
    assert "target is missing" in refused(tiny_study, write_study)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: a\nname: b\n", "given twice"),
        ("- a\n- b\n", "must hold keys"),
        ("name: [\n", "not valid YAML"),
        ("", "must hold keys"),
        ("a: &x [1, 2]\nb: *x\n", "aliases"),
        ("budget: {hours: 1:30}\n", "1:30 is no decimal number"),
        ("budget: {hours: 1:30.5}\n", "1:30.5 is no decimal number"),
        ("budget: {trials: 010}\n", "010 is no decimal number"),
        ("name: a\nbudgett: {trials: 3}\n", "did you mean budget"),
        ("? [a]\n: 1\n", "plain text"),
        ("a: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
        ('name: !!int ""\n', "'' can't be read as int at line 1"),
        ("name: !!int [1]\n", "a collection can't be read as int at line 1"),
        ("name: !!int 5.5\n", "'5.5' can't be read as int at line 1"),
        ("name: !!float x\n", "'x' can't be read as float at line 1"),
        ("name: 0x_\n", "'0x_' can't be read as int at line 1"),
        (
            "name: !!timestamp 2024-99-99\n",
            "the tag timestamp can't be used; leave it out at line 1",
        ),
        ("name: !!map [a]\n", "can't be read as a mapping"),
        ("name: !!bool abc\n", "'abc' can't be read as bool"),
        (f"budget: {{trials: 0x{'f' * 4000}}}\n", "is no decimal number"),
        ('name: "\\ud800"\n', "its text can't be read"),
    ],
)
def test_what_is_no_study_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=words):
        load_study(path)


def test_a_date_is_a_name_as_another(tiny_study: dict, write_study) -> None:
    path = write_study({**tiny_study, "name": "to-be-dated"})
    path.write_text(path.read_text().replace("to-be-dated", "2024-01-01"))
    assert load_study(path).name == "2024-01-01"


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        load_study(tmp_path / "nowhere.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="text is not valid"):
        load_study(binary)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        BadInput, match=r"can't read the study file .*pipe: it must be a regular file"
    ):
        load_study(tmp_path / "pipe")
    large = tmp_path / "large.yaml"
    large.write_text("#" * (2**20 + 1))
    with pytest.raises(BadInput, match="it must have 1 MiB at most"):
        load_study(large)


def test_a_piece_may_be_in_the_home_folder(
    tmp_path: Path, tiny_study: dict, write_study, monkeypatch
) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "carbon.yaml").write_text("{country: FRA, trace: a.csv}")
    tiny_study["carbon"] = "~/carbon.yaml"
    carbon = load_study(write_study(tiny_study)).carbon
    assert (carbon.country, carbon.trace) == ("FRA", str(tmp_path / "a.csv"))


@pytest.mark.parametrize(
    ("choices", "same"),
    [
        ([1, "1"], "1 and '1'"),
        ([1, 1.0], "1 and 1.0"),
        ([1, True, 2], "1 and True"),
        ([0, 1, False, True], "0 and False"),
        ([True, 0.5, 1.0], "True and 1.0"),
    ],
)
def test_choices_that_count_as_the_same_are_refused(
    choices: list, same: str, tiny_study: dict, write_study
) -> None:
    tiny_study["search"]["space"]["epochs"] = {"choices": choices}
    said = refused(tiny_study, write_study)
    assert f"choices must differ from each other, but got {choices}" in said and same in said


def test_true_and_other_numbers_are_different_choices() -> None:
    assert Choices(choices=(True, 0, 2)).choices == (True, 0, 2)


def test_an_empty_start_is_refused(tiny_study: dict, write_study) -> None:
    tiny_study["search"]["start"] = {}
    assert "start must name a dimension, but is {}" in refused(tiny_study, write_study)


def test_check_needs_the_database_that_queries_are_judged_by() -> None:
    path = Path(__file__).parents[2] / "studies" / "library-sql.yaml"
    study = {**yaml.safe_load(path.read_text()), "target": {"execution_match": 0.5}}
    study["workload"]["dataset"]["train_files"] = study["workload"]["dataset"]["eval_files"] = [
        str(path)
    ]
    with pytest.raises(
        BadInput, match=r"target\.execution_match needs workload\.dataset\.database"
    ):
        check(parse_study(study, path))
