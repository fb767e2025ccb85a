"""400 hostile texts, and runs that hold them in every place where text can stand.

What succeeds sets `pwned`, opens a dialog, asks another host or leaves an element behind.
"""

import json
from pathlib import Path

import yaml

JS = "window.pwned=1"
FAR = "//far.invalid/x"

TAGS = [
    f"<script>{JS}</script>",
    f"<ScRiPt data-pwned>{JS}//",
    f"</script><script>{JS}</script>",
    f"<script src={FAR}></script>",
    f"<script type=module>import '{FAR}'</script>",
    f"<img data-pwned src=x onerror={JS}>",
    f"<img data-pwned src={FAR}.png>",
    f"<img/data-pwned/src/onerror={JS}>",
    f"<image data-pwned href=x onerror={JS}>",
    f"<svg data-pwned onload={JS}>",
    f"<svg data-pwned><script>{JS}</script></svg>",
    f"<svg data-pwned><animate onbegin={JS} attributeName=x dur=1s>",
    f"<svg data-pwned><use href={FAR}#a></svg>",
    f"<svg data-pwned><a href='javascript:{JS}'><text y=9>press</text></a></svg>",
    f"<svg data-pwned><foreignObject><iframe srcdoc='<script>{JS}</script>'></foreignObject></svg>",
    f"<math data-pwned href='javascript:{JS}'>press</math>",
    f"<math><mtext><table><mglyph><style><img data-pwned src onerror={JS}>",
    f"<iframe data-pwned src='javascript:parent.{JS}'></iframe>",
    f"<iframe data-pwned srcdoc='&lt;script&gt;{JS}&lt;/script&gt;'></iframe>",
    f"<object data-pwned data='javascript:{JS}'></object>",
    f"<embed data-pwned src='javascript:{JS}'>",
    f"<a data-pwned href='javascript:{JS}'>press</a>",
    f"<a data-pwned href='data:text/html,<script>{JS}</script>'>press</a>",
    f"<a data-pwned href='{FAR}' ping='{FAR}'>press</a>",
    f"<form data-pwned action='javascript:{JS}'><button>press</button></form>",
    f"<button data-pwned formaction='javascript:{JS}'>press</button>",
    f"<input data-pwned autofocus onfocus={JS}>",
    f"<details data-pwned open ontoggle={JS}>",
    f"<video data-pwned><source onerror={JS}></video>",
    f"<audio data-pwned src=x onerror={JS}>",
    f"<body data-pwned onload={JS}>",
    f"<marquee data-pwned onstart={JS}>",
    f"<template data-pwned><script>{JS}</script></template>",
    f"<base data-pwned href={FAR}>",
    f"<link data-pwned rel=stylesheet href={FAR}.css>",
    f"<meta data-pwned http-equiv=refresh content='0;url=javascript:{JS}'>",
    f"<style data-pwned>@import '{FAR}.css';</style>",
    f"<style data-pwned>body{{background:url({FAR}.png)}}</style>",
    f'<div data-pwned style="background:url({FAR})">',
    f"<div data-pwned onpointerenter={JS} onmouseover={JS}>over</div>",
]
OTHER = [
    f"javascript:{JS}",
    f"java\tscript:{JS}",
    f"data:text/html;base64,PHNjcmlwdD4=,{JS}",
    f'" onmouseover="{JS}" data-pwned="',
    f"' onfocus='{JS}' autofocus data-pwned='",
    f"` onerror={JS} `",
    f"${{{JS}}}",
    f"{{{{constructor.constructor('{JS}')()}}}}",
    f"#{{{JS}}}",
    f"<%= {JS} %>",
    f"%{{x}}<a href='javascript:{JS}'>%{{y}}</a><extra><img src=x onerror={JS}></extra>",
    "<b>bold</b><br><sup>up</sup><span style='color:red' data-pwned>red</span>"
    f'<a href="javascript:{JS}" target="_self">plotly</a>',
    "$\\href{javascript:window.pwned=1}{x}$ $\\text{<img src=x onerror=window.pwned=1>}$",
    f"]]><script>{JS}</script><![CDATA[",
    f"<!--><script>{JS}</script-->",
    f"\u2028{JS}\u2029",
    f'"}};{JS};({{"a":"',
    f"*/{JS}/*",
    f"\\u003cscript\\u003e{JS}\\u003c/script\\u003e",
    f"&lt;script&gt;{JS}&lt;/script&gt;",
    f"%3Cscript%3E{JS}%3C/script%3E",
    "__proto__",
    "constructor",
    "\u202egnp.exe\u202c \u2066hidden\u2069",
    "\x1b[31mred\x1b[0m\x07\x08",
    "\u200b\ufeff\u00ad zero \U000e0041\U000e0042",
    "Z\u0351\u0352\u0353\u0354\u0355a\u0361\u0362l\u0489g\u0334o\u0335" * 3,
    "x" * 3000,
    "\ud800 alone",
    "#/run/../../etc/passwd?beta=1",
]
WRAPPERS = [
    "{}",
    "\0{}",
    '">{}',
    "'>{}",
    "</textarea></title></style></select>{}",
    "<svg><![CDATA[{}",
]


def payloads() -> list[str]:
    """Each its own text: plain, and broken out of attributes, comments and raw-text elements."""
    made = [wrapper.replace("{}", text) for text in [*TAGS, *OTHER] for wrapper in WRAPPERS]
    return list(dict.fromkeys(made))[:400]


def folder_name(payload: str) -> str:
    return payload.replace("/", "∕").replace("\0", "").replace("\ud800", "")[:60]


def make_runs(folder: Path, names: int = 6) -> list[str]:
    """Several runs of hostile names; the first one holds every payload everywhere."""
    texts = payloads()
    runs = [folder_name(text) for text in texts[:: len(texts) // names]][:names]
    for run in runs:
        (folder / run / "rollouts").mkdir(parents=True)
        write_run(folder / run, texts if run == runs[0] else texts[:12])
    return runs


def write_run(run: Path, texts: list[str]) -> None:
    printable = [text.replace("\ud800", "?") for text in texts]
    config = {"schema": 1, "actor": {"update": {"kind": printable[1]}}, "notes": printable}
    config |= {"stage": printable[2], "train": {"iterations": 9}, printable[3]: printable[4]}
    (run / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    names = dict.fromkeys(texts, 0.5)
    metrics = [{"iteration": i, "score/mean": 0.1 * i, **names} for i in range(4)]
    metrics.append({"iteration": 4, "score/mean": texts[5], "actor/entropy": texts[9]})
    write(run / "metrics.jsonl", metrics)
    write(
        run / "timings.jsonl", [{"iteration": i, "time/iteration": 1.0, **names} for i in range(4)]
    )
    numbers = {"mean": 0.5, "low": 0.4, "high": 0.6, "count": 9}
    evals = [
        {"iteration": i, "sampled": numbers, "greedy": {**numbers, "low": text}, text: text}
        if i % 2
        else {"iteration": text, "sampled": dict.fromkeys(numbers, text), "greedy": text}
        for i, text in enumerate(texts)
    ]
    write(run / "evals.jsonl", evals)
    write(
        run / "events.jsonl",
        [
            *(
                {"iteration": 1, "kind": text, "row": text, "message": text, "attempt": text}
                for text in texts
            ),
            {"iteration": 9, "kind": "failed", "row": None, "message": texts[7], "attempt": 1},
        ],
    )
    for iteration in (0, 4):
        write_heldout(run, iteration, texts)
    write(
        run / "rollouts" / "000002.jsonl", [row_of(i, text, [text]) for i, text in enumerate(texts)]
    )
    write(
        run / "rollouts" / "000003.jsonl",
        [row_of(0, "\n".join(texts), texts), row_of(1, texts[0], texts, holes=True)],
    )


def write_heldout(run: Path, iteration: int, texts: list[str]) -> None:
    """Held-out responses: a text in every field, and another one in the later evaluation."""
    (run / "evals").mkdir(exist_ok=True)
    lines = []
    for i, text in enumerate(texts):
        said = texts[(i + iteration) % len(texts)]
        answer = {"response": said, "finish_reason": said, "score": (i + iteration) % 3 / 2}
        answer |= {"score_parts": {said: said}, "score_extras": {said: said}}
        columns = {"answer": text, text: [text]} if i % 9 == 0 else {"answer": text}
        line = {"row": i, "prompt": text, "columns": columns}
        lines.append({**line, "greedy": answer, "sampled": answer if i % 2 else text})
    write(run / "evals" / f"{iteration:06d}.jsonl", lines)


def row_of(number: int, text: str, tokens: list[str], holes: bool = False) -> dict:
    cells = [0.1 * (i % 7) - 0.3 for i in range(len(tokens))]
    log_probs = [f"{who}_log_probs" for who in ("rollout", "old", "ref", "new")]
    rewards = ["token_level_scores", "token_level_rewards"]
    estimates = ["kl", "values", "advantages", "returns", "policy_advantages"]
    return {
        "iteration": 2,
        "row": number,
        "data_file": text,
        "data_line": 1,
        "columns": {"answer": text, "further": {"deep": [text]}},
        "score_parts": {"part": 0.5},
        "score_extras": {"said": text},
        "prompt": text,
        "response": text,
        "finish_reason": text,
        "score": text if number % 5 == 4 else 1.0,
        "usable": True,
        "greedy_score": 0.0,
        "beta": 0.1,
        "whitening": {"mean": 0.0, "variance": 1.0, "count": 9},
        "final_value": 0.0,
        "prompt_ids": [1],
        "response_ids": list(range(len(tokens))),
        "response_tokens": tokens,
        "response_mask": [not holes or i % 3 != 0 for i in range(len(tokens))],
        **dict.fromkeys([*log_probs, *rewards, *estimates], cells),
        **(turns_of(tokens) if holes else {}),
    }


def turns_of(texts: list[str]) -> dict:
    """A row's turns and calls, with a text in every field and things that are neither."""
    fields = ("turn", "name", "arguments", "result", "seconds", "cut", "error")
    failed = [dict.fromkeys(fields, text) for text in texts]
    fine = [{**call, "error": None} for call in failed]
    turns = [{"policy": bool(i % 3), "text": text} for i, text in enumerate(texts)]
    return {"turns": [*turns, texts[0], None], "calls": [*failed, *fine, texts[0], None]}


def write(path: Path, records: list[dict]) -> None:
    lines = [json.dumps({"schema": 1, **record}) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
