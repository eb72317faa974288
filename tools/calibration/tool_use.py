"""Conversations with tools: calls, their results, and what is said of them. The results are drawn and the replies are computed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]


def tool(name: str, description: str, required: list[str], **properties: str) -> dict[str, Any]:
    """properties: name -> "type: description"."""
    made = {
        key: dict(zip(("type", "description"), value.split(": ", 1)))
        for key, value in properties.items()
    }
    parameters = {"type": "object", "properties": made, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


WEATHER = tool(
    "get_forecast",
    "Weather forecast of a place for up to five days.",
    ["place"],
    place="string: Name of the place",
    days="integer: Number of days",
)
TRAINS = tool(
    "find_trains",
    "Connections between two stations.",
    ["origin", "destination"],
    origin="string: Station",
    destination="string: Station",
    after="string: Earliest departure, HH:MM",
)
STOCK = tool(
    "query_stock",
    "Articles in the warehouse.",
    [],
    article="string: Part of the name",
    below="integer: Only those with fewer pieces",
)
ORDER = tool(
    "place_order",
    "Order an article from its supplier.",
    ["article", "count"],
    article="string: Exact name",
    count="integer: Pieces",
)
CONVERT = tool(
    "convert_currency",
    "Convert an amount at today's rate.",
    ["amount", "source", "target"],
    amount="number: Amount",
    source="string: ISO code",
    target="string: ISO code",
)
FILES = tool(
    "search_files",
    "Search the text of all files of the project.",
    ["pattern"],
    pattern="string: Regular expression",
    folder="string: Where to look",
)
READ = tool(
    "read_file",
    "Lines of a file.",
    ["path"],
    path="string: Path",
    first="integer: First line",
    last="integer: Last line",
)
CALENDAR = tool(
    "list_events", "Events of a day in the user's calendar.", ["day"], day="string: YYYY-MM-DD"
)
CREATE = tool(
    "create_event",
    "Enter an event into the calendar.",
    ["title", "day", "begin", "end"],
    title="string: Title",
    day="string: YYYY-MM-DD",
    begin="string: HH:MM",
    end="string: HH:MM",
)

PLACES = [
    "Bergen",
    "Porto",
    "Graz",
    "Lublin",
    "Turku",
    "Ghent",
    "Bari",
    "Cork",
    "Brno",
    "Malmö",
    "Nice",
    "Ulm",
]
CITIES = ["成都", "厦门", "哈尔滨", "昆明", "西宁", "大连", "长沙", "兰州"]
GOODS = [
    "hex bolt M8",
    "wood glue 1 l",
    "paper filter no. 4",
    "LED lamp 9 W",
    "cable tie 200 mm",
    "safety goggles",
    "hand saw",
    "masking tape",
    "drill bit 6 mm",
    "work gloves L",
]


def call(name: str, **arguments: Any) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def result(name: str, value: Any) -> Message:
    return {"role": "tool", "name": name, "content": json.dumps(value, ensure_ascii=False)}


def say(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def weather(rng: random.Random) -> list[Message]:
    places = rng.sample(PLACES, 2)
    messages = [
        say(
            "user",
            f"I can spend the long weekend in {places[0]} or in {places[1]}. I want to walk and do not like rain. Which is better?",
        )
    ]
    rain = {}
    for place in places:
        days = [
            {
                "day": day,
                "low": (low := rng.randint(2, 15)),
                "high": low + rng.randint(4, 11),
                "rain_mm": rng.choice([0, 0, 0, 0.4, 1.2, 3.5, 8, 14.2]),
                "wind_kmh": rng.randint(4, 55),
            }
            for day in ("Fri", "Sat", "Sun", "Mon")
        ]
        rain[place] = days
        messages += [
            call("get_forecast", place=place, days=4),
            result("get_forecast", {"place": place, "days": days}),
        ]
    sums = {place: sum(day["rain_mm"] for day in days) for place, days in rain.items()}
    better = min(
        places, key=lambda place: (sums[place], max(day["wind_kmh"] for day in rain[place]))
    )
    other = next(place for place in places if place != better)
    lines = [
        f"- {day['day']}: {day['low']} to {day['high']} °C, {day['rain_mm']:g} mm, wind {day['wind_kmh']} km/h"
        for day in rain[better]
    ]
    dry = [day["day"] for day in rain[better] if day["rain_mm"] < 0.5]
    said = (
        f"**{better}.** Four days bring {sums[better]:g} mm there and {sums[other]:g} mm in {other}.\n\n"
        + "\n".join(lines)
    )
    said += (
        f"\n\nDry enough for a long walk: {', '.join(dry)}."
        if dry
        else "\n\nNo day is quite dry, though; take a jacket."
    )
    return [*messages, say("assistant", said)]


def zh_weather(rng: random.Random) -> list[Message]:
    city = rng.choice(CITIES)
    days = [
        {
            "day": f"{number}日",
            "low": (low := rng.randint(-4, 18)),
            "high": low + rng.randint(5, 12),
            "rain_mm": rng.choice([0, 0, 0.6, 4, 12]),
        }
        for number in range(12, 17)
    ]
    wet = [day for day in days if day["rain_mm"] >= 4]
    coldest = min(days, key=lambda day: day["low"])
    said = "未来五天：\n" + "\n".join(
        f"- {day['day']}：{day['low']} 到 {day['high']} 度，"
        + (f"降水 {day['rain_mm']} 毫米" if day["rain_mm"] else "无雨")
        for day in days
    )
    said += f"\n\n最冷的是{coldest['day']}早晨，{coldest['low']} 度。" + (
        f"{'、'.join(day['day'] for day in wet)}雨比较大，带伞，活动尽量放在室内。"
        if wet
        else "这几天没有大雨，不用带雨具。"
    )
    return [
        say("user", f"我后天到{city}出差五天，要带什么衣服？"),
        call("get_forecast", place=city, days=5),
        result("get_forecast", {"place": city, "days": days}),
        say("assistant", said),
    ]


def trains(rng: random.Random) -> list[Message]:
    origin, destination, via = rng.sample(PLACES, 3)
    latest = rng.randint(14, 18)
    found = []
    for _ in range(4):
        start, length, changes = (
            rng.randint(8 * 60, 13 * 60),
            rng.randint(130, 330),
            rng.randint(0, 2),
        )
        end = start + length
        found.append(
            {
                "departs": f"{start // 60:02d}:{start % 60:02d}",
                "arrives": f"{end // 60:02d}:{end % 60:02d}",
                "minutes": length,
                "changes": changes,
                "via": via if changes else None,
                "price": rng.randint(19, 96),
            }
        )
    fitting = [one for one in found if one["arrives"] <= f"{latest}:00"]
    messages = [
        say(
            "user",
            f"How do I get from {origin} to {destination} by train? I must be there by {latest}:00, and I would like to change as little as possible.",
        ),
        call("find_trains", origin=origin, destination=destination, after="08:00"),
        result("find_trains", {"connections": found}),
    ]
    if not fitting:
        return [
            *messages,
            say(
                "assistant",
                f"None of the four connections reaches {destination} by {latest}:00; the earliest arrives at {min(one['arrives'] for one in found)}. You would have to leave before 8 or the evening before. Shall I look for those?",
            ),
        ]
    best = min(fitting, key=lambda one: (one["changes"], one["price"]))
    cheap = min(fitting, key=lambda one: one["price"])
    said = (
        f"Take the {best['departs']} from {origin}: it arrives at {best['arrives']} after {best['minutes'] // 60} h {best['minutes'] % 60:02d}, "
        + (
            f"with {best['changes']} change(s) in {best['via']}"
            if best["changes"]
            else "without a change"
        )
        + f", and costs {best['price']}."
    )
    if cheap is not best:
        said += f" The {cheap['departs']} is cheaper by {best['price'] - cheap['price']}, but you change {cheap['changes']} time(s)."
    return [
        *messages,
        say(
            "assistant",
            said + f" {len(found) - len(fitting)} other connection(s) would come too late.",
        ),
    ]


def stock(rng: random.Random) -> list[Message]:
    limit = rng.choice([20, 30, 50])
    rows = [
        {
            "article": name,
            "pieces": rng.randint(0, limit - 1),
            "usual_order": rng.choice([50, 100, 200]),
            "price_cents": rng.randint(15, 2400),
        }
        for name in rng.sample(GOODS, 4)
    ]
    rows.sort(key=lambda row: row["pieces"])
    least = rows[0]
    cost = least["usual_order"] * least["price_cents"]
    lines = "\n".join(
        f"| {row['article']} | {row['pieces']} | {row['usual_order']} | {row['usual_order'] * row['price_cents'] / 100:.2f} |"
        for row in rows
    )
    whole = sum(row["usual_order"] * row["price_cents"] for row in rows)
    number = f"PO-{rng.randint(10000, 99999)}"
    return [
        say("user", f"What is running low? Anything under {limit} pieces."),
        call("query_stock", below=limit),
        result("query_stock", {"rows": rows}),
        say(
            "assistant",
            f"Four articles are below {limit}:\n\n| article | pieces | usual order | cost |\n|---|---|---|---|\n{lines}\n\nOrdering all of them costs {whole / 100:.2f}. {least['article']} is the most urgent with {least['pieces']} left. Shall I order it?",
        ),
        say("user", "Only that one, please, the usual number."),
        call("place_order", article=least["article"], count=least["usual_order"]),
        result(
            "place_order",
            {
                "order": number,
                "article": least["article"],
                "count": least["usual_order"],
                "total_cents": cost,
                "delivery_days": (days := rng.randint(2, 9)),
            },
        ),
        say(
            "assistant",
            f"Done: {least['usual_order']} x {least['article']} for {cost / 100:.2f}, order {number}, expected in {days} days. The other three are not ordered.",
        ),
    ]


def currency(rng: random.Random) -> list[Message]:
    amount, (source, target) = (
        rng.randint(20, 900) * 5,
        rng.sample(["EUR", "CHF", "NOK", "PLN", "JPY", "CNY", "CAD"], 2),
    )
    rate, fee = round(rng.uniform(0.11, 9.8), 4), rng.choice([1.5, 2, 2.5, 3])
    got = round(amount * rate, 2)
    return [
        say(
            "user",
            f"My hotel bill is {amount} {source}. How much is that in {target}, and what if my bank takes {fee} % for it?",
        ),
        call("convert_currency", amount=amount, source=source, target=target),
        result(
            "convert_currency",
            {"amount": amount, "source": source, "target": target, "rate": rate, "result": got},
        ),
        say(
            "assistant",
            f"{amount} {source} are {got:,.2f} {target} at today's rate of {rate}. With {fee} % on top it is {got:,.2f} * {1 + fee / 100:.3f} = {got * (1 + fee / 100):,.2f} {target}; the fee is {got * fee / 100:,.2f}.",
        ),
    ]


def code_search(rng: random.Random) -> list[Message]:
    name = rng.choice(
        [
            "parse_size",
            "retry_delay",
            "open_session",
            "to_cents",
            "merge_rows",
            "load_theme",
            "next_page",
            "round_half",
        ]
    )
    files = rng.sample(
        [
            "app/upload.py",
            "app/billing.py",
            "core/http.py",
            "core/text.py",
            "jobs/nightly.py",
            "web/views.py",
        ],
        3,
    )
    home, first = (
        rng.choice(["core/helpers.py", "core/base.py", "lib/common.py"]),
        rng.randint(12, 240),
    )
    hits = [{"path": home, "line": first, "text": f"def {name}(value, default=None):"}]
    hits += [
        {
            "path": path,
            "line": rng.randint(5, 300),
            "text": f"    found = {name}(request.get({json.dumps(rng.choice(['limit', 'size', 'total', 'page']))}))",
        }
        for path in files
    ]
    body = [
        f"def {name}(value, default=None):",
        "    if not value:",
        "        return default",
        "    return int(value)",
    ]
    return [
        say("user", f"Where is {name} used, and why does it return None for 0?"),
        call("search_files", pattern=rf"\b{name}\b"),
        result("search_files", {"matches": hits}),
        call("read_file", path=home, first=first, last=first + 3),
        result(
            "read_file",
            {
                "path": home,
                "lines": {str(first + number): line for number, line in enumerate(body)},
            },
        ),
        say(
            "assistant",
            f"It is defined in {home}, line {first}, and called in three places:\n\n"
            + "\n".join(f"- {hit['path']}:{hit['line']}" for hit in hits[1:])
            + f'\n\nThe check `if not value` on line {first + 1} is true for `None` and for an empty text, which is meant, and also for the number 0, which is not. Write what is meant:\n\n```python\ndef {name}(value, default=None):\n    if value is None or value == "":\n        return default\n    return int(value)\n```\n\nNone of the three callers passes a default, so each of them turns a 0 into None today.',
        ),
    ]


def calendar(rng: random.Random) -> list[Message]:
    day, length = f"2026-0{rng.randint(1, 9)}-{rng.randint(10, 28)}", rng.choice([30, 45, 60, 90])
    starts = sorted(rng.sample(range(9, 17), 4))
    events = [
        {"title": title, "begin": f"{hour:02d}:00", "end": f"{hour:02d}:{rng.choice([30, 45, 50])}"}
        for hour, title in zip(
            starts,
            rng.sample(
                [
                    "Stand-up",
                    "Dentist",
                    "Review with Lena",
                    "Budget",
                    "Call Osaka",
                    "Interview",
                    "Lunch with Paul",
                ],
                4,
            ),
        )
    ]
    busy = [
        (int(one["begin"][:2]) * 60, int(one["end"][:2]) * 60 + int(one["end"][3:]))
        for one in events
    ]
    at = 9 * 60
    for begin, end in busy:
        if begin - at >= length:
            break
        at = max(at, end)
    text = [f"{one // 60:02d}:{one % 60:02d}" for one in (at, at + length)]
    title = rng.choice(["Plan the move", "Talk with Ines", "Write the offer", "Test the pump"])
    return [
        say(
            "user",
            f'Find {length} minutes for "{title}" on {day}, as early as possible but not before nine, and enter it.',
        ),
        call("list_events", day=day),
        result("list_events", {"day": day, "events": events}),
        call("create_event", title=title, day=day, begin=text[0], end=text[1]),
        result("create_event", {"created": True, "id": f"ev{rng.randint(1000, 9999)}"}),
        say(
            "assistant",
            f'"{title}" is entered on {day} from {text[0]} to {text[1]}. Around it you have '
            + ", ".join(f"{one['title']} ({one['begin']} to {one['end']})" for one in events)
            + "; nothing had to be moved.",
        ),
    ]


SCENES: dict[Callable[[random.Random], list[Message]], list[dict[str, Any]]] = {
    weather: [WEATHER], zh_weather: [WEATHER], trains: [TRAINS], stock: [STOCK, ORDER], currency: [CONVERT], code_search: [FILES, READ], calendar: [CALENDAR, CREATE],
}  # fmt: skip


def conversation(
    rng: random.Random, long_enough: Callable[[list[Message]], bool]
) -> tuple[list[Message], list[dict[str, Any]]]:
    """Scenes until it is long enough, with their tools and some that are not needed."""
    messages: list[Message] = []
    scenes = rng.sample(list(SCENES), len(SCENES))
    needed: list[dict[str, Any]] = []
    while not long_enough(messages):
        scene = scenes.pop()
        messages += scene(rng)
        needed += SCENES[scene]
    others = [one for tools in SCENES.values() for one in tools if one not in needed]
    tools = needed + rng.sample(others, min(2, len(others)))
    rng.shuffle(tools)
    return messages, [one for number, one in enumerate(tools) if one not in tools[:number]]
