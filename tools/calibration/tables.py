"""Questions about pasted data: tables, logs and notes, whose rows are drawn and whose answers are computed."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict

NAMES = [
    "Aiko",
    "Bruno",
    "Chidi",
    "Dana",
    "Emre",
    "Fatou",
    "Goran",
    "Hanna",
    "Iker",
    "Jia",
    "Katya",
    "Luca",
    "Mei",
    "Noor",
    "Olga",
    "Pavel",
]
ZH_NAMES = ["李敏", "王建国", "张晓雨", "陈涛", "刘思远", "赵婷", "周海", "吴倩", "孙立", "郑爽"]
ZH_GOODS = ["绿茶", "普洱", "茉莉花茶", "铁观音", "红茶", "白茶"]
TOPICS = {
    "harvest": (["apples", "pears", "plums", "quinces", "cherries"], "kilograms", "orchard"),
    "rides": (["tram", "bus", "ferry", "bicycle", "taxi"], "minutes", "district"),
    "readings": (["oxygen", "nitrate", "turbidity", "chloride", "iron"], "value", "well"),
    "sales": (["notebooks", "pencils", "folders", "ink", "stamps"], "pieces", "shop"),
    "shifts": (["kitchen", "counter", "delivery", "cleaning", "office"], "hours", "branch"),
}
FAULTS = [
    "connection reset by peer",
    "timed out after 30 s",
    "certificate has expired",
    "no space left on device",
    "duplicate key",
    "permission denied",
]
SERVICES = ["gateway", "billing", "search", "mailer", "thumbnails", "ledger", "login"]


def group_means(rng: random.Random) -> list[dict[str, str]]:
    topic = rng.choice(list(TOPICS))
    kinds, unit, place = TOPICS[topic]
    rows = [
        (rng.choice(NAMES), rng.choice(kinds), rng.randint(1, 4), rng.randint(2, 95))
        for _ in range(rng.randint(18, 26))
    ]
    pasted = "\n".join(",".join(map(str, row)) for row in [("person", "kind", place, unit), *rows])
    by_kind: dict[str, list[int]] = defaultdict(list)
    for _, kind, _, amount in rows:
        by_kind[kind].append(amount)
    ordered = sorted(by_kind.items(), key=lambda item: -sum(item[1]))
    table = "\n".join(
        f"| {kind} | {len(values)} | {sum(values)} | {sum(values) / len(values):.1f} |"
        for kind, values in ordered
    )
    people = Counter()
    for person, _, _, amount in rows:
        people[person] += amount
    (best, most), total = people.most_common(1)[0], sum(row[3] for row in rows)
    largest = max(rows, key=lambda row: row[3])
    reply = (
        f"| kind | rows | {unit} | mean |\n|---|---|---|---|\n{table}\n\nAltogether {total} {unit} in {len(rows)} rows. {best} has the most with {most}, "
        f"{100 * most / total:.0f} % of all. The largest single entry is {largest[0]}'s {largest[3]} for {largest[1]} in {place} {largest[2]}."
    )
    worst_kind, values = min(ordered, key=lambda item: sum(item[1]) / len(item[1]))
    follow = (
        f"By mean it is {worst_kind}, with {sum(values) / len(values):.1f} over {len(values)} row(s)."
        + (" With so few rows I would not conclude anything from it." if len(values) < 4 else "")
    )
    return [
        {
            "role": "user",
            "content": f"Summarise these {topic} by kind, and tell me who has the most.\n\n{pasted}",
        },
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "And which kind does worst on average?"},
        {"role": "assistant", "content": follow},
    ]


def log(rng: random.Random) -> list[dict[str, str]]:
    culprit, fault, start = rng.choice(SERVICES), rng.choice(FAULTS), rng.randint(0, 70000)
    lines, bad, first = [], 0, ""
    for number in range(rng.randint(22, 30)):
        start += rng.randint(1, 40)
        at = f"{start // 3600 % 24:02d}:{start // 60 % 60:02d}:{start % 60:02d}.{rng.randint(0, 999):03d}"
        if number > 6 and rng.random() < 0.35:
            lines.append(
                f"{at} ERROR {culprit}[{rng.randint(200, 999)}]: {fault} (request {rng.getrandbits(32):08x})"
            )
            bad, first = bad + 1, first or at
        else:
            service = rng.choice(SERVICES)
            lines.append(
                f"{at} INFO  {service}[{rng.randint(200, 999)}]: {rng.choice(['GET', 'PUT', 'POST'])} /{rng.choice(['items', 'users', 'carts', 'files'])}/{rng.randint(1, 9999)} {rng.choice([200, 200, 201, 204, 304])} {rng.randint(2, 380)} ms"
            )
    advice = {
        "connection reset by peer": "The other side closes the connection, often because it was idle for longer than its limit; compare both keep-alive times.",
        "timed out after 30 s": "Something it depends on is slow or gone. Look at that service's queue first, and not at the limit of 30 s.",
        "certificate has expired": "Renew the certificate and find out why the automatic renewal did not do it; restart the service if it reads the file only once.",
        "no space left on device": "Free some room, inodes included (`df -h` and `df -i`), and find what grows: usually logs, or files that were deleted and are still open.",
        "duplicate key": "Two writers create the same row, or a request is sent twice. Make the insert idempotent, with ON CONFLICT, before you remove anything.",
        "permission denied": "Somebody changed an owner or a role. Compare with the last deployment, and give the right back narrowly.",
    }[fault]
    body = "\n".join(lines)
    if not bad:
        reply = "There is no error in these lines; all requests ended with a status below 400. If something fails, it is in another time or another log."
    else:
        reply = f"All {bad} errors are of one kind and one service: **{culprit}** says \"{fault}\", for the first time at {first}. The other services answer normally in between, so neither the machine nor the network as a whole is down.\n\n{advice}\n\nTo see whether it has stopped: `grep -c '{fault}' app.log` now and again in five minutes."
    return [
        {"role": "user", "content": f"What is wrong here?\n\n```\n{body}\n```"},
        {"role": "assistant", "content": reply},
    ]


def extraction(rng: random.Random) -> list[dict[str, str]]:
    people = rng.sample(NAMES, 4)
    notes, made = [], []
    tasks = [
        "send the drawings",
        "call the insurer",
        "order the paint",
        "book the hall",
        "check the heating",
        "write the minutes",
        "return the keys",
        "ask for a second offer",
    ]
    for person, task in zip(people, rng.sample(tasks, 4)):
        day, hours = (
            rng.choice(["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]),
            rng.choice([1, 2, 3, 5]),
        )
        kind = rng.choice(
            [
                "{p} will {t} by {d}, that should take {h} hours.",
                "It was agreed that {p} has to {t} ({h} h at most), and before {d} evening.",
                "{t}: {p} takes that on, {d} is the last day, about {h} hours.",
                "On the question who could {t} nobody spoke for a while; then {p} said until {d} it would do, {h} hours or so.",
            ]
        )
        sentence = kind.format(p=person, t=task, d=day, h=hours)
        notes.append(sentence[0].upper() + sentence[1:])
        made.append({"person": person, "task": task, "due": day, "hours": hours})
    filler = rng.sample(
        [
            "The windows were discussed at length without a result.",
            "The chair thanked everybody for coming in spite of the snow.",
            "The coffee machine was mentioned again.",
            "Next meeting in two weeks, same room.",
            "There were no objections to the last minutes.",
        ],
        3,
    )
    text = " ".join(part for pair in zip(notes, [*filler, ""]) for part in pair if part)
    total = sum(one["hours"] for one in made)
    return [
        {
            "role": "system",
            "content": "Answer with JSON only: a list of objects with person, task, due and hours.",
        },
        {"role": "user", "content": f"Which tasks were given out?\n\n{text}"},
        {"role": "assistant", "content": json.dumps(made, indent=2)},
        {
            "role": "user",
            "content": "Now one object: the total of the hours, and the tasks by day.",
        },
        {
            "role": "assistant",
            "content": json.dumps(
                {
                    "hours": total,
                    "by_day": {
                        day: [one["task"] for one in made if one["due"] == day]
                        for day in dict.fromkeys(one["due"] for one in made)
                    },
                },
                indent=2,
            ),
        },
    ]


def zh_sales(rng: random.Random) -> list[dict[str, str]]:
    rows = [
        (
            rng.choice(ZH_NAMES),
            rng.choice(ZH_GOODS),
            rng.randint(1, 12),
            rng.choice([38, 56, 72, 88, 120, 168]),
        )
        for _ in range(rng.randint(14, 20))
    ]
    pasted = "\n".join(["店员,品种,数量,单价", *(",".join(map(str, row)) for row in rows)])
    by_person: Counter[str] = Counter()
    by_kind: Counter[str] = Counter()
    for person, kind, count, price in rows:
        by_person[person] += count * price
        by_kind[kind] += count * price
    total = sum(by_person.values())
    table = "\n".join(
        f"| {name} | {amount} | {100 * amount / total:.1f}% |"
        for name, amount in by_person.most_common()
    )
    (top, amount), (low, least) = by_kind.most_common()[0], by_kind.most_common()[-1]
    reply = f"按店员汇总如下：\n\n| 店员 | 销售额（元） | 占比 |\n|---|---|---|\n{table}\n\n合计 {total} 元，共 {len(rows)} 笔，平均每笔 {total / len(rows):.1f} 元。卖得最好的是{top}，{amount} 元；最少的是{low}，{least} 元。需要提醒的是，笔数不多，一两笔大单就能改变名次，建议至少看一个月的数据再下结论。"
    big = max(rows, key=lambda row: row[2] * row[3])
    return [
        {
            "role": "user",
            "content": f"这是茶叶店上周的流水，请按店员汇总销售额，再说说哪个品种卖得好。\n\n{pasted}",
        },
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "最大的一笔是哪一笔？"},
        {
            "role": "assistant",
            "content": f"是{big[0]}卖的{big[1]}，{big[2]} 份，单价 {big[3]} 元，合计 {big[2] * big[3]} 元，占上周总额的 {100 * big[2] * big[3] / total:.1f}%。",
        },
    ]


ENGLISH, CHINESE = (group_means, log, extraction), (zh_sales,)
