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


def info_advice(result: Sequence[Mapping[str, Any]]) -> Lines:
    """A line an advice with a command."""
    yield from head(["file", "samples/s before", "after", "times", "said, at least", "command"])
    for one in result:
        if one["gain"] is None:
            yield row([plain(one["name"]), "", "", "", "no advice", ""])
            continue
        said = "faster" if one["said"] is None else f"{one['said']:g}"
        cells = [
            number(one["before"]),
            number(one["after"]),
            number(one["gain"]),
            said,
            f"`{plain(one['command'])}`",
        ]
        yield row([plain(one["name"]), *cells])


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


FORMS: dict[str, Callable[[Any], Lines]] = {
    **dict.fromkeys(("arrays", "read_rows", "cold", "episodes"), line_a_section),
    **dict.fromkeys(
        ("text", "tables", "pack", "stream", "stream_zarr", "sparse_rows", "device"),
        table_a_section,
    ),
    "order": order,
    "memory": memory,
    "training": training,
    "modes": modes,
    "info_advice": info_advice,
    "profile_limits": profile_limits,
    "cache_policy": cache_policy,
    "monitoring": monitoring,
}
"""By the name of the benchmark."""
