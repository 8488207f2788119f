"""The quality of a trial, as tables and figures read it."""

from typing import Protocol

from carbonopt.core.trial import EvalPoint, TrialRecord, TrialState


class HasValue(Protocol):
    @property
    def at_target(self) -> str:
        return "at most" if self.minimize else "at least"

    def value_text(self, value: float | None) -> str:
        """Four significant digits."""
        return perplexity_text(value)

    def worse_by(self, value: float, reference: float) -> float:
        """The share by which a value is worse than another; negative: better."""
        return value / reference - 1 if self.minimize else 1 - value / reference

    def bounds_text(self) -> str:
        """What a number beyond the bounds is told."""
        if self.lowest is not None and self.highest is not None:
            return f"{self.label} is from {self.lowest:g} to {self.highest:g}."
        return f"{self.label} is {self.lowest:g} or more." if self.lowest is not None else f"{self.label} is a number."


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
