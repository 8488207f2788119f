"""A document as JSON: what is shown, without pictures."""

from typing import Any

from carbonopt.report.document import Document


def render(document: Document) -> dict[str, Any]:
    """Fields at their defaults are left out."""
    shown = document.model_dump(mode="json", exclude_defaults=True, exclude={"caveats"})
    for section, made in zip(document.sections, shown.get("sections", ()), strict=True):
        for block, fields in zip(section.blocks, made.get("blocks", ()), strict=True):
            fields["kind"] = block.kind
    return {**shown, "caveats": [caveat.as_json() for caveat in document.caveats]}
