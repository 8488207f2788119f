"""Find the files that the training reads, and check that they are the recorded ones.

    python3 inputs.py [--data FOLDER]

inputs.json names them, with size and sha256. Each has to lie in data/ beside this file, or in
FOLDER. This program needs only Python.
"""

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIST = "inputs.json"
DATA = "data"


def places(contents: bool = True) -> dict[str, str]:
    """Return where each input lies, by its name in workload.yaml.

    Args:
        contents: whether to check the sha256, too, and not only the size.

    Raises:
        SystemExit: with a sentence for each input that is missing or differs from the recorded one.
    """
    # All messages name run.sh, which is there even if this program is called by itself.
    purpose = "Trains the recommended configuration once more."
    parser = argparse.ArgumentParser("./run.sh", description=purpose, allow_abbrev=False)
    parser.add_argument(
        "--data", metavar="FOLDER", help=f"where the data lies, if not in {HERE / DATA}"
    )
    given = parser.parse_args().data
    if given == "":
        raise SystemExit("--data: the name of the folder is empty")
    folders = [HERE / DATA]
    # run.sh changes the folder; CALLED_FROM is the one from which a relative path leads
    if given is not None:
        folders.insert(0, Path(os.environ.get("CALLED_FROM", "."), given).absolute())
    searched = (
        f"not in {folders[0]}"
        if len(folders) == 1
        else f"neither in {folders[0]} nor in {folders[1]}"
    )
    place_by_name, complaints = {}, []
    for name, files in _listed().items():
        below = name.removeprefix(f"{DATA}/")
        shown = below if below.isprintable() else ascii(below)
        place = next((folder / below for folder in folders if (folder / below).exists()), None)
        if place is None:
            remedy = (
                f"put it at {HERE / DATA / shown}, or say which folder it lies in: ./run.sh --data"
                " FOLDER"
            )
            complaints.append(
                f"{shown} ({described(files)}) is missing: it is {searched}; {remedy}"
            )
            continue
        place_by_name[name] = str(place)
        if not files and contents:
            print(
                f"{shown} is taken as it is: {LIST} has no size and no sha256 of it",
                file=sys.stderr,
            )
        remedy = (
            f"put the right one there, or give {name!r} an empty list in {HERE / LIST} to train"
            " with what is there"
        )
        wrong = (_complaint(place / file["path"], file, contents) for file in files)
        complaints += [f"{complaint}; {remedy}" for complaint in wrong if complaint]
    if complaints and given is not None and not folders[0].is_dir():
        state = "is a file" if folders[0].exists() else "does not exist"
        complaints.insert(0, f"--data {given}: {folders[0]} {state}")
    if complaints:
        raise SystemExit("\n".join(complaints))
    return place_by_name


def _listed() -> dict[str, list[dict[str, Any]]]:
    try:
        listed: dict[str, list[dict[str, Any]]] = json.loads(
            (HERE / LIST).read_text(encoding="utf-8")
        )
        for files in listed.values():
            _ = [(file["path"], file["bytes"], file["sha256"]) for file in files]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise SystemExit(
            f"{HERE / LIST} is not as it was written: {error!r}; take it from the report again"
        ) from error
    return listed


def sha256_of(path: Path, pieces: int = 0) -> str:
    """Return the sha256 of a file.

    Args:
        pieces: if not 0, take only so many pieces of 1 MiB, evenly spread, as
            study_file/input_files.py noted it.
    """
    digest = hashlib.sha256()
    size, piece = path.stat().st_size, 2**20
    spread = ((size - piece) * step // (pieces - 1) for step in range(pieces))
    with path.open("rb") as file:
        for place in spread if pieces else range(0, size, piece):
            file.seek(place)
            digest.update(file.read(piece))
    return digest.hexdigest()


def described(files: list[dict[str, Any]]) -> str:
    """Return a description of the files of one input."""
    if not files:
        return "size and sha256 not recorded"
    size = f"{sum(file['bytes'] for file in files):,} bytes"
    if files[0]["path"]:
        return (
            f"a folder of {len(files)} file{'s' * (len(files) > 1)}, {size}; the sha256 of each is"
            f" in {LIST}"
        )
    return f"{size}, sha256 {files[0]['sha256'] or 'not recorded'}"


def _complaint(path: Path, recorded: dict[str, Any], contents: bool) -> str | None:
    if not path.is_file():
        return f"{path} ({described([{**recorded, 'path': ''}])}) is missing"
    if (size := path.stat().st_size) != recorded["bytes"]:
        return (
            f"{path} is not the recorded file: it must have {recorded['bytes']:,} bytes, but has"
            f" {size:,}"
        )
    try:
        sha256 = (
            sha256_of(path, recorded.get("pieces", 0)) if contents and recorded["sha256"] else None
        )
    except OSError as error:
        return f"{path} can't be read: {error.strerror}"
    if sha256 not in (None, recorded["sha256"]):
        return (
            f"{path} is not the recorded file: its sha256 must be {recorded['sha256']}, but is"
            f" {sha256}"
        )
    return None


if __name__ == "__main__":
    places()
