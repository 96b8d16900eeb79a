"""The weight-transfer engine that vLLM's workers load: it copies the staged version from the receiver's mirror."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from lachesis_actors.weight_receiver import Receiver, open_receiver


@dataclass
class LachesisInitInfo(WeightTransferInitInfo):
    """Where the actor listens for its workers' receivers."""

    address: str
    token: str


@dataclass
class LachesisUpdateInfo(WeightTransferUpdateInfo):
    """The version to load; the mirror must hold exactly that."""

    version: int


class LachesisWeightTransfer(WeightTransferEngine[LachesisInitInfo, LachesisUpdateInfo]):
    """Loads the staged version into the model, through vLLM's own loader.

    The loader knows tensor-parallel shards, packed and tied parameters; and on a CPU, where vLLM packs linear weights
    and frees the originals, it is the only way in.
    """

    init_info_cls = LachesisInitInfo
    update_info_cls = LachesisUpdateInfo
    supports_draft_weight_update = False

    _receiver: Receiver | None = None

    def init_transfer_engine(self, init_info: LachesisInitInfo) -> None:
        """Start the receiver thread (an earlier one ends: its actor is gone)."""
        self.shutdown()
        self._receiver = open_receiver(
            Path(self.model_config.model),
            address=init_info.address,
            token=init_info.token,
            worker=self.parallel_config.rank,
        )

    def start_weight_update(self) -> None:
        """Make the model ready to be loaded again, layer by layer."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Load the mirror. (The base class ends in a device synchronisation that fails where there is no device.)"""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: LachesisUpdateInfo) -> None:
        """Load the mirror. Raises RuntimeError when it does not hold the version that was asked for."""
        receiver = self._receiver
        if receiver is None:
            raise RuntimeError("weights: no receiver, expected init_weight_transfer_engine before an update")
        with receiver.lock:
            if receiver.version != update_info.version:
                raise RuntimeError(f"version: {update_info.version}, but the mirror holds {receiver.version}")
            self.model.load_weights(receiver.mirror.tensors())

    def finish_weight_update(self) -> None:
        """Pack and place what was loaded."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _pack_tied_heads(self.model)

    def shutdown(self) -> None:
        """End the receiver thread."""
        if self._receiver is not None:
            self._receiver.stop()
            self._receiver = None


def _pack_tied_heads(model: torch.nn.Module) -> None:
    """Pack the heads that share an embedding's weight again.

    On a CPU a head multiplies with a packed copy of its weight. A tied head is never loaded itself, so the layerwise
    reload leaves its copy at the weights that the engine started with.
    """
    embeddings = {
        layer.weight.data_ptr()
        for layer in model.modules()
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
    }
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and layer.weight.data_ptr() in embeddings:
            layer.quant_method.process_weights_after_loading(layer)
