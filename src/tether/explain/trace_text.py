"""A trace's record told in sections: each role's outputs, the token table, the objective."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tether.config import ESTIMATORS
from tether.explain.document import Section, Table, number
from tether.explain.words import Language, say

SHOWN_TERMS = 24  # of a sum

Say = Callable[..., str]


def tell_before(record: Mapping[str, Any], speak: Say) -> Section:
    return Section(speak("title_before"), [*_goal(record, speak), *_sums(record, "before", speak)])


def _goal(record: Mapping[str, Any], speak: Say) -> list[str]:
    """The recipe's objective, as a formula."""
    s = record["settings"]
    lines = [
        f"{speak('update')}{speak('colon')}{s['update']}.  L = Σ w·t,  t = {s['formula']}",
        "r = π_new / π_old,  L^CPI = Σ w·r·A;  "
        + speak("goal_weights", aggregation=s["aggregation"]),
    ]
    if s["rows"] > 1:
        lines.append(speak("goal_share", rows=s["rows"]))
    if s["entropy_coef"] or s["kl_in_loss_coef"]:
        lines.append(speak("goal_extra", entropy=s["entropy_coef"], kl=s["kl_in_loss_coef"]))
    return lines


def _sums(record: Mapping[str, Any], moment: str, speak: Say) -> list[str]:
    """L^CPI and the objective with the numbers put in, term by term."""
    terms, weights = record[moment], record["weights"]
    advantages = record["tokens"]["policy_advantages"]
    counts = record["tokens"]["response_mask"]
    cells = [t for t in range(len(weights)) if counts[t]]
    cpi = [f"{number(terms['ratio'][t])}·{_signed(advantages[t])}" for t in cells]
    counted = [weights[t] for t in cells]
    lines = [f"L^CPI = {_sum(cpi, counted, speak)} = {number(terms['l_cpi'])}"]
    if record["settings"]["surrogate"]:
        return lines
    parts = [_term(terms, advantages, t) for t in cells]
    return [*lines, f"L = {_sum(parts, counted, speak)} = {number(terms['objective'])}"]


def _term(terms: Mapping[str, Any], advantages: Sequence[float], t: int) -> str:
    """A token's term, as the smaller of two where it is."""
    if terms["clipped_terms"] is None or terms["verdicts"][t] == "clipped_dual":
        return _signed(terms["objective_terms"][t])
    unclipped = terms["objective_ratio"][t] * advantages[t]
    return f"min({number(unclipped)}, {number(terms['clipped_terms'][t])})"


def tell_after(record: Mapping[str, Any], speak: Say, explain: bool) -> Section:
    after, tokens, settings = record["after"], record["tokens"], record["settings"]
    columns: list[tuple[str, list[str], str]] = [
        (speak("ratio"), [number(x) for x in after["ratio"]], "what_ratio"),
    ]
    if after["objective_ratio"] != after["ratio"]:
        ratios = [number(x) for x in after["objective_ratio"]]
        columns.append((speak("sequence_ratio"), ratios, "what_ratio"))
    columns += [
        ("A", [number(x) for x in tokens["policy_advantages"]], "what_policy_advantages"),
        ("r·A", [number(x) for x in after["cpi_terms"]], "what_cpi"),
    ]
    clips = after["clipped_terms"] is not None
    if clips:
        held = [number(x) for x in after["clipped_terms"]]
        columns.append(("clip·A", held, "what_clipped_term"))
    objective = [number(x) for x in after["objective_terms"]]
    columns.append(("min" if clips else speak("term"), objective, _what_term(clips)))
    if settings["bound"] is not None:
        verdicts = [speak(f"verdict_{v}") for v in after["verdicts"]]
        columns.append((speak("clipped"), verdicts, ""))
    if record["new_values"] is not None:
        values = [number(x) for x in record["new_values"]]
        columns.append((speak("new_value"), values, "what_new_values"))

    rows = [[speak("token"), *(heading for heading, _, _ in columns)]]
    for t, text in enumerate(tokens["response_tokens"]):
        counts = tokens["response_mask"][t]
        rows.append([text, *(cells[t] if counts else number(None) for _, cells, _ in columns)])
    blocks: list[str | Table] = [_step(record, speak), Table(rows)]
    blocks += [
        speak(f"why_{verdict}", bound=settings["bound"])
        for verdict in dict.fromkeys(after["verdicts"])
        if verdict not in ("no_bound", "masked")
    ]
    blocks += _sums(record, "after", speak)
    if explain:
        legend = [[h, cells[-1], speak(what)] for h, cells, what in columns if what]
        blocks.append(speak("in_words") + speak("at_token", token=rows[-1][0]))
        blocks.append(Table([[speak("name"), speak("values_of"), ""], *legend], numbers_from=3))
    learns = record["new_values"] is not None
    return Section(speak("title_after" if learns else "title_after_actor"), blocks)


def _what_term(clips: bool) -> str:
    return "what_term" if clips else "what_objective"


def _step(record: Mapping[str, Any], speak: Say) -> str:
    settings, metrics = record["settings"], record["metrics"]
    critic = ""
    if "critic/grad_norm" in metrics:
        critic = speak(
            "step_critic",
            lr=f"{settings['critic_lr']:g}",
            loss=number(metrics["critic/vf_loss"]),
            norm=number(metrics["critic/grad_norm"]),
        )
    norm = number(metrics.get("actor/grad_norm"))
    lr = f"{settings['actor_lr']:g}" if "actor/lr" in metrics else "–"
    return speak("step", actor_lr=lr, norm=norm, critic=critic)


def _sum(terms: list[str], weights: Sequence[float], speak: Say) -> str:
    """All terms of a short sum, of a long one both ends; a weight that all share stands before."""
    if not terms:
        return "0"
    shared = len(set(weights)) == 1
    if not shared:
        terms = [f"{number(w)}·{term}" for w, term in zip(weights, terms, strict=True)]
    if len(terms) > SHOWN_TERMS:
        half = SHOWN_TERMS // 2
        left_out = f"… ({speak('more_terms', count=len(terms) - 2 * half)}) …"
        terms = [*terms[:half], left_out, *terms[-half:]]
    added = " + ".join(terms)
    return f"{number(weights[0])}·({added})" if shared else added


def _signed(x: float) -> str:
    return f"({number(x)})" if x < 0 else number(x)


SHOWN_VALUES = 5  # of a tensor, beside its name; the token table has them all


def tell(record: Mapping[str, Any], language: Language, explain: bool) -> list[Section]:
    """In the order of the data flow; `explain` puts plain words beside the numbers."""

    def speak(key: str, **numbers: object) -> str:
        return say(key, language, **numbers)

    return [
        _heading(record, speak),
        *([_turns(record, speak)] if "turns" in record else []),
        *_roles(record, speak, explain),
        _token_table(record, speak, explain),
        *([_group(record, speak)] if record["settings"]["rows"] > 1 else []),
        tell_before(record, speak),
        tell_after(record, speak, explain),
        _notes(record, speak),
    ]


def _heading(record: Mapping[str, Any], speak: Say) -> Section:
    source = record["columns_source"]
    if source in ("typed", "sum"):
        source = speak(f"source_{source}")
    ended = f"finish_{record['finish_reason']}"
    columns = ", ".join(f"{name} = {value}" for name, value in record["columns"].items())
    rows = [
        [speak("model"), record["model"]],
        [speak("prompt"), record["prompt"]],
        [speak("response"), record["response"]],
        [speak("finish"), speak("given" if record["response_given"] else ended)],
    ]
    if columns:
        rows.append([speak("reward_given"), f"{columns}  ({source})"])
    return Section(speak("title_trace"), [speak("colon").join(row) for row in rows])


def _turns(record: Mapping[str, Any], speak: Say) -> Section:
    """What the policy wrote and what it was told, then every call."""
    paid = any("reward" in turn for turn in record["turns"])
    said = [[speak("turn_of"), speak("text"), *([speak("score")] if paid else [])]]
    for turn in record["turns"]:
        who = speak("by_policy" if turn["policy"] else "by_tool")
        given = [f"{turn['reward']:g}" if "reward" in turn else "–"] if paid else []
        said.append([who, turn["text"], *given])
    calls = [[speak("turn"), speak("tool"), speak("arguments"), speak("result")]]
    for call in record["calls"]:
        wrong = f"{speak('error')}{speak('colon')}{call['error']}" if call["error"] else ""
        result = wrong or call["result"] + (f"  ({speak('cut')})" if call["cut"] else "")
        calls.append([str(call["turn"]), call["name"], call["arguments"], result])
    blocks: list[str | Table] = [Table(said, numbers_from=2)]
    if record["calls"]:
        blocks.append(Table(calls, numbers_from=4))
    return Section(speak("title_turns"), blocks)


def _roles(record: Mapping[str, Any], speak: Say, explain: bool) -> list[Section]:
    """Every output of every role: its name, its shape, its first values."""
    tokens, shapes, settings = record["tokens"], record["shapes"], record["settings"]
    grid = shapes["rows_by_tokens"]

    def outputs(*entries: tuple[str, list[int], Sequence[Any] | None]) -> Table:
        rows = [[speak("name"), speak("shape"), speak("values_of")]]
        for name, shape, values in entries:
            rows.append([name, str(shape), _values(values)])
            if explain:
                rows.append(["", "", f"↳ {speak(f'what_{name}')}"])
        return Table(rows, numbers_from=3)

    def per_token(*names: str) -> Table:
        return outputs(*((name, grid, tokens[name]) for name in names))

    pieces = " ".join(f"[{piece}]" for piece in record["prompt_tokens"])
    return [
        Section(
            speak("title_actor"),
            [
                pieces,
                outputs(
                    ("prompt_ids", shapes["prompt_ids"], record["prompt_ids"]),
                    ("response_ids", shapes["response_ids"], tokens["response_ids"]),
                    ("response_mask", grid, [int(x) for x in tokens["response_mask"]]),
                    ("rollout_log_probs", grid, tokens["rollout_log_probs"]),
                    ("old_log_probs", grid, tokens["old_log_probs"]),
                ),
            ],
        ),
        Section(speak("title_reference"), [per_token("ref_log_probs")]),
        Section(
            speak("title_critic"),
            [
                outputs(
                    ("values", grid, tokens["values"]),
                    ("final_values", shapes["final_values"], [record["final_value"]]),
                )
            ],
        ),
        Section(
            speak("title_reward"),
            [
                outputs(
                    ("scores", shapes["scores"], [record["score"]]),
                    ("token_level_scores", grid, tokens["token_level_scores"]),
                ),
                *_extras(record, speak),
            ],
        ),
        Section(
            speak("title_shaping"),
            [
                f"β = {settings['beta']:g}, KL: {settings['kl_estimator']} = log π_old − log π_ref",
                per_token("kl", "token_level_rewards"),
            ],
        ),
        Section(
            speak("title_advantage"),
            [
                _advantage_formula(settings, speak),
                per_token("deltas", "advantages", "returns", "policy_advantages"),
            ],
        ),
    ]


def _extras(record: Mapping[str, Any], speak: Say) -> list[str | Table]:
    """What else the reward said, such as the words of a judge."""
    extras = record.get("score_extras", {})
    rows = [[name, str(value)] for name, value in extras.items()]
    return [Table([[speak("name"), speak("said")], *rows], numbers_from=2)] if rows else []


def _advantage_formula(settings: Mapping[str, Any], speak: Say) -> str:
    name = settings["estimator"]
    traits = ESTIMATORS[name]
    constants = f"γ = {settings['gamma']:g}" + (
        f", λ = {settings['lam']:g}" if traits.needs_critic else ""
    )
    if settings["critic_lam"] is not None:
        constants += f", λ(R) = {settings['critic_lam']:g}"
    return (
        f"{speak('estimator')}{speak('colon')}{name}.  {traits.formula};  R = A + V;  {constants}"
    )


COLUMNS = {  # of the token table: heading, list in the record, plain words
    "id": "response_ids",
    "old": "old_log_probs",
    "ref": "ref_log_probs",
    "kl": "kl",
    "score": "token_level_scores",
    "reward": "token_level_rewards",
    "value": "values",
    "delta": "deltas",
    "advantage": "advantages",
    "return": "returns",
}


def _token_table(record: Mapping[str, Any], speak: Say, explain: bool) -> Section:
    tokens = record["tokens"]
    rows = [[speak("token"), *map(speak, COLUMNS)]]
    for t, text in enumerate(tokens["response_tokens"]):
        cells = [str(tokens["response_ids"][t])]
        counts = tokens["response_mask"][t]
        names = list(COLUMNS.values())[1:]
        cells += [number(tokens[name][t] if counts else None) for name in names]
        rows.append([text, *cells])
    blocks: list[str | Table] = [Table(rows)]
    if explain:
        last = rows[-1]
        blocks.append(speak("in_words") + speak("at_token", token=last[0]))
        words = [speak("what_id"), *(speak(f"what_{n}") for n in list(COLUMNS.values())[1:])]
        legend = [list(cells) for cells in zip(rows[0][1:], last[1:], words, strict=True)]
        blocks.append(Table([[speak("name"), speak("values_of"), ""], *legend], numbers_from=3))
    return Section(speak("title_tokens"), blocks)


def _group(record: Mapping[str, Any], speak: Say) -> Section:
    heading = ["row", "response", "score", "sum_reward", "advantage"]
    rows = [[speak(name) for name in heading]]
    for i, row in enumerate(record["group"]):
        numbers = [number(row[name]) for name in ("score", "token_level_reward", "advantage")]
        rows.append([str(i), row["response"], *numbers])
    return Section(speak("title_group"), [Table(rows, numbers_from=2)])


def _notes(record: Mapping[str, Any], speak: Say) -> Section:
    settings = record["settings"]
    numbers = {name: settings[name] for name in ("seed", "rows", "estimator")}
    numbers["temperature"] = f"{settings['temperature']:g}"
    lines = [f"• {speak(note, **numbers)}" for note in record["notes"]]
    return Section(speak("title_notes"), [*lines, *(f"• {event}" for event in record["events"])])


def _values(values: Sequence[Any] | None) -> str:
    """The first few and the last, where the score is."""
    if values is None:
        return "–"
    shown = [str(x) if isinstance(x, int) else number(x) for x in values]
    if len(shown) > SHOWN_VALUES:
        shown = [*shown[: SHOWN_VALUES - 1], "…", shown[-1]]
    return " ".join(shown)
