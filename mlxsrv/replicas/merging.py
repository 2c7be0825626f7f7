"""Answers about the server, merged from those of all its replicas."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mlxsrv.generation.steering import FeatureStatistics
from mlxsrv.wire.management import TopRequest, success
from mlxsrv.wire.sse import encode_json


class ReplicaAnswer(msgspec.Struct, frozen=True):
    """The answer of a replica to a GET: its id, the status and the body."""

    id: str
    status: int
    body: bytes


Merge = Callable[[ReplicaAnswer, Sequence[ReplicaAnswer]], bytes]
"""Makes one body of a replica's own answer and those of the others. It may take half a second, so
it is called in a worker thread."""


def merge_metrics(own: ReplicaAnswer, others: Sequence[ReplicaAnswer]) -> bytes:
    """Metrics of all replicas, each sample with the label `replica`; samples of one metric stand
    together, as the format wants it."""
    families: dict[str, list[str]] = {}
    comments: dict[str, list[str]] = {}
    for answer in (own, *others):
        if answer.status != 200:
            continue
        family = ""
        for line in answer.body.decode().splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                known = comments.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif line:
                families.setdefault(family, []).append(_labelled(line, answer.id))
    lines = [line for name in comments for line in (*comments[name], *families.get(name, ()))]
    return ("\n".join(lines) + "\n").encode()


_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+.*)")


def _labelled(line: str, replica: str) -> str:
    found = _SAMPLE.fullmatch(line)
    assert found is not None, line
    name, labels, value = found.groups()
    own = f'replica="{replica}"'
    return f"{name}{{{f'{labels},' if labels else ''}{own}}} {value}"


def merge_models(own: ReplicaAnswer, others: Sequence[ReplicaAnswer]) -> bytes:
    """The list of models; a model is loaded if one replica has it loaded."""
    told = msgspec.json.decode(own.body)
    loaded = {
        model["id"] for answer in others for model in _listed(answer, "data") if model.get("loaded")
    }
    for model in told.get("data", ()):
        if model["id"] in loaded:
            model |= {"loaded": True, "state": "loaded", "reason": None, "download": None}
    return encode_json(told)


def merge_running(own: ReplicaAnswer, others: Sequence[ReplicaAnswer]) -> bytes:
    """The models in memory of any replica, each once."""
    told = msgspec.json.decode(own.body)
    here = {model["name"] for model in told["models"]}
    for answer in others:
        for model in _listed(answer, "models"):
            if model["name"] not in here:
                here.add(model["name"])
                told["models"].append(model)
    return encode_json(told)


def merge_history(own: ReplicaAnswer, others: Sequence[ReplicaAnswer], *, limit: int) -> bytes:
    """The last tokens of all replicas, the newest first.

    Args:
        limit: how many at most.
    """
    told = msgspec.json.decode(own.body)
    lists = [told.get("data") or [], *(_listed(answer, "data") for answer in others)]
    entries = sorted(
        (entry for entries in lists for entry in entries),
        key=lambda entry: -entry["timestamp"],
    )
    return encode_json(told | {"data": entries[:limit]})


def merge_statistics(own: ReplicaAnswer, others: Sequence[ReplicaAnswer]) -> bytes:
    """The statistics of each feature over the tokens of all replicas."""
    features = _add_up(own, others)
    return encode_json(success([features[number] for number in sorted(features)]))


def pick_highest(
    own: ReplicaAnswer, others: Sequence[ReplicaAnswer], *, asked: TopRequest
) -> bytes:
    """The highest features, of the statistics of all features over the tokens of all replicas."""

    def rank(each: FeatureStatistics) -> tuple[float, int]:
        return -getattr(each, asked.metric), each.feature_idx

    return encode_json(success(heapq.nsmallest(asked.k, _add_up(own, others).values(), key=rank)))


class _Statistics(msgspec.Struct):
    """The answer of a replica about its features."""

    data: list[FeatureStatistics]


_statistics = msgspec.json.Decoder(_Statistics)


def _add_up(own: ReplicaAnswer, others: Sequence[ReplicaAnswer]) -> dict[int, FeatureStatistics]:
    """The statistics of all replicas that have not refused, by feature."""
    features: dict[int, FeatureStatistics] = {}
    for answer in (own, *others):
        if answer.status == 200:
            for each in _statistics.decode(answer.body).data:
                known = features.get(each.feature_idx)
                features[each.feature_idx] = each if known is None else _together(known, each)
    return features


def merge_health(own: ReplicaAnswer, others: Sequence[ReplicaAnswer]) -> bytes:
    """A replica's own health, which its status tells, with its id; beside it that of the others."""
    told = msgspec.json.decode(own.body)
    if "status" not in told:  # it is a refusal
        return own.body
    known = {answer.id: msgspec.json.decode(answer.body) for answer in others}
    return encode_json(told | {"replica": own.id, "others": known})


def _together(one: FeatureStatistics, other: FeatureStatistics) -> FeatureStatistics:
    """The statistics of two samples as one, by Chan's formula for the variance."""
    a, b = one.count, other.count
    count, difference = a + b, other.mean - one.mean
    squares = sum((each.std or 0.0) ** 2 * (each.count - 1) for each in (one, other))
    squares += difference**2 * a * b / count
    return FeatureStatistics(
        feature_idx=one.feature_idx,
        count=count,
        mean=one.mean + difference * b / count,
        std=math.sqrt(squares / (count - 1)),
        min=min(one.min, other.min),
        max=max(one.max, other.max),
        active_ratio=(one.active_ratio * a + other.active_ratio * b) / count,
    )


def _listed(answer: ReplicaAnswer, field: str) -> list[dict[str, Any]]:
    """The list in an answer; empty if it was refused."""
    if answer.status != 200:
        return []
    return msgspec.json.decode(answer.body).get(field) or []
