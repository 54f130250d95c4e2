"""``agentsgym push`` and ``pull``: environments as repositories of the Hugging Face Hub.

The repositories have the type ``model``, the Hub's type for code that is downloaded and run in one's own process. What
they contain is parsed, never imported.
"""

from __future__ import annotations

import ast
import hashlib
import re
import shutil
import tempfile
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer

from agentsgym.cli import options
from agentsgym.cli.console import FailureError, UsageError, out, plain, reported

MAX_BYTES = 100_000_000
_CARD = Path(__file__).parent.parent / "templates" / "card.txt"
_Repo = Annotated[str, typer.Argument(metavar="REPO", help="Repository, as USER/NAME.", show_default=False)]


@reported
def push(
    source: Annotated[
        Path, typer.Argument(metavar="FILE-OR-FOLDER", help="Python file or folder.", show_default=False)
    ],
    repo: _Repo,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
) -> None:
    """Upload an environment to the Hugging Face Hub, without importing it.

    With a file, its test, its .yaml file and the modules beside it that it imports are uploaded. Hidden files are left
    out. If there is no README.md, it is written from the docstrings.
    """
    folder, paths = _package_files(source)
    _check_size(((folder / path).stat().st_size for path in paths), str(source))
    files: dict[str, Any] = {"README.md": _card(repo, folder, paths)} | {path: str(folder / path) for path in paths}
    with _hub(repo) as hub:
        from huggingface_hub import CommitOperationAdd, get_token  # noqa: PLC0415

        if get_token() is None:
            raise FailureError("there is no token for the Hub: run `hf auth login` or set HF_TOKEN")
        hub.create_repo(repo, private=private or None, exist_ok=True)
        operations = [CommitOperationAdd(path, content) for path, content in files.items()]
        commit = hub.create_commit(repo, operations, commit_message="Upload with agentsgym push")
    _print(f"uploaded {', '.join(sorted(files))}")
    _print(commit.commit_url, "bold")


@reported
def pull(
    repo: _Repo,
    folder: Annotated[Path | None, typer.Argument(metavar="FOLDER", help="New folder (default: NAME).")] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="REVISION", help="Commit, branch or tag (default: the newest).")
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Import the environments, which runs their code, and show their settings.")
    ] = False,
) -> None:
    """Download an environment from the Hugging Face Hub, and list the modules that its files import.

    Without --trust, no downloaded code runs. Hidden files are left out, because editors and tools obey some of them.
    """
    from agentsgym.cli.commands.envs import show_env  # noqa: PLC0415

    folder = folder or Path(repo.rpartition("/")[2])
    if folder.exists():
        raise UsageError(f"{folder} already exists: name another folder")
    commit, paths = _download(repo, folder, revision)
    _print(f"{folder}: commit {commit} of {repo}")
    names: list[str] = []
    for path in paths:
        envs, imports = _parsed(folder / path) if path.endswith(".py") else ({}, set[str]())
        names += [f"{folder / path}:{name}" for name in envs]
        _print(f"  {path}" + (f"  imports {', '.join(sorted(imports))}" if imports else ""))
    if not names:
        raise FailureError(f"{repo} defines no environment, that is, a class with the method _step_episode")
    if not trust:
        _print("Nothing was imported. Read the files before you use them:")
    for name in names:
        if trust:
            show_env(options.find_env(name), as_json=False)
        else:
            _print(f"  agentsgym check {name}", "bold")


def _print(text: str, style: str = "") -> None:
    out().print(plain(" ".join(text.split("\n")), style=style), soft_wrap=True)


def _download(repo: str, folder: Path, revision: str | None) -> tuple[str, list[str]]:
    """Download everything or nothing; return the commit, with whose checksums all files agree, and their paths."""
    with _hub(repo) as hub:
        commit = hub.repo_info(repo, revision=revision).sha
        tree = hub.list_repo_tree(repo, recursive=True, revision=commit)
        files = {one.path: one for one in tree if hasattr(one, "size") and _belongs(one.path)}
        _check_size((file.size for file in files.values()), repo)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".pull-") as temporary:
            got = Path(temporary, "package")
            hub.snapshot_download(repo, revision=commit, local_dir=got, ignore_patterns=[".*", "*/.*"])
            shutil.rmtree(got / ".cache", ignore_errors=True)
            if damaged := [path for path, file in files.items() if not _is_intact((got / path).read_bytes(), file)]:
                raise FailureError(f"files of {repo} differ from their checksums: {', '.join(damaged)}")
            got.replace(folder)
    return commit, sorted(files)


def _is_intact(content: bytes, file: Any) -> bool:
    if file.lfs is not None:
        return hashlib.sha256(content).hexdigest() == file.lfs.sha256
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest() == file.blob_id


def _package_files(source: Path) -> tuple[Path, list[str]]:
    """The folder, and its files; to a Python file belong its test, its configuration and the modules beside it."""
    if source.is_dir():
        inner = [path for path in source.rglob("*") if path.is_file() and not path.is_symlink()]
        return source, sorted(filter(_belongs, (path.relative_to(source).as_posix() for path in inner)))
    if source.suffix != ".py" or not source.is_file():
        raise UsageError(f"there is no folder or Python file {source}")
    paths = [source, source.with_suffix(".yaml"), source.with_name(f"test_{source.name}")]
    for path in paths:  # grows by what they import
        if path.suffix == ".py" and path.is_file():
            paths += {source.with_name(f"{module}.py") for module in _parsed(path)[1]} - {*paths}
    return source.parent, sorted(path.name for path in paths if path.is_file())


def _belongs(path: str) -> bool:
    return not any(part.startswith(".") or part in {"__pycache__", "outputs"} for part in PurePosixPath(path).parts)


def _check_size(sizes: Iterable[int], what: str) -> None:
    if (size := sum(sizes)) > MAX_BYTES:
        limit = f"{size / 1e6:,.0f} MB, more than the {MAX_BYTES / 1e6:.0f} MB of an environment"
        raise UsageError(f"{what} has {limit}: keep large data in a dataset repository")


def _card(repo: str, folder: Path, paths: Sequence[str]) -> bytes:
    """The page of the repository: the docstrings of its environments, and commands to try."""
    sources = {path: _parsed(folder / path)[0] for path in paths if path.endswith(".py")}
    envs = {f"{path}:{name}": about for path, found in sources.items() for name, about in found.items()}
    if not envs:
        raise UsageError(f"{folder} defines no environment, that is, a class with the method _step_episode")
    name = repo.rpartition("/")[2]
    about = "\n\n".join(f"## {env.rpartition(':')[2]}\n\n{text}" for env, text in envs.items())
    commands = "\n".join(f"agentsgym check {name}/{env}" for env in envs)
    return _CARD.read_text(encoding="utf-8").format(name=name, repo=repo, about=about, commands=commands).encode()


def _parsed(path: Path) -> tuple[dict[str, str], set[str]]:
    """The docstrings of a Python file's environments, by class name, and the top-level modules that it imports."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError) as error:
        raise FailureError(f"{path} is not valid Python: {error}") from error
    envs: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not path.name.startswith("test_"):
            methods = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
            if "_step_episode" in methods or any(re.search(r"\wEnv$", ast.unparse(base)) for base in node.bases):
                envs[node.name] = ast.get_docstring(node) or ""
    nodes = list(ast.walk(tree))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return envs, {name.partition(".")[0] for name in names} - {"__future__"}


@contextmanager
def _hub(repo: str) -> Generator[Any]:
    """Yield the Hub's client, an ``HfApi``, and explain its errors in a sentence."""
    from huggingface_hub import HfApi, errors  # noqa: PLC0415

    hub = HfApi(library_name="agentsgym")
    try:
        yield hub
    except errors.HFValidationError as error:
        raise UsageError(f"REPO must be USER/NAME, got {repo!r}") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise FailureError(f"{hub.endpoint} has no such repository or revision that you can read: {repo}") from error
    except errors.HfHubHTTPError as error:
        refusal = "your token may not do this" if error.response.status_code in {401, 403} else str(error)
        raise FailureError(f"{hub.endpoint} refused the request for {repo}: {refusal}") from error
    except (errors.HTTPError, OSError) as error:  # of the network, or of the disk
        raise FailureError(f"{repo} cannot be transferred: {error}") from error
