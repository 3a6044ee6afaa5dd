"""The running maximum and sum of a softmax, score by score, with the numbers a reader can check by hand."""

from __future__ import annotations

import math
from typing import NamedTuple

from .canvas import box, marker, path, picture, text, with_tip

SCORES = (1, 3, 2, 6, 5, 4)


class Step(NamedTuple):
    score: float
    most: float  # the running maximum
    factor: float  # what the sum so far is multiplied with
    term: float
    total: float  # the running sum


def steps(scores: tuple[float, ...] = SCORES) -> list[Step]:
    most, total, found = -math.inf, 0.0, []
    for score in scores:
        new = max(most, score)
        factor, term = math.exp(most - new), math.exp(score - new)
        most, total = new, total * factor + term
        found.append(Step(score, most, factor, term, total))
    return found


def draw() -> str:
    found = steps()
    left, width = 84.0, 45.5
    x = [left + width * (place + 0.5) for place in range(len(found))]
    body = [text(0, 14, "Online softmax: the running max and sum", "title")]
    body.append(text(0, 32, "A larger score shrinks the sum so far; nothing is read twice.", "quiet"))
    # Scores and their maximum so far
    low, high, top = 138.0, 54.0, max(SCORES)

    def height(value: float) -> float:
        return low - (low - high) * value / top

    body += [
        text(0, 58, "scores,"),
        text(0, 73, "max so far"),
        path(f"M{left} {low}H{left + width * len(x):g}", "axis"),
    ]
    line = "".join(
        f"{'M' if place == 0 else 'L'}{x[place] - width / 2:g} {height(one.most):.1f}h{width:g}"
        for place, one in enumerate(found)
    )
    body.append(f'<g class="s1">{path(line, "line")}</g>')
    body += [
        with_tip(f"score {one.score:g}, max {one.most:g}", marker(0, x[place], height(one.score)))
        for place, one in enumerate(found)
    ]
    # The sum: what is left of the old one, and the new term on it
    base, scale = 246.0, 46.0
    body += [text(0, 174, "sum so far,"), text(0, 189, "shrunk, and"), text(0, 204, "the new term")]
    body.append(path(f"M{left} {base}H{left + width * len(x):g}", "axis"))
    before = 0.0
    for place, one in enumerate(found):
        kept = before * one.factor * scale
        bars = box(x[place] - 13, base - kept, 26, kept, "s2", 0.25) if kept else ""
        bars += box(x[place] - 13, base - kept - one.term * scale, 26, one.term * scale, "s2", 0.75)
        body.append(with_tip(f"{before:.3f} x {one.factor:.3f} + {one.term:.3f} = {one.total:.3f}", bars))
        before = one.total
    rows = [
        ("score x", [f"{one.score:g}" for one in found], ""),
        ("max m", [f"{one.most:g}" for one in found], ""),
        ("factor", ["" if one.factor == 0 else f"×{one.factor:.2f}" for one in found], "quiet"),
        ("exp(x−m)", [f"+{one.term:.2f}" for one in found], "quiet"),
        ("sum l", [f"{one.total:.3f}" for one in found], "bold"),
    ]
    for row, (name, words, kind) in enumerate(rows):
        y = 268 + 18 * row
        body.append(text(0, y, name, kind))
        body += [text(x[place], y, word, kind, "middle") for place, word in enumerate(words) if word]
    whole = sum(math.exp(score - top) for score in SCORES)
    body.append(text(0, 362, f"In two passes, with the max {top:g} known before: {whole:.3f} too.", "quiet"))
    return picture("The running maximum and the running sum of a softmax over six scores", 370, body)
