"""The pages of the documentation: their files, links, headings and blocks of code."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\]\[]|!?\[[^\]]*\](?:\([^)]*\))?)*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
ELSEWHERE = ("http://", "https://", "mailto:")
ATTRIBUTE = re.compile(r"<(?:img|source|a|link|script)\b[^>]*?\b(?:src|srcset|href)=\"([^\"]+)\"")


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block of a page."""

    page: str
    """Path below the repository."""
    number: int
    """Position among the page's blocks of its language, from 0."""
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.language}{self.number}"


def markdown_files() -> list[Path]:
    """Returns every Markdown file that a reader of the repository finds."""
    folders = (DOCS, ROOT / "benchmarks", ROOT / "examples", ROOT / "tests", ROOT / "runtime")
    inside = [path for folder in folders for path in sorted(folder.rglob("*.md"))]
    return [*sorted(ROOT.glob("*.md")), *inside]


def read_blocks(path: Path, *languages: str) -> list[CodeBlock]:
    """Returns a page's blocks of some languages, or of all."""
    blocks: list[CodeBlock] = []
    for language, text in FENCE.findall(path.read_text()):
        if not languages or language in languages:
            number = sum(block.language == language for block in blocks)
            blocks.append(CodeBlock(str(path.relative_to(ROOT)), number, language, text))
    return blocks


def read_links(path: Path) -> list[str]:
    """Returns the files and headings that a page's links and images, also in HTML, lead to."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", path.read_text()))
    found = [*LINK.findall(prose), *ATTRIBUTE.findall(prose)]
    return [link for link in found if not link.startswith(ELSEWHERE)]


def read_anchors(path: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and the site name them."""
    prose = FENCE.sub("", path.read_text())
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {slug(heading) for heading in headings} | set(re.findall(r'\bid="([^"]+)"', prose))


def slug(heading: str) -> str:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def read_nav() -> list[str]:
    """Returns the pages of the site's navigation, in its order."""
    _, _, navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    return re.findall(r"^ +- (?:.*: )?(\S+\.md)$", navigation, re.MULTILINE)
