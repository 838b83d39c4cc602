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
from evaluation.runner import Evaluation
from model import kernels
from model.decoding import round_matrices
from training import distributed

FORMS = {
    "md": comparison.markdown,
    "tex": comparison.latex,
    "csv": comparison.comma_separated,
}
OF_TASKS_ALONE = ("shots", "include_path", "limit", "log_samples", "add_bos_token")


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
    val = "validation split of the run's corpus, or of this one"
    add("--val", nargs="?", const="", metavar="DATASET", help=val)
    add("--batch_size", type=int, help="continuations read at once (default: 64, on a GPU 512)")
    dtypes = ("auto", "float32", "bfloat16")
    add("--dtype", choices=dtypes, default="auto", help="auto: bfloat16 on a GPU")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    bos = "begin every text with end-of-text (lm-eval's hf model does not)"
    add("--add_bos_token", action="store_true", help=bos)
    retry = "how long to ask a hub again that does not answer, for each task's data"
    add("--retry_minutes", type=float, default=tasks.RETRY_MINUTES, help=retry)
    add("--limit", type=int, help="items of each task, to try things out")
    log = "also samples_TASK_DATE.jsonl with every item, as lm-eval's"
    add("--log_samples", action="store_true", help=log)
    add("--out", type=Path, help="folder of results.json and the tables (default: RUN/eval)")
    return parser.parse_args()


def check(args) -> None:
    """Make lists of --tasks and --shots. ValueError: a value out of range, or without effect."""
    text = ("paper" if args.val is None else "") if args.tasks is None else args.tasks
    names = text.replace(" ", "").split(",")
    names = [n for name in names for n in (tasks.PAPER_METRICS if name == "paper" else [name])]
    args.tasks = list(dict.fromkeys(filter(None, names)))
    if not args.tasks and args.val is None:
        raise ValueError("--tasks: name one task or more, or give --val")
    for name in OF_TASKS_ALONE:
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


def with_earlier(entries: list[dict], stored: list[dict]) -> list[dict]:
    """The entries of this call, then the newest stored ones of the same models in other cells."""
    labels = {entry["weights"]: entry["label"] for entry in entries}
    earlier = {
        cell_of(e): e | {"label": labels[e["weights"]]} for e in stored if e["weights"] in labels
    }
    for entry in entries:
        earlier.pop(cell_of(entry), None)
    return entries + list(earlier.values())


def cell_of(entry: dict) -> tuple:
    """Which cells of the tables an entry fills."""
    return entry["weights"], entry["task"], title_of(entry)


def title_of(entry: dict) -> str:
    """The title of an entry's table: the number of examples, and what else makes numbers differ."""
    if entry["task"] == "validation":
        return ""
    settings = entry["settings"]
    return ", ".join([f"{entry['shots']}-shot", settings["dtype"], *differences(settings)])


def differences(settings: dict) -> list[str]:
    """What makes the numbers of tasks differ from the paper's."""
    bos = ["texts begin with end-of-text"] * settings["add_bos_token"]
    return bos + ([f"the first {settings['limit']} items alone"] if settings["limit"] else [])


def tables_of(
    entries: list[dict], papers: dict[str, published.Published]
) -> list[comparison.Table]:
    """A table for each title, then one of the validation split.

    papers: what is published of the models, by the digest of their weights.
    """
    of_tasks: dict[str, list[dict]] = {}
    validation = []
    for entry in entries:
        if entry["task"] == "validation":
            row = papers[entry["weights"]].beside_validation(entry["label"], entry)
            validation.append((entry["label"], entry["record"], *row))
        else:
            of_tasks.setdefault(title_of(entry), []).append(entry)
    made = [table_of_tasks(title, each, papers) for title, each in of_tasks.items()]
    return made + ([comparison.of_validation(validation)] if validation else [])


def table_of_tasks(title: str, entries: list[dict], papers: dict) -> comparison.Table:
    metrics, models = {}, {}
    for entry in entries:
        label, shots, weights = entry["label"], entry["shots"], entry["weights"]
        row = papers[weights].beside(label, shots, *differences(entry["settings"]))
        _, values, *_ = models.setdefault(weights, (label, {}, *row))
        for name, (metric, value, error) in entry["shown"].items():
            own = entry["n-shot"].get(name, shots)  # where a task's file fixes another number
            metrics[name] = metric if own == shots else f"{metric}, {own}-shot"
            values[name] = value, error
    return comparison.of_tasks(title, metrics, list(models.values()))


def main():
    args = arguments()
    with configurator.one_line_errors(memory="give a smaller --batch_size"):
        # What can be wrong with the call is looked at before any work is done.
        check(args)
        device = distributed.pick_device(args.device)
        chosen = subjects.find_all(args.runs)
        for subject in chosen if args.tasks else ():
            subjects.refuse_ids(subject)
        corpora = [
            subjects.open_corpus_of(subject, args.val) for subject in chosen if args.val is not None
        ]
        out = args.out or subjects.home(args.runs)
        world, loaded, missing = distributed.start(device), [], []
        if args.tasks:
            loaded, missing = tasks.open_all(
                args.tasks, args.include_path, world, args.retry_minutes
            )
        names = [task.name for task in loaded]
        distributed.refuse_disagreement(world, {"the tasks that can be had": names})
        if not loaded and not corpora:
            chosen = []

        # Each model in turn: the validation split, then the tasks.
        if chosen:
            out.mkdir(parents=True, exist_ok=True)
        evaluation, entries, papers = Evaluation(args, world, out), [], {}
        for number, subject in enumerate(chosen):
            model, encoding, stem = subject.load(device)
            kernels.use(model, "auto", device)
            if evaluation.bf16:
                round_matrices(model)
            papers[subject.identity] = published.find(subject, stem, model.config)
            if corpora:
                entries.append(evaluation.validation(subject, model, corpora[number]))
            if loaded:
                entries += evaluation.tasks(subject, model, encoding, loaded)

        # The tables of this call on the screen, those of all that is stored into files.
        failures = missing + evaluation.failures
        if world.is_main:
            if entries:
                everything = with_earlier(entries, evaluation.entries)
                for ending, form in FORMS.items():
                    text = form(tables_of(everything, papers))
                    configurator.replace_text(out / f"table.{ending}", text)
                more = len(everything) - len(entries)
                earlier = f", with {more} earlier results" if more else ""
                print(
                    f"{comparison.screen(tables_of(entries, papers))}\n\nwritten to {out}{earlier}"
                )
            else:
                print(f"nothing was evaluated: {out} is as it was")
            for line in failures:
                print(f"{Path(sys.argv[0]).name}: {line}", file=sys.stderr)
    distributed.stop(world)
    sys.exit(3 if failures else 0)


if __name__ == "__main__":
    main()
