"""Build a release and use it as a stranger would: ``python -m tools.release``, or ``make release``.

::

    the last commit ─▶ export ─▶ sdist ─▶ wheel ─▶ metadata, content, sizes
                                   │        └▶ an empty environment: the commands, doctests, a generated environment
                                   └▶ unpacked: the demo, and a few tests

Everything happens in a temporary folder outside the repository. If every step has passed, the two files are copied to
``dist/``. Nothing is uploaded: the command that does so is printed at the end. The running Python needs ``build`` and
``twine``; the new environment gets the versions of ``constraints.txt``.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_WHEEL_BYTES = 1_500_000
MAX_INSTALL_S = 90  # beyond torch; on a slow network, --max-install-s
_SHOWN_LINES = 40  # of a failed command's output
_MODULE = "guess_a_word"
_TINY_TRAINING = (
    "training.max_steps=2",
    "training.store_rollouts=true",
    "warm_start.num_episodes=100",
    "warm_start.max_steps=10",
    "evaluation.num_tasks=20",
)
_TINY_DEMO = "--num_games 40 --num_demonstrations 200 --warm_start_steps 20 --max_steps 4"
#: Doctests of what needs no extra, and tests of each part that are quick and train nothing.
_DOCTESTED = ("texts", "errors", "fields", "types", "seeding", "credit", "statistics", "tokens", "reports", "cli")
_SMOKE_TESTS = (
    "test_public_api.py",
    "test_types.py",
    "test_tiny.py",
    "cli/test_naming.py",
    "credit/test_credit_returns.py",
    "store/test_store.py",
)


class ReleaseError(Exception):
    """A step failed."""


@dataclass(kw_only=True)
class Report:
    """The steps that passed.

    Attributes:
        rows: Name, duration in seconds and remarks of each step.
    """

    rows: list[tuple[str, float, str]] = field(default_factory=list[tuple[str, float, str]])

    @contextmanager
    def step(self, name: str) -> Generator[list[str]]:
        """Time a step; strings added to the yielded list are its remarks."""
        print(f"{name} …", flush=True)
        remarks: list[str] = []
        start = time.monotonic()
        yield remarks
        self.rows.append((name, time.monotonic() - start, ", ".join(remarks)))

    def table(self) -> str:
        """Return the steps as a table."""
        width = max((len(name) for name, _, _ in self.rows), default=0)
        return "\n".join(f"passed  {name:{width}}  {seconds:6.1f} s  {said}" for name, seconds, said in self.rows)


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without this process's Python settings, and return its output.

    Raises:
        ReleaseError: The command failed; the message ends with the last lines of its output.
    """
    ran = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ran.returncode:
        said = "\n".join(ran.stdout.splitlines()[-_SHOWN_LINES:])
        raise ReleaseError(f"{' '.join(map(str, command))} ended with exit code {ran.returncode}:\n{said}")
    return ran.stdout


def environment() -> dict[str, str]:
    """Return the variables for commands: none that concern the running Python; no color, and no access to the Hub."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return inherited | {"NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}


def _processor_time_s() -> float:
    """Return the processor time that finished commands have used, which, unlike time, does not depend on others."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def stated_version(root: Path) -> str:
    """Return the version of the sources.

    Raises:
        ReleaseError: The changelog's newest section is not that of the version, or has no date.
    """
    source = (root / "agentsgym/__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    newest = re.search(r"^## (.*)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    if newest is None or not re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", newest[1]):
        found = "none" if newest is None else repr(newest[1])
        raise ReleaseError(f"CHANGELOG.md must begin with a section '[{version}] - YYYY-MM-DD', got {found}")
    return version


def files_below(folder: Path, *, to: Path) -> set[str]:
    """Return the paths of all files in a folder, relative to ``to``, without compiled Python."""
    return {
        path.relative_to(to).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def check_wheel(wheel: Path, root: Path) -> list[str]:
    """Compare a wheel with the package from which it was built.

    Args:
        wheel: The wheel.
        root: The folder that contains ``agentsgym/``.

    Returns:
        Every error: files that are missing or do not belong, and links and commands in the description that only work
        in the repository.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        description = archive.read(metadata).decode().partition("\n\n")[2]
    package = files_below(root / "agentsgym", to=root)
    links = re.findall(r"\]\((?!https://|#)([^)]+)\)", description)
    return [
        *(f"{name} is missing" for name in sorted(package - names)),
        *(f"{name} does not belong in the wheel" for name in sorted(names - package)),
        *(f"the description links to {link}, which is relative" for link in links),
        *(f"the description contains {text!r}" for text in ("pip install -e", "HFPR_") if text in description),
    ]


def check_sdist(sdist: Path, root: Path) -> list[str]:
    """Return every file of the export that a source distribution lacks, and every file that it has in addition."""
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    wanted = {*files_below(root, to=root), "PKG-INFO"}
    return [
        *(f"{name} is missing" for name in sorted(wanted - names)),
        *(f"{name} does not belong in the sdist" for name in sorted(names - wanted)),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The files of a release.

    Attributes:
        version: The version.
        export: The exported commit.
        wheel: The wheel.
        sdist: The source distribution.
    """

    version: str
    export: Path
    wheel: Path
    sdist: Path


def build(folder: Path, report: Report) -> Built:
    """Export the last commit, build it in ``folder``, and check the result.

    Raises:
        ReleaseError: A check failed.
    """
    export, dist = folder / "export", folder / "dist"
    with report.step("export of the last commit") as remarks:
        export.mkdir()
        archive = folder / "export.tar"
        run("git", "archive", "--output", archive, "HEAD", cwd=ROOT)
        with tarfile.open(archive) as opened:
            opened.extractall(export, filter="data")
        remarks.append(run("git", "rev-parse", "--short", "HEAD", cwd=ROOT).strip())
        if run("git", "status", "--porcelain", cwd=ROOT):
            remarks.append("uncommitted changes are not part of it")
        version = stated_version(export)
        remarks.append(f"version {version}")
    with report.step("build") as remarks:
        run(sys.executable, "-m", "build", "--outdir", dist, export, cwd=folder)
        built = Built(
            version=version,
            export=export,
            wheel=dist / f"agentsgym-{version}-py3-none-any.whl",
            sdist=dist / f"agentsgym-{version}.tar.gz",
        )
        sizes = {path.suffix: path.stat().st_size for path in (built.wheel, built.sdist)}
        remarks += [f"{suffix} {size / 1e6:.2f} MB" for suffix, size in sizes.items()]
        if sizes[".whl"] > MAX_WHEEL_BYTES:
            raise ReleaseError(f"the wheel has {sizes['.whl']:,} bytes; at most {MAX_WHEEL_BYTES:,} are allowed")
    with report.step("metadata (twine check --strict)"):
        run(sys.executable, "-m", "twine", "check", "--strict", built.wheel, built.sdist, cwd=folder)
    with report.step("content of wheel and sdist") as remarks:
        if errors := [*check_wheel(built.wheel, export), *check_sdist(built.sdist, export)]:
            raise ReleaseError("\n".join(errors))
        remarks.append(f"{len(files_below(export / 'agentsgym', to=export))} files in the package")
    return built


class Stranger:
    """Somebody who has only the two files and an empty environment.

    Attributes:
        bin: The folder with the environment's commands.
        work: An empty folder outside the repository, in which the commands run.
    """

    def __init__(self, folder: Path, built: Built, report: Report) -> None:
        self.built = built
        self.report = report
        self.folder = folder
        self.venv = folder / "venv"
        self.bin = self.venv / "bin"
        self.work = folder / "work"
        self.work.mkdir()

    def agentsgym(self, *arguments: str | Path) -> str:
        """Run the command line."""
        return run(self.bin / "agentsgym", *arguments, cwd=self.work)

    def pip(self, *arguments: str | Path) -> None:
        """Install with the versions of ``constraints.txt``."""
        constraints = self.built.export / "constraints.txt"
        run(self.bin / "python", "-m", "pip", "install", "--constraint", constraints, *arguments, cwd=self.work)

    def install(self, max_install_s: float) -> None:
        """Install the wheel into an empty environment.

        Raises:
            ReleaseError: It takes too long, beside torch.
        """
        with self.report.step("an empty environment with torch"):
            run(sys.executable, "-m", "venv", self.venv, cwd=self.folder)
            self.pip("torch")
        with self.report.step("installation of the wheel beyond torch") as remarks:
            start, used = time.monotonic(), _processor_time_s()
            self.pip(self.built.wheel)
            seconds = time.monotonic() - start
            remarks.append(f"{_processor_time_s() - used:.0f} s of them computing")
            if seconds > max_install_s:
                raise ReleaseError(f"the installation took {seconds:.0f} s; at most {max_install_s:g} s are allowed")
            run(self.bin / "python", "-m", "pip", "check", cwd=self.work)

    def use(self) -> None:
        """Create, check, evaluate, train and view an environment.

        Raises:
            ReleaseError: A command failed, or printed something unexpected.
        """
        with self.report.step("agentsgym --version, envs"):
            printed = self.agentsgym("--version").strip()
            if printed != self.built.version:
                raise ReleaseError(f"agentsgym --version must print {self.built.version}, got {printed}")
            self.agentsgym("envs", "--all")
        with self.report.step("agentsgym eval"):
            self.agentsgym("eval", "TwentyQuestions", "--agent", "random", "--agent", "policy:tiny", "-n", "20")
        with self.report.step("agentsgym new, check"):
            self.agentsgym("new", "GuessAWord")
            self.agentsgym("check", f"{_MODULE}.py", "--strict")
        with self.report.step("agentsgym train, check") as remarks:
            settings = [word for value in _TINY_TRAINING for word in ("--set", value)]
            self.agentsgym("train", f"{_MODULE}.yaml", *settings)
            self.agentsgym("check", f"outputs/{_MODULE}/rollouts")
            remarks.append("2 steps")
        with self.report.step("agentsgym view") as remarks:
            self.agentsgym("view", f"outputs/{_MODULE}/rollouts", "--out", "page.html")
            remarks.append(self.served_page())

    def served_page(self) -> str:
        """Serve the viewer, load its page, and stop it with Ctrl-C.

        Raises:
            ReleaseError: The viewer does not start, serves something else, or does not end.
        """
        command = [self.bin / "agentsgym", "view", f"outputs/{_MODULE}/rollouts"]
        with subprocess.Popen(
            command, cwd=self.work, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as server:
            try:
                printed = server.stdout.readline() if server.stdout else ""
                address = re.search(r"http://\S+", printed)
                if address is None:
                    raise ReleaseError(f"agentsgym view must print its address, got {printed!r}")
                with urllib.request.urlopen(address[0], timeout=30) as answer:
                    page: bytes = answer.read()
                server.send_signal(signal.SIGINT)
                if server.wait(30) or b"<html" not in page:
                    raise ReleaseError(f"agentsgym view served {page[:100]!r} and ended with {server.returncode}")
            finally:
                server.kill()
        return f"a page of {len(page) / 1e3:.0f} KB"

    def test(self) -> None:
        """Run the package's doctests and the generated test, without the repository.

        Raises:
            ReleaseError: A test failed.
        """
        with self.report.step("pytest --pyargs agentsgym, test of the new environment") as remarks:
            self.pip("pytest", "hypothesis")
            pytest = (self.bin / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
            parts = [f"agentsgym.{part}" for part in _DOCTESTED]
            printed = run(*pytest, "--doctest-modules", "--pyargs", *parts, cwd=self.work)
            remarks.append(printed.splitlines()[-1])
            run(*pytest, f"test_{_MODULE}.py", cwd=self.work)

    def unpack(self) -> None:
        """Run the demo and a few tests of the source distribution.

        Raises:
            ReleaseError: One of them failed.
        """
        with tarfile.open(self.built.sdist) as archive:
            archive.extractall(self.folder, filter="data")
        source = self.folder / self.built.sdist.name.removesuffix(".tar.gz")
        with self.report.step("make demo, in the unpacked sdist"):
            run("make", "demo", f"VENV={self.venv}", f"ARGS={_TINY_DEMO}", cwd=source)
        with self.report.step("tests of the unpacked sdist") as remarks:
            tests = [f"tests/{name}" for name in _SMOKE_TESTS]
            printed = run(self.bin / "python", "-m", "pytest", "-q", "-m", "not long", *tests, cwd=source)
            remarks.append(printed.splitlines()[-1])


def release(folder: Path, max_install_s: float, report: Report) -> Built:
    """Take every step in an empty folder.

    Raises:
        ReleaseError: A step failed.
    """
    built = build(folder, report)
    stranger = Stranger(folder, built, report)
    stranger.install(max_install_s)
    stranger.use()
    stranger.test()
    stranger.unpack()
    return built


def upload_commands(paths: Iterable[Path], version: str) -> str:
    """Return the commands that publish the release."""
    files = " ".join(os.path.relpath(path, ROOT) for path in paths)
    twine = os.path.relpath(sys.executable, ROOT) if Path(sys.executable).is_relative_to(ROOT) else sys.executable
    return f"git tag v{version} && git push origin v{version}\n{twine} -m twine upload {files}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and try a release; return 1 if a step fails."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--max-install-s",
        type=float,
        default=MAX_INSTALL_S,
        help="longest time that installing the wheel may take, in seconds, torch excluded (default: %(default)s)",
    )
    parser.add_argument("--keep", action="store_true", help="keep the temporary folder")
    options = parser.parse_args(arguments)
    report = Report()
    folder = Path(tempfile.mkdtemp(prefix="agentsgym-release-"))
    try:
        built = release(folder, options.max_install_s, report)
        dist = ROOT / "dist"
        dist.mkdir(exist_ok=True)
        files = [Path(shutil.copy(path, dist)) for path in (built.sdist, built.wheel)]
    except ReleaseError as error:
        print(f"\n{report.table()}\nFAILED  {error}")
        return 1
    finally:
        if options.keep:
            print(f"kept {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{report.table()}\n\nNothing has been uploaded. To publish the release:\n")
    print(upload_commands(files, built.version))
    return 0


if __name__ == "__main__":
    sys.exit(main())
