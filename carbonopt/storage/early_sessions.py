"""The calls of a study that ended while they prepared it, when there was no study to store them in.

What they have prepared is used by the call that begins the study, so that their energy is its cost.
"""

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from carbonopt.core.errors import BadInput
from carbonopt.core.files import read_text, write_bytes
from carbonopt.core.refusals import first_error
from carbonopt.spec.study_data import SessionLedger
from carbonopt.storage.study_storage import StudyStorage

_LEDGERS = TypeAdapter(tuple[SessionLedger, ...])
_MAX_MIB = 8


class EarlySessions:
    """The file of these calls' ledgers; there is none once their study has them.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def set_session(self, ledger: SessionLedger) -> None:
        """Store a session's ledger under its worker, as `StudyStorage.set_session` does."""
        others = [other for other in self._read() if other.worker != ledger.worker]
        early = ledger.model_copy(update={"before_study": True})
        write_bytes(self._path, _LEDGERS.dump_json((*others, early), indent=2) + b"\n")

    def move_to(self, storage: StudyStorage) -> None:
        """Store the ledgers in their study, which has just been stored itself."""
        if not self._path.exists():
            return
        known = {session.worker for session in storage.read().sessions}
        for ledger in self._read():
            if ledger.worker not in known:  # else a call was killed after it had stored it
                storage.set_session(ledger)
        self._path.unlink(missing_ok=True)

    def _read(self) -> tuple[SessionLedger, ...]:
        if not self._path.exists():
            return ()
        try:
            return _LEDGERS.validate_json(read_text(self._path, "the study's calls", _MAX_MIB))
        except ValidationError as error:
            raise BadInput(
                f"{self._path} is damaged: {first_error(error)}; restore or remove it."
            ) from error
