"""The house plan: folders import only to their left, the package ships whole, nothing of the user's gets in between."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ("dumpers", "compare", "reports", "align")
TORCH_FREE = ("compare", "reports")


def modules(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*.py") if "build" not in path.parts]


def folder_of(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ORDER[:3] else "align"


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names if node.module == "align")
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


@pytest.mark.parametrize("folder", ORDER)
def test_a_folder_imports_only_itself_and_what_is_to_its_left(folder: str) -> None:
    allowed = set(ORDER[: ORDER.index(folder) + 1])
    strangers = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in modules(folder)
        for name in imports(path)
        if name.split(".")[0] == "align" and folder_of(name) not in allowed
    }
    assert not strangers


@pytest.mark.parametrize("folder", TORCH_FREE)
def test_comparing_and_reporting_never_import_torch(folder: str) -> None:
    assert not [path for path in modules(folder) if any(name.split(".")[0] == "torch" for name in imports(path))]


def test_one_file_imports_h5py() -> None:
    found = [
        path.name
        for folder in ORDER
        for path in modules(folder)
        if any(name.split(".")[0] == "h5py" for name in imports(path))
    ]
    assert found == ["store.py"]


def test_every_package_is_shipped() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"])
    there = set()
    for folder in ORDER:
        for path in modules(folder):
            parts = path.parent.relative_to(ROOT).parts
            there.add(".".join(parts if parts[0] == "align" else ("align", *parts)))
    assert there <= listed
    assert {name for name in listed if name != "align.reports.templates"} <= there


def run_python(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True, env=_environment()
    )
    return done.stdout.strip()


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, ["", str(ROOT)]))}


def test_a_hostile_compare_in_the_users_folder_changes_nothing(tmp_path: Path) -> None:
    for name in ORDER[:3]:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('hostile')\n")
    code = "import align.compare.model, align.dumpers.model, align.reports.model; print('unharmed')"
    assert run_python(code, tmp_path) == "unharmed"


def test_help_imports_no_torch_and_no_numpy(tmp_path: Path) -> None:
    code = (
        "import sys; from align.cli import app\n"
        "try: app(['--help'], standalone_mode=False)\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'h5py', 'pydantic'} & set(sys.modules)))"
    )
    assert run_python(code, tmp_path).splitlines()[-1] == "[]"


def test_comparing_files_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; import align.offline, align.show, align.html_report; print('ok')"
    assert run_python(code, tmp_path) == "ok"
