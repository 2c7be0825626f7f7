"""Chats written out by a template: the model's own, or one that a client has sent.

Both run in the sandbox of transformers. A client's may not take long either: nobody has looked at
its loops.
"""

from __future__ import annotations

from collections.abc import Callable

from jinja2 import TemplateError

from mlxsrv.errors import InvalidRequest
from mlxsrv.prompts.timelimit import time_limit

_SECONDS = 5.0


def write(apply: Callable[..., str], template: str | None = None) -> str:
    """What `apply` makes of a chat; `template` is a client's.

    Raises:
        InvalidRequest: the template refuses these messages, or cannot be run; the error is its own.
    """
    try:
        if template is None:
            return apply()
        with time_limit(_SECONDS, "the template"):
            return apply(chat_template=template)
    except (
        TemplateError,
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        RecursionError,
        AttributeError,
    ) as error:
        what, param = "messages: the model's chat template refused them", "messages"
        if template is not None:
            what, param = "chat_template: it cannot be rendered", "chat_template"
        raise InvalidRequest(f"{what}: {error}", param=param) from None
