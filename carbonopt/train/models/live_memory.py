"""Counts the memory of tensors that have shapes but no numbers, while a model runs on them."""

import math
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from carbonopt.core.errors import BadInput
from carbonopt.spec.model_memory import Moment
from carbonopt.train.models.meta_results import MetaResults

# Limit of the CPU time of all settings of an estimate together; a layer in one setting takes
# 0.03 s. Other work on the machine does not count.
MOST_CPU_S = 60.0
# bytes to which PyTorch's CUDACachingAllocator rounds a GPU's allocations
_ROUNDED_TO = 512
# Errors raised by running a model without numbers, where its code or a library's looks at numbers
# or needs a device.
UNRUNNABLE = (
    ValueError, TypeError, KeyError, AttributeError, RuntimeError, NotImplementedError,
    AssertionError, ImportError, ZeroDivisionError,
)  # fmt: skip


def _grouped_product(left: Tensor, right: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Return a mixture's product of tokens with their experts' weights, without numbers.

    torch knows its shape in bfloat16 alone; on devices it takes float16 and float32, too.
    """
    half = (part.to(torch.bfloat16) for part in (left, right))
    product: Tensor = torch.ops.aten._grouped_mm.default(*half, *arguments, **options)
    return product.to(left.dtype)


class LiveMemory(TorchDispatchMode):
    """A mode that counts the storages made by operations until they are freed."""

    def __init__(self, masked: bool = False, until: float = math.inf) -> None:
        """Start with empty counts.

        Args:
            masked: Whether the task masks attention, see `TrainerTask.masks_attention`.
            until: A time of `time.process_time`; operations after it raise BadInput.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._masked, self._until = masked, until
        self._in_kernel = False
        self._results = MetaResults()
        self.begin(())

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The moments that no other exceeds in both bytes and gradients, by gradient elements."""
        kept: list[Moment] = []
        for gradients, most in sorted(self._most.items(), reverse=True):
            if not kept or most > kept[-1].activation_bytes:
                kept.append(Moment(activation_bytes=most, gradient_elements=gradients))
        return tuple(reversed(kept))

    def begin(self, uncounted: Iterable[Tensor]) -> None:
        """Reset the counts; storages of the `uncounted` tensors are not counted."""
        self._bytes = {tensor.untyped_storage()._cdata: 0 for tensor in uncounted}
        self.live_bytes = self._gradients = self.peak_bytes = 0
        self._most: dict[int, int] = {}  # largest live bytes by number of gradient elements

    def gradient_is_made(self, parameter: Tensor) -> None:
        """Count a parameter's gradient as a gradient and no longer as an activation."""
        assert parameter.grad is not None
        storage = parameter.grad.untyped_storage()._cdata
        self.live_bytes -= self._bytes.get(storage, 0)
        self._bytes[storage] = 0
        self._gradients += parameter.numel()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return whether torch's compiler may work while this mode is entered."""
        return True

    @contextmanager
    def one_kernel(self) -> Iterator[None]:
        """Treat the operations within as one compiled kernel.

        Tensors that are made and freed within never exist, as in a kernel made by torch's compiler.
        """
        before, self._in_kernel = self._in_kernel, True
        try:
            yield
        finally:
            self._in_kernel = before
        self._note()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # Models check whether a mask is true everywhere, or whether all positions are
            # consecutive; if so, they need no mask.
            return not self._masked
        if time.process_time() > self._until:
            raise BadInput(f"it takes more than {MOST_CPU_S:g} s of CPU time")
        if operation is torch.ops.aten._grouped_mm.default and args[0].is_meta:
            made = _grouped_product(*args, **(kwargs or {}))
        else:
            made = self._results.run(operation, args, kwargs or {})
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        return made

    def count(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once, until it is freed."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._bytes:
            return
        self._bytes[storage._cdata] = size = -(-storage.nbytes() // _ROUNDED_TO) * _ROUNDED_TO
        weakref.finalize(storage, self._free, storage._cdata)
        self.live_bytes += size
        self._note()

    def _note(self) -> None:
        if self._in_kernel:
            return
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._most[self._gradients] = max(self._most.get(self._gradients, 0), self.live_bytes)

    def _free(self, storage: int) -> None:
        self.live_bytes -= self._bytes.pop(storage, 0)  # absent if it was made before `begin`
