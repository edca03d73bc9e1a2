"""The arrows between the modules, read from their source, and what stays unloaded at start."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "specllama"
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))

# What a module may import from specllama, besides errors. A row names only rows above it, so
# there is no way round in a circle. A new module needs its row here.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "sampling": set(),
    "storage": set(),
    "folders": {"storage"},
    "acceptance": {"sampling"},
    "coupling": {"sampling"},
    "significance": set(),
    "costs": set(),
    "lookahead": {"costs", "acceptance", "sampling"},
    "shared_length": {"costs", "lookahead", "acceptance", "sampling"},
    "checkpoints": set(),
    "lm": {"checkpoints"},
    "vocabulary_map": set(),
    "drafting": {"vocabulary_map", "lookahead", "lm", "acceptance", "sampling"},
    "speculation": {"costs", "drafting", "lookahead", "lm", "acceptance", "sampling"},
    "lookup": {"costs", "drafting", "lookahead", "acceptance", "sampling"},
    "calibration": {"costs", "lookahead", "lm", "folders"},
    "tuning": {
        *("costs", "calibration", "shared_length", "lookup", "drafting", "lookahead", "lm"),
        "vocabulary_map",
    },
    "parallelism": {"calibration", "costs", "lm"},
    "text": {"lm"},
    "vocabulary": {"lm"},
    "workloads": {"lm"},
    "pairing": {"vocabulary", "vocabulary_map", "workloads", "lm"},
    "generation": {
        *("tuning", "speculation", "drafting", "lookahead", "coupling", "acceptance", "sampling"),
        *("lm", "text", "vocabulary"),
    },
    "parallel": {"generation", "drafting", "acceptance"},
    "parts": set(),
    "header": {"parts"},
    "memory": set(),
    "interrupts": set(),
    "placement": set(),
    "native": set(),
    "devices": {"native"},
    "llama": {"devices", "header", "interrupts", "native", "parts", "placement"},
    "estimate": {"devices", "header", "llama", "memory", "placement"},
    "processor": set(),
    "notes": {"devices", "llama", "placement", "processor"},
    "sources": {"folders", "parts"},
    "suggestions": set(),
    "tables": {"suggestions"},
    "registry": {"tables", "sources", "folders"},
    "pulled": {"sources", "folders", "parts"},
    "hub_errors": {"sources"},
    "own_registry": {"registry", "sources", "tables", "folders"},
    "hub_cache": {"hub_errors", "parts", "pulled", "sources"},
    "listing": {"hub_cache", "memory", "registry", "sources"},
    "hub": {"hub_cache", "hub_errors", "parts", "pulled", "sources"},
    "loading": {
        *("llama", "registry", "hub_cache", "sources", "folders", "vocabulary", "lm"),
        *("memory", "parallelism", "estimate", "header", "notes", "placement"),
        *("parts", "processor"),
        *("calibration", "tuning", "generation", "lookahead", "acceptance", "sampling"),
        *("pairing", "vocabulary_map"),
    },
    "explain": {"storage", "acceptance", "sampling"},
    "check": {
        *("estimate", "loading", "lookahead", "memory", "pairing", "placement", "vocabulary"),
    },
    "models": {
        *("check", "loading", "hub", "hub_cache", "hub_errors", "pulled", "own_registry"),
        *("listing", "registry", "sources", "parts"),
    },
    "replay": {"speculation", "drafting", "acceptance", "sampling", "lm"},
    "sampled_law": {
        *("speculation", "drafting", "coupling", "acceptance", "sampling", "lm"),
        "significance",
    },
    "tally": {"acceptance", "sampling"},
    "verify": {
        *("replay", "sampled_law", "tally", "workloads", "generation", "speculation", "drafting"),
        *("coupling", "acceptance", "sampling"),
    },
    "verify_report": {"verify", "replay", "sampled_law", "generation"},
    "bench": {"costs", "workloads", "generation", "lookahead", "sampling"},
    "bench_stand": {
        *("costs", "bench", "calibration", "tuning", "generation", "drafting", "lookup"),
        *("lookahead", "lm", "sampling"),
    },
    "comparison": {"costs", "bench", "bench_stand", "generation", "lookahead"},
    "__init__": {"loading", "generation", "acceptance", "sampling"},
    "bench_report": {
        *("storage", "costs", "bench", "bench_stand", "comparison", "loading", "__init__"),
    },
    "bench_plot": {"storage", "bench_report", "bench_stand", "comparison"},
    "thinking": set(),
    "markers": {"lm"},
    "templates": set(),
    "spoken": {"markers", "lm"},
    "prompts": {"spoken", "markers", "templates", "thinking"},
    "turns": {"prompts", "thinking", "generation", "lm"},
    "speakers": {"tuning", "generation", "drafting", "lookahead", "vocabulary", "lm"},
    "conversation": {"prompts", "turns", "speakers", "generation", "sampling"},
    "kv_files": {"storage", "generation", "lm"},
    "sessions": {"storage", "kv_files", "conversation", "prompts", "sampling", "__init__"},
    "device_options": {"devices", "placement"},
    "options": {"device_options", "loading", "generation", "sampling"},
    "answers": {"generation"},
    "provenance": {"generation"},
    "settings": {"options", "suggestions", "conversation"},
    "presentation": {"answers", "provenance", "thinking", "generation"},
    "chat": {"answers", "presentation", "sessions", "conversation", "prompts", "generation"},
    "commands": {"chat", "answers", "provenance", "sessions", "settings", "suggestions"},
    "terminal": {"provenance"},
    "cli_chat": {
        *("options", "commands", "chat", "presentation", "conversation", "prompts", "markers"),
        *("terminal", "folders", "sampling", "generation", "__init__"),
    },
    "batch_values": {"prompts"},
    "batch_rows": {"batch_values", "prompts", "suggestions", "sampling"},
    "batch_input": {"batch_values", "batch_rows"},
    "batch_lock": set(),
    "batch_output": {"batch_input", "batch_lock", "storage"},
    "batch_ledger": {"batch_output"},
    "batch_recipe": {"batch_rows", "batch_input", "batch_ledger"},
    "batch_records": {
        *("batch_values", "batch_rows", "batch_input", "batch_ledger", "answers", "parallel"),
    },
    "batch_progress": {"acceptance"},
    "batch_signals": set(),
    "batch": {
        *("batch_values", "batch_rows", "batch_input", "batch_output", "batch_ledger"),
        *("batch_recipe", "batch_records", "parallel", "generation", "acceptance", "prompts"),
    },
    "cli_batch": {
        *("batch", "batch_rows", "batch_input", "batch_output", "batch_ledger", "batch_progress"),
        *("batch_recipe", "batch_signals"),
        *("loading", "parallel", "parallelism", "generation", "prompts", "markers", "kv_files"),
        *("header", "commands", "lookahead", "options"),
    },
    "cli_bench": {
        *("workloads", "bench", "bench_stand", "comparison", "bench_report", "bench_plot"),
        "options",
    },
    "cli_models": {"listing", "models", "registry", "options"},
    "trial": {"calibration", "costs", "generation", "loading", "lookahead", "sampling", "tuning"},
    "privacy": set(),
    "doctor": {
        *("devices", "folders", "hub_cache", "listing", "memory", "native", "processor"),
        *("privacy", "registry"),
    },
    "doctor_table": set(),
    "cli_doctor": {"doctor", "doctor_table", "options", "trial"},
    "cli_verify": {"workloads", "verify", "verify_report", "options", "sampling"},
    "console": set(),
    "cli": {
        *("console", "interrupts"),
        *("explain", "check", "loading", "generation", "answers", "options", "cli_bench"),
        *("cli_batch", "cli_chat", "cli_doctor", "cli_models", "cli_verify", "__init__"),
    },
    "__main__": {"cli"},
}

# Who may import which package from outside the standard library.
OUTSIDE: dict[str, set[str]] = {
    "llama_cpp": {"native", "devices"},
    "huggingface_hub": {"hub", "hub_cache", "hub_errors"},
    "matplotlib": {"explain", "bench_plot"},
    "jinja2": {"templates"},
    "click": {
        *("cli", "cli_batch", "cli_bench", "cli_chat", "cli_models", "batch_progress"),
        *("cli_doctor", "device_options", "folders"),
        *("options", "terminal", "cli_verify"),
    },
    "tqdm": {"batch_progress"},
    "prompt_toolkit": {"terminal"},
    "tomlkit": {"own_registry"},
    "filelock": {"own_registry"},
    "numpy": set(ARROWS) - {
        *("errors", "registry", "answers", "options", "cli_bench", "cli", "__main__", "__init__"),
        *("significance", "cli_verify", "verify_report"),
    },
}


def imported_names(module: str) -> Iterator[str]:
    """Every dotted name that a module imports, wherever in it the import stands."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                assert node.level == 1, f"{module} imports from above the package"
                base = f"specllama.{base}".rstrip(".")
            # `from specllama import lm` names a module, `from specllama.lm import x` a content.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def own_imports(module: str) -> set[str]:
    """The modules of specllama that a module imports; the package itself is `__init__`."""
    parts = [name.split(".") for name in imported_names(module)]
    found = {[*part, ""][1] for part in parts if part[0] == "specllama"}
    return {name if name in MODULES else "__init__" for name in found}


def outside_imports(module: str) -> set[str]:
    tops = {name.split(".")[0] for name in imported_names(module)}
    return tops - {"specllama"} - sys.stdlib_module_names


def test_every_module_has_its_row() -> None:
    assert set(MODULES) - set(ARROWS) == set(), "add the new module's row to ARROWS"


def test_a_row_names_only_rows_above_it() -> None:
    above: set[str] = set()
    for module, allowed in ARROWS.items():
        assert allowed <= above, f"{module} points down to {allowed - above}"
        above.add(module)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_along_the_arrows(module: str) -> None:
    assert own_imports(module) - ARROWS[module] - {"errors"} == set()


def test_only_loading_joins_the_models_and_the_registry() -> None:
    users = [module for module in MODULES if {"llama", "registry"} <= own_imports(module)]
    assert users == ["loading"]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_uses_only_the_packages_that_are_its_business(module: str) -> None:
    for package in outside_imports(module):
        assert module in OUTSIDE.get(package, set()), f"{module} imports {package}"


def test_only_three_files_know_the_c_interface() -> None:
    users = []
    for module in MODULES:
        names = set(imported_names(module))
        if {"ctypes", "specllama.native.lib"} & names:
            users.append(module)
    assert users == ["devices", "llama", "native"]


HEAVY = ("llama_cpp", "huggingface_hub", "matplotlib", "prompt_toolkit", "jinja2")


def loaded_heavy_packages(code: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter holds after running the code."""
    report = "\nimport sys; print('\\nloaded:', *sys.modules)"
    command = [sys.executable, "-c", code + report]
    run = subprocess.run(
        command, cwd=PACKAGE.parent, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    loaded = run.stdout.splitlines()[-1].split()
    assert loaded[0] == "loaded:"
    return {name for name in loaded if name in HEAVY}


def test_importing_specllama_loads_nothing_heavy() -> None:
    assert loaded_heavy_packages("import specllama") == set()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["generate", "--help"], ["chat", "--help"]]
)
def test_asking_the_command_for_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
from specllama.cli import main
sys.argv = ["specllama", *{arguments!r}]
try:
    main()
except SystemExit as done:
    assert not done.code, done.code
"""
    assert loaded_heavy_packages(code) == set()


@pytest.mark.parametrize("package", HEAVY)
def test_a_heavy_package_that_is_loaded_is_noticed(package: str) -> None:
    assert package in loaded_heavy_packages(f"import {package}")
