"""Checks the URLs of the accounts' stores as far as possible without connecting to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from limits.errors import ConfigurationError
from sqlalchemy import create_engine
from sqlalchemy.exc import SQLAlchemyError

from deployments.accounts.limiter import Limiter
from deployments.config import AccountsConfig
from engine.errors import ConfigError


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Convert errors of opening a store to one line that names the field of `accounts`.

    Raises:
        ConfigError: the block raised one of them.
    """
    try:
        yield
    except (ConfigurationError, SQLAlchemyError, ImportError, OSError, ValueError) as error:
        # SQLAlchemy's messages have a second line with a documentation link.
        raise ConfigError(f"args.accounts.{field}: {str(error).splitlines()[0]}") from error


def check_urls(config: AccountsConfig) -> None:
    """Refuse URLs that are malformed, of an unknown or asynchronous kind, or of one whose library is missing.

    Raises:
        ConfigError: a URL is one of these.
    """
    kind = config.limits_url.partition(":")[0]
    with naming("limits_url"):
        if kind.startswith("async+"):
            raise ConfigurationError(f"asynchronous storage is not supported; use '{kind.removeprefix('async+')}'")
        if "+cluster" not in kind:  # the client of a cluster connects at once
            Limiter(config.limits_url)
    with naming("database_url"):
        create_engine(config.database_url)
