"""Whether a generated text is the expected one: as text, as SQL, or by the rows that it returns from a database."""

import hashlib
import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from carbonopt.core.errors import BadInput
from carbonopt.train.failures import reason, refused

_MOST_STEPS = 20_000_000  # of SQLite's virtual machine, for one query: a second or so
_STEPS_BETWEEN_LOOKS = 10_000
_MOST_ROWS = 100_000  # that a query may return
_MOST_BYTES = 1_000_000  # of one text or blob
_MOST_BYTES_OF_ROWS = 100_000_000  # all together, written out
_DIGITS = 12  # significant ones of a float: a sum depends on the order in which a query happens to add
_ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
_KEPT = 2**16  # texts whose canonical form or rows are kept: the expected ones return at each evaluation


class Match(ABC):
    @abstractmethod
    def matches(self, expected: str, generated: str) -> bool: ...

    @abstractmethod
    def problem(self, expected: str) -> str | None:
        """Why no generated text can match this one; None: one can."""


class ExactMatch(Match):
    """The same text; a run of white space is one space."""

    def matches(self, expected: str, generated: str) -> bool:
        return one_spaced(expected) == one_spaced(generated)

    def problem(self, expected: str) -> str | None:
        return None


class CanonicalMatch(Match):
    """The same SQL, as sqlglot reads it: letter case of keywords and unquoted names, layout, comments, needless
    parentheses and the order of what AND and OR join make no difference; names of aliases do."""

    def matches(self, expected: str, generated: str) -> bool:
        form = canonical_sql(expected)
        return form is not None and form == canonical_sql(generated)

    def problem(self, expected: str) -> str | None:
        return None if canonical_sql(expected) is not None else "sqlglot can't parse it as one SQL statement"


class ExecutionMatch(Match):
    """The same rows, each as often; in the same order where the expected query orders them. Names of columns make no
    difference, their order does."""

    def __init__(self, database: str) -> None:
        """Raises BadInput if the file is no SQLite database, or one that is being written."""
        self.database = Database(database)
        self._result = lru_cache(_KEPT)(self.database.result)

    def matches(self, expected: str, generated: str) -> bool:
        wanted = self._result(expected)
        try:
            returned = self._result(generated)
        except QueryFailed:
            return False
        return wanted.in_order == returned.in_order if _orders(expected) else wanted.as_set == returned.as_set

    def problem(self, expected: str) -> str | None:
        try:
            self._result(expected)
        except QueryFailed as error:
            return str(error)
        return None


def one_spaced(text: str) -> str:
    """With one space for each run of white space, and none at the ends."""
    return " ".join(text.split())


@lru_cache(_KEPT)
def canonical_sql(query: str) -> str | None:
    """None: it is not one SQL statement that sqlglot can parse."""
    import sqlglot
    from sqlglot.optimizer.normalize_identifiers import normalize_identifiers
    from sqlglot.optimizer.simplify import simplify

    try:
        statements = [statement for statement in sqlglot.parse(query) if statement is not None]
        if len(statements) != 1:
            return None
        form: str = simplify(normalize_identifiers(statements[0])).sql(comments=False)
    except (sqlglot.errors.SqlglotError, RecursionError):  # generated text can be any
        return None
    return form


def _orders(query: str) -> bool:
    """Whether the query itself has ORDER BY, and not only a part of it in parentheses."""
    outside = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/", " ", query, flags=re.DOTALL)
    depth, order = 0, False
    for sign in re.findall(r"[()]|\border\s+by\b", outside, re.IGNORECASE):
        depth += {"(": 1, ")": -1}.get(sign, 0)
        order |= depth == 0 and sign not in ("(", ")")
    return order


class QueryFailed(Exception):
    """Why a query has no rows to compare, in words."""


class Result(NamedTuple):
    """Digests of a query's rows: as they came, and sorted."""

    in_order: bytes
    as_set: bytes


class Database:
    """An SQLite file that queries can read and nothing else: they come out of a model."""

    def __init__(self, path: str) -> None:
        for end in ("-wal", "-journal"):  # what is in there is not in the file
            beside = Path(path + end)
            if beside.is_file() and beside.stat().st_size:
                raise BadInput(
                    f"workload.dataset.database must be closed, but {beside} says that {path} is written to."
                )
        with _must_be_sqlite(path):
            # Immutable: nothing is locked, and nothing is written beside the file, whose folder may be read-only.
            connection = sqlite3.connect(f"file:{quote(path)}?mode=ro&immutable=1", uri=True)
            connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_authorizer(_authorizer)
        self._path, self._connection = path, connection

    def check(self) -> None:
        """Reads the whole file. Raises BadInput if it is damaged."""
        self._connection.set_authorizer(None)
        with _must_be_sqlite(self._path):
            (fault,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
        self._connection.set_authorizer(_authorizer)
        if fault != "ok":
            found = f"{self._path} is damaged: {' '.join(fault.split())}"
            raise BadInput(f"workload.dataset.database must be a whole SQLite file, but {found}.")

    def result(self, query: str) -> Result:
        """Raises QueryFailed: it is no query, asks for more than to read, or takes too many steps or rows."""
        looks = iter(range(_MOST_STEPS // _STEPS_BETWEEN_LOOKS))
        self._connection.set_progress_handler(lambda: next(looks, None) is None, _STEPS_BETWEEN_LOOKS)
        try:
            rows = self._connection.execute(query)
            if rows.description is None:
                raise QueryFailed("it is no query")
            return _digested(rows)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:  # ValueError: a null character, or half a one
            if next(looks, None) is None:
                raise QueryFailed(f"it takes more than {_MOST_STEPS:,} steps") from error
            raise QueryFailed(reason(error)) from error


@contextmanager
def _must_be_sqlite(path: str) -> Iterator[None]:
    sentence = f"workload.dataset.database must be an SQLite file, but {path} can't be read as one: {{}}."
    with refused(sentence, sqlite3.Error):
        yield


def _authorizer(action: int, _table: str | None, function: str | None, *_: str | None) -> int:
    """Of SQLite: no PRAGMA, no ATTACH, no change, nothing that runs other code."""
    allowed = action in _ALLOWED and (function or "").lower() != "load_extension"
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _value(value: object) -> object:
    """With one form for equal values: SQL's 1 equals 1.0."""
    if not isinstance(value, float):
        return value
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
    in_order, as_set = (hashlib.sha256(b"".join(some)).digest() for some in (digests, sorted(digests)))
    return Result(in_order, as_set)
