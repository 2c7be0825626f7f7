"""The architectures that mlx-lm runs, found out without importing it.

An import would load MLX and take a second, and a list of models needs neither. mlx-lm's tables are
literals and its models are files, so both can be read. A test compares them with the real ones.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import msgspec

from mlxsrv.formats.encoders import check_encoder, is_encoder
from mlxsrv.formats.files import JSONObject, UnusableFile, architecture_names


class _Architecture(msgspec.Struct, frozen=True):
    """One file among mlx-lm's models.

    Attributes:
        problem: why it cannot run a model, if so.
        template: the name of the chat template that it brings.
    """

    problem: str | None
    template: str | None


def check_architecture(config: JSONObject, *, trust_remote_code: bool) -> str:
    """Return the `model_type` of a config, if there is code to run it.

    The code for encoders is in this package, that for all others in mlx-lm.

    Raises:
        UnusableFile: there is no such code, or it cannot be used.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or not re.fullmatch(r"[\w.-]{1,100}", family, re.ASCII):
        raise UnusableFile("'config.json' has no model_type")
    if is_encoder(config):
        check_encoder(config)
        return family
    if config.get("model_file") is not None:
        if not trust_remote_code:
            raise UnusableFile("it needs Python code of its own, which --trust-remote-code allows")
        return family
    module = _module(config)
    if module not in _modules("models"):
        raise UnusableFile(f"mlx-lm does not know the model type {family!r}")
    problem = _architecture(module).problem
    if problem is not None:
        raise UnusableFile(f"mlx-lm cannot run the model type {family!r}: {problem}")
    return family


def template_code(config: JSONObject, settings: JSONObject, *, given: bool) -> str | None:
    """Return the code of mlx-lm's that renders chats in place of a template, if there is any.

    Args:
        settings: `tokenizer_config.json`.
        given: the model has a template. Only code that `settings` name replaces it.
    """
    name = settings.get("chat_template_type")
    if name is None and not given and (module := _module(config)) in _modules("models"):
        name = _architecture(module).template
    if not isinstance(name, str) or name not in _modules("chat_templates"):
        return None
    return (_package() / "chat_templates" / f"{name}.py").read_text(encoding="utf-8")


def _module(config: JSONObject) -> str:
    """Return the name of the module of mlx-lm's for this model, whether there is one or not."""
    family = str(config.get("model_type"))
    families, pairs = _remappings()
    for architecture in architecture_names(config):
        if (family, architecture) in pairs:
            return pairs[family, architecture]
    return families.get(family, family)


@cache
def _package() -> Path:
    """Return mlx-lm's folder. Finding a package does not import it."""
    spec = find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations:
        raise UnusableFile("mlx-lm is not installed")
    return Path(spec.submodule_search_locations[0])


@cache
def _modules(package: str) -> frozenset[str]:
    """Return the modules in a package, from a listing of its files.

    A name is compared with these, and no file is looked for: a file system that takes
    `Llama.py` and `llama.py` for one name would find either.
    """
    names = os.listdir(_package() / package)
    return frozenset(n.removesuffix(".py") for n in names if n.endswith(".py") and n[0] != "_")


@cache
def _remappings() -> tuple[Mapping[str, str], Mapping[tuple[str, str], str]]:
    """Return mlx-lm's tables of model types that run the code of others."""
    values = _literals(ast.parse((_package() / "utils.py").read_bytes()))
    return values.get("MODEL_REMAPPING", {}), values.get("MODEL_ARCHITECTURE_REMAPPING", {})


@cache
def _architecture(module: str) -> _Architecture:
    tree = ast.parse((_package() / "models" / f"{module}.py").read_bytes())
    defined = {name for statement in tree.body for name in _defined(statement)}
    defaults = _literals(tree).get("TOKENIZER_DEFAULTS", {})
    missing = [name for name in _imported(tree) if find_spec(name) is None]
    problem = f"it needs the package {missing[0]!r}" if missing else None
    if not defined >= {"Model", "ModelArgs"}:
        problem = "it is no model"
    return _Architecture(problem, defaults.get("chat_template_type"))


def _defined(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in statement.names)
    elif isinstance(statement, ast.Assign):
        yield from (target.id for target in statement.targets if isinstance(target, ast.Name))


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the packages that a module imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def _literals(tree: ast.Module) -> JSONObject:
    """Return a module's dictionaries of constants, by name."""
    values: JSONObject = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            try:
                value = ast.literal_eval(statement.value)
            except ValueError:
                continue
            values |= dict.fromkeys(_defined(statement), value)
    return values
