"""A description of the report's tables in Croissant 1.1, the format of ML Commons for data sets.

The specification: https://docs.mlcommons.org/croissant/docs/croissant-spec-1.1.html. The text
belongs beside the tables, in the folder `data/` of the report: it names them without a folder.
"""

import csv
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from carbonopt.core.errors import BadInput
from carbonopt.core.values import Frozen
from carbonopt.export.exported_study import ExportedStudy

VERSION = "http://mlcommons.org/croissant/1.1"
ORGANIZATION = "Organization:"
# The specification prescribes this context.
_CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "dct": "http://purl.org/dc/terms/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "sc": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "description": {"@container": "@language"},
    "name": {"@container": "@language"},
    **{
        term: f"cr:{term}"
        for term in (
            *("arrayShape", "citeAs", "column", "containedIn", "equivalentProperty", "extract"),
            *("field", "fileObject", "fileProperty", "fileSet", "format", "includes", "isArray"),
            *("isLiveDataset", "jsonPath", "key", "md5", "parentField", "path", "recordSet"),
            *("references", "regex", "repeated", "replace", "samplingRate", "separator", "source"),
            *("subField", "transform"),
        )
    },
}


class Publication(Frozen):
    """The facts on a published data set that only its author knows."""

    license: str  # the address of its text, or its name in the list of SPDX
    url: str  # of the page on which the data set is published
    creator: str  # the name of a person; with ORGANIZATION before it, of an organization


def croissant(
    study: ExportedStudy, tables: Mapping[str, bytes], publication: Publication
) -> dict[str, Any]:
    """Return the description as JSON.

    Args:
        study: The study.
        tables: CSV tables with a header, by file name; an empty one is left out.
        publication: What the author says.

    Raises:
        BadInput: The creator is an organization without a name.
    """
    last = study.last_active
    draft = "A draft: the study has not ended. " if study.status == "draft" else ""
    described: dict[str, Any] = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": VERSION,
        "name": study.data.config.name,
        "description": (
            f"{draft}Trials and evaluations of the study {study.data.config.name} of carbonopt:"
            " hyperparameters, quality, energy in kWh without PUE, emissions in kg CO2e with PUE."
        ),
        "creativeWorkStatus": "Draft" if draft else "Published",
        "license": publication.license,
        "url": publication.url,
        "creator": _creator(publication.creator),
    }
    if last is not None:
        described["datePublished"] = last.date().isoformat()
    filled = {name: content for name, content in tables.items() if content.strip()}
    return {
        **described,
        "distribution": [_file(name, content) for name, content in filled.items()],
        "recordSet": [_records(name, content) for name, content in filled.items()],
    }


def croissant_text(
    study: ExportedStudy, tables: Mapping[str, bytes], publication: Publication
) -> str:
    """Return `croissant` as text."""
    described = croissant(study, tables, publication)
    return json.dumps(described, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _creator(name: str) -> dict[str, str]:
    if name.startswith(ORGANIZATION):
        organization = name.removeprefix(ORGANIZATION).strip()
        if not organization:
            raise BadInput(f"the creator must be named after {ORGANIZATION!r}, but got {name!r}.")
        return {"@type": "Organization", "name": organization}
    return {"@type": "Person", "name": name}


def _file(name: str, content: bytes) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": name,
        "name": name,
        "contentUrl": name,
        "contentSize": f"{len(content)} B",
        "encodingFormat": "text/csv",
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def _records(name: str, content: bytes) -> dict[str, Any]:
    rows = csv.DictReader(io.StringIO(content.decode(), newline=""))
    columns: dict[str, list[str]] = {column: [] for column in rows.fieldnames or ()}
    for row in rows:
        for column, cell in row.items():
            columns[column].append(cell)
    records = name.removesuffix(".csv")
    return {
        "@type": "cr:RecordSet",
        "@id": records,
        "name": records,
        "field": [
            {
                "@type": "cr:Field",
                "@id": f"{records}/{column}",
                "name": column,
                "dataType": _data_type(column, cells),
                "source": {"fileObject": {"@id": name}, "extract": {"column": column}},
            }
            for column, cells in columns.items()
        ],
    }


def _data_type(column: str, cells: Sequence[str]) -> str:
    """Return the type of a column; readers take a column of whole numbers with gaps for floats."""
    known = [cell for cell in cells if cell]
    if not known and any(part.endswith(("_kwh", "_s")) for part in column.split(".")):
        return "sc:Float"
    if known and all(cell in ("True", "False") for cell in known):
        return "sc:Boolean" if len(known) == len(cells) else "sc:Text"
    if known and len(known) == len(cells) and all(cell.lstrip("-").isdigit() for cell in known):
        return "sc:Integer"
    return "sc:Float" if known and all(map(_is_number, known)) else "sc:Text"


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
