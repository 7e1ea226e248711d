"""The house rules that no linter knows, each as a test."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "penstock"
TESTS = ROOT / "tests"
QUERIES = SOURCE / "stores" / "sql"

MODULE_LINES_MAX = 350
FUNCTION_LINES_MAX = 50

VAGUE_NAMES = {"util", "utils", "common", "helper", "helpers", "manager", "managers", "misc"}
VAGUE_CLASS = re.compile(r"(Manager|Helper|Util|Utils)$")
SQL = re.compile(r"\b(SELECT\s|INSERT\s+INTO\s|UPDATE\s+\S+\s+SET\s|DELETE\s+FROM\s)")
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "shelve", "marshal"}
# In pieces, so that this file does not contain what it forbids.
REGISTRY = re.compile(
    "|".join(
        (
            r"pypi" + r"\.org",
            r"python" + r"hosted\.org",
            r"registry" + r"\.npmjs\.org",
            r"https?://[^\s\"')]+" + r"/simple\b",
            r"(index-url|find-links)[ =\"']+" + r"[a-z]+:/",
        )
    )
)
MARKDOWN_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
UNTRACKED_FOLDERS = {".git", ".venv", ".penstock", "dist", "build", "__pycache__"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_modules_stay_short_enough_to_read_in_one_sitting() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in modules(SOURCE)}
    refuse(
        [
            f"{name_of(path)}: {lines} lines"
            for path, lines in lengths.items()
            if lines > MODULE_LINES_MAX
        ],
        f"a module has at most {MODULE_LINES_MAX} lines: split it by what its parts promise",
    )


def test_functions_fit_on_a_screen() -> None:
    refuse(
        [
            f"{place(path, node)}: {node.name} has {lines_of(node)} lines"
            for path, node in nodes(SOURCE)
            if isinstance(node, Function) and lines_of(node) > FUNCTION_LINES_MAX
        ],
        f"a function has at most {FUNCTION_LINES_MAX} lines: name its steps",
    )


def test_only_the_command_line_and_the_demo_print() -> None:
    refuse(
        [
            place(path, node)
            for path, node in nodes(SOURCE)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
            and not {"cli", "demo"} & words_of(path)
        ],
        "print() belongs to the command line: emit a signal instead",
    )


def test_only_the_runtime_sleeps() -> None:
    refuse(
        [
            place(path, node)
            for path, node in [*nodes(SOURCE), *nodes(TESTS)]
            if is_sleep(node) and "runtime" not in words_of(path)
        ],
        "time.sleep belongs to runtime/: elsewhere, and in tests, wait for what you need",
    )


def test_every_module_class_and_function_that_is_public_says_what_it_promises() -> None:
    undocumented = []
    for path in modules(SOURCE):
        tree = parsed(path)
        # An empty file may be silent: it only marks a package.
        if tree.body and ast.get_docstring(tree) is None:
            undocumented.append(f"{name_of(path)}: the module")
        undocumented += [
            f"{place(path, node)}: {node.name}"
            for node in tree.body
            if isinstance(node, ast.ClassDef | Function)
            and not node.name.startswith("_")
            and ast.get_docstring(node) is None
        ]
    refuse(undocumented, "a public name has a docstring: one line that says what it promises")


def test_python_never_assembles_sql() -> None:
    refuse(
        [place(path, node) for path, node in nodes(SOURCE) if is_assembled_sql(node)],
        "SQL lives in .sql files and takes parameters: Python does not build it from pieces",
    )


def test_nothing_unpickles() -> None:
    refuse(
        [
            f"{place(path, node)}: {name}"
            for path, node in nodes(SOURCE)
            for name in imported_by(node)
            if name.partition(".")[0] in UNSAFE_MODULES
        ],
        "reading a pickle runs what is inside: use JSON",
    )


def test_text_has_an_encoding_whatever_the_locale() -> None:
    refuse(
        [place(path, node) for path, node in nodes(SOURCE) if is_text_as_the_locale_has_it(node)],
        'a file is read and written alike everywhere: encoding="utf-8"',
    )


def test_no_file_names_a_package_registry() -> None:
    refuse(
        [
            f"{name_of(path)}:{number}"
            for path in project_files()
            for number, line in enumerate(text_of(path).splitlines(), 1)
            if REGISTRY.search(line)
        ],
        "where packages come from is each machine's business, so no file says it",
    )


def test_every_query_has_a_name_of_its_own_and_a_reason() -> None:
    faults = []
    for path in sorted(QUERIES.rglob("*.sql")):
        preface, *queries = re.split(r"^-- name:", path.read_text(), flags=re.MULTILINE)
        if any(line.strip() and not line.startswith("--") for line in preface.splitlines()):
            faults.append(f"{name_of(path)}: starts with a statement that has no `-- name:`")
        seen: set[str] = set()
        for query in queries:
            name, _, rest = query.partition("\n")
            if name in seen:
                faults.append(f"{name_of(path)}: two queries are called{name}")
            if not rest.startswith("-- "):
                faults.append(f"{name_of(path)}: {name.strip()} has no comment under its name")
            seen.add(name)
    refuse(faults, "a query has a name of its own and, below it, a comment that gives the reason")


def test_no_module_or_class_has_a_name_that_says_nothing() -> None:
    vague = [
        name_of(path)
        for folder in (SOURCE, TESTS)
        for path in modules(folder)
        if VAGUE_NAMES & words_of(path)
    ]
    vague += [
        f"{place(path, node)}: {node.name}"
        for path, node in nodes(SOURCE)
        if isinstance(node, ast.ClassDef) and VAGUE_CLASS.search(node.name)
    ]
    refuse(vague, "a name says what is inside; these could hold anything")


def test_every_link_to_a_file_leads_somewhere() -> None:
    refuse(
        [
            f"{name_of(path)}: {target}"
            for path in project_files()
            if path.suffix == ".md"
            for target in MARKDOWN_LINK.findall(without_code(text_of(path)))
            if not leads_somewhere(path, target)
        ],
        "a link to a file in this repository resolves",
    )


# ── the words used above ───────────────────────────────────────────────────────────────────────


def refuse(faults: list[str], rule: str) -> None:
    """Fail with the rule and every place that breaks it."""
    assert not faults, "\n  ".join([f"{rule}.", *faults])


def modules(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def nodes(folder: Path) -> Iterator[tuple[Path, ast.AST]]:
    for path in modules(folder):
        for node in ast.walk(parsed(path)):
            yield path, node


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def words_of(path: Path) -> set[str]:
    """The folders a module lies in, and its own name."""
    return {*path.relative_to(ROOT).parent.parts, path.stem}


def place(path: Path, node: ast.AST) -> str:
    return f"{name_of(path)}:{getattr(node, 'lineno', 0)}"


def lines_of(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def is_sleep(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="time"), attr="sleep"):
            return True
        case ast.ImportFrom(module="time", names=names):
            return any(alias.name == "sleep" for alias in names)
    return False


def is_text_as_the_locale_has_it(node: ast.AST) -> bool:
    """Ruff's PLW1514 does not see through variables, nor files of packages."""
    match node:
        case ast.Call(func=ast.Attribute(attr="read_text" | "write_text")):
            return not has_encoding(node)
        case ast.Call(func=ast.Name(id="open") | ast.Attribute(attr="open" | "fdopen")):
            modes = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            return any(is_text_mode(mode) for mode in modes) and not has_encoding(node)
    return False


def is_text_mode(mode: object) -> bool:
    return isinstance(mode, str) and re.fullmatch(r"[rwax+t]+", mode) is not None


def has_encoding(call: ast.Call) -> bool:
    return any(keyword.arg == "encoding" for keyword in call.keywords)


def is_assembled_sql(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr(values=parts):
            # An f-string without a placeholder is assembled from nothing.
            return any(isinstance(part, ast.FormattedValue) for part in parts) and any(
                is_sql(part) for part in parts
            )
        case ast.BinOp(op=ast.Add() | ast.Mod(), left=left, right=right):
            return is_sql(left) or is_sql(right)
        case ast.Call(func=ast.Attribute(value=value, attr="format" | "join" | "replace")):
            return is_sql(value)
    return False


def is_sql(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and SQL.search(node.value) is not None
    )


def imported_by(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module)):
            return [module]
    return []


@cache
def project_files() -> list[Path]:
    """What is or would be committed; without git, whatever lies here that is not a by-product."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode == 0:
        paths = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    else:
        paths = [
            path
            for path in ROOT.rglob("*")
            if not UNTRACKED_FOLDERS & set(path.relative_to(ROOT).parts)
        ]
    return sorted(path for path in paths if path.is_file())


@cache
def text_of(path: Path) -> str:
    return path.read_text(errors="replace")


def without_code(markdown: str) -> str:
    markdown = re.sub(r"^(```|~~~).*?^\1", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", markdown)


def leads_somewhere(page: Path, target: str) -> bool:
    if re.match(r"[a-z][a-z+.-]*:", target) or target.startswith("#"):
        return True
    path = target.partition("#")[0]
    return (ROOT / path[1:] if path.startswith("/") else page.parent / path).exists()
