"""Build the reference pages from the code: `python scripts/build_reference.py`.

They are docs/config.md, docs/metrics.md and docs/worked-examples.md, the last in Chinese too.

With --check nothing is written, and the exit code is 1 if a file on disk is stale.
"""

import argparse
import sys
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from tether.config import ESTIMATORS, AdvantageSection, Config, walk_fields
from tether.explain.example_sums import DISTRIBUTIONS
from tether.explain.examples import EXAMPLES, Example
from tether.explain.examples_text import number
from tether.explain.words import Language, say
from tether.run.glossary import EVALS, EVALS_ON_REQUEST, METRICS, TIMINGS, Entry

DOCS = Path(__file__).resolve().parent.parent / "docs"
MADE_BY = "<!-- Made by scripts/build_reference.py (`make docs`); edit the code, not this file. -->"

CONFIG_INTRO = """\
# Config reference

A recipe is a YAML mapping of the sections below. On the command line every field is
`--section.field VALUE`, and VALUE is read as YAML. Sections are in the order in which data flows
through them. Unknown fields are errors. How to use all this: [running](running.md).
"""

ESTIMATORS_INTRO = """\
The estimators: r is a token's reward and V its value, ′ marks the next token, s is the sum of a
response's token rewards and l its length; mean, std and Σ are over the responses to one prompt,
j ≠ i over the others, and argmax π is the greedy response. More about them:
[updates and estimators](updates.md).
"""

METRICS_INTRO = """\
# Metrics glossary

Every metric of a run, in the order in which data flows. Means per token are over the tokens
that the policy sampled, EOS included. All logarithms are natural, so KL and entropy are in nats.
"""

EXAMPLES_INTRO: dict[Language, str] = {
    "en": """\
# Worked examples

Explanations of PPO and of KL divergence often show numbers. Here are {count} of them with the right
answer and, beside it, what is often shown instead. `tether examples` computes each by the functions
that train, and fails if one is off by more than 1e-6. Where an explanation shows a number that no
formula gives, it is called illustrative, and the right answer is what the formula gives.
Logarithms are natural, so KL is in nats, unless bits are named. How to get there:
[PPO by numbers](guide/index.md). [中文版](zh/worked-examples.md)
""",
    "zh": """\
# 算例

讲解 PPO 和 KL 散度时常常举数字。这里有 {count} 个，写着正确答案，旁边是常见的错误写法。
`tether examples --lang zh` 用训练时的那些函数逐个重算，误差超过 1e-6 就报错。有些讲解里的数字
没有公式能算出来，这里称为“示意”，正确答案一栏是公式给出的数。除非注明比特，对数一律取自然对数，
KL 的单位是 nat。来龙去脉见[用数字读懂 PPO](guide/index.md)。[English](../worked-examples.md)
""",
}
EXAMPLES_HEADING: dict[Language, list[str]] = {
    "en": ["id", "example", "computed", "right", "a common mistake"],
    "zh": ["编号", "例子", "算什么", "正确答案", "常见错误"],
}

NEXT = {
    "config": "Next: [metrics glossary](metrics.md), the numbers that these fields lead to.\n",
    "metrics": "Next: [troubleshooting](troubleshooting.md), when they look wrong.\n",
    "en": "Next: [config reference](config.md), every field of a run.\n",
    "zh": "下一页：[配置字段](../config.md)（英文）。\n",
}

JSON_NAMES = {"array": "list", "object": "mapping"}  # as YAML's users say

METRIC_FILES = [
    (
        "metrics.jsonl",
        "One object per iteration, deterministic numbers only. `iteration` counts from 0.",
        METRICS,
    ),
    (
        "timings.jsonl",
        "One object per iteration: what depends on the machine and its load. `iteration` as above.",
        TIMINGS,
    ),
    (
        "evals.jsonl",
        "One object per evaluation on held-out prompts: `greedy` and `sampled` are objects with "
        "the fields below.",
        {**EVALS, **EVALS_ON_REQUEST},
    ),
]


def build() -> dict[Path, str]:
    """Each file's path and the text that belongs there."""
    return {
        DOCS / "config.md": config_page(),
        DOCS / "metrics.md": metrics_page(),
        DOCS / "worked-examples.md": examples_page("en"),
        DOCS / "zh" / "worked-examples.md": examples_page("zh"),
    }


def stale() -> list[Path]:
    """Files on disk that differ from what the code would write."""
    return [
        path
        for path, text in build().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


def config_page() -> str:
    parts = [MADE_BY, CONFIG_INTRO]
    for prefix, section in sections(Config):
        parts.append(f"## {heading(prefix, section)}\n\n{doc_line(section)}\n")
        schema = section.model_json_schema(by_alias=True)
        rows = [
            [f"`{prefix}{name}`", *describe(property_of(schema, name)), default_of(info), doc(info)]
            for name, info in walk_fields(section)
            if "." not in name
        ]
        if rows:
            parts.append(table(["field", "type", "range", "default", "meaning"], rows))
        if section is AdvantageSection:
            parts.append(ESTIMATORS_INTRO)
            parts.append(
                table(["estimator", "formula", "whitened", "needs", "paper"], estimators())
            )
    return "\n".join([*parts, NEXT["config"]])


def estimators() -> list[list[str]]:
    """The rows of the table of advantage estimators."""
    rows = []
    for name, traits in ESTIMATORS.items():
        needs = {
            "a critic": traits.needs_critic,
            "one greedy response per prompt": traits.needs_greedy,
            "`samples_per_prompt` ≥ 2": traits.by_group,
        }
        needed = ", ".join(words for words, needed in needs.items() if needed) or "nothing"
        whitened = "yes" if traits.whitens else "no"
        rows.append([f"`{name}`", traits.formula, whitened, needed, traits.paper])
    return rows


def metrics_page() -> str:
    parts = [MADE_BY, METRICS_INTRO]
    for file, intro, entries in METRIC_FILES:
        parts.append(f"## `{file}`\n\n{intro}\n")
        parts.append(table(["name", "meaning", "how to read it"], glossary_rows(entries)))
    return "\n".join([*parts, NEXT["metrics"]])


def examples_page(language: Language) -> str:
    parts = [MADE_BY, EXAMPLES_INTRO[language].format(count=len(EXAMPLES))]
    for section, examples in groupby(EXAMPLES, key=lambda e: e.section):
        rows = [example_row(e, language) for e in examples]
        parts.append(f"## {say(f'title_{section}', language)}\n")
        parts.append(table(EXAMPLES_HEADING[language], rows))
    return "\n".join([*parts, NEXT[language]])


def example_row(example: Example, language: Language) -> list[str]:
    name = say(f"example_{example.name}", language)
    if example.section == "kl":
        p, q = (" ".join(f"{x:.3g}" for x in part) for part in DISTRIBUTIONS[example.name])
        name = say("colon", language).join((name, f"P = {p}, Q = {q}"))
    cells = [
        name,
        say(f"of_{example.quantity}", language),
        " ".join(number(x) for x in example.right).replace("-", "−"),
        say(f"mistake_{example.mistake}", language) if example.mistake else "",
    ]
    return [f"`{example.id}`", *(cell.replace("|", "\\|") for cell in cells)]


def glossary_rows(entries: dict[str, Entry]) -> list[list[str]]:
    return [
        [", ".join(f"`{part}`" for part in name.split(", ")), entry.meaning, entry.reading]
        for name, entry in entries.items()
    ]


def sections(section: type[BaseModel], prefix: str = "") -> list[tuple[str, type[BaseModel]]]:
    """Every section as (prefix of its fields, class), in order; each kind of an update is one."""
    found = [(prefix, section)]
    for name, info in section.model_fields.items():
        for part in (info.annotation, *get_args(info.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                found += sections(part, f"{prefix}{name}.")
    return found


def heading(prefix: str, section: type[BaseModel]) -> str:
    """A section's dotted name and, where it has several kinds, which."""
    if not prefix:
        return "Top level"
    kind = section.model_fields.get("kind")
    kinds = get_args(kind.annotation) if kind else ()
    return f"`{prefix.rstrip('.')}`" + (f", `kind: {kinds[0]}`" if len(kinds) == 1 else "")


def property_of(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """The JSON schema of one field of a section."""
    node = schema["properties"][name]
    return schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def describe(node: dict[str, Any]) -> tuple[str, str]:
    """A field's type and range in words."""
    options = [option for option in node.get("anyOf", [node]) if option.get("type") != "null"]
    option = options[0]
    values = option.get("enum", [option["const"]] if "const" in option else None)
    kinds = [JSON_NAMES.get(one.get("type", "object"), one.get("type")) for one in options]
    kind = " or ".join(kinds + ["null"] * (len(options) < len(node.get("anyOf", [node]))))
    if values is not None:
        return kind, ", ".join(f"`{value}`" for value in values)
    bounds = [
        f"{sign} {option[key]:g}"
        for key, sign in (
            ("exclusiveMinimum", ">"),
            ("minimum", "≥"),
            ("exclusiveMaximum", "<"),
            ("maximum", "≤"),
        )
        if key in option
    ]
    return kind, ", ".join(bounds)


def default_of(info: Any) -> str:
    if info.is_required():
        return "required"
    if info.default_factory is not None:
        return "by machine"  # it differs from machine to machine, the page must not
    match info.default:
        case None:
            return "`null`"
        case bool(value):
            return f"`{str(value).lower()}`"
        case tuple(values):
            return f"`{list(values)}`"
        case value:
            return f"`{value}`"


def doc(info: Any) -> str:
    return info.description.replace("|", "\\|")


def doc_line(section: type[BaseModel]) -> str:
    return " ".join((section.__doc__ or "").split())


def table(heading: list[str], rows: list[list[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a file is stale")
    if parser.parse_args().check:
        for path in (found := stale()):
            print(f"{path.relative_to(DOCS.parent)} is stale; run `make docs`.", file=sys.stderr)
        return 1 if found else 0
    for path in (found := stale()):
        path.parent.mkdir(exist_ok=True)
        path.write_text(build()[path], encoding="utf-8")
    print(f"{len(found)} of {len(build())} files written.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
