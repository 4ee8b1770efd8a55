"""The composition of the HTTP side: routes, middleware and error handlers around a gateway."""

from __future__ import annotations

from fastapi import FastAPI

from app.gateway_port import GatewayPort
from app.settings import LimitSettings

__all__ = ["GatewayPort", "create_app"]


def create_app(
    gateway: GatewayPort, *, limits: LimitSettings | None = None, moderation_model: str | None = None
) -> FastAPI:
    """Build the application that answers for `gateway`.

    Args:
        gateway: what generates, moderates and reports.
        limits: bounds on one request; None takes the defaults.
        moderation_model: public name of the classifier (`settings.safety.name`); None where there is none.
    """
    app = FastAPI(title="Antiphon", redirect_slashes=False)
    app.state.gateway = gateway
    app.state.limits = limits or LimitSettings()
    app.state.moderation_model = moderation_model
    return app
