"""What a study file may hold: read in no time, as it was written, or refused in one sentence."""

import time
from pathlib import Path

import pytest
import yaml
from commands import refusal, within

from carbonopt.core.errors import BadInput
from carbonopt.study_file.reader import PipelineFile, load_study
from carbonopt.study_file.yaml_file import read_yaml


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("word", ["NO", "no", "ON", "off", "Yes", "y", "n", "N"])
def test_words_that_old_yaml_takes_for_booleans_are_text(word: str, tmp_path: Path) -> None:
    assert read_yaml(written(tmp_path / "a.yaml", f"{word}: {word}"), "a file").values == {
        word: word
    }


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("true", True),
        ("False", False),
        ("TRUE", True),
        ('"true"', "true"),
        ("true_positive_rate", "true_positive_rate"),
        ("truecase", "truecase"),
        ("Falsehood", "Falsehood"),
        ("nullable", "nullable"),
        ("~x", "~x"),
        ("1x", "1x"),
        ("1e5x", "1e5x"),
        (".info", ".info"),
        (".nano", ".nano"),
    ],
)
def test_booleans_are_those_of_yaml_1_2(word: str, value: bool | str, tmp_path: Path) -> None:
    assert read_yaml(written(tmp_path / "a.yaml", f"key: {word}"), "a file").values == {
        "key": value
    }


def test_norway_and_ontario_are_named_as_they_were_written(
    replay_study: dict, tmp_path: Path
) -> None:
    text = yaml.safe_dump({key: value for key, value in replay_study.items() if key != "carbon"})
    with pytest.raises(
        BadInput,
        match=r"carbon.country: must be a country.s code of three capital letters.* but got 'NO'",
    ):
        load_study(written(tmp_path / "a.yaml", f"{text}carbon: {{country: NO}}\n"))
    config = load_study(
        written(tmp_path / "b.yaml", f"{text}carbon: {{country: CAN, region: ON}}\n")
    )
    assert config.carbon.region == "ON"


def test_a_boolean_of_old_yaml_is_told_what_to_write(replay_study: dict, tmp_path: Path) -> None:
    text = yaml.safe_dump(replay_study)
    with pytest.raises(BadInput, match=r"track.tensorboard: must be true or false"):
        load_study(written(tmp_path / "a.yaml", f"{text}track: {{tensorboard: yes}}\n"))


LARGE = 900_000  # bytes


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("a: [" + "1, " * (LARGE // 3) + "]", "10,000 keys and values"),
        (
            "".join(f"k{number}: {{a: [1]}}\n" for number in range(LARGE // 16)),
            "10,000 keys and values",
        ),
        ("a: " + "[" * LARGE, "nested too deeply"),
        ("a: !!" + "x" * LARGE, "tag"),
        ("a: " + "x " * (LARGE // 2), "unknown key a"),
        ("a: |\n" + "  x\n" * (LARGE // 4), "unknown key a"),
        ("#\n" * (LARGE // 2), "must hold keys"),
    ],
    ids=["list", "mapping", "deep", "tag", "words", "block", "comments"],
)
def test_a_large_file_is_read_or_refused_at_once(what: str, says: str, tmp_path: Path) -> None:
    path = written(tmp_path / "large.yaml", what)
    began_s = time.process_time()
    with pytest.raises(BadInput, match=says) as refused:
        load_study(path)
    assert time.process_time() - began_s < 3
    assert len(str(refused.value)) < 1500


@pytest.mark.parametrize("intensity", [5e-324, 1e-9, 0.0, -1.0, 5001.0, 1e300])
def test_an_intensity_that_no_grid_has_is_refused(
    intensity: float, replay_study: dict, write_study
) -> None:
    replay_study["carbon"] = {"intensity_g_co2e_per_kwh": intensity}
    assert "carbon.intensity_g_co2e_per_kwh" in refusal("check", write_study(replay_study))


def test_a_section_without_keys_says_so(replay_study: dict, write_study) -> None:
    replay_study["budget"]["trails"] = 3
    sentence = refusal("check", write_study(replay_study))
    assert "budget.trails" in sentence and "did you mean trials" in sentence


@pytest.mark.parametrize(
    "command",
    ["python t.py --text '{words}' {x}", "python -c '{program}' {x}", "python t.py --o {name} {x}"],
)
def test_a_word_of_a_command_may_be_longer_than_a_files_name(
    command: str, write_study, tmp_path: Path
) -> None:
    (tmp_path / "t.py").write_text("")
    words = {"words": "word " * 80, "program": "print(1);" * 40, "name": "y" * 300}
    for name, text in words.items():
        command = command.replace(f"{{{name}}}", text)
    raw = {
        "name": "long",
        "workload": {"task": "script", "command": command, "folder": str(tmp_path)},
        "target": {"accuracy": 0.7},
        "search": {"space": {"x": {"choices": [1, 2, 3]}}},
        "budget": {"trials": 3},
        "carbon": {"intensity_g_co2e_per_kwh": 230},
        "launch": {"gpus": []},
    }
    done = within("check", write_study(raw))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("targte: {accuracy: 0.9}", 1, "did you mean target"),
        ("target: {accuracy: 0.9}\nsearch:\n  spce: {}", 3, "did you mean space"),
        ("target: {accuracy: 96%}", 1, "write a percentage as a fraction, 0.96"),
        ("target:\n  accuracy: 86.2", 2, "write a percentage as a fraction, 0.862"),
        ("launch: {gpus: cpu}", 1, r"\[\] stands for the CPU"),
        (
            "search:\n  space:\n    epochs: {choices: 5, 20, 60}",
            3,
            r"a list is written in brackets",
        ),
        ("search:\n  space:", 2, "search.space is empty"),
        ("workload: true", 1, "workload: must have keys of its own, task, quality"),
        ("workload: [script]", 1, "workload: must have keys of its own, task, quality"),
        ("search:\n  space: Auto", 2, "search.space must be auto"),
        ("launch:\n  kind: hostfile\n  hosts: [a]", 3, "launch.hosts"),
        ("launch:\n  kind: hostfile\n  hostfile: 5", 3, "launch.hostfile"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_what_to_write(
    text: str, line: int, says: str, replay_study: dict, tmp_path: Path
) -> None:
    """The wrong keys stand before the right ones of a whole study file."""
    wrong = yaml.safe_load(text)
    rest = {key: value for key, value in replay_study.items() if key not in wrong}
    if "search" in wrong and "spce" not in (wrong["search"] or {}):
        rest["launch"] = {"gpus": []}
        rest["workload"] = {"task": "script", "command": "python x.py {epochs}"}
    path = written(tmp_path / "a.yaml", f"{text}\n{yaml.safe_dump(rest)}")
    with pytest.raises(BadInput, match=rf"a.yaml, line {line}: .*{says}"):
        load_study(path)


@pytest.mark.parametrize(
    ("value", "mended"), [("0,9", "0.9"), ("1,234.5", "1234.5"), ("-2,5e-1", "-2.5e-1")]
)
def test_a_comma_in_a_number_is_named_with_what_to_write(
    value: str, mended: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "a.yaml", f"a: 1\nb: {{c: {value}, d: 3}}\n")
    with pytest.raises(BadInput, match=rf"is {value};.*write {mended},.*line 2"):
        read_yaml(path, "a file")
    listed = written(tmp_path / "b.yaml", "b: {c: [1,2], d: 5, 6: }\n")
    assert read_yaml(listed, "a file").values["b"]["c"] == [1, 2]


def test_a_misspelt_key_of_a_pipeline_is_named_with_its_line_and_the_nearest(
    tmp_path: Path,
) -> None:
    text = "name: chain\npipeline:\n- {step: one, study: one.yaml}\n- {step: two, stdy: two.yaml}\n"
    with pytest.raises(BadInput, match=r"a.yaml, line 4: .*stdy; did you mean study\?"):
        PipelineFile.load(written(tmp_path / "a.yaml", text))


def test_tabs_are_answered_with_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="indent with spaces instead of tabs"):
        read_yaml(written(tmp_path / "a.yaml", "search:\n\tspace: {}\n"), "a file")


@pytest.mark.parametrize(
    "keys",
    [
        "carbon",
        "carbon.trace",
        "schedule.forecast",
        "search.learn_from",
        "search.space",
        "workload.config_template",
        "workload.dataset.database",
        "workload.dataset.name_or_path",
        "workload.dataset.train_files",
        "workload.deepspeed",
        "workload.folder",
        "workload.model.name_or_path",
        "workload.reward.python",
    ],
)
@pytest.mark.parametrize("in_list", [False, True])
def test_password_in_place_of_a_path_or_a_name_is_not_shown(
    keys: str, in_list: bool, tiny_study: dict, write_study
) -> None:
    address = "https://user:s3cret@host/file"
    *above, last = keys.split(".")
    part = tiny_study
    for key in above:
        part = part.setdefault(key, {})
    part[last] = [address] if in_list else address
    with pytest.raises(BadInput) as error:
        load_study(write_study(tiny_study))
    assert "s3cret" not in str(error.value)
    assert keys.split(".")[0] in str(error.value)
