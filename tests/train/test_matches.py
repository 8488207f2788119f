"""Whether two texts match: as text, as SQL, by the rows that they return."""

import sqlite3
from pathlib import Path

import pytest

from carbonopt.core.errors import BadInput
from carbonopt.train.matches import (
    CanonicalMatch,
    Database,
    ExactMatch,
    ExecutionMatch,
    QueryFailed,
    canonical_sql,
)


@pytest.fixture
def database(tmp_path: Path) -> str:
    path = tmp_path / "a #1 %20?.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (a INTEGER, b TEXT, c REAL)")
        connection.executemany(
            "INSERT INTO t VALUES (?, ?, ?)", [(n, "xyz"[n % 3], n / 10) for n in range(1, 11)]
        )
    connection.close()
    return str(path)


@pytest.mark.parametrize(
    ("expected", "generated", "same"),
    [
        ("a b", "a  b\n", True),
        ("a b", "ab", False),
        ("a b", "A b", False),
        ("", "", True),
    ],
)
def test_exact(expected, generated, same):
    assert ExactMatch().matches(expected, generated) == same


@pytest.mark.parametrize(
    ("expected", "generated", "same"),
    [
        (
            "SELECT a FROM t WHERE b = 1 AND c = 2",
            "select A from T where (c=2) and b  =  1 ;",
            True,
        ),
        ("SELECT COUNT( * ) > 0 FROM t", "select count(*)>0 from t -- how many", True),
        ("SELECT a FROM t WHERE b != 'X'", "SELECT a FROM t WHERE b <> 'X'", True),
        ("SELECT a FROM t WHERE b = 'X'", "SELECT a FROM t WHERE b = 'x'", False),
        ("SELECT a FROM t", "SELECT b FROM t", False),
        ("SELECT a FROM t AS x", "SELECT a FROM t AS y", False),
        ("SELECT a FROM t", "SELECT a FROM t; SELECT a FROM t", False),
        ("SELECT `a b` FROM [t]", 'select "a b"  from `t`', True),
        ("SELECT a FROM t WHERE t MATCH 'x'", "select a from t where t match 'x'", True),
        ("SELECT x'ff', 0x1F", "select X'ff', 31", True),
        ("SELECT x'ff'", "SELECT 255", False),
        ('SELECT a FROM t WHERE b = "X"', 'SELECT a FROM t WHERE b = "x"', False),
        ("SELECT a FROM t WHERE b[1] = 2", "SELECT a FROM t WHERE b[ 1 ]=2", True),
        ("SELECT a FROM t TABLESAMPLE (5 PERCENT)", "SELECT a FROM t", False),
        ("SELECT a FROM (", "SELECT a FROM (", False),
        ("SELECT a FROM t", "", False),
        ("SELECT a FROM t", "(" * 3000, False),
        (
            'SELECT a FROM t WHERE b LIKE "%area0%" AND c = number0',
            'SELECT a FROM t WHERE c=number0 AND b LIKE "%area0%"',
            True,
        ),
    ],
)
def test_canonical(expected, generated, same):
    assert CanonicalMatch().matches(expected, generated) == same


def test_a_canonical_form_keeps_what_a_query_means(database):
    """It returns the same rows."""
    rows = Database(database)
    for query in (
        (
            "SELECT a FROM t WHERE (c > 0.3 AND b = 'x') OR (b = 'y' AND NOT (a = 2 OR a = 5))"
            " ORDER BY a DESC"
        ),
        "SELECT b, COUNT(*) FROM t GROUP BY b HAVING COUNT(*) > 3 ORDER BY 2 LIMIT 2",
        (
            "SELECT DISTINCT x.b FROM t AS x, t AS y WHERE x.a = y.a AND 1 = 1 AND y.c BETWEEN 0.2"
            " AND 0.9"
        ),
        "SELECT a FROM t WHERE c = (SELECT MAX(c) FROM t WHERE b = 'z') OR a IN (1, 2) AND a <> 2",
    ):
        form = canonical_sql(query)
        assert form is not None and rows.result(form) == rows.result(query)


@pytest.mark.parametrize(
    ("expected", "generated", "same"),
    [
        ("SELECT a FROM t WHERE b = 'x'", "SELECT a FROM t WHERE b = 'x' ORDER BY a DESC", True),
        ("SELECT a FROM t ORDER BY a", "SELECT a FROM t ORDER BY a DESC", False),
        ("SELECT a FROM t order\nby a", "SELECT a FROM t ORDER BY c", True),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", "SELECT a FROM t ORDER BY a DESC", True),
        ("SELECT 'order by' FROM t WHERE a < 3", "SELECT 'order by' FROM t WHERE a > 8", True),
        ("SELECT b FROM t", "SELECT DISTINCT b FROM t", False),
        ("SELECT a, b FROM t", "SELECT b, a FROM t", False),
        ("SELECT a AS n FROM t", "SELECT a FROM t", True),
        (
            "SELECT SUM(c) FROM t",
            "SELECT SUM(d) FROM (SELECT -c AS d FROM t ORDER BY a DESC)",
            False,
        ),
        ("SELECT SUM(c) FROM t", "SELECT SUM(d) FROM (SELECT c AS d FROM t ORDER BY a DESC)", True),
        ("SELECT 1", "SELECT 1.0", True),
        ("SELECT 1700000000123", "SELECT 1700000000123.0", True),
        ("SELECT 1700000000123", "SELECT 1700000000122.9998", True),
        ("SELECT 1234567890123456", "SELECT 1234567890123456.0", True),
        ("SELECT 1234567890123456", "SELECT 1234567890123457.0", False),
        ("SELECT -1234567890123456.0", "SELECT -1234567890123457.0", False),
        ("SELECT 12345678901234567890.0", "SELECT 12345678901234599999.0", True),
        ("SELECT 9e999", "SELECT 9e999", True),
        ("SELECT 1", "SELECT '1'", False),
        ("SELECT 'x'", "SELECT x'78'", False),
        ("SELECT a FROM t WHERE a > 99", "", False),
        ("SELECT a FROM t WHERE a > 99", "-- nothing", False),
        ("SELECT a FROM t WHERE a > 99", "SELECT c FROM t WHERE a > 99", True),
        (
            "SELECT a FROM t",
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION SELECT i + 1 FROM n LIMIT 10) SELECT i FROM n",
            True,
        ),
        ("SELECT a FROM t", "SELECT a FROM", False),
        ("SELECT a FROM t", "SELECT a FROM t; SELECT a FROM t", False),
        ("SELECT a FROM t", "SELECT a FROM t\0", False),
        ("SELECT a FROM t", "SELECT a FROM t \ud800", False),
    ],
)
def test_execution(expected, generated, same, database):
    match = ExecutionMatch(database)
    assert match.problem(expected) is None
    assert match.matches(expected, generated) == same
    assert match.finds_nothing(expected) == ("a > 99" in expected)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("INSERT INTO t VALUES (1, 'x', 1)", "not authorized"),
        ("UPDATE t SET a = 1", "not authorized"),
        ("DROP TABLE t", "not authorized"),
        ("CREATE TEMP TABLE u AS SELECT 1", "not authorized"),
        ("PRAGMA writable_schema = 1", "not authorized"),
        ("SELECT * FROM pragma_table_info('t')", "not authorized"),
        ("ATTACH DATABASE '{}' AS other", "not authorized"),
        ("VACUUM INTO '{}'", "authorization denied"),
        ("SELECT load_extension('{}')", "not authorized"),
        ("SELECT zeroblob(1000000000)", "too big"),
        (
            "SELECT COUNT(*) FROM t, t AS u, t AS v, t AS w, t AS x, t AS y, t AS z",
            "more than 20,000,000 steps",
        ),
        ("SELECT 1 FROM t, t AS u, t AS v, t AS w, t AS x, t AS y", "more than 100,000 rows"),
        ("SELECT zeroblob(900000) FROM t, t AS u, t AS v", "100,000,000 bytes"),
        (
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n",
            "than 100,000 rows",
        ),
        (
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT COUNT(*) FROM n",
            "20,000,000 steps",
        ),
        ("", "it is no query"),
    ],
)
def test_a_query_can_read_and_nothing_else(query, said, database, tmp_path):
    before, other = Path(database).read_bytes(), tmp_path / "other"
    rows = Database(database)
    with pytest.raises(QueryFailed, match=said):
        rows.result(query.format(other))
    assert rows.result("SELECT COUNT(*) FROM t") == rows.result("SELECT 10"), (
        "the next one runs as ever"
    )
    assert Path(database).read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {Path(database).name}


@pytest.fixture
def virtual(tmp_path: Path) -> str:
    """A database with tables of SQLite's modules, and one of a module that nobody has."""
    path = tmp_path / "virtual.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript("""
            CREATE TABLE j (x TEXT);
            INSERT INTO j VALUES ('{"a": [1, 2]}');
            CREATE VIRTUAL TABLE "five ""5" USING fts5(title, body);
            CREATE VIRTUAL TABLE four USING fts4(title, body);
            CREATE VIRTUAL TABLE boxes USING rtree(id, low, high);
            INSERT INTO "five ""5" VALUES ('one', 'hello world'), ('two', 'bye world');
            INSERT INTO four VALUES ('one', 'hello world'), ('two', 'bye world');
            INSERT INTO boxes VALUES (1, 0, 1), (2, 5, 6);
            PRAGMA writable_schema = 1;
            INSERT INTO sqlite_master
            VALUES ('table', 'other', 'other', 0, 'CREATE VIRTUAL TABLE other USING nobodys(a)');
        """)
    connection.close()
    return str(path)


@pytest.mark.parametrize(
    ("expected", "generated"),
    [
        ("SELECT 1 UNION SELECT 2", "SELECT value FROM j, json_each(j.x, '$.a')"),
        ("SELECT 2", "SELECT COUNT(*) FROM j, json_tree(j.x) WHERE atom IS NOT NULL"),
        ("SELECT 'one'", """SELECT title FROM "five ""5" WHERE body MATCH 'hello' ORDER BY rank"""),
        ("SELECT 'bye [world]'", """SELECT highlight("five ""5", 1, '[', ']') FROM "five ""5"('two AND world')"""),
        ("SELECT 'two'", "SELECT title FROM four WHERE four MATCH 'bye'"),
        ("SELECT 2", "SELECT id FROM boxes WHERE low > 2"),
    ],
)  # fmt: skip
def test_virtual_tables_are_read(expected, generated, virtual):
    match = ExecutionMatch(virtual)
    for _ in range(2):
        assert match.matches(generated, expected) and match.matches(expected, generated)
        match.database.check()


@pytest.mark.parametrize(
    "query",
    [
        "INSERT INTO four(four) VALUES ('optimize')",
        "SELECT optimize(four) FROM four",
        'INSERT INTO "five ""5"("five ""5") VALUES (\'rebuild\')',
        "DELETE FROM boxes",
        "DROP TABLE four",
        "CREATE VIRTUAL TABLE temp.more USING fts5(a)",
        "PRAGMA data_version",
        "PRAGMA main.data_version",
        "EXPLAIN PRAGMA data_version",
        "SELECT * FROM pragma_data_version",
        "SELECT * FROM dbstat",
        "SELECT * FROM other",
    ],
)
def test_virtual_tables_are_only_read(query, virtual, tmp_path):
    before = Path(virtual).read_bytes()
    rows = Database(virtual)
    reads = """SELECT title FROM "five ""5" WHERE body MATCH 'hello'"""
    for _ in range(2):
        assert rows.result(reads) == rows.result("SELECT 'one'")
        with pytest.raises(QueryFailed):
            rows.result(query)
    assert rows.result("SELECT COUNT(*) FROM four WHERE four MATCH 'world'") == rows.result(
        "SELECT 2"
    )
    assert Path(virtual).read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {Path(virtual).name}


def test_a_damaged_database_is_refused(tmp_path):
    path = tmp_path / "a.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (a TEXT)")
        connection.executemany("INSERT INTO t VALUES (?)", [("x" * 500,)] * 100)
    connection.close()
    whole = Database(str(path))
    whole.check()
    with pytest.raises(QueryFailed, match="not authorized"):
        whole.result("PRAGMA user_version")
    content = path.read_bytes()
    pages = len(content) // 4096
    assert pages > 4
    path.write_bytes(content[:4096] + bytes(4096 * (pages - 1)))
    with pytest.raises(BadInput, match=r"must be a whole SQLite file, but .* is damaged: "):
        Database(str(path)).check()
