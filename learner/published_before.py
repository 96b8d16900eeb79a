"""What a learner that comes back finds of the weights that were published before it."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from lachesis_transport.weights.layout import Layout
from lachesis_transport.weights.log_files import FOLDER, LogFiles
from lachesis_transport.weights.mirror import Mirror
from lachesis_transport.weights.version_log import Kept

logger = logging.getLogger("lachesis.learner")


def published_before(
    run_folder: Path, layout: Layout, *, version: int, first: bool, ranks: int
) -> tuple[LogFiles, Kept | None]:
    """The version log on disk, and what it holds that this learner can go on from: actors may still hold it.

    Args:
        version: under which this learner publishes first.
        first: whether no learner of this run published anything before: then nothing is missed.
        ranks: of this learner.
    """
    files = LogFiles(run_folder / FOLDER, layout)
    kept = files.restore(shards=ranks)
    if kept is not None and kept.newest.version >= version:
        logger.warning(
            "%s holds version %d, expected only versions before %d: it is of a run with another queue and not used",
            run_folder / FOLDER,
            kept.newest.version,
            version,
        )
        files.forget()
        kept = None
    if kept is not None:
        logger.info("version %d goes out as a delta to version %d", version, kept.newest.version)
    elif not first:
        logger.warning(
            "%s holds no weights of use: version %d goes out whole, not as a delta to what actors hold",
            run_folder / FOLDER,
            version,
        )
    return files, kept


def shard_of(mirror: Mirror, rank: int, *, ranks: int) -> np.ndarray:
    """A rank's part of every tensor, end to end (uint16), for `ShardEncoder.rebase`."""
    if ranks == 1:
        return mirror.bits
    return np.concatenate([mirror.bits[start:stop] for start, stop in mirror.layout.ranges(rank=rank, ranks=ranks)])
