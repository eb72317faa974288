"""Programs about things that people keep records of: one description, written as Python, SQL, TypeScript, Go and JSON."""

from __future__ import annotations

import json
import random

# name, plural, what it is for, fields: name type, and examples of texts
THINGS = [
    ("Book", "books", "a school library", "title str, author str, pages int, acquired date, lent bool", "The Salt Road|Winter Maps|A Short Grammar of Birds"),
    ("Invoice", "invoices", "a joiner's workshop", "number str, customer str, net_cents int, issued date, paid bool", "R-2041|Hotel Linde|Parish of St Anne"),
    ("Sensor", "sensors", "a greenhouse", "label str, bay int, celsius float, read_at datetime, faulty bool", "north-03|seedlings|roof vent"),
    ("Patient", "patients", "a veterinary practice", "name str, species str, kilograms float, born date, chipped bool", "Mops|Frau Holle|Captain"),
    ("Shipment", "shipments", "a parcel depot", "code str, receiver str, grams int, sent_at datetime, express bool", "KX-77-20|Olsen & Sons|Lab 4"),
    ("Lesson", "lessons", "a music school", "pupil str, instrument str, minutes int, begins datetime, trial bool", "Jonas|viola|Aiko"),
    ("Plot", "plots", "an allotment club", "number int, tenant str, square_metres float, leased date, has_water bool", "Pereira|Novak|Okafor"),
    ("Flight", "flights", "a gliding club", "pilot str, glider str, minutes int, launched_at datetime, winch bool", "D-4711|Schmitt|Rao"),
    ("Recipe", "recipes", "a canteen", "title str, portions int, cents float, tried date, vegetarian bool", "Leek pie|Borscht|Red dal"),
    ("Ticket", "tickets", "a help desk", "subject str, reporter str, priority int, opened_at datetime, closed bool", "Printer on fire|VPN drops|New badge"),
    ("Specimen", "specimens", "a natural history museum", "catalogue str, species str, grams float, found date, on_show bool", "NHM-0031|Parus major|Ammonites"),
    ("Route", "routes", "a tram company", "line int, terminus str, kilometres float, since date, night bool", "Harbour|Old Mill|University"),
    ("Donation", "donations", "a food bank", "donor str, item str, kilograms float, received date, chilled bool", "Bakery Ruiz|apples|rice"),
    ("Match", "matches", "a table tennis league", "home str, guest str, sets int, played date, forfeited bool", "Blue Bats|TTC Oder|Lakeside II"),
    ("Server", "servers", "a small hosting company", "host str, rack str, cores int, booted_at datetime, drained bool", "ares-2|r17|hermes"),
    ("Vineyard", "vineyards", "a cooperative of growers", "village str, grape str, hectares float, planted date, organic bool", "Kaltern|Vernatsch|Riesling"),
    ("Episode", "episodes", "a radio archive", "title str, speaker str, seconds int, aired date, cleared bool", "Letters from Sea|Dr Amin|The Last Ferry"),
    ("Bridge", "bridges", "a road authority", "name str, river str, metres float, inspected date, restricted bool", "Kettle Bridge|Aare|Linth"),
    ("Loan", "loans", "a tool library", "tool str, member str, days int, lent_at datetime, returned bool", "belt sander|ladder|Ivana"),
    ("Sample", "samples", "a water laboratory", "site str, analyst str, nitrate float, taken_at datetime, repeated bool", "Well 9|M. Ito|Weir"),
]  # fmt: skip
PYTHON = {"date": "dt.date", "datetime": "dt.datetime"}
SQL = {
    "str": "text",
    "int": "integer",
    "float": "double precision",
    "bool": "boolean",
    "date": "date",
    "datetime": "timestamptz",
}
GO = {
    "str": "string",
    "int": "int",
    "float": "float64",
    "bool": "bool",
    "date": "time.Time",
    "datetime": "time.Time",
}
TS = {
    "str": "string",
    "int": "number",
    "float": "number",
    "bool": "boolean",
    "date": "string",
    "datetime": "string",
}


class Thing:
    def __init__(self, entry: tuple[str, str, str, str, str], rng: random.Random) -> None:
        self.name, self.plural, self.place, fields, texts = entry
        self.fields = [(part.split()[0], part.split()[1]) for part in fields.split(", ")]
        self.texts, self.rng = texts.split("|"), rng
        of = {
            kind: [name for name, one in self.fields if one == kind]
            for kind in ("str", "int", "float", "bool")
        }
        self.text, self.flag = of["str"][0], of["bool"][0]
        self.amount = [*of["float"], *of["int"]][0]
        self.when = next(name for name, kind in self.fields if kind in ("date", "datetime"))

    def value(self, kind: str) -> object:
        rng = self.rng
        day = f"20{rng.randint(19, 25)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
        made = {
            "str": rng.choice(self.texts),
            "int": rng.randint(1, 600),
            "float": round(rng.uniform(0.2, 90), 1),
            "bool": rng.random() < 0.4,
        }
        return made.get(
            kind,
            day
            if kind == "date"
            else f"{day}T{rng.randint(6, 21):02d}:{rng.randint(0, 59):02d}:00Z",
        )

    def rows(self, count: int) -> list[dict[str, object]]:
        return [{name: self.value(kind) for name, kind in self.fields} for _ in range(count)]


def python(thing: Thing) -> tuple[str, str]:
    t, rng = thing, thing.rng
    limit = rng.randint(2, 40)
    declared = "\n".join(f"    {name}: {PYTHON.get(kind, kind)}" for name, kind in t.fields)
    reads = {
        "int": "int({})",
        "float": "float({})",
        "bool": '{} == "yes"',
        "date": "dt.date.fromisoformat({})",
        "datetime": "dt.datetime.fromisoformat({})",
    }
    read = "\n".join(
        f"                {name}={reads.get(kind, '{}').format(f'row[{name!r}]')},"
        for name, kind in t.fields
    )
    code = f'''```python
import csv
import datetime as dt
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class {t.name}:
    """One of the {t.plural} of {t.place}."""

{declared}

    def __post_init__(self) -> None:
        if not self.{t.text}.strip():
            raise ValueError("{t.text} is empty")
        if self.{t.amount} < 0:
            raise ValueError(f"{t.amount} is negative: {{self.{t.amount}}}")


def read_{t.plural}(path: Path) -> list[{t.name}]:
    """Rows of a CSV file; the line is named where one is wrong."""
    found = []
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                found.append({t.name}(
{read}
                ))
            except (KeyError, ValueError) as error:
                raise ValueError(f"{{path}}, line {{number}}: {{error}}") from error
    return found


def {t.amount}_by_{t.text}({t.plural}: list[{t.name}]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for one in {t.plural}:
        if not one.{t.flag}:
            totals[one.{t.text}] += one.{t.amount}
    return dict(sorted(totals.items(), key=lambda item: -item[1])[:{limit}])
```'''
    question = rng.choice([
        f"I keep the {t.plural} of {t.place} in a CSV file. Write Python that reads it into dataclasses, checks the rows, and sums {t.amount} by {t.text}.",
        f"Python, please: a frozen dataclass for the {t.plural} of {t.place}, a reader for CSV that names the faulty line, and a total of {t.amount} per {t.text} without those that are {t.flag}.",
    ])  # fmt: skip
    return (
        question,
        code
        + f"\n\nThe check is in the class and not in the reader, so no {t.name} exists that breaks it. Those marked {t.flag} are left out of the totals, and the {limit} largest are returned.",
    )


def sql(thing: Thing) -> tuple[str, str]:
    t, rng = thing, thing.rng
    columns = ",\n".join(f"    {name} {SQL[kind]} NOT NULL" for name, kind in t.fields)
    rows = t.rows(rng.randint(3, 5))

    def literal(v: object) -> str:
        if isinstance(v, bool):
            return str(v).upper()
        return str(v) if isinstance(v, int | float) else "'" + str(v).replace("'", "''") + "'"

    inserted = ",\n".join(
        f"    ({', '.join(literal(row[name]) for name, _ in t.fields)})" for row in rows
    )
    months = rng.randint(3, 24)
    code = f"""```sql
CREATE TABLE {t.plural} (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
{columns},
    CHECK ({t.amount} >= 0)
);
CREATE INDEX ON {t.plural} ({t.text}, {t.when} DESC) WHERE NOT {t.flag};

INSERT INTO {t.plural} ({", ".join(name for name, _ in t.fields)}) VALUES
{inserted};

-- the latest of each {t.text}, with its share of the whole
SELECT {t.text}, {t.when}, {t.amount},
       round((100.0 * {t.amount} / sum({t.amount}) OVER ())::numeric, 1) AS percent
FROM (
    SELECT DISTINCT ON ({t.text}) {t.text}, {t.when}, {t.amount}
    FROM {t.plural}
    WHERE NOT {t.flag} AND {t.when} >= now() - interval '{months} months'
    ORDER BY {t.text}, {t.when} DESC
) AS latest
ORDER BY percent DESC NULLS LAST;
```"""
    question = f"Give me a Postgres table for the {t.plural} of {t.place} with a few rows, and a query for the latest one of each {t.text} in the last {months} months."
    return (
        question,
        code
        + f"\n\nDISTINCT ON keeps the first row of each {t.text} in the given order, here the newest. The index has the same order and leaves out rows where {t.flag} is true, as the query does.",
    )


def typescript(thing: Thing) -> tuple[str, str]:
    t = thing
    declared = "\n".join(f"  {name}: {TS[kind]};" for name, kind in t.fields)
    checks = "\n".join(f'    typeof value.{name} === "{TS[kind]}" &&' for name, kind in t.fields)[
        :-3
    ]
    code = f"""```ts
export interface {t.name} {{
{declared}
}}

function is{t.name}(value: any): value is {t.name} {{
  return (
    value !== null && typeof value === "object" &&
{checks}
  );
}}

export async function load{t.name}s(base: string, {t.text}: string, signal?: AbortSignal): Promise<{t.name}[]> {{
  const url = new URL("/{t.plural}", base);
  url.searchParams.set("{t.text}", {t.text});
  const response = await fetch(url, {{ signal, headers: {{ accept: "application/json" }} }});
  if (response.status === 404) return [];
  if (!response.ok) throw new Error(`${{url}}: ${{response.status}} ${{response.statusText}}`);
  const body: unknown = await response.json();
  if (!Array.isArray(body)) throw new TypeError("expected a list of {t.plural}");
  const wrong = body.findIndex((one) => !is{t.name}(one));
  if (wrong >= 0) throw new TypeError(`{t.plural}[${{wrong}}] has a missing or misshapen field`);
  return body.sort((a, b) => b.{t.when}.localeCompare(a.{t.when}));
}}
```"""
    question = f"And a typed client in TypeScript that loads {t.plural} of one {t.text}, newest first, and does not trust the server?"
    return (
        question,
        code
        + f"\n\nTimes are ISO strings, so comparing them as text orders them. `is{t.name}` runs on every element; a cast with `as {t.name}[]` would only have silenced the compiler.",
    )


def go(thing: Thing) -> tuple[str, str]:
    t = thing

    def camel(name: str) -> str:
        return "".join(part.capitalize() for part in name.split("_"))

    declared = "\n".join(f'\t{camel(name)} {GO[kind]} `json:"{name}"`' for name, kind in t.fields)
    code = f"""```go
package {t.plural}

import (
	"encoding/json"
	"errors"
	"net/http"
	"sort"
	"sync"
	"time"
)

type {t.name} struct {{
{declared}
}}

type Store struct {{
	mutex sync.RWMutex
	all   []{t.name}
}}

var ErrEmpty = errors.New("{t.text} is empty")

func (s *Store) Add(one {t.name}) error {{
	if one.{camel(t.text)} == "" {{
		return ErrEmpty
	}}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	at := sort.Search(len(s.all), func(i int) bool {{ return s.all[i].{camel(t.when)}.Before(one.{camel(t.when)}) }})
	s.all = append(s.all, {t.name}{{}})
	copy(s.all[at+1:], s.all[at:])
	s.all[at] = one
	return nil
}}

func (s *Store) Since(moment time.Time) []{t.name} {{
	s.mutex.RLock()
	defer s.mutex.RUnlock()
	end := sort.Search(len(s.all), func(i int) bool {{ return s.all[i].{camel(t.when)}.Before(moment) }})
	return append([]{t.name}(nil), s.all[:end]...)
}}

func (s *Store) ServeHTTP(w http.ResponseWriter, r *http.Request) {{
	if r.Method != http.MethodPost {{
		w.Header().Set("Allow", http.MethodPost)
		http.Error(w, "only POST", http.StatusMethodNotAllowed)
		return
	}}
	var one {t.name}
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<16))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&one); err != nil {{
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}}
	if err := s.Add(one); err != nil {{
		http.Error(w, err.Error(), http.StatusUnprocessableEntity)
		return
	}}
	w.WriteHeader(http.StatusCreated)
}}
```"""
    question = f"In Go I need a store in memory for the {t.plural} of {t.place}: sorted by {t.when}, safe for several goroutines, with a handler for POST."
    return (
        question,
        code
        + "\n\nThe list is kept sorted when something is added, so `Since` finds its end by bisection. It returns a copy: a caller who changes it must not change the store.",
    )


def schema(thing: Thing) -> tuple[str, str]:
    t, rng = thing, thing.rng
    kinds = {
        "str": {"type": "string", "minLength": 1},
        "int": {"type": "integer", "minimum": 0},
        "float": {"type": "number", "minimum": 0},
    }
    kinds |= {
        "bool": {"type": "boolean"},
        "date": {"type": "string", "format": "date"},
        "datetime": {"type": "string", "format": "date-time"},
    }
    made = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": t.name,
        "type": "object",
        "properties": {name: kinds[kind] for name, kind in t.fields},
        "required": [name for name, _ in t.fields],
        "additionalProperties": False,
    }
    good, bad = t.rows(2)
    bad.pop(rng.choice([name for name, _ in t.fields if name not in (t.amount, t.flag)]))
    bad[t.amount] = -3
    bad[t.flag] = "yes"
    missing = next(name for name, _ in t.fields if name not in bad)
    reply = "\n\n".join([
        f"```json\n{json.dumps(made, indent=2)}\n```",
        f"This one is valid:\n\n```json\n{json.dumps(good, indent=2)}\n```",
        f"And this one is not, for three reasons: `{missing}` is missing, `{t.amount}` is negative, and `{t.flag}` is a text:\n\n```json\n{json.dumps(bad, indent=2)}\n```",
        "Note that `format` is only a remark for most validators unless you switch its checking on, and that `additionalProperties: false` makes every later field a breaking change for old readers.",
    ])  # fmt: skip
    return (
        f"Write a JSON Schema for the {t.plural} of {t.place}, with an example that passes and one that does not.",
        reply,
    )


WRITERS = (python, sql, typescript, go, schema)


def conversation(rng: random.Random, index: int) -> list[dict[str, str]]:
    """Two writers on one thing; every pair of a thing and a first writer comes once before any comes again."""
    thing = Thing(THINGS[index % len(THINGS)], rng)
    first = WRITERS[(index // len(THINGS) + index) % len(WRITERS)]
    second = rng.choice([one for one in WRITERS if one is not first])
    messages = []
    for writer in (first, second):
        question, reply = writer(thing)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return messages
