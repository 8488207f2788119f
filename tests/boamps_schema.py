"""BoAmps 1.1.0 as far as carbonopt fills it in: types, allowed values and required fields.

Transcribed from the schemas in `model/` of https://github.com/Boavizta/BoAmps (CC BY 4.0, Boavizta)
into one table. The schemas allow further properties; these do not, so that a misspelt key is found.
"""

from typing import Any

from referencing import Registry, Resource
from referencing.jsonschema import DRAFT4

ADDRESS = "https://raw.githubusercontent.com/Boavizta/BoAmps/main/model/"
TEXT, NUMBER, WHOLE = {"type": "string"}, {"type": "number"}, {"type": "integer"}
FRACTION = {"type": "number", "minimum": 0, "maximum": 1}


def one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def several(name: str) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": {"$ref": f"{ADDRESS}{name}_schema.json"}}


def described(required: str = "", **properties: Any) -> dict[str, Any]:
    found = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**found, "required": required.split()} if required else found


def fields(names: str, kind: dict[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


SCHEMAS = {
    "report": described(
        "task measures infrastructure",
        header=described(
            "reportDatetime",
            **fields("licensing formatVersion formatVersionSpecificationUri reportId", TEXT),
            reportDatetime={"type": "string", "pattern": r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$"},
            reportStatus=one_of("draft", "final", "corrective", "other"),
            publisher=described(
                "confidentialityLevel",
                **fields("name division projectName publicKey", TEXT),
                confidentialityLevel=one_of("public", "internal", "confidential", "secret"),
            ),
        ),
        task=described(
            "taskStage taskFamily algorithms dataset",
            **fields("taskStage taskFamily taskDescription", TEXT),
            nbRequest=NUMBER,
            algorithms=several("algorithm"),
            dataset=several("dataset"),
            measuredAccuracy=FRACTION,
            estimatedAccuracy=one_of("veryPoor", "poor", "average", "good", "veryGood"),
        ),
        measures=several("measure"),
        system=described("os", **fields("os distribution distributionVersion", TEXT)),
        software=described("language", **fields("language version", TEXT)),
        infrastructure=described(
            "infraType components",
            infraType=one_of("publicCloud", "privateCloud", "onPremise", "other"),
            **fields("cloudProvider cloudInstance cloudService", TEXT),
            components=several("hardware"),
        ),
        environment=described(
            "country",
            **fields("country location", TEXT),
            **fields("latitude longitude powerSourceCarbonIntensity", NUMBER),
            powerSupplierType=one_of("public", "private", "internal", "other"),
            powerSource=one_of("solar", "wind", "nuclear", "hydroelectric", "gas", "coal", "other"),
        ),
        quality=one_of("high", "medium", "low"),
    ),
    "algorithm": described(
        **fields(
            "trainingType algorithmType algorithmName algorithmUri foundationModelName"
            " foundationModelUri framework frameworkVersion classPath optimizer quantization",
            TEXT,
        ),
        **fields("parametersNumber layersNumber epochsNumber", NUMBER),
    ),
    "dataset": described(
        "dataUsage dataType",
        dataUsage=one_of("input", "output"),
        dataType=one_of(
            *("tabular", "audio", "boolean", "image", "video", "object", "text", "token", "word"),
            "other",
        ),
        **fields("dataFormat shape sourceUri owner", TEXT),
        **fields("dataSize dataQuantity", NUMBER),
        source=one_of("public", "private", "other"),
    ),
    "hardware": described(
        "componentType nbComponent",
        **fields("componentName componentType manufacturer family series", TEXT),
        nbComponent=WHOLE,
        memorySize=NUMBER,
        share=FRACTION,
    ),
    "measure": described(
        "measurementMethod powerConsumption",
        **fields(
            "measurementMethod manufacturer version cpuTrackingMode gpuTrackingMode"
            " measurementDateTime",
            TEXT,
        ),
        **fields("averageUtilizationCpu averageUtilizationGpu", FRACTION),
        **fields(
            "powerCalibrationMeasurement durationCalibrationMeasurement powerConsumption"
            " measurementDuration",
            NUMBER,
        ),
    ),
}
# The references of the schemas point to the net; here they lead to these.
REGISTRY: Registry = Registry().with_resources(
    (f"{ADDRESS}{name}_schema.json", Resource.from_contents(schema, default_specification=DRAFT4))
    for name, schema in SCHEMAS.items()
)
