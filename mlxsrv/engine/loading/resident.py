"""A model that is loaded: all that the device thread holds of it.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxsrv.engine.embedding.embedder import Embedder
from mlxsrv.engine.events import Loaded
from mlxsrv.engine.execution.text_runner import TextRunner
from mlxsrv.engine.loading.weights import FileArrays
from mlxsrv.engine.steering.steerer import Steerer


@dataclass(frozen=True)
class ResidentModel:
    """A model in memory.

    Attributes:
        loaded: the answer to its client's order.
        files: the arrays of its files; models that are loaded later from the same files share them.
        embedder: makes vectors of texts.
        text: generates text; None for an encoder.
        steerer: of `text`.
    """

    loaded: Loaded
    files: Sequence[FileArrays]
    embedder: Embedder
    text: TextRunner | None = None
    steerer: Steerer | None = None

    def reset(self) -> None:
        """Forget all rows, texts and kept prompts."""
        self.embedder.reset()
        if self.text is not None:
            self.text.reset()
