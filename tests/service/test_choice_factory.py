"""From a request's wishes to the parameters of its rows: by name, so that a new one needs no step
between the two."""

from __future__ import annotations

from mlxsrv.generation.parameters import Sampling
from mlxsrv.generation.spec import SamplingWishes
from mlxsrv.prompts.model_defaults import SamplingDefaults


def test_every_wish_has_a_parameter_of_its_name_and_so_has_every_default_of_a_model() -> None:
    assert {*SamplingWishes.__struct_fields__} == {*Sampling.__struct_fields__}
    assert {*SamplingDefaults.__struct_fields__} < {*Sampling.__struct_fields__}
