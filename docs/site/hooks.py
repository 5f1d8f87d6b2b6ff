"""What MkDocs needs to know beyond mkdocs.yml, so that pages read the same on the site and on GitHub.

Links may lead out of docs/: Markdown files of the repository that pages name become pages of the site, below
``repository/``, other files plain texts there, and folders lists of their files. Headings have GitHub's anchors.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
DOCS = "docs"
OUTSIDE = "repository"
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
NAVIGATION_STATE = re.compile(r'(<nav class="md-nav"[^>]*?) aria-expanded="\w+"')  # which only buttons may have
# A section's part of the navigation is named by a label that holds an icon alone; its title comes next.
SECTION = re.compile(
    r'aria-labelledby="__nav_[\d_]+_label"([^>]*>\s*<label class="md-nav__title"[^>]*>\s*<span[^>]*></span>([^<]+)<)'
)
CODE_BUTTONS = '("nav",{class:"md-code__nav"})'
SHOWN = {".md", ".png", ".svg", ".css"}  # others get a suffix with which browsers show them


def place(path: str) -> str:
    """Where the site has a file of the repository, among its sources."""
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    return f"{OUTSIDE}/{path}" + ("" if Path(path).suffix in SHOWN else ".txt")


def origin(source: str) -> str:
    """Where the repository has a file of the site: what `place` undoes."""
    inside = source.removeprefix(f"{OUTSIDE}/")
    return f"{DOCS}/{source}" if inside == source else inside


def prose_only(text: str, change: Callable[[str], str]) -> str:
    """The text with what stands outside of its code blocks changed."""
    done, end = [], 0
    for fence in FENCE.finditer(text):
        done += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*done, change(text[end:])])


def targets(text: str, page: str) -> list[str]:
    """The files of the repository that a page of it links to."""
    found: list[str] = []
    prose_only(text, lambda prose: found.extend(LINK.findall(prose)) or prose)
    return [_resolved(link, page)[0] for link in found if _is_local(link)]


def moved(text: str, page: str) -> str:
    """The text of a page whose links lead to where the site has their files."""

    def link(match: re.Match[str]) -> str:
        if not _is_local(match[0]):
            return match[0]
        path, anchor = _resolved(match[0], page)
        return posixpath.relpath(place(path), posixpath.dirname(place(page)) or ".") + anchor

    return prose_only(text, lambda prose: LINK.sub(link, prose))


def _is_local(link: str) -> bool:
    return "://" not in link and not link.startswith(("#", "mailto:"))


def _resolved(link: str, page: str) -> tuple[str, str]:
    path, mark, anchor = link.partition("#")
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path)), mark + anchor


def anchor(heading: str, separator: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_config(config: Any) -> None:
    config.mdx_configs["toc"]["slugify"] = anchor


def on_files(files: Files, config: Any) -> Files:
    """Adds the files outside of docs/ that pages name, and those that these name."""
    waiting = [origin(file.src_uri) for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for path in targets((ROOT / page).read_text(encoding="utf-8"), page):
            if path in seen or not (ROOT / path).exists():  # what is not there MkDocs tells
                continue
            seen.add(path)
            if not path.startswith(f"{DOCS}/"):
                files.append(_outside(path, config))
            if path.endswith(".md"):
                waiting.append(path)
    return files


def _outside(path: str, config: Any) -> File:
    """The site's file for a file or a folder that lies outside of docs/."""
    if (ROOT / path).is_dir():
        listed = sorted(str(file.relative_to(ROOT)) for file in (ROOT / path).rglob("*") if file.is_file())
        file = File.generated(config, place(path), content="\n".join([*listed, ""]))
    else:
        file = File.generated(config, place(path), abs_src_path=os.fspath(ROOT / path))
    file.inclusion = InclusionLevel.NOT_IN_NAV
    return file


def on_post_page(output: str, **_: Any) -> str:
    """Names the search for those that hear the page, which the theme does not, and says no wrong state."""
    output = NAVIGATION_STATE.sub(r"\1", output)
    output = SECTION.sub(lambda section: f'aria-label="{section[2].strip()}"{section[1]}', output)
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )


def on_post_build(config: Any) -> None:
    """Makes the theme's buttons beside code a plain group: as landmarks without a name they would all be the same."""
    changed = 0
    for script in Path(config.site_dir, "assets", "javascripts").glob("bundle.*.js"):
        text = script.read_text(encoding="utf-8")
        changed += text.count(CODE_BUTTONS)
        script.write_text(text.replace(CODE_BUTTONS, CODE_BUTTONS.replace('"nav"', '"div"')), encoding="utf-8")
    if changed != 1:
        raise PluginError(
            f"the theme's script has {changed} places with {CODE_BUTTONS}, not one: see docs/site/hooks.py"
        )


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return moved(markdown, origin(page.file.src_uri))
