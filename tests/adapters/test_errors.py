from __future__ import annotations

import pickle

from adapters.errors import AdapterError


def test_an_error_is_one_sentence_and_survives_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(AdapterError("json", "it is too big")))
    assert str(error) == "Adapter 'json' cannot be used: it is too big."
    assert (error.name, error.reason) == ("json", "it is too big")


def test_a_reason_can_be_shown_whatever_a_file_has_in_it() -> None:
    """Half of a pair of surrogates, which JSON may name, made the answer that told of it a 500."""
    error = AdapterError("json", "\ud800\n\x1b[2Jä is not supported")
    assert error.reason == r"\ud800\n\x1b[2Jä is not supported"
    str(error).encode()
