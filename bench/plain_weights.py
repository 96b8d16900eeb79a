"""A vLLM worker extension under which a CPU worker multiplies with plain weights instead of packed copies.

An engine of activation_served.py names it as its worker-extension-cls, which vLLM imports before it loads the model;
the import is what takes effect.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers import utils


def _stay_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


utils.dispatch_cpu_unquantized_gemm = _stay_plain


class PlainWeights:
    """Mixed into vLLM's worker, which has all that is needed."""
