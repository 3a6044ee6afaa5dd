"""What mkdocs.yml cannot say: the site's pages are the repository's markdown where it lies, so that a link that works
on a code host works here. A file of code that a page links to becomes a page too; other files are copied.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.website import markdown, reference  # noqa: E402
from tools.website.built import broken  # noqa: E402
from tools.website.reference import GROUPS  # noqa: E402

PAGES = ("*.md", "docs/**/*.md", "learn/**/*.md", "cuda/**/*.md")
LANGUAGES = {
    ".py": "python",
    ".cu": "cuda",
    ".cuh": "cuda",
    ".h": "cpp",
    ".sh": "bash",
    ".yml": "yaml",
    ".toml": "toml",
    "": "text",
}
"""Files that become pages, by suffix."""

_code: set[str] = set()  # files and folders that were made pages, by their place in the repository


def on_files(files: Files, config: MkDocsConfig) -> Files:
    site = Files([file for file in files if file.src_dir != config.docs_dir])
    pages = {path.relative_to(ROOT).as_posix() for pattern in PAGES for path in ROOT.glob(pattern)}
    used = {"mkdocs.yml": [*config.extra_css, *config.extra["polyfills"], config.theme["favicon"]]}
    used |= {page: markdown.links((ROOT / page).read_text()) for page in pages}
    linked = {path for page, targets in used.items() for target in targets if (path := _place(page, target))}
    linked |= {child for path in linked if (ROOT / path).is_dir() for child in _children(path)}
    _code.clear()
    _code.update(path for path in linked - pages if _is_code(ROOT / path))
    for path in sorted(pages | linked - _code):
        site.append(File(path, str(ROOT), config.site_dir, use_directory_urls=False))
    for path in sorted(_code):
        made = File.generated(config, f"{path}.md", content=_listing(path), inclusion=InclusionLevel.NOT_IN_NAV)
        site.append(made)
    for stem, text in reference.pages(ROOT / "src").items():
        site.append(File.generated(config, f"reference/{stem}.md", content=text))
    starred: dict[str, list[Any]] = {f"{folder}/*": _in_order(pages, folder) for folder in ("learn", "cuda")}
    starred["reference/*"] = [{group.title: f"reference/{stem}.md"} for stem, group in GROUPS.items()]
    filled = [_filled(entry, starred) for entry in config.nav or []]
    config.nav = [entry for entry in filled if all(entry.values())]  # no section that is empty
    return site


def on_page_markdown(text: str, page: Page, **_: Any) -> str:
    def new(target: str) -> str:
        path, anchor = _place(page.file.src_uri, target), target.partition("#")[2]
        if path is None:
            return target
        there = os.path.relpath(path, os.path.dirname(page.file.src_uri) or ".")
        if path not in _code:
            return f"{there}#{anchor}" if anchor else there
        line = re.fullmatch(r"L(\d+)(?:-L\d+)?", anchor)
        return f"{there}.md#__codelineno-0-{line[1]}" if line else f"{there}.md"

    if page.is_homepage:
        page.meta["hide"] = ["navigation"]  # beside it there would be itself alone
    return markdown.lists_apart(markdown.relinked(text, new))


@event_priority(-100)
def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    found = broken(Path(config.site_dir))
    if found:
        raise PluginError("Broken links in the built site:\n  " + "\n  ".join(found))


def _place(page: str, target: str) -> str | None:
    """Where in the repository a link of a page leads; None if nothing is there, or it leads out."""
    path = target.partition("#")[0]
    there = Path(os.path.normpath((ROOT / page).parent / path))
    if "://" in target or not path or not there.exists() or ROOT not in there.parents:
        return None
    if (there / "README.md").exists():
        there /= "README.md"
    return there.relative_to(ROOT).as_posix()


def _children(folder: str) -> list[str]:
    files = sorted(path for path in (ROOT / folder).iterdir() if path.is_file() and not path.name.startswith("."))
    return [path.relative_to(ROOT).as_posix() for path in files]


def _is_code(path: Path) -> bool:
    return path.is_dir() or path.suffix in LANGUAGES or path.name.startswith(".")


def _listing(path: str) -> str:
    """A file or a folder as a page, which the search leaves out."""
    head = f"---\nhide: [navigation, toc]\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
    here = ROOT / path
    if here.is_dir():
        inside = ((child, os.path.relpath(child, os.path.dirname(path) or ".")) for child in _children(path))
        return head + "\n".join(f"- [`{os.path.basename(child)}`]({target})" for child, target in inside)
    language = LANGUAGES.get(here.suffix, "text")
    return f'{head}``````{{ .{language} linenums="1" }}\n{here.read_text()}\n``````\n'


def _in_order(pages: set[str], folder: str) -> list[str]:
    """The pages of a folder: its own README, those of the folders in it, and what else stands beside them."""
    inside = [page for page in pages if page.startswith(f"{folder}/")]
    return sorted(inside, key=lambda page: (page != f"{folder}/README.md", page.count("/") == 1, page))


def _filled(entry: Any, starred: dict[str, list[Any]]) -> Any:
    """An entry of the navigation in which a * stands for the pages there are."""
    if isinstance(entry, dict):
        return {title: starred.get(its, its) if isinstance(its, str) else its for title, its in entry.items()}
    return entry
