"""The environment variables that every Serve process reads at import: what we set, why, and what is lost without.

They cannot be set in a Serve config file. `antiphon serve` sets them for the server that it starts; on a cluster they
belong into the environment of `ray start` on every node (`antiphon env` prints them). Pure but for `of_this_process`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from app.cli import haproxy

LONGEST_STREAM_S = 3600
ONE_MACHINE_DRAIN_S = 2
"""HAProxy hears of another gateway within half a second; at 0 every second redeployment failed a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeVariable:
    """One variable.

    Attributes:
        purpose: what it does, as a comment in `antiphon env`.
        loss: what plain `serve run` lacks without it, or None where that is only a matter of taste.
    """

    name: str
    value: str
    purpose: str
    loss: str | None = None


def recommended(*, num_cores: int, drain_s: int = 30) -> tuple[ServeVariable, ...]:
    """Return the variables for a node.

    Args:
        num_cores: cores of the node; they bound HAProxy's threads.
        drain_s: seconds for which a stopping gateway still takes requests, until every HAProxy has heard of those that
            replace it.
    """
    return (
        *_proxy(num_cores, drain_s),
        *_calls(),
        ServeVariable(
            name="RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE",
            value="1",
            purpose="each line of a replica's log is written at once; a thousand together cost as much, while all "
            "answers wait",
            loss="a replica's log is written a thousand lines at a time, and its last ones never are",
        ),
        ServeVariable(
            name="RAY_SERVE_CONTROL_LOOP_INTERVAL_S",
            value="0.25",
            purpose="how often the controller looks after replicas and HAProxy: one that is killed is back after 4 s, "
            "at 0.5 after 6 s",
        ),
        ServeVariable(
            name="RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS",
            value="1",
            purpose="a replica that hangs is killed, and not asked to drain",
            loss="a replica that hangs keeps its place, and its device, for ten minutes more",
        ),
        ServeVariable(
            name="RAY_SERVE_METRICS_EXPORT_INTERVAL_MS",
            value="5000",
            purpose="how often each replica hands its counts to Ray, which exports them every 10 s",
        ),
        ServeVariable(
            name="RAY_worker_niceness",
            value="0",
            purpose="replicas run at the priority of any process; Ray's default is 15, for work that can wait",
            loss="whatever else runs on a node is served before the replicas, which run at niceness 15",
        ),
        ServeVariable(
            name="RAY_AUTH_MODE",
            value="token",
            purpose="Ray's own ports ask for the token in ~/.ray/auth_token",
            loss="whether Ray's own ports ask for a token depends on how the cluster was started",
        ),
    )


def _proxy(num_cores: int, drain_s: int) -> tuple[ServeVariable, ...]:
    return (
        ServeVariable(
            name="RAY_SERVE_ENABLE_HA_PROXY",
            value="1",
            purpose="HAProxy in front, straight to the gateways",
            loss="Serve's Python proxy carries every token: a quarter of the tokens a second, ten times the "
            "latency under load",
        ),
        ServeVariable(
            name="RAY_SERVE_HAPROXY_BINARY_PATH",
            value=str(haproxy.PROGRAM),
            purpose="HAProxy without splicing, by which it sees that a client has left",
            loss="what a client has asked for without a stream is often computed to its end after it has left",
        ),
        ServeVariable(
            name="RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S",
            value=str(LONGEST_STREAM_S),
            purpose="seconds a stream may outlive a reload of HAProxy",
            loss="streams longer than 120 s are cut when anything is redeployed behind HAProxy",
        ),
        ServeVariable(
            name="RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
            value=str(drain_s),
            purpose="seconds a stopping gateway still takes requests",
        ),
        ServeVariable(
            name="RAY_SERVE_HAPROXY_NBTHREAD",
            value=str(max(1, min(4, num_cores // 2))),
            purpose="threads of HAProxy",
        ),
        ServeVariable(
            name="RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER",
            value="1s",
            purpose="how often HAProxy looks after a gateway",
        ),
        ServeVariable(
            name="RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S",
            value="0.2",
            purpose="HAProxy is looked after every second time that the controller looks, and replaced after three "
            "failures",
        ),
    )


def _calls() -> tuple[ServeVariable, ...]:
    return (
        ServeVariable(
            name="RAY_SERVE_THROUGHPUT_OPTIMIZED",
            value="1",
            purpose="gRPC between deployments, user code on the replica's own loop",
            loss="calls between deployments take about 4 ms instead of 1 ms",
        ),
        ServeVariable(
            name="RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH",
            value=str(256 << 20),
            purpose="bytes that a call between deployments may carry: the names of 16,000 adapters are more than 4 MiB",
            loss="calls between deployments carry 4 MiB at most, which the names of 16,000 adapters take",
        ),
        # gRPC heeds that variable, and for addresses a mask only: it knows no `*`.
        ServeVariable(
            name="no_grpc_proxy",
            value="0.0.0.0/0,::/0",
            purpose="calls between deployments go straight to their addresses, also where http_proxy names a proxy",
        ),
    )


LOCAL_ONLY = ServeVariable(
    name="RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
    value="0",
    purpose="Ray and replicas listen on 127.0.0.1, as they do on desktop systems, and not on the machine's address",
)
"""For a server that other machines are not to reach: HAProxy alone would not keep them from a gateway's own port."""


def missing(environment: Mapping[str, str]) -> list[str]:
    """Return one sentence for each variable whose absence costs something; empty where all are set.

    Any value counts as set: whoever chose it knows.
    """
    return [
        f"{variable.name} is not set: {variable.loss}"
        for variable in recommended(num_cores=1)
        if variable.loss is not None and variable.name not in environment
    ]


def of_this_process() -> dict[str, str]:
    """Return this process's environment."""
    return dict(os.environ)
