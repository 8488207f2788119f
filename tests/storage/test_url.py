"""URLs of storages: which databases are taken, and that no password is shown."""

import pytest

from carbonopt.core.errors import BadInput
from carbonopt.storage.url import connect


@pytest.mark.parametrize("kind", ["mysql", "mysql+pymysql", "mariadb", "oracle", "mssql", "x+y"])
def test_a_database_of_another_kind_is_refused_without_its_password(kind: str) -> None:
    with pytest.raises(BadInput) as refused:
        connect(f"{kind}://user:hunter2@localhost/studies")
    assert f"is of '{kind.partition('+')[0]}'" in str(refused.value)
    assert "SQLite or PostgreSQL" in str(refused.value) and "hunter2" not in str(refused.value)
