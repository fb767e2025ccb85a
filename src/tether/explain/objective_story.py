"""The objective of a trace told: its formula, the numbers put in, what one update did to them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tether.explain.section import Section, Table, number

SHOWN_TERMS = 24  # of a sum

Say = Callable[..., str]


def tell_before(record: Mapping[str, Any], speak: Say) -> Section:
    return Section(speak("title_before"), [*_goal(record, speak), *_sums(record, "before", speak)])


def _goal(record: Mapping[str, Any], speak: Say) -> list[str]:
    """The recipe's objective, as a formula."""
    s = record["settings"]
    goal = speak(
        f"goal_{s['update']}",
        low=_bound(s["ratio_low"]),
        high=_bound(s["ratio_high"]),
        coef=_bound(s["penalty_coef"]),
        max_kl=_bound(s["max_kl"]),
    )
    if s["dual_clip"] is not None:
        goal += f" ({speak('goal_dual', bound=s['dual_clip'])})"
    lines = [
        f"{speak('update')}{speak('colon')}{goal}",
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
    if record["settings"]["update"] in ("cpi", "trpo"):
        return lines
    clipped, objective = terms["clipped_terms"], terms["objective_terms"]
    if record["settings"]["update"] in ("clip", "gspo") and not record["settings"]["dual_clip"]:
        used = [
            ratio * advantage
            for ratio, advantage in zip(terms["objective_ratio"], advantages, strict=True)
        ]
        parts = [f"min({number(used[t])}, {number(clipped[t])})" for t in cells]
    else:
        parts = [_signed(objective[t]) for t in cells]
    name = "L^CLIP" if record["settings"]["update"] == "clip" else "L"
    return [*lines, f"{name} = {_sum(parts, counted, speak)} = {number(terms['objective'])}"]


def tell_after(record: Mapping[str, Any], speak: Say, explain: bool) -> Section:
    after, tokens, settings = record["after"], record["tokens"], record["settings"]
    columns: list[tuple[str, list[str], str]] = [
        (speak("ratio"), [number(x) for x in after["ratio"]], "what_ratio"),
    ]
    if settings["update"] == "gspo":
        ratios = [number(x) for x in after["objective_ratio"]]
        columns.append((speak("sequence_ratio"), ratios, "what_ratio"))
    columns += [
        ("A", [number(x) for x in tokens["policy_advantages"]], "what_policy_advantages"),
        ("r·A", [number(x) for x in after["cpi_terms"]], "what_cpi"),
    ]
    clips = settings["update"] in ("clip", "gspo")
    if clips:
        held = [number(x) for x in after["clipped_terms"]]
        columns.append(("clip·A", held, "what_clipped_term"))
    objective = [number(x) for x in after["objective_terms"]]
    columns.append(("min" if clips else speak("term"), objective, _what_term(clips)))
    if settings["ratio_low"] is not None:
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
    blocks += [_why(verdict, settings, speak) for verdict in _occurring(after["verdicts"])]
    blocks += _sums(record, "after", speak)
    if explain:
        legend = [[h, cells[-1], speak(what)] for h, cells, what in columns if what]
        blocks.append(speak("in_words") + speak("at_token", token=rows[-1][0]))
        blocks.append(Table([[speak("name"), speak("values_of"), ""], *legend], numbers_from=3))
    learns = record["new_values"] is not None
    return Section(speak("title_after" if learns else "title_after_actor"), blocks)


def _what_term(clips: bool) -> str:
    return "what_term" if clips else "what_other_term"


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
    lr = "–" if settings["update"] == "trpo" else f"{settings['actor_lr']:g}"
    return speak("step", actor_lr=lr, norm=norm, critic=critic)


def _occurring(verdicts: Sequence[str]) -> list[str]:
    """Each verdict that needs a word, once."""
    return [v for v in dict.fromkeys(verdicts) if v not in ("no_clip", "masked")]


def _why(verdict: str, settings: Mapping[str, Any], speak: Say) -> str:
    low, high = _bound(settings["ratio_low"]), _bound(settings["ratio_high"])
    if settings["update"] == "cispo" and verdict.startswith("clipped"):
        return speak("why_cispo")
    if settings["update"] == "cispo" and verdict == "inside":
        return speak("why_weight", high=high)
    return speak(f"why_{verdict}", low=low, high=high, dual=_bound(settings["dual_clip"]))


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


def _bound(x: float | None) -> str:
    return "–" if x is None else f"{x:g}"
