"""Make the package carbonopt-sampler, which is `CarbonSampler` alone, without torch.

Its modules have a name of their own, so that it can be installed beside carbonopt.

    python configs/sampler/build.py FOLDER

Into FOLDER goes what `python -m build FOLDER` makes a wheel of: the modules of the installed
carbonopt that the sampler imports, with `carbonopt.` in their imports replaced by
`carbonopt_sampler.`, and what lies beside this file.
"""

import re
import shutil
import sys
from pathlib import Path

from carbonopt.export.copies import copies

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SAMPLER, NAME = "carbonopt.search.sampler", "carbonopt_sampler"
IMPORT = re.compile(r"^(\s*(?:from|import) )carbonopt\b", re.MULTILINE)


def main(folder: Path) -> None:
    """Write the package's source into a folder that is empty or does not exist yet."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        sys.exit(f"build.py: {folder} must be an empty folder, or not be there yet.")
    for path, text in copies(SAMPLER).files.items():
        copy = folder / NAME / Path(path).relative_to("carbonopt")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(IMPORT.sub(rf"\g<1>{NAME}", text), encoding="utf-8")
    with (folder / NAME / "__init__.py").open("a", encoding="utf-8") as init:
        init.write(
            f"\nfrom {NAME}.search.sampler import CarbonSampler\n\n__all__ = ['CarbonSampler']\n"
        )
    (folder / NAME / "py.typed").touch()
    for beside in ("pyproject.toml", "README.md"):
        shutil.copy(HERE / beside, folder)
    shutil.copy(ROOT / "LICENSE", folder)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python configs/sampler/build.py FOLDER")
    main(Path(sys.argv[1]))
