"""Where a report may be written: a folder that can be, and that holds no other study's report."""

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

from carbonopt.core.errors import BadInput
from carbonopt.core.files import REPORT_JSON
from carbonopt.core.study import StudyData


def identity(data: StudyData) -> dict[str, Any]:
    """What tells a study from others in report.json: two of one name began at different times."""
    began = min((datetime.fromisoformat(session.started_at) for session in data.sessions), default=None)
    return {"name": data.config.name, "began": began and began.isoformat(timespec="seconds")}


def refuse(folder: Path, data: StudyData) -> None:
    """Before anything is computed.

    Raises:
        BadInput: if the folder can't be written, or holds another study's report: its files would be lost, and what the
            user put beside them, such as that study's trained model, would seem to be this one's.
    """
    # The folder is made aside and renamed, so that it is the folder around it that counts.
    parent = next(parent for parent in Path(os.path.realpath(folder)).parents if parent.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        why = "read-only file system" if os.statvfs(parent).f_flag & os.ST_RDONLY else "permission denied"
        raise BadInput(f"the report can't be written to {folder}: {why}; give another --out.")
    name, began = _name_and_begin(folder)
    own_name, own_began = identity(data).values()
    if name is None or (name == own_name and (None in (began, own_began) or began == own_began)):
        return
    since = f", begun {ascii(began)[1:-1]}" if began is not None else ""
    namesake = f"; this one, of the same name, began {own_began}" if name == own_name else ""
    raise BadInput(f"{folder} holds the report of another study ({name!r}{since}{namesake}); give another --out.")


def _name_and_begin(folder: Path) -> tuple[str | None, str | None]:
    """Of the study whose report lies there; None: there is none, or nothing to tell it by."""
    try:
        content = json.loads((folder / REPORT_JSON).read_bytes())
        study = content.get("study") or {"name": content["shown"]["name"]}  # older reports have the name alone
        return str(study["name"]), None if study.get("began") is None else str(study["began"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None, None
