"""The calls of a study that ended while they prepared it, when there was no study to store them in.

What they have prepared is used by the call that begins the study, so that their energy is its cost.
"""

import contextlib
from pathlib import Path

from pydantic import ValidationError

from carbonopt.core.errors import BadInput
from carbonopt.core.files import read_text, write_bytes
from carbonopt.core.refusals import first_error
from carbonopt.spec.study_data import SessionLedger
from carbonopt.storage.study_storage import StudyStorage

_MAX_MIB = 8


class EarlySessions:
    """The folder of these calls' ledgers; there is none once their study has them.

    Each worker has a file of its own, since all of a study's workers may end at once.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self) -> None:
        """Check the ledgers before a call uses energy.

        Raises:
            BadInput: If one is damaged, or the folder is a link, whose files are not this study's.
        """
        if self._folder.is_symlink():
            raise BadInput(f"{self._folder} must be a folder, but is a link; remove it.")
        for path in self._folder.glob("*.json"):
            _read(path)

    def set_session(self, ledger: SessionLedger) -> None:
        """Store a session's ledger under its worker, as `StudyStorage.set_session` does."""
        early = ledger.model_copy(update={"before_study": True})
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{ledger.worker}.json"
        write_bytes(path, early.model_dump_json(indent=2).encode() + b"\n")

    def move_to(self, storage: StudyStorage) -> None:
        """Store the ledgers in their study. Only the call that leads it does so."""
        if not self._folder.is_dir():
            return
        known = {session.worker for session in storage.read().sessions}
        for path in sorted(self._folder.glob("*.json")):
            ledger = _read(path)
            if ledger.worker not in known:  # else a call was killed after it had stored it
                storage.set_session(ledger)
            path.unlink()
        with contextlib.suppress(OSError):  # another worker has just ended early, too
            self._folder.rmdir()


def _read(path: Path) -> SessionLedger:
    try:
        return SessionLedger.model_validate_json(read_text(path, "a call of the study", _MAX_MIB))
    except ValidationError as error:
        raise BadInput(f"{path} is damaged: {first_error(error)}; restore or remove it.") from error
