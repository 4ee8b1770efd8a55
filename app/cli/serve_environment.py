"""Environment variables that every Serve process reads at import: which ones we set, why, and what each one gains.

A Serve config file cannot set them. `antiphon serve` sets them for the server that it starts. On a cluster, set them in
the environment of `ray start` on every node (`antiphon env` prints them). Pure except for `of_this_process`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from app.cli import haproxy

LONGEST_STREAM_S = 3600
ONE_MACHINE_DRAIN_S = 2
"""HAProxy learns of a new gateway within half a second; with 0, half of all redeployments failed a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeVariable:
    """One variable.

    Attributes:
        purpose: what it does; printed as a comment by `antiphon env`.
        loss: the drawback of plain `serve run` without it; None if there is none worth a warning.
    """

    name: str
    value: str
    purpose: str
    loss: str | None = None


def recommended(*, num_cores: int, drain_s: int = 30) -> tuple[ServeVariable, ...]:
    """Return the variables for a node.

    Args:
        num_cores: cores of the node; they limit HAProxy's threads.
        drain_s: seconds that a stopping gateway still accepts requests, until every HAProxy knows its replacements.
    """
    return (
        *_proxy(num_cores, drain_s),
        *_calls(),
        ServeVariable(
            name="RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE",
            value="1",
            purpose="replicas write each log line at once; batches of a thousand cost as much, and stall all answers",
            loss="replicas write their logs a thousand lines at a time, and lose the last ones",
        ),
        ServeVariable(
            name="RAY_SERVE_CONTROL_LOOP_INTERVAL_S",
            value="0.25",
            purpose="how often the controller checks replicas and HAProxy: a killed one is back after 4 s, with 0.5 "
            "after 6 s",
        ),
        ServeVariable(
            name="RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS",
            value="1",
            purpose="kill a hung replica instead of asking it to drain",
            loss="a hung replica keeps its slot and its device for another ten minutes",
        ),
        ServeVariable(
            name="RAY_SERVE_METRICS_EXPORT_INTERVAL_MS",
            value="5000",
            purpose="how often each replica reports its metrics to Ray, which exports them every 10 s",
        ),
        ServeVariable(
            name="RAY_worker_niceness",
            value="0",
            purpose="replicas run at normal priority; Ray's default is 15, for background work",
            loss="replicas run at niceness 15, so other processes on the node get the CPU first",
        ),
        ServeVariable(
            name="RAY_AUTH_MODE",
            value="token",
            purpose="Ray's own ports require the token in ~/.ray/auth_token",
            loss="whether Ray's own ports require a token depends on how the cluster was started",
        ),
    )


def _proxy(num_cores: int, drain_s: int) -> tuple[ServeVariable, ...]:
    return (
        ServeVariable(
            name="RAY_SERVE_ENABLE_HA_PROXY",
            value="1",
            purpose="HAProxy forwards requests directly to the gateways",
            loss="Serve's Python proxy carries every token, at a quarter of the tokens/s and ten times the latency "
            "under load",
        ),
        ServeVariable(
            name="RAY_SERVE_HAPROXY_BINARY_PATH",
            value=str(haproxy.PROGRAM),
            purpose="HAProxy without splicing, so that it notices client disconnects",
            loss="non-streaming requests are often computed to the end after the client has disconnected",
        ),
        ServeVariable(
            name="RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S",
            value=str(LONGEST_STREAM_S),
            purpose="seconds that a stream may outlive a reload of HAProxy",
            loss="streams longer than 120 s are cut whenever something behind HAProxy is redeployed",
        ),
        ServeVariable(
            name="RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
            value=str(drain_s),
            purpose="seconds that a stopping gateway still accepts requests",
        ),
        ServeVariable(
            name="RAY_SERVE_HAPROXY_NBTHREAD",
            value=str(max(1, min(4, num_cores // 2))),
            purpose="HAProxy threads",
        ),
        ServeVariable(
            name="RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER",
            value="1s",
            purpose="how often HAProxy checks a gateway",
        ),
        ServeVariable(
            name="RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S",
            value="0.2",
            purpose="HAProxy is checked in every second controller loop, and replaced after three failed checks",
        ),
    )


def _calls() -> tuple[ServeVariable, ...]:
    return (
        ServeVariable(
            name="RAY_SERVE_THROUGHPUT_OPTIMIZED",
            value="1",
            purpose="gRPC between deployments, user code on the replica's event loop",
            loss="calls between deployments take about 4 ms instead of 1 ms",
        ),
        ServeVariable(
            name="RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH",
            value=str(256 << 20),
            purpose="maximum bytes of a call between deployments: the names of 16,000 adapters exceed 4 MiB",
            loss="calls between deployments are limited to 4 MiB, too little for the names of 16,000 adapters",
        ),
        # gRPC reads this variable; for addresses it accepts masks only, not `*`.
        ServeVariable(
            name="no_grpc_proxy",
            value="0.0.0.0/0,::/0",
            purpose="calls between deployments are direct, even if http_proxy is set",
        ),
    )


LOCAL_ONLY = ServeVariable(
    name="RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
    value="0",
    purpose="Ray and replicas listen on 127.0.0.1, as on desktop systems, instead of the machine's address",
)
"""For a local-only server: HAProxy alone would not keep other machines from a gateway's own port."""
CLUSTER_ONLY = ServeVariable(
    name="RAY_gcs_rpc_server_reconnect_timeout_s",
    value="600",
    purpose="seconds that nodes serve without the head node; by default, all of them end everything after 60",
)
"""For the nodes of a cluster. A server of one machine has nothing to wait for: it ends, and is started again."""


def missing(environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable whose absence has a drawback; empty if all are set.

    Any value counts as set: it is assumed to be deliberate.
    """
    return [
        f"{variable.name} is not set: {variable.loss}"
        for variable in recommended(num_cores=1)
        if variable.loss is not None and variable.name not in environment
    ]


def of_this_process() -> dict[str, str]:
    """Return this process's environment."""
    return dict(os.environ)
