"""The house: imports run one way, files are named and small, flags and outcomes are documented and reached."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bounded.outcomes import CallOutcome, Outcome, SourceGap
from command_line import FLAGS
from terminal import answer_dict
from test_terminal import an_answer

ROOT = Path(__file__).parent
PACKAGES = {"bounded", "models", "sources", "reviewing", "evidence", "bench"}
README = (ROOT / "README.md").read_text(encoding="utf-8")
FILES = sorted(  # not the copies of changed sources that lie in run folders
    path for pattern in ("*.py", "*/*.py") for path in ROOT.glob(pattern) if not path.parent.name.startswith(".")
)
PRODUCT = [path for path in FILES if not path.name.startswith(("test_", "conftest", "fault_cases"))]
SCRIPTS = {path.stem for path in ROOT.glob("*.py")}

# What each package may import of ours; a script at the top may import any package.
MAY_IMPORT = {
    "bounded": {"bounded"},
    "models": {"bounded", "models"},
    "sources": {"bounded", "sources"},
    "reviewing": {"bounded", "reviewing"},
    "evidence": {"bounded", "evidence"},
}
# Whoever checks a folder takes these two to wherever the folder is, and nothing else but Python.
ALONE = ("evidence/verify.py", "evidence/rederive.py")
# Of the scripts, what they share of their command lines and output lies lowest.
LOWEST_SCRIPT_IMPORTS = {"bounded"}
# The ladder, the end, the map of provider failures, foreign code's own words, and the thread of a foreign guard.
CATCH_ALL = ("bounded/calls.py", "bounded/exit.py", "models/failures.py", "bounded/text.py", "authorisation.py")
HEAVY = {"langgraph", "langchain_core", "langchain_google_genai", "langchain_ollama", "langchain_openai", "google",
         "ollama", "openai", "httpx", "httpx2"}  # fmt: skip
LIGHT = ["graph.py", "command_line.py", "terminal.py", "models/factory.py", "bounded/outcomes.py", "bounded/limits.py",
         "bounded/timeouts.py", "bounded/exit.py", "bounded/run.py", "bounded/calls.py", "record.py", "live_probe.py",
         "recording.py", "scenarios.py", "summary.py", "authorisation.py", "models/meter.py", "preflight.py",
         "evidence/folder.py", "evidence/accounting.py", "evidence/provenance.py", "evidence/capture.py",
         "evidence/timeline.py"]  # fmt: skip


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name their package"
            yield (node.module or "").split(".")[0]


def top_level_imports(path: Path) -> set[str]:
    """What importing the module imports: not what stands in functions or under TYPE_CHECKING."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {module for node in body if isinstance(node, ast.Import | ast.ImportFrom) for module in imported(node)}


@pytest.mark.parametrize("path", PRODUCT, ids=name)
def test_imports_run_one_way(path: Path) -> None:
    ours = set(imported(ast.parse(path.read_text(encoding="utf-8")))) & (PACKAGES | SCRIPTS)
    package = path.relative_to(ROOT).parts[0]
    if package in MAY_IMPORT:
        assert ours <= MAY_IMPORT[package]
    elif path.name in ("command_line.py", "terminal.py"):
        assert ours <= LOWEST_SCRIPT_IMPORTS
    elif path.name == "ci.py":
        assert ours <= {"bounded", "sources"}


@pytest.mark.parametrize("file", ALONE)
def test_the_verifier_stands_on_the_standard_library_alone(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    whole = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module for module in whole if module and module.startswith("evidence")} <= {"evidence.rederive"}
    assert set(imported(tree)) - {"evidence"} <= sys.stdlib_module_names


@pytest.mark.parametrize("path", LIGHT)
def test_importing_what_stands_before_the_run_loads_no_framework(path: str) -> None:
    assert not top_level_imports(ROOT / path) & HEAVY


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_file_says_in_its_first_line_what_it_is_responsible_for(path: Path) -> None:
    if path.name == "__init__.py":
        assert path.read_text(encoding="utf-8") == ""
        return
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring
    assert docstring.splitlines()[0].endswith((".", ":"))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_and_functions_are_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    test = path not in PRODUCT
    assert len(text.splitlines()) <= (450 if test else 350)
    assert path.stem not in ("utils", "helpers", "common", "misc")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = [
                n for n in ast.walk(node) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n is not node
            ]
            lines = _length(node) - sum(_length(n) for n in inner)
            assert lines <= 50, f"{node.name} has {lines} lines of its own"


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("path", [path for path in PRODUCT if path.parts[-2] != "bench"], ids=name)
def test_every_product_file_has_its_tests_beside_it(path: Path) -> None:
    assert path.name == "__init__.py" or path.with_name(f"test_{path.name}").exists()


@pytest.mark.parametrize("path", PRODUCT, ids=name)
def test_only_bounded_waits_with_bounds_and_only_the_ladder_and_the_map_catch_everything(path: Path) -> None:
    bounded = path.relative_to(ROOT).parts[0] == "bounded"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "asyncio":
            assert bounded or node.attr not in ("timeout", "timeout_at", "wait", "wait_for")
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            if caught in ("everything", "Exception", "BaseException"):
                assert name(path) in CATCH_ALL


@pytest.mark.parametrize("path", PRODUCT, ids=name)
def test_the_readme_says_what_each_file_is(path: Path) -> None:
    assert path.name == "__init__.py" or f"`{name(path)}`" in README or f"`{path.name}`" in README


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_the_readme_documents_each_flag_and_its_twin(flag: object) -> None:
    (known,) = [known for known in FLAGS if known is flag]
    assert f"`{known.name}`" in README
    assert f"`{known.twin}`" in README


@pytest.mark.parametrize("word", [*Outcome, *CallOutcome, *SourceGap])
def test_the_readme_documents_each_word_for_an_ending(word: str) -> None:
    assert f"`{word}`" in README


def test_the_readme_documents_each_field_of_the_json() -> None:
    from bounded.receipts import Receipt

    fields = set(answer_dict(an_answer(reason="r", usage_fault="u"))) | set(Receipt.__slots__) - {"more"}
    assert not {field for field in fields if f"`{field}`" not in README}


@pytest.mark.parametrize("outcome", Outcome, ids=lambda outcome: outcome.value)
def test_every_outcome_is_reached_by_the_real_graph_in_a_test(outcome: Outcome) -> None:
    files = ("test_graph.py", "test_graph_cuts.py", "test_review.py")
    tests = "".join((ROOT / name).read_text(encoding="utf-8") for name in files)
    assert f"Outcome.{outcome.name}" in tests


def test_the_readmes_files_exist() -> None:
    rows = [line for line in README.splitlines() if line.startswith("| `") and ".py`" in line]
    named = [part for row in rows for part in row.split("|")[1].split("`")[1::2] if part.endswith(".py")]
    assert named
    assert [file for file in named if not (ROOT / file).exists()] == []
