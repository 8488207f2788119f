"""`carbonopt watch`: the report as a page that follows the study."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carbonopt.api.study_folder import pipeline_in
from carbonopt.cli.options import StorageUrl, StudyDir
from carbonopt.core.errors import BadInput
from carbonopt.core.extras import check_installed

if TYPE_CHECKING:
    from carbonopt.storage.watched_study import Sight

_NICENESS = 10  # the study's own processes go first
_LISTED = 3  # folders of studies that a refusal names


def watch(
    study_dir: StudyDir,
    storage: StorageUrl = None,
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="Port of 127.0.0.1.")
    ] = 8760,
) -> None:
    """Show the report of a study as a live page, on this machine alone, until Ctrl-C."""
    for package in ("starlette", "uvicorn", "sse_starlette"):
        check_installed(package, "watch", "carbonopt watch")
    look = _look(study_dir, storage)
    from carbonopt.watch.server import ADDRESS, listening, serve
    from carbonopt.watch.watcher import Watcher

    with listening(port) as listener:
        os.nice(_NICENESS)
        watcher = Watcher(look)
        watcher.look()
        print(f"http://{ADDRESS}:{port}/", flush=True)
        serve(watcher, listener)


def _look(folder: Path, url: str | None) -> "Callable[[], Sight]":
    """Return what reads a folder again and again.

    Raises:
        BadInput: if it holds neither a study nor a pipeline.
    """
    if (pipeline := pipeline_in(folder, url)) is not None:
        from carbonopt.storage.watched_study import WatchedPipeline

        return WatchedPipeline(pipeline).look
    from carbonopt.storage.paths import StudyPaths
    from carbonopt.storage.url import has_storage
    from carbonopt.storage.watched_study import Sight, WatchedStudy

    paths = StudyPaths(folder)
    if not has_storage(paths, url):
        paths.check_not_lost()
        raise BadInput(f"{folder} holds no study; {_nearest(folder)}.")
    study = WatchedStudy(paths, url)

    def look() -> Sight:
        state = study.look()
        return Sight({} if state is None else {"": state})

    return look


def _nearest(folder: Path) -> str:
    """Name the studies in a folder or, where it is missing or has none, beside it."""
    for place in (folder, folder / "runs", folder.parent):
        try:
            found = sorted(path.parent for path in place.glob("*/study.db"))
            found += sorted(path.parent for path in place.glob("*/storage.json"))
        except OSError:
            continue
        if found:
            return f"give the folder of one, such as {', '.join(map(str, found[:_LISTED]))}"
    return "give the folder that `carbonopt run` wrote, such as runs/NAME"
