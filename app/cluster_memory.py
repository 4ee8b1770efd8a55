"""Values that stay the same across builds of the application during the lifetime of the cluster.

A changed configuration is built again while old replicas still serve. Values that both need are made by the first build
and stored on the cluster's head node, where later builds read them.
"""

from __future__ import annotations

from collections.abc import Callable

from ray.experimental import internal_kv

_NAMESPACE = "antiphon"


def remembered(name: str, make: Callable[[], bytes]) -> bytes:
    """Return the value that the first build in this cluster made for a name; outside a cluster, that of `make`."""
    if not internal_kv._internal_kv_initialized():
        return make()
    # Does nothing if another build was first.
    internal_kv._internal_kv_put(name, make(), overwrite=False, namespace=_NAMESPACE)
    return bytes(internal_kv._internal_kv_get(name, namespace=_NAMESPACE))
