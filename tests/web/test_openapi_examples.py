"""The examples of `/openapi.json` are what the server answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

import mlxsrv
from tests.support.api_examples import ask, settings
from tests.support.operations import every_operation
from tests.wire.test_openapi import answers, operation, validator


@pytest.mark.slow
def test_each_example_is_answered_as_it_is_described(tmp_path: Path) -> None:
    """Each example, and what is answered to it now, is what the schemas say."""
    operations = {each.id: each for each in every_operation()}
    with TestClient(mlxsrv.create_app(settings(tmp_path))) as client:
        for example, response in ask(client):
            asked = operations.pop(example["operation"])
            assert response.status_code == asked.status, response.text
            if "body" in example:
                body = operation(asked.method, asked.path)["requestBody"]["content"]
                validator(body["application/json"]["schema"]).validate(example["body"])
            schema = answers(asked.method, asked.path, asked.status, asked.media)
            is_json = asked.media == "application/json"
            schema.validate(response.json() if is_json else response.text)
            schema.validate(example.get("answer", {}))
    assert not operations, "each operation has an example"
