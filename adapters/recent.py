"""What was made not long ago, by what it was made from. Pure: standard library only."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Recent(Generic[_Key, _Value]):
    """At most so many values, least recently used out first. Thread-safe."""

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._lock = threading.Lock()
        self._value_by_key: OrderedDict[_Key, _Value] = OrderedDict()

    def get(self, key: _Key, make: Callable[[], _Value]) -> _Value:
        """Return the value of a key, made now where it is not known; what `make` raises is not remembered.

        Two threads that miss the same key both make it.
        """
        with self._lock:
            if key in self._value_by_key:
                self._value_by_key.move_to_end(key)
                return self._value_by_key[key]
        value = make()
        with self._lock:
            self._value_by_key[key] = value
            if len(self._value_by_key) > self._max_values:
                self._value_by_key.popitem(last=False)
        return value
