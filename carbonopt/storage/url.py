"""Where a study's storage is: its URL, and never a word of its password."""

import json
import os
import sqlite3
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import optuna
from optuna.storages import RDBStorage
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError

from carbonopt.core.errors import BadInput
from carbonopt.core.files import read_text, write_json
from carbonopt.storage.paths import StudyPaths

Made = TypeVar("Made")

RESTORE = "restore it from a copy"
# What SQLite says of a damaged file, or Python of a text in it (0); all else, such as busy or full, may pass.
_DAMAGE = {0, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
# What databases say of a table that another one is making.
_MADE_MEANWHILE = ("already exists", "database is locked", "database schema is locked")
_TRIES, _TRY_AGAIN_S = 10, 0.2
_OPTUNAS = {"studies", "trials"}  # of the tables that Optuna makes
# Options of a URL that are shown and kept; any other may be a secret under whatever name its driver gives it.
_HARMLESS = {"application_name", "charset", "host", "port", "sslmode", "sslrootcert"}


def has_storage(paths: StudyPaths, given: str | None) -> bool:
    """Whether there can be a study: an URL is given, or the folder has one."""
    return given is not None or paths.storage.exists() or paths.storage_pointer.exists()


def storage_url(paths: StudyPaths, given: str | None) -> str:
    """The storage of a study folder: the one given, else the one it was begun with, else a file in it. Raises BadInput
    for an URL that is none or is another than the folder's, and for a folder that no URL can name."""
    pointer = stored_pointer(paths)
    if given is not None:
        begun_with = pointer["url"] if pointer else str(paths.storage) if paths.storage.exists() else None
        if begun_with not in (None, _noted(given), _shown(_parsed(given))):
            raise BadInput(f"--storage: the study in {paths.root} is stored in {begun_with}; leave --storage out.")
        return given
    if pointer is not None:
        return pointer["url"]
    file = str(paths.storage.resolve())
    if any(sign in "?#%" or "\ud800" <= sign <= "\udfff" for sign in file):
        rule = "a study's path can't have ?, # or % in it, nor bytes that are not UTF-8, because a storage URL can't"
        raise BadInput(f"--out {str(paths.root)!a}: {rule}.")
    return f"sqlite:///{file}"


def stored_pointer(paths: StudyPaths) -> dict[str, str] | None:
    """The URL and the study's name in a storage outside the folder; None where the storage is the folder's own file.
    Raises BadInput if the note is not what carbonopt writes."""
    if not paths.storage_pointer.exists():
        return None
    try:
        pointer = json.loads(read_text(paths.storage_pointer, "the name of the study's storage,", 1))
        return {"url": str(pointer["url"]), "study": str(pointer["study"])}
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{paths.storage_pointer} is damaged; give --storage after removing it.") from error


def remember_storage(paths: StudyPaths, given: str | None, study_name: str) -> None:
    """Notes a storage outside the folder, without its password."""
    if given is not None:
        write_json(paths.storage_pointer, {"url": _noted(given), "study": study_name})


def connect(url: str, *, must_exist: bool = False) -> RDBStorage:
    """Opens a storage by its SQLAlchemy URL. `must_exist`: a missing SQLite file is not made. Raises BadInput if it
    can't be reached, or is something else; the password is never shown."""
    parsed = _parsed(url)
    what, arguments = f"--storage {_shown(parsed)}", {}
    if parsed.get_backend_name() == "sqlite":
        _check_sqlite(parsed, what, must_exist)
        if os.path.exists(str(parsed.database)):  # noqa: PTH110
            what = f"the storage {parsed.database}"  # which may be the study folder's own: nobody gave an URL then
    elif parsed.get_backend_name() in ("postgresql", "mysql"):
        arguments = {"connect_timeout": 10}  # without a limit an unreachable server would hold the command for minutes
    options = {"connect_args": arguments, "pool_pre_ping": True}
    escaped = url.replace("{", "{{").replace("}", "}}")  # Optuna formats it
    try:
        with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
            return made_by_two(lambda: RDBStorage(escaped, engine_kwargs=options))
    except ImportError as error:
        missing = f"its driver is missing ({error}); {_install(parsed.drivername)}"
        raise BadInput(f"{what}: {missing}, or use sqlite:///FILE.") from error
    except (SQLAlchemyError, RuntimeError, ValueError, TypeError) as error:
        reason = first_line(getattr(error, "orig", None) or error)
        in_query = [str(value) for key, value in parsed.query.items() if key not in _HARMLESS]
        for secret in filter(None, (parsed.password, *in_query)):
            reason = reason.replace(secret, "***")
        raise BadInput(f"{what} can't be opened: {reason}.") from error


def _install(driver: str) -> str:
    is_postgresql = driver.startswith("postgresql")
    return "type: pip install 'carbonopt[postgresql]'" if is_postgresql else "install the Python package of that driver"


def made_by_two(make: Callable[[], Made]) -> Made:
    """Makes tables, which another command may do in the same instant: what failed by that finds them a moment later."""
    for _ in range(_TRIES):
        try:
            return make()
        except (optuna.exceptions.StorageInternalError, DBAPIError) as error:
            said = str(error.__cause__ or error)
            if not isinstance(error, IntegrityError) and not any(sign in said for sign in _MADE_MEANWHILE):
                raise
            time.sleep(_TRY_AGAIN_S)
    return make()


def what_is_wrong(error: SQLAlchemyError | sqlite3.Error) -> str:
    """Whether a database is damaged or only can't be read now, and what it says."""
    said = getattr(error, "orig", None) or error
    # An extended code's lowest byte is the plain one.
    if isinstance(said, sqlite3.Error) and getattr(said, "sqlite_errorcode", 0) & 0xFF in _DAMAGE:
        return f"is damaged: {first_line(said)}; {RESTORE}"
    locked = "; another command is writing to it, or stopped while it did: try again" if "locked" in str(said) else ""
    return f"can't be read: {first_line(said)}{locked}"


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).removesuffix(".")


def _check_sqlite(url: URL, what: str, must_exist: bool) -> None:
    if url.database in (None, "", ":memory:"):
        raise BadInput("--storage: a study in memory would be lost; give a file, such as sqlite:///study.db.")
    if url.query:
        raise BadInput(f"{what}: a SQLite URL takes no options; leave out what follows the question mark.")
    file = Path(str(url.database))
    if not os.path.exists(file):  # noqa: PTH110, Path.exists raises where a name is too long
        if must_exist:
            raise BadInput(f"{what}: there is no such file.")
        return
    what = f"the storage {file}"
    if not file.is_file() or not os.access(file, os.R_OK):
        why = "permission denied; ask its owner for a copy" if file.is_file() else "it is not a file"
        raise BadInput(f"{what} can't be read: {why}.")
    try:
        # Not read only: where a process was killed while it wrote, opening has to undo what it had begun.
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=rw", uri=True)) as database:
            for _ in range(_TRIES):
                tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
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
        raise BadInput(f"{what} is another program's database or a damaged one; {RESTORE}, or give another.")


def _shown(url: URL) -> str:
    """The URL without its password and without options that may be one."""
    query = {key: value for key, value in url.query.items() if key in _HARMLESS}
    return URL.create(url.drivername, url.username, None, url.host, url.port, url.database, query).render_as_string()


def without_password(url: str) -> str:
    """Raises BadInput for what is no storage URL."""
    parsed = _parsed(url)
    secret = parsed.password is not None or any(key not in _HARMLESS for key in parsed.query)
    return _shown(parsed) if secret else url


def _noted(given: str) -> str:
    """As a study folder keeps it: a file's place is the same from wherever the next command is called."""
    url = _parsed(given)
    is_file = url.get_backend_name() == "sqlite"
    return _shown(url.set(database=str(Path(url.database or "").resolve())) if is_file else url)


def _parsed(url: str) -> URL:
    """The URL itself is not shown when it is refused: it may hold a password."""
    examples = "examples: sqlite:///study.db, postgresql://user@host/db"
    try:
        url.encode()  # a name of other bytes than UTF-8 is no URL
        parsed = make_url(url)
    except (SQLAlchemyError, ValueError) as error:
        raise BadInput(f"--storage is not a storage URL; {examples}.") from error
    if parsed.get_backend_name() != "sqlite" and "@" in f"{parsed.host}{parsed.database}":
        raise BadInput(f"--storage: an @ or / in a user's name or password is written %40 or %2F; {examples}.")
    return parsed
