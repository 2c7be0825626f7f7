"""Embeddings, as OpenAI has them, and rerank, as Jina and Cohere have it."""

from __future__ import annotations

import base64
from typing import Annotated, Literal, cast

import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from mlxsrv.errors import InvalidRequest
from mlxsrv.events import Vectors
from mlxsrv.wire.decoding import RequestDecoder
from mlxsrv.wire.requests import NotEmpty, PositiveInt, TokenId, User

MOST_TEXTS = 2048

Tokens = Annotated[list[TokenId], Meta(min_length=1)]
Many = Annotated[list[NotEmpty | TokenId | Tokens], Meta(min_length=1, max_length=MOST_TEXTS)]


class EmbeddingRequest(Struct, frozen=True, kw_only=True):
    """`input_type` and `instruction` choose what the model's own files say to write before a text;
    OpenAI does not have them."""

    input: NotEmpty | Many
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveInt | None = None
    input_type: Literal["query", "document"] | None = None
    instruction: NotEmpty | None = None
    user: User | None = None

    @property
    def texts(self) -> list[str | list[int]]:
        """Each text, whichever of OpenAI's four forms they came in."""
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [cast(list[int], self.input)]
        return cast(list[str | list[int]], self.input)

    def path(self, index: int) -> str:
        """Where in the request a text is: a list of ids is one."""
        one = isinstance(self.input, str) or isinstance(self.input[0], int)
        return "input" if one else f"input[{index}]"


class RerankDocument(Struct, frozen=True):
    text: NotEmpty


class RerankRequest(Struct, frozen=True, kw_only=True):
    query: NotEmpty
    documents: Annotated[list[NotEmpty | RerankDocument], Meta(min_length=1, max_length=MOST_TEXTS)]
    model: str | None = None
    top_n: PositiveInt | None = None
    return_documents: bool | None = None
    user: User | None = None

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


def _check_embedding(request: EmbeddingRequest) -> None:
    given = request.input
    if not isinstance(given, str) and len({*map(type, given)}) != 1:
        raise InvalidRequest(
            "input: expected a string, strings, token ids or lists of token ids", param="input"
        )


EMBEDDING_REQUESTS = RequestDecoder(EmbeddingRequest, check=_check_embedding)
RERANK_REQUESTS = RequestDecoder(RerankRequest)


class EmbeddingUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, tokens: int) -> EmbeddingUsage:
        return cls(tokens, tokens)


class Embedding(Struct, frozen=True, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Floats, or little-endian float32 in base64."""


class EmbeddingList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class RankedDocument(Struct, frozen=True):
    text: str


class RerankResult(Struct, frozen=True, kw_only=True):
    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class RerankResponse(Struct, frozen=True, kw_only=True):
    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


def embedding_list(
    request: EmbeddingRequest, model: str, vectors: Vectors, tokens: int
) -> EmbeddingList:
    """The response, vectors cut to the `dimensions` asked for and of unit length then.

    Raises:
        InvalidRequest: the vectors do not have so many dimensions.
    """
    width = vectors.shape[1]
    if request.dimensions is not None and request.dimensions > width:
        raise InvalidRequest(
            f"dimensions: {request.dimensions} are asked for; this model's vectors have {width}",
            param="dimensions",
        )
    if request.dimensions is not None and request.dimensions < width:
        vectors = _normalise(vectors[:, : request.dimensions])
    encode = _encode if request.encoding_format == "base64" else _list
    return EmbeddingList(
        data=[Embedding(index=i, embedding=encode(row)) for i, row in enumerate(vectors)],
        model=model,
        usage=EmbeddingUsage.of(tokens),
    )


def _normalise(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return cast(Vectors, vectors / np.maximum(lengths, np.finfo(np.float32).tiny))


Numbers = np.ndarray[tuple[int], np.dtype[np.float32]]


def _list(vector: Numbers) -> list[float] | str:
    return vector.tolist()


def _encode(vector: Numbers) -> list[float] | str:
    return base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").data).decode("ascii")


def rerank_response(
    request: RerankRequest, id: str, model: str, logits: Vectors, tokens: int
) -> RerankResponse:
    """The documents, the most relevant first: by the sigmoid of a model's one logit or, of two, by
    the probability of the second, as cross-encoders are trained."""
    scores = _relevance(logits)
    order = np.argsort(-scores, kind="stable")[: request.top_n]
    texts = request.texts
    return RerankResponse(
        id=id,
        model=model,
        results=[
            RerankResult(
                index=int(i),
                relevance_score=float(scores[i]),
                document=RankedDocument(texts[i]) if request.return_documents else UNSET,
            )
            for i in order
        ],
        usage=EmbeddingUsage.of(tokens),
    )


def _relevance(logits: Vectors) -> Numbers:
    margin = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
    # exp would overflow for a large negative margin, and its limit is then right anyway.
    with np.errstate(over="ignore"):
        return cast(Numbers, 1 / (1 + np.exp(-margin)))
