"""The URL of a study's storage, whose password is never shown or kept."""

import os
import sqlite3
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import optuna
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError

from carbonopt.core.errors import BadInput, shortened
from carbonopt.core.files import check_regular, is_there, parsed_json, read_text, write_json
from carbonopt.storage.locked_storage import Patience, sqlite_arguments
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.reconnecting_storage import ReconnectingStorage

Made = TypeVar("Made")

RESTORE = "restore it from a copy"
# SQLite's error codes for a damaged file; 0 is Python's error for a text in it. All other errors,
# such as busy or full, may pass.
_DAMAGE = {0, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
# SQLite's errors of a read-only connection where a killed process has left a transaction half done.
_HALF_WRITTEN = (sqlite3.SQLITE_READONLY_ROLLBACK, sqlite3.SQLITE_READONLY_RECOVERY)
_BESIDE = ("-journal", "-wal", "-shm")  # ends of the names of SQLite's files beside a database
# Parts of the databases' messages about a table that another command is making.
_MADE_MEANWHILE = ("already exists", "database is locked", "database schema is locked")
# SQLite's answers where a file system is full, has a quota, or fails.
_OF_THE_DISK = ("disk I/O error", "database or disk is full")
_OTHER_TABLES = "compatible with the table schema"  # Optuna's error for tables of another version
_TRIES, _TRY_AGAIN_S = 10, 0.2
_OPTUNAS = {"studies", "trials"}  # two of the tables that Optuna makes
# Options of a PostgreSQL connection. Without them, a server that is cut off would hold the command
# for minutes: when it connects, while it waits for an answer, and while it sends.
_TIME_LIMITS = {
    "connect_timeout": 10,  # s
    "keepalives_idle": 10,  # s
    "keepalives_interval": 5,  # s
    "keepalives_count": 2,
    "tcp_user_timeout": 20_000,  # ms
}
# Options of a URL that are shown and kept. Any other option may be a secret, under whatever name
# its driver gives it.
_HARMLESS = {"application_name", "charset", "host", "port", "sslmode", "sslrootcert"}


def has_storage(paths: StudyPaths, given: str | None) -> bool:
    """Return whether there can be a study: a URL is given, or the folder has a storage."""
    return given is not None or paths.storage.exists() or paths.storage_pointer.exists()


def storage_url(paths: StudyPaths, given: str | None) -> str:
    """Return the storage URL of a study folder (see `storage_place`)."""
    url, _ = storage_place(paths, given)
    return url


def storage_place(paths: StudyPaths, given: str | None) -> tuple[str, str | None]:
    """Return the storage URL of a study folder, and the study that the folder has noted beside it.

    The URL is the given one, else the one that the study was begun with, else that of a file in the
    folder. The study's name is None where the folder has no note of a storage outside it. Raises
    BadInput for a URL that is invalid or differs from the folder's, and for a folder that no URL
    can name.
    """
    pointer = stored_pointer(paths)
    if given is not None:
        begun_with = (
            pointer["url"] if pointer else str(paths.storage) if paths.storage.exists() else None
        )
        if begun_with is not None and not _is_same(begun_with, given):
            raise BadInput(
                f"storage: the study in {paths.root} is stored in {begun_with}; leave the storage"
                " out."
            )
        return given, pointer["study"] if pointer else None
    if pointer is not None:
        return pointer["url"], pointer["study"]
    file = os.path.realpath(paths.storage)
    if any(sign in "?#%" or "\ud800" <= sign <= "\udfff" for sign in file):
        rule = (
            "a study's path can't have ?, # or % in it, nor bytes that are not UTF-8, because a"
            " storage URL can't"
        )
        raise BadInput(f"{str(paths.root)!a}: {rule}.")
    return f"sqlite:///{file}", None


def stored_pointer(paths: StudyPaths) -> dict[str, str] | None:
    """Return the URL and the study's name of a storage outside the folder.

    Returns None where the storage is the folder's own file. Raises BadInput if the note is not what
    carbonopt writes.
    """
    if not paths.storage_pointer.exists():
        return None
    try:
        pointer = parsed_json(
            read_text(paths.storage_pointer, "the name of the study's storage,", 1)
        )
        return {"url": str(pointer["url"]), "study": str(pointer["study"])}
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{paths.storage_pointer} is damaged; give the storage after removing it."
        ) from error


def remember_storage(paths: StudyPaths, given: str | None, study_name: str) -> None:
    """Note a storage outside the folder, without its password."""
    if given is not None:
        noted = _noted(given)
        write_json(paths.storage_pointer, {"url": noted, "study": study_name})


def connect(
    url: str,
    *,
    must_exist: bool = False,
    patience: Patience | None = None,
    read_only: bool = False,
) -> ReconnectingStorage:
    """Open a storage by its SQLAlchemy URL.

    Args:
        url: the storage's URL. Its password is never shown.
        must_exist: whether a missing SQLite file is refused instead of made.
        read_only: whether the database itself refuses to write for this connection. A missing file
            is refused then, too, and no table is made.
        patience: how long to wait for other programs that hold an SQLite file or lock a table of
            PostgreSQL, and for a server that can't be reached any more; None: as long as a command
            that only reads.

    Raises:
        BadInput: if the storage can't be opened, or is something else.
        StorageHeld: if another program holds it for too long.
    """
    parsed, patience = _parsed(url), patience or Patience()
    what = f"the storage {_shown(parsed)}"
    options = _engine_options(parsed, patience, read_only)
    if parsed.get_backend_name() == "sqlite":
        arguments = options["connect_args"]
        _check_sqlite(parsed, what, must_exist or read_only, read_only, arguments)
        # It may be the study folder's own file, for which the user gave no URL.
        what = f"the storage {parsed.database}"
    escaped = url.replace("{", "{{").replace("}", "}}")  # Optuna calls `format` on it
    try:
        with warnings.catch_warnings(
            action="ignore", category=optuna.exceptions.ExperimentalWarning
        ):
            return made_by_two(
                lambda: ReconnectingStorage(escaped, options, patience, _shown(parsed), read_only)
            )
    except ImportError as error:
        install = "type: pip install 'carbonopt[postgresql]', or use sqlite:///FILE"
        raise BadInput(f"{what}: its driver is missing ({error}); {install}.") from error
    except (
        optuna.exceptions.StorageInternalError,
        *(SQLAlchemyError, RuntimeError, ValueError, TypeError),
    ) as error:
        if _OTHER_TABLES in str(error):
            raise BadInput(f"{what} can't be opened: {_about_other_tables(str(error))}") from error
        reason = _reason_without_secrets(error, parsed)
        advice = " Check the free space of its file system." if reason in _OF_THE_DISK else ""
        raise BadInput(f"{what} can't be opened: {reason}.{advice}") from error


def _engine_options(parsed: URL, patience: Patience, read_only: bool) -> dict[str, Any]:
    """Return the options of SQLAlchemy's engine for a database."""
    match parsed.get_backend_name():
        case "sqlite":
            arguments = sqlite_arguments(patience)
            if not read_only:
                return {"connect_args": arguments, "pool_events": []}
            arguments["check_same_thread"] = False
            file = Path(str(parsed.database))
            creator = partial(_opened_read_only, file, arguments)
            return {"connect_args": arguments, "pool_events": [], "creator": creator}
        case "postgresql":
            arguments = dict(_TIME_LIMITS)
            if read_only:
                arguments["options"] = "-c default_transaction_read_only=on"
            limit = (partial(_limit_waits, patience.limit_s), "connect")
            return {"connect_args": arguments, "pool_events": [limit]}
        case _:
            return {"connect_args": {}, "pool_events": []}


def _about_other_tables(said: str) -> str:
    """Say that tables are another Optuna's, from what Optuna says, which names equal versions."""
    tables = f"its tables have another version than those of Optuna {optuna.__version__}"
    if "storage upgrade" in said:
        return f"{tables}, which is newer. Type `optuna storage upgrade` with its URL."
    return f"{tables}, which does not know it. Install a newer Optuna, or {RESTORE}."


def _reason_without_secrets(error: Exception, parsed: URL) -> str:
    """Return why a storage can't be opened, with nothing in it that may be a password."""
    reason = first_line(getattr(error, "orig", None) or error)
    in_query = [str(value) for key, value in parsed.query.items() if key not in _HARMLESS]
    for secret in filter(None, (parsed.password, *in_query)):
        reason = reason.replace(secret, "***")
    return reason


def _limit_waits(limit_s: float, connection: Any, _: object) -> None:
    """Let PostgreSQL refuse a statement that has waited for a lock for `limit_s`.

    By default PostgreSQL waits without a limit.
    """
    with closing(connection.cursor()) as cursor:
        cursor.execute(f"SET lock_timeout = {round(1000 * limit_s)}")
    connection.commit()


def made_by_two(make: Callable[[], Made]) -> Made:
    """Make tables that another command may be making in the same instant.

    An attempt that fails because of that is repeated a moment later, when the tables are there.
    """
    for _ in range(_TRIES):
        try:
            return make()
        except (optuna.exceptions.StorageInternalError, DBAPIError) as error:
            said = str(error.__cause__ or error)
            if not isinstance(error, IntegrityError) and not any(
                sign in said for sign in _MADE_MEANWHILE
            ):
                raise
            time.sleep(_TRY_AGAIN_S)
    return make()


def what_is_wrong(error: SQLAlchemyError | sqlite3.Error) -> str:
    """Describe a database's error: whether it is damaged or can't be read now, and its message."""
    said = getattr(error, "orig", None) or error
    # An extended code's lowest byte is the plain one.
    if isinstance(said, sqlite3.Error) and getattr(said, "sqlite_errorcode", 0) & 0xFF in _DAMAGE:
        return f"is damaged: {first_line(said)}; {RESTORE}"
    locked = (
        "; another command is writing to it, or stopped while it did: try again"
        if "locked" in str(said)
        else ""
    )
    return f"can't be read: {first_line(said)}{locked}"


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).removesuffix(".")


def _opened_read_only(file: Path, arguments: dict[str, Any]) -> sqlite3.Connection:
    """Open an SQLite file that this connection can't change.

    If a process was killed while it wrote, its half-done transaction is undone first, as any other
    reader does it: what a read-only connection would read is not what was stored.
    """
    connection = _opened(file, "ro", arguments)
    try:
        connection.execute("PRAGMA schema_version").fetchone()
    except sqlite3.OperationalError as error:
        connection.close()
        if error.sqlite_errorcode not in _HALF_WRITTEN:
            raise
        with closing(_opened(file, "rw", arguments)) as database:
            database.execute("PRAGMA schema_version").fetchone()
        return _opened(file, "ro", arguments)
    return connection


def _opened(file: Path, mode: str, arguments: dict[str, Any]) -> sqlite3.Connection:
    """Open an SQLite file that is there; `mode` is "ro" to read it alone, "rw" to write, too."""
    address = f"{file.absolute().as_uri()}?mode={mode}"
    connection: sqlite3.Connection = sqlite3.connect(address, uri=True, **arguments)
    return connection


def _check_sqlite(
    url: URL, what: str, must_exist: bool, read_only: bool, arguments: dict[str, Any]
) -> None:
    if url.database in (None, "", ":memory:"):
        raise BadInput(
            "storage: a study in memory would be lost; give a file, such as sqlite:///study.db."
        )
    if url.query:
        raise BadInput(
            f"{what}: a SQLite URL takes no options; leave out what follows the question mark."
        )
    file = Path(str(url.database))
    if not is_there(file):
        if must_exist:
            raise BadInput(f"{what}: there is no such file.")
        return
    what = f"the storage {file}"
    if not file.is_file() or not os.access(file, os.R_OK):
        why = (
            "permission denied; ask its owner for a copy" if file.is_file() else "it is not a file"
        )
        raise BadInput(f"{what} can't be read: {why}.")
    for suffix in _BESIDE:
        check_regular(Path(f"{os.path.realpath(file)}{suffix}"))  # SQLite would wait for a pipe
    try:
        # Not opened read-only by a command that may write: if a process was killed while it wrote,
        # opening must undo its transaction.
        with closing(
            _opened_read_only(file, arguments) if read_only else _opened(file, "rw", arguments)
        ) as database:
            for _ in range(_TRIES):
                tables = {
                    name
                    for (name,) in database.execute(
                        "SELECT name FROM sqlite_master WHERE type = 'table'"
                    )
                }
                if not tables & _OPTUNAS or tables >= _OPTUNAS:
                    break
                time.sleep(_TRY_AGAIN_S)  # another command may be making them, one by one
            ((said,),) = database.execute("PRAGMA quick_check(1)")
    except sqlite3.Error as error:
        raise BadInput(f"{what} {what_is_wrong(error)}.") from error
    if said != "ok":
        reason = said.removeprefix("*** in database main ***").strip().splitlines()[0]
        raise BadInput(f"{what} is damaged: {reason}; {RESTORE}.")
    if not tables and must_exist:
        raise BadInput(f"{what} is damaged: it is empty; {RESTORE}.")
    if tables and not tables >= _OPTUNAS:
        raise BadInput(
            f"{what} is another program's database or a damaged one; {RESTORE}, or give another."
        )


def _shown(url: URL) -> str:
    """Return a URL without its password and without options that may be secrets."""
    query = {key: value for key, value in url.query.items() if key in _HARMLESS}
    return URL.create(
        url.drivername, url.username, None, url.host, url.port, url.database, query
    ).render_as_string()


def without_password(url: str) -> str:
    """Return a URL without its password; raise BadInput if it is no storage URL."""
    parsed = _parsed(url)
    secret = parsed.password is not None or any(key not in _HARMLESS for key in parsed.query)
    return _shown(parsed) if secret else url


def _is_same(begun_with: str, given: str) -> bool:
    """Return whether a noted URL or file is that of a given URL, whatever driver either names."""
    if "://" not in begun_with:
        begun_with = f"sqlite:///{begun_with}"
    noted, present = (_parsed(url) for url in (_noted(begun_with), _noted(given)))
    return noted.set(drivername=noted.get_backend_name()) == present.set(
        drivername=present.get_backend_name()
    )


def _noted(given: str) -> str:
    """Return a URL as a study folder keeps it, without its password.

    The path of a file is made absolute, so that the next command can be called from anywhere.
    """
    url = _parsed(given)
    is_file = url.get_backend_name() == "sqlite"
    return _shown(url.set(database=os.path.realpath(url.database or "")) if is_file else url)


def _parsed(url: str) -> URL:
    """Parse a storage URL.

    The error for an invalid URL doesn't show it, since it may hold a password.
    """
    examples = "examples: sqlite:///study.db, postgresql://user@host/db"
    try:
        url.encode()  # raises for bytes that are not UTF-8
        parsed = make_url(url)
    except (SQLAlchemyError, ValueError) as error:
        raise BadInput(f"the given text is not a storage URL; {examples}.") from error
    if (database := parsed.drivername.partition("+")[0]) not in ("sqlite", "postgresql"):
        raise BadInput(
            f"storage must be of SQLite or PostgreSQL, but is of {shortened(database)}; {examples}."
        )
    if database == "postgresql" and "@" in f"{parsed.host}{parsed.database}":
        raise BadInput(
            f"storage: an @ or / in a user's name or password is written %40 or %2F; {examples}."
        )
    return parsed
