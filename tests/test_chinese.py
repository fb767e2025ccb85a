"""One set of Chinese terms everywhere: trace, examples, kl, the page, the guide.

token, nat, 比特, Actor, Critic, 参考模型, 提示词. Latin terms are not translated a second time,
stand apart from Chinese characters by a space, and take no English plural.
"""

import importlib.util
import re
from pathlib import Path

from helpers import table

import tether
from tether.algo.losses import POLICY_LOSSES
from tether.config import ESTIMATORS
from tether.config.algorithm import ActorSection
from tether.explain.document import Section
from tether.explain.examples_text import tell_examples
from tether.explain.kl_table import tell_exact, tell_samples
from tether.explain.words import WORDS

ROOT = Path(__file__).resolve().parent.parent
STATIC = Path(tether.__file__).parent / "view" / "static"
HAN = r"[\u4e00-\u9fff]"

ANOTHER_WORD_FOR = {
    **dict.fromkeys(("词元", "令牌", "标记符", "tokens"), "token"),
    **dict.fromkeys(("奈特", "纳特", "nats"), "nat"),
    **dict.fromkeys(("位元", "bits"), "比特"),
    **dict.fromkeys(("评论家", "评价者", "评论员"), "Critic"),
    **dict.fromkeys(("演员", "行动者"), "Actor"),
}
GLOSSES = ("token（词元）", "（策略模型）", "（价值模型）")  # said once, where a term is introduced
MODELS = {"策略模型": "Actor", "价值模型": "Critic"}  # names of a role only as a gloss


def text_of(sections: list[Section]) -> str:
    lines = []
    for section in sections:
        lines.append(section.title)
        for block in section.blocks:
            rows = [[block]] if isinstance(block, str) else block.rows
            lines += [" ".join(row) for row in rows]
    return "\n".join(lines)


def chinese_strings(source: str) -> str:
    """String literals with Chinese in them, one per line."""
    return "\n".join(s for s in re.findall(r'"((?:[^"\\]|\\.)*)"', source) if re.search(HAN, s))


def data_flow() -> str:
    path = ROOT / "scripts" / "data_flow.py"
    spec = importlib.util.spec_from_file_location("data_flow", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return "\n".join(module.WORDS["zh"].values())


OUTPUTS = {
    "words": lambda: "\n".join(re.sub(r"\{.*?\}", "0", zh) for _, zh in WORDS.values()),
    "examples": lambda: text_of(tell_examples("zh")),
    "kl": lambda: text_of(
        [
            tell_exact([0.5, 0.5], [1.0, 0.0], "zh"),
            tell_exact([0.8, 0.2], [0.7, 0.3], "zh"),
            tell_samples([0.8, 0.2], [0.7, 0.3], 100, 0, "zh"),
            tell_samples([0.5, 0.5], [1.0, 0.0], 100, 0, "zh"),
        ]
    ),
    "page": lambda: chinese_strings((STATIC / "words.js").read_text(encoding="utf-8")),
    "glossary": lambda: chinese_strings((STATIC / "glossary.js").read_text(encoding="utf-8")),
    "figure": data_flow,
}
DOCUMENTS = sorted([*ROOT.glob("docs/zh/**/*.md"), ROOT / "README.zh-CN.md"])


def prose(page: str) -> str:
    """The page without commands and their English output, code and addresses of links."""
    blocks = re.split(r"^```.*$", page, flags=re.MULTILINE)
    kept = [b for i, b in enumerate(blocks) if i % 2 == 0 or "--lang zh" in b]
    return re.sub(
        r"`[^`]*`|\]\([^)]*\)|<!--.*?-->|^    .*$", "", "\n".join(kept), flags=re.MULTILINE
    )


def strays(text: str, roles: bool) -> list[str]:
    """Words of another set of terms, as (found, what to write)."""
    for gloss in GLOSSES:
        text = text.replace(gloss, "")
    forbidden = ANOTHER_WORD_FOR | (MODELS if roles else {})
    return [
        f"{word}: write {term}"
        for word, term in forbidden.items()
        if re.search(rf"\b{word}\b" if word.isascii() else word, text)
    ]


def crowded(text: str) -> list[str]:
    """Latin terms without a space to the Chinese beside them."""
    term = r"(?:tokens?|nats?|Actor|Critic|KL|PPO|epoch|minibatch)"
    return re.findall(rf"{HAN}{term}\b|\b{term}{HAN}", text)


@table("name", OUTPUTS)
def test_output_keeps_to_one_set_of_terms(name):
    text = OUTPUTS[name]()
    assert re.search(HAN, text)
    assert strays(text, roles=True) == []
    assert crowded(text) == []


@table("page", DOCUMENTS, ids=lambda p: p.name)
def test_a_document_keeps_to_one_set_of_terms(page):
    text = prose(page.read_text(encoding="utf-8"))
    assert strays(text, roles="guide" in page.parts) == []
    assert crowded(text) == []


# Latin words that Chinese output may hold: terms, formulas, names of the code.
LATIN = {
    *("KL", "PPO", "EOS", "token", "nat", "tether", "epoch", "minibatch", "id", "Schulman"),
    *(
        "CPI",
        "CLIP",
        "clip",
        "log",
        "ln",
        "min",
        "max",
        "old",
        "ref",
        "new",
        "approx_kl",
        "pg_loss",
    ),
    *("vf_loss", "vf_clipfrac", "pg_clipfrac", "token_level_rewards", "masked_mean"),
}


@table("name", ["examples", "kl"])
def test_what_is_printed_in_chinese_holds_no_english_word(name):
    found = set(re.findall(r"[A-Za-z][A-Za-z_]+", OUTPUTS[name]()))
    found = {word.removeprefix("log").removeprefix("ln") or "log" for word in found}
    assert {word for word in found if len(word) > 1} - LATIN == set()


def test_formulas_are_symbols_in_every_language():
    """The trace and the page show them as they stand, also between Chinese words."""
    updates = [{"kind": kind} for kind in POLICY_LOSSES]
    updates += [{"dual_clip": 3.0}, {"kind": "dppo", "divergence": "kl"}]
    written = [traits.formula for traits in ESTIMATORS.values()]
    for update in updates:
        section = ActorSection(update=update).update
        written += [section.formula, section.bound or ""]
    found = set(re.findall(r"[A-Za-z]{2,}", " ".join(written)))
    assert found - LATIN == {"mean", "std", "exp", "argmax", "sg", "TV"}


def test_a_mixed_text_is_found_out():
    assert strays("每个词元 0.7 奈特", roles=True) == ["词元: write token", "奈特: write nat"]
    assert strays("3 bits", roles=True) == ["bits: write 比特"]
    assert strays("token（词元）和 token_level_rewards", roles=True) == []
    assert strays("价值模型学得慢", roles=True) == ["价值模型: write Critic"]
    assert crowded("每个token") == ["个token"]
    assert crowded("Actor学习率") == ["Actor学"]


TRANSLATED = ["running.md", "troubleshooting.md", "search.md"]


def code_blocks(page: str) -> list[str]:
    return re.findall(r"^```\w*\n.*?^```$", page, re.DOTALL | re.MULTILINE)


def figures(page: str) -> set[str]:
    """The numbers of a page's tables."""
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    return set(re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?%?", "\n".join(rows)))


@table("name", TRANSLATED)
def test_a_translated_page_has_the_code_the_figures_and_the_sections_of_the_english_one(name):
    english = (ROOT / "docs" / name).read_text(encoding="utf-8")
    chinese = (ROOT / "docs" / "zh" / name).read_text(encoding="utf-8")
    assert code_blocks(chinese) == code_blocks(english)
    assert figures(chinese) == figures(english)
    assert chinese.count("\n## ") == english.count("\n## ")
    assert f"(zh/{name})" in english
