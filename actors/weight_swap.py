"""A second set of a model's layers: loaded and packed while the first one serves, and put in its place in no time.

On a CPU vLLM multiplies with packed copies of its linear weights and frees the originals, so a delta can't be applied
in place, and packing all of them again would stop generation for as long. `load_twins` does it beside the generation,
in the thread that calls it; `swap` then only moves pointers.

A *twin* is a shallow copy of a layer with tensors of its own. The twins go through vLLM's own loader, which knows
tensor-parallel shards and packed parameters, in checkpoint coordinates. They live until they are swapped in: that is
one packed copy of the model more in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_processing,
    get_layerwise_info,
    initialize_online_processing,
)
from vllm.model_executor.model_loader.reload.meta import (
    SKIP_TENSORS,
    materialize_meta_tensor,
    restore_layer_on_meta,
    to_meta_tensor,
)

Twins = list[tuple[torch.nn.Module, torch.nn.Module]]
"""(layer, twin) for every layer with weights."""


def obstacle(model: torch.nn.Module) -> str | None:
    """Why a model's layers can't be swapped; None when they can: all that the weights become after loading is the
    tensors and the packed product of their own layer.

    That is so for unquantized linear layers, embeddings and norms. Quantized layers, and attention that derives
    matrices from a projection, have to be loaded by vLLM's full reload.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, MLAAttention):
            return f"{name}: {type(layer).__name__} derives matrices from its projections"
        method = getattr(layer, "quant_method", None)
        if not _has_weights(layer):
            continue
        if method is not None and not isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
            return f"{name}: {type(method).__name__} may keep more than the layer's tensors"
        if persistent := sorted(layer._buffers.keys() - layer._non_persistent_buffers_set):
            return f"{name}: {persistent[0]} is a tensor that is no parameter"
    return None


@torch.no_grad()
def load_twins(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], model_config: ModelConfig) -> Twins:
    """Twins of a swappable model's layers that hold `weights` (name and tensor of the whole checkpoint; read here, not
    kept). Raises RuntimeError when a layer gets no weights."""
    twins: dict[torch.nn.Module, torch.nn.Module] = {}
    whole = _twin(model, twins)
    tied = tied_heads(model)
    for layer, twin in twins.items():
        _make_loadable(layer, twin)
    whole.load_weights(weights)  # type: ignore[operator]
    loaded = [(layer, twin) for layer, twin in twins.items() if _has_weights(layer)]
    for layer, twin in loaded:
        info = get_layerwise_info(twin)
        if info.can_load() and info.load_numel > 0:
            finalize_layerwise_processing(twin, model_config)  # of a layer that has padding
        elif info.can_load() and layer not in tied:
            raise RuntimeError(f"weights: {type(layer).__name__} got none, expected those of every layer")
    for layer, embedding in tied.items():
        twins[layer].weight = twins[embedding].weight
        twins[layer].cpu_linear = twins[embedding].cpu_linear
    return loaded


@torch.no_grad()
def swap(twins: Twins) -> None:
    """Let the layers hold what their twins hold. The old tensors are freed."""
    for layer, twin in twins:
        for name, parameter in twin._parameters.items():
            if parameter is not None:
                layer._parameters[name].data = parameter.data
        if "cpu_linear" in twin.__dict__:
            layer.cpu_linear = twin.cpu_linear
    release(twins)


def release(twins: Twins) -> None:
    """Let go of the twins' tensors at once: twins and their loaders refer to each other, and would keep them until
    Python's collector comes by."""
    for _, twin in twins:
        twin._parameters.clear()
        twin.__dict__.pop("cpu_linear", None)


def tied_heads(model: torch.nn.Module) -> dict[torch.nn.Module, torch.nn.Module]:
    """The heads that share an embedding's weight, with that embedding. On a CPU each multiplies with a packed copy of
    it, which loading the embedding doesn't renew."""
    embeddings = {
        layer.weight.data_ptr(): layer
        for layer in model.modules()
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
    }
    return {
        layer: embeddings[layer.weight.data_ptr()]
        for layer in model.modules()
        if isinstance(layer, ParallelLMHead) and layer.weight.data_ptr() in embeddings
    }


def _has_weights(layer: torch.nn.Module) -> bool:
    return any(parameter is not None for parameter in layer._parameters.values())


def _twin(layer: torch.nn.Module, twins: dict[torch.nn.Module, torch.nn.Module]) -> torch.nn.Module:
    """A shallow copy of a layer and of all below it; what is no weight is shared."""
    if layer not in twins:
        twin = copy.copy(layer)
        twins[layer] = twin
        twin._parameters = dict(layer._parameters)
        twin._buffers = dict(layer._buffers)
        twin._non_persistent_buffers_set = set(layer._non_persistent_buffers_set)
        twin._modules = {name: None if below is None else _twin(below, twins) for name, below in layer._modules.items()}
    return twins[layer]


def _make_loadable(layer: torch.nn.Module, twin: torch.nn.Module) -> None:
    """Give a twin parameters without storage that vLLM's loader fills and packs as soon as a layer is complete."""
    if not _has_weights(layer):
        return
    theirs, info = get_layerwise_info(layer), get_layerwise_info(twin)
    # Copies: the loader leaves its marks, which name the layer, on the tensors.
    info.restore_metadata = tuple(  # type: ignore[assignment]
        {name: _unmarked(tensor) for name, tensor in kind.items()} for kind in theirs.restore_metadata
    )
    info.restore_device = theirs.restore_device
    restore_layer_on_meta(twin, info)
    for name, parameter in layer._parameters.items():
        if parameter is not None and name in SKIP_TENSORS:  # the loader fills these where they are
            twin._parameters[name] = materialize_meta_tensor(_unmarked(parameter))  # type: ignore[assignment]
    initialize_online_processing(twin)


def _unmarked(tensor: torch.Tensor) -> torch.Tensor:
    """A copy without storage, with the loader that it had before a reload of the layer put its own in front."""
    twin = to_meta_tensor(tensor)
    loader = getattr(twin, "weight_loader", None)
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__  # type: ignore[union-attr]
        twin.weight_loader = loader  # type: ignore[attr-defined]
    return twin
