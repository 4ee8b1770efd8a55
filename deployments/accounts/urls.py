"""Checks the URLs of the accounts' stores as far as possible without connecting to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from limits.errors import ConfigurationError
from sqlalchemy import create_engine
from sqlalchemy.exc import SQLAlchemyError

from deployments.accounts.limiter import Limiter
from deployments.config import AccountsConfig
from engine.errors import ConfigError


@contextmanager
def naming(field: str, url: str) -> Iterator[None]:
    """Convert errors of opening a store to one line that names the field of `accounts`, without the URL's password.

    Raises:
        ConfigError: the block raised one of them.
    """
    try:
        yield
    except (ConfigurationError, SQLAlchemyError, ImportError, OSError, ValueError) as error:
        # SQLAlchemy's messages have a second line with a documentation link.
        line = _without_password(str(error).splitlines()[0], url)
        # Without its cause, whose message would be printed with a traceback.
        raise ConfigError(f"args.accounts.{field}: {line}") from None


def _without_password(line: str, url: str) -> str:
    """Hide what a message quotes of a URL's user and password: all, or the part that was taken for a port."""
    # Up to the last `@`: a password that is not escaped may have any character.
    hidden = url.partition(":")[2].rpartition("@")[0].lstrip("/")
    if not hidden:
        return line
    line = line.replace(hidden, "***")
    for part in re.split("[:/?#@]", hidden):
        line = line.replace(f"'{part}'", "'***'")
    return line


def check_urls(config: AccountsConfig) -> None:
    """Refuse URLs that are malformed, of an unknown or asynchronous kind, or of one whose library is missing.

    Raises:
        ConfigError: a URL is one of these.
    """
    kind = config.limits_url.partition(":")[0]
    with naming("limits_url", config.limits_url):
        if kind.startswith("async+"):
            raise ConfigurationError(f"asynchronous storage is not supported; use '{kind.removeprefix('async+')}'")
        if "+cluster" not in kind:  # the client of a cluster connects at once
            Limiter(config.limits_url)
    with naming("database_url", config.database_url):
        create_engine(config.database_url)
