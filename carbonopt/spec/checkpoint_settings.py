"""The part `checkpoint` of a study file: how often a training is saved, to go on after a cut."""

from pydantic import Field

from carbonopt.spec.base_settings import Settings


class CheckpointSettings(Settings):
    """The interval at which a study's trainings are saved.

    A trial that is cut off goes on from its last checkpoint. The checkpoints of a trial are removed
    when it ends.
    """

    every_minutes: float = Field(default=30.0, gt=0, le=10_080)
    """Minutes of work between two checkpoints of a trial."""
