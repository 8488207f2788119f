"""Compare a generated text with the expected one: as text, as SQL, or by the rows of a database."""

import hashlib
import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from carbonopt.core.errors import BadInput
from carbonopt.train.failures import reason, refused

_MOST_STEPS = 20_000_000  # limit of SQLite's virtual machine steps for one query: a second or so
_STEPS_BETWEEN_LOOKS = 10_000
_MOST_ROWS = 100_000  # number of rows that a query may return
_MOST_BYTES = 1_000_000  # size of one text or blob
_MOST_BYTES_OF_ROWS = 100_000_000  # size of all rows together, written out
# significant digits of a float: a sum depends on the order in which a query happens to add
_DIGITS = 12
_MOST_EXACT = 2**53  # up to here a float has room for every whole number
_ALLOWED = (
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
)
# number of texts whose canonical form or rows are cached: expected texts return at each evaluation
_KEPT = 2**16


class Match(ABC):
    @abstractmethod
    def matches(self, expected: str, generated: str) -> bool: ...

    @abstractmethod
    def problem(self, expected: str) -> str | None:
        """Return why no generated text can match this one, or None if one can."""


class ExactMatch(Match):
    """A match of equal texts, where a run of white space counts as one space."""

    def matches(self, expected: str, generated: str) -> bool:
        return one_spaced(expected) == one_spaced(generated)

    def problem(self, expected: str) -> str | None:
        return None


class CanonicalMatch(Match):
    """A match of equal SQL, as sqlglot reads SQLite's.

    The letter case of keywords and unquoted names, layout, comments, needless parentheses and the
    order of what AND and OR join make no difference; names of aliases do.
    """

    def matches(self, expected: str, generated: str) -> bool:
        form = canonical_sql(expected)
        return form is not None and form == canonical_sql(generated)

    def problem(self, expected: str) -> str | None:
        return (
            None
            if canonical_sql(expected) is not None
            else "sqlglot can't parse it as one SQL statement"
        )


class ExecutionMatch(Match):
    """A match of queries that return the same rows, each equally often.

    The order of rows counts where the expected query has ORDER BY. Names of columns make no
    difference, their order does.
    """

    def __init__(self, database: str) -> None:
        """Open the database. Raises BadInput if it is no SQLite file or is being written to."""
        self.database = Database(database)
        self._result = lru_cache(_KEPT)(self.database.result)

    def matches(self, expected: str, generated: str) -> bool:
        wanted = self._result(expected)
        try:
            returned = self._result(generated)
        except QueryFailed:
            return False
        return (
            wanted.in_order == returned.in_order
            if _orders(expected)
            else wanted.as_set == returned.as_set
        )

    def problem(self, expected: str) -> str | None:
        try:
            self._result(expected)
        except QueryFailed as error:
            return str(error)
        return None

    def finds_nothing(self, expected: str) -> bool:
        """Return whether a query has no rows, so that any query without rows matches it.

        Raises:
            QueryFailed: As `problem` tells.
        """
        return self._result(expected) == _digested([])


def one_spaced(text: str) -> str:
    """Return the text with one space for each run of white space, and none at the ends."""
    return " ".join(text.split())


@lru_cache(_KEPT)
def canonical_sql(query: str) -> str | None:
    """Return a query's canonical form, or None if sqlglot can't parse it as one SQL statement.

    It is read as SQLite's, or else in sqlglot's own dialect, which has other databases' arrays.
    """
    return _canonical_form(query, "sqlite") or _canonical_form(query, None)


def _canonical_form(query: str, dialect: str | None) -> str | None:
    import sqlglot
    from sqlglot.optimizer.normalize_identifiers import normalize_identifiers
    from sqlglot.optimizer.simplify import simplify

    try:
        statements = [each for each in sqlglot.parse(query, read=dialect) if each is not None]
        if len(statements) != 1:
            return None
        # Not the dialect's rule for letter case: SQLite also reads "X" as a text.
        form: str = simplify(normalize_identifiers(statements[0])).sql(
            dialect, comments=False, unsupported_level=sqlglot.ErrorLevel.RAISE
        )
    except (sqlglot.errors.SqlglotError, RecursionError):  # a generated text can be anything
        return None
    return form


def _orders(query: str) -> bool:
    """Return whether the query itself has ORDER BY, and not only a part of it in parentheses."""
    outside = re.sub(
        r"'[^']*'|\"[^\"]*\"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/", " ", query, flags=re.DOTALL
    )
    depth, order = 0, False
    for sign in re.findall(r"[()]|\border\s+by\b", outside, re.IGNORECASE):
        depth += {"(": 1, ")": -1}.get(sign, 0)
        order |= depth == 0 and sign not in ("(", ")")
    return order


class QueryFailed(Exception):
    """A query has no rows to compare; the text of the error says why."""


class Result(NamedTuple):
    """Digests of a query's rows, in the order returned and sorted."""

    in_order: bytes
    as_set: bytes


class Database:
    """An SQLite file that queries can only read, because they come out of a model."""

    def __init__(self, path: str) -> None:
        for end in ("-wal", "-journal"):  # the content of these isn't in the file yet
            beside = Path(path + end)
            if beside.is_file() and beside.stat().st_size:
                raise BadInput(
                    f"workload.dataset.database must be closed, but {beside} says that {path} is"
                    " written to."
                )
        with _must_be_sqlite(path):
            # Immutable: nothing is locked, and nothing is written beside the file, whose folder may
            # be read-only.
            # Without a cache of statements, the authorizer sees each query.
            connection = sqlite3.connect(
                f"file:{quote(path)}?mode=ro&immutable=1", uri=True, cached_statements=0
            )
            connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            _connect_virtual_tables(connection)
        connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        self._path, self._connection = path, connection
        self._selects = False
        connection.set_authorizer(self._authorizer)

    def check(self) -> None:
        """Read the whole file. Raises BadInput if it is damaged."""
        self._connection.set_authorizer(None)
        with _must_be_sqlite(self._path):
            (problem,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
        self._connection.set_authorizer(self._authorizer)
        if problem != "ok":
            found = f"{self._path} is damaged: {' '.join(problem.split())}"
            raise BadInput(f"workload.dataset.database must be a whole SQLite file, but {found}.")

    def result(self, query: str) -> Result:
        """Run a query and return the digests of its rows.

        Raises:
            QueryFailed: It is no query, does more than read, or takes too many steps or rows.
        """
        self._selects = False
        looks = iter(range(_MOST_STEPS // _STEPS_BETWEEN_LOOKS))
        self._connection.set_progress_handler(
            lambda: next(looks, None) is None, _STEPS_BETWEEN_LOOKS
        )
        try:
            rows = self._connection.execute(query)
            if rows.description is None:
                raise QueryFailed("it is no query")
            return _digested(rows)
        # ValueError: a null character, or half a surrogate pair
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            if next(looks, None) is None:
                raise QueryFailed(f"it takes more than {_MOST_STEPS:,} steps") from error
            raise QueryFailed(reason(error)) from error

    def _authorizer(
        self, action: int, name: str | None, function: str | None, *_: str | None
    ) -> int:
        """Forbid SQLite PRAGMA, ATTACH, changes and anything that runs other code."""
        self._selects |= action == sqlite3.SQLITE_SELECT
        allowed = action in _ALLOWED and (function or "").lower() != "load_extension"
        # FTS5 runs this PRAGMA within a SELECT that reads its table. A query that is one itself
        # has no SELECT before it.
        by_fts5 = self._selects and (action, name) == (sqlite3.SQLITE_PRAGMA, "data_version")
        return sqlite3.SQLITE_OK if allowed or by_fts5 else sqlite3.SQLITE_DENY


@contextmanager
def _must_be_sqlite(path: str) -> Iterator[None]:
    sentence = (
        f"workload.dataset.database must be an SQLite file, but {path} can't be read as one: {{}}."
    )
    with refused(sentence, sqlite3.Error):
        yield


def _connect_virtual_tables(connection: sqlite3.Connection) -> None:
    """Connect the file's virtual tables and those of JSON, before the authorizer forbids it.

    To connect one, SQLite prepares changes of the schema and of the tables below it, which a query
    that reads it never runs. It stays connected.
    """
    virtual = connection.execute("SELECT name FROM sqlite_master WHERE type='table' AND rootpage=0")
    for name in [*(name for (name,) in virtual), "json_each", "json_tree"]:
        quoted = name.replace('"', '""')
        with suppress(sqlite3.Error):  # SQLite lacks its module: queries that read it fail
            connection.execute(f'SELECT 1 FROM "{quoted}" LIMIT 0')  # noqa: S608


def _value(value: object) -> object:
    """Return a value in one form for all equal values: SQL's 1 equals 1.0."""
    if not isinstance(value, float):
        return value
    if 10**_DIGITS <= abs(value) <= _MOST_EXACT:  # the digits would tell it from the whole number
        return round(value)
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded


def _digested(rows: Iterable[tuple[object, ...]]) -> Result:
    digests, size = [], 0
    for row in rows:
        text = repr(tuple(map(_value, row))).encode()
        digests.append(hashlib.sha256(text).digest())
        size += len(text)
        if len(digests) > _MOST_ROWS or size > _MOST_BYTES_OF_ROWS:
            limit = f"{_MOST_ROWS:,} rows or {_MOST_BYTES_OF_ROWS:,} bytes"
            raise QueryFailed(f"it returns more than {limit}")
    in_order, as_set = (
        hashlib.sha256(b"".join(some)).digest() for some in (digests, sorted(digests))
    )
    return Result(in_order, as_set)
