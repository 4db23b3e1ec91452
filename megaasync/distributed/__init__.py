"""Who am I, who are my peers: process group and point-to-point channels."""

from megaasync.config import ConfigError


class DeviceError(ConfigError):
    """A rank has no device of its own; says on which host, since the other ranks may have one."""


class TransportError(RuntimeError):
    """A message or collective did not come: the peer is hung, slow or gone.

    Attributes:
        peer: rank that was waited for; None for a collective.
        is_lost: the connection broke, rather than that time ran out.
    """

    def __init__(self, message: str, *, peer: int | None = None, is_lost: bool = False) -> None:
        super().__init__(message)
        self.peer, self.is_lost = peer, is_lost
