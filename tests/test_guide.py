"""The guide shows what the commands print, in both languages, and its links lead somewhere."""

import importlib.util
import math
import re
import sys
import unicodedata
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from helpers import table

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
ENGLISH, CHINESE = ROOT / "docs" / "guide", ROOT / "docs" / "zh" / "guide"
NAMES = sorted(path.name for path in ENGLISH.glob("*.md"))

FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
NUMBER = re.compile(r"[-−+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
ROUNDING = 1e-3  # another machine may round a forward pass otherwise; pages show four digits


def load(name: str):
    """A script as a module; scripts find each other by name, as when they are run."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPTS))
    return module


guide = load("build_guide")
figures = load("build_figures")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose(text: str) -> str:
    return FENCE.sub("", text)


# What the commands print


def same_but_for_rounding(shown: str, printed: str) -> bool:
    """Equal words in the same lines, and numbers that differ by a forward pass's rounding."""

    def words(text: str) -> list[list[str]]:
        lines = NUMBER.sub("#", text).splitlines()
        return [re.sub(r"[─\s]+", " ", line).split() for line in lines]

    def numbers(text: str) -> list[float]:
        return [float(n.replace("−", "-")) for n in NUMBER.findall(text)]

    return words(shown) == words(printed) and all(
        math.isclose(a, b, rel_tol=ROUNDING, abs_tol=ROUNDING)
        for a, b in zip(numbers(shown), numbers(printed), strict=True)
    )


def quick_or_slow(page: Path) -> object:
    """The plan of a model of 70B takes a while."""
    marks = [pytest.mark.long] if page.name == "scaling.md" else []
    return pytest.param(page, marks=marks, id=str(page.relative_to(ROOT)))


@pytest.mark.parametrize("page", [quick_or_slow(page) for page in guide.pages()])
def test_a_page_shows_what_its_commands_print(page):
    shown = read(page)
    fresh = guide.with_demo_table(guide.refreshed(shown, guide.output_of))
    forward_pass = any("trace" in command for command in guide.commands(shown))
    agree = same_but_for_rounding(shown, fresh) if forward_pass else shown == fresh
    assert agree, f"{page.relative_to(ROOT)} is stale: run `make guide`"


def test_a_changed_word_or_number_is_stale_and_rounding_is_not():
    assert same_but_for_rounding("old  −0.1200\n──", "old −0.1201\n───")
    assert not same_but_for_rounding("old −0.1200", "old −0.1220")
    assert not same_but_for_rounding("old −0.12", "ref −0.12")
    assert not same_but_for_rounding("old −0.12", "old −0.12\nref −0.12")


def test_a_block_is_replaced_by_its_command_and_what_it_prints():
    page = "a\n<!-- output of: tether x -->\nold\n<!-- end -->\nb"
    expected = "a\n<!-- output of: tether x -->\n```console\n$ tether x\nnew\n```\n<!-- end -->\nb"
    assert guide.refreshed(page, lambda command: "new") == expected


def test_a_block_may_show_one_section_of_what_is_printed():
    page = "<!-- output of: tether x (section: Two) -->\n<!-- end -->"
    printed = "One\n  1\n\nTwo, here\n  2\n\nThree\n  3"
    assert guide.commands(page) == ["tether x"]
    assert guide.refreshed(page, lambda command: printed) == (
        "<!-- output of: tether x (section: Two) -->\n"
        "```console\n$ tether x\n…\nTwo, here\n  2\n…\n```\n<!-- end -->"
    )


def test_every_long_number_in_the_prose_is_printed_by_a_command():
    printed = " ".join(
        guide.output_of(command)
        for name in NAMES
        for command in guide.commands(read(ENGLISH / name))
    ).replace("−", "-")
    for name in NAMES:
        for number in re.findall(r"\d+\.\d{5,}", prose(read(ENGLISH / name))):
            assert number in printed, f"{name}: no command prints {number}"


def test_the_sums_done_in_the_prose_are_right():
    advantages = [0.155568, 0.132492, 0.108097, 0.093050, 0.077105, 0.049900]
    page = read(ENGLISH / "trust-regions.md")
    assert f"the mean advantage {sum(advantages) / 6:.4f}," in page
    assert f"1/0.886920 = {1 / 0.886920:.4f}," in page
    assert f"1/1.2 = {1 / 1.2:.4f}." in page
    assert f"1.125, {0.35 / 0.3:.3f}, 0.75 and 0.5" in page
    assert f"beyond r = {1 / 0.9:.3f}," in read(ENGLISH / "clip.md")
    assert f"1 − 0.1 × 0.693147 = {1 - 0.1 * math.log(2):.6f}" in read(ENGLISH / "clip.md")
    assert f"A_5 = 0.0297 + 0.95 × 0.0499 = {0.0297 + 0.95 * 0.0499:.6f}" in read(
        ENGLISH / "advantages.md"
    )


# Two languages


def test_every_page_of_the_guide_has_a_chinese_one():
    assert sorted(path.name for path in CHINESE.glob("*.md")) == NAMES
    assert "index.md" in NAMES


@table("name", NAMES)
def test_both_languages_have_the_same_sections_numbers_commands_and_mistakes(name):
    english, chinese = read(ENGLISH / name), read(CHINESE / name)

    def levels(text: str) -> list[str]:
        return re.findall(r"^(#+) ", prose(text), re.MULTILINE)

    def decimals(text: str) -> list[str]:
        return sorted(re.findall(r"\d+\.\d+", prose(text)))

    def figures_of(text: str) -> list[str]:
        return re.findall(r"figures/([\w-]+)(?:\.zh)?\.svg", text)

    assert levels(english) == levels(chinese)
    assert decimals(english) == decimals(chinese)
    assert figures_of(english) == figures_of(chinese)
    assert english.count("**Common mistake") == chinese.count("**常见错误")
    assert guide.commands(english) == [
        command.removesuffix(" --lang zh") for command in guide.commands(chinese)
    ]


def test_the_chinese_readme_has_the_commands_of_the_english_one():
    def shell(text: str) -> list[str]:
        lines = [
            line
            for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
            for line in block.splitlines()
        ]
        return [line.partition("#")[0].strip() for line in lines]

    chinese = shell(read(ROOT / "README.zh-CN.md"))
    assert chinese[:2] == shell(read(ROOT / "README.md"))[:2] == ["make demo", "make test"]


# Links


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("dev/*.md")])


def anchors(text: str) -> set[str]:
    """What GitHub makes of the headings: lower case, no punctuation, hyphens for spaces."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE):
        kept = [c for c in heading.lower() if c in " -_" or unicodedata.category(c)[0] in "LNM"]
        found.add("".join(kept).strip().replace(" ", "-"))
    return found


def dead_links(document: Path) -> list[str]:
    dead = []
    for link in LINK.findall(prose(read(document))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path) if path else document
        if not target.exists() or (anchor and anchor not in anchors(read(target))):
            dead.append(link)
    return dead


@table("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_relative_link_is_dead(document):
    assert dead_links(document) == []


def test_every_page_ends_with_the_next_one():
    pages = [page for page in documents() if (ROOT / "docs") in page.parents]
    last = {str(page.relative_to(ROOT)): read(page).rstrip().splitlines()[-1] for page in pages}
    lost = [page for page, line in last.items() if not re.match(r"(Next: |下一页：).*\]\(", line)]
    assert lost == []
    titles = [re.search(r"^# (.+)$", read(page), re.MULTILINE).group(1) for page in pages]
    assert len(set(titles)) == len(titles)


def test_a_dead_link_and_a_dead_anchor_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A Head, here\n[a](#a-head-here) [b](#a-head) [c](gone.md) ![d](page.md) [e](https://x.y)\n"
        "```\n[f](code.md)\n```\n",
        encoding="utf-8",
    )
    assert dead_links(page) == ["#a-head", "gone.md"]


# Figures


@table(
    ("advantage", "ratio", "plain", "dual", "flat"),
    [
        (1.0, 0.5, 0.5, 0.5, False),
        (1.0, 2.0, 1.2, 1.2, True),
        (-1.0, 0.5, -0.8, -0.8, True),
        (-1.0, 1.5, -1.5, -1.5, False),
        (-1.0, 4.0, -4.0, -3.0, False),
    ],
)
def test_the_clip_figure_draws_the_worked_numbers(advantage, ratio, plain, dual, flat):
    drawn = figures.clipped_objective(torch.tensor([ratio], dtype=torch.float64), advantage)
    assert drawn.plain.item() == pytest.approx(plain)
    assert drawn.dual.item() == pytest.approx(dual)
    assert drawn.flat.item() is flat


def test_the_estimator_figure_shows_k1_and_k3_unbiased_and_k2_not():
    near, far = figures.estimators_at(0.1)[1], figures.estimators_at(2.0)[1]
    for estimates in (near, far):
        for name, estimate in estimates.items():
            error = estimate.true_spread / math.sqrt(figures.SAMPLES)
            assert abs(estimate.bias - estimate.true_bias) < 4 * error
            assert (abs(estimate.true_bias) < 1e-9) is (name != "k2")
    assert near["k1"].spread > 5 * near["k3"].spread
    assert far["k3"].spread > 2 * far["k1"].spread
    assert far["k2"].bias > 0.3


@table("start", list(figures.STARTS))
def test_the_adaptive_figure_ends_at_its_target_and_a_fixed_beta_does_not(start):
    kls, betas = figures.steer(start, controlled=True)
    assert kls[-1] == pytest.approx(figures.TARGET, rel=0.01)
    assert betas[-1] == pytest.approx(1.2, rel=0.02)
    kls, betas = figures.steer(start, controlled=False)
    assert abs(kls[-1] / figures.TARGET - 1) > 0.5
    assert set(betas) == {start}


@pytest.mark.long
def test_the_drawings_are_the_same_bytes_each_time(tmp_path, monkeypatch):
    drawn = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        monkeypatch.setattr(figures, "FIGURES", folder)
        figures.main()
        drawn.append({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 5


@table(("language", "name"), [("en", "data-flow.svg"), ("zh", "data-flow.zh.svg")])
def test_the_data_flow_on_disk_is_what_the_code_draws(language, name):
    data_flow = load("data_flow")
    drawing = data_flow.data_flow(language)
    assert read(figures.FIGURES / name) == drawing
    texts = [
        node.text for node in ElementTree.fromstring(drawing).iter() if node.tag.endswith("}text")
    ]
    assert len(texts) == 1 + sum(len(box.lines) for box in data_flow.BOXES)
    translated = set(data_flow.WORDS["zh"]) - {data_flow.TITLE}
    drawn = {line for box in data_flow.BOXES for line in box.lines} | {data_flow.AGAIN}
    assert translated <= drawn
