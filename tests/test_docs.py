"""README, CONTRIBUTING and docs/ agree with the code, and their links lead somewhere."""

from __future__ import annotations

import ast
import configparser
import json
import plistlib
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.routing import Route

import mlxsrv
from mlxsrv.arguments import server_arguments
from mlxsrv.commands import COMMANDS
from mlxsrv.configuration import options_table
from mlxsrv.engine.scheduling import row
from mlxsrv.engine.working_memory import SERVED_SHARE
from mlxsrv.errors import ServeError
from mlxsrv.models.pool import model
from mlxsrv.service import lifecycle
from mlxsrv.settings import options
from mlxsrv.terminal import recommending
from mlxsrv.wire.decoding import RequestDecoder
from mlxsrv.wire.openai.embeddings import EMBEDDING_REQUESTS
from mlxsrv.wire.openai.requests import CHAT_REQUESTS, COMPLETION_REQUESTS
from mlxsrv.wire.responses.requests import RESPONSES_REQUESTS
from tests.support.operations import every_operation
from tests.test_house import FLOORS, WITHOUT_MLX

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md")),
    *sorted(DOCS.glob("*.md")),
]
PLACES = (ROOT, ROOT / "mlxsrv", ROOT / "tests")
"""A path in a text is relative to one of these."""

OTHER_FLAGS = {
    *("--config", "--json", "--write", "--yes", "--for-model", "--url"),
    *("--print", "--file"),
    *("--memory", "--system", "--help", "--help-all"),
    *("--replicas", "--max-replicas", "--requests-per-replica", "--ray-address"),
    *("--upscale-delay", "--downscale-delay"),
    *("--num-cpus-per-replica", "--num-gpus-per-replica", "--memory-per-replica"),
    *("--only", "--pairs", "--no-openblas", "--factory"),
}
"""Flags of commands, of the benchmarks and of uvicorn."""


def each_page(check: Callable[[Path], None]) -> Callable[[], None]:
    """Make a check of a page a test of all pages."""

    def test() -> None:
        for page in PAGES:
            try:
                check(page)
            except AssertionError as error:
                error.add_note(f"in {page.name}")
                raise

    return test


@cache
def read(page: Path) -> str:
    return page.read_text("utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    """The text without its fenced code blocks."""
    return re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)


def spans(page: Path) -> list[str]:
    """The inline code of a page."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        assert words not in found, f"{page.name}: two headings have the anchor {words}"
        found.add(words)
    return found


def rows(table_of: str) -> Iterator[list[str]]:
    """The cells of each row of each table in a text, without heads."""
    lines = table_of.splitlines()
    for number, line in enumerate(lines):
        head = number + 1 < len(lines) and lines[number + 1].startswith("|---")
        if line.startswith("|") and not line.startswith("|---") and not head:
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def exists(path: str) -> bool:
    return any((place / path).exists() for place in PLACES)


# Pages.


def test_the_readme_is_short() -> None:
    assert len(read(ROOT / "README.md").encode()) <= 10_000


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_the_readmes_figures_are_those_of_the_benchmarks() -> None:
    section = read(ROOT / "README.md").partition("## Speed\n")[2].partition("\n## ")[0]
    figures = [cell for cells in rows(section) for cell in cells[1:]]
    assert len(figures) >= 12
    for figure in figures:
        assert figure in read(DOCS / "benchmarks.md"), figure


def test_every_page_is_linked_from_both_lists() -> None:
    for start, names in ((ROOT / "README.md", "docs/{}"), (DOCS / "README.md", "{}")):
        for page in DOCS.glob("*.md"):
            if page.name != "README.md":
                assert f"]({names.format(page.name)})" in read(start), f"{start}: {page.name}"


@pytest.mark.parametrize("page", PAGES[2:], ids=lambda page: page.stem)
def test_a_page_begins_with_what_it_answers(page: Path) -> None:
    title, sentence, *_ = re.split(r"\n\n+", read(page))
    assert title.startswith("# ")
    assert sentence.startswith("This page answers: ")
    assert sentence.endswith("?")


@each_page
def test_json_blocks_are_json(page: Path) -> None:
    for block in blocks(page, "json"):
        json.loads(block)


# What is named is there.


@each_page
def test_named_files_are_there(page: Path) -> None:
    for span in spans(page):
        path = span.partition("::")[0]
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)*\.(py|toml|md)|([\w.-]+/)+", path):
            assert exists(path) or (page.parent / path).exists(), f"{page.name}: {span}"
    for drawing in blocks(page, "text"):
        for path in re.findall(r"[\w/]+\.py\b|(?:\w+/)+(?=\s)", drawing):
            assert [*(ROOT / "mlxsrv").rglob(path)], f"{page.name}: {path}"


@each_page
def test_named_tests_are_there(page: Path) -> None:
    for span in spans(page):
        if re.search(r"\btest_\w+$", span):
            path, _, name = span.rpartition("::")
            assert f"def {name}(" in read(ROOT / "tests" / path), f"{page.name}: {span}"


DEFINITION = re.compile(
    r"""(?:def|class)\ (\w+) | ^\s*(\w+)(?::\ [^=\n]+)?\ = | ^\ +(\w+):\ | "(\w+)" """,
    re.MULTILINE | re.VERBOSE,
)
"""Names of functions, classes, variables and fields, and words of the API, where they stand."""


@cache
def defined() -> list[set[str]]:
    """The names that each file defines."""
    folders = ("mlxsrv", "tests", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return [{name for found in DEFINITION.findall(read(path)) for name in found} for path in files]


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", DOCS / "architecture.md"])
def test_named_classes_functions_and_constants_are_there(page: Path) -> None:
    """Each name in code, such as `Kind.method`, `function` or `CONSTANT`, stands in some file."""
    named = [
        span
        for span in spans(page)
        if re.fullmatch(r"(\w+\.)?\w+", span) and re.search(r"[a-z]_[a-z]|^[A-Z]\w*[a-z]", span)
    ]
    assert len(named) > 5
    for span in named:
        assert any(set(span.split(".")) <= names for names in defined()), span


def test_the_life_of_a_request_has_few_stations() -> None:
    """Each is a method of the file that is named."""
    _, _, life = read(DOCS / "architecture.md").partition("## The life of a request")
    stations = [cells for cells in rows(life.partition("\n## ")[0]) if cells[0].isdigit()]
    assert 10 <= len(stations) <= 14
    for _, file, method, _ in stations:
        *owner, name = method.strip("`").split(".")
        found = read(ROOT / "mlxsrv" / file.strip("`"))
        assert all(f"class {each}" in found for each in owner), method
        assert re.search(rf"def {name}\(", found), method


@each_page
def test_named_make_targets_are_there(page: Path) -> None:
    makefile = read(ROOT / "Makefile")
    lines = [*"\n".join(blocks(page, "sh")).splitlines(), *spans(page)]
    for line in lines:
        if named := re.match(r"make ([\w-]+)", line):
            assert re.search(rf"^{named[1]}:", makefile, re.MULTILINE), f"{page.name}: {line}"


@each_page
def test_named_commands_are_there(page: Path) -> None:
    lines = [*"\n".join(blocks(page, "sh")).splitlines(), *spans(page)]
    for line in lines:
        line = re.sub(r"^(~/mlxsrv-env/bin/)?mlxsrv(?= |$)", "python -m mlxsrv", line)
        words = shlex.split(line, comments=True) if line.startswith("python -m ") else []
        if not words or words[2] in sys.stdlib_module_names:
            continue
        module, *arguments = words[2:]
        if module != "mlxsrv":
            assert exists(module.replace(".", "/") + ".py") or exists(module.replace(".", "/"))
        elif arguments and arguments[0] not in {*COMMANDS, "--help", "--help-all"}:
            server_arguments().read(arguments)


@each_page
def test_named_flags_are_options(page: Path) -> None:
    flags = {flag for option in options() for flag in (option.flag, *option.also)}
    flags |= {option.flag.replace("--", "--no-", 1) for option in options() if option.switch}
    for span in spans(page):
        if named := re.match(r"--[a-z-]+", span):
            assert named[0] in flags | OTHER_FLAGS, f"{page.name}: {span}"


def test_named_extras_are_there() -> None:
    project = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
    section = read(ROOT / "README.md").partition("## Install\n")[2].partition("\n## ")[0]
    named = [*re.findall(r"\.\[([\w,]+)\]", section), *re.findall(r"`(\w+)` \(", section)]
    assert {extra for each in named for extra in each.split(",")} == {
        *project["optional-dependencies"]
    } - {"test", "fuzz", "bench", "clients", "page", "real"}


def test_the_unit_files_are_read() -> None:
    page = DOCS / "get-started.md"
    [unit], [plist] = blocks(page, "ini"), blocks(page, "xml")
    service = configparser.ConfigParser(interpolation=None)
    service.read_string(unit)
    agent = plistlib.loads(plist.encode())
    for program, *arguments in (service["Service"]["ExecStart"].split(), agent["ProgramArguments"]):
        assert program.endswith("/mlxsrv-env/bin/mlxsrv")
        server_arguments().read(arguments)


def test_the_models_for_each_memory_are_those_of_recommend() -> None:
    """The tokens are those beside the weights on the smallest Mac of a row, in thousands."""
    section = read(DOCS / "get-started.md").partition("## Which model\n")[2]
    known = {model.repository: model for model in recommending.known_models()}
    told = list(rows(section.partition("\n## ")[0]))
    assert len(told) > 5
    for memory, name, weights, tokens in told:
        model = known[name.strip("`")]
        working = recommending._working_memory(f"{memory.split()[0]}GB")
        context = model.context_within(int(SERVED_SHARE * working))
        assert tokens.split(",")[0] == str(context // 1000), memory
        assert weights == f"{model.gigabytes:{'.1f' if model.gigabytes < 10 else '.0f'}} GB"


# What there is is told.


def test_every_option_is_in_the_table() -> None:
    assert options_table() in read(DOCS / "options.md")


def test_every_route_is_told_and_no_other() -> None:
    app = mlxsrv.create_app(mlxsrv.Settings(hf_cache=False, metrics=True, ollama_root=True))
    served = {
        f"{method} {route.path.replace(':path', '')}"
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    told = {span for span in spans(DOCS / "http-api.md") if re.match(r"(GET|[A-Z]{3,6}) /", span)}
    # A query stands for a variant of its route.
    assert {span.partition("?")[0] for span in told} == served


def test_every_field_of_a_request_is_told() -> None:
    told = {word for page in DOCS.glob("*.md") for span in spans(page) for word in words(span)}
    for operation in every_operation():
        for struct in filter(None, (operation.asks, operation.query)):
            fields = {field.encode_name for field in msgspec.structs.fields(struct)}
            assert fields <= told, f"{operation.path}: {fields - told}"


def parameter_rows() -> Iterator[tuple[str, list[str]]]:
    """OpenAI's parameters, each with what becomes of it in each kind of request that has it."""
    there = json.loads(read(ROOT / "tests" / "support" / "openai_parameters.json"))
    asked: dict[str, RequestDecoder[Any]] = {
        "chat": CHAT_REQUESTS,
        "text": COMPLETION_REQUESTS,
        "responses": RESPONSES_REQUESTS,
        "embeddings": EMBEDDING_REQUESTS,
    }

    def cell(kind: str, name: str) -> str:
        if name not in there[kind]:
            return ""
        if name in asked[kind].kind.__struct_fields__:
            return "yes"
        return "400" if name in asked[kind].neutral else "ignored"

    for name in sorted({name for kind in asked for name in there[kind]}):
        yield name, [cell(kind, name) for kind in asked]


def test_every_parameter_of_openai_is_told() -> None:
    section = read(DOCS / "http-api.md").partition("## OpenAI parameters\n")[2]
    told = {cells[0].strip("`"): cells[1:5] for cells in rows(section.partition("\n## ")[0])}
    assert told == dict(parameter_rows())


def test_every_error_is_told_with_its_status_and_no_other() -> None:
    def kinds(kind: type[ServeError]) -> Iterator[type[ServeError]]:
        yield kind
        for each in kind.__subclasses__():
            yield from kinds(each)

    told = {
        (int(cells[0]), code)
        for cells in rows(read(DOCS / "errors.md"))
        if cells[0].isdigit()
        for code in re.findall(r"`(\w+)`", cells[1])
    }
    raised = {k for k in kinds(ServeError) if k.__module__ == ServeError.__module__}
    assert told == {(kind.status, kind.code) for kind in raised}


@cache
def messages() -> str:
    """The package's source, with each text that goes over several lines on one."""
    return "\n".join(
        re.sub(r'"\n +f?"', "", read(path)) for path in (ROOT / "mlxsrv").rglob("*.py")
    )


def test_the_messages_of_troubleshooting_are_the_servers() -> None:
    """Messages of other programs have the program's name before them."""
    section = read(DOCS / "troubleshooting.md").partition("## Answers that look wrong")[0]
    firsts = [cells[0] for cells in rows(section) if not re.match(r"[\w ]+: `", cells[0])]
    told = [message for first in firsts for message in re.findall(r"`(.+?)`", first)]
    assert len(told) > 30
    for message in told:
        for part in re.split(r"…|'[\w.]+'", message):
            assert part.strip() in messages(), message


def test_every_metric_is_told_and_no_other() -> None:
    source = read(ROOT / "mlxsrv" / "web" / "observability" / "metrics.py")
    made = set(re.findall(r'_(?:name|counter|count|histogram|gauge)\(\s*"(\w+)"', source))
    section = read(DOCS / "operations.md").partition("## Metrics")[2].partition("\n## ")[0]
    told = {
        name.removesuffix("_total")
        for cells in rows(section)
        for name in re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", cells[1]))
    }
    assert told == made
    alerts = re.findall(r"mlxsrv:(\w+?)(?:_total|_bucket)?[\W]", read(DOCS / "operations.md"))
    assert {*alerts} - {""} <= made


def test_the_glossary_is_short() -> None:
    part = read(DOCS / "architecture.md").partition("Words used everywhere:\n")[2]
    words = [cells[0] for cells in rows(part.partition("## Rooms")[0])]
    assert len(words) == len(set(words)) <= 25


def test_every_room_is_told_with_its_floor_and_its_own_sentence() -> None:
    rooms, _, _ = read(DOCS / "architecture.md").partition("## The life of a request")
    told = {
        name.strip("`"): (int(floor), sentence)
        for floor, name, sentence in (cells for cells in rows(rooms) if cells[0].isdigit())
    }
    package = ROOT / "mlxsrv"
    there: dict[str, tuple[int, str]] = {}
    for name, floor in FLOORS.items():
        file = f"{name}.py"
        if (package / file).is_file():
            there[file] = floor, told.get(file, (0, ""))[1]
        for path in (package / name).rglob("__init__.py"):
            text = ast.get_docstring(ast.parse(read(path))) or ""
            room = f"{path.parent.relative_to(package)}/"
            there[room] = floor, text.partition("\n\n")[0].replace("\n", " ")
    assert told == there


def test_the_parts_without_mlx_are_told() -> None:
    told = read(DOCS / "architecture.md").partition("import no MLX:\n")[2].partition("\n\n")[0]
    paths = re.findall(r"`([\w/]+)(?:\.py)?`", told)
    assert {path.rstrip("/") for path in paths} == WITHOUT_MLX


STATES: dict[str, Mapping[Any, Collection[Any]]] = {
    "reply": lifecycle.FOLLOWS,
    "row": row._NEXT,
    "model": model.FOLLOWING,
}


@pytest.mark.parametrize("of", STATES)
def test_every_state_is_told_with_what_may_follow_it(of: str) -> None:
    section = read(DOCS / "architecture.md").partition(f"### States of a {of}\n")[2]
    told = {
        cells[0].strip("`"): set(re.findall(r"`(\w+)`", cells[2]))
        for cells in rows(section.partition("\n#")[0])
    }
    assert told == {
        state.name.lower(): {each.name.lower() for each in following}
        for state, following in STATES[of].items()
    }


def test_every_promise_names_its_test() -> None:
    promises = list(rows(read(DOCS / "reliability.md")))
    assert len(promises) > 20
    for promise, tests, shown in promises:
        assert "::test_" in tests, promise
        for path, name in re.findall(r"`([\w/]+\.py)::(\w+)`", tests):
            source = read(ROOT / "tests" / path)
            if re.search(rf"^@pytest\.mark\.long\n(@.*\n)*def {name}\(", source, re.MULTILINE):
                assert "make test-long" in shown, f"{name} is not in make test"


def test_every_tick_of_a_client_has_its_test() -> None:
    folder = ROOT / "tests" / "clients"
    sources = "".join(
        read(path) for path in [*folder.rglob("test_*.py"), *folder.rglob("*.test.mjs")]
    )
    named = list(rows(read(folder / "README.md")))
    ticked = [cells for cells in rows(read(DOCS / "clients.md")) if "✓" in cells]
    assert [[cells[0], *map(bool, cells[1:])] for cells in named] == [
        [cells[0], *map(bool, cells[2:])] for cells in ticked
    ]
    names = [cell.strip("`") for cells in named for cell in cells[1:] if cell]
    assert len(names) > 50
    for name in names:
        assert (
            f"def test_{name}(" in sources
            or f'test("{name}' in sources
            or f"test(`{name}" in sources
        ), name
