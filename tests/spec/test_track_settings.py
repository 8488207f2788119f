from pathlib import Path

import pytest
from tracked_studies import study

from carbonopt.core import extras
from carbonopt.core.errors import BadInput
from carbonopt.study_file.reader import load_study, parse_study, study_of
from carbonopt.study_file.study_checks import check


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:///mlflow.db",
        "databricks",
        "file:///tmp/mlruns",
        "http://",
        "http://host:99999",
        "http://[::1",
    ],
)
def test_only_the_address_of_a_server_is_an_mlflow_uri(uri: str) -> None:
    with pytest.raises(BadInput, match=r"track\.mlflow\.uri") as refused:
        study(mlflow={"uri": uri, "experiment": "e"})
    assert "http://127.0.0.1:5000" in str(refused.value)


@pytest.mark.parametrize(
    "uri",
    [
        "http://me:s3cret@host",
        "https://s3cret@host:5000/path",
        "http://me:s3cret@host\n",
        f"http://me:s3cret@{'h' * 300}",
        "ftp://me:s3cret@host",
        "http://host?token=s3cret",
        "http://host#s3cret",
        "http://u:s3cret%40h/",
        "http://s3cret%40h/",
        "http://u:s3cret\uff20h",
        "http://u:s3cret\ufe6bh",
    ],
)
def test_uri_with_a_password_is_refused_and_not_shown(uri: str) -> None:
    with pytest.raises(BadInput, match=r"track\.mlflow\.uri") as refused:
        study(mlflow={"uri": uri, "experiment": "e"})
    assert "s3cret" not in str(refused.value)
    assert "MLFLOW_TRACKING_PASSWORD" in str(refused.value)


_SECRET = "http://u:s3cret@h"


@pytest.mark.parametrize(
    "track",
    [
        _SECRET,
        [_SECRET],
        {_SECRET: 1},
        {"mlflow": _SECRET},
        {"mlflow": [_SECRET]},
        {"mlflow": {_SECRET: 1}},
        {"mlflow": {"uri": [_SECRET], "experiment": "e"}},
        {"mlflow": {"uri": {"a": _SECRET}, "experiment": "e"}},
        {"mlflow": {"uri": "https://u:s3cret", "experiment": "e"}},
        {"mlflow": {"uri": f"{_SECRET}\x01", "experiment": "e"}},
        {"mlflow": {"uri": "http://h", "experiment": [_SECRET]}},
        {"mlflow": {"uri": "http://h", "experiment": _SECRET}},
        {"mlflow": {"uri": "http://h", "experiment": "a http://u:s3cret%40h"}},
        {"mlflow": {"uri": "http://h", "experiment": "http://u:s3cret\uff20h"}},
        {"mlflow": {"uri": "http://h", "experiment": f"{_SECRET}\x01"}},
        {"mlflow": {"uri": "http://h", "experiment": f"{_SECRET}{'h' * 300}"}},
        {"trackio": {"project": _SECRET}},
        {"wandb": {"project": _SECRET}},
        {"wandb": {"entity": _SECRET}},
        {"wandb": {"mode": _SECRET}},
        {"tensorboard": _SECRET},
    ],
)
def test_no_value_below_track_is_shown(track: object) -> None:
    with pytest.raises(BadInput, match="track") as refused:
        parse_study({**study().model_dump(mode="json", exclude_none=True), "track": track}, "test")
    assert "s3cret" not in str(refused.value)


def test_misspelt_tracker_is_named_with_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"track\.mlfow.*mlflow"):
        study(mlfow={"uri": "http://h", "experiment": "e"})


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("track: {mlflow: {uri: 'http://u:s3cret@h', experiment: e}\n  name: a\n", None),
        ("track: &a {uri: http://u:s3cret@h}\nuri: *a\n", None),
        ("uri: http://u:s3cret@h: 5\n", "line 1, column 23"),
        ('uri: "http://u:\\s3cret@h"\n', "line 1, column 1"),
        ('uri: "http://u:\\y3cret@h s3cret"\n', "line 1, column 1"),
        ("uri: !http://u:s3cret@h x\n", "line 1, column 6"),
        ("uri: !!int http://u:s3cret@h\n", "line 1, column 6"),
        ("uri: !!float u:s3cret%40h\n", "line 1, column 6"),
        ("http://u:s3cret@h: 1\nhttp://u:s3cret@h: 1\n", "line 2, column 1"),
        ("http://u:s3cret@h\n", None),
        ("uri: @s3cret\n", "line 1, column 6"),
    ],
)
def test_yaml_error_shows_no_line_that_may_hold_a_password(
    text: str, place: str | None, tmp_path: Path
) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(BadInput) as refused:
        load_study(tmp_path / "s.yaml")
    assert "s3cret" not in str(refused.value)
    assert place is None or place in str(refused.value)


def test_python_config_with_a_secret_of_another_type_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        study_of({"track": {"mlflow": {"uri": b"http://u:s3cret@h"}}}, tmp_path)
    assert "bytes" in str(refused.value)
    assert "s3cret" not in str(refused.value)


def test_address_of_a_server_loses_its_last_slash_alone() -> None:
    track = study(mlflow={"uri": "https://host:5000/mlflow/", "experiment": "e"}).track
    assert track.mlflow is not None
    assert track.mlflow.uri == "https://host:5000/mlflow"


@pytest.mark.parametrize(
    ("track", "key"),
    [
        ({"mlflow": {"uri": "http://host", "experiment": " "}}, "track.mlflow.experiment"),
        ({"mlflow": {"uri": "http://host"}}, "track.mlflow.experiment"),
        ({"mlflow": {"experiment": "e"}}, "track.mlflow.uri"),
        ({"trackio": {"project": ""}}, "track.trackio.project"),
        ({"trackio": {"project": "a b"}}, "track.trackio.project"),
        ({"trackio": {"project": "../a"}}, "track.trackio.project"),
        ({"trackio": {"project": "registry-a"}}, "track.trackio.project"),
        ({"trackio": {"project": "a_configs"}}, "track.trackio.project"),
    ],
)
def test_tracker_without_a_usable_name_is_refused(track: dict, key: str) -> None:
    with pytest.raises(BadInput) as refused:
        study(**track)
    assert key in str(refused.value)


@pytest.mark.parametrize(
    ("package", "settings"),
    [("mlflow", {"uri": "http://host", "experiment": "e"}), ("trackio", {"project": "p"})],
)
def test_missing_extra_is_named_with_its_pip_line(
    package: str, settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    with pytest.raises(BadInput) as refused:
        check(study(**{package: settings}))
    assert f"track.{package} needs {package}" in str(refused.value)
    assert f"pip install 'carbonopt[{package}]'" in str(refused.value)
