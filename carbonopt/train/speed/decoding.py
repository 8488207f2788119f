"""Generation on a GPU, with the forward pass of each further token as one CUDA graph.

For a small model the host otherwise takes longer to launch a token's kernels than they take to run.
"""

import sys
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel
from transformers.cache_utils import StaticCache, StaticLayer

# Options of `generate` that the graph needs: a cache whose tensors stay in place, and permission to
# replace the call that transformers would compile.
GRAPHED: dict[str, Any] = {"cache_implementation": "static", "disable_compile": False}


def install_token_graph(model: Any) -> bool:
    """Make `generate` run each token after the second as a CUDA graph where it is given GRAPHED.

    The numbers stay the same, because the kernels are the same.

    Returns:
        False, with nothing changed, on a CPU and for a model with an encoder.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if (
        not (torch.cuda.is_available() and isinstance(model, PreTrainedModel))
        or model.config.is_encoder_decoder
    ):
        return False
    known = _Known()
    # transformers asks for it once in each call of `generate`, and only with a static cache.
    model.get_compiled_call = (  # type: ignore[method-assign]
        lambda compile_config: _TokenGraph(model, known)
    )
    return True


class _Known:
    """State that one call of `generate` leaves to the next."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()  # one memory pool, for all graphs in turn
        self.stream = torch.cuda.Stream()
        # kept until the next graph exists, since the pool goes with its last graph
        self.last: torch.cuda.CUDAGraph | None = None
        self.verified = False
        self.refused = False

    def refuse(self, reason: str) -> None:
        self.refused = True
        print(f"carbonopt: tokens are generated without a CUDA graph: {reason}.", file=sys.stderr)


class _TokenGraph:
    """The model's forward pass of one more token, for one call of `generate`.

    During the call, its cache and its weights, which ZeRO-3 gathers for it, stay in place.
    Capturing a pass takes about as long as running it.
    """

    def __init__(self, model: Any, known: _Known) -> None:
        self._model, self._known = model, known
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        # tensors that the graph reads, by their position among the inputs' leaves
        self._given: dict[int, torch.Tensor] = {}
        self._outputs: Any = None

    def __call__(self, **inputs: Any) -> Any:
        self._calls += 1
        if self._known.refused or self._calls == 1:  # the first call loads what the pass needs
            return self._model(**inputs)
        if self._graph is None:
            self._capture(inputs)
        elif not self._known.verified:
            return self._verified(inputs)
        return self._model(**inputs) if self._known.refused else self._replayed(inputs)

    def _replayed(self, inputs: dict[str, Any]) -> Any:
        leaves, _ = tree_flatten(inputs)
        for place, given in self._given.items():
            given.copy_(leaves[place])
        assert self._graph is not None
        self._graph.replay()
        return self._outputs

    def _capture(self, inputs: dict[str, Any]) -> None:
        cache = inputs.get("past_key_values")
        if not isinstance(cache, StaticCache) or any(
            type(layer) is not StaticLayer for layer in cache.layers
        ):
            self._known.refuse("the model's cache keeps its length on the host")
            return
        # a model with several kinds of attention has a dict of masks
        leaves, shape = tree_flatten(inputs)
        self._given = {
            place: leaf.clone()
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        }
        static = tree_unflatten(
            [self._given.get(place, leaf) for place, leaf in enumerate(leaves)], shape
        )
        self._graph, stream = torch.cuda.CUDAGraph(), self._known.stream
        random = torch.cuda.default_generators[torch.cuda.current_device()]
        state = random.get_state()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                self._graph.capture_begin(pool=self._known.pool, capture_error_mode="thread_local")
                try:
                    # Call the module without the hooks of DeepSpeed's engine, one of which waits
                    # for the GPU.
                    self._outputs = self._model.forward(**static)
                finally:
                    self._graph.capture_end()
        # raised for a model that reads a number from the GPU, for example
        except RuntimeError as error:
            # After a failed capture the generator behaves as if it went on, and no number can be
            # drawn.
            random.graphsafe_set_state(torch.Generator(random.device).set_state(state))
            self._known.refuse(str(error.__context__ or error).splitlines()[0].rstrip("."))
        torch.cuda.current_stream().wait_stream(stream)
        self._known.last = self._graph

    def _verified(self, inputs: dict[str, Any]) -> Any:
        """Return the output of the model's own pass, and compare the graph's with it.

        A graph of a model that keeps a position as a number on the host repeats the position of its
        capture.
        """
        lengths = [layer.cumulative_length for layer in inputs["past_key_values"].layers]
        before = [length.clone() for length in lengths]
        logits = self._replayed(inputs).logits.clone()
        for length, value in zip(lengths, before, strict=True):
            length.copy_(value)
        uncaptured = self._model(**inputs)
        self._known.verified = torch.equal(logits, uncaptured.logits)
        if not self._known.verified:
            apart = (logits - uncaptured.logits).abs().max().item()
            self._known.refuse(f"its logits are {apart:g} from the model's own")
        return uncaptured
