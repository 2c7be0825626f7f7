"""`mlxsrv pull` and `mlxsrv rm`: download a model into the Hugging Face cache, and remove it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence

from mlxsrv.arguments import Arguments
from mlxsrv.errors import ModelNotFound
from mlxsrv.logs import sized
from mlxsrv.models.catalogue.hub_cache import Repository
from mlxsrv.options import SettingsError
from mlxsrv.terminal.screen import agreed


def pull(arguments: Sequence[str]) -> None:
    """Download a model into the Hugging Face cache and print its folder."""
    asked = pull_arguments().read(arguments)
    repository = _repository(asked["repository"])
    # Imported here, because the import takes 0.1 s and the other commands do not need it.
    from mlxsrv.models.catalogue.download import fetch

    watched = not asked["quiet"] and sys.stderr.isatty()
    print(fetch(repository, progress=watched))
    if watched:
        print(f"To serve it: mlxsrv {asked['repository']}", file=sys.stderr)


def pull_arguments() -> Arguments:
    """Make the parser of the command."""
    parser = Arguments(
        "pull",
        "Download a model from the Hugging Face hub into its cache, where a server finds it. A "
        "download that was interrupted continues where it stopped.",
        operands="ORG/NAME[@REVISION]",
    )
    parser.add_argument("repository", metavar="ORG/NAME[@REVISION]", help="The model on the hub.")
    parser.add_argument("--quiet", action="store_true", help="Show no progress.")
    return parser


def rm(arguments: Sequence[str]) -> None:
    """Remove a model's files once the user has seen how many bytes that frees."""
    asked = rm_arguments().read(arguments)
    repository = _repository(asked["repository"])
    bytes, remove = _plan(repository)
    freed = sized(bytes)
    if not asked["yes"] and not agreed(
        f"Remove {repository} from the Hugging Face cache, {freed}?", remedy="add --yes to remove"
    ):
        raise SettingsError(f"{repository} stays")
    remove()
    print(f"{repository} is removed: {freed} are free again.")


def rm_arguments() -> Arguments:
    """Make the parser of the command."""
    parser = Arguments(
        "rm",
        "Remove a model from the Hugging Face cache, all revisions of it or one. Files that "
        "another revision needs stay.",
        operands="ORG/NAME[@REVISION]",
    )
    parser.add_argument("repository", metavar="ORG/NAME[@REVISION]", help="The model in the cache.")
    parser.add_argument("--yes", action="store_true", help="Remove it without asking.")
    return parser


def _plan(repository: Repository) -> tuple[int, Callable[[], object]]:
    """Return how many bytes would be free, and what removes them. Raises ModelNotFound if the cache
    has no such model."""
    # Imported here, because the import takes 0.1 s and the other commands do not need it.
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        where = constants.HF_HUB_CACHE
        raise ModelNotFound(f"{repository} is not here: there is no cache at {where}") from None
    wanted = [
        revision.commit_hash
        for cached in cache.repos
        if cached.repo_type == "model" and cached.repo_id == repository.id
        for revision in cached.revisions
        if repository.revision in (None, *revision.refs, revision.commit_hash)
    ]
    if wanted:
        strategy = cache.delete_revisions(*wanted)
        return strategy.expected_freed_size, strategy.execute
    root = repository.root
    if repository.revision is None and root.is_dir():  # an interrupted download has no revision
        files = [path.lstat().st_size for path in root.rglob("*") if path.is_file()]
        return sum(files), lambda: shutil.rmtree(root)
    raise ModelNotFound(f"{str(repository)!r} is not in the cache; see: mlxsrv models")


def _repository(text: str) -> Repository:
    """Read `ORG/NAME` or `ORG/NAME@REVISION`. Raises SettingsError."""
    try:
        return Repository.parse(text)
    except ValueError as error:
        raise SettingsError(str(error)) from None
