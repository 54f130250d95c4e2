"""Draw tasks: an instruction, the files that it is about, checks of the result, and commands that solve it.

A table of families, each with one function, so this file is longer than others.
"""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from agentsgym.envs.datasets.options import Part
from agentsgym.envs.Terminal.checks import Check, HasArchive, HasMode, HasText, Returns
from agentsgym.envs.Terminal.programs import EVALUATION, TRAINING, Program
from agentsgym.seeding import derive_seed

LEVELS = (1, 2, 3)
_TRAINING_WORDS = (
    "acorn anchor basket beacon bridge candle canyon carbon cedar cobalt copper cotton dragon falcon fossil garden "
    "ginger glacier hammer harbor helmet island ivory jacket kettle lantern lemon marble meadow mirror needle "
    "nickel olive orchid paddle pepper pillow planet pocket quartz ribbon saddle silver spiral timber tunnel velvet "
    "walnut window zipper"
)
_EVALUATION_WORDS = (
    "almond arrow badger bamboo blossom button castle cherry circle coral cricket dolphin ember feather forest "
    "granite hazel hornet jungle ladder maple mosaic nectar oyster parrot pebble pigeon plaza prairie rocket salmon "
    "satin sparrow sulfur thistle turtle vessel violet willow yarrow"
)
_WORDS: Mapping[Part, Sequence[str]] = {"train": _TRAINING_WORDS.split(), "eval": _EVALUATION_WORDS.split()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task.

    Attributes:
        instruction: What to do.
        files: The content of each file at the start, by its path in the working folder.
        checks: What must hold at the end.
        solution: Commands that solve the task.
    """

    instruction: str
    files: Mapping[str, str | bytes]
    checks: Sequence[Check | Returns]
    solution: Sequence[str]


class Draw:
    """The random choices of one task.

    Attributes:
        stream: The task's random stream.
        level: The level of difficulty, 1 to 3.
        part: The part of the tasks, which determines the names in it.
    """

    def __init__(self, stream: random.Random, level: int, part: Part) -> None:
        self.stream, self.level, self.part = stream, level, part
        self._words = stream.sample(_WORDS[part], len(_WORDS[part]))

    def word(self) -> str:
        """Return a word that this task does not use yet."""
        return self._words.pop()

    def words(self, count: int) -> list[str]:
        """Return words that this task does not use yet."""
        return [self.word() for _ in range(count)]

    def text(self, words: Sequence[str], num_lines: int) -> str:
        """Return lines of three of the words each."""
        return "".join(" ".join(self.stream.choices(words, k=3)) + "\n" for _ in range(num_lines))

    def tree(self, root: str, count: int, ending: str) -> list[str]:
        """Return the paths of ``count`` files: in one folder at level 1, else also in subfolders (with spaces at 3)."""
        folders = [root]
        if self.level > 1:
            joint = " " if self.level == 3 else "-"
            folders += [f"{root}/{self.word()}", f"{root}/{joint.join(self.words(2))}/{self.word()}"]
        return [f"{folders[index % len(folders)]}/{self.word()}.{ending}" for index in range(count)]


def make_task(family: str, level: int, part: Part, seed: int) -> Task:
    """Draw a task; equal arguments give equal tasks."""
    stream = random.Random(derive_seed("terminal task", family, level, part, seed))
    return FAMILIES[family][1](Draw(stream, level, part))


def family_notes() -> dict[str, dict[str, str]]:
    """Return what each family is about."""
    return {name: {"note": note} for name, (note, _) in FAMILIES.items()}


def _kept(files: Mapping[str, str]) -> list[HasText]:
    """Check that files stay as they are."""
    return [HasText(path=path, text=text) for path, text in files.items()]


def _rename(draw: Draw) -> Task:
    root, (old, new, other) = draw.word(), draw.stream.sample(("txt", "md", "log", "dat", "cfg"), 3)
    words = draw.words(4)
    renamed = {path: draw.text(words, 2) for path in draw.tree(root, 2 + draw.level, old)}
    others = {f"{root}/{word}.{other}": draw.text(words, 2) for word in draw.words(2)}
    endings = {path: path.removesuffix(old) + new for path in renamed}
    return Task(
        instruction=f"Rename every file in {root} and its subfolders whose name ends in .{old}, so that it ends in "
        f".{new} instead. Change nothing else.",
        files={**renamed, **others},
        checks=[HasText(path=endings[path], text=text, gone=path) for path, text in renamed.items()] + _kept(others),
        solution=[
            f'find {root} -name \'*.{old}\' | while IFS= read -r name; do mv "$name" "${{name%.{old}}}.{new}"; done'
        ],
    )


def _move(draw: Draw) -> Task:
    source, target, words = draw.word(), draw.word(), draw.words(4)
    years = draw.stream.sample(range(2015, 2025), 1 + draw.level)
    paths = [f"{source}/{word}-{draw.stream.choice(years)}.txt" for word in draw.words(3 + 2 * draw.level)]
    files = {path: draw.text(words, 2) for path in paths}
    notes = {f"{source}/{draw.word()}.md": draw.text(words, 2)}
    places = {path: f"{target}/{path[-8:-4]}/{path.partition('/')[2]}" for path in paths}
    return Task(
        instruction=f"The names of the .txt files in {source} end with a year. Move each of them to the folder "
        f"{target}/YEAR, where YEAR is its year, under the same name. Leave other files where they are.",
        files={**files, **notes},
        checks=[HasText(path=places[path], text=text, gone=path) for path, text in files.items()] + _kept(notes),
        solution=[
            f'for name in {source}/*.txt; do year="${{name: -8:4}}"; mkdir -p {target}/$year; '
            f'mv "$name" {target}/$year/; done'
        ],
    )


def _find(draw: Draw) -> Task:
    root, code, words = draw.word(), draw.word(), draw.words(6)
    files = {path: draw.text(words, 4) for path in draw.tree(root, 5 + 2 * draw.level, "txt")}
    found = sorted(draw.stream.sample(sorted(files), draw.level))
    for path in found:
        files[path] += f"{draw.stream.choice(words)} {code}\n"
    return Task(
        instruction=f"Some of the files in {root} and its subfolders contain the word {code}. Write their paths, as "
        f"in {root}/a.txt, to answer.txt: one on each line, sorted.",
        files=files,
        checks=[HasText(path="answer.txt", text="\n".join(found)), *_kept(files)],
        solution=[f"grep -rlw {code} {root} | sort > answer.txt"],
    )


def _count(draw: Draw) -> Task:
    root, words = draw.word(), draw.words(5)
    ending, other = draw.stream.sample(("txt", "log", "csv"), 2)
    files = {path: draw.text(words, draw.stream.randint(2, 9)) for path in draw.tree(root, 3 + 2 * draw.level, ending)}
    others = {f"{root}/{word}.{other}": draw.text(words, 3) for word in draw.words(2)}
    lines = "".join(files.values()).splitlines()
    find = f"find {root} -name '*.{ending}'"
    what, number, command = [
        (f"the number of files whose name ends in .{ending}", len(files), f"{find} | wc -l"),
        (
            f"the number of lines in all files whose name ends in .{ending}",
            len(lines),
            f"{find} -exec cat {{}} + | wc -l",
        ),
        (
            f"the number of lines that contain the word {words[0]} in all files whose name ends in .{ending}",
            sum(words[0] in line for line in lines),
            f"{find} -exec cat {{}} + | grep -cw {words[0]}",
        ),
    ][draw.level - 1]
    return Task(
        instruction=f"Write {what} in {root} and its subfolders to count.txt, as a number and nothing else.",
        files={**files, **others},
        checks=[HasText(path="count.txt", text=str(number)), *_kept({**files, **others})],
        solution=[f"echo $({command}) > count.txt"],
    )


def _permissions(draw: Draw) -> Task:
    root = draw.word()
    scripts = {path: f"#!/bin/sh\necho {draw.word()}\n" for path in draw.tree(root, 2 + draw.level, "sh")}
    keys = {f"{root}/{word}.key": f"{draw.stream.getrandbits(64):x}\n" for word in draw.words(draw.level)}
    notes = {f"{root}/{draw.word()}.txt": draw.text(draw.words(3), 2)}
    texts = {**scripts, **keys, **notes}
    return Task(
        instruction=f"In {root} and its subfolders, give every .sh file the permissions rwxr-xr-x, and every .key file "
        "permissions with which only its owner can read and write it. Do not change other permissions, or any content.",
        files=texts,
        checks=[
            *(HasMode(path=path, mode=0o755) for path in scripts),
            *(HasMode(path=path, mode=0o600) for path in keys),
            *(HasMode(path=path, mode=0o644) for path in notes),
            *_kept(texts),
        ],
        solution=[
            f"find {root} -name '*.sh' -exec chmod 755 {{}} +",
            f"find {root} -name '*.key' -exec chmod 600 {{}} +",
        ],
    )


def _archive(draw: Draw) -> Task:
    root, name, words = draw.word(), draw.word(), draw.words(4)
    packed = {path: draw.text(words, 3) for path in draw.tree(root, 2 + draw.level, "txt")}
    if draw.level == 1:
        return Task(
            instruction=f"Extract the archive {name}.tar.gz in this folder, and keep the archive.",
            files={f"{name}.tar.gz": _tar_gz(packed)},
            checks=[*_kept(packed), HasArchive(path=f"{name}.tar.gz", files=packed)],
            solution=[f"tar -xzf {name}.tar.gz"],
        )
    others = {f"{root}/{word}.log": draw.text(words, 3) for word in draw.words(draw.level)}
    if draw.level == 2:
        return Task(
            instruction=f"Make {name}.tar.gz, a tar archive compressed by gzip, of the folder {root} with all that is "
            f"in it. Its members have paths such as {root}/a.txt. Keep the folder.",
            files={**packed, **others},
            checks=[HasArchive(path=f"{name}.tar.gz", files={**packed, **others}), *_kept({**packed, **others})],
            solution=[f"tar -czf {name}.tar.gz {root}"],
        )
    return Task(
        instruction=f"Replace {name}.tar.gz by an archive of the same kind without its .log files; the paths of the "
        "other members stay the same.",
        files={f"{name}.tar.gz": _tar_gz({**packed, **others})},
        checks=[HasArchive(path=f"{name}.tar.gz", files=packed)],
        solution=[
            f"tar -xzf {name}.tar.gz && find {root} -name '*.log' -exec rm {{}} +",
            f"tar -czf {name}.tar.gz {root} && rm -r {root}",
        ],
    )


def _tar_gz(files: Mapping[str, str]) -> bytes:
    """Make an archive whose bytes depend only on the files."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for path, text in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(text.encode()), 0o644
            archive.addfile(member, io.BytesIO(text.encode()))
    return gzip.compress(plain.getvalue(), mtime=0)


def _grep(draw: Draw) -> Task:
    name, services, words = f"{draw.word()}.log", draw.words(3), draw.words(5)
    rows = [
        (draw.stream.choice(("ERROR", "WARN", "INFO")), draw.stream.choice(services), *draw.stream.choices(words, k=2))
        for _ in range(10 + 10 * draw.level)
    ]
    rows += [("ERROR", services[0], words[0], words[1])]
    lines = [f"09:{index:02} {' '.join(row)}" for index, row in enumerate(rows)]
    all_errors = [line for line, row in zip(lines, rows, strict=True) if row[0] == "ERROR"]
    errors = [line for line in all_errors if line.split()[2] == services[0]]
    messages = sorted({line.split(" ", 3)[3] for line in errors})
    of_service = f"grep '^[0-9:]* ERROR {services[0]} ' {name}"
    what, wanted, command = [
        ("all its lines of the level ERROR, in the same order", all_errors, f"grep ' ERROR ' {name}"),
        (f"all its lines of the level ERROR of the service {services[0]}, in the same order", errors, of_service),
        (
            f"the messages of the service {services[0]} of the level ERROR, without time, level and service: each "
            "different message once, sorted",
            messages,
            f"{of_service} | cut -d ' ' -f 4- | sort -u",
        ),
    ][draw.level - 1]
    text = "\n".join(lines) + "\n"
    return Task(
        instruction=f"Each line of {name} has a time, a level, a service and a message. Write to errors.txt {what}.",
        files={name: text},
        checks=[HasText(path="errors.txt", text="\n".join(wanted)), *_kept({name: text})],
        solution=[f"{command} > errors.txt"],
    )


def _totals(draw: Draw) -> Task:
    name, goods = f"{draw.word()}.csv", draw.words(2 + draw.level)
    rows = [(good, draw.stream.randint(1, 99)) for good in (*goods, *draw.stream.choices(goods, k=8 * draw.level))]
    draw.stream.shuffle(rows)
    totals: Counter[str] = Counter()
    for good, amount in rows:
        totals[good] += amount
    by_name, by_total = sorted(totals.items()), sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    if draw.level == 1:
        what, order = "the sum of the amounts of all rows, as a number and nothing else", ""
        wanted = str(totals.total())
    elif draw.level == 2:
        what, order = "a line good,total for each good, sorted by good, without a header", "sort"
        wanted = "\n".join(f"{good},{total}" for good, total in by_name)
    else:
        what = "the header good,total and a line for each good, from the largest total to the smallest"
        what, order = f"{what} (equal totals sorted by good)", "sort -t, -k2,2nr -k1,1"
        wanted = "\n".join(["good,total", *(f"{good},{total}" for good, total in by_total)])
    by_good = (
        f"awk -F, 'NR > 1 {{sum[$1] += $2}} END {{for (good in sum) print good \",\" sum[good]}}' {name} | {order}"
    )
    commands = [f"awk -F, 'NR > 1 {{sum += $2}} END {{print sum}}' {name}", by_good, f"(echo good,total; {by_good})"]
    text = "good,amount\n" + "".join(f"{good},{amount}\n" for good, amount in rows)
    return Task(
        instruction=f"{name} has the columns good and amount. Write to totals.csv {what}.",
        files={name: text},
        checks=[HasText(path="totals.csv", text=wanted), *_kept({name: text})],
        solution=[f"{commands[draw.level - 1]} > totals.csv"],
    )


def _join(draw: Draw) -> Task:
    people, orders = f"{draw.word()}.csv", f"{draw.word()}.csv"
    ids = draw.stream.sample(range(100, 1000), 4 + 2 * draw.level)
    names = dict(zip(ids, draw.words(len(ids)), strict=True))
    has_order = ids if draw.level == 1 else draw.stream.sample(ids, len(ids) - 2)
    ordered = [*has_order, *([draw.stream.randint(1000, 1099)] if draw.level == 3 else [])]
    amounts = {key: draw.stream.randint(1, 99) for key in draw.stream.sample(ordered, len(ordered))}
    joined = [f"{key},{names[key]},{amounts[key]}" for key in sorted(has_order)]
    both = "" if draw.level == 1 else ", only for ids that are in both files"
    files = {
        people: "id,name\n" + "".join(f"{key},{name}\n" for key, name in names.items()),
        orders: "id,amount\n" + "".join(f"{key},{amount}\n" for key, amount in amounts.items()),
    }
    return Task(
        instruction=f"{people} has the columns id and name, {orders} has the columns id and amount. Write to "
        f"joined.csv the header id,name,amount and one line for each id{both}, sorted by id.",
        files=files,
        checks=[HasText(path="joined.csv", text="\n".join(["id,name,amount", *joined])), *_kept(files)],
        solution=[
            f"tail -n +2 {people} | sort > left.txt; tail -n +2 {orders} | sort > right.txt",
            "(echo id,name,amount; join -t, left.txt right.txt) > joined.csv; rm left.txt right.txt",
        ],
    )


def _top(draw: Draw) -> Task:
    name, pages = f"{draw.word()}.log", draw.words(4)
    addresses = [
        f"10.0.{draw.stream.randint(0, 9)}.{index}" for index in draw.stream.sample(range(10, 99), 4 + draw.level)
    ]
    visits = [address for index, address in enumerate(addresses) for _ in range(2 + 2 * index)]
    draw.stream.shuffle(visits)
    rows = [(address, draw.stream.choice(pages), draw.stream.choice((200, 200, 404))) for address in visits]
    counted = [address for address, _, status in rows if draw.level < 3 or status == 404]
    counts = sorted(Counter(counted).items(), key=lambda item: (-item[1], item[0]))[: draw.level]
    failed = " with the status 404" if draw.level == 3 else ""
    plural = "address" if draw.level == 1 else f"{draw.level} addresses"
    text = "".join(f"{address} GET /{page} {status}\n" for address, page, status in rows)
    pattern = " 404$" if draw.level == 3 else "."
    return Task(
        instruction=f"Each line of {name} is a request: address, method, path and status. Write to top.txt the "
        f"{plural} with the most requests{failed}, one line each with the address, a space and the number of those "
        "requests, from the largest number to the smallest (equal numbers sorted by address).",
        files={name: text},
        checks=[
            HasText(path="top.txt", text="\n".join(f"{address} {count}" for address, count in counts)),
            *_kept({name: text}),
        ],
        solution=[
            f"grep '{pattern}' {name} | cut -d ' ' -f 1 | sort | uniq -c | sort -k1,1nr -k2,2 | head -n {draw.level} | "
            "awk '{print $2, $1}' > top.txt"
        ],
    )


def _replace(draw: Draw) -> Task:
    root, (old, new), words = draw.word(), draw.words(2), draw.words(4)
    ending, other = draw.stream.sample(("txt", "cfg", "md"), 2)
    with_old = [*words, old, old, *([f"{old}s"] if draw.level > 1 else [])]
    files = {path: draw.text(with_old, 4) + f"{old}\n" for path in draw.tree(root, 2 + draw.level, ending)}
    others = {f"{root}/{word}.{other}": draw.text(with_old, 4) for word in draw.words(2)}
    whole = " as a whole word" if draw.level > 1 else ""
    changed = {
        path: "".join(
            " ".join(new if word == old else word for word in line.split()) + "\n" for line in text.splitlines()
        )
        for path, text in files.items()
    }
    replace = f"re.sub(r'\\b{old}\\b', '{new}', text)"
    script = (
        f"import pathlib, re\nfor path in pathlib.Path('{root}').rglob('*.{ending}'):\n    text = path.read_text()\n"
    )
    return Task(
        instruction=f"In all .{ending} files in {root} and its subfolders, replace {old} by {new} wherever it occurs"
        f"{whole}. Leave other files as they are.",
        files={**files, **others},
        checks=[*_kept(changed), *_kept(others)],
        solution=[f"python3 - <<'END'\n{script}    path.write_text({replace})\nEND"],
    )


def _calls(program: Program, draw: Draw) -> Returns:
    """Draw calls of a function, with at least one among the first two that its bug makes go wrong."""
    names: dict[str, Callable[..., object]] = {}
    exec(program.source(has_bug=True), {}, names)  # from this package
    calls = [program.arguments(draw.stream) for _ in range(5)]
    while _works(names[program.name], program, arguments := program.arguments(draw.stream)):
        pass
    calls.insert(draw.stream.randrange(2), arguments)
    expected = [program.function(*one) for one in calls]
    return Returns(path=f"{program.name}.py", function=program.name, calls=calls, expected=expected)


def _works(function: Callable[..., object], program: Program, arguments: list[object]) -> bool:
    try:
        return function(*arguments) == program.function(*arguments)
    except (IndexError, ZeroDivisionError):
        return False


def _unit_tests(check: Returns) -> str:
    lines = ["import unittest", "", f"from {check.function} import {check.function}", "", ""]
    lines += [f"class Test{check.function.title().replace('_', '')}(unittest.TestCase):"]
    for index, (arguments, expected) in enumerate(list(zip(check.calls, check.expected, strict=True))[:3]):
        call = f"{check.function}({', '.join(map(repr, arguments))})"
        lines += [f"    def test_{index}(self):", f"        self.assertEqual({call}, {expected!r})", ""]
    return "\n".join([*lines, "", "if __name__ == '__main__':", "    unittest.main()", ""])


def _program_task(draw: Draw, *, has_source: bool) -> Task:
    programs = draw.stream.sample(TRAINING if draw.part == "train" else EVALUATION, draw.level)
    checks = [_calls(program, draw) for program in programs]
    tests = {f"test_{program.name}.py": _unit_tests(check) for program, check in zip(programs, checks, strict=True)}
    sources = {f"{program.name}.py": program.source(has_bug=True) for program in programs} if has_source else {}
    what = "Write Python functions for the unit tests in this folder."
    if has_source:
        what = "Fix the bugs in the Python files of this folder."
    parts = [
        f"{program.name}({', '.join(program.parameters)}) in {program.name}.py returns {program.sentence}."
        for program in programs
    ]
    return Task(
        instruction=" ".join([what, *parts, "Run the unit tests with python3 -m unittest."]),
        files={**tests, **sources},
        checks=checks,
        solution=[f"cat > {program.name}.py <<'END'\n{program.source()}END" for program in programs],
    )


#: The families of tasks by group: what they are about, and the function that draws a task.
GROUPS: Mapping[str, Mapping[str, tuple[str, Callable[[Draw], Task]]]] = {
    "files": {
        "rename": ("change the endings of files in a tree", _rename),
        "move": ("sort files into folders by the year in their names", _move),
        "find": ("find the files that contain a word", _find),
        "count": ("count files, lines, or lines with a word", _count),
        "permissions": ("give scripts and keys the right permissions", _permissions),
        "archive": ("extract, create or repack a tar archive", _archive),
    },
    "text": {
        "grep": ("select lines and messages of a log", _grep),
        "totals": ("sum a column of a CSV file, by key", _totals),
        "join": ("join two CSV files", _join),
        "top": ("find the addresses with the most requests in a log", _top),
        "replace": ("replace a word in some files of a tree", _replace),
    },
    "programs": {
        "fix": ("fix bugs in short Python functions with unit tests", partial(_program_task, has_source=True)),
        "write": ("write short Python functions from a sentence", partial(_program_task, has_source=False)),
    },
}
FAMILIES = {name: family for families in GROUPS.values() for name, family in families.items()}
