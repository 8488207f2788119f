"""Every study and every piece that is shipped is valid."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from shipped_studies import shipped_studies

from carbonopt.carbon.intensity import reference_intensity
from carbonopt.cli.check_text import describe_study
from carbonopt.study_file.reader import PipelineFile, load_study
from carbonopt.study_file.study_checks import check
from carbonopt.train.optim.deepspeed_keys import check_deepspeed_keys

ROOT = Path(__file__).parent.parent
STUDIES = sorted(path for path in shipped_studies() if path.parent.name == "studies")
PIECES = sorted(
    path for path in (ROOT / "configs").glob("*/*.yaml") if path.parent.name != "kubernetes"
)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_is_valid(path: Path, tmp_path: Path) -> None:
    """Checked where it stands, with the data that is shipped beside it, and made up what it names
    in data/.
    """
    copy = tmp_path / "studies" / path.name
    shutil.copytree(ROOT / "studies", copy.parent, ignore=shutil.ignore_patterns("data"))
    pipeline = PipelineFile.load(copy)
    steps = (
        [] if pipeline is None else [pipeline.study(step) for step in pipeline.pipeline.pipeline]
    )
    files = steps or [copy]
    written = "".join(yaml.safe_dump(yaml.safe_load(file.read_text())) for file in files)
    columns = {
        "text",
        "label",
        "prompt",
        "response",
        "chosen",
        "rejected",
        "source",
        "target",
        *re.findall(r"_column: (\w+)", written),
    }
    row = json.dumps(dict.fromkeys(columns, "made up"))
    for name in re.findall(r"data/[\w.-]+", written):
        (copy.parent / name).parent.mkdir(exist_ok=True)
        (copy.parent / name).write_text(f"{row if name.endswith('.jsonl') else 'made up'}\n" * 100)
    for file in files:
        checked = check(load_study(file))
        assert checked.config.name == (f"{path.stem}-{file.stem}" if steps else path.stem)
        assert "is valid" in describe_study(checked)


@pytest.mark.parametrize("path", PIECES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_piece_fits_into_a_study(path: Path, tiny_study: dict, tmp_path: Path) -> None:
    tiny_study["launch"]["gpus"] = [0]
    match path.parent.name:
        case "carbon":
            tiny_study["carbon"] = str(path)
        case "spaces":
            tiny_study["search"]["space"] = str(path)
        case "deepspeed":
            tiny_study["workload"]["deepspeed"] = str(path)
        case other:
            raise AssertionError(f"configs/{other} is not documented")
    study = tmp_path / "study.yaml"
    study.write_text(yaml.safe_dump(tiny_study))
    checked = check(load_study(study))
    assert reference_intensity(checked.config.carbon).g_co2e_per_kwh > 0
    check_deepspeed_keys(checked.config.workload.deepspeed)
