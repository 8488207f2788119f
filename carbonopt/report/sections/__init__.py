"""The sections of the report, a file each; `report.assemble` has their order."""
