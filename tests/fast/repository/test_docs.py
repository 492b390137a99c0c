"""Pages: blocks that no test runs say why; links lead somewhere; the generated reference is that of today."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT, pages

PAGES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md"))
NOT_RUN = {
    "CONTRIBUTING.md": [
        "sets up this directory",
        "a function among others",
        "a module of launchers/",
        "a class, and a method",
    ],
    "README.md": ["installs packages"],
    "SECURITY.md": ["needs two machines"],
    "docs/accelerated.md": ["tests/trainings does, with the example"],
    "docs/clusters.md": [*["needs Slurm"] * 4, "needs Open MPI"],
    "docs/core-api.md": ["tests/trainings does, and kills it"],
    "docs/distributed.md": ["needs two machines"],
    "docs/getting-started.md": ["installs packages"],
    "docs/moving.md": ["needs Determined's client"],
    "docs/trials.md": ["tests/trainings does, with the example", "a part of a class"],
}
"""Blocks of the pages that no test runs, in order."""


def test_reference_page_is_up_to_date() -> None:
    """In a process of its own: reading all docstrings leaves a large heap behind."""
    written = subprocess.run([sys.executable, ROOT / "docs" / "reference.py"], capture_output=True, text=True)
    assert written.returncode == 0, written.stderr
    assert pages.page("docs/reference.md") == written.stdout, "run `make docs`"


def test_blocks_without_run_give_reason() -> None:
    for name in (*PAGES, "README.md", "CONTRIBUTING.md", "SECURITY.md"):
        found = pages.blocks(name)
        assert [each.why_not_run for each in found if each.why_not_run] == NOT_RUN.get(name, [])


def test_every_file_on_a_page_is_used_by_its_commands() -> None:
    for name in (*PAGES, "README.md"):
        found = pages.blocks(name)
        for file in [each.name for each in found if each.name]:
            others = "".join(each.text for each in found if each.name != file)
            assert file in others or re.search(rf"\b{Path(file).stem}[: ]", others), f"{name}: {file}"


def _links() -> Iterator[tuple[str, str, str]]:
    """Return page, path and anchor of each link to a file of this repository."""
    texts = ("*.md", "docs/*.md", "examples/*/README.md", "llms.txt", "skills/*/SKILL.md")
    for path in [path for pattern in texts for path in ROOT.glob(pattern)]:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", path.read_text()):
            file, _, anchor = target.partition("#")
            yield str(path.relative_to(ROOT)), str((path.parent / file).resolve() if file else path), anchor


def test_links_lead_somewhere() -> None:
    links = list(_links())
    assert len(links) > 60
    for page, path, anchor in links:
        assert Path(path).exists(), f"{page}: {path}"
        assert not anchor or anchor in _anchors(Path(path).read_text()), f"{page}: {path}#{anchor}"


def test_skill_card_has_the_front_matter_of_the_open_format() -> None:
    """Of agentskills.io: a name of lower case that is its folder's, and a description of 1,024 characters at most."""
    (path,) = ROOT.glob("skills/*/SKILL.md")
    _, front, body = path.read_text().split("---\n", 2)
    entries = dict(line.split(": ", 1) for line in front.splitlines())
    assert entries["name"] == path.parent.name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entries["name"]) and len(entries["name"]) <= 64
    assert 0 < len(entries["description"]) <= 1024
    assert len(body.splitlines()) <= 200


def _anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "variable", sorted(set(re.findall(r"`(?:export )?((?:DET|PT_ACC)_[A-Z_]+)\b", "".join(map(pages.page, PAGES)))))
)
def test_every_variable_is_read_somewhere(variable: str) -> None:
    sources = [*ROOT.glob("det_core/**/*.py"), *ROOT.glob("launchers/**/*.py")]
    assert any(f'"{variable}"' in path.read_text() for path in sources)


def test_map_rooms_exist() -> None:
    text = pages.page("CONTRIBUTING.md")
    rooms = re.findall(r"`((?:det_core|examples|benchmarks|launchers|tests)/[\w/]*(?:\.py)?)`", text)
    assert len(rooms) >= 30
    to_be_written = {"det_core/search/_mine.py", "launchers/foo.py"}
    assert {room for room in rooms if not (ROOT / room).exists()} <= to_be_written
    named = re.findall(r"`(\w+)\(\)` in `([\w/]+\.py)`", text)
    assert len(named) >= 5
    assert all(f"def {function}(" in (ROOT / path).read_text() for function, path in named)
    assert all((ROOT / path).exists() for path in re.findall(r"pytest (tests/[\w/]+\.py)", text))
    assert all(f"\n{target}:" in pages.page("Makefile") for target in re.findall(r"`make ([\w-]+)`", text))


def test_architecture_names_what_exists() -> None:
    text = pages.page("docs/architecture.md")
    paths = re.findall(r"`(det_core/[\w/]+(?:\.py|/))`", text)
    assert len(paths) >= 30
    assert [path for path in paths if not (ROOT / path).exists()] == []
    rows = re.findall(r"^\| (?:\d+ \| )?(.*) \| (.*) \|$", text, re.M)
    named = re.findall(r"`(\w+)\(\)` in\s`([\w/]+\.py)`", text)
    module = ""
    for functions, where in rows:
        modules = re.findall(r"`([\w/]+\.py)`", where)
        module = modules[0] if modules else module
        named += [(function, module) for function in re.findall(r"`(\w+)\(\)`", functions) if module]
    assert len(named) >= 25
    assert [(name, path) for name, path in named if f"def {name}(" not in (ROOT / path).read_text()] == []


def test_protocol_has_every_section_that_the_source_cites() -> None:
    sections = set(re.findall(r"^#+ ([0-9]+(?:\.[0-9]+)?)\.? ", pages.page("docs/protocol.md"), re.M))
    sources = [*ROOT.glob("det_core/**/*.py"), *ROOT.glob("launchers/**/*.py")]
    pattern = r"(?:§ ?|\bsections? |wire contract,? )([0-9]+(?:\.[0-9]+)?)\b"
    cited = {number for path in sources for number in re.findall(pattern, path.read_text())}
    assert len(cited) > 30
    assert cited <= sections


def test_protocol_describes_every_route() -> None:
    from det_core.master.api._app import ROUTES

    names = {"trial_id": "T", "experiment_id": "E", "allocation_id": "A", "resources_id": "R", "task_id": "TASK"}
    names |= {"uuid": "UUID", "external_id": "ID"}
    described = set(re.findall(r"`(/[^`? ]+)", pages.page("docs/protocol.md")))
    routers = [router for routes in ROUTES for router in (routes.open, routes.user, routes.trial)]
    paths = {route.path for router in routers for route in router.routes}
    assert len(paths) > 50
    assert {re.sub(r"{(\w+)(:\w+)?}", lambda match: names[match[1]], path) for path in paths} <= described


def test_the_loop_is_one_of_twenty_lines_or_so() -> None:
    exact = pages.block("docs/core-api.md", "exact.py")
    loop = exact[exact.index("    for step in range(") :]
    assert 15 <= len(loop.splitlines()) <= 24
