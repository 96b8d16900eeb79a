"""Collectives off loopback, where they may go, and nowhere else: real processes, sockets and keys."""

from __future__ import annotations

import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fleet import Process, actor, joined, serving, until
from model import Learner, write_model

from lachesis_learner.publisher import Publisher
from lachesis_transport.keys import Keys, make_keys
from lachesis_transport.weights.collective import interface_toward

LOOPBACK = "127.0.0.1"


def own_address() -> str | None:
    """An IPv4 address of this machine off loopback."""
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            up = psutil.net_if_stats()[name].isup
            if up and address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    return None


ADDRESS = own_address()
needs_network = pytest.mark.skipif(ADDRESS is None, reason="this machine has no address off loopback")


def listens(process: Process | None = None) -> set[str]:
    """The addresses at which a process listens; without one, this process."""
    connections = psutil.Process(process.popen.pid if process else None).net_connections("inet")
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


async def follows(publisher: Publisher, learner: Learner, members: list[Process], *, version: int) -> str:
    """Publish the next version to all members and see them serve it; returns the channel."""
    learner.step()
    report = await publisher.publish(version=version, parent=version - 1, blobs=learner.blobs())
    assert (len(report.members), report.removed) == (len(members), {})
    await until(lambda: all(version in member.active() for member in members))
    for member in members:
        assert member.of("activation")[-1]["checksum"] == report.checksum
        assert not member.of("healed")
    return report.channel


@pytest.mark.trio
@pytest.mark.timeout(120)
@needs_network
@pytest.mark.parametrize("listen", ["there", "everywhere"])
async def test_members_off_loopback_take_part_in_collectives(tmp_path: Path, listen: str) -> None:
    make_keys(tmp_path / "keys")
    learner = Learner(write_model(tmp_path), ranks=2)
    at = f"tcp://{ADDRESS if listen == 'there' else '0.0.0.0'}:0"
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(
            serving(learner, address=at, keys=Keys(tmp_path / "keys"), trusted_network=True)
        )
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        address = f"tcp://{ADDRESS}:{publisher.address.rpartition(':')[2]}"
        members = [
            await stack.enter_async_context(
                actor(
                    address,
                    tmp_path,
                    name=name,
                    deadline=10.0,
                    workers=workers,
                    keys=tmp_path / "keys",
                    trusted_network=True,
                )
            )
            for name, workers in (("a", 2), ("b", 1))
        ]
        await until(lambda: len(publisher.members) == 2, seconds=60)
        for version in (1, 2):
            assert await follows(publisher, learner, members, version=version) == "collective"
        for member in members:
            assert listens(member) == {LOOPBACK, ADDRESS}
        assert listens() == {ADDRESS} | ({"0.0.0.0"} if listen == "everywhere" else set())


@pytest.mark.trio
@pytest.mark.timeout(120)
@needs_network
async def test_a_member_that_does_not_trust_the_network_streams_and_listens_on_loopback_alone(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    learner = Learner(write_model(tmp_path), ranks=1)
    async with serving(
        learner, address=f"tcp://{ADDRESS}:0", keys=Keys(tmp_path / "keys"), trusted_network=True
    ) as publisher:
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        async with actor(
            publisher.address, tmp_path, name="a", deadline=10.0, keys=tmp_path / "keys", trusted_network=False
        ) as member:
            await until(lambda: len(publisher.members) == 1, seconds=60)
            assert await follows(publisher, learner, [member], version=1) == "stream"
            assert listens(member) == {LOOPBACK}


@pytest.mark.trio
@pytest.mark.timeout(120)
async def test_on_loopback_all_stays_there(tmp_path: Path) -> None:
    learner = Learner(write_model(tmp_path), ranks=1)
    async with serving(learner) as publisher:
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        async with (
            joined(publisher, tmp_path),
            actor(publisher.address, tmp_path, name="b", deadline=10.0) as member,
        ):
            await until(lambda: len(publisher.members) == 2, seconds=60)
            learner.step()
            report = await publisher.publish(version=1, parent=0, blobs=learner.blobs())
            assert report.channel == "collective"
            assert listens() == listens(member) == {LOOPBACK}


def test_collectives_off_loopback_need_a_trusted_network(tmp_path: Path) -> None:
    learner = Learner(write_model(tmp_path), ranks=1)
    make_keys(tmp_path / "keys")
    for keys, wrong in (
        (None, "expected a loopback address, or keys"),
        (Keys(tmp_path / "keys"), "weights.trusted_network"),
    ):
        with pytest.raises(ValueError, match=wrong):
            Publisher(
                address="tcp://192.0.2.1:5711",
                layout=learner.layout,
                channel="collective",
                deadline_seconds=1.0,
                keys=keys,
            )


def test_the_interface_toward_loopback_is_loopback() -> None:
    assert interface_toward("127.0.0.1") == interface_toward("127.0.0.9") == interface_toward("localhost") == LOOPBACK
