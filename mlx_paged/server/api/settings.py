"""What the operator of a server chooses about its HTTP side."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

MAX_BODY_NBYTES = 4 * 2**20
REQUEST_TIMEOUT = 600.0


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the HTTP side.

    Attributes:
        model_name: what `/v1/models` lists. Requests may name it whole, or by its last path part.
        api_key: clients must send it as `Authorization: Bearer ...`; None asks for nothing.
        max_body_nbytes: of a request's body; a longer one gets status 413.
        request_timeout: seconds until a request's answer must be complete; None for no bound.
        cors_origins: origins whose pages may call the server; "*" for all.
        allowed_hosts: names that a request's Host header may have; empty for any.
        created: when the model was taken into service, in seconds since 1970.
    """

    model_name: str
    api_key: str | None = None
    max_body_nbytes: int = MAX_BODY_NBYTES
    request_timeout: float | None = REQUEST_TIMEOUT
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if self.max_body_nbytes < 1:
            raise ValueError(f"max_body_nbytes must be at least 1, not {self.max_body_nbytes}")
        if self.request_timeout is not None and self.request_timeout <= 0:
            raise ValueError(f"request_timeout must be above 0 s, not {self.request_timeout}")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii()):
            raise ValueError("the API key must be ASCII text with at least one character")

    def serves(self, model: str | None) -> bool:
        """Whether a request that names `model` is meant for this server."""
        return model in (None, self.model_name, self.model_name.rstrip("/").rpartition("/")[2])
