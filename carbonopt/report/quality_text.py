"""The quality of a trial, as tables and figures read it."""

from typing import Protocol

from carbonopt.core.trial import EvalPoint, TrialRecord, TrialState


class HasValue(Protocol):
    @property
    def value(self) -> float | None: ...


def known(holder: HasValue) -> float:
    """Of what always has one."""
    assert holder.value is not None
    return holder.value


def last_value(record: TrialRecord) -> tuple[float | None, EvalPoint | None]:
    """A complete trial's, and None; else its last evaluation's, and that one; (None, None): it has none."""
    if record.state is TrialState.COMPLETE:
        return record.value, None
    return (record.evals[-1].value, record.evals[-1]) if record.evals else (None, None)


def reached(record: TrialRecord) -> float | None:
    """What a target is compared with; None: it did not complete."""
    return record.value if record.state is TrialState.COMPLETE else None
