"""The result of one check of `carbonopt doctor`."""

from enum import StrEnum

from carbonopt.core.values import Frozen


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


class Finding(Frozen):
    name: str = ""  # name of the check, once it is known
    status: Status
    found: str
    advice: str | None = None  # what to type; only a finding with status OK has none

    def as_text(self) -> str:
        return self.found if self.advice is None else f"{self.found} → {self.advice}"

    def __str__(self) -> str:
        return f"{self.name}: {self.as_text()}"


def ok(text: str) -> Finding:
    return Finding(status=Status.OK, found=text)


def warning(text: str, advice: str) -> Finding:
    return Finding(status=Status.WARNING, found=text, advice=advice)


def failure(text: str, advice: str) -> Finding:
    return Finding(status=Status.FAILURE, found=text, advice=advice)
