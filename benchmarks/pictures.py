"""The pictures of the pages as SVG, light and dark, drawn from benchmarks/results/*.json.
`tables.py` writes them to docs/pictures.

Widths of text are not known here: a viewer takes its own font. A character counts as 0.6 of its
size, which is more than common fonts need.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from html import escape

from core import Cell, read

WIDTH = 560
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', 'Liberation Sans', Arial, sans-serif"
SIZE, SMALL = 16, 14
CHARACTER = 0.6


@dataclass(frozen=True)
class Theme:
    name: str
    ink: str
    muted: str
    line: str
    box: str
    ours: str
    theirs: str
    bound: str


THEMES = (
    Theme("light", "#1f2328", "#59636e", "#afb8c1", "#f6f8fa", "#1f5fa8", "#c7761a", "#818b98"),
    Theme("dark", "#e6edf3", "#9198a1", "#565d66", "#1a212a", "#5aa2f0", "#dd9a50", "#7d8590"),
)


@dataclass
class Drawing:
    """Elements in pixels from the upper left corner, WIDTH wide."""

    theme: Theme
    title: str
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = SIZE,
        colour: str = "",
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """Raises ValueError where the words may not fit into the picture."""
        width = len(words) * size * CHARACTER
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        if left < 0 or left + width > WIDTH:
            raise ValueError(f"{self.title}: no room for {words!r}")
        weight = ' font-weight="600"' if bold else ""
        fill = colour or self.theme.ink
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" '
            f'text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def bar(
        self, x: float, y: float, width: float, height: float, colour: str, opacity: float = 1
    ) -> None:
        faint = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{max(width, 1):.1f}" height="{height:g}" rx="2" '
            f'fill="{colour}"{faint}/>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, lines: Sequence[str], edge: str = ""
    ) -> None:
        """A box with a bold first line and small ones below. Raises ValueError where a line may not
        fit."""
        fill, stroke = self.theme.box, edge or self.theme.line
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" '
            f'stroke="{stroke}"/>'
        )
        top = y + height / 2 - (len(lines) - 1) * 9.5 + 5
        for row, words in enumerate(lines):
            size = SMALL if row else SIZE
            if len(words) * size * CHARACTER > width:
                raise ValueError(f"{self.title}: no room for {words!r} in its box")
            self.text(
                x + width / 2,
                top + 19 * row,
                words,
                size=size,
                anchor="middle",
                bold=not row,
                colour=self.theme.muted if row else "",
            )

    def arrow(self, x: float, y: float, to_y: float) -> None:
        """Downwards."""
        self.line(f"M{x:g} {y:g}V{to_y - 6:g}")
        self.parts.append(f'<path d="M{x - 5:g} {to_y - 7:g}h10l-5 7z" fill="{self.theme.muted}"/>')

    def line(self, path: str) -> None:
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{self.theme.muted}" stroke-width="1.5"/>'
        )

    def svg(self, height: float) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
            f'width="{WIDTH}" height="{height:g}" role="img"'
        )
        body = "\n".join(self.parts)
        return (
            f'{head} font-family="{FONT}">\n<title>{escape(self.title)}</title>\n{body}\n</svg>\n'
        )


@dataclass(frozen=True)
class Bar:
    """`value` is drawn whole and on to `up_to` faintly; `words` come after it."""

    label: str
    value: float
    words: str
    colour: str
    up_to: float = 0


def bars(drawing: Drawing, top: float, heading: str, rows: Sequence[Bar], full: float) -> float:
    """A group of horizontal bars under a heading; `full` is the value of the longest that fits.
    Returns where the next group may begin."""
    left = 10 + SMALL * CHARACTER * max(len(row.label) for row in rows)
    room = WIDTH - left - 8 - SMALL * CHARACTER * max(len(row.words) for row in rows)
    drawing.text(0, top + 16, heading, bold=True)
    for place, row in enumerate(rows):
        y = top + 28 + 24 * place
        drawing.text(left - 8, y + 13, row.label, size=SMALL, anchor="end")
        drawing.bar(left, y, room * row.value / full, 17, row.colour)
        if row.up_to > row.value:
            drawing.bar(left, y, room * row.up_to / full, 17, row.colour, 0.35)
        drawing.text(
            left + room * max(row.value, row.up_to) / full + 7, y + 13, row.words, size=SMALL
        )
    return top + 28 + 24 * len(rows) + 14


def number(cell: Cell) -> float:
    assert isinstance(cell, int | Decimal), cell
    return float(cell)


def pipeline(theme: Theme) -> str:
    """From the published checkpoint to engines and figures, with the sizes that `quantkit plan`
    gives for DeepSeek-R1."""
    plan = read("r1-plan")

    def gigabytes(column: str, scheme: str) -> str:
        return f"{number(plan.value(column, scheme=scheme)):.0f} GB"

    drawing = Drawing(
        theme,
        "quantkit: from the FP8 checkpoint to files that engines load, and to figures of what was "
        "lost",
    )
    drawing.box(
        130,
        1,
        300,
        54,
        ["DeepSeek-R1 as published", f"FP8 blocks, {gigabytes('source', 'awq-w4a16')}"],
    )
    drawing.arrow(280, 55, 80)
    steps = (
        "layer by layer, one expert at a time: decode, scale, round, pack",
        "a journal: a killed run goes on, to the same bytes",
    )
    drawing.box(
        8,
        80,
        544,
        92,
        ["quantkit quantize", *steps, "report.html: the error of every linear"],
        edge=theme.ours,
    )
    columns = (8, 195, 382)
    for x, scheme in zip(columns, ("awq-w4a16", "fp4-w4a16", "int8-a8w8c16")):
        drawing.arrow(x + 85, 172, 197)
        drawing.box(x, 197, 170, 54, [scheme, gigabytes("written", scheme)])
        drawing.line(f"M{x + 85} 251V264")
        drawing.arrow(x + 85, 264, 289)
    drawing.line(f"M{columns[0] + 85} 264H{columns[-1] + 85}")
    drawing.box(
        columns[0],
        289,
        170,
        92,
        ["quantkit run", "serve, bench", "on a CPU", "or NVIDIA GPUs"],
        edge=theme.ours,
    )
    drawing.box(
        columns[1],
        289,
        170,
        92,
        ["other engines", "vLLM, SGLang,", "vllm-ascend,", "omni-infer, chitu"],
    )
    drawing.box(
        columns[2],
        289,
        170,
        92,
        ["quantkit eval", "and ppl, next to the", "source: held, lost", "or cannot tell"],
        edge=theme.ours,
    )
    return drawing.svg(382)


def divergence(theme: Theme) -> list[Bar]:
    """KL of each scheme: the least over machines, and faintly up to the most."""
    spread = read("demo-spread")
    rows = []
    for name in dict.fromkeys(str(row[0]) for row in spread.rows):
        seen = sorted(
            (number(row[spread.position("KL")]), row[spread.position("KL")])
            for row in spread.rows
            if row[0] == name
        )
        (low, least), (high, most) = seen[0], seen[-1]
        colour = theme.bound if name == "rtn-w4a16" else theme.ours
        rows.append(
            Bar(name, low, f"{least} to {most}" if low < high else str(least), colour, high)
        )
    return rows


def sizes(theme: Theme, by_scheme: dict[str, Cell]) -> list[Bar]:
    return [
        Bar(
            "FP8 source" if name == "source" else name,
            number(size),
            str(size),
            theme.bound if name == "source" else theme.ours,
        )
        for name, size in by_scheme.items()
    ]


def schemes(theme: Theme) -> str:
    """KL of each scheme on tiny-r1 with its spread over machines, and sizes of DeepSeek-R1 and of
    tiny-r1."""
    demo, plan = read("demo"), read("r1-plan")
    small = {str(row[0]): row[demo.position("size")] for row in demo.rows}
    large = {
        name: plan.value("source", scheme="awq-w4a16")
        if name == "source"
        else plan.value("written", scheme=name)
        for name in small
    }
    groups = {
        "KL from the FP8 source, x1e-3 (tiny-r1, over machines)": divergence(theme),
        "DeepSeek-R1 on disk, GB (planned from its headers)": sizes(theme, large),
        "tiny-r1 on disk, MB": sizes(theme, small),
    }
    drawing = Drawing(theme, "KL from the source and size, by scheme")
    below = 0.0
    for heading, rows in groups.items():
        below = bars(drawing, below, heading, rows, max(max(row.value, row.up_to) for row in rows))
    return drawing.svg(below)


def timed(label: str, time: Cell, colour: str, about: str = "") -> Bar:
    return Bar(label, number(time), f"{about} {time} ms".strip(), colour)


def published(concurrency: int, colour: str) -> list[Bar]:
    """What others published at that many requests, the fastest first."""
    peers = read("published-decode")
    system, weights, devices, requests, time, about = map(
        peers.position, ("system", "weights", "devices", "requests", "TPOT", "about")
    )
    rows = sorted(
        (row for row in peers.rows if row[requests] == concurrency),
        key=lambda row: number(row[time]),
    )
    return [
        timed(
            f"{row[system]} {row[weights]}, {row[devices]}",
            row[time],
            colour,
            str(row[about] or ""),
        )
        for row in rows
    ]


def decode(theme: Theme) -> str:
    """Milliseconds a token of DeepSeek-R1 on one box, next to the floor of its bytes and what others
    published."""
    drawing = Drawing(theme, "Time per output token of R1-class models on one box, without guesses")
    below = 0.0
    for concurrency in (1, 8, 32):
        floor = read("r1-rank").value("floor", concurrency=concurrency, context=640)
        rows = [
            timed("floor: what it reads, once", floor, theme.bound),
            timed(
                "quantkit W4A16, 4 x H200",
                read("r1-box").value("TPOT", concurrency=concurrency),
                theme.ours,
            ),
            *published(concurrency, theme.theirs),
        ]
        heading = "1 request" if concurrency == 1 else f"{concurrency} requests at once"
        below = bars(drawing, below, heading, rows, max(row.value for row in rows))
    for line in (
        "Not like for like. Ours: synthetic weights of R1's shapes, without",
        "server and tokenizer. Theirs: as published, on other machines and",
        "lengths; TileRT's is another model.",
    ):
        drawing.text(0, below + 10, line, size=SMALL, colour=theme.muted)
        below += 19
    return drawing.svg(below + 4)


PICTURES: dict[str, Callable[[Theme], str]] = {
    "pipeline": pipeline,
    "schemes": schemes,
    "decode": decode,
}


def pictures() -> dict[str, str]:
    """SVG by file name: every picture in both themes."""
    return {
        f"{name}-{theme.name}.svg": draw(theme)
        for name, draw in PICTURES.items()
        for theme in THEMES
    }
