"""What several test files need: small study files and a table of recorded runs, made here."""

import gc
import os
import shutil
import signal
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from commands import within
from matplotlib.backends import _backend_pdf_ps as fonts
from postgresql import Server, running_server
from replays import study_over, write_table
from ssh_hosts import ssh_hosts  # noqa: F401 – a fixture

from carbonopt.engines.process.environment import programs_path

ROOT = Path(__file__).parent.parent

# Tests run beside each other: no trial shall take its first half second to find that out, nor have
# a thread for each core, which takes 1.15 times the CPU time.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests that load DeepSpeed's operators here find the ninja that trials find: with another all are
# compiled anew.
os.environ["PATH"] = programs_path()
# No example fails for the time it took beside other tests.
hypothesis.settings.register_profile("beside_others", deadline=None)
hypothesis.settings.load_profile("beside_others")
# A shell that starts pytest in the background has it ignore Ctrl-C, nohup has it ignore the end of
# its terminal, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


# Files whose few slow tests take a minute or more together, the longest first.
LONG_FILES = (
    "slurm/test_slurm.py",
    "study/test_pipeline.py",
    "energy/test_gpu_energy.py",
    "engines/test_nodes.py",
    "storage/test_workers.py",
    "storage/test_reconnecting_storage.py",
    "study/test_checkpoints.py",
    "train/test_training_checkpoints.py",
    "study/test_resume.py",
    "api/test_python_api.py",
    "watch/test_live_page.py",
    "train/tasks/test_seq2seq.py",
    "export/test_rerun.py",
    "engines/test_fork_server.py",
    "study/test_local_workers.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage, of which imports leave little among millions of objects,
    and have no later search look at these again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, the long ones and those with most of them before all: a long
    file that began last would run alone.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    long = {ROOT / "tests" / file: place for place, file in enumerate(reversed(LONG_FILES), 1)}
    items.sort(key=lambda item: (-long.get(item.path, 0), -slow[item.path]))


@pytest.fixture(scope="session", autouse=True)
def cut_fonts() -> Iterator[None]:
    """Half of a figure's time is cutting a font to its characters, which many figures of the tests
    share.
    """
    made, own = {}, fonts.get_glyphs_subset

    @contextmanager
    def cut(file: Any, glyphs: Iterable[int]) -> Iterator[Any]:
        key = file, frozenset(glyphs)
        if key not in made:
            made[key] = opened.enter_context(own(file, set(glyphs)))
        yield made[key]

    with ExitStack() as opened, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fonts, "get_glyphs_subset", cut)
        yield


@pytest.fixture
def study_of_seconds(tiny_study: dict) -> dict:
    """Trials of some seconds each, none of which is stopped: so long that no worker can run them all
    before another has begun.
    """
    space = {
        "global_batch_size": {"choices": [8, 16]},
        "learning_rate": {"choices": [1e-3, 2e-3]},
        "epochs": 1,
    }
    tiny_study["search"] = {
        "sampler": "random",
        "pruning": {"target": False, "cap": False},
        "space": space,
    }
    return tiny_study


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path)


@pytest.fixture
def replay_study(table: Path) -> dict:
    return study_over(table)


@pytest.fixture
def wide_replay(replay_study: dict) -> dict:
    """25 of the 27 recorded configurations, for several workers."""
    replay_study["search"] |= {"sampler": "random", "pruning": {"target": False, "cap": False}}
    replay_study["budget"] = {"trials": 25}
    return replay_study


@pytest.fixture(scope="session")
def finished_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study that has run all trials of its budget, study.yaml beside it. Nobody
    writes into it.
    """
    root = tmp_path_factory.mktemp("finished")
    study = study_over(write_table(root))
    study["search"]["sampler"] = "random"
    (root / "study.yaml").write_text(yaml.safe_dump(study))
    done = within("run", root / "study.yaml", "--out", root / "out")
    assert done.returncode == 0, done.stderr
    return root / "out"


@pytest.fixture
def finished(finished_study: Path, tmp_path: Path) -> Path:
    """A copy of it, the study file beside it, that a test can write into."""
    shutil.copy(finished_study.parent / "study.yaml", tmp_path)
    return shutil.copytree(finished_study, tmp_path / "out")


@pytest.fixture
def tiny_study() -> dict:
    """A real study on the CPU whose trials take seconds."""
    return {
        "name": "tiny",
        "workload": {
            "model": {
                "from_config": {
                    "model_type": "gpt2",
                    "n_layer": 1,
                    "n_head": 2,
                    "n_embd": 16,
                    "n_positions": 64,
                }
            },
            "tokenizer": {"kind": "byte"},
            "dataset": {"builtin": "python-docs"},
            "sequence_length": 64,
            "evaluations": 3,
        },
        "target": {"perplexity": 200.0},
        "search": {
            "space": {
                "global_batch_size": {"choices": [64, 128]},
                "learning_rate": {"low": 1e-4, "high": 1e-2, "log": True},
                "epochs": {"choices": [0.1, 0.2]},
            }
        },
        "budget": {"trials": 3},
        "carbon": {"intensity_g_co2e_per_kwh": 500},
        "launch": {"kind": "local", "gpus": []},
    }


@pytest.fixture
def write_study(tmp_path: Path):
    """Writes a study file; returns its path."""

    def write(study: dict, name: str = "study.yaml") -> Path:
        path = tmp_path / name
        path.write_text(yaml.safe_dump(study))
        return path

    return write


def own_postgresql(name: str) -> AbstractContextManager[Server]:
    """A running server of our own; skips the test where there can be none."""
    if shutil.which("pg_ctlcluster") is None or os.geteuid() != 0:
        pytest.skip("needs an installed PostgreSQL server, and root to become its user")
    return running_server(Path("/tmp") / f"carbonopt-{name}-{os.getpid()}")


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[Server]:
    """A server that serves all tests of this process."""
    with own_postgresql("pg") as server:
        yield server


@pytest.fixture
def mortal_postgresql() -> Iterator[Server]:
    """A server that a test may stop."""
    with own_postgresql("mortal-pg") as server:
        yield server


@pytest.fixture
def postgresql_url(postgresql_server: Server) -> str:
    """An empty database."""
    return postgresql_server.new_database()
