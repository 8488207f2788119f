"""What a check finds."""

from enum import StrEnum

from carbonopt.core.values import Frozen


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


class Finding(Frozen):
    status: Status
    found: str
    advice: str | None = None  # what to type; only a finding that is ok has none

    def as_text(self) -> str:
        return self.found if self.advice is None else f"{self.found} → {self.advice}"


class Check(Finding):
    name: str

    def as_json(self) -> dict[str, str | None]:
        return {"name": self.name, "status": self.status.value, "found": self.found, "advice": self.advice}


def ok(found: str) -> Finding:
    return Finding(status=Status.OK, found=found)


def warning(found: str, advice: str) -> Finding:
    return Finding(status=Status.WARNING, found=found, advice=advice)


def failure(found: str, advice: str) -> Finding:
    return Finding(status=Status.FAILURE, found=found, advice=advice)
