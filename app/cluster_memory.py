"""What must stay the same from one build of the application to the next, as long as the cluster lives.

A changed configuration is built anew while old replicas still serve. What both have to know is made by the first build
and found by the others, in the store of the cluster's head.
"""

from __future__ import annotations

from collections.abc import Callable

from ray.experimental import internal_kv

_NAMESPACE = "antiphon"


def remembered(name: str, make: Callable[[], bytes]) -> bytes:
    """Return what the first build in this cluster made under a name; outside of a cluster, what `make` returns."""
    if not internal_kv._internal_kv_initialized():
        return make()
    # It does nothing where another build was first.
    internal_kv._internal_kv_put(name, make(), overwrite=False, namespace=_NAMESPACE)
    return bytes(internal_kv._internal_kv_get(name, namespace=_NAMESPACE))
