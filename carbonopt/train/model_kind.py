"""Which models a task trains, in the names of the libraries that make them."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelKind:
    """Plain names, so that whoever reads a task loads none of the libraries."""

    auto_class: str  # of transformers
    mapping: str  # transformers' table of the model types that this class makes
    peft_task_type: str
    name: str  # in a sentence: "causal language model"

    def auto(self) -> Any:
        """The class."""
        import transformers

        return getattr(transformers, self.auto_class)

    def model_types(self) -> Collection[str]:
        """Those that the class makes."""
        from transformers.models.auto import modeling_auto

        model_types: Collection[str] = getattr(modeling_auto, self.mapping).keys()
        return model_types
