"""URLs of storages: which databases are taken, and that no password is shown."""

import json
import resource
from pathlib import Path

import pytest

from carbonopt.core.errors import BadInput
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.url import connect, storage_url


@pytest.mark.parametrize("kind", ["mysql", "mysql+pymysql", "mariadb", "oracle", "mssql", "x+y"])
def test_a_database_of_another_kind_is_refused_without_its_password(kind: str) -> None:
    with pytest.raises(BadInput) as refused:
        connect(f"{kind}://user:hunter2@localhost/studies")
    assert f"is of '{kind.partition('+')[0]}'" in str(refused.value)
    assert "SQLite or PostgreSQL" in str(refused.value) and "hunter2" not in str(refused.value)


def test_a_full_disk_is_not_called_an_option_of_the_user(tmp_path: Path) -> None:
    """Writing beyond a limit of a file's size fails, for SQLite, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(BadInput) as refused:
            connect(f"sqlite:///{tmp_path}/study.db")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = str(refused.value)
    assert f"{tmp_path}/study.db" in said and "free space" in said and "sqlite:" not in said


@pytest.mark.parametrize(
    ("begun_with", "given", "same"),
    [
        ("postgresql+psycopg://me@host/db", "postgresql://me:secret@host/db", True),
        ("postgresql://me@host/db", "postgresql+psycopg://me@host/db", True),
        ("postgresql://me@host/db", "postgresql://me@host/other", False),
        ("sqlite:////tmp/study.db", "sqlite:////tmp/../tmp/study.db", True),
        ("sqlite:////tmp/study.db", "postgresql://me@host/db", False),
    ],
)
def test_a_storage_is_the_same_whatever_driver_a_url_names(
    begun_with: str, given: str, same: bool, tmp_path: Path
) -> None:
    paths = StudyPaths(tmp_path)
    paths.storage_pointer.write_text(json.dumps({"url": begun_with, "study": "s"}))
    if same:
        assert storage_url(paths, given) == given
    else:
        with pytest.raises(BadInput) as refused:
            storage_url(paths, given)
        assert "secret" not in str(refused.value)
