"""The notebook of the documentation, and a study in the kernel of a notebook."""

import base64
import json
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

import carbonopt

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "docs" / "examples" / "first_study.ipynb"
WAIT_S = 200.0


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """The notebook's folder as in a checkout, that it can write into."""
    folder = tmp_path / "docs" / "examples"
    folder.mkdir(parents=True)
    (tmp_path / "reports").symlink_to(ROOT / "reports")
    for path in NOTEBOOK.parent.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells and all(not cell.outputs and cell.execution_count is None for cell in cells)


@pytest.mark.slow
def test_the_notebook_runs_and_shows_its_figure(examples: Path) -> None:
    notebook = nbformat.read(examples / NOTEBOOK.name, as_version=4)
    NotebookClient(notebook, timeout=WAIT_S, resources={"metadata": {"path": examples}}).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    assert [out.text for out in outputs if out.get("name") == "stderr"] == []
    study = carbonopt.load(examples / "runs" / "replay")
    assert f"trial {study.recommend().trial}" in "".join(out.get("text", "") for out in outputs)
    shown = [out.data for out in outputs if "data" in out]
    (picture,) = (data["image/png"] for data in shown if "image/png" in data)
    assert base64.b64decode(picture).startswith(b"\x89PNG")
    assert (examples / "runs" / "replay" / "export" / "emissions.csv").is_file()
    assert (examples / "runs" / "replay" / "pareto.pdf").is_file()


RUN = """
import json, logging
import carbonopt
logging.basicConfig(level=logging.INFO, format="%(message)s")
study = carbonopt.run(json.loads({study!r}), {out!r})
print("trials:", len(study.trials), study.ended)
"""


def said_until(client: Any, ended: str) -> list[dict[str, Any]]:
    """The messages of a kernel until one of the kind `ended`, or one that begins with it."""
    messages, end = [], time.monotonic() + WAIT_S
    while time.monotonic() < end:
        message = client.get_iopub_msg(timeout=WAIT_S)
        messages.append({"kind": message["msg_type"], **message["content"]})
        if message["msg_type"] == ended or ended in message["content"].get("text", ""):
            return messages
    raise AssertionError(f"no {ended}: {messages}")


@pytest.mark.slow
def test_an_interrupted_kernel_stores_the_study_and_goes_on(
    study_of_seconds: dict, tmp_path: Path
) -> None:
    """Real trials on the CPU: the cell is interrupted in one, and run again."""
    study_of_seconds["budget"] = {"trials": 2}
    out = tmp_path / "out"
    cell = RUN.format(study=json.dumps(study_of_seconds), out=str(out))
    manager, client = start_new_kernel()
    try:
        client.execute(
            cell, stop_on_error=False
        )  # else the kernel refuses the next cell for a while
        said_until(client, "trial 1 begins")
        manager.interrupt_kernel()
        messages = said_until(client, "error")
        assert messages[-1]["ename"] == "KeyboardInterrupt"
        cut = carbonopt.load(out)
        assert cut.ended is None and "running" not in set(cut.trials["state"])
        assert list(cut.trials["stop_reason"].fillna("none")) == ["none", "interrupted"]
        client.execute(cell)
        messages = said_until(client, "trials: 2 ")
        assert messages[-1]["name"] == "stdout"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    whole = carbonopt.load(out)
    assert (whole.trials["state"] == "complete").all() and whole.ended is not None
    assert whole.trials["emissions_kg_co2e"][0] == cut.trials["emissions_kg_co2e"][0]
    assert whole.trials["energy_kwh.train"].gt(0).all()
