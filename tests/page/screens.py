"""Pictures of the views in use, light and dark: `python -m tests.page.screens FOLDER`.

`--only chat` makes those of one view. The pictures of the documentation are made so; each is small
enough for a repository.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.clients.serving import serving
from tests.page.conftest import CHROMIUM, FLAGS
from tests.page.scenes import SCENES

SIZE = {"width": 1280, "height": 800}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=[*SCENES], help="the view; default: all")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    for name in [asked.only] if asked.only else SCENES:
        for scheme in ("light", "dark"):
            take(name, scheme, asked.folder / f"{name}-{scheme}.png")


def take(name: str, scheme: str, file: Path) -> None:
    """Write a picture of a new server's view to `file`."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder) / "log", "--data-dir", folder) as url,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport=SIZE, color_scheme=scheme, reduced_motion="reduce")
        SCENES[name](page, url)
        page.screenshot(path=file)
        browser.close()
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
