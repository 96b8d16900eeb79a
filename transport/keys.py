"""The keys of a fleet: who may connect to a socket, and that it is the right one.

    make_keys(Path("keys"))                      # once, on one node
    keys = load_keys(config)                     # None without run.keys
    async with open_socket(zmq.DEALER, connect=address, keys=keys) as socket:
        ...

ZeroMQ's CURVE encrypts and authenticates both ways. A folder of keys holds what its node needs and no more:

| node | files |
| --- | --- |
| where the queue or the learner listens | server.key_secret, and NAME.key of every client that is admitted |
| where only clients run | server.key, and one NAME.key_secret |

A node that holds server.key_secret also connects by it: whoever has it is the server anyway. Files are read when a
socket is opened, so a client whose NAME.key was removed is refused after the listener's next start.
"""

from __future__ import annotations

import logging
import re
import stat
import struct
from dataclasses import dataclass
from os import umask
from pathlib import Path

import zmq
from zmq.auth.certs import create_certificates, load_certificate
from zmq.utils import z85

from lachesis_configs.load import ConfigError
from lachesis_configs.schema import Config

log = logging.getLogger("lachesis.transport")

SERVER, CLIENT = "server", "client"
PUBLIC, SECRET = ".key", ".key_secret"
DOMAIN = b"lachesis"
MADE = "what `lachesis keys FOLDER` makes"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys in one folder. What is missing or malformed raises ConfigError with the name of the file, and no key."""

    folder: Path

    def secure_listener(self, socket: zmq.Socket[bytes]) -> frozenset[bytes]:
        """Make `socket`, before it is bound, a CURVE server; returns the public keys (32 bytes each) to be admitted.

        Whom it admits is asked of the ZAP handler of the socket's context. Without one it admits nobody.
        """
        secret, admitted = self._listener()
        if len(admitted) == 1:
            log.warning(
                "run.keys: %s holds no client's NAME%s: only who has %s%s can connect",
                self.folder,
                PUBLIC,
                SERVER,
                SECRET,
            )
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        return admitted

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Make `socket`, before it connects, a CURVE client that accepts this fleet's server alone."""
        server, public, secret = self._client()
        socket.setsockopt(zmq.CURVE_SERVERKEY, server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)

    def check(self) -> None:
        """Read all that a node needs where every role runs."""
        self._listener()
        self._client()

    def _listener(self) -> tuple[bytes, frozenset[bytes]]:
        """The server's secret key, and the public ones to admit."""
        public, secret = self._pair(SERVER)
        clients = [path for path in self._files(PUBLIC) if path.stem != SERVER]
        return secret, frozenset(z85.decode(key) for key in (public, *map(_public, clients)))

    def _client(self) -> tuple[bytes, bytes, bytes]:
        """The server's public key, and the pair to connect by."""
        own = [path.stem for path in self._files(SECRET)]
        if SERVER in own:
            public, secret = self._pair(SERVER)
            return public, public, secret
        if len(own) != 1:
            found = ", ".join(f"{name}{SECRET}" for name in own) or "none"
            raise ConfigError([f"run.keys: {self.folder} holds {found}, expected one client's NAME{SECRET} of {MADE}"])
        return _public(self.folder / f"{SERVER}{PUBLIC}"), *self._pair(own[0])

    def _pair(self, name: str) -> tuple[bytes, bytes]:
        path = self.folder / f"{name}{SECRET}"
        public, secret = _read(path)
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise ConfigError([f"run.keys: {path} has mode {mode:04o}, expected 0600: run chmod 600 {path}"])
        if secret is None or not _is_key(secret) or zmq.curve_public(secret) != public:
            raise ConfigError([f"run.keys: {path} holds no secret key with its public key, expected {MADE}"])
        beside = self.folder / f"{name}{PUBLIC}"
        if beside.exists() and _public(beside) != public:
            raise ConfigError([f"run.keys: {path} and {beside} are not of one pair, expected {MADE}"])
        return public, secret

    def _files(self, ending: str) -> list[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if path.name.endswith(ending))
        except OSError as error:
            raise ConfigError([f"run.keys: {self.folder}: {error.strerror}, expected {MADE}"]) from None


def load_keys(config: Config) -> Keys | None:
    """The keys that the sockets of this run are opened with; None without run.keys. Reads no file yet."""
    return Keys(Path(config.run.keys)) if config.run.keys is not None else None


def make_keys(folder: Path, client: str | None = None) -> list[Path]:
    """Make a fleet's keys in `folder`, or add those of one more `client`; returns the files.

    Secrets get mode 0600 and the folder 0700. Raises ConfigError where a file would be overwritten, or where the folder
    holds anything else than keys.
    """
    if client is not None and (not NAME.fullmatch(client) or client == SERVER or client.endswith((PUBLIC, SECRET))):
        raise ConfigError(
            [
                f"--client: value {client!r}, expected a name of up to 64 of A-Z a-z 0-9 _ . - that begins with "
                f"neither . nor -, does not end with {PUBLIC} or {SECRET} and is not {SERVER!r}"
            ]
        )
    if client is not None and not (folder / f"{SERVER}{SECRET}").exists():
        raise ConfigError([f"{folder / (SERVER + SECRET)}: no such file, expected the folder of a fleet's keys"])
    before = umask(0o077)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_free(folder, [SERVER, CLIENT] if client is None else [client])
        folder.chmod(0o700)
        made = [create_certificates(folder, name) for name in ([SERVER, CLIENT] if client is None else [client])]
    finally:
        umask(before)
    return [Path(path) for pair in made for path in pair]


def _check_free(folder: Path, names: list[str]) -> None:
    there = sorted(path.name for path in folder.iterdir())
    lines = [
        f"{folder / name}: exists and is not overwritten, expected no such key yet"
        for name in there
        if name in {f"{own}{ending}" for own in names for ending in (PUBLIC, SECRET)}
    ]
    strange = [name for name in there if not name.endswith((PUBLIC, SECRET))]
    if strange:
        lines.append(f"{folder / strange[0]}: is no key, expected a folder of its own for the keys")
    if lines:
        raise ConfigError(lines)


def _public(path: Path) -> bytes:
    public, secret = _read(path)
    if secret is not None:
        raise ConfigError(
            [
                f"run.keys: {path} holds a secret key, expected the public one alone: it may have been copied to where "
                "only that belongs, so make a new pair"
            ]
        )
    return public


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        path.stat()
        public, secret = load_certificate(path)
    except OSError as error:
        raise ConfigError([f"run.keys: {path}: {error.strerror}, expected {MADE}"]) from None
    except ValueError:
        public, secret = b"", None
    if not _is_key(public):
        raise ConfigError([f"run.keys: {path} holds no public key, expected {MADE}"])
    return public, secret


def _is_key(text: bytes) -> bool:
    """Whether `text` is 32 bytes in Z85."""
    try:
        return len(text) == 40 and len(z85.decode(text)) == 32
    except (KeyError, struct.error):
        return False


def guide(folder: Path, client: str | None = None) -> str:
    """What to copy where, for the user who has just made keys in `folder`."""
    name = client or CLIENT
    return f"""\
Set run.keys to the folder of keys on each node, which needs
  the queue's and the learner's node: {SERVER}{SECRET}, {name}{PUBLIC} and the {PUBLIC} files of other clients
  every other node: {SERVER}{PUBLIC}, {name}{SECRET}
Copy them over a safe channel (scp) and keep {SECRET} files to their owner (mode 0600). All files are in {folder}.
To shut a client out, remove its {PUBLIC} file from the queue's and the learner's node and start both again."""
