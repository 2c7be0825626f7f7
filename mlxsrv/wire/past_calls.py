"""Arguments of earlier tool calls, as clients give them back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from mlxsrv.wire.surrogates import mend_surrogates


def past_arguments(given: Any) -> Mapping[str, Any] | str:
    """Return the arguments of an earlier call: an object or, if the model wrote none, its text.

    They are never refused. The call comes back with each request, so a refusal would end the
    conversation.

    Args:
        given: an object, or JSON as a string.
    """
    if isinstance(given, dict):
        return given
    if given in (None, ""):
        return {}
    if not isinstance(given, str):
        return msgspec.json.encode(given).decode()
    try:
        return msgspec.json.decode(mend_surrogates(given.encode()), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return given
