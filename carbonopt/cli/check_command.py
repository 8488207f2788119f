"""`carbonopt check`: validate a study file, and say what the study will do."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from carbonopt.cli.options import StudyFile
from carbonopt.core.errors import BadInput, CarbonoptError, printable

if TYPE_CHECKING:
    from carbonopt.spec.study_config import StudyConfig
    from carbonopt.spec.study_data import StudyData
    from carbonopt.storage.paths import StudyPaths
    from carbonopt.study_file.model_questions import Answers
    from carbonopt.study_file.reader import PipelineFile
    from carbonopt.study_file.study_checks import CheckedStudy


def check(
    study: StudyFile,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            "--gpu-memory", metavar="GIB", help="Memory of each GPU, from 0.1 to 1,000,000."
        ),
    ] = None,
) -> None:
    """Validate a study file and describe what the study will do.

    The description includes the rough cost and the memory that each GPU needs.
    """
    from carbonopt.study_file.model_questions import Answers
    from carbonopt.study_file.reader import PipelineFile, load_study

    if gpu_memory is not None and not 0.1 <= gpu_memory <= 1e6:
        raise BadInput(
            f"--gpu-memory must be from 0.1 to 1,000,000 GiB, but got {gpu_memory:g}; give a GPU's"
            " memory."
        )

    pipeline = PipelineFile.load(study)
    config = load_study(study) if pipeline is None else None
    with Answers() as answers:
        if pipeline is not None:
            _check_pipeline(pipeline, gpu_memory, answers)
        if config is not None:
            _check_one(config, gpu_memory, answers)


def _check_pipeline(pipeline: "PipelineFile", gpu_memory: float | None, answers: "Answers") -> None:
    """Check and describe each step of a pipeline."""
    from carbonopt.cli.check_text import describe_study
    from carbonopt.study.pipeline_run import check_pipeline

    steps = {step.step: step for step in pipeline.pipeline.pipeline}
    for number, (name, checked) in enumerate(check_pipeline(pipeline).items(), start=1):
        # These models replace those that the step's own file names.
        needs = ", ".join(f"the {key} of {other}" for key, other in steps[name].needs.items())
        gets = f", which gets {needs}" if needs else ""
        print(printable(f"\nStep {number} of {len(steps)}: {name}{gets}"))
        print(printable(describe_study(checked)), flush=True)
        _say_sizes(checked, gpu_memory, answers)
    _say_missing_gpus(checked.config)  # all steps use the same GPUs


def _check_one(config: "StudyConfig", gpu_memory: float | None, answers: "Answers") -> None:
    """Check and describe a study that is no pipeline."""
    from carbonopt.study_file.weight_files import check_weights, has_unchecked_weights
    from carbonopt.study_file.workload_keys import check_library_keys, has_unchecked_keys

    if has_unchecked_weights([(config, ())]) or has_unchecked_keys(config):
        answers.begin()  # its imports and those that follow here take as long as all else

    from carbonopt.cli.check_text import describe_study
    from carbonopt.storage.paths import StudyPaths
    from carbonopt.study.start_schedule import check_schedule, now_in_utc
    from carbonopt.study_file.study_checks import as_prepared
    from carbonopt.study_file.study_checks import check as check_study

    paths = StudyPaths.default(config.name)
    checked = as_prepared(check_study(config), paths.prepared)
    begun = None if config.schedule is None else _begun_study(paths, config.name)
    if begun is None:  # one that has begun goes on at once, and is not refused for its schedule
        check_schedule(checked, now_in_utc())
    check_library_keys(config, answers)
    notes = (*checked.notes, *check_weights([(config, ())], answers))
    print(printable(describe_study(replace(checked, notes=notes), begun)))
    print(f"  folder      {paths.root}, unless `carbonopt run` is given --out", flush=True)
    _say_missing_gpus(config)
    _say_sizes(checked, gpu_memory, answers)


def _say_sizes(checked: "CheckedStudy", gpu_memory: float | None, answers: "Answers") -> None:
    """Print the size of a study's checkpoints and the GPU memory that its model needs."""
    config = checked.config
    if config.checkpoint is not None and checked.is_settled:
        from carbonopt.cli.memory_text import describe_checkpoints

        print(printable(describe_checkpoints(checked, answers)), flush=True)
    if config.launch.trains and (config.launch.gpus or gpu_memory is not None):
        from carbonopt.cli.memory_text import describe_memory

        print(printable(describe_memory(checked, gpu_memory, answers)), flush=True)


def _begun_study(paths: "StudyPaths", name: str) -> "StudyData | None":
    """Return the study that an earlier call has begun in its default folder, if there is one."""
    from carbonopt.storage.study_storage import StudyStorage
    from carbonopt.storage.url import connect, has_storage, storage_url

    if not has_storage(paths, None):
        return None
    stored = StudyStorage.load(connect(storage_url(paths, None), must_exist=True), name)
    return None if stored is None else stored.read()


def _say_missing_gpus(config: "StudyConfig") -> None:
    """Print which of a study's GPUs this machine lacks; the study may be meant for another one."""
    if not config.launch.is_local:
        return
    from carbonopt.energy.hardware import check_gpus

    try:
        check_gpus(config.launch.gpus)
    except CarbonoptError as error:
        print(f"  not here    {printable(str(error))}", flush=True)
