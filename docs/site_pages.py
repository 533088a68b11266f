"""Hook of mkdocs: README is the first page, and what the pages link to outside of docs/ becomes a page beside them.

A link is written for a reader of the repository, relative to the file that it is in. On the site README.md is index.md, docs/ is
the root, and a program is a page that shows it. The names in the reference's `<!-- ::: ... -->` are docstrings
there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<=\]\()(?!https?:|#)(?P<target>[^)#\s]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md, and all that it and the other pages lead to."""
    todo = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(todo)
    for source in todo:
        if not files.get_file_from_path(_place(source)):
            files.append(File.generated(config, _place(source), content=_text(source)))
        for match in _LINK.finditer(_text(source)) if source.endswith(".md") else ():
            target = _target(match["target"], source)
            if target not in seen and (ROOT / target).is_file():
                seen.add(target)
                todo.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of a page into those of the site."""
    source = page.file.src_uri
    source = "README.md" if source == "index.md" else source if (ROOT / source).exists() else f"docs/{source}"
    folder = posixpath.dirname(page.file.src_uri)
    markdown = re.sub(r"(?s)<!-- :::(.*?)-->", lambda names: "\n\n".join(f"::: {name}" for name in names[1].split()), markdown)
    return _LINK.sub(lambda match: posixpath.relpath(_place(_target(match["target"], source)), folder or "."), markdown)


def _target(link: str, source: str) -> str:
    """Return the path in the repository of what the file `source` links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _place(source: str) -> str:
    """Return the path on the site of a file of the repository."""
    if source == "README.md":
        return "index.md"
    return source.removeprefix("docs/") if source.endswith((".md", ".svg")) else f"{source}.md"


def _text(source: str) -> str:
    text = (ROOT / source).read_text()
    return text if source.endswith(".md") else f"# {source}\n\n```python\n{text}```\n"
