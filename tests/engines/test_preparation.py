"""The preparation's process: begins before it may touch anything, and leaves nothing when nobody
waits for it.
"""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from commands import compiler_with_cache
from psutil import _psutil_linux

from carbonopt.core.errors import BadInput, CarbonoptError, StudyInterrupted
from carbonopt.core.events import PhaseChanged
from carbonopt.core.trial import Phase
from carbonopt.engines.process.environment import work_environment
from carbonopt.engines.process.extensions import missing_operators, needed_operators
from carbonopt.engines.process.forking import ForkServer
from carbonopt.engines.process.launcher import Preparation
from carbonopt.spec.launch_settings import LocalLaunch
from carbonopt.spec.space_settings import Space
from carbonopt.spec.study_config import StudyConfig
from carbonopt.storage.paths import StudyPaths

LAUNCH = LocalLaunch(kind="local", gpus=[])
WHOLE_LIBRARY = _psutil_linux.__file__  # any one will do
TINY = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 64}


def preparation(tmp_path: Path, text: str = "to be or not to be " * 40, **changes) -> Preparation:
    (tmp_path / "text.txt").write_text(text)
    config = StudyConfig.model_validate(
        {
            "name": "prepared",
            "workload": {
                "task": "causal_lm",
                "model": {"from_config": TINY | changes},
                "tokenizer": {"kind": "char"},
                "dataset": {"train_files": [str(tmp_path / "text.txt")], "eval_fraction": 0.2},
                "sequence_length": 16,
            },
            "target": {"perplexity": 10},
            "search": {"space": {"global_batch_size": 4, "learning_rate": 1e-3, "epochs": 1}},
            "budget": {"trials": 1},
            "carbon": {"intensity_g_co2e_per_kwh": 100},
            "launch": LAUNCH.model_dump(mode="json"),
        }
    )
    return Preparation(config, LAUNCH, [], StudyPaths(tmp_path / "run"), "of this text", 1)


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """What a study on CPUs forks its trials from, which stay offline; the preparation doesn't."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    server = ForkServer("carbonopt.train.fork_template", work_environment(LAUNCH, []), log)
    with closing(server):
        while not server.ready(1.0):
            pass
        yield server


def forked(fork_server: ForkServer, preparation: Preparation, paths: StudyPaths) -> Preparation:
    paths.root.mkdir(exist_ok=True)
    preparation.fork(fork_server, paths.waiting_log(0))
    return preparation


@pytest.mark.slow
def test_it_imports_at_once_and_makes_nothing_before_its_result_is_asked_for(
    tmp_path: Path,
) -> None:
    begun = preparation(tmp_path)
    begun.start()
    assert begun.work is not None
    assert begun.work.receive(60.0) == PhaseChanged(phase=Phase.PREPARE), "imported, and waits"
    modules = " ".join(
        mapping.path
        for mapping in psutil.Process(begun.work._guard.pid).children()[0].memory_maps()
    )
    assert "libtorch" in modules
    assert begun.work.receive(0.5) is None and not (tmp_path / "run" / "prepared").exists()
    begun.work.answer()
    made = begun.result(lambda: False)
    assert made.train_examples > 1 and (tmp_path / "run" / "prepared").is_dir()
    again = preparation(tmp_path)
    assert again.result(lambda: False) == made and again.work is None, (
        "no process for what is there"
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_forked_it_makes_the_same(fork_server: ForkServer, tmp_path: Path) -> None:
    paths = StudyPaths(tmp_path / "run")
    made = preparation(tmp_path).result(lambda: False)
    files = contents(paths.prepared)
    paths.prepared.rename(tmp_path / "aside")
    again = forked(fork_server, preparation(tmp_path), paths)
    assert again.result(lambda: False) == made
    assert contents(paths.prepared) == files
    assert not list(paths.root.glob(".next-*"))


@pytest.mark.slow
def test_an_operator_that_is_not_there_is_compiled_before_the_first_trial(
    fork_server: ForkServer, tmp_path: Path, monkeypatch
) -> None:
    """The prepared folder is there; torch's was emptied, or is another one."""
    paths = StudyPaths(tmp_path / "run")
    made = forked(fork_server, preparation(tmp_path), paths).result(lambda: False)
    compiler = compiler_with_cache(tmp_path)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "prepared").rglob("*")}
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))

    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    with pytest.raises(CarbonoptError, match="preparing the workload failed"):
        preparation(tmp_path).result(lambda: False)

    monkeypatch.setenv("CXX", compiler)
    assert preparation(tmp_path).result(lambda: False) == made
    assert (tmp_path / "extensions" / "deepspeed_shm_comm" / "deepspeed_shm_comm.so").is_file()
    assert {
        path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "prepared").rglob("*")
    } == files
    assert not preparation(tmp_path).is_needed, "nothing is left to be made"


def test_one_that_nobody_waits_for_leaves_nothing(tmp_path: Path) -> None:
    begun = preparation(tmp_path)
    begun.start()
    assert begun.work is not None
    guard = begun.work._guard.pid
    begun.close()
    assert not psutil.pid_exists(guard) or psutil.Process(guard).status() == psutil.STATUS_ZOMBIE
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "prepare.json",
        "prepare-log.txt",
    }
    with pytest.raises(StudyInterrupted):
        preparation(tmp_path).result(lambda: True)


@pytest.mark.slow
def test_what_is_wrong_is_said(fork_server: ForkServer, tmp_path: Path) -> None:
    wrong, paths = preparation(tmp_path, text="to be"), StudyPaths(tmp_path / "run")
    with pytest.raises(BadInput, match="at least one sequence of 16 tokens"):
        forked(fork_server, wrong, paths).result(lambda: False)


def test_needed_operators_are_deepspeeds() -> None:
    """By the names that torch's folders have."""
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

    fixed = {"global_batch_size": 8, "learning_rate": 1e-3, "epochs": 1}
    plain = Space.model_validate(fixed)
    offload = Space.model_validate({**fixed, "offload": {"choices": ["none", "optimizer"]}})
    cpu, gpu = LocalLaunch(gpus=(), cpu_ranks=2), LocalLaunch(gpus=(0,))
    assert needed_operators(cpu, offload, is_script=False) == (ShareMemCommBuilder().name,)
    assert needed_operators(gpu, offload, is_script=False) == (CPUAdamBuilder().name,)
    assert needed_operators(gpu, plain, is_script=False) == ()
    assert (
        needed_operators(cpu, offload, is_script=True)
        == needed_operators(gpu, offload, is_script=True)
        == ()
    )


def test_operators_are_where_torch_compiles_them(tmp_path: Path, monkeypatch) -> None:
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    from carbonopt.train.speed.deepspeed_ops import build_folder

    builder = ShareMemCommBuilder()
    for variable in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        monkeypatch.setenv(variable, str(tmp_path / variable))
        assert missing_operators([builder.name]) == [builder.name]
        library = build_folder(builder) / f"{builder.name}.so"
        library.touch()
        assert missing_operators([builder.name]) == [builder.name], "a killed linker's"
        shutil.copy(WHOLE_LIBRARY, library)
        assert missing_operators([builder.name]) == []
        assert missing_operators([builder.name, "cpu_adam"]) == ["cpu_adam"]
