"""A learner without training, for tests of restarts: the real publisher, and random steps.

Run as a program: python learner_process.py ADDRESS RUN MODEL RANKS DEADLINE. It takes up the checkpoint in the folder
RUN, else the model's weights, publishes them under the next unused version and obeys lines on stdin: {"do": "step"},
{"do": "checkpoint"}. Prints one JSON line an event.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio
from model import Learner
from safetensors.torch import load_file, save_file

from lachesis_learner.published_before import published_before, shard_of
from lachesis_learner.publisher import Publisher


def say(kind: str, **fields: Any) -> None:
    print(json.dumps({"kind": kind, **fields}), flush=True)


def reserve(run: Path) -> int:
    """The next unused version; stands in for the queue."""
    path = run / "reserved"
    version = int(path.read_text()) + 1 if path.exists() else 0
    path.write_text(str(version))
    return version


async def main(address: str, folder: str, model: str, ranks: str, deadline: str) -> None:
    run, checkpoint = Path(folder), Path(folder) / "checkpoint.safetensors"
    tensors = load_file(checkpoint if checkpoint.exists() else Path(model) / "model.safetensors")
    learner = Learner(tensors, ranks=int(ranks))
    version = reserve(run)
    learner.generator = torch.Generator().manual_seed(version)
    began = trio.current_time()
    files, kept = published_before(run, learner.layout, version=version, first=version == 0, ranks=int(ranks))
    for rank, encoder in enumerate(learner.encoders):
        if kept is not None:
            encoder.rebase(shard_of(kept.mirror, rank, ranks=int(ranks)))
    say("restored", newest=kept and kept.newest.version, damaged=files.damaged, seconds=trio.current_time() - began)
    publisher = Publisher(
        address=address,
        layout=learner.layout,
        channel="collective",
        deadline_seconds=float(deadline),
        files=files,
        kept=kept,
    )
    parent = None if kept is None else kept.newest.version
    anchor = kept is None
    async with trio.open_nursery() as nursery:
        await nursery.start(publisher.serve)
        say("listening", address=publisher.address)
        while True:
            blobs = await trio.to_thread.run_sync(partial(learner.blobs, anchor=anchor))
            report = await publisher.publish(version=version, parent=parent, blobs=blobs)
            say(
                "published",
                version=version,
                parent=parent,
                bytes=report.bytes,
                full_bytes=report.full_bytes,
                checksum=report.checksum,
                channel=report.channel,
                members=report.members,
            )
            with trio.fail_after(20):
                while files.head != version:
                    await trio.sleep(0.01)
            say("kept", version=version)
            while True:
                line = await trio.to_thread.run_sync(sys.stdin.readline)
                if not line or json.loads(line)["do"] == "step":
                    break
                save_file(tensors, run / "part")
                (run / "part").rename(checkpoint)
                say("checkpoint", version=version)
            if not line:
                nursery.cancel_scope.cancel()
                return
            learner.step()
            anchor, parent, version = False, version, reserve(run)


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
