"""The secret of a run, by which its processes know each other before one of them unpickles what another one sends.

The one idea: it never travels by anything that the network reaches, as torch's store is. Our launchers make one and
hand it down in memory or in the children's environment; where others start the ranks (torchrun, SLURM, Kubernetes), the
user sets it. Every use has a key of its own, made of it. Left out: how it is proven (``handshake.py``).
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

SECRET, SECRET_FILE = "LIGHTNING_PARALLEL_SECRET", "LIGHTNING_PARALLEL_SECRET_FILE"
_SHORTEST, _LONGEST = 16, 4096  # characters
_REMEDY = f"Set {SECRET} to 16 or more characters, the same for all ranks, such as what `openssl rand -hex 32` prints"
_kept: list[Secret] = []  # of this process and those that are forked from it, where a launcher of ours handed one down


class Secret:
    """A text that only the processes of a run know. It is not shown.

    Args:
        text: 16 characters or more.

    Example:
        >>> secret = Secret("0123456789abcdef")
        >>> secret, len(secret.key("watch")), secret.key("watch") == secret.key("hub")
        (Secret(...), 32, False)
    """

    def __init__(self, text: str) -> None:
        if not _SHORTEST <= len(text) <= _LONGEST:
            raise ValueError(f"The secret of a run has {len(text)} characters. {_REMEDY}.")
        self._text = text

    @classmethod
    def make(cls) -> Secret:
        """A new one of 256 random bits."""
        return cls(secrets.token_bytes(32).hex())

    @classmethod
    def of_run(cls, environment: Mapping[str, str] = os.environ) -> Secret | None:
        """That of the run which this process takes part in: handed down by a launcher of ours, or set by the user.

        Raises:
            ValueError: it is too short, or others than this user may read or have written its file.
        """
        if _kept:
            return _kept[-1]
        if environment.get(SECRET):
            return cls(environment[SECRET])
        return _read(environment[SECRET_FILE]) if environment.get(SECRET_FILE) else None

    @classmethod
    def for_ranks(cls, num_hosts: int = 1) -> Secret | None:
        """That of ranks which this process is about to start: its own run's, or a new one if all are on this host."""
        return cls.of_run() or (cls.make() if num_hosts == 1 else None)

    def keep(self) -> None:
        """Be that of this process, for the rest of its life, and of processes that are forked from it."""
        _kept[:] = [self]

    @contextmanager
    def in_environment(self) -> Iterator[None]:
        """A context in which children are started that find it in their environment; afterwards ours is as before."""
        before = os.environ.get(SECRET)
        os.environ[SECRET] = self._text
        try:
            yield
        finally:
            if before is None:
                del os.environ[SECRET]
            else:
                os.environ[SECRET] = before

    def key(self, purpose: str, about: bytes = b"") -> bytes:
        """32 bytes that nobody makes without the secret, others for each purpose and what it is about."""
        return hmac.digest(self._text.encode(), b"lightning_parallel\0" + purpose.encode() + b"\0" + about, "sha256")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash(self.key("hash"))

    def __repr__(self) -> str:
        return "Secret(...)"


def _read(path: str) -> Secret:
    """The secret of a file."""
    try:
        with open(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise ValueError(
                    f"{SECRET_FILE}={path} has mode {stat.S_IMODE(found.st_mode):o} and belongs to user"
                    f" {found.st_uid}. It has to be a file of user {os.geteuid()} that nobody else may read or write:"
                    f" `chmod 600 {path}`."
                )
            text = file.read(_LONGEST + 1).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{SECRET_FILE}={path} cannot be read: {error}. {_REMEDY}, or name a file.") from error
    try:
        return Secret(text)
    except ValueError:
        raise ValueError(
            f"{SECRET_FILE}={path} holds {len(text)} characters. Write 16 or more into it, such as what"
            " `openssl rand -hex 32` prints."
        ) from None
