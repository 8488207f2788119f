"""What configs/kubernetes has: valid by the API's own schema, and what its pods run, run on two
machines made here. An image was not built and no cluster asked.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from ssh_hosts import SshHosts
from study.test_resume import read, wait_for

from carbonopt.study_file.reader import load_study
from carbonopt.study_file.study_checks import check

FOLDER = Path(__file__).parent.parent / "configs" / "kubernetes"
OBJECTS = {one["kind"]: one for one in yaml.safe_load_all((FOLDER / "job.yaml").read_text())}


@pytest.mark.parametrize("kind", OBJECTS)
def test_the_manifest_is_valid_for_kubernetes(kind: str) -> None:
    kubernetes_validate.validate(OBJECTS[kind], "1.36", strict=True)


@pytest.mark.skipif(
    shutil.which("ssh") is None, reason="a launch by ssh needs it (Debian: openssh-client)"
)
def test_its_parts_fit_each_other(tmp_path: Path) -> None:
    for name, text in OBJECTS["ConfigMap"]["data"].items():
        (tmp_path / name).write_text(text)
    config = check(load_study(tmp_path / "study.yaml")).config
    job, service = OBJECTS["Job"], OBJECTS["Service"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    slots = container["resources"]["limits"]["nvidia.com/gpu"]
    names = [
        f"{job['metadata']['name']}-{index}.{pod['subdomain']}"
        for index in range(job["spec"]["completions"])
    ]
    assert [(host.name, host.slots) for host in config.launch.hosts] == [
        (name, slots) for name in names
    ]
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    needed = set(re.findall(r"^#   ([A-Z]+) ", (FOLDER / "pod.sh").read_text(), re.MULTILINE))
    assert needed == {"STUDY", "OUT", "KEYS"} <= {entry["name"] for entry in container["env"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


def test_the_image_copies_what_there_is() -> None:
    copies = re.findall(r"^COPY (.*) \S+$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    sources = [source for words in copies for source in shlex.split(words)]
    assert sources and all((FOLDER.parent.parent / source).exists() for source in sources)


@pytest.mark.slow
def test_its_pods_run_a_study(
    ssh_hosts: SshHosts, tiny_study: dict, write_study, tmp_path: Path
) -> None:
    (tmp_path / "hostfile").write_text("h1 slots=1\nh2 slots=1\n")
    space = {"global_batch_size": 64, "learning_rate": 2e-3, "epochs": 0.1}
    tiny_study["search"] = {
        "sampler": "random",
        "pruning": {"target": False, "cap": False},
        "space": space,
    }
    tiny_study |= {
        "budget": {"trials": 1},
        "launch": {"kind": "hostfile", "hostfile": "hostfile", "device": "cpu"},
    }
    keys = tmp_path / "keys"
    keys.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / "id"], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SSH")}
    environment |= {
        "STUDY": str(write_study(tiny_study)),
        "OUT": str(tmp_path / "out"),
        "KEYS": str(keys),
    }
    # What DeepSpeed has compiled for this user, where torch has put it.
    compiled = (
        Path.home()
        / ".cache"
        / "torch_extensions"
        / f"py{sys.version_info.major}{sys.version_info.minor}_cpu"
    )
    environment.setdefault("TORCH_EXTENSIONS_DIR", str(compiled))
    environment["HOME"] = str(Path("~root").expanduser())
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    pods = []
    for index, name in enumerate(("h1", "h2")):
        own = tmp_path / f"ssh-{index}"
        own.mkdir()
        pods.append(
            subprocess.Popen(
                ssh_hosts.on(name, "sh", FOLDER / "pod.sh", keys=own),
                env=environment | {"JOB_COMPLETION_INDEX": str(index)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    first, second = pods
    try:
        said, _ = first.communicate(timeout=200)
        assert first.returncode in (0, 3), said
        assert [node.name for node in read(tmp_path / "out").records[0].nodes] == ["h1", "h2"]
    finally:
        second.terminate()  # as Kubernetes ends it then
    wait_for(lambda: second.poll() is not None, 10)
