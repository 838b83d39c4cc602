"""Evaluate checkpoints: the paper's eight tasks, any other of lm-evaluation-harness, and the
validation loss.

    python eval.py runs/ddl_dv4_small --shots=0,1   the eight tasks, next to the paper's row
    python eval.py runs/ddl_dv4_small runs/gpt_small --tasks=paper --val   side by side, and the validation split
    python eval.py runs/demo_cpu --val                       the validation split alone
    python eval.py runs/NAME --tasks=my_task,lambada_openai --include_path=my_tasks
    torchrun --nproc_per_node=4 eval.py runs/NAME            on several GPUs: the same numbers

A run is a run folder (its newest checkpoint), a checkpoint folder, or an exported folder. Each
result is stored in results.json as soon as it is there, and an evaluation that was interrupted goes
on with the next one. Exit code 0: all was evaluated; 2: a mistake; 3: some tasks could not be
evaluated, each named in one line, the others were. (torchrun makes 1 of the last two.)
"""

import sys
from pathlib import Path

import configurator  # before all that is slow to import: it takes Ctrl+C

# isort: split

from evaluation import comparison, published, subjects, tasks
from evaluation.runner import Evaluation, open_corpus_of, write_text
from model import kernels
from model.decoding import round_matrices
from training import distributed


def arguments():
    parser = configurator.Parser(description=__doc__)
    add = parser.add_argument
    add("runs", nargs="+", help="run, checkpoint or exported folders")
    add(
        "--tasks",
        help="names with commas between; paper: its eight (default: paper, nothing with --val)",
    )
    add(
        "--shots",
        help="numbers of few-shot examples, as in 0,1 (default: 0, whatever a task's file says)",
    )
    add("--include_path", help="a folder of task files (YAML) of your own, as lm-eval's option")
    add(
        "--val",
        nargs="?",
        const="",
        metavar="DATASET",
        help="validation split of the run's corpus, or of this one",
    )
    add("--batch_size", type=int, help="continuations read at once (default: 64, on a GPU 512)")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="auto: bfloat16 on a GPU",
    )
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add(
        "--add_bos_token",
        action="store_true",
        help="begin every text with end-of-text (lm-eval's hf model does not)",
    )
    retry = "how long to ask a hub again that does not answer, for each task's data"
    add("--retry_minutes", type=float, default=tasks.RETRY_MINUTES, help=retry)
    add("--limit", type=int, help="items of each task, to try things out")
    add(
        "--log_samples",
        action="store_true",
        help="also samples_TASK_DATE.jsonl with every item, as lm-eval's",
    )
    add("--out", type=Path, help="folder of results.json and the tables (default: RUN/eval)")
    return parser.parse_args()


def check(args) -> None:
    """Make the lists of the arguments. ValueError: a value out of range."""
    if args.tasks is None:
        args.tasks = "paper" if args.val is None else ""
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    args.tasks = list(
        dict.fromkeys(
            n for name in names for n in (tasks.PAPER_METRICS if name == "paper" else [name])
        )
    )
    if not args.tasks and args.val is None:
        raise ValueError("--tasks: name one task or more, or give --val")
    for name in ("shots", "include_path", "limit", "log_samples", "add_bos_token"):
        if not args.tasks and getattr(args, name):
            raise ValueError(
                f"--{name} has no effect on --val alone: name --tasks, or leave it out"
            )
    shots = (args.shots or "0").split(",")
    if not all(part.isdecimal() for part in shots):
        raise ValueError(f"--shots={args.shots}: give whole numbers with commas between, as in 0,1")
    args.shots = list(dict.fromkeys(map(int, shots)))
    for name in ("batch_size", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name}={value}: give 1 or more")


def refuse_tasks_of_text(args, chosen: list[subjects.Subject]) -> None:
    """ValueError: tasks for a model whose tokens are no text."""
    for subject in chosen if args.tasks else ():
        if subject.tokenizer()["name"] == "ids":
            raise ValueError(
                f"{subject.folder}: its tokens are ids, not text, and --tasks are of text: give "
                "--val alone"
            )


def with_earlier(entries: list[dict], stored: list[dict]) -> list[dict]:
    """The entries of this call, then the newest stored ones of the same models for all other
    cells.
    """
    labels, made = {e["weights"]: e["label"] for e in entries}, {cell_of(e) for e in entries}
    newest = {cell_of(e): e for e in stored if e["weights"] in labels}
    return entries + [
        e | {"label": labels[e["weights"]]} for key, e in newest.items() if key not in made
    ]


def cell_of(entry: dict) -> tuple:
    """Which cells of the tables an entry fills."""
    return entry["weights"], entry["task"], "" if entry["task"] == "validation" else title_of(entry)


def tables_of(
    entries: list[dict], papers: dict[str, published.Published]
) -> list[comparison.Table]:
    """A table for each title, and one of the validation split; papers: what is published of the
    models, by weights.
    """
    found = []
    of_tasks = [e for e in entries if e["task"] != "validation"]
    for title in dict.fromkeys(map(title_of, of_tasks)):
        models: dict[str, tuple] = {}
        shown_metrics = {}
        for entry in (e for e in of_tasks if title_of(e) == title):
            label, number = entry["label"], entry["shots"]
            paper = papers[entry["weights"]].beside(label, number, *differences(entry["settings"]))
            values = models.setdefault(entry["weights"], (label, {}, *paper))[1]
            for name, (metric, value, error) in entry["shown"].items():
                own = entry["n-shot"].get(name, number)  # what a task's file fixes
                shown_metrics[name] = metric if own == number else f"{metric}, {own}-shot"
                values[name] = value, error
        found.append(comparison.of_tasks(title, shown_metrics, list(models.values())))
    validation = [e for e in entries if e["task"] == "validation"]
    if validation:
        rows = [
            (e["label"], e["record"], *papers[e["weights"]].beside_validation(e["label"], e))
            for e in validation
        ]
        found.append(comparison.of_validation(rows))
    return found


def differences(settings: dict) -> list[str]:
    """What makes the numbers of tasks differ from the paper's; they go into the title."""
    said = ["texts begin with end-of-text"] if settings["add_bos_token"] else []
    return said + ([f"the first {settings['limit']} items alone"] if settings["limit"] else [])


def title_of(entry: dict) -> str:
    """The number of examples, and what else makes numbers differ."""
    return ", ".join(
        [f"{entry['shots']}-shot", entry["settings"]["dtype"], *differences(entry["settings"])]
    )


def write(found: list[comparison.Table], out: Path) -> None:
    for name, form in (
        ("md", comparison.markdown),
        ("tex", comparison.latex),
        ("csv", comparison.comma_separated),
    ):
        write_text(out / f"table.{name}", form(found))


def main():
    args = arguments()
    with configurator.one_line_errors(memory="give a smaller --batch_size"):
        check(args)
        device = distributed.pick_device(args.device)
        chosen = subjects.find_all(args.runs)
        refuse_tasks_of_text(args, chosen)
        corpora = (
            [open_corpus_of(subject, args.val) for subject in chosen]
            if args.val is not None
            else []
        )
        world = distributed.start(device)
        found = (
            tasks.open_all(args.tasks, args.include_path, world, args.retry_minutes)
            if args.tasks
            else ([], [])
        )
        loaded, missing = found
        distributed.refuse_disagreement(
            world, {"the tasks that can be had": [task.name for task in loaded]}
        )
        out = args.out or subjects.home(args.runs)
        if loaded or corpora:
            out.mkdir(parents=True, exist_ok=True)
        run = Evaluation(args, world, out)
        entries, papers = [], {}
        for number, subject in enumerate(chosen if loaded or corpora else []):
            model, encoding, stem = subject.load(device)
            kernels.use(model, "auto", device)
            if run.bf16:
                round_matrices(model)
            papers[subject.identity] = published.find(subject, stem, model.config)
            if corpora:
                entries.append(run.validation(subject, model, corpora[number]))
            if loaded:
                entries += run.tasks(subject, model, encoding, loaded)
        if world.is_main:
            everything = with_earlier(entries, run.store.entries)
            if entries:
                write(tables_of(everything, papers), out)
                earlier = (
                    f", with {n} earlier results" if (n := len(everything) - len(entries)) else ""
                )
                print(
                    f"{comparison.screen(tables_of(entries, papers))}\n\nwritten to {out}{earlier}"
                )
            else:
                print(f"nothing was evaluated: {out} is as it was")
            for line in missing + run.failures:
                print(f"{Path(sys.argv[0]).name}: {line}", file=sys.stderr)
    distributed.stop(world)
    sys.exit(3 if missing or run.failures else 0)


if __name__ == "__main__":
    main()
