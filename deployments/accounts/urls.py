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
    """Refuse URLs that are malformed, of an unknown kind, or of one whose library is missing.

    Raises:
        ConfigError: a URL is one of these.
    """
    if "+cluster" not in config.limits_url.partition(":")[0]:  # the client of a cluster connects at once
        with naming("limits_url"):
            Limiter(config.limits_url)
    with naming("database_url"):
        create_engine(config.database_url)
