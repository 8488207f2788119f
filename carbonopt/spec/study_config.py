"""A whole study file, as a frozen pydantic model.

Each part refuses what it can check by itself; `StudyConfig` checks what concerns several parts.
"""

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Field,
)

from carbonopt.core.dimensions import DIMENSIONS, TrialParams
from carbonopt.core.errors import shortened
from carbonopt.core.quality import Quality
from carbonopt.spec.base_settings import Name, Settings
from carbonopt.spec.carbon_settings import Carbon
from carbonopt.spec.checkpoint_settings import CheckpointSettings
from carbonopt.spec.launch_settings import HostfileLaunch, Launch, LocalLaunch, SlurmLaunch
from carbonopt.spec.notify_settings import Notify
from carbonopt.spec.schedule_settings import Schedule
from carbonopt.spec.search_settings import Budget, Confirm, Search
from carbonopt.spec.space_settings import UnchosenSpace, may_be_other_than, values_of
from carbonopt.spec.target_settings import TargetSettings
from carbonopt.spec.track_settings import Track
from carbonopt.spec.workload_settings import Workload


def _not_dots_only(text: str) -> str:
    if not text.strip("."):
        raise ValueError(
            f"must not be of dots only, because a folder is called by it, but got"
            f" {shortened(text)}; give a word"
        )
    return text


_OTHER_TOKENS = (
    "workload.tokenizer: train_bpe learns other tokens than those that workload.model.name_or_path"
    " was trained on; leave it out for the model's own"
)


class StudyConfig(Settings):
    """A study: what to train, the target, what may be tried, and when to stop."""

    name: Annotated[Name, AfterValidator(_not_dots_only)]
    """The study's name. Without `--out` its folder is `runs/NAME/`, where characters other than
    letters, digits, `_`, `.` and `-` become `-`."""

    workload: Workload | None = None  # a replay needs none
    target: TargetSettings
    search: Search
    budget: Budget
    # None: the answer rests on one run of each configuration
    confirm: Confirm | None = None
    carbon: Carbon
    launch: Annotated[Launch, Field(discriminator="kind")] = LocalLaunch()
    track: Track = Track()
    notify: Notify | None = None  # None: nobody is sent anything
    schedule: Schedule | None = None  # None: trials begin at once
    checkpoint: CheckpointSettings | None = None  # None: a trial that is cut off begins again

    def violations(self) -> dict[str, bool]:
        sampler, goal, launch = self.search.sampler, self.search.goal, self.launch
        unexpecting = (
            "budget.until: converged needs search.sampler: carbon and search.goal: recommend,"
            f" which alone expect something of the next trial, but got {sampler} and {goal}; give"
            " budget.trials or another limit"
        )
        uncounted = self.carbon.objective == "gpu" and launch.trains and not launch.gpus
        no_baseline = (
            "confirm.baseline repeats search.start, but there is none; give one or leave it out"
        )
        schedule = self.schedule
        by_the_hour = schedule is not None and (
            schedule.forecast is not None or self.carbon.trace is not None or bool(schedule.hours)
        )
        # A chosen space comes with a start.
        has_start = bool(self.search.start) or isinstance(self.search.space, UnchosenSpace)
        return {
            no_baseline: self.confirm is not None and self.confirm.baseline and not has_start,
            "workload is missing; only a replay can do without": (
                self.workload is None and launch.trains
            ),
            _OTHER_TOKENS: self._learns_other_tokens,
            "search.learn_from goes with search.sampler: carbon, which alone learns from it, but"
            f" got {sampler}": (bool(self.search.learn_from) and sampler != "carbon"),
            unexpecting: (
                self.budget.until is not None and (sampler, goal) != ("carbon", "recommend")
            ),
            "carbon.objective: gpu needs GPUs to count, but launch.gpus is []": uncounted,
            "schedule waits with trials that use energy, but a replay uses none; leave it out": (
                schedule is not None and not launch.trains
            ),
            "schedule needs schedule.forecast or carbon.trace for clean hours, or schedule.hours": (
                schedule is not None and not by_the_hour
            ),
            "attention_implementation: varlen keeps packed examples apart, but this study packs"
            " none; use workload.packing: true (task: sft), or sdpa": self._varlen_without_packing,
            **self._without_checkpoints(),
        }

    def _without_checkpoints(self) -> dict[str, bool]:
        """Return the rules on what can be saved, and whether each one is broken."""
        given, task = self.checkpoint is not None, self.workload.task if self.workload else None
        return {
            "checkpoint saves trainings, but a replay has none; leave it out": (
                given and not self.launch.trains
            ),
            "checkpoint saves what carbonopt trains, but task: script saves itself; leave it out,"
            " and let the script save into {checkpoint_dir}": given and self.is_script,
            "checkpoint can't save the trainers of task: rlhf, whose generated batches are TRL's;"
            " leave it out": given and task == "rlhf",
        }

    @property
    def _varlen_without_packing(self) -> bool:
        space = self.search.space
        if isinstance(space, UnchosenSpace):
            return False
        return "varlen" in values_of(space["attention_implementation"]) and not self.packs

    @property
    def packs(self) -> bool:
        """True if the examples that a batch counts are rows, each packed from several examples."""
        given = (self.workload.model_extra or {}) if self.workload else {}
        return bool(given.get("packing"))

    @property
    def _learns_other_tokens(self) -> bool:
        """True if pretrained weights would get a tokenizer whose tokens they have never seen."""
        if self.workload is None or self.workload.model is None or self.workload.tokenizer is None:
            return False
        return (
            self.workload.model.name_or_path is not None
            and self.workload.tokenizer.train_bpe is not None
        )

    @property
    def quality(self) -> Quality:
        """The quality by which trials are judged."""
        return self.target.at().quality

    @property
    def is_script(self) -> bool:
        """True if trials run a user's own script; False for a replay."""
        return self.workload is not None and self.workload.is_script

    @property
    def settings_decide_cost(self) -> bool:
        """True if trainings that differ only in what affects the quality cost the same.

        A script may stop by itself, a replay's runs may be those of a script, and how long the
        completions of rlhf are depends on what the model learns.
        """
        workload = self.workload
        if workload is None or not self.launch.trains:
            return False
        return not workload.is_script and workload.task != "rlhf"

    @property
    def probes(self) -> bool:
        """True if settings can be measured by a few steps of a trial.

        They can't in a replay of a table, nor with a user's script.
        """
        return (
            self.search.probes
            and self.workload is not None
            and self.launch.trains
            and not self.is_script
        )

    @property
    def can_fork(self) -> bool:
        """True if trials can be forked from a process that has imported what they need.

        The trials of a user's script can where the study file asks for it.
        """
        if not self.is_script:
            return True
        assert self.workload is not None
        return bool((self.workload.model_extra or {}).get("warm"))

    def compiles(self, params: TrialParams) -> bool:
        """Return whether a trial's first step compiles kernels or loads compiled ones."""
        given = self.workload.training_arguments if self.workload else {}
        if params.torch_compile or any(map(given.get, DIMENSIONS["torch_compile"].arguments)):
            return True
        on_gpu = bool(self.launch.gpus)
        return params.attention_implementation == "flex_attention" or (
            params.has_fused_output_layer and on_gpu
        )

    @property
    def may_compile(self) -> bool:
        """True if trials may use torch's compiler, as far as the space says.

        Fused output layers use it on GPUs. A space that is yet to be chosen may have such layers.
        """
        space = self.search.space
        on_gpus = isinstance(space, UnchosenSpace) or may_be_other_than(
            space["output_layer"], "standard"
        )
        return may_be_other_than(space["torch_compile"], False) or (
            bool(self.launch.gpus) and on_gpus
        )

    def identity(self) -> dict[str, Any]:
        """Return the settings that make two study files the same study.

        These are all settings but the budget, the confirmation, the trackers, the messages, the
        schedule, the checkpoints, the carbon trace, the embodied emissions, the prior studies
        (`search.learn_from`), and the way in which trials get their devices.
        """
        launch: dict[str, Any] = dict.fromkeys(("warm_start", "max_concurrent_trials"), True)
        if isinstance(self.launch, SlurmLaunch):
            ranks = {
                "kind",
                "nodes",
                "nodes_per_trial",
                "gpus_per_node",
                "gpus_per_trial",
                "cpu_ranks",
            }
            launch |= dict.fromkeys(SlurmLaunch.model_fields.keys() - ranks, True)
        if isinstance(self.launch, HostfileLaunch):
            launch |= {"hostfile": True, "hosts": {"__all__": {"name"}}}
        carbon = {"trace": True, "embodied": True}
        parts = {"carbon": carbon, "search": {"learn_from": True}, "launch": launch}
        return self.model_dump(
            mode="json",
            exclude={
                **dict.fromkeys(
                    ("budget", "confirm", "track", "notify", "schedule", "checkpoint"), True
                ),
                **parts,
            },
        )

    @property
    def may_change(self) -> str:
        """The keys, in words, that may change once the study has begun: those not in `identity`."""
        keys = (
            "budget, confirm, track, notify, schedule, checkpoint, carbon.trace, carbon.embodied,"
            " search.learn_from, launch.warm_start and launch.max_concurrent_trials"
        )
        if isinstance(self.launch, SlurmLaunch):
            return f"{keys}, and what launch asks of Slurm except nodes, GPUs and ranks,"
        if isinstance(self.launch, HostfileLaunch):
            return f"{keys}, and the path of launch.hostfile and the names of its hosts,"
        return keys
