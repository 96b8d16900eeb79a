"""The weight-transfer engine that vLLM's workers load: it makes the model serve what the mirror holds."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from lachesis_actors.weight_receiver import Receiver, open_receiver
from lachesis_actors.weight_swap import Twins, load_twins, obstacle, release, swap, tied_heads
from lachesis_transport.weights.mirror import Mirror

logger = logging.getLogger("lachesis.weights")


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
    """Serves the staged version, through vLLM's own loader, which knows tensor-parallel shards and packed parameters.

    On a CPU a version is loaded beside the generation when the actor says `prepare`, and the update swaps it in.
    Otherwise, or where a model can't be swapped, the update is vLLM's layerwise reload of everything.
    """

    init_info_cls = LachesisInitInfo
    update_info_cls = LachesisUpdateInfo
    supports_draft_weight_update = False

    _receiver: Receiver | None = None
    _prepared: tuple[int, Twins] | None = None

    def init_transfer_engine(self, init_info: LachesisInitInfo) -> None:
        """Start the receiver thread (an earlier one ends: its actor is gone)."""
        self.shutdown()
        reason = obstacle(self.model) if self.device.type == "cpu" else f"the weights are on {self.device}"
        if reason is not None:
            logger.warning("each version is loaded inside the pause: %s", reason)
        self._receiver = open_receiver(
            Path(self.model_config.model),
            address=init_info.address,
            token=init_info.token,
            worker=self.parallel_config.rank,
            device=str(self.device),
            prepare=None if reason is not None else self._prepare,
        )

    def start_weight_update(self) -> None:
        """Nothing: an update is one step here."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Load the mirror. (The base class ends in a device synchronisation that fails where there is no device.)"""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: LachesisUpdateInfo) -> None:
        """Serve the staged version. Raises RuntimeError when the mirror does not hold the one that was asked for."""
        receiver = self._receiver
        if receiver is None:
            raise RuntimeError("weights: no receiver, expected init_weight_transfer_engine before an update")
        with receiver.lock:
            if receiver.version != update_info.version:
                raise RuntimeError(f"version: {update_info.version}, but the mirror holds {receiver.version}")
            if self._prepared is not None and self._prepared[0] == update_info.version:
                swap(self._prepared[1])
                self._prepared = None
            else:
                self._reload(receiver.mirror)

    def finish_weight_update(self) -> None:
        """Nothing: an update is one step here."""

    def _prepare(self, version: int, mirror: Mirror) -> None:
        """Called in the receiver's thread, with its lock held."""
        self._discard()  # never three copies of the weights
        self._prepared = version, load_twins(self.model, mirror.tensors(), self.model_config)

    def _discard(self) -> None:
        if self._prepared is not None:
            release(self._prepared[1])
            self._prepared = None

    def _reload(self, mirror: Mirror) -> None:
        initialize_layerwise_reload(self.model)
        self.model.load_weights(mirror.tensors())
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            for head in tied_heads(self.model):
                head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        """End the receiver thread."""
        if self._receiver is not None:
            self._receiver.stop()
            self._receiver = None
        self._discard()
