"""Finds what changed in weights on the device where they live, so that only that crosses to the host.

A `DeviceBaseline` keeps the last published bits of one tensor's part beside the live ones. The encoder asks it for the
`Changes`, encodes them block by block against its host copy, and lets the baseline follow:

    changes = baseline.changes()
    for start, stop in blocks(len(host)):
        writer.add(host[start:stop], changes.block(host[start:stop], start))
    baseline.follow()
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from lachesis_transport.weights.codec import BLOCK

SPAN = 1 << 24
"""Elements that are compared at once, whole blocks: bounds the memory of the comparison."""

PATCH_SHARE = 0.2
"""Changed share from which a span crosses as it is: a position and a value are 10 bytes, an element is 2."""


class Bits(Protocol):
    """New bits of one tensor's part, block by block."""

    def block(self, base: np.ndarray, start: int) -> np.ndarray:
        """Elements [start, start + len(base)) as they are now (uint16), given what they were; valid until the next
        call."""


class WholeBits:
    """All bits, on the host already.

    Args:
        bits: uint16[n].
    """

    def __init__(self, bits: np.ndarray) -> None:
        self._bits = bits

    def block(self, base: np.ndarray, start: int) -> np.ndarray:
        """See Bits."""
        return self._bits[start : start + len(base)]


class Changes:
    """The bits that changed, and for the rest the base's.

    Args:
        spans: for each span of SPAN elements the ascending positions in it that changed (int64) and their bits
            (uint16), or None and the bits of all.
    """

    def __init__(self, spans: list[tuple[np.ndarray | None, np.ndarray]]) -> None:
        self._spans = spans
        self._scratch = np.empty(BLOCK, np.uint16)

    def block(self, base: np.ndarray, start: int) -> np.ndarray:
        """See Bits."""
        span, begin = divmod(start, SPAN)
        at, values = self._spans[span]
        if at is None:
            return values[begin : begin + len(base)]
        first, last = np.searchsorted(at, (begin, begin + len(base)))
        if first == last:
            return base
        new = self._scratch[: len(base)]
        new[:] = base
        new[at[first:last] - begin] = values[first:last]
        return new


class DeviceBaseline:
    """The last published bits of one tensor's part, on the device of the live ones.

    Args:
        flat: bf16[n] on any device, contiguous; read anew by each call.
        published: uint16[n], their last published bits.
    """

    def __init__(self, flat: torch.Tensor, published: np.ndarray) -> None:
        self._live = flat.detach().view(torch.int16)
        self._published = torch.from_numpy(published.view(np.int16)).to(flat.device, copy=True)

    def changes(self) -> Changes:
        """What differs now, brought to the host."""
        spans: list[tuple[np.ndarray | None, np.ndarray]] = []
        for start in range(0, len(self._live), SPAN):
            live, published = self._live[start : start + SPAN], self._published[start : start + SPAN]
            changed = live != published
            if int(changed.count_nonzero()) > PATCH_SHARE * len(live):
                spans.append((None, _host(live)))
            else:
                at = changed.nonzero().squeeze(1)
                spans.append((at.cpu().numpy(), _host(live[at])))
        return Changes(spans)

    def follow(self) -> None:
        """The live bits are the published ones now."""
        self._published.copy_(self._live)


def _host(bits: torch.Tensor) -> np.ndarray:
    return bits.cpu().numpy().view(np.uint16)
