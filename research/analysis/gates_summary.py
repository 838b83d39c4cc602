"""What `analyze.py gates` found, in words and tables: means over seeds, with intervals and what they allow to say.

A group is the runs of one setting and step, each with a seed of its own. Of one run, the interval of an edit is over
validation sequences: it covers the choice of the text. Of several, it is over their means: it covers the seed.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from evaluation import tables
from research import compare
from research.compare import Estimate
from research.runs import UNSHOWN

WORDS = {"worse": "the loss rises", "better": "the loss falls", "undecided": "no difference seen"}

GENERIC = {
    "write_size",
    "rank_state",
    "rank_direction",
    "cosine_tokens",
    "cosine_sites",
    "cosine_embedding",
}


@dataclass(frozen=True)
class Group:
    """Runs of one setting: their rows of statistics, each with its `effects`."""

    label: str
    rows: list[dict]

    @property
    def sites(self) -> list[tuple[int, str]]:
        return [(site["layer"], site["site"]) for site in self.rows[0]["sites"]]

    @property
    def kinds(self) -> list[str]:
        """Names of sites within a block."""
        return list(dict.fromkeys(name for _, name in self.sites))

    @cached_property
    def names(self) -> list[str]:
        """Of all statistics; those of the first sites come first."""
        return list(
            dict.fromkeys(name for site in self.rows[0]["sites"] for name in site["statistics"])
        )

    @cached_property
    def intervals(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Of the statistics that have shares: {statistic: {label: (low, high)}}."""
        sites = self.rows[0]["sites"]
        return {
            n: each["intervals"]
            for s in sites
            for n, each in s["statistics"].items()
            if "intervals" in each
        }

    def found(self, key: tuple[int, str], part: str, name: str) -> list[dict]:
        """Of each run, what `part`, statistics or details, has of this name at the site; nothing where it lacks it."""
        at = [next(s for s in row["sites"] if (s["layer"], s["site"]) == key) for row in self.rows]
        return [site[part][name] for site in at if name in site[part]]

    def field(
        self, key: tuple[int, str], name: str, field: str = "mean", inner: str = ""
    ) -> float | None:
        """The mean over runs of one number of a statistic at a site, None where it is not there."""
        values = [
            each[field][inner] if inner else each[field]
            for each in self.found(key, "statistics", name)
        ]
        return float(np.mean(values)) if values else None

    def over_sites(self, name: str, field: str = "mean", inner: str = "") -> Estimate:
        """The mean over sites of each run, and over runs."""
        return compare.interval(self.per_run(name, field, inner))

    @cached_property
    def edits(self) -> list[str]:
        return list(dict.fromkeys(effect["edit"] for effect in self.rows[0]["effects"]))

    def effect(self, layer: int | None, site: str, edit: str) -> Estimate | None:
        """The change in loss: over the windows of one run, or the means of several; None where it was not tried."""
        key = {"layer": layer, "site": site, "edit": edit}
        found = [
            effect
            for row in self.rows
            for effect in row["effects"]
            if key.items() <= effect.items()
        ]
        if not found:
            return None
        if len(self.rows) > 1:
            return compare.interval([effect["difference"] for effect in found])
        n = found[0]["windows"]
        error = np.inf if found[0]["standard_error"] is None else found[0]["standard_error"]
        return Estimate(found[0]["difference"], error, n - 1, n)

    def verdicts(self, edit: str) -> dict[tuple[int, str], tuple[Estimate, str]]:
        """Of every site that has the edit the change and a word for it, corrected for the number of sites (Holm)."""
        return worded({key: self.effect(*key, edit) for key in self.sites})

    @cached_property
    def at_once(self) -> dict[str, tuple[Estimate, str]]:
        """Of every edit at all sites at once the change and a word for it, corrected for the number of edits (Holm)."""
        return worded({edit: self.effect(None, "all", edit) for edit in self.edits})

    @property
    def over(self) -> str:
        return (
            f"{len(self.rows)} seeds"
            if len(self.rows) > 1
            else f"{self.rows[0]['sequences']} sequences"
        )

    def stored(self) -> dict:
        """Means over sites and runs, and effects, as they go to the JSON file."""
        means = {name: compare.summary(self.per_run(name)) for name in self.names}
        effects = []
        for edit in self.edits:
            every = self.effect(None, "all", edit)
            found = {("all", None): every} if every else {}
            found |= {
                (site, layer): change for (layer, site), (change, _) in self.verdicts(edit).items()
            }
            for (site, layer), change in found.items():
                half = change.half if np.isfinite(change.half) else None
                about = {"edit": edit, "layer": layer, "site": site, "difference": change.mean}
                effects.append({**about, "ci95": half, "n": change.n})
        runs = [row["label"] for row in self.rows]
        return {"runs": runs, "interval_over": self.over, "over_sites": means, "effects": effects}

    def per_run(self, name: str, field: str = "mean", inner: str = "") -> list[float]:
        """Means over the sites that have the statistic."""
        runs = []
        for row in self.rows:
            at = [
                site["statistics"][name][field]
                for site in row["sites"]
                if name in site["statistics"]
            ]
            runs.append(float(np.mean([each[inner] for each in at] if inner else at)))
        return runs


def worded(changes: dict) -> dict:
    """{key: (change, its word)} of the changes that there are, corrected for their number (Holm)."""
    changes = {key: change for key, change in changes.items() if change is not None}
    return dict(zip(changes, zip(changes.values(), compare.verdicts(list(changes.values())))))


def groups(rows: list[dict], subjects: list) -> list[Group]:
    """The rows by setting and step, in the order in which they come up. By itself is each run of a setting that has a
    seed twice, and a folder without a run's settings. The same weights are counted once, which is said."""
    found: dict[str, list[dict]] = {}
    seen: set[str] = set()
    for row, subject in zip(rows, subjects):
        if subject.identity in seen:
            print(f"{subject.label}: these weights are there already: counted once", flush=True)
            continue
        seen.add(subject.identity)
        found.setdefault(setting_of(subject), []).append(row | {"label": subject.label})
    lists = [members for each in found.values() for members in by_seed(each)]
    stems = [members[0]["model"] for members in lists]
    labels = [m[0]["model"] if stems.count(m[0]["model"]) == 1 else m[0]["label"] for m in lists]
    return [Group(label, members) for label, members in zip(labels, lists)]


def by_seed(members: list[dict]) -> list[list[dict]]:
    """All together where each has a seed of its own, else each by itself: only seeds are independent."""
    return (
        [members]
        if len({row["seed"] for row in members}) == len(members)
        else [[row] for row in members]
    )


def setting_of(subject) -> str:
    """What runs of one group have in common, as in reporting/groups.py."""
    if subject.state is None:
        return subject.identity
    state = subject.state
    settings = {**state["run_config"], **state["model_config"]}
    same = {
        key: value
        for key, value in settings.items()
        if key not in UNSHOWN and key not in ("model", "seed")
    }
    return json.dumps([state["model"], state["step"], same], sort_keys=True)


def line_of(row: dict) -> str:
    return f"{row['label']}: {len(row['sites'])} sites over {row['tokens']:,} tokens"


def place(key: tuple[int, str]) -> str:
    return f"block {key[0]} {key[1]}"


def percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def extremes(group: Group, name: str, form: str = ".3g") -> str:
    """ "0.41 (block 0 attn) to 1.20 (block 3 mlp)"."""
    means = {key: group.field(key, name) for key in group.sites}
    means = {key: value for key, value in means.items() if value is not None}
    low, high = min(means, key=means.get), max(means, key=means.get)
    return f"{means[low]:{form}} ({place(low)}) to {means[high]:{form}} ({place(high)})"


def apart(group: Group, name: str, form: str = ".3g") -> str:
    """The site at which runs differ most, and between what: "0.035 to 1.28 (block 2 attn)"; "" of a single run.

    A mean over runs hides it where they do different things at one site.
    """
    if len(group.rows) == 1:
        return ""
    means = {
        key: [each["mean"] for each in group.found(key, "statistics", name)] for key in group.sites
    }
    most = max(
        (key for key in means if means[key]), key=lambda key: max(means[key]) - min(means[key])
    )
    return f"{min(means[most]):{form}} to {max(means[most]):{form}} ({place(most)})"


def by_site(group: Group, name: str) -> str:
    """In words `extremes` and, of several runs, `apart`."""
    differ = apart(group, name)
    return f"by site {extremes(group, name)}" + (
        f", and runs differ by as much as {differ}" if differ else ""
    )


def about_shares(group: Group) -> list[str]:
    """A sentence for every statistic with shares."""
    sentences = []
    for name, parts in group.intervals.items():
        shares = [
            f"{label} {percent(group.over_sites(name, 'shares', label).mean)}" for label in parts
        ]
        mean = f"`{name}` is {group.over_sites(name).text()} on average"
        sentences.append(
            f"{mean}, {by_site(group, name)}; of tokens and sites: {', '.join(shares)}."
        )
    return sentences


def about_writes(group: Group) -> list[str]:
    """How large writes are, what they erase, and how far they go."""
    sentences, mean = [], lambda name: group.over_sites(name).mean
    if "write_size" in group.names:
        size = f"{percent(mean('write_size'))} of its norm on average"
        sentences.append(f"A site changes the state by {size}, {by_site(group, 'write_size')}.")
    if {"erased", "written"} <= set(group.names):
        ratio = mean("erased") / mean("written") if mean("written") else np.inf
        sentences.append(
            f"What is erased has {percent(mean('erased'))} of the state's norm, what is written "
            f"{percent(mean('written'))}: a ratio of {ratio:.2g}."
        )
    if {"contraction", "contraction_expected"} <= set(group.names):
        sentences.append(
            f"A write leaves {mean('contraction'):.3g} of the discrepancy, the mean of each token's ratio; "
            f"|1 - beta| says {mean('contraction_expected'):.3g}."
        )
    return sentences


def about_edits(group: Group) -> list[str]:
    """A sentence for every edit: at all sites at once, and at one at a time."""
    sentences = []
    for edit in group.edits:
        parts, found = [], group.verdicts(edit)
        if edit in group.at_once:
            parts.append(f"at all sites at once {change_in_words(*group.at_once[edit])}")
        if found:
            words = [word for _, word in found.values()]
            most = max(found, key=lambda key: abs(found[key][0].mean))
            counts = ", ".join(
                f"{text} at {words.count(word)}" for word, text in WORDS.items() if word in words
            )
            largest = f"the largest change is that of {place(most)}, {signed(found[most][0])}"
            parts.append(f"at one of {len(words)} sites at a time {counts}; {largest}")
        sentences.append(f"`{edit}`: {'; '.join(parts)}.")
    return sentences


def change_in_words(change: Estimate, word: str) -> str:
    return f"{WORDS[word]} ({signed(change)} nats a token)"


def signed(change: Estimate) -> str:
    """`+0.0123 ± 0.0045`."""
    return change.text("+.4f").rpartition(" ")[0]


def about_directions(group: Group) -> list[str]:
    mean, names = lambda name, field="mean": group.over_sites(name, field).mean, set(group.names)
    sites = f"{mean('cosine_sites'):+.2f} with the site before, " if "cosine_sites" in names else ""
    return [
        f"Directions have a mean cosine of {sites}{mean('cosine_tokens'):+.2f} with the token before at the same site "
        f"and {mean('cosine_embedding'):+.2f} with the token's embedding (mean size "
        f"{mean('cosine_embedding', 'mean_abs'):.2f}); their effective rank is {mean('rank_direction'):.2f}, "
        f"that of the state {mean('rank_state'):.2f}."
    ]


def about_columns(group: Group) -> list[str]:
    """Of states with columns: how alike they are, and how they are read."""
    parts, matrices = (
        [],
        {"column_cosine": "the state's columns", "kernel_cosine": "the kernels that read them"},
    )
    for name, what in matrices.items():
        found = [
            np.array(each["mean"])
            for key in group.sites
            for each in group.found(key, "details", name)
        ]
        if found:
            others = np.mean([matrix[~np.eye(len(matrix), dtype=bool)].mean() for matrix in found])
            parts.append(f"{what} have a mean cosine of {others:+.2f}")
    shares = [
        np.array(each["mean"])
        for key in group.sites
        for each in group.found(key, "details", "column_share")
    ]
    if shares:
        most, least = (
            np.mean([share.max() for share in shares]),
            np.mean([share.min() for share in shares]),
        )
        parts.append(
            f"the column that is read most gives {percent(most)} of the read at a site, the least {percent(least)}"
        )
    return ["; ".join(parts).capitalize() + "."] if parts else []


def sentences(group: Group) -> list[str]:
    parts = about_shares, about_writes, about_edits, about_directions, about_columns
    found = [sentence for part in parts for sentence in part(group)]
    if not set(group.names) - GENERIC:
        found.insert(
            0,
            "Its writes and reads name no statistics of their own: what follows every stream has.",
        )
    return found


def table_of_statistics(group: Group) -> str:
    """Of several runs the last column says how far they are apart at the site where they are farthest."""
    header = ["statistic", "mean over sites (runs)", "lowest to highest site"]
    rows = [
        [name, group.over_sites(name).text(".4g"), extremes(group, name, ".4g")]
        for name in group.names
    ]
    if len(group.rows) > 1:
        header.append("lowest to highest run, at the site where runs differ most")
        rows = [[*row, apart(group, row[0], ".4g")] for row in rows]
    return tables.markdown(header, rows)


def table_of_edits(group: Group) -> str:
    """Changes of the loss, in brackets where they are undecided."""
    found = {edit: group.verdicts(edit) for edit in group.edits}
    for edit in group.edits:
        if edit in group.at_once:
            found[edit]["all at once"] = group.at_once[edit]

    def cell(edit, key):
        if key not in found[edit]:
            return None
        change, word = found[edit][key]
        return f"({signed(change)})" if word == "undecided" else signed(change)

    rows = [[key if isinstance(key, str) else place(key), *(cell(edit, key) for edit in group.edits)]
            for key in ("all at once", *group.sites)]  # fmt: skip
    return tables.markdown(("site", *group.edits), rows)


def markdown(groups: list[Group], drawn: list[Path]) -> str:
    """The page: for each group its sentences, statistics, edits and figures."""
    parts = ["# Gates and writes of trained models\n"]
    for group in groups:
        parts.append(f"## {group.label}\n")
        runs, first = "; ".join(row["label"] for row in group.rows), group.rows[0]
        parts.append(
            f"{runs}; {first['sequences']} validation sequences, {first['tokens']:,} tokens.\n"
        )
        parts += [f"- {sentence}" for sentence in sentences(group)]
        parts.append("\n" + table_of_statistics(group) + "\n")
        if group.edits:
            parts.append(
                f"Change of the loss, in nats a token, with its 95% interval over {group.over}; in brackets where no "
                "difference is seen (Holm: at one site for the number of sites, at all at once for that of the edits). "
                "An edit is not a retrained model.\n"
            )
            parts.append(table_of_edits(group) + "\n")
    parts += [f"![{path.stem}]({path.name})" for path in drawn]
    return "\n".join(parts) + "\n"
