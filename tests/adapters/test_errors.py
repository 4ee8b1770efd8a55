from __future__ import annotations

import pickle

from adapters.errors import AdapterError


def test_an_error_is_one_sentence_and_survives_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(AdapterError("json", "it is too big")))
    assert str(error) == "Adapter 'json' cannot be used: it is too big."
    assert (error.name, error.reason) == ("json", "it is too big")
