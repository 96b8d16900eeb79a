"""The vLLM plugin (entry point of vllm.general_plugins) that makes the weight receiver known to vLLM.

vLLM imports this in each of its processes, before it looks through all loaded modules for kernels to replace, which
some modules don't bear: nothing but vLLM's registry is imported here.
"""

from __future__ import annotations


def register() -> None:
    """Name this backend to vLLM; may be called again."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if "lachesis" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            "lachesis", "lachesis_actors.weight_transfer", "LachesisWeightTransfer"
        )
