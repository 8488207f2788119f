"""Say in words what errors of reading and writing a storage mean."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from carbonopt.core.errors import BadInput, CarbonoptError
from carbonopt.core.files import is_folder
from carbonopt.core.refusals import first_error
from carbonopt.storage.url import RESTORE, first_line, what_is_wrong


@contextmanager
def readable(whose: str) -> Iterator[None]:
    """Turn errors of reading within the context into BadInput, as they mean a damaged storage.

    SQLite, Optuna and pydantic have errors of their own for it.
    """
    try:
        yield
    except (
        optuna.exceptions.OptunaError, SQLAlchemyError, BadInput,
        ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError,
        ValueError,
    ) as error:  # fmt: skip
        cause = (
            error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
        )
        if isinstance(cause, SQLAlchemyError):
            raise BadInput(f"the storage of {whose} {what_is_wrong(cause)}.") from error
        raise BadInput(
            f"the storage of {whose} is damaged: {reason_of_damage(error)}; {RESTORE}."
        ) from error


@contextmanager
def written(whose: Path) -> Iterator[None]:
    """Turn errors of writing within the context into CarbonoptError.

    They mean no damage, but a full disk or a missing server. All that was stored before stays,
    unless somebody has removed the study's folder.
    """
    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        if not is_folder(whose):
            raise CarbonoptError(
                f"{whose} was removed while carbonopt worked in it, with what it held; the same"
                " command begins a new study."
            ) from error
        said: BaseException = error
        while said.__cause__ is not None:  # down to the error of the database's driver
            said = said.__cause__
        why = (
            f"the storage of {whose} can't be written to ({' '.join(str(said).split())}); when it"
            " can,"
        )
        if getattr(said, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            why = f"no space left for the storage of {whose}; make room and"
        if getattr(said, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY_DBMOVED:
            why = f"the storage of {whose} was moved or removed; put it back and"
        raise CarbonoptError(f"{why} type the same command again.") from error


def reason_of_damage(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return first_error(error).removesuffix(".")
    if isinstance(error, BadInput):
        return first_line(error)
    if isinstance(error, RecursionError):
        return "a value in it is nested too deeply"
    if not str(error).strip():
        return f"a value in it is impossible ({type(error).__name__})"
    return f"{type(error).__name__}: {first_line(error)}"
