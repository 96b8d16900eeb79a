"""Twins of vLLM's own layers, without an engine around them."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from lachesis_actors.weight_swap import load_twins, obstacle, swap

CONFIG: Any = SimpleNamespace(dtype=torch.bfloat16)
X = torch.linspace(-1, 1, 3 * 64).view(3, 64).to(torch.bfloat16)


class Model(torch.nn.Module):
    """A norm, two linear layers (one with a bias) and a name that stands for part of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(64, dtype=torch.bfloat16)
        self.up = ReplicatedLinear(64, 96, bias=True, params_dtype=torch.bfloat16, disable_tp=True)
        self.down = ReplicatedLinear(96, 64, bias=False, params_dtype=torch.bfloat16, disable_tp=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(self.norm(x))[0])[0]
        return out

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, tensor in weights:
            getattr(own[name], "weight_loader", default_weight_loader)(own[name], tensor)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1))
    model = Model().requires_grad_(False)
    record_metadata_for_reloading(model)
    model.load_weights(weights(0).items())
    for layer in (model.up, model.down):
        layer.quant_method.process_weights_after_loading(layer)
    assert model.up.weight.numel() == 0
    return model


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "norm.weight": (64,), "norm.bias": (64,), "up.weight": (96, 64), "up.bias": (96,), "down.weight": (64, 96),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def expected(seed: int) -> torch.Tensor:
    w = weights(seed)
    hidden = torch.nn.functional.layer_norm(X, (64,), w["norm.weight"], w["norm.bias"])
    hidden = torch.nn.functional.linear(hidden, w["up.weight"], w["up.bias"])
    return torch.nn.functional.linear(hidden, w["down.weight"])


def test_the_model_changes_at_the_swap_and_not_before(model: Model) -> None:
    assert obstacle(model) is None
    torch.testing.assert_close(model(X), expected(0), rtol=0.05, atol=0.5)
    first = model(X)
    for seed in (1, 2, 0):
        before = model(X)
        staged = weights(seed)
        twins = load_twins(model, staged.items(), CONFIG)
        assert torch.equal(model(X), before)
        for tensor in staged.values():
            tensor.zero_()  # the mirror goes on to the next version
        swap(twins)
        torch.testing.assert_close(model(X), expected(seed), rtol=0.05, atol=0.5)
    assert torch.equal(model(X), first)


def test_parameters_stay_the_same_objects(model: Model) -> None:
    held = dict(model.named_parameters())
    swap(load_twins(model, weights(1).items(), CONFIG))
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in held.items()}
    assert torch.equal(model.norm.weight, weights(1)["norm.weight"])


def test_a_swap_after_a_reload_and_a_reload_after_a_swap(model: Model) -> None:
    first = model(X)
    swap(load_twins(model, weights(1).items(), CONFIG))
    second = model(X)
    for _ in range(2):
        initialize_layerwise_reload(model)
        model.load_weights(weights(0).items())
        finalize_layerwise_reload(model, CONFIG)
        assert torch.equal(model(X), first)
        swap(load_twins(model, weights(1).items(), CONFIG))
        assert torch.equal(model(X), second)


def test_a_layer_without_weights_is_an_error_and_changes_nothing(model: Model) -> None:
    before = model(X)
    some = {name: tensor for name, tensor in weights(1).items() if not name.startswith("down")}
    with pytest.raises(RuntimeError, match="ReplicatedLinear got none, expected those of every layer"):
        load_twins(model, some.items(), CONFIG)
    assert torch.equal(model(X), before)


def test_what_is_more_than_its_tensors_is_not_swapped(model: Model) -> None:
    model.extra = torch.nn.BatchNorm1d(4)  # statistics that are no parameters
    assert obstacle(model) == "extra: num_batches_tracked is a tensor that is no parameter"
    del model.extra
    model.down.quant_method = object()
    assert obstacle(model) == "down: object may keep more than the layer's tensors"
