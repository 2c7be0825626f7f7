"""Renders a client's chat template in the sandbox's process, as transformers does.

This file is run, not imported. It reads the arguments of transformers' `render_jinja_template` as
one JSON object, and writes `{"text": ...}`, or `{"reason": ...}` if the template fails.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_LONGEST = 1 << 26  # characters


def main() -> None:
    request = json.load(sys.stdin)
    render = _import_renderer()
    try:
        [text], _ = render(**request)
        if len(text) > _LONGEST:
            raise ValueError(f"it writes more than {_LONGEST} characters")
        answer = {"text": text}
    except MemoryError:
        answer = {"reason": "takes too much memory"}
    except Exception as error:  # a template may raise anything
        answer = {"reason": str(error) or type(error).__name__}
    print(json.dumps({name: _whole(text) for name, text in answer.items()}))


def _import_renderer() -> Any:
    """Import the file that renders, and not all of transformers, which takes a second."""
    spec = find_spec("transformers")
    assert spec is not None
    [root] = spec.submodule_search_locations or []
    packages = {"transformers": root, "transformers.utils": f"{root}/utils"}
    for name, folder in packages.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [folder]
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except (ImportError, AttributeError):  # it needs more than these files
        for name in packages:
            del sys.modules[name]
        from transformers.utils.chat_template_utils import render_jinja_template
    return render_jinja_template


def _whole(text: str) -> str:
    """Join halves of surrogate pairs; U+FFFD is in the place of one that stands alone."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


if __name__ == "__main__":
    main()
