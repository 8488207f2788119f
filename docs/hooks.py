"""Put files that the pages link to outside docs/ (reports, studies, CONTRIBUTING) into the site.

The site's root is docs/; with these files below it one link works in a checkout and on the site.
Tables that the code decides and the reports' entries in the gallery are made here, too.
"""

import posixpath
import re
from pathlib import Path

from gallery import with_reports
from key_tables import with_tables
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_DOCS = "docs/"
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)#\s]+")
_FOLDER = re.compile(r"\[([^\]]*)\]\((?!\w+:)[^)#\s]+/\)")  # a site shows no folder
_INLINE_CODE = re.compile(r"(?<!<pre>)(?<!<span></span>)<code>([^<]+)</code>")
_OPTION = re.compile(r"\[?--[a-z][\w-]*(?: [A-Z][\w.=]*)?\]?")
_CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
# where a key's words end: after an underscore, and after a dot unless a file's suffix follows
_AFTER_UNDERSCORE = r"(?<=\w_)(?=[A-Za-z]{2})"
_AFTER_DOT = r"(?<=[\w\]*]\.)(?=\*|[A-Za-z]\w*[._]|[A-Za-z]\w{5})"
_END_OF_WORD = re.compile(f"{_AFTER_UNDERSCORE}|{_AFTER_DOT}")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file that a page links to, and the files that those link to in turn."""
    root = Path(config.config_file_path).parent
    pages = [_DOCS + file.src_uri for file in files.documentation_pages()]
    for page in pages:  # which grows meanwhile
        for link in _LINK.findall(_generated((root / page).read_text(encoding="utf-8"))):
            target = _target(page, link)
            if (
                target.startswith(_DOCS)
                or files.get_file_from_path(target)
                or not (root / target).is_file()
            ):
                continue
            files.append(File.generated(config, target, abs_src_path=str(root / target)))
            if target.endswith(".md"):
                pages.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write links as they are on the site; links to folders become text."""
    uri = page.file.src_uri
    inside = (Path(config.docs_dir) / uri).is_file()
    source = _DOCS + uri if inside else uri

    def on_site(link: re.Match[str]) -> str:
        target = _target(source, link[0]).removeprefix(_DOCS)
        return posixpath.relpath(target, posixpath.dirname(uri) or ".")

    return _LINK.sub(on_site, _FOLDER.sub(r"\1", _generated(markdown)))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Let no line of inline code end within an option, and in tables only between a key's words.

    Here and not in the page's content, which the search reads.
    """
    output = _INLINE_CODE.sub(_with_whole_options, output)
    return _CELL.sub(lambda cell: _INLINE_CODE.sub(_breakable, cell[0]), output)


def _with_whole_options(code: re.Match[str]) -> str:
    return f"<code>{_OPTION.sub(_unbroken, code[1])}</code>"


def _unbroken(option: re.Match[str]) -> str:
    return f'<span class="option">{option[0]}</span>'


def _breakable(code: re.Match[str]) -> str:
    return f"<code>{_END_OF_WORD.sub('<wbr>', code[1])}</code>"


def _generated(markdown: str) -> str:
    return with_reports(with_tables(markdown))


def _target(page: str, link: str) -> str:
    """Return the path in the repository to which a link leads."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
