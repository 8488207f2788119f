"""The part `track` of a study file: the trackers that show the study elsewhere."""

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator

from carbonopt.core.errors import as_servers_read
from carbonopt.spec.base_settings import Name, PublicName, Settings

# Trackio's own rules. It keeps only these characters for a file's name, so that two projects that
# differ by others would share a file; the prefix and the endings are those of other files.
_PROJECT = re.compile(r"[A-Za-z0-9_-]+")
_REGISTRY = "registry-"
_OF_TRACKIO = (
    "_system",
    "_configs",
    "_traces",
    "_artifacts",
    "_artifact_versions",
    "_artifact_aliases",
    "_run_artifact_links",
)


def _without_credentials(uri: object) -> object:
    """Return an address as it is; refuse one that may hold a password.

    It is called before any other check, whose error would not say what to do.
    """
    if isinstance(uri, str) and any(sign in as_servers_read(uri) for sign in "@?#"):
        raise ValueError(
            "must have no user, password, ? or #, because reports print the study file; give the"
            " address alone, and MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or"
            " MLFLOW_TRACKING_TOKEN) in the environment"
        )
    return uri


def _server_address(uri: str) -> str:
    try:
        parts = urlsplit(uri)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_server &= parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        is_server = False
    if not is_server:
        raise ValueError(
            "must be the http:// or https:// address of an MLflow server; start one by"
            " `mlflow server` and give http://127.0.0.1:5000"
        )
    return uri.rstrip("/")


def _trackio_project(project: str) -> str:
    if _PROJECT.fullmatch(project) is None:
        raise ValueError(
            "must be of letters (A to Z), digits, _ and -, because Trackio calls a file by it;"
            " leave the others out"
        )
    taken = [ending for ending in _OF_TRACKIO if project.endswith(ending)]
    if project.startswith(_REGISTRY) or taken:
        part = taken[0] if taken else _REGISTRY
        raise ValueError(
            f"must neither begin with {_REGISTRY} nor end as Trackio's own files do ({part}); give"
            " another name"
        )
    return project


class WandbTracking(Settings):
    """A run of Weights & Biases for each trial."""

    project: PublicName = "carbonopt"
    """The Weights & Biases project."""

    entity: PublicName | None = None
    """The user or team that owns the project."""

    mode: Literal["online", "offline"] = "offline"
    """`offline` or `online`."""


class MlflowTracking(Settings):
    """An MLflow server; needs `pip install 'carbonopt[mlflow]'`."""

    uri: Annotated[Name, AfterValidator(_server_address), BeforeValidator(_without_credentials)]
    """The server's address, such as `http://127.0.0.1:5000`, without a user or a password: these
    are in the variables `MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD` (or
    `MLFLOW_TRACKING_TOKEN`)."""

    experiment: PublicName
    """The experiment, which is made if the server has none of this name. The study becomes a run
    of it, and each trial a child of that run."""


class TrackioTracking(Settings):
    """A local Trackio project; needs `pip install 'carbonopt[trackio]'`."""

    project: Annotated[Name, AfterValidator(_trackio_project)]
    """The project, in Trackio's own folder (`TRACKIO_DIR`, else
    `~/.cache/huggingface/trackio`); `trackio show` shows it. Each trial becomes a run."""


class Track(Settings):
    """The trackers that get each trial."""

    wandb: WandbTracking | None = None
    tensorboard: bool = False
    """Writes TensorBoard files; needs `pip install 'carbonopt[tensorboard]'`."""

    mlflow: MlflowTracking | None = None
    trackio: TrackioTracking | None = None
