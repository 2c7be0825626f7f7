"""Requests and answers of OpenAI's embeddings, of rerank as Jina and Cohere have it, and of vLLM's
score."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, cast

import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from mlxsrv.errors import InvalidRequest
from mlxsrv.generation.texts import (
    Cut,
    EmbeddingSpec,
    Numbers,
    PairScores,
    PairsSpec,
    PlacedInput,
    PlacedText,
    TextVectors,
)
from mlxsrv.wire.decoding import RequestDecoder, missing
from mlxsrv.wire.openai.generation_request import Count, PositiveInt, Priority, TokenId, User
from mlxsrv.wire.schema_rules import TEXT, TOKEN_ID, TOKEN_IDS, Schema
from mlxsrv.wire.steering import NotEmpty

MOST_TEXTS = 2048

TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Many = Annotated[list[NotEmpty | TokenId | TokenIds], Meta(min_length=1, max_length=MOST_TEXTS)]


class TruncationFields(Struct, frozen=True, kw_only=True):
    """The fields that ask to cut texts that are too long; by default they are refused with 400.

    text-embeddings-inference has `truncate`, true or false, with a `truncation_direction`. For
    Cohere and NVIDIA, `truncate` is the side that is cut. vLLM has `truncate_prompt_tokens`: how
    many tokens are left, or -1 for as many as the model reads.
    """

    truncate: bool | Literal["NONE", "START", "END"] | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
    truncate_prompt_tokens: Count | None = None

    @property
    def truncates(self) -> bool:
        asked = self.truncate not in (None, False, "NONE")
        return asked or self.truncate_prompt_tokens is not None

    @property
    def cut(self) -> Cut | None:
        tokens = None if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
        if tokens is None and not self.truncates:
            return None
        left = self.truncate == "START" or self.truncation_direction in ("left", "Left")
        return Cut("left" if left and self.truncate != "END" else "right", tokens)


class EmbeddingRequest(TruncationFields, frozen=True, kw_only=True):
    """`input_type` and `instruction` choose what the model's own files say to write before a text;
    OpenAI does not have them."""

    schema_rules: ClassVar[Schema] = {
        "properties": {
            "input": {
                "anyOf": [
                    TEXT,
                    *(
                        {"type": "array", "items": each, "minItems": 1, "maxItems": MOST_TEXTS}
                        for each in (TEXT, TOKEN_ID, TOKEN_IDS)
                    ),
                ]
            }
        }
    }

    input: NotEmpty | Many
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveInt | None = None
    input_type: Literal["query", "document"] | None = None
    instruction: NotEmpty | None = None
    user: User | None = None
    priority: Priority | None = None

    def to_spec(self) -> EmbeddingSpec:
        """The texts, whichever of OpenAI's four forms they have in the request."""
        texts: Sequence[PlacedInput]
        if isinstance(self.input, str):
            texts = [(self.input, "input")]
        elif isinstance(self.input[0], int):
            texts = [(cast(list[int], self.input), "input")]
        else:
            many = cast(list[str | list[int]], self.input)
            texts = [(text, f"input[{i}]") for i, text in enumerate(many)]
        return EmbeddingSpec(
            texts=texts,
            model=self.model,
            cut=self.cut,
            input_type=self.input_type,
            instruction=self.instruction,
            dimensions=self.dimensions,
            encoding=self.encoding_format or "float",
        )


class RerankDocument(Struct, frozen=True):
    text: NotEmpty


class RerankRequest(TruncationFields, frozen=True, kw_only=True):
    query: NotEmpty
    documents: Annotated[list[NotEmpty | RerankDocument], Meta(min_length=1, max_length=MOST_TEXTS)]
    model: str | None = None
    top_n: PositiveInt | None = None
    return_documents: bool | None = None
    user: User | None = None
    priority: Priority | None = None

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]

    def to_spec(self) -> PairsSpec:
        return PairsSpec(
            ones=[(self.query, "query")],
            others=[(text, f"documents[{i}]") for i, text in enumerate(self.texts)],
            compares=False,
            model=self.model,
            cut=self.cut,
        )


class CohereRerankRequest(RerankRequest, frozen=True, kw_only=True):
    """The second version of Cohere's API. It cuts texts that are too long, unless the request says
    otherwise."""

    @property
    def truncates(self) -> bool:
        return self.truncate not in (False, "NONE")


Texts = NotEmpty | Annotated[list[NotEmpty], Meta(min_length=1, max_length=MOST_TEXTS)]

_SIDES = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
"""vLLM's names for the two sides of pairs; all mean the same."""


class ScoreRequest(TruncationFields, frozen=True, kw_only=True):
    """Pairs of texts: `text_1` with `text_2`, or by other names `queries` with `documents` or
    `items`, or `data_1` with `data_2`. A text and a list are the pairs of the text with each."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    model: str | None = None
    user: User | None = None
    priority: Priority | None = None

    @property
    def sides(self) -> tuple[str, str]:
        """The names of the two sides. Raises MissingParameter, InvalidRequest."""
        given = {name for names in _SIDES for name in names if getattr(self, name) is not None}
        for names in _SIDES:
            if given == {*names}:
                return names
        wanted = next((names for names in _SIDES if given & {*names}), _SIDES[0])
        for name in wanted:
            if name not in given:
                raise missing(name)
        extra = min(given - {*wanted})
        raise InvalidRequest(
            f"{extra}: the pairs are given as {' and '.join(wanted)}; leave it out", param=extra
        )

    def to_spec(self) -> PairsSpec:
        ones, others = map(self._side, self.sides)
        return PairsSpec(ones=ones, others=others, compares=True, model=self.model, cut=self.cut)

    def _side(self, name: str) -> list[PlacedText]:
        given: str | list[str] = getattr(self, name)
        if isinstance(given, str):
            return [(given, name)]
        return [(text, f"{name}[{i}]") for i, text in enumerate(given)]


def _check_cut(request: TruncationFields) -> None:
    if request.truncate_prompt_tokens == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens: must be at least 1, or -1 for as many as the model reads",
            param="truncate_prompt_tokens",
        )


def _check_score(request: ScoreRequest) -> None:
    _check_cut(request)
    spec, name = request.to_spec(), request.sides[0]
    if len(spec.ones) not in (1, len(spec.others)):
        raise InvalidRequest(
            f"{name}: {len(spec.ones)} texts for {len(spec.others)} on the other side; there may "
            "be one beside any number, or as many on both sides",
            param=name,
        )


def _check_embedding(request: EmbeddingRequest) -> None:
    _check_cut(request)
    given = request.input
    if not isinstance(given, str) and len({*map(type, given)}) != 1:
        raise InvalidRequest(
            "input: expected a string, strings, token ids or lists of token ids", param="input"
        )


EMBEDDING_REQUESTS = RequestDecoder(EmbeddingRequest, check=_check_embedding)
RERANK_REQUESTS = RequestDecoder(RerankRequest, check=_check_cut)
COHERE_RERANK_REQUESTS = RequestDecoder(CohereRerankRequest, check=_check_cut)
SCORE_REQUESTS = RequestDecoder(ScoreRequest, check=_check_score)


class EmbeddingUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


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


class Score(Struct, frozen=True, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


def embedding_list(spec: EmbeddingSpec, made: TextVectors) -> EmbeddingList:
    encode = _encode if spec.encoding == "base64" else _list
    return EmbeddingList(
        data=[Embedding(index=i, embedding=encode(row)) for i, row in enumerate(made.vectors)],
        model=made.model,
        usage=EmbeddingUsage(made.tokens, made.tokens),
    )


def _list(vector: Numbers) -> list[float] | str:
    return vector.tolist()


def _encode(vector: Numbers) -> list[float] | str:
    return base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").data).decode("ascii")


def rerank_response(request: RerankRequest, made: PairScores) -> RerankResponse:
    """The response: documents sorted by their scores, the most relevant first."""
    order = np.argsort(-made.scores, kind="stable")[: request.top_n]
    texts = request.texts
    return RerankResponse(
        id=f"rerank-{uuid.uuid4().hex}",
        model=made.model,
        results=[
            RerankResult(
                index=int(i),
                relevance_score=float(made.scores[i]),
                document=RankedDocument(texts[i]) if request.return_documents else UNSET,
            )
            for i in order
        ],
        usage=EmbeddingUsage(made.tokens, made.tokens),
    )


def score_list(made: PairScores) -> ScoreList:
    return ScoreList(
        id=f"score-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=made.model,
        data=[Score(index=i, score=float(score)) for i, score in enumerate(made.scores)],
        usage=EmbeddingUsage(made.tokens, made.tokens),
    )
