"""The forms of the tables in docs/: Markdown of what each benchmark prints with `--json`.

Races (`common.run_sections`) have one of three: a column a section, which is that of all that
`FORMS` doesn't name; a line a section, where there are many with the same contestants; and a table
a section, where contestants differ or give more than a speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Lines = Iterator[str]
ORDERS = ("shuffled", "sequential", "weighted", "with replacement")


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def head(cells: Sequence[str]) -> Lines:
    """The names of the columns; all but the first are aligned as numbers."""
    yield row(cells)
    yield "|---|" + "--:|" * (len(cells) - 1)


def number(value: float | None) -> str:
    """Three digits, or all before the point; "" for None."""
    if value is None:
        return ""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.3f}"


def spread(values: Mapping[str, float], unit: str = "") -> str:
    """The median, and from the lowest to the highest."""
    return f"{number(values['median'])}{unit} ({number(values['min'])} to {number(values['max'])})"


def spread_of(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def size(nbytes: float | None) -> str:
    """Bytes in decimal units."""
    if nbytes is None:
        return ""
    scale, unit = next(
        (
            (scale, unit)
            for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
            if nbytes >= scale
        ),
        (1.0, "B"),
    )
    return f"{nbytes / scale:.3g} {unit}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    scale, unit = next(
        ((scale, unit) for scale, unit in ((1.0, "s"), (1e-3, "ms")) if seconds >= scale),
        (1e-6, "us"),
    )
    return f"{seconds / scale:.3g} {unit}"


def percent(share: float | None, digits: int = 0) -> str:
    return "" if share is None else f"{100 * share:.{digits}f} %"


def plain(text: str) -> str:
    """Text that stands in a cell."""
    return " ".join(text.split()).replace("|", "\\|")


# -- races


def speed(contestants: Mapping[str, Any], name: str) -> str:
    """The median, and from where to where; "" for one that was not there."""
    figures = contestants.get(name)
    if figures is None:
        return ""
    return spread(figures) if "median" in figures else plain(figures["failed"])


def ratio_of(figures: Mapping[str, Any]) -> str:
    """A ratio, with two decimals below 10."""
    if "at_least" in figures:
        return f"more than {figures['at_least']:,.0f}"
    digits = ",.0f" if figures["ratio"] >= 10 else ".2f"
    return f"{figures['ratio']:{digits}} ({figures['min']:{digits}} to {figures['max']:{digits}})"


def ratios(sections: Mapping[str, Any]) -> Lines:
    measured = [
        figures
        for section in sections.values()
        for figures in section["ratios"]
        if figures["ratio"] is not None
    ]
    if measured:
        yield from ("", *head(["ratio, median of those within each round", "", "to"]))
        yield from (
            row([plain(figures["label"]), ratio_of(figures), plain(figures["denominator"])])
            for figures in measured
        )


def names_of(sections: Mapping[str, Any]) -> list[str]:
    return list(
        dict.fromkeys(name for section in sections.values() for name in section["contestants"])
    )


def column_a_section(result: Mapping[str, Any]) -> Lines:
    """A line a contestant; then a line a ratio."""
    sections = result["sections"]
    yield from head(["", *(f"{title}, {section['unit']}" for title, section in sections.items())])
    for name in names_of(sections):
        yield row(
            [plain(name), *(speed(section["contestants"], name) for section in sections.values())]
        )
    yield from ratios(sections)


def line_a_section(result: Mapping[str, Any]) -> Lines:
    """A column a contestant; then the same for ratios, whose labels begin with the section's
    title.
    """
    sections = result["sections"]
    names = names_of(sections)
    units = " or ".join(dict.fromkeys(section["unit"] for section in sections.values()))
    yield from head([units, *map(plain, names)])
    for title, section in sections.items():
        yield row([plain(title), *(speed(section["contestants"], name) for name in names)])
    found = {
        title: {
            figures["label"].removeprefix(f"{title}: "): figures
            for figures in section["ratios"]
            if figures["ratio"] is not None
        }
        for title, section in sections.items()
    }
    labels = list(dict.fromkeys(label for of_section in found.values() for label in of_section))
    if labels:
        yield from ("", *head(["ratio, median of those within each round", *map(plain, labels)]))
        for title, of_section in found.items():
            yield row(
                [
                    plain(title),
                    *(
                        ratio_of(of_section[label]) if label in of_section else ""
                        for label in labels
                    ),
                ]
            )


def table_a_section(result: Mapping[str, Any]) -> Lines:
    """A line a contestant, with a column for each other figure that contestants give; then a
    line a ratio of all sections.
    """
    for place, (title, section) in enumerate(result["sections"].items()):
        contestants = section["contestants"]
        more = list(
            dict.fromkeys(
                name for figures in contestants.values() for name in figures.get("more", ())
            )
        )
        yield from ([""] if place else [])
        yield from head([plain(title), section["unit"], *more])
        for name, figures in contestants.items():
            others = (
                statistics.median(values) if (values := figures.get("more", {}).get(one)) else None
                for one in more
            )
            yield row([plain(name), speed(contestants, name), *map(number, others)])
    yield from ratios(result["sections"])


# -- benchmarks with a form of their own


def order(result: Mapping[str, Any]) -> Lines:
    """For each number of samples a line a peer, and a line a ratio."""
    clock = "CPU time" if result["arguments"]["clock"] == "cpu" else "time"
    for place, (samples, section) in enumerate(result["sizes"].items()):
        yield from ([""] if place else [])
        yield from head(
            [
                f"N = {int(samples):,}, {clock}",
                "first index",
                "us, blocks",
                "us, lists",
                "with start",
                "memory",
                "resume",
            ]
        )
        for name, rounds in section["peers"].items():

            def median(key: str, rounds: Sequence[Mapping[str, Any]] = rounds) -> float | None:
                values = [one[key] for one in rounds if key in one]
                return statistics.median(values) if values else None

            times = (
                "" if (value := median(key)) is None else f"{1e6 * value:.3f}"
                for key in ("block", "list", "epoch")
            )
            stopped = next(
                (f" (stopped: {one['stopped']})" for one in rounds if "stopped" in one), ""
            )
            yield row(
                [
                    plain(name + stopped),
                    duration(median("first")),
                    *times,
                    size(median("memory")),
                    duration(median("resume")),
                ]
            )
        if section["ratios"]:
            yield from (
                "",
                *head([f"N = {int(samples):,}: ratio, median of those within each round", ""]),
            )
            yield from (row([plain(one["label"]), ratio_of(one)]) for one in section["ratios"])
    if result["notes"]:
        yield from ("", *(f"* {plain(note)}" for note in result["notes"]))


def memory(result: Mapping[str, Any]) -> Lines:
    """A line a mode, number of workers, ranks and budget."""
    yield from head(
        [
            f"mode, {result['images']:,} images",
            "workers",
            "ranks",
            "shared",
            "budget",
            "of it",
            "taken",
            "samples held",
            "img/s",
        ]
    )
    for one in result["rows"]:
        start = [one["mode"], str(one["workers"]), str(one["ranks"]), one["shared"], one["budget"]]
        if one["refused"]:
            yield row([*start, "", "", "", plain(f"refused: {one['refused']}")])
            continue
        held = one.get("held")
        taken = [
            percent(one["of_budget"]),
            size(max(0, one["growth"])),
            "" if held is None else f"{held:,}",
        ]
        yield row([*start, *taken, number(one.get("samples_per_second"))])


def training(result: Mapping[str, Any]) -> Lines:
    """A line a mode: its speed in each epoch, and what the last one waited and lost."""
    modes, epochs = result["modes"], len(result["modes"][0]["img_per_s"])
    columns = [
        "mode",
        "start",
        *(f"epoch {number}, img/s" for number in range(1, epochs + 1)),
        "wait",
        "hits",
        "memory",
    ]
    yield from head([*columns, "loss"] if result["train"] else columns)
    for one in modes:
        cells = [
            one["mode"],
            duration(one["start_up_s"]),
            *map(number, one["img_per_s"]),
            percent(one["wait"]),
            percent(one["hits"]),
        ]
        cells.append(size(one["peak_bytes"]))
        yield row([*cells, f"{one['loss']:.6f}"] if result["train"] else cells)
    same = (
        "Losses and batches are the same in all modes."
        if result["train"] and not result["differences"]
        else ""
    )
    lines = [same] if same else [f"* {plain(line)}" for line in result["differences"]]
    if lines:
        yield from ("", *lines)


def modes(result: Mapping[str, Any]) -> Lines:
    base = result["all"]["plain DataLoader, same decode"]
    yield from head(
        [f"{result['workers']} workers", "img/s", "to the plain `DataLoader` with the same decode"]
    )
    for name, values in result["all"].items():
        within = [ours / theirs for ours, theirs in zip(values, base, strict=True)]
        ratio = spread_of(within)
        yield row(
            [plain(name), spread(spread_of(values)), ratio_of({**ratio, "ratio": ratio["median"]})]
        )


def profile_limits(result: Sequence[Mapping[str, Any]]) -> Lines:
    """A line a planted limit: in how many runs it was named, and its predictions kept."""
    yield from head(["planted", "named", "predictions kept", "predicted", "measured", "seconds"])
    for case in dict.fromkeys(one["case"] for one in result):
        runs = [one for one in result if one["case"] == case]
        named, kept = (
            f"{sum(one[key] for one in runs)} of {len(runs)}" for key in ("right", "kept")
        )
        gains = [
            f"{statistics.median(values):.2f}"
            if (values := [one[key] for one in runs if one[key] is not None])
            else ""
            for key in ("predicted", "measured")
        ]
        yield row(
            [
                plain(case),
                named,
                kept,
                *gains,
                number(statistics.median(one["seconds"] for one in runs)),
            ]
        )


def cache_policy(result: Mapping[str, Any]) -> Lines:
    """Hit rates: a line for each part that fits and each order."""
    columns = [
        f"{cache}, headrace, {who}" for cache in ("keep", "LRU") for who in ("shared", "a worker")
    ]
    yield from head(
        [
            "order",
            "fits",
            *(name.replace(", headrace", "") for name in columns),
            "no cache can pass",
        ]
    )
    for one in sorted(result["rows"], key=lambda one: ORDERS.index(one["order"])):
        rates = (percent(one[name], 1) for name in columns)
        yield row([one["order"], percent(one["held"]), *rates, percent(one["limit"])])


def monitoring(result: Mapping[str, Any]) -> Lines:
    yield from head(
        ["a batch of 32 samples", "counting it", "of that batch", "of a batch of 10 ms"]
    )
    shares = percent(result["share"], 1), percent(result["of_10_ms"], 2)
    yield row([f"{result['batch_us']:.0f} us", f"{result['counting_us']:.0f} us", *shares])


# -- the two benchmarks that write results/NAME.json themselves


def circumstances(data: Mapping[str, Any]) -> str:
    """Where and when it ran, in a line."""
    where = data["machine"]
    left_out = ("cores", "cpu", "python", "memory")
    rest = ", ".join(f"{name} {version}" for name, version in where.items() if name not in left_out)
    return (
        f"{data['date']}; {where['cores']} cores ({where['cpu']}), {where['memory']}; Python "
        f"{where['python']}, {rest}."
    )


def elastic_cell(key: str, row: Mapping[str, Any], notes: list[str]) -> str:
    """A cell of the table: samples missing, samples doubled, batches of a rank; or why there are
    none, by the number of its note.
    """
    if row.get("hangs"):  # large data takes its time
        return (
            f"not done in {row['seconds']:g} s"
            if key == "billion"
            else f"**hangs** ({row.get('at', 'at its start')})"
        )
    if "error" in row:
        message = f"{row['error']} (in {row['at']})"
        if message not in notes:
            notes.append(message)
        state = f"{row['state']:,} B; " if key == "billion" and "state" in row else ""
        return f"{state}error {notes.index(message) + 1}"
    if key == "billion":
        growth = row["growth"]
        # below that two runs of the same job differ anyway
        memory = "< 10 MB" if growth < 10e6 else size(growth)
        return f"{row['state']:,} B; {memory}"
    low, high = row["batches"]
    parts = [
        f"{row['missing']}",
        f"{row['doubled']}",
        f"{low}" if low == high else f"{low} to {high}",
    ]
    wrong = (row["missing"] > 0, row["doubled"] > row["padding"], low != high)
    return ", ".join(f"**{part}**" if bad else part for part, bad in zip(parts, wrong, strict=True))


def elastic_table(data: Mapping[str, Any], names: Sequence[str], notes: list[str]) -> Lines:
    """A row a change, a column a library."""
    peers = {name: data["peers"][name]["results"] for name in names}
    yield from head(["", *names])
    for key, title in data["changes"].items():
        cells = []
        for results in peers.values():
            cells.append(elastic_cell(key, results[key], notes) if key in results else "-")
        yield row([title, *cells])
    states = []
    for results in peers.values():
        fewer = results.get("fewer", {})
        states.append(f"{fewer['state']:,} ({fewer['states']})" if "state" in fewer else "-")
    yield row(["bytes of state, 8 ranks (states to keep)", *states])
    left = [results.get("killed", {}).get("left", 0) for results in peers.values()]
    if any(left):
        yield row(["names left in shared memory by the killed job", *map(str, left)])


def elastic(data: Mapping[str, Any]) -> Lines:
    """Two tables, since one of all libraries is wider than a page; then the errors."""
    notes: list[str] = []
    absent = {
        name: peer["missing_because"]
        for name, peer in data["peers"].items()
        if "missing_because" in peer
    }
    others = [name for name in data["peers"] if name not in absent and name != "headrace"]
    ours = [name for name in ("headrace",) if name in data["peers"]]
    half = (len(others) + 1) // 2
    yield from ("`python benchmarks/elastic.py`, " + circumstances(data), "")
    yield from elastic_table(data, [*ours, *others[:half]], notes)
    if others[half:]:
        yield from ("", *elastic_table(data, [*ours, *others[half:]], notes))
    yield ""
    yield from (f"{number}. ``{note}``" for number, note in enumerate(notes, start=1))
    yield from (f"* {name}: not run, {reason}" for name, reason in absent.items())


def entropies(data: Mapping[str, Any], batch: int) -> Lines:
    """Measured beside predicted, a row a chunk size, a column an interleave."""
    cells = {
        (row["chunk"], row.get("interleave")): f"{row['measured']:.2f} ({row['predicted']:.2f})"
        for row in data["entropy"]
        if row["batch"] == batch
    }
    full = cells.pop((1, None))
    interleaves = list(dict.fromkeys(interleave for _, interleave in cells))
    yield from head(["samples a chunk", *(f"interleave {number}" for number in interleaves)])
    for chunk in dict.fromkeys(chunk for chunk, _ in cells):
        yield row([f"{chunk:,}", *(cells[chunk, interleave] for interleave in interleaves)])
    yield row(["full shuffle", full, *[""] * (len(interleaves) - 1)])


def shuffling(data: Mapping[str, Any]) -> Lines:
    """Entropies, and what a model learns: medians with the lowest and highest of the seeds, and the
    median difference of each seed to a full shuffle.
    """
    full = data["training"][0]
    seeds = len(full["loss"])
    yield f"`python benchmarks/shuffling.py --seeds {seeds}`, {circumstances(data)}"
    for batch in dict.fromkeys(row["batch"] for row in data["entropy"]):
        yield from ("", f"Entropy in bits, batches of {batch}:", "", *entropies(data, batch))
    yield from ("", "What a model learns, 100 classes sorted in chunks of 64:", "")
    yield from head(["order", "test loss", "to a full shuffle, same seed", "macro F1"])
    for order in data["training"]:
        change = ""
        if order is not full:
            apart = [loss - other for loss, other in zip(order["loss"], full["loss"], strict=True)]
            change = f"{statistics.median(apart):+.3f} ({min(apart):+.3f} to {max(apart):+.3f})"
        yield row([order["order"], losses(order["loss"]), change, losses(order["f1"])])


def losses(figures: Sequence[float]) -> str:
    return f"{statistics.median(figures):.3f} ({min(figures):.3f} to {max(figures):.3f})"


WHOLE: dict[str, Callable[[Any], Lines]] = {"elastic": elastic, "shuffling": shuffling}
"""Forms with their own line of circumstances, by the name of the benchmark."""
FORMS: dict[str, Callable[[Any], Lines]] = {
    **dict.fromkeys(("arrays", "read_rows", "cold", "episodes"), line_a_section),
    **dict.fromkeys(("arrays_zarr", "others_stream"), table_a_section),
    **dict.fromkeys(
        ("text", "tables", "pack", "stream", "stream_zarr", "sparse_rows", "device"),
        table_a_section,
    ),
    "order": order,
    "memory": memory,
    "training": training,
    "modes": modes,
    "profile_limits": profile_limits,
    "cache_policy": cache_policy,
    "monitoring": monitoring,
}
"""By the name of the benchmark."""
