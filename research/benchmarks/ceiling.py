"""What the launch of each kernel allows of the copy bandwidth, from its machine code for sm_90: `bench.py ceiling`.

Needs no GPU. A kernel moves its bytes no faster than each of three things lets it, a token at a time:

- issue: four schedulers of a multiprocessor issue one warp's instruction a cycle each;
- flight: by Little's law, what the programs on a multiprocessor have under way, over how long it takes. A token takes
  its program the latency of its instructions, in order, and that of memory where it was not asked for ahead;
- traffic: what registers spill moves as well. It is charged at the bandwidth of the GPU's memory, though most of it
  stays in the cache.

The ceiling is the least of them. Nothing is measured: it ranks launches, and says what stands in the way.
"""

import collections
import importlib.util
import os
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from evaluation import tables
from research.benchmarks.suites import of_tests
from training.provenance import store

# An H200. Copy bandwidth: measured ones reach about nine tenths of its 4.8 TB/s.
PROCESSORS, SCHEDULERS, CLOCK, COPY = 132, 4, 1.8e9, 4.3e12
HEAD = 128  # features of a head at the paper's sizes
REGISTERS, SHARED, WARPS, PROGRAMS = 65536, 227 * 2**10, 64, 32  # of a multiprocessor
MEMORY_LATENCY, CACHE_LATENCY = 1250, 270  # cycles: of memory under load, of L2
# Cycles until a result can be used, by the first letters of the instruction; others 5.
LATENCY = {
    "SHFL": 25, "LDS": 30, "LDSM": 33, "LDG": 35, "LDL": 35, "MUFU": 25, "F2F": 20, "BAR": 25, "S2R": 20, "LDC": 25,
    "R2UR": 10, "ISETP": 10, "FSETP": 10, "PLOP3": 10,
}  # fmt: skip
NO_RESULT = ("ST", "BAR", "BRA", "DEPBAR", "LDGDEPBAR", "LDGSTS", "UBLKPF", "BSSY", "BSYNC", "NOP", "WARPSYNC", "EXIT")


def tool(name: str) -> Path:
    """A program of the CUDA toolkit that comes with Triton."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def registers_and_spills(compiled) -> tuple[int, int]:
    """(registers, spilled bytes) of a thread, as ptxas reports them."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(compiled.asm["ptx"])
        target = f"--gpu-name=sm_{compiled.metadata.target.arch}a"
        command = [tool("ptxas"), "-v", target, source, "-o", f"{folder}/kernel.cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"Used (\d+) registers", report)[1]), sum(map(int, re.findall(r"(\d+) bytes spill", report)))


def instructions(compiled) -> list[tuple[int, str]]:
    """(address, instruction) of the kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool("cuobjdump"), "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    return parsed(text)


def parsed(text: str) -> list[tuple[int, str]]:
    return [(int(at, 16), what.strip()) for at, what in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+?)\s*;", text)]


def loop(code: list[tuple[int, str]]) -> list[str]:
    """The instructions of the longest loop: what one token takes. Without a loop all of them."""
    spans = [(0, 0, code[-1][0])]
    for at, what in code:
        target = re.search(r"\bBRA\S* 0x([0-9a-f]+)", what)
        if target and int(target[1], 16) < at:
            spans.append((at - int(target[1], 16), int(target[1], 16), at))
    _, first, last = max(spans, key=lambda span: span[0])
    return [what for at, what in code if first <= at <= last]


def operation(instruction: str) -> str:
    """LDG of @!P0 LDG.E.128 R4, desc[UR4][R2.64]."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].split(".")[0]


def registers_of(operand: str, words: int = 1) -> set[str]:
    """Names of the registers that an operand is made of: R4.64 is R4 and R5."""
    names = set()
    for kind, number, suffix in re.findall(r"\b(UR|R|UP|P)(\d+)\b(\.64)?", operand):
        names |= {f"{kind}{int(number) + k}" for k in range(max(words, 2 if suffix else 1) if "P" not in kind else 1)}
    return names


def operands(instruction: str) -> tuple[set[str], set[str]]:
    """(registers that it writes, registers that it reads)."""
    guard = re.match(r"^@!?(U?P\d+)\s+", instruction)
    body = instruction[guard.end() :] if guard else re.sub(r"^@!?U?PT\s+", "", instruction)
    name, _, rest = body.partition(" ")
    parts = [part.strip() for part in rest.split(",")]
    words = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
    reads = {guard[1]} if guard else set()
    if name.startswith(NO_RESULT):
        written, sources = set(), parts
    else:
        count = 2 if name.startswith("SHFL") or "SETP" in name or "PLOP3" in name else 1
        written, sources = set().union(*(registers_of(part, words) for part in parts[:count])), parts[count:]
    wide = words if name.startswith("ST") else 1
    return written, reads.union(*(registers_of(part, wide) for part in sources))


def latency(body: list[str], interval: float = 1.0) -> float:
    """Cycles of one turn of the loop for one warp that issues in order, every `interval` cycles at best.

    Two turns are followed, so that what the second takes from the first is counted; taken is what the second adds, and
    what barriers cost, which write nothing that could be waited for.
    """
    ready: dict[str, float] = collections.defaultdict(float)
    now, turns = 0.0, []
    parsed = [(LATENCY.get(operation(each), 5), *operands(each)) for each in body]
    for _ in range(2):
        for cycles, written, read in parsed:
            now = max([now + interval, *(ready[name] for name in read)])
            for name in written:
                ready[name] = now + cycles
        turns.append(now)
    return turns[1] - turns[0] + LATENCY["BAR"] * sum(operation(each) == "BAR" for each in body)


def spilled_traffic(body: list[str]) -> int:
    """Bytes that one warp moves to and from its spilled registers in a turn."""
    spills = [each for each in body if operation(each) in ("LDL", "STL")]
    return sum(32 * 4 * (4 if ".128" in each else 2 if ".64" in each else 1) for each in spills)


def ceiling(compiled, launch, moved: int) -> dict:
    """What the launch of a kernel allows. moved: bytes that a token must move."""
    registers, spills = registers_and_spills(compiled)
    body = loop(instructions(compiled))
    counts = collections.Counter(map(operation, body))
    warps = launch.num_warps
    file = -(-registers // 8) * 8 * 32 * warps
    shared = compiled.metadata.shared
    fits = min(REGISTERS // file, WARPS // warps, PROGRAMS, SHARED // (shared + 1024))
    together = min(fits, launch.programs)

    least = moved / (COPY / PROCESSORS) * CLOCK  # cycles of a token at the copy bandwidth, on one multiprocessor
    issue = len(body) * warps / SCHEDULERS
    own = latency(body, max(1.0, warps / SCHEDULERS))
    ahead = launch.stages - 1 if counts["LDGSTS"] else 0
    if ahead:
        wait = max(own, MEMORY_LATENCY / ahead)
    elif launch.prefetch:
        wait = max(own + CACHE_LATENCY, MEMORY_LATENCY / launch.prefetch)
    else:
        wait = own + MEMORY_LATENCY
    traffic = moved + spilled_traffic(body) * warps
    parts = {"issue": least / issue, "flight": least * together / wait, "traffic": moved / traffic}
    return {
        "warps": warps, "stages": launch.stages, "prefetch": launch.prefetch, "reload": launch.reload,
        "programs": launch.programs, "fits": fits,
        "registers": registers, "spill_bytes": spills, "shared_bytes": shared, "instructions": len(body),
        "barriers": counts["BAR"], "shuffles": counts["SHFL"], "async_loads": counts["LDGSTS"] + counts["UBLKPF"],
        "bytes": moved, "latency": round(own), **{name: round(part, 3) for name, part in parts.items()},
        "ceiling": round(min(1.0, *parts.values()), 3),
    }  # fmt: skip


def moved_bytes(name: str, d: int, columns: int, kernel_size: int, writes: int, stored: bool) -> int:
    """Bytes that a token moves at least: vectors of bf16 and numbers of fp32."""
    v, several = columns, kernel_size > 1
    if name == "add_norm forward" or name == "add_norm backward":
        return 4 * 2 * d + 4
    if name == "expand forward" or name == "expand backward":
        return (v + 1 + (name == "expand backward")) * 2 * d
    if name.startswith("rope_norm"):  # of a turn: so many heads of queries or keys
        from model.kernels import rope

        return (2 if name.endswith("forward") else 3) * rope.ROWS * HEAD * 2
    if name == "step forward":  # base, hs, h -> context, x_in, state; us, y, z -> n, delta, u, rho, y, z
        return (v + writes + 2 + several + v * stored) * 2 * d + 4 * (v * writes + 4 * v + 4)
    # base, hs, h, x_in, gc, grad_state -> grad_h, grad_state; us, y, z, n, delta, rho, gy, gz -> grad_y, grad_z
    replays = max(writes - 1, 0)  # the last of the writes is h itself
    return (3 * v + replays + 3 + several) * 2 * d + 4 * (v * writes + 4 * v + 5)


def kernels(widths: list[int]):
    """(name, width, columns, tokens of the read, writes replayed, state stored or not, kernel) of all launched."""
    from model.kernels import add_norm, expand, rope, step_kernels

    directions = ("forward", "backward")
    for d in widths:
        for way in directions:
            yield f"add_norm {way}", d, 1, 1, 0, False, getattr(add_norm, f"{way}_kernel")
        for way in directions:
            yield f"expand {way}", d, 4, 4, 0, False, getattr(expand, f"{way}_kernel")
        for way in directions:
            yield f"rope_norm {way}", d, 1, 1, 0, False, getattr(rope, f"{way}_kernel")
        for columns, kernel_size in ((1, 1), (2, 1), (4, 1), (8, 1), (2, 4), (4, 4), (8, 4)):
            # As --state_interval=2 has it: a write, kept back for the next, then both and the state stored.
            yield "step forward", d, columns, kernel_size, 0, False, step_kernels.forward_kernel
            yield "step forward", d, columns, kernel_size, 1, True, step_kernels.forward_kernel
            yield "step backward", d, columns, kernel_size, 0, True, step_kernels.backward_kernel
            yield "step backward", d, columns, kernel_size, 1, False, step_kernels.backward_kernel


def row_of(name: str, d: int, columns: int, kernel_size: int, writes: int, stored: bool, kernel, launch) -> dict:
    from model.kernels import expand, rope
    from model.kernels.tiles import block_of

    block = expand.BLOCK if name.startswith("expand") else block_of(d)
    constants = {"D": d, "BLOCK": block, "K": kernel_size, "STAGES": launch.stages}
    constants |= {"PREFETCH": launch.prefetch, "RELOAD": launch.reload}
    if name.startswith("rope_norm"):
        constants |= {"H": d // HEAD, "HALF": HEAD // 2, "BLOCK": HEAD // 2, "ROWS": rope.ROWS}
    if name == "add_norm backward":
        constants |= {"grad_h": None}  # the state's gradient is h's, in one dtype
    if name == "step forward":
        constants |= {} if stored else {"new_state": None}
        constants |= {} if kernel_size > 1 else {"x_in": None}
    offline = of_tests("compile_kernels")
    arguments = offline.arguments_of(kernel, constants, columns, writes)
    compiled = offline.compile_for(kernel, arguments, launch.num_warps)
    row = {"kernel": name, "d": d, "columns": columns, "tokens_of_read": kernel_size, "writes_replayed": writes}
    moved = moved_bytes(name, d, columns, kernel_size, writes, stored)
    return row | {"stored": stored} | ceiling(compiled, launch, moved)


def alternatives(launch):
    """Launches that could serve instead: other warps, loads ahead by shared memory or by the L2 cache."""
    launch = replace(launch, programs=PROGRAMS)
    for warps in (1, 2, 4, 8, 16):
        for stages, prefetch in ((1, 2), (2, 0), (3, 0), (4, 0)):
            for reload in {launch.reload, False}:
                yield replace(launch, num_warps=warps, stages=stages, prefetch=prefetch, reload=reload)


def measure(widths: list[int], match: str, every: bool) -> list[dict]:
    from model.kernels import rope
    from model.kernels.launch import Launch, launch_of

    rows = []
    for name, d, columns, kernel_size, writes, stored, kernel in kernels(widths):
        if match not in f"{name} v={columns} K={kernel_size}":
            continue
        if name == "rope_norm forward":  # a tile a program, as many as fit
            launch = Launch(rope.WARPS, 1, PROGRAMS)
        elif name == "rope_norm backward":  # queries, keys and values each have programs of their own
            launch = Launch(rope.WARPS, rope.STAGES, 3 * rope.PROGRAMS)
        else:
            launch = launch_of(name, d, columns, kernel_size)
        for chosen in [launch, *(alternatives(launch) if every else ())]:
            rows.append(row_of(name, d, columns, kernel_size, writes, stored, kernel, chosen))
            print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def markdown(rows: list[dict]) -> str:
    """A line a kernel: its launch, what it takes, and what that allows of the copy bandwidth."""
    titles = {
        "kernel": "kernel", "d": "d", "columns": "columns", "tokens_of_read": "tokens of the read",
        "writes_replayed": "replayed", "stored": "stored", "warps": "warps", "programs": "programs",
        "registers": "registers", "spill_bytes": "spilled", "instructions": "instructions", "barriers": "barriers",
        "bytes": "bytes",
        "issue": "issue", "flight": "flight", "traffic": "traffic", "ceiling": "ceiling",
    }  # fmt: skip
    lines = [[row[key] if key != "stored" else "yes" * row[key] for key in titles] for row in rows]
    return tables.markdown(titles.values(), lines)


def run(args) -> None:
    """Print and store the figures of `bench.py ceiling`."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError("ceiling needs triton: pip install triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("ceiling compiles kernels, TRITON_INTERPRET=1 interprets them: unset it")
    rows = measure(args.widths, args.match, args.every)
    if not rows:
        raise ValueError(f"--match={args.match}: no kernel has that in its name; try step, add_norm or v=4")
    print(markdown(rows))
    if args.json:
        store(args.json, {"target": "sm_90", "rows": rows})
