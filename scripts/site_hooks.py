"""What `make site` adds to docs/: pages from outside the folder, the API reference, the live demo.

Pages of docs/ link to files beside it (CONTRIBUTING.md, an example, a module). In the site each of
them is a page below source/, so that every link leads somewhere, also from disk.
"""

import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")

API_PAGES = {
    "reference/api.md": (
        "From Python",
        "What the commands call. `import tether` has the first ones under shorter names: "
        "`tether.train`, `tether.resume`, `tether.check`, `tether.evaluate`, `tether.generate`, "
        "`tether.sft`, `tether.reward_model`, `tether.trace`, `tether.export`, `tether.start`, "
        "`tether.diff`, `tether.doctor`. What they return and take follows them.",
        [
            "tether.api",
            "tether.config.load.load_config",
            "tether.config.ppo.Config",
            "tether.train.stepping.Run",
            "tether.train.stepping.Iteration",
            "tether.train.training.Result",
            "tether.train.watch.Watcher",
            "tether.ppo.evaluate.Evaluation",
            "tether.ppo.evaluate.Estimate",
            "tether.rewards.values",
            "tether.run.rows.Row",
            "tether.run.compare.Comparison",
            "tether.run.doctor.findings.Diagnosis",
            "tether.explain.trace.Trace",
            "tether.plots",
            "tether.errors",
        ],
    ),
    "reference/algo.md": (
        "tether.algo: the maths",
        "Pure functions on tensors: no config beyond the section that names a loss or estimator, "
        "no random state, no process group. They are stable: names, arguments and shapes change "
        "only with a line in the changelog. Shapes are checked in the tests.",
        [
            "tether.algo.losses",
            "tether.algo.advantages",
            "tether.algo.kl",
            "tether.algo.least_kl",
            "tether.algo.masked",
            "tether.algo.pass_at_k",
            "tether.algo.importance",
            "tether.algo.trust_region",
            "tether.algo.random",
            "tether.types",
        ],
    ),
}


def linked_files(docs: Path) -> set[str]:
    """Return what the pages link to outside docs/, as paths from the root.

    Of a folder, its files as well; of a page outside docs/, what it links to in its turn.
    """
    found: set[str] = set()
    waiting = [*docs.rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    while waiting:
        page = waiting.pop()
        if page.is_relative_to(docs):
            targets = [page]
        else:
            targets = [page, *(files_in(page) if page.is_dir() else [])]
            found |= {path_of(target) for target in targets}
        for target in targets:
            if target.suffix == ".md":
                waiting += [link for link in links_of(target, docs) if path_of(link) not in found]
    return found


def links_of(page: Path, docs: Path) -> Iterator[Path]:
    """Yield the files and folders of the repository outside docs/ that a page links to."""
    for match in LINK.finditer(page.read_text(encoding="utf-8")):
        target = (page.parent / match[2]).resolve()
        inside = target.is_relative_to(ROOT) and not target.is_relative_to(docs)
        if "://" not in match[2] and inside and target.exists():
            yield target


def files_in(folder: Path) -> list[Path]:
    """Return the files of an example: what is hidden or compiled is left out."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(part[0] in "._" for part in path.relative_to(folder).parts)
    ]


def path_of(file: Path) -> str:
    """Return the path from the root."""
    return file.relative_to(ROOT).as_posix()


def source_page(path: str) -> str:
    """Return where a file outside docs/ is in the site."""
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def page_text(source: Path) -> str:
    """Return the page of a file or a folder outside docs/."""
    if source.is_dir():
        names = [path.relative_to(source.parent).as_posix() for path in files_in(source)]
        listed = "\n".join(f"- [{name}]({name})" for name in names)
        return f"# {path_of(source)}\n\n{listed}\n"
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".md":
        return text
    return f"# {path_of(source)}\n\n```{source.suffix[1:]}\n{text}```\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that docs/ does not hold."""
    for path in sorted(linked_files(ROOT / "docs")):
        text = page_text(ROOT / path)
        files.append(File.generated(config, source_page(path), content=text))
    for path, (title, words, modules) in API_PAGES.items():
        blocks = "\n\n".join(f"::: {name}" for name in modules)
        content = f"# {title}\n\n{words}\n\n{blocks}\n"
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave docs/ to their pages in the site."""
    here = page.file.src_uri
    inside = here.removeprefix("source/") if here.startswith("source/") else f"docs/{here}"

    def site_link(match: re.Match[str]) -> str:
        path, anchor = match[2], match[3] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(inside), path))
        uri = target.removeprefix("docs/") if target.startswith("docs/") else source_page(target)
        if "://" in path or uri not in files.src_uris:
            return match[0]
        relative = posixpath.relpath(uri, posixpath.dirname(here) or ".")
        return f"{match[1]}{relative}{anchor}{match[4]}"

    return LINK.sub(site_link, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Export the recorded run beside the pages: docs/demo.md embeds it."""
    from tether.assets import resolve
    from tether.view.export import export_page
    from tether.view.run_reader import Folder

    target = Path(config.site_dir) / "demo"
    shutil.rmtree(target, ignore_errors=True)
    export_page(Folder(resolve("tether:recorded")), target, demo=True)
